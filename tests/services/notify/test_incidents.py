"""Alerts of one incident: one notification, unless one of them is more severe than what was told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import select

from tests.services.driving import Driven
from tests.services.recording import NAN, Recording, Value
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, AlertRow, Incident, Muted
from watchstep_services.notify.flush import flush_due

HOUR_NS = 3600 * 10**9


def watched(driven: Driven, severities: dict[str, str], **route: Any) -> Driven:
    """A service that looks for NaN in each of these tensors, by a rule of its own with that severity."""
    rules = [
        {
            "rule": "non_finite_values",
            "name": f"of_{name.partition('.')[0]}",
            "tensors": {"include": f"^{name}$"},
            "severity": severity,
        }
        for name, severity in severities.items()
    ]
    asked = {
        "receivers": [{"name": "ops", "kind": "webhook", "url": "https://chat.example.com/"}],
        "route": {"receiver": "ops", "group_wait": 0, "group_interval": 0, "repeat_interval": 3600, **route},
    }
    service = replace(
        driven.service,
        receiver_file=ReceiverFile.model_validate(asked),
        owner_rules=tuple(RuleConfig.model_validate(rule) for rule in rules),
    )
    return Driven(service)


def nan_in(**begins: int) -> Value:
    """NaN in tensors from a step on."""
    return lambda step, name: NAN if step >= begins.get(name.partition(".")[0], 1 << 30) else 1.0


def record(
    driven: Driven, recording: Recording, run_id: int, seq: int, steps: tuple[int, int], value: Value
) -> None:
    driven.judge(run_id, recording.write(seq, *steps, value))
    flush_due(driven.service)


def notifications(driven: Driven, run_id: int) -> list[dict[str, Any]]:
    return [action.payload["notification"] for action in driven.actions(run_id, "notify")]


def incidents(driven: Driven) -> list[tuple[int, int, tuple[str, ...]]]:
    with driven.service.database.read() as session:
        rows = session.execute(select(Incident).order_by(Incident.first_step)).scalars()
        return [(row.first_step, row.last_step, tuple(row.summary["alerts"])) for row in rows]


def test_an_incident_is_notified_once_and_the_next_notification_names_all_of_it(
    driven_sqlite: Driven,
) -> None:
    driven = watched(driven_sqlite, {"loss": "warning", "first.weight:gradient": "warning"})
    recording, run_id = driven.begin()
    record(driven, recording, run_id, 0, (0, 7), nan_in(loss=5))
    record(driven, recording, run_id, 1, (8, 15), nan_in(loss=5, first=9))
    (told,) = notifications(driven, run_id)
    assert [alert["name"] for alert in told["alerts"]] == ["of_loss"]
    assert incidents(driven) == [(5, 9, ("of_loss", "of_first"))]
    with driven.service.database.read() as session:
        keys = {
            row.incident
            for row in (
                *session.execute(select(AlertRow)).scalars(),
                *session.execute(select(AlertInstanceRow)).scalars(),
            )
        }
        (key,) = session.execute(select(Incident.key)).scalars()
        assert keys == {key}
        assert {
            (row.receiver, row.reason, row.detail) for row in session.execute(select(Muted)).scalars()
        } == {("ops", "incident", key)}
    said = [
        event["data"]["incident"]["alerts"] for event in driven.events(run_id) if "incident" in event["data"]
    ]
    assert said == [["of_loss"], ["of_loss", "of_first"]]
    with driven.service.database.write() as session:
        group = session.execute(select(AlertGroup)).scalar_one()
        group.notified_ns -= HOUR_NS
        group.due_ns = 0
    flush_due(driven.service)
    repeated = notifications(driven, run_id)[1]
    assert [alert["name"] for alert in repeated["alerts"]] == ["of_loss", "of_first"]
    assert repeated["alerts"][0]["incident"]["cause"] == "of_loss"


def test_a_more_severe_alert_of_an_incident_is_notified_and_does_not_wait_for_the_interval(
    driven_sqlite: Driven,
) -> None:
    driven = watched(
        driven_sqlite, {"loss": "warning", "first.weight:gradient": "critical"}, group_interval=3600
    )
    recording, run_id = driven.begin()
    record(driven, recording, run_id, 0, (0, 7), nan_in(loss=5))
    record(driven, recording, run_id, 1, (8, 15), nan_in(loss=5, first=9))
    first, second = notifications(driven, run_id)
    assert [alert["name"] for alert in first["alerts"]] == ["of_loss"]
    assert {alert["name"]: alert["severity"] for alert in second["alerts"]} == {
        "of_loss": "warning",
        "of_first": "critical",
    }


def test_what_begins_far_from_an_incident_is_notified(driven_sqlite: Driven) -> None:
    driven = watched(driven_sqlite, {"loss": "warning", "first.weight:gradient": "warning"})
    recording, run_id = driven.begin()
    record(driven, recording, run_id, 0, (0, 7), nan_in(loss=5))
    record(driven, recording, run_id, 1, (8, 80), nan_in(loss=5, first=70))
    assert len(notifications(driven, run_id)) == 2
    assert incidents(driven) == [(5, 5, ("of_loss",)), (70, 70, ("of_first",))]


def test_an_earlier_onset_that_comes_later_moves_the_incident(driven_sqlite: Driven) -> None:
    driven = watched(driven_sqlite, {"loss": "warning"})
    recording, run_id = driven.begin(world_size=2)
    driven.judge(run_id, recording.write(0, 0, 7, nan_in(loss=5), worker=1))
    assert incidents(driven) == [(5, 5, ("of_loss",))]
    driven.judge(run_id, recording.write(0, 0, 7, nan_in(loss=3), worker=0))
    assert incidents(driven) == [(3, 3, ("of_loss",))]


def test_what_a_recorder_asks_for_belongs_to_no_incident(driven_sqlite: Driven) -> None:
    driven = watched(driven_sqlite, {"first.weight:gradient": "warning"})
    recording = driven_sqlite.recording().begin()
    own = RuleConfig.model_validate(
        {"rule": "non_finite_values", "name": "own", "tensors": {"include": "^loss$"}, "severity": "critical"}
    )
    run_id = driven.register(rules=[own])
    record(driven, recording, run_id, 0, (0, 7), nan_in(loss=5))
    record(driven, recording, run_id, 1, (8, 15), nan_in(loss=5, first=9))
    assert len(notifications(driven, run_id)) == 2
    assert incidents(driven) == [(9, 9, ("of_first",))]


def test_a_note_of_severity_info_notifies_nobody_and_belongs_to_no_incident(driven_sqlite: Driven) -> None:
    driven = watched(driven_sqlite, {"loss": "info", "first.weight:gradient": "warning"})
    recording, run_id = driven.begin()
    record(driven, recording, run_id, 0, (0, 7), nan_in(loss=5))
    assert notifications(driven, run_id) == []
    assert incidents(driven) == []
    # Within 50 steps of the note: what begins then is an incident of its own.
    record(driven, recording, run_id, 1, (8, 15), nan_in(loss=5, first=9))
    (told,) = notifications(driven, run_id)
    assert [alert["name"] for alert in told["alerts"]] == ["of_first"]
    assert incidents(driven) == [(9, 9, ("of_first",))]
    record(driven, recording, run_id, 2, (16, 23), nan_in())
    assert [alert["name"] for alert in notifications(driven, run_id)[-1]["alerts"]] == ["of_first"]
    with driven.service.database.read() as session:
        phases = {row.name: row.phase for row in session.execute(select(AlertInstanceRow)).scalars()}
        assert phases == {"of_loss": "resolved", "of_first": "resolved"}
        muted = {(row.receiver, row.reason) for row in session.execute(select(Muted)).scalars()}
        assert muted == {("", "info")}


def test_an_alert_that_is_no_note_any_more_is_notified_of(driven_sqlite: Driven) -> None:
    driven = watched(driven_sqlite, {"loss": "info"})
    recording, run_id = driven.begin()
    record(driven, recording, run_id, 0, (0, 7), nan_in(loss=5))
    driven = watched(driven, {"loss": "warning"})
    driven.register()
    record(driven, driven_sqlite.recording(attempt="a2").begin(), run_id, 0, (0, 7), nan_in(loss=5))
    (told,) = notifications(driven, run_id)
    assert [(alert["name"], alert["severity"]) for alert in told["alerts"]] == [("of_loss", "warning")]
