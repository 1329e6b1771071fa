"""The receivers file, and its routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from watchstep.errors import ConfigError
from watchstep_services.channels.receiver import FromEnvironment, FromFile, read_secret
from watchstep_services.channels.receiver_file import (
    ReceiverFile,
    ReceiverFileProblem,
    check,
    load,
    schema_text,
)
from watchstep_services.channels.routing import Matcher, RootNode, parse_matcher, routes_for
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
TREE = {
    "receiver": "all",
    "group_wait": "30s",
    "routes": [
        {"receiver": "audit", "matchers": ['severity=~"warning|critical"'], "continue": True},
        {
            "receiver": "oncall",
            "matchers": ['severity="critical"'],
            "group_by": ["..."],
            "group_wait": 0,
            "routes": [{"receiver": "vision", "matchers": ["team=vision"], "repeat_interval": "1h30m"}],
        },
        {"matchers": ['rule!="non_finite_values"'], "receiver": "rest", "send_resolved": False},
    ],
}


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


def reached(tree: dict[str, Any], *notify: str, **labels: str) -> list[str]:
    return [route.receiver for route in routes_for(RootNode.model_validate(tree), labels, notify)]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ({"severity": "critical", "team": "vision"}, ["audit", "vision"]),
        ({"severity": "critical", "team": "text"}, ["audit", "oncall"]),
        ({"severity": "critical"}, ["audit", "oncall"]),
        ({"severity": "warning", "rule": "overfit"}, ["audit", "rest"]),
        ({"severity": "warning", "rule": "non_finite_values"}, ["audit"]),
        ({"severity": "info", "rule": "non_finite_values"}, ["all"]),
        ({"severity": "criticals", "rule": "non_finite_values"}, ["all"]),
    ],
)
def test_the_first_that_matches_takes_it(labels: dict[str, str], names: list[str]) -> None:
    assert reached(TREE, **labels) == names


def test_what_a_node_does_not_say_is_its_parents() -> None:
    tree = RootNode.model_validate(TREE)
    _, vision = routes_for(tree, {"severity": "critical", "team": "vision"})
    assert (vision.group_by, vision.group_wait, vision.repeat_interval) == (("...",), 0.0, 5400.0)
    assert vision.group_labels({"b": "2", "a": "1"}) == {"a": "1", "b": "2"}
    (rest,) = routes_for(tree, {"rule": "overfit", "run": "run-1"})
    assert (rest.group_wait, rest.send_resolved) == (30.0, False)
    assert rest.group_labels({"rule": "overfit", "run": "run-1"}) == {"run": "run-1"}


def test_a_receiver_that_a_rule_names_is_reached_once() -> None:
    assert reached(TREE, "oncall", "mine", "mine", severity="critical") == ["audit", "oncall", "mine"]
    (mine,) = routes_for(RootNode(group_wait=3), {}, ["mine"])
    assert (mine.receiver, mine.group_wait) == ("mine", 3.0)
    assert reached({}) == []


def test_two_routes_to_one_receiver_have_places_of_their_own() -> None:
    tree = {"routes": [{"receiver": "a", "continue": True}, {"receiver": "a"}]}
    places = [route.place for route in routes_for(RootNode.model_validate(tree), {})]
    assert len(set(places)) == 2


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"matchers": ["a=b"]}, "the root takes every alert"),
        ({"routes": [{"matchers": ["a"]}]}, "not a matcher"),
        ({"routes": [{"matchers": ['a=~"("']}]}, "not a valid regular expression"),
        ({"group_wait": "soon"}, "not a duration"),
        ({"repeat_interval": 0}, "greater than 0"),
        ({"receiver": "a b"}, "pattern"),
        ({"route": []}, "Extra inputs"),
        ({"routes": [{}] * 501}, "500"),
    ],
)
def test_what_cannot_be_a_tree_is_told(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RootNode.model_validate(tree)


def test_a_tree_has_a_bound_on_its_depth() -> None:
    tree: dict[str, Any] = {}
    for _ in range(16):
        tree = {"routes": [tree]}
    with pytest.raises(ValidationError, match="16 levels"):
        RootNode.model_validate(tree)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.sampled_from(["=", "!="]))
def test_a_matcher_is_read_as_it_is_written(value: str, operator: Any) -> None:
    matcher = Matcher("team", operator, value)
    assert parse_matcher(str(matcher)) == matcher
    assert matcher.matches({"team": value}) == (operator == "=")
    assert matcher.matches({}) == ((value == "") == (operator == "="))


def test_a_tree_is_read_as_it_is_written() -> None:
    tree = RootNode.model_validate(TREE)
    assert RootNode.model_validate(tree.as_data()) == tree
    assert tree.receivers() == {"all", "audit", "oncall", "vision", "rest"}
