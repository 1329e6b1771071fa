from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import SecretStr

from watchstep.errors import ConfigError
from watchstep_services.channels.receiver import FromEnvironment, FromFile, read_secret
from watchstep_services.channels.receiver_file import (
    ReceiverFile,
    ReceiverFileProblem,
    check,
    load,
    schema_text,
)
from watchstep_services.core.settings import load_settings
from watchstep_services.db.encryption import SecretBox, new_key
from watchstep_services.service.context import owner_receivers

GOOD = """
receivers:
  - name: chat
    kind: slack
    url: {env: WATCHSTEP_RECEIVER_SLACK}
  - name: hook
    kind: webhook
    url: https://hooks.example/a
    secret: {file: /run/secrets/hook}
route:
  receiver: chat
  routes:
    - receiver: hook
      matchers: [severity="critical"]
      continue: true
"""


def faults(text: str) -> list[ReceiverFileProblem]:
    found = check(text)
    assert isinstance(found, list), found
    return found


def test_a_good_file_fits_its_schema() -> None:
    read = check(GOOD)
    assert isinstance(read, ReceiverFile)
    assert read.names == {"chat", "hook"}
    validator = jsonschema.Draft202012Validator(json.loads(schema_text()))
    validator.check_schema(validator.schema)
    validator.validate(yaml.safe_load(GOOD))
    assert not validator.is_valid({"receivers": [{"name": "x", "kind": "pager"}]})
    assert check("") == ReceiverFile()


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("kind: slack", "kind: slock", 3, "'slock'"),
        ("url: {env: WATCHSTEP_RECEIVER_SLACK}", "url: {env: HOME}", 5, "pattern"),
        (
            "url: {env: WATCHSTEP_RECEIVER_SLACK}",
            "url: https://hooks.slack.test/hunter2",
            5,
            "must not be in the file",
        ),
        ("url: https://hooks.example/a", "url: https://u:hunter2@hooks.example/a", 8, "credentials"),
        ("url: https://hooks.example/a", "url: https://hooks.example/a\n    uri: x", 9, "Extra inputs"),
        ("name: hook", "name: chat", 6, "duplicate receiver name 'chat'"),
        ("    - receiver: hook", "    - receiver: nobody", 13, "nobody"),
        ("continue: true", "matchers: []", 15, "duplicate key"),
        ('severity="critical"', "severity", 14, "not a matcher"),
        ("receivers:", "receivers: [", 3, "not YAML"),
    ],
)
def test_each_fault_has_its_line_and_repeats_no_secret(old: str, new: str, line: int, words: str) -> None:
    found = faults(GOOD.replace(old, new, 1))
    assert any(fault.line == line and words in fault.text for fault in found), found
    assert "hunter2" not in str(found)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "receivers.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path)
    path.write_text(GOOD.replace("slack", "slock", 1), encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3"):
        load(path)


def test_secrets_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "secret"
    place.write_text(" hunter2\n", encoding="utf-8")
    assert read_secret("url", FromFile(file=str(place))) == "hunter2"
    monkeypatch.setenv("WATCHSTEP_RECEIVER_X", "hunter3")
    assert read_secret("url", FromEnvironment(env="WATCHSTEP_RECEIVER_X")) == "hunter3"
    for missing in (FromFile(file=str(tmp_path / "no")), FromEnvironment(env="WATCHSTEP_RECEIVER_Y")):
        with pytest.raises(ConfigError, match="secret 'url'"):
            read_secret("url", missing)


def encrypted_by(*keys: str) -> SecretBox:
    return SecretBox(load_settings(secret_key=SecretStr(",".join(keys))))


def test_a_seal_opens_at_its_place_and_with_its_keys() -> None:
    old, new = new_key(), new_key()
    encrypted = encrypted_by(old).encrypt("vision/hook/secret", "hunter2")
    assert "hunter2" not in encrypted
    assert encrypted_by(old).decrypt("vision/hook/secret", encrypted) == "hunter2"
    assert encrypted_by(new, old).decrypt("vision/hook/secret", encrypted) == "hunter2"
    with pytest.raises(ConfigError, match="encrypted with another key"):
        encrypted_by(new).decrypt("vision/hook/secret", encrypted)
    with pytest.raises(ConfigError, match="encrypted for vision/hook/secret"):
        encrypted_by(old).decrypt("text/hook/secret", encrypted)


def test_a_key_that_is_none_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_SECRET_KEY", "hunter2")
    settings: Any = load_settings()
    assert "hunter2" not in repr(settings)
    with pytest.raises(ConfigError, match="WATCHSTEP_SECRET_KEY: not a valid key") as raised:
        SecretBox(settings)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("setting", [{"secret_key": "hunter2"}, {"allowed_addresses": "10.0.0.1/8"}])
def test_settings_that_cannot_be_used_are_told_at_the_start(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="WATCHSTEP_"):
        owner_receivers(load_settings(**setting))
