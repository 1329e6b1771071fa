"""From an alert to a receiver's door, on both databases; and why somebody was not told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.services.dispatch.receiver import Receiver, receiving
from tests.services.driving import Driven
from tests.services.recording import Recording, healthy, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, Muted, RunRow
from watchstep_services.notify.flush import due_groups, flush, flush_due
from watchstep_services.scheduler.sweep import find_due

HOUR_NS = 3600 * 10**9


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def told_by(driven: Driven, url: str, **route: Any) -> Driven:
    """The service with one receiver, that is told at once."""
    asked = {
        "receivers": [{"name": "ops", "kind": "webhook", "url": url}],
        "route": {"receiver": "ops", "group_wait": 0, "group_interval": 0, "repeat_interval": 3600, **route},
    }
    return Driven(replace(driven.service, receiver_file=ReceiverFile.model_validate(asked), owner_rules=()))


def rule(**changes: Any) -> RuleConfig:
    return RuleConfig.model_validate({"rule": "non_finite_values", "name": "mine", **changes})


def muted(driven: Driven) -> set[tuple[str, str, str]]:
    with driven.service.database.read() as session:
        return {(row.receiver, row.reason, row.detail) for row in session.execute(select(Muted)).scalars()}


def group_later(driven: Driven, ns: int) -> None:
    """As if so much time had passed since the groups were told."""
    with driven.service.database.write() as session:
        session.execute(
            update(AlertGroup).values(notified_ns=AlertGroup.notified_ns - ns, due_ns=AlertGroup.due_ns - ns)
        )


def notifications(driven: Driven, run_id: int) -> list[dict[str, Any]]:
    return [action.payload["notification"] for action in driven.actions(run_id) if action.kind == "notify"]


def test_a_receiver_is_told_once_and_of_the_end(
    driven: Driven, folder_store: Store, receiver: Receiver
) -> None:
    driven = told_by(driven, receiver.url)
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=[rule(labels={"team": "vision"})])
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    (group,) = due_groups(driven.service)
    assert find_due(driven.service).actions  # the sweep tells
    assert flush(driven.service, group) is None
    (action,) = [action for action in driven.actions(run_id) if action.kind == "notify"]
    assert driven.finish(action.id).state == "done", driven.tries(action.id)
    (firing,) = receiver.events
    driven.announce(run_id, recording.write(1, 8, 12, healthy))
    driven.settle(run_id)
    (action_id,) = flush_due(driven.service)
    assert driven.finish(action_id).state == "done"
    resolved = receiver.events[1]
    assert firing != resolved
    first, last = notifications(driven, run_id)
    assert (first["status"], last["status"]) == ("firing", "resolved")
    assert first["group_key"] == last["group_key"]
    assert first["group_labels"] == {"project": "vision", "run": "run-1"}
    assert first["alerts"][0]["labels"]["team"] == "vision"
    assert first["alerts"][0]["fingerprint"] == last["alerts"][0]["fingerprint"]
    assert due_groups(driven.service) == []


def test_runs_share_a_group_where_the_route_says_so(driven_sqlite: Driven, folder_store: Store) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/", group_by=["severity"], group_interval=60)
    for name in ("run-1", "run-2"):
        recording = Recording(folder_store, run=name).begin()
        run_id = driven.register(name, rules=[rule()])
        driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
        driven.settle(run_id)
    assert len(flush_due(driven.service)) == 1
    (told,) = notifications(driven, 1)
    assert (told["run"], told["group_labels"]) == ("", {"severity": "warning"})
    assert {alert["labels"]["run"] for alert in told["alerts"]} == {"run-1", "run-2"}


def test_an_attempt_goes_on_with_the_alert_and_one_without_it_ends_it(
    driven_sqlite: Driven, folder_store: Store
) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/")
    hook = {"webhook": "https://chat.example.com/hook"}
    run_id = driven.register(rules=[rule(actions=[hook])])
    for attempt in ("a1", "a2"):
        recording = Recording(folder_store, attempt=attempt).begin()
        driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
        driven.settle(run_id)
        flush_due(driven.service)
    _started, first, again = [event["data"] for event in driven.events(run_id)]
    assert again["continues"] == "a1"
    assert first["fingerprint"] == again["fingerprint"]
    assert first["episode"] == again["episode"] == 1
    assert [action.kind for action in driven.actions(run_id)] == ["webhook", "notify"]
    assert muted(driven) == {("webhook", "known", "a1")}

    recording = Recording(folder_store, attempt="a3").begin()
    driven.announce(run_id, recording.write(0, 0, 4))
    driven.settle(run_id)
    assert driven.event_types(run_id) == ["run.started", *["alert.firing"] * 2]
    driven.announce(run_id, recording.write(1, 5, 9))
    driven.settle(run_id)
    end = driven.events(run_id)[-1]
    assert (end["type"], end["data"]["ended_by"]) == (
        "io.watchstep.alert.resolved",
        "attempt a3 passed step 5 without it",
    )
    assert [action.kind for action in driven.actions(run_id)] == ["webhook", "notify", "webhook"]
    flush_due(driven.service)
    assert notifications(driven, run_id)[-1]["status"] == "resolved"


def test_a_rule_config_that_is_gone_has_no_alert(driven_sqlite: Driven, folder_store: Store) -> None:
    from watchstep_services.runs.registration import register

    driven = Driven(replace(driven_sqlite.service, owner_rules=(rule(),)))
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    register(driven.service, "vision", "run-1", (rule(labels={"team": "other"}),), "operator")
    driven.announce(run_id, recording.write(1, 8, 9, nan_from(0)))
    driven.settle(run_id)
    (ended,) = [event["data"] for event in driven.events(run_id) if event["data"].get("ended_by")]
    assert ended["ended_by"] == "its rule config is no longer in use"
    with driven.service.database.read() as session:
        phases = [
            row.phase
            for row in session.execute(select(AlertInstanceRow).order_by(AlertInstanceRow.id)).scalars()
        ]
    assert phases == ["resolved", "firing"]


def test_what_fires_at_the_end_of_a_run_is_told_and_not_repeated(
    driven_sqlite: Driven, folder_store: Store
) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/")
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=[rule()])
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    with driven.service.database.write() as session:
        session.get_one(RunRow, run_id).state = "failed"
    assert len(flush_due(driven.service)) == 1
    group_later(driven, 2 * HOUR_NS)
    assert flush_due(driven.service) == []
    assert [told["status"] for told in notifications(driven, run_id)] == ["firing"]


def test_who_is_not_told_and_why(driven_sqlite: Driven, folder_store: Store) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/")
    asked = [
        rule(dry_run=True),
        rule(name="stray", actions=[{"notify": "nobody"}]),
    ]
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=asked)
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    flush_due(driven.service)
    assert muted(driven) == {("", "dry_run", ""), ("nobody", "unknown", "")}
    (told,) = notifications(driven, run_id)
    assert [alert["name"] for alert in told["alerts"]] == ["stray"]


def test_where_nothing_is_configured_nobody_is_told(driven_sqlite: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven_sqlite.register(rules=[rule()])
    driven_sqlite.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven_sqlite.settle(run_id)
    assert flush_due(driven_sqlite.service) == []
    assert notifications(driven_sqlite, run_id) == []


def test_what_is_over_before_anybody_could_look_is_told(driven_sqlite: Driven, folder_store: Store) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/")
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=[rule()])
    one_bad_step = recording.write(0, 0, 7, lambda step, _: float("nan") if step == 5 else 1.0)
    driven.announce(run_id, one_bad_step)
    driven.settle(run_id)
    assert driven.event_types(run_id) == ["run.started", "alert.firing", "alert.resolved"]
    flush_due(driven.service)
    flush_due(driven.service)
    first, last = notifications(driven, run_id)
    assert (first["status"], last["status"]) == ("firing", "resolved")
    assert first["alerts"][0]["resolved_ns"] == last["alerts"][0]["resolved_ns"]
