"""Addresses of webhooks are encrypted in the database, whichever way they came there."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import select

from tests.services.recording import PROJECT
from watchstep.errors import ConfigError
from watchstep_rules.config.rule_config import RuleConfig, WebhookAction
from watchstep_services.core.settings import Settings, load_settings
from watchstep_services.db.encrypted_addresses import UNREADABLE, use_cipher
from watchstep_services.db.encryption import KEY_FILE, SecretBox, new_key, open_encrypted_database
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.models import Backtest, BacktestResult, Project, ReceiverRow, RuleConfigRow
from watchstep_services.db.schema import downgrade, upgrade
from watchstep_services.runs.registration import register
from watchstep_services.service.context import Service

ADDRESS = "https://hooks.example.com/services/T000/secret-path"
CONFIG = RuleConfig(rule="non_finite_values", actions=(WebhookAction(url=ADDRESS),))
RECEIVER = {"name": "hook", "kind": "webhook", "url": ADDRESS}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    return load_settings(home=home, store=str(tmp_path / "store"))


def fill(database: Database, settings: Settings) -> None:
    """A rule config of a run and a receiver, with the address."""
    upgrade(database)
    register(Service(settings, database, "http://service.test", (CONFIG,)), PROJECT, "run-1", (), "recorder")
    with database.write() as session:
        session.add(
            ReceiverRow(
                project=PROJECT, name="hook", kind="webhook", config=RECEIVER, written_ns=1, written_by="x"
            )
        )


def read(database: Database) -> tuple[Any, Any]:
    with database.read() as session:
        config = session.execute(select(RuleConfigRow.data)).scalar_one()
        return config["actions"][0]["url"], session.execute(select(ReceiverRow.config)).scalar_one()["url"]


def raw(database: Database) -> str:
    """What the tables hold."""
    with database.engine.connect() as connection:
        rows = [
            connection.execute(sa.text(f"SELECT CAST({column} AS TEXT) FROM {table}")).scalars().all()
            for table, column in (("rule_configs", "data"), ("receivers", "config"))
        ]
    return json.dumps([list(row) for row in rows])


def test_the_database_of_a_service_holds_no_address(settings: Settings) -> None:
    database = open_encrypted_database(settings)
    fill(database, settings)
    assert read(database) == (ADDRESS, ADDRESS)
    database.close()
    home = settings.home_folder
    for path in home.iterdir():
        assert b"secret-path" not in path.read_bytes(), path
    assert stat.S_IMODE((home / KEY_FILE).stat().st_mode) == 0o600
    again = open_encrypted_database(settings)
    assert read(again) == (ADDRESS, ADDRESS)
    again.close()


def test_addresses_in_clear_text_are_sealed_by_the_migration_and_opened_by_the_way_back(
    empty_database: Database, settings: Settings
) -> None:
    database = empty_database
    fill(database, settings)  # without a key: as an earlier version wrote them
    assert "secret-path" in raw(database)
    downgrade(database, "0018")
    use_cipher(database.engine.dialect, SecretBox(settings, new_key()))
    for _ in range(2):
        upgrade(database)
        assert "secret-path" not in raw(database)
        assert read(database) == (ADDRESS, ADDRESS)
        downgrade(database, "0018")
        assert raw(database).count("secret-path") == 2
    upgrade(database)


def test_the_migration_leaves_no_clear_text_in_a_file(settings: Settings) -> None:
    place = settings.home_folder / "watchstep.sqlite"
    database = open_database(f"sqlite:///{place}")
    fill(database, settings)
    downgrade(database, "0018")
    database.close()
    assert b"secret-path" in place.read_bytes()
    database = open_encrypted_database(settings)
    upgrade(database)
    assert read(database) == (ADDRESS, ADDRESS)
    database.close()
    assert b"secret-path" not in place.read_bytes()


def test_the_migration_takes_addresses_out_of_results_of_backtests(empty_database: Database) -> None:
    database = empty_database
    upgrade(database)
    result = {"attempts": [{"rules": [{"rule_config": CONFIG.as_data(), "found": 2}]}]}
    with database.write() as session:
        session.add(Project(name=PROJECT))
        session.flush()
        session.add(Backtest(id=1, project=PROJECT, runs=["run-1"], rules=[], sweeps=[], created_ns=1))
        session.flush()
        session.add(BacktestResult(backtest_id=1, place=0, result=result))
    downgrade(database, "0018")
    upgrade(database)
    with database.read() as session:
        (rule,) = session.execute(select(BacktestResult.result)).scalar_one()["attempts"][0]["rules"]
    assert rule["found"] == 2
    assert rule["rule_config"]["actions"][0]["url"] == "https://hooks.example.com/…"
    RuleConfig.model_validate(rule["rule_config"])


def test_a_lost_key_loses_the_address_and_not_the_rule(settings: Settings) -> None:
    database = open_encrypted_database(settings)
    fill(database, settings)
    database.close()
    (settings.home_folder / KEY_FILE).unlink()
    other = open_encrypted_database(settings)
    assert read(other) == (UNREADABLE, UNREADABLE)
    with other.read() as session:
        RuleConfig.model_validate(session.execute(select(RuleConfigRow.data)).scalar_one())
    other.close()


def test_a_key_of_the_settings_seals_and_that_of_the_home_still_opens(settings: Settings) -> None:
    database = open_encrypted_database(settings)
    fill(database, settings)
    database.close()
    with_key = load_settings(home=settings.home, store=settings.store, secret_key=new_key())
    database = open_encrypted_database(with_key)
    assert read(database) == (ADDRESS, ADDRESS)
    database.close()


def test_a_key_that_is_none_is_refused(settings: Settings) -> None:
    (settings.home_folder / KEY_FILE).write_text("x")
    with pytest.raises(ConfigError, match="not a valid key"):
        open_encrypted_database(settings)
