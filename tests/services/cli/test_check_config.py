"""``watchstep check-config`` and ``watchstep database``, with real databases, a real Redis and a real worker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery

from tests.services.driving import make_service
from tests.services.postgres import Postgres
from tests.services.redis import Broker, running_redis
from watchstep.errors import ConfigError
from watchstep.store.store import Store
from watchstep_services.checks import check_queues
from watchstep_services.cli.main import app
from watchstep_services.core.settings import known_variables, load_settings, unknown_variables
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.models import Project
from watchstep_services.db.schema import downgrade, prepare, status, upgrade
from watchstep_services.runs.registration import register
from watchstep_services.scheduler.celery_client import QUEUE, URGENT
from watchstep_services.tenancy import own_store


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_redis() as server:
        yield server


def ran(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app(list(words))
    return int(str(ended.value.code or 0))


def checks(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    code = ran("check-config", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (code == 0)
    return code, {each["what"]: each for each in answer["checks"]}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, folder_store: Store, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("WATCHSTEP_STORE", folder_store.location)
    monkeypatch.setenv("WATCHSTEP_HOME", str(tmp_path / "home"))
    return monkeypatch


@pytest.mark.ci
def test_a_valid_configuration(
    environment: pytest.MonkeyPatch, postgres: Postgres, broker: Broker, folder_store: Store,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with postgres.new_database() as url:
        database = open_database(url)
        upgrade(database)
        database.close()
        environment.setenv("WATCHSTEP_DATABASE_URL", url)
        environment.setenv("WATCHSTEP_BROKER_URL", broker.url)
        code, found = checks(capsys)
        assert (code, {each["state"] for each in found.values()}) == (0, {"ok"})
        assert found["database rights"]["detail"] == "read, write, create tables"
        assert f"store {folder_store.location}" in found
        assert not [entry.key for entry in folder_store.entries()]
        assert not broker.client.keys("watchstep-probe-*")
        assert ran("check-config") == 0
        assert "put, get, list and delete succeeded" in capsys.readouterr().out


def test_the_own_store_is_checked_once_and_others_by_project(
    environment: pytest.MonkeyPatch, sqlite: Database, folder_store: Store, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    environment.setenv("WATCHSTEP_DATABASE_URL", str(sqlite.engine.url))
    service = make_service(sqlite, folder_store)
    for project in ("audio", "vision"):
        register(service, project, "run-1", (), "recorder")
    other = Store.open(str(tmp_path / "other"), create=True).location
    with sqlite.write() as session:
        row = own_store(session, other)
        session.get_one(Project, "vision").placed.store_id = row.id
    ran("check-config", "--json")
    tried = [each["what"] for each in json.loads(capsys.readouterr().out)["checks"]]
    stores = [what for what in tried if what.startswith("store ")]
    assert stores == [f"store {folder_store.location}", f"store {other} of project vision"]


def test_all_problems_are_reported_together(
    environment: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("WATCHSTEP_DATABASE_URL", "postgresql://me:hunter2@127.0.0.1:1/none")
    environment.setenv("WATCHSTEP_BROKER_URL", "redis://:hunter2@127.0.0.1:1/0")
    environment.setenv("WATCHSTEP_STORE", str(tmp_path / "absent"))
    environment.setenv("WATCHSTEP_RULES_FILE", str(tmp_path / "absent.yaml"))
    environment.setenv("WATCHSTEP_SWEEP_SECOND", "1")
    code, found = checks(capsys)
    assert code == 1
    assert {name for name, each in found.items() if each["state"] == "failed"} == {
        "database", "broker 127.0.0.1:1/0", f"store {tmp_path / 'absent'}", "rules", "variable WATCHSTEP_SWEEP_SECOND",
    }  # fmt: skip
    assert all(each["hint"] for each in found.values() if each["state"] == "failed")
    assert "WATCHSTEP_SWEEP_SECONDS" in found["variable WATCHSTEP_SWEEP_SECOND"]["hint"]
    assert "hunter2" not in json.dumps(found)


@pytest.mark.ci
def test_missing_rights_are_reported(
    environment: pytest.MonkeyPatch, postgres: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    with postgres.new_database() as url:
        database = open_database(url)
        upgrade(database)
        with database.engine.begin() as connection:
            connection.exec_driver_sql("DROP ROLE IF EXISTS weak")
            connection.exec_driver_sql("CREATE ROLE weak LOGIN")
            connection.exec_driver_sql("GRANT SELECT ON ALL TABLES IN SCHEMA public TO weak")
        database.close()
        weak = sa.make_url(url).set(username="weak").render_as_string(hide_password=False)
        environment.setenv("WATCHSTEP_DATABASE_URL", weak)
        environment.setenv("WATCHSTEP_MIGRATE", "never")
        code, found = checks(capsys)
        assert code == 1
        assert "INSERT" in found["database rights"]["detail"]
        assert found["database schema"]["state"] == "ok"
        environment.setenv("WATCHSTEP_MIGRATE", "at_start")
        assert "CREATE" in checks(capsys)[1]["database rights"]["hint"]


def test_the_schema_is_shown_upgraded_and_downgraded(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("database", "status") == 1
    assert "schema none" in capsys.readouterr().out
    assert checks(capsys)[1]["database schema"]["state"] == "warning"
    assert ran("database", "upgrade") == 0
    assert "up to date" in capsys.readouterr().out
    assert ran("database", "status") == 0
    assert ran("database", "downgrade", "base", "--yes") == 0
    assert "schema none" in capsys.readouterr().out
    environment.setenv("WATCHSTEP_MIGRATE", "never")
    assert checks(capsys)[1]["database schema"]["state"] == "failed"
    with pytest.raises(ConfigError, match="revision '9999'"):
        app(["database", "upgrade", "9999"])


@pytest.mark.ci
def test_processes_upgrade_the_schema_or_refuse_to_start(empty_database: Database) -> None:
    with pytest.raises(ConfigError, match="watchstep database upgrade"):
        prepare(empty_database, load_settings(migrate="never"))
    prepare(empty_database, load_settings())
    assert status(empty_database).is_current
    prepare(empty_database, load_settings(migrate="never"))
    with empty_database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(ConfigError, match="newer than this version"):
        prepare(empty_database, load_settings())
    newest = status(empty_database).newest
    with empty_database.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{newest}'")
    downgrade(empty_database)
    assert not status(empty_database).is_current


def test_unknown_settings_are_reported() -> None:
    names = [
        "WATCHSTEP_SORE", "WATCHSTEP_STORE", "watchstep_home", "PATH", "WATCHSTEP_SOMETHING_ELSE", "WATCHSTEP_RECEIVER_X",
        "WATCHSTEP_API_SERVICE_HOST", "WATCHSTEP_API_PORT_80_TCP_ADDR", "WATCHSTEP_TOKEN",
    ]  # fmt: skip
    assert dict(unknown_variables(names)) == {
        "WATCHSTEP_SOMETHING_ELSE": "",
        "WATCHSTEP_SORE": "WATCHSTEP_STORE",
    }


def test_every_variable_of_the_recorder_is_known() -> None:
    from docs.tables import recorder_variables

    assert set(recorder_variables()) <= known_variables()


def test_production_processes_report_missing_settings(environment: pytest.MonkeyPatch) -> None:
    for command in ("api", "worker", "scheduler"):
        with pytest.raises(ConfigError, match="WATCHSTEP_BROKER_URL is not set"):
            app([command])


@contextmanager
def worker_of_one_queue(broker: Broker, folder: Path) -> Iterator[None]:
    """A worker that knows of the queue of all alone, as those of an earlier version."""
    words = ["-m", "celery", "--broker", broker.url, "worker", "--pool", "solo", "--queues", QUEUE]
    log = folder / "worker.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *words, "--loglevel", "ERROR"], cwd=folder, stdout=said, stderr=said
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def found(broker: Broker) -> dict[str, tuple[str, str]]:
    checks = check_queues(load_settings(broker_url=broker.url))
    return {each.what: (each.state, each.detail) for each in checks}


def eventually(broker: Broker, expected: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """What is found once it is that, or after a minute."""
    deadline = time.monotonic() + 60
    while (seen := found(broker)) != expected and time.monotonic() < deadline:
        pass
    return seen


@pytest.mark.ci
def test_a_queue_without_workers_is_reported(broker: Broker, tmp_path: Path) -> None:
    assert list(check_queues(load_settings(broker_url=""))) == []
    assert found(broker) == {
        f"queue {QUEUE}": ("ok", "empty; no worker responds"),
        f"queue {URGENT}": ("ok", "empty; no worker responds"),
    }
    broker.client.lpush(URGENT, "stop", "stop")
    assert found(broker)[f"queue {URGENT}"] == ("warning", "2 waiting, and no worker responds")
    with worker_of_one_queue(broker, tmp_path):
        expected = {
            f"queue {QUEUE}": ("ok", "0 waiting, 1 worker"),
            f"queue {URGENT}": ("warning", "2 waiting, and no worker consumes the queue"),
        }
        assert eventually(broker, expected) == expected
        broker.client.delete(URGENT)
        with Celery(broker=broker.url) as celery:
            celery.control.add_consumer(URGENT)
        expected[f"queue {URGENT}"] = ("ok", "0 waiting, 1 worker")
        assert eventually(broker, expected) == expected


@pytest.mark.ci
def test_an_unreachable_broker_is_reported() -> None:
    (seen,) = check_queues(load_settings(broker_url="redis://127.0.0.1:1/0"))
    assert (seen.what, seen.state) == ("queues", "failed")
    assert seen.hint
