"""Encrypted addresses, and keys that are derived."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import SecretStr
from sqlalchemy import select

from tests.services.recording import PROJECT
from watchstep.errors import ConfigError
from watchstep_rules.config.rule_config import RuleConfig, WebhookAction
from watchstep_services.core.settings import Settings, load_settings
from watchstep_services.db.encrypted_addresses import UNREADABLE
from watchstep_services.db.encryption import KEY_FILE, derived_keys, new_key, open_encrypted_database
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ReceiverRow, RuleConfigRow
from watchstep_services.db.schema import upgrade
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


def test_keys_follow_from_the_services_keys_and_the_purpose(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    settings = load_settings(home=tmp_path, database_url=SecretStr("postgresql://u@h/d"))
    assert derived_keys(settings, "a") == ()
    (before,) = derived_keys(settings.model_copy(update={"secret_key": SecretStr(old)}), "a")
    both = settings.model_copy(update={"secret_key": SecretStr(f"{new}, {old}")})
    after, kept = derived_keys(both, "a")
    assert kept == before != after
    assert {len(key) for key in (before, after)} == {32}
    assert not set(derived_keys(both, "a")) & set(derived_keys(both, "b"))


def test_the_key_of_the_home_is_one_of_them(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path)
    (first,) = derived_keys(settings, "a")
    assert derived_keys(settings, "a") == (first,)
    assert (tmp_path / "secret.key").exists()
    assert derived_keys(load_settings(home=tmp_path / "none"), "a") == ()
