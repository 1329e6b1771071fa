"""Projects, their stores and backends."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from tests.services.driving import Driven
from tests.services.jobs import STUBBORN, eventually, launch
from tests.services.recording import PROJECT, Recording, damage_from, nan_from
from watchstep.errors import ConfigError
from watchstep.format.control import ControlDocument
from watchstep.reading.run_documents import read_journal
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle
from watchstep_launch.backends.local.backend import Local
from watchstep_rules.backtest.backtest import Replayed
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.db.models import RunRow
from watchstep_services.evaluation.backtests import judge_next, read_progress, request_backtest
from watchstep_services.evaluation.journal import unwritten, write_journal
from watchstep_services.retention import upkeep
from watchstep_services.runs.lifecycle import QUIET_NS, advance_run, health_of, quiet_since
from watchstep_services.runs.registration import RunOrigin, bind_job, discover_runs, register
from watchstep_services.tenancy import (
    ConflictError,
    StoreNotAllowedError,
    allow_backends,
    digest_of,
    find_project,
    move_project,
    places_of,
    register_backend,
    register_store,
    remove_store,
)

IDENTITY = {"cluster": "c", "name": "train-1", "submitted": 1000, "restarts": 0}


@pytest.fixture
def second(driven_sqlite: Driven, tmp_path: Path) -> Store:
    """The second store of the project, which has a run on the first one."""
    store = Store.open(tmp_path / "second", create=True)
    driven_sqlite.recording().begin()
    driven_sqlite.register()
    with driven_sqlite.service.database.write() as session:
        registered = register_store(session, "second", StoreRegistration(store.location))
        move_project(session, find_project(session, PROJECT), registered, "")
    return store


def test_nothing_of_a_run_is_on_the_store_of_new_runs(driven_sqlite: Driven, second: Store) -> None:
    driven = driven_sqlite.with_settings(compact_after_seconds=1e-9, originals_seconds=0.0)
    recording = driven_sqlite.recording()
    recording.write_all([9, 19], damage_from(15))
    run_id = driven.register()  # as a recorder does that names no store
    driven.discover(run_id)
    (stop,) = driven.actions(run_id)
    driven.dispatched(stop.id)
    assert ControlDocument.decode(recording.store.get("control.json")).stop is not None
    recording.end("completed", 19)
    driven.discover(run_id)
    driven.finish(stop.id)
    assert advance_run(driven.service, run_id) in {"completed", "stopped"}
    (due,) = unwritten(driven.service)
    assert write_journal(driven.service, due) == 1
    assert read_journal(recording.store, "a1")
    assert upkeep(driven.service) > 0
    assert recording.store.folders("compacted/")
    number = request_backtest(driven.service, PROJECT, ["*"], [RuleConfig(rule="non_finite_values")], [])
    assert not judge_next(driven.service, number)
    (result,) = read_progress(driven.service, PROJECT, number).results
    assert isinstance(result, Replayed)
    assert result.outcome.attempts[0].outcomes[0].fired[0].step == 15
    assert not list(second.entries(f"{PROJECT}/"))


def test_runs_are_found_on_each_store_and_a_name_is_that_of_one_run(
    driven_sqlite: Driven, folder_store: Store, second: Store, caplog: pytest.LogCaptureFixture
) -> None:
    service = driven_sqlite.service
    for store, run in ((folder_store, "on-first"), (second, "on-second"), (second, "run-1")):
        Recording(store, run).begin()
    found = [driven_sqlite.run(run_id).run for run_id in discover_runs(service)]
    assert sorted(found) == ["on-first", "on-second"]
    discover_runs(service)
    (warning,) = [record.getMessage() for record in caplog.records if "run-1" in record.getMessage()]
    assert f"run {PROJECT}/run-1 on {second.location} is not evaluated" in warning
    with service.database.read() as session:
        places = {row.run: row.place.location for row in session.query(RunRow)}
    assert places == {
        "run-1": folder_store.location,
        "on-first": folder_store.location,
        "on-second": second.location,
    }


def test_a_store_is_named_by_its_url_and_a_bucket_must_be_registered(
    driven_sqlite: Driven, folder_store: Store, second: Store, tmp_path: Path
) -> None:
    service = driven_sqlite.service

    def place(run: str, url: str) -> str:
        run_id = register(service, PROJECT, run, (), "recorder", RunOrigin(url))
        with service.database.read() as session:
            return session.get_one(RunRow, run_id).place.location

    assert place("a", Path(folder_store.location).as_uri()) == folder_store.location
    assert place("a", "") == folder_store.location
    assert place("b", f"{second.location}/") == second.location
    assert place("c", (tmp_path / "mounted elsewhere").as_uri()) == second.location
    assert place("a", (tmp_path / "mounted elsewhere").as_uri()) == folder_store.location
    with pytest.raises(StoreNotAllowedError, match="registered on store"):
        place("a", second.location)
    with pytest.raises(StoreNotAllowedError, match="'s3://of-others/x': not registered for project"):
        place("d", "s3://of-others/x")
    with pytest.raises(ConfigError):
        place("e", "ftp://host/x")
    database = service.database
    with database.write() as session, pytest.raises(ConflictError, match="in use by 1 projects"):
        remove_store(session, "second")
    with database.write() as session:
        first = places_of(session, PROJECT)[1].store
        move_project(session, find_project(session, PROJECT), first, "", moves_runs=True)
        remove_store(session, "second")
        assert [placed.place.location for placed in places_of(session, PROJECT)] == [folder_store.location]
    assert place("b", "") == folder_store.location


@pytest.mark.parametrize(
    ("ago", "evaluated_ago", "ended", "is_quiet", "is_problem"),
    [
        (29, None, False, False, False),
        (31, None, False, True, True),
        (31, None, True, False, False),
        (90, 10, False, False, False),
        (90, 40, False, True, False),
        (40, 90, False, True, True),  # it was evaluated before it was registered again
    ],
)
def test_a_run_is_quiet_if_nothing_of_it_was_evaluated_for_thirty_seconds(
    driven_sqlite: Driven, ago: int, evaluated_ago: int | None, ended: bool, is_quiet: bool, is_problem: bool
) -> None:
    run_id = driven_sqlite.register()
    now = 10_000 * NANOSECONDS
    driven_sqlite.change(
        RunRow,
        registered_ns=now - ago * NANOSECONDS,
        evaluated_ns=0 if evaluated_ago is None else now - evaluated_ago * NANOSECONDS,
        ended_ns=now if ended else None,
    )
    with driven_sqlite.service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        since = quiet_since(run, now)
        assert (since is not None, "not_evaluated" in health_of(run, now)) == (is_quiet, is_problem)
        assert since is None or now - since >= QUIET_NS


@pytest.mark.parametrize("url", ["s3://[", "/a\0b", "file:///a%00b", "http://a/b"])
def test_a_store_that_is_no_url_is_refused(driven_sqlite: Driven, url: str) -> None:
    with pytest.raises(ConfigError, match="store"):
        register(driven_sqlite.service, PROJECT, "run-9", (), "recorder", RunOrigin(url))


def test_a_named_folder_is_looked_up_while_others_may_write(
    driven_sqlite: Driven, folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = driven_sqlite.service
    (tmp_path / "link").symlink_to(folder_store.location)
    file = service.database.engine.url.database
    assert file is not None
    looked_up: list[str] = []
    realpath = os.path.realpath

    def slow(path: str | os.PathLike[str], *, strict: bool = False) -> str:
        looked_up.append(os.fspath(path))
        with sqlite3.connect(file, timeout=0) as connection:
            connection.execute("BEGIN IMMEDIATE")  # raises if a transaction waits for the disk
        return realpath(path, strict=strict)

    register(service, PROJECT, "run-7", (), "recorder", RunOrigin(str(tmp_path / "link")))
    monkeypatch.setattr(os.path, "realpath", slow)
    for number, url in enumerate((str(tmp_path / "link"), "/net/elsewhere/runs", folder_store.location)):
        register(service, PROJECT, f"run-{number}", (), "recorder", RunOrigin(url))
    assert looked_up == [str(tmp_path / "link"), "/net/elsewhere/runs", folder_store.location]


@pytest.mark.parametrize("name", ["box", "gpu-1"])
def test_a_job_on_a_backend_of_any_name_is_seen_and_stopped(
    driven: Driven, tmp_path: Path, name: str
) -> None:
    driven = driven.with_settings(grace_seconds=0.0)
    backend = driven.service.backends["local"]
    assert isinstance(backend, Local)
    recording, run_id = driven.begin(on_stop="ignore")
    with driven.service.database.write() as session:
        register_backend(session, name, "local", {})
        allow_backends(session, PROJECT, [name])
    job = launch(backend, tmp_path, STUBBORN)
    bind_job(driven.service, run_id, recording.attempt, replace(job, backend=name), "operator")
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    assert advance_run(driven.service, run_id) == "running"
    (action,) = driven.actions(run_id)
    assert driven.finish(action.id).state == "done"
    eventually(lambda: backend.status(job).state == "ended")
    assert [event["data"]["how"] for event in driven.events(run_id, "stop.done")] == ["killed"]
    assert advance_run(driven.service, run_id) == "stopped"


def test_a_job_that_slurm_started_again_is_the_same_and_another_is_not() -> None:
    job = digest_of("slurm", JobHandle("slurm", "7", IDENTITY))
    assert job == digest_of("slurm", JobHandle("gpus", "7", {**IDENTITY, "submitted": 2000, "restarts": 1}))
    assert job != digest_of("slurm", JobHandle("slurm", "8", IDENTITY))
    assert job != digest_of("slurm", JobHandle("slurm", "7", {**IDENTITY, "cluster": "d"}))
    assert job != digest_of("slurm", JobHandle("slurm", "7", {**IDENTITY, "name": "train-2"}))
