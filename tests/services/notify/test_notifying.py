"""Notifications of alerts: sent, flushed together, linked to pages, and acknowledged."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.services.channels.http_server import HttpServer, http_server
from tests.services.driving import Driven
from tests.services.notify.alerting import PUBLIC, fire, picture_name, reachable, with_receiver
from tests.services.recording import damage_from, healthy, nan_from
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.channels.notification import Notification
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import AlertGroup, AlertInstanceRow, Muted, RunRow
from watchstep_services.notify import samples
from watchstep_services.notify.acknowledged import notify_acknowledged
from watchstep_services.notify.flush import due_groups, flush, flush_due
from watchstep_services.notify.silences import acknowledge
from watchstep_services.scheduler.sweep import find_due

HOUR_NS = 3600 * 10**9
EPISODES = 6
WORKERS = 3
RECEIVERS = ReceiverFile.model_validate(
    {
        "receivers": [{"name": "ops", "kind": "webhook", "url": "https://chat.example.com/hook"}],
        "route": {"receiver": "ops", "group_wait": 0, "group_interval": 0, "repeat_interval": 86400},
    }
)
HOOK = {"kind": "webhook", "url": "https://hooks.example/a"}
KEY = "e93facc04764012d7bfb002500d5d1a6"


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
    driven.change(AlertGroup, notified_ns=AlertGroup.notified_ns - ns, due_ns=AlertGroup.due_ns - ns)


def notifications(driven: Driven, run_id: int) -> list[dict[str, Any]]:
    return [action.payload["notification"] for action in driven.actions(run_id, "notify")]


def test_a_receiver_is_told_once_and_of_the_end(driven: Driven, receiver: HttpServer) -> None:
    driven = told_by(driven, receiver.url)
    recording, run_id = driven.record(nan_from(5), rules=[rule(labels={"team": "vision"})])
    (group,) = due_groups(driven.service)
    assert find_due(driven.service).actions  # the sweep tells
    assert flush(driven.service, group) is None
    (action,) = driven.actions(run_id, "notify")
    assert driven.finish(action.id).state == "done", driven.tries(action.id)
    (firing,) = receiver.events
    driven.judge(run_id, recording.write(1, 8, 12, healthy))
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


def test_runs_share_a_group_where_the_route_says_so(driven_sqlite: Driven) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/", group_by=["severity"], group_interval=60)
    for name in ("run-1", "run-2"):
        recording = driven_sqlite.recording(run=name).begin()
        run_id = driven.register(name, rules=[rule()])
        driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    assert len(flush_due(driven.service)) == 1
    (told,) = notifications(driven, 1)
    assert (told["run"], told["group_labels"]) == ("", {"severity": "warning"})
    assert {alert["labels"]["run"] for alert in told["alerts"]} == {"run-1", "run-2"}


def test_an_attempt_goes_on_with_the_alert_and_one_without_it_ends_it(driven_sqlite: Driven) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/")
    hook = {"webhook": "https://chat.example.com/hook"}
    run_id = driven.register(rules=[rule(actions=[hook])])
    for attempt in ("a1", "a2"):
        recording = driven_sqlite.recording(attempt=attempt).begin()
        driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
        flush_due(driven.service)
    _started, first, again = [event["data"] for event in driven.events(run_id)]
    assert again["continues"] == "a1"
    assert first["fingerprint"] == again["fingerprint"]
    assert first["episode"] == again["episode"] == 1
    assert [action.kind for action in driven.actions(run_id)] == ["webhook", "notify"]
    assert muted(driven) == {("webhook", "known", "a1")}

    recording = driven_sqlite.recording(attempt="a3").begin()
    driven.judge(run_id, recording.write(0, 0, 4))
    assert driven.event_types(run_id) == ["run.started", *["alert.firing"] * 2]
    driven.judge(run_id, recording.write(1, 5, 9))
    end = driven.events(run_id)[-1]
    assert (end["type"], end["data"]["ended_by"]) == (
        "io.watchstep.alert.resolved",
        "attempt a3 passed step 5 without it",
    )
    assert [action.kind for action in driven.actions(run_id)] == ["webhook", "notify", "webhook"]
    flush_due(driven.service)
    assert notifications(driven, run_id)[-1]["status"] == "resolved"


def test_a_rule_config_that_is_gone_has_no_alert(driven_sqlite: Driven) -> None:
    from watchstep_services.runs.registration import register

    driven = Driven(replace(driven_sqlite.service, owner_rules=(rule(),)))
    recording, run_id = driven.record(nan_from(5))
    register(driven.service, "vision", "run-1", (rule(labels={"team": "other"}),), "operator")
    driven.judge(run_id, recording.write(1, 8, 9, nan_from(0)))
    (ended,) = [event["data"] for event in driven.events(run_id) if event["data"].get("ended_by")]
    assert ended["ended_by"] == "its rule config is no longer in use"
    with driven.service.database.read() as session:
        phases = [
            row.phase
            for row in session.execute(select(AlertInstanceRow).order_by(AlertInstanceRow.id)).scalars()
        ]
    assert phases == ["resolved", "firing"]


def test_what_fires_at_the_end_of_a_run_is_told_and_not_repeated(driven_sqlite: Driven) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/")
    _, run_id = driven.record(nan_from(5), rules=[rule()])
    driven.change(RunRow, run_id, state="failed")
    assert len(flush_due(driven.service)) == 1
    group_later(driven, 2 * HOUR_NS)
    assert flush_due(driven.service) == []
    assert [told["status"] for told in notifications(driven, run_id)] == ["firing"]


def test_who_is_not_told_and_why(driven_sqlite: Driven) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/")
    asked = [
        rule(dry_run=True),
        rule(name="stray", actions=[{"notify": "nobody"}]),
    ]
    _, run_id = driven.record(nan_from(5), rules=asked)
    flush_due(driven.service)
    assert muted(driven) == {("", "dry_run", ""), ("nobody", "unknown", "")}
    (told,) = notifications(driven, run_id)
    assert [alert["name"] for alert in told["alerts"]] == ["stray"]


def test_where_nothing_is_configured_nobody_is_told(driven_sqlite: Driven) -> None:
    _, run_id = driven_sqlite.record(nan_from(5), rules=[rule()])
    assert flush_due(driven_sqlite.service) == []
    assert notifications(driven_sqlite, run_id) == []


def test_what_is_over_before_anybody_could_look_is_told(driven_sqlite: Driven) -> None:
    driven = told_by(driven_sqlite, "https://chat.example.com/")
    recording, run_id = driven.begin(rules=[rule()])
    one_bad_step = recording.write(0, 0, 7, lambda step, _: float("nan") if step == 5 else 1.0)
    driven.judge(run_id, one_bad_step)
    assert driven.event_types(run_id) == ["run.started", "alert.firing", "alert.resolved"]
    flush_due(driven.service)
    flush_due(driven.service)
    first, last = notifications(driven, run_id)
    assert (first["status"], last["status"]) == ("firing", "resolved")
    assert first["alerts"][0]["resolved_ns"] == last["alerts"][0]["resolved_ns"]


def told_at_once(driven: Driven) -> Driven:
    return Driven(replace(driven.service, receiver_file=RECEIVERS, owner_rules=()))


def told(driven: Driven, run_id: int) -> list[tuple[int, str]]:
    """(number of the notification, what it says) in the order of their numbers."""
    actions = driven.actions(run_id, "notify")
    numbers = [(int(action.key.rpartition(":")[2]), action) for action in actions]
    return [
        (number, action.payload["notification"]["status"])
        for number, action in sorted(numbers, key=lambda one: one[0])
    ]


def test_workers_that_flush_together_tell_everything_once(driven: Driven) -> None:
    driven = told_at_once(driven)
    recording, run_id = driven.begin(rules=[RuleConfig(rule="non_finite_values", name="mine")])
    written = threading.Event()

    def record() -> None:
        for seq in range(2 * EPISODES):
            value = nan_from(seq) if seq % 2 == 0 else healthy
            driven.judge(run_id, recording.write(seq, seq, seq, value))

    def work() -> list[int]:
        mine: list[int] = []
        while True:
            last = written.is_set()
            mine += flush_due(driven.service)
            if last and not due_groups(driven.service):
                return mine
            written.wait(0.01)  # lets those who judge have the processor

    with ThreadPoolExecutor(WORKERS + 1) as pool:
        workers = [pool.submit(work) for _ in range(WORKERS)]
        try:
            pool.submit(record).result()
        finally:
            written.set()
        caused = [action for worker in workers for action in worker.result()]

    said = told(driven, run_id)
    assert [number for number, _ in said] == list(range(1, len(said) + 1))
    assert len(caused) == len(set(caused)) == len(said)
    # Never an end without its beginning, nor the same end twice; what came and went unseen is told as one beginning.
    statuses = [status for _, status in said]
    assert all(before == "firing" for before, now in pairwise(statuses) if now == "resolved")
    assert statuses[0] == "firing"
    assert statuses[-1] == "resolved"
    assert statuses.count("firing") <= EPISODES
    with driven.service.database.read() as session:
        standing = session.execute(select(AlertInstanceRow)).scalar_one()
        assert (standing.phase, standing.episode) == ("resolved", EPISODES)


def test_one_of_many_workers_tells_what_is_due(driven: Driven) -> None:
    driven = told_at_once(driven)
    _, run_id = driven.record(nan_from(0), last=0, rules=[RuleConfig(rule="non_finite_values", name="mine")])
    (group_id,) = due_groups(driven.service)
    together = threading.Barrier(WORKERS)

    def work() -> int | None:
        together.wait(60)
        return flush(driven.service, group_id)

    with ThreadPoolExecutor(WORKERS) as pool:
        told_by = [worker.result() for worker in [pool.submit(work) for _ in range(WORKERS)]]
    assert sum(action is not None for action in told_by) == 1
    assert told(driven, run_id) == [(1, "firing")]
    assert driven.one(select(AlertGroup)).generation == 1


def notification(driven: Driven, run_id: int) -> Notification:
    flush_due(driven.service)
    (action,) = driven.actions(run_id, "notify")
    return Notification.from_data(action.payload["notification"])


def test_an_alert_and_its_events_lead_to_its_page(driven_sqlite: Driven, tmp_path: Path) -> None:
    driven = with_receiver(reachable(driven_sqlite, tmp_path, public_url=f"{PUBLIC}/"), HOOK)
    run_id = fire(driven)
    made = notification(driven, run_id)
    page = f"{PUBLIC}/projects/vision/runs/run-1/alerts/{picture_name(driven).fingerprint}"
    assert (made.url, made.page, made.run_url) == (page, "alert", f"{PUBLIC}/projects/vision/runs/run-1")
    (event,) = driven.events(run_id, "alert.firing")
    assert event["data"]["url"] == page
    assert made.source == event["source"] == "http://service.test/v1/projects/vision/runs/run-1"
    with driven.service.database.read() as session:
        preview = samples.of_alert(driven.service, session, driven.run(run_id), "mine", read_clock(session))
    assert preview.url == page
    tested = [samples.example(driven.service, "vision", status, 1) for status in ("firing", "resolved")]
    assert {(test.url, test.page) for test in tested} == {(f"{PUBLIC}/projects/vision", "runs")}
    assert tested[0].group_key == tested[1].group_key
    assert tested[0].id != tested[1].id


def test_several_alerts_lead_to_the_run_and_of_several_runs_to_their_list(
    driven_sqlite: Driven, tmp_path: Path
) -> None:
    names = ("first", "second")
    rules = [
        RuleConfig.model_validate({"rule": "non_finite_values", "name": name, "labels": {"of": name}})
        for name in names
    ]
    for group_by, runs, expected in (
        (["run"], ["a"], (f"{PUBLIC}/projects/vision/runs/a", "run")),
        (["severity"], ["b", "c"], (f"{PUBLIC}/projects/vision", "runs")),
    ):
        driven = with_receiver(reachable(driven_sqlite, tmp_path), HOOK, group_by=group_by)
        run_ids = []
        for run in runs:
            recording = driven_sqlite.recording(run=run).begin()
            run_ids.append(driven.register(run, rules=rules))
            driven.judge(run_ids[-1], recording.write(0, 0, 7, damage_from(5)))
        made = notification(driven, run_ids[0])
        assert (made.url, made.page) == expected
        assert all("/alerts/" in alert.url for alert in made.alerts)


@pytest.mark.ci
def test_without_a_public_url_nothing_leads_to_an_address_that_only_this_machine_has(
    driven_sqlite: Driven,
) -> None:
    driven = with_receiver(driven_sqlite, HOOK)
    run_id = fire(driven)
    made = notification(driven, run_id)
    assert (made.url, made.run_url, made.alerts[0].url) == ("", "", "")
    assert made.command == "watchstep runs alerts vision/run-1 --service http://service.test"
    (event,) = driven.events(run_id, "alert.firing")
    assert event["data"]["url"] == ""


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def acknowledge_alert(driven: Driven, name: str) -> list[int]:
    with driven.service.database.write() as session:
        row = session.execute(select(AlertInstanceRow).filter_by(name=name)).scalar_one()
        acknowledge(session, driven.service.base_url, row, "ann", "")
        return notify_acknowledged(driven.service, session, row)


def rules() -> list[RuleConfig]:
    return [
        RuleConfig.model_validate({"rule": "non_finite_values", "name": name, "severity": severity})
        for name, severity in (("first", "critical"), ("second", "warning"))
    ]


def test_a_group_is_acknowledged_with_its_last_alert(
    driven: Driven, server: HttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_RECEIVER_PD", KEY)
    receiver: dict[str, Any] = {
        "kind": "pagerduty", "routing_key": {"env": "WATCHSTEP_RECEIVER_PD"}, "url": server.url,
    }  # fmt: skip
    driven = with_receiver(driven.with_settings(home=tmp_path, allowed_addresses="loopback"), receiver)
    recording, run_id = driven.record(damage_from(5), rules=rules())
    assert acknowledge_alert(driven, "second") == []  # before it was notified
    for action in flush_due(driven.service):
        driven.finish(action)
    assert acknowledge_alert(driven, "second") == []  # the other still fires
    (action,) = acknowledge_alert(driven, "first")
    assert driven.finish(action).state == "done"
    driven.judge(run_id, recording.write(1, 8, 20, healthy))
    for action in flush_due(driven.service):
        driven.finish(action)
    events = [json.loads(body) for body in server.bodies]
    assert [event["event_action"] for event in events] == ["trigger", "acknowledge", "resolve"]
    assert len({event["dedup_key"] for event in events}) == 1
    ids = {event["payload"]["custom_details"]["notification"] for event in events}
    assert len(ids) == 3


def test_other_receivers_are_not_notified_of_acknowledgements(driven_sqlite: Driven) -> None:
    driven = with_receiver(driven_sqlite, {"kind": "webhook", "url": "https://hooks.example/a"})
    driven.record(damage_from(5), rules=rules()[:1])
    flush_due(driven.service)
    assert acknowledge_alert(driven, "first") == []
