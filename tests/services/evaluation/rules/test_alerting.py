"""What becomes of an alert: events, actions, and what is said of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import update

from tests.services.driving import Driven, make_service
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.engine import Database
from watchstep_services.db.models import AlertRow, RuleStateRow

HOOK = "https://chat.example.com/hook"


def ill(step: int, name: str) -> float:
    """The loss is NaN at steps 41 to 44, and the second layer's gradient huge from 42 to 47."""
    if name == "loss" and 41 <= step <= 44:
        return math.nan
    return 1e6 if 42 <= step <= 47 and name.startswith("second") else 1.0


def driven_by(database: Database, store: Store, *rules: dict[str, Any]) -> tuple[Driven, int]:
    driven = Driven(make_service(database, store, [RuleConfig.model_validate(rule) for rule in rules]))
    return driven, driven.register()


def told(driven: Driven, run_id: int) -> list[tuple[str, str, int, str | None]]:
    """(rule, phase, step, inhibited by) of all events of alerts, in order of steps."""
    return sorted(
        (
            (data["rule_config"]["name"], data["phase"], data["step"], data["inhibited_by"])
            for data in (event["data"] for event in driven.events(run_id))
            if "rule_config" in data
        ),
        key=lambda line: (line[2], line[0]),
    )


def test_an_event_says_what_was_seen_and_what_to_try(sqlite: Database, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    driven, run_id = driven_by(
        sqlite,
        folder_store,
        {
            "rule": "non_finite_values",
            "severity": "critical",
            "labels": {"team": "vision"},
            "message": "{label.team}: {run} has {message} since {since_step}",
            "actions": [{"notify": "ml-oncall"}],
        },
    )
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    _started, event = driven.events(run_id)
    data = event["data"]
    assert data["message"] == "vision: run-1 has 1 NaN among 1 elements of loss, 0 tolerated since 5"
    assert (data["labels"], data["notify"], data["dry_run"]) == ({"team": "vision"}, ["ml-oncall"], False)
    explanation = data["explanation"]
    assert explanation["title"] == "non_finite_values (critical) firing at step 5"
    assert explanation["seen"] == data["finding"]["message"]
    assert explanation["where"] == "loss: a loss; worker 0, mode train"
    assert explanation["usual_causes"]
    assert explanation["what_to_try"]
    with driven.service.database.read() as session:
        (row,) = session.query(AlertRow).all()
        assert row.details is not None
        assert row.details == {name: data[name] for name in row.details}


def test_a_dry_run_is_shown_and_does_nothing(sqlite: Database, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    rule = {"rule": "non_finite_values", "dry_run": True, "actions": ["stop", {"webhook": HOOK}]}
    driven, run_id = driven_by(sqlite, folder_store, rule)
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"
    _started, firing, would_have = (event["data"] for event in driven.events(run_id))
    assert (firing["dry_run"], would_have["because"]) == (True, "dry_run")
    assert driven.actions(run_id) == []


@pytest.mark.parametrize("ends", [[60], list(range(1, 61, 2)), [41, 43, 46, 60]], ids=str)
def test_what_follows_from_another_alert_is_told_when_that_is_over(
    sqlite: Database, folder_store: Store, ends: Sequence[int]
) -> None:
    recording = Recording(folder_store).begin()
    recording.write_all(ends, ill)
    driven, run_id = driven_by(
        sqlite,
        folder_store,
        {"rule": "non_finite_values", "inhibits": ["exploding_gradient"]},
        {"rule": "exploding_gradient", "actions": ["stop", {"webhook": HOOK}]},
    )
    for key in recording.written["w0"]:
        driven.announce(run_id, key)
        driven.settle(run_id)
    assert told(driven, run_id) == [
        ("non_finite_values", "firing", 41, None),
        ("exploding_gradient", "firing", 42, "non_finite_values"),
        ("exploding_gradient", "firing", 45, None),
        ("non_finite_values", "resolved", 45, None),
        ("exploding_gradient", "resolved", 48, None),
    ]
    assert [action.kind for action in driven.actions(run_id)] == ["webhook", "stop", "webhook"]


def test_what_is_over_before_it_is_told_is_never_told(sqlite: Database, folder_store: Store) -> None:
    def lasting(step: int, name: str) -> float:
        return math.nan if name == "loss" and step >= 41 else ill(step, name)

    recording = Recording(folder_store).begin()
    recording.write_all([42, 60], lasting)
    driven, run_id = driven_by(
        sqlite,
        folder_store,
        {"rule": "non_finite_values", "inhibits": ["exploding_gradient"]},
        {"rule": "exploding_gradient", "actions": ["stop", {"webhook": HOOK}]},
    )
    driven.announce(run_id, *recording.written["w0"])
    driven.settle(run_id)
    assert told(driven, run_id)[1:] == [
        ("exploding_gradient", "firing", 42, "non_finite_values"),
        ("exploding_gradient", "resolved", 48, "non_finite_values"),
    ]
    assert driven.actions(run_id) == []


def test_who_records_keeps_no_rule_of_the_owner_quiet(sqlite: Database, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    driven, _ = driven_by(sqlite, folder_store, {"rule": "exploding_gradient", "actions": ["stop"]})
    asked = RuleConfig(rule="non_finite_values", inhibits=("exploding_gradient",))
    run_id = driven.register(rules=[asked])
    driven.announce(run_id, recording.write(0, 0, 60, ill))
    driven.settle(run_id)
    assert ("exploding_gradient", "firing", 42, None) in told(driven, run_id)
    assert [action.kind for action in driven.actions(run_id)] == ["stop"]


@pytest.mark.parametrize("key", ["finding_streaks", "unknown"])
def test_a_memory_that_cannot_be_read_begins_anew(sqlite: Database, folder_store: Store, key: str) -> None:
    recording = Recording(folder_store).begin()
    driven, run_id = driven_by(sqlite, folder_store, {"rule": "non_finite_values"})
    driven.announce(run_id, recording.write(0, 0, 3))
    driven.settle(run_id)
    with driven.service.database.write() as session:
        session.execute(update(RuleStateRow).values(state=json.dumps({"alert": {key: {"loss@0/train": 3}}})))
    driven = driven.restarted()  # the process that wrote it knows what it wrote
    driven.announce(run_id, recording.write(1, 4, 7, nan_from(5)))
    driven.settle(run_id)
    assert driven.alerts(run_id)["non_finite_values"][:2] == ("firing", 5)
