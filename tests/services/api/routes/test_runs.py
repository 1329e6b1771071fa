"""Runs: registration, details, and lists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import sqlalchemy.event
from sqlalchemy import select, update

from tests.services.announcing import announcing
from tests.services.api.conftest import Api
from tests.services.jobs import recorded_process
from tests.services.recording import Recording, exploding_from, nan_from
from tests.services.scheduler.test_sweep import BAD as BAD_RULES
from watchstep.format.control import ControlDocument
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.platform.process import ProcessIdentity
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle
from watchstep_services.api.schemas import paging
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.db.models import EventRow, RunRow

RUNS = "/v1/projects/vision/runs"
STOPS = {"rule": "non_finite_values", "name": "mine", "params": {"only_nan": True}, "actions": ["stop"]}
PROJECT = "/v1/projects/vision"


@pytest.fixture
def process() -> Iterator[JobHandle]:
    with recorded_process() as job:
        yield job


def body_of(job: JobHandle) -> dict[str, Any]:
    return {"backend": job.backend, "id": job.id, "identity": dict(job.identity)}


def this_process() -> dict[str, Any]:
    return {"backend": "local", "id": str(os.getpid()), "identity": asdict(ProcessIdentity.of(os.getpid()))}


def test_a_recorder_registers_and_its_rules_may_not_stop(api: Api) -> None:
    body = {"run": "run-1", "rules": [STOPS], "attempt": "a1"}
    first = api.call("POST", RUNS, body, role="recorder").json()
    assert api.call("POST", RUNS, body, role="recorder").json() == first
    granted = {rule["name"]: (rule["origin"], rule["granted_stop"]) for rule in first["rules"]}
    assert granted == {
        "non_finite_values": ("owner", True),
        "exploding_gradient": ("owner", False),
        "mine": ("recorder", False),
    }
    assert first["rules"][2]["config"]["actions"] == [{"kind": "stop"}]
    assert (first["state"], first["last_step"], first["job"]) == ("created", -1, None)
    assert api.call("GET", RUNS).json()["runs"][0]["run"] == "run-1"


def test_an_operator_replaces_the_owners_rule_of_the_same_name(api: Api) -> None:
    rules = [STOPS, {"rule": "exploding_gradient", "params": {"growth": 7}}]
    answered = api.call("POST", RUNS, {"run": "run-1", "rules": rules}).json()["rules"]
    assert {(rule["name"], rule["origin"], rule["granted_stop"]) for rule in answered} == {
        ("non_finite_values", "owner", True),
        ("mine", "operator", False),
        ("exploding_gradient", "operator", False),
    }
    again = api.call("POST", RUNS, {"run": "run-1"}, role="recorder").json()["rules"]
    assert [rule["name"] for rule in again] == [rule["name"] for rule in answered]


def test_an_unknown_receiver_is_reported(api: Api) -> None:
    rules = [{"rule": "overfit", "actions": [{"notify": "ml-oncall"}]}, {"rule": "dead_relu"}]
    answered = api.call("POST", RUNS, {"run": "run-1", "rules": rules}).json()["rules"]
    assert {rule["name"]: rule["warnings"] for rule in answered if rule["origin"] == "operator"} == {
        "overfit": ["receiver 'ml-oncall' does not exist in this service: it is not notified"],
        "dead_relu": [],
    }


def test_an_operator_but_no_recorder_binds_a_job(api: Api, process: JobHandle) -> None:
    body = {"run": "run-1", "attempt": "a1", "job": body_of(process)}
    refused = api.call("POST", RUNS, body, role="recorder")
    assert (refused.status_code, "job" in refused.json()["detail"]) == (403, True)
    bound = api.call("POST", RUNS, body).json()
    assert (bound["job"]["id"], bound["job"]["bound_by"], bound["attempt"]) == (
        process.id,
        "operator",
        "a1",
    )
    again = api.call("PUT", f"{RUNS}/run-1/job", {"job": body_of(process)})
    assert again.status_code == 200
    other = {**body_of(process), "identity": {**process.identity, "start_ticks": 1}}
    taken = api.call("PUT", f"{RUNS}/run-1/job", {"job": other})
    assert (taken.status_code, "is bound to job" in taken.json()["detail"]) == (422, True)


def test_a_process_that_no_launcher_recorded_is_not_bound(api: Api) -> None:
    init = asdict(ProcessIdentity.of(1))
    for pid, identity, status in (
        ("1", init, "is not a job"),
        ("-1", {**init, "pid": -1}, "is not a job"),
        (str(os.getpid()), this_process()["identity"], "is the service itself"),
        (str(os.getppid()), asdict(ProcessIdentity.of(os.getppid())), "a parent of the service"),
    ):
        job = {"backend": "local", "id": pid, "identity": identity}
        for answer in (
            api.call("POST", RUNS, {"run": "run-1", "attempt": "a1", "job": job}),
            api.call("PUT", f"{RUNS}/run-1/job", {"attempt": "a1", "job": job}),
        ):
            assert (answer.status_code, status in answer.json()["detail"]) == (422, True), answer.json()
    assert api.call("GET", f"{RUNS}/run-1").json()["job"] is None


@pytest.mark.ci
def test_an_announcement_is_answered_with_the_control_document(api: Api) -> None:
    recording = api.driven.recording().begin()
    key = recording.write(0, 0, 7, nan_from(5))
    api.call("POST", RUNS, {"run": "run-1"}, role="recorder")
    place = f"{RUNS}/run-1/announcements"
    health = {"dropped": 3, "share": float("nan")}
    answer = api.call("POST", place, announcing(key, health=health), role="recorder").json()
    assert ControlDocument.from_data(answer["control"]) == ControlDocument()

    run_id = 1
    api.driven.settle(run_id)
    (action,) = api.driven.actions(run_id)
    from watchstep_services.dispatch.dispatch import dispatch

    dispatch(api.driven.service, action.id)
    answer = api.call("POST", place, announcing(key), role="recorder").json()
    stop = ControlDocument.from_data(answer["control"]).stop
    assert stop is not None
    assert (stop.attempt, stop.step) == ("a1", 8)

    run = api.call("GET", f"{RUNS}/run-1").json()
    assert (run["attempt"], run["last_step"], run["alerts"]["firing"]) == ("a1", 7, 1)
    assert run["health"]["recorders"] == {"node/w0": {"dropped": 3, "share": "NaN"}}
    (alert,) = api.call("GET", f"{RUNS}/run-1/alerts").json()["alerts"]
    assert (alert["name"], alert["phase"], alert["finding"]["step"]) == ("non_finite_values", "firing", 5)
    (stop_action,) = api.call("GET", f"{RUNS}/run-1/actions").json()["actions"]
    assert [attempt["outcome"] for attempt in stop_action["tries"]] == ["advanced"]
    events = api.call("GET", f"{RUNS}/run-1/events").json()
    assert [event["type"] for event in events["events"]] == [
        "io.watchstep.run.started",
        "io.watchstep.alert.firing",
        "io.watchstep.stop.requested",
    ]
    assert api.call("GET", f"{RUNS}/run-1/events?after={events['after']}").json()["events"] == []


def test_an_urgent_announcement_is_accepted_once_a_minute(api: Api) -> None:
    recording = api.driven.recording().begin()
    api.call("POST", RUNS, {"run": "run-1"}, role="recorder")
    minute = 60 * NANOSECONDS

    def announced(seq: int, *, urgent: bool, ago_ns: int = 0) -> int:
        with api.driven.service.database.write() as session:
            session.get_one(RunRow, 1).urgent_ns -= ago_ns
        body = announcing(recording.write(seq, 4 * seq, 4 * seq + 3), urgent=urgent)
        assert api.call("POST", f"{RUNS}/run-1/announcements", body, role="recorder").is_success
        return api.driven.run(1).urgent_ns

    assert announced(0, urgent=False) == 0
    first = announced(1, urgent=True)
    assert first > minute
    assert announced(2, urgent=True) == first
    assert announced(3, urgent=False, ago_ns=2 * minute) == first - 2 * minute
    assert announced(4, urgent=True) >= first


def test_an_operators_stop_is_requested_once(api: Api) -> None:
    recording = api.driven.recording().begin()
    api.call("POST", RUNS, {"run": "run-1"})
    assert api.status("POST", f"{RUNS}/run-1/stop", {}) == 422
    api.driven.judge(1, recording.write(0, 0, 3))
    assert api.status("POST", f"{RUNS}/run-1/stop", {"attempt": "a9"}) == 404
    stop = {"reason": "enough"}
    assert api.call("POST", f"{RUNS}/run-1/stop", stop).json() == {"accepted": True, "attempt": "a1"}
    assert api.call("POST", f"{RUNS}/run-1/stop", stop).json() == {"accepted": False, "attempt": "a1"}
    assert api.driven.event_types(1) == ["run.started", "stop.requested"]


BAD = [
    ("POST", RUNS, {"run": "../other"}, 422, "../other"),
    ("POST", RUNS, {"run": "r", "rules": [{"rule": "no_such_rule"}]}, 422, "no_such_rule"),
    (
        "POST",
        RUNS,
        {"run": "r", "rules": [{"rule": "non_finite_values", "params": {"max_elements": -1}}]},
        422,
        "max_elements",
    ),
    (
        "POST",
        RUNS,
        {"run": "r", "rules": [{"rule": "non_finite_values", "params": {"typo": 1}}]},
        422,
        "typo",
    ),
    ("POST", RUNS, {"run": "r", "unknown": 1}, 422, "unknown"),
    ("POST", RUNS, {"run": "r", "attempt": "a/b"}, 422, "a/b"),
    ("POST", RUNS, {"run": "r", "job": this_process()}, 422, "attempt"),
    (
        "POST",
        RUNS,
        {"run": "r", "attempt": "a", "job": {"backend": "x", "id": "1", "identity": {}}},
        422,
        "'x'",
    ),
    (
        "POST",
        RUNS,
        {"run": "r", "attempt": "a", "job": {"backend": "local", "id": "1", "identity": {}}},
        422,
        "identity",
    ),
    ("POST", "/v1/projects/..%2Fx/runs", {"run": "r"}, 404, "not found"),
    ("POST", "/v1/projects/a..b/runs", {"run": "r"}, 422, "a..b"),
    ("GET", f"{RUNS}/none", None, 404, "none"),
    ("GET", f"{RUNS}/a..b", None, 422, "a..b"),
    ("GET", f"{RUNS}?limit=0", None, 422, "limit"),
    ("GET", "/v1/rules/none", None, 404, "none"),
    ("GET", "/v1/nothing", None, 404, "not found"),
    ("DELETE", RUNS, None, 405, "method DELETE: not allowed"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), BAD)
def test_invalid_input_is_reported(
    api: Api, method: str, path: str, body: Any, status: int, message: str
) -> None:
    answer = api.call(method, path, body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert message in problem["detail"]
    assert problem["hint"]
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attempt": "../a2"}, "../a2"),
        ({"node": ""}, "node name ''"),
        ({"writer": "w\x00"}, "writer name"),
        ({"seq": -1}, "seq"),
        ({"seq": 10**10}, "seq"),
        ({"first": 9}, "steps 9 to 3"),
        ({"last": 10**18}, "last"),
        ({"key": "stats/x"}, "key"),
        ({"health": {"much": "x" * 70_000}}, "health"),
    ],
)
def test_an_invalid_announcement_is_reported(api: Api, changes: dict[str, Any], message: str) -> None:
    api.call("POST", RUNS, {"run": "run-1"})
    key = Recording(Store("file:///none", None)).key(0, 0, 3)
    answer = api.call("POST", f"{RUNS}/run-1/announcements", announcing(key, **changes))
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert message in answer.json()["detail"]
    assert api.driven.segments(1) == {}


def test_a_fault_of_the_service_shows_no_stack_trace(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from watchstep_services.api.routes import runs

    def fails(*_arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(runs, "_read", fails)
    answer = api.call("GET", f"{RUNS}/run-1")
    assert (answer.status_code, answer.json()["title"]) == (500, "Fault")
    assert "ZeroDivision" not in answer.text
    assert "ZeroDivision" in caplog.text


@pytest.mark.parametrize("rule", BAD_RULES)
def test_unusable_rules_are_refused(api: Api, rule: dict[str, Any]) -> None:
    refused = api.call("POST", RUNS, {"run": "run-1", "rules": [rule]})
    assert refused.status_code == 422
    assert "rules.0" in refused.text or "unpaired surrogate" in refused.text


def test_health_with_an_unpaired_surrogate_does_not_break_the_run(api: Api) -> None:
    api.driven.recording().begin()
    api.driven.register()
    place = "/v1/projects/vision/runs/run-1"
    key = SegmentKey(WriterId("a1", "n", "w"), 0, 0, 1)
    health = {"fault": "a\ud800b", "\udfff": ["\U0001f600"]}
    answer = api.call("POST", f"{place}/announcements", announcing(key, health=health), role="recorder")
    assert answer.status_code == 200
    run = api.call("GET", place)
    assert run.status_code == 200
    assert '"a?b"' in run.text
    assert "\U0001f600" in run.text
    unknown = api.call("POST", f"{place}/announcements", {**announcing(key), "\ud800": 1}, role="recorder")
    assert (unknown.status_code, unknown.json()["type"]) == (422, "urn:watchstep:problem:invalid")


@pytest.fixture
def judged(api: Api) -> Api:
    """run-1 has an alert and a stop request, run-2 is healthy, run-3 has not begun."""
    for name, value in (("run-1", nan_from(5)), ("run-2", exploding_from(1000))):
        recording = api.driven.recording(name).begin()
        run_id = api.driven.register(name)
        api.driven.judge(run_id, recording.write(0, 0, 9, value))
    api.driven.register("run-3")
    return api


def test_runs_are_filtered(judged: Api) -> None:
    with judged.driven.service.database.write() as session:
        session.execute(update(RunRow).where(RunRow.run != "run-3").values(state="running"))

    def runs(query: str) -> list[str]:
        return [run["run"] for run in judged.get(f"{PROJECT}/runs?{query}")["runs"]]

    assert runs("") == ["run-3", "run-2", "run-1"]
    assert runs("state=created") == ["run-3"]
    assert runs("state=running&state=created&limit=2") == ["run-3", "run-2"]
    assert runs("alert=firing") == ["run-1"]
    assert runs("since=2020-01-01T00:00:00Z&until=2020-01-02T00:00:00Z") == []
    assert len(runs("since=2020-01-01T00:00:00Z")) == 3
    assert judged.get(f"{PROJECT}/runs?alert=firing")["runs"][0]["alerts"] == {
        "pending": 0,
        "firing": 1,
        "resolved": 0,
        "notes": 0,
    }


def test_alerts_of_a_project_are_filtered(judged: Api) -> None:
    def alerts(query: str) -> list[tuple[str, str]]:
        return [(alert["run"], alert["name"]) for alert in judged.get(f"{PROJECT}{query}")["alerts"]]

    assert alerts("/alerts") == alerts("/runs/run-1/alerts") == [("run-1", "non_finite_values")]
    assert alerts("/alerts?phase=firing&severity=critical&rule=non_finite_values") == [
        ("run-1", "non_finite_values")
    ]
    for other in ("phase=resolved", "severity=info", "rule=other", "label=team=vision", "until=1"):
        assert alerts(f"/alerts?{other}") == [], other
    assert alerts("/runs/run-2/alerts") == []


def test_alerts_are_found_by_label(api: Api) -> None:
    rule = {"rule": "non_finite_values", "name": "mine", "labels": {"team": "vision", "tier": "1"}}
    recording = api.driven.recording().begin()
    api.call("POST", f"{PROJECT}/runs", {"run": "run-1", "rules": [rule]})
    api.driven.judge(1, recording.write(0, 0, 9, nan_from(5)))
    for labels, found in (
        (("team=vision",), 1),
        (("team=vision", "tier=1"), 1),
        (("team=x",), 0),
        (("x=1",), 0),
    ):
        query = "&".join(f"label={label}" for label in labels)
        assert len(api.get(f"{PROJECT}/alerts?{query}")["alerts"]) == found, labels
    assert api.status("GET", f"{PROJECT}/alerts?label=nonsense") == 422


def test_actions_and_attempts(judged: Api) -> None:
    (action,) = judged.get(f"{PROJECT}/runs/run-1/actions?kind=stop&state=pending")["actions"]
    assert judged.get(f"{PROJECT}/runs/run-1/actions/{action['id']}") == action
    assert judged.get(f"{PROJECT}/runs/run-1/actions?kind=webhook")["actions"] == []
    assert judged.status("GET", f"{PROJECT}/runs/run-2/actions/{action['id']}") == 404
    assert judged.status("GET", f"{PROJECT}/runs/run-1/actions/999") == 404
    (attempt,) = judged.get(f"{PROJECT}/runs/run-1/attempts")["attempts"]
    assert (attempt["attempt"], attempt["largest"], attempt["job"]) == ("a1", 9, None)
    assert judged.get(f"{PROJECT}/runs/run-1/attempts/a1") == attempt
    assert judged.status("GET", f"{PROJECT}/runs/run-1/attempts/a2") == 404


def test_events_of_a_run_and_of_the_project(judged: Api) -> None:
    of_run = judged.get(f"{PROJECT}/runs/run-1/events")
    assert [event["type"] for event in of_run["events"]][-2:] == [
        "io.watchstep.alert.firing",
        "io.watchstep.stop.requested",
    ]
    every = judged.get(f"{PROJECT}/events")["events"]
    assert [event for event in every if event["subject"] == "vision/run-1"] == of_run["events"]
    assert len(judged.get(f"{PROJECT}/events?type=io.watchstep.alert.firing")["events"]) == 1
    first = judged.get(f"{PROJECT}/events?limit=1")
    rest = judged.get(f"{PROJECT}/events?page_token={first['next_page_token']}")
    assert [*first["events"], *rest["events"]] == every
    assert judged.get(f"{PROJECT}/events?after={rest['after']}")["events"] == []


def add_large_events(api: Api, count: int, size: int) -> None:
    """Publish events with messages of some size for a run of the project."""
    with api.driven.service.database.write() as session:
        event = session.execute(select(EventRow).limit(1)).scalar_one()
        for number in range(count):
            data = {**event.event, "id": f"large-{number}", "data": {"message": "x" * size}}
            session.add(
                EventRow(
                    id=f"large-{number}", run_id=event.run_id, type="large", event=data, created_ns=event.created_ns + number
                )
            )  # fmt: skip


def test_a_page_of_large_rows_ends_before_its_limit(judged: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "MAX_BYTES", 200_000)
    add_large_events(judged, 60, 20_000)
    loaded: list[int] = []

    def load(row: EventRow, *_more: object) -> None:
        loaded.append(row.number)

    sizes, received, token = [], [], ""
    sqlalchemy.event.listen(EventRow, "load", load)
    try:
        while True:
            loaded.clear()
            page = judged.get(f"{PROJECT}/events?type=large&limit=1000{token}")
            sizes.append(len(page["events"]))
            received += [event["id"] for event in page["events"]]
            assert len(loaded) <= 32
            if page["next_page_token"] is None:
                break
            token = f"&page_token={page['next_page_token']}"
    finally:
        sqlalchemy.event.remove(EventRow, "load", load)
    assert received == [f"large-{number}" for number in range(60)]
    assert set(sizes[:-1]) == {9}
    monkeypatch.setattr(paging, "MAX_BYTES", 1)
    assert len(judged.get(f"{PROJECT}/events?limit=1000")["events"]) == 1


def test_large_pages_are_queries_and_small_ones_are_free(judged: Api) -> None:
    add_large_events(judged, 20, 20_000)
    limited = judged.with_settings(project_queries=1)
    listing = f"{PROJECT}/events?type=large&limit="
    with limited.client.app.state.queries.slots.acquire("vision"):
        refused = limited.call("GET", f"{listing}1000", role="viewer")
        assert (refused.status_code, refused.headers.get("retry-after")) == (429, "1")
        assert limited.status("GET", f"{listing}5", role="viewer") == 200
    for _ in range(2):  # the slot is free again
        assert len(limited.get(f"{listing}1000")["events"]) == 20


RULES = f"{PROJECT}/runs/run-2/rules"
MINE = {"rule": "exploding_gradient", "params": {"growth": 7}}


def test_an_operator_changes_the_rules_of_a_run(judged: Api) -> None:
    assert {rule["name"] for rule in judged.get(f"{PROJECT}/runs/run-2/rules")["rules"]} == {
        "non_finite_values",
        "exploding_gradient",
    }
    owners = judged.call("GET", f"{RULES}/exploding_gradient")
    assert owners.json()["origin"] == "owner"
    put = judged.call("PUT", f"{RULES}/exploding_gradient", MINE)
    assert (put.status_code, put.json()["origin"]) == (200, "operator")
    assert judged.call("GET", f"{RULES}/exploding_gradient").headers["etag"] == put.headers["etag"]
    assert put.headers["etag"] != owners.headers["etag"]
    assert judged.status("PUT", f"{RULES}/spike", {"rule": "loss_spike"}) == 200
    judged.driven.judge(2, judged.driven.recording("run-2").write(1, 10, 19))
    states = {rule["name"]: rule["origin"] for rule in judged.get(f"{PROJECT}/runs/run-2/rules")["rules"]}
    assert states == {"non_finite_values": "owner", "exploding_gradient": "operator", "spike": "operator"}
    assert judged.status("DELETE", f"{RULES}/spike") == 204
    assert judged.status("DELETE", f"{RULES}/spike") == 404
    assert judged.status("GET", f"{RULES}/spike") == 404


def test_an_evaluation_under_other_rules_writes_nothing(judged: Api) -> None:
    before = judged.driven.run(2).epoch
    judged.call("PUT", f"{RULES}/spike", {"rule": "loss_spike"})
    run = judged.driven.run(2)
    assert (run.epoch, run.lease_until_ns) == (before + 1, 0)


def test_invalid_rules_are_refused(judged: Api) -> None:
    for body, message in (
        ({"rule": "nothing"}, "nothing"),
        ({"rule": "non_finite_values", "params": {"x": 1}}, "x"),
        ({"rule": "non_finite_values", "name": "other"}, "other"),
        ({}, "rule"),
    ):
        answer = judged.call("PUT", f"{RULES}/mine", body)
        assert (answer.status_code, message in answer.json()["detail"]) == (422, True), answer.text
    assert judged.status("PUT", f"{RULES}/mine", MINE, role="recorder") == 403


def conditional(api: Api, method: str, path: str, tag: str, body: Any = None) -> int:
    return api.status(method, path, body, headers={"if-match": tag})


def test_changes_of_another_operator_are_not_overwritten(judged: Api) -> None:
    seen = judged.call("GET", f"{RULES}/exploding_gradient").headers["etag"]
    assert (
        conditional(judged, "PUT", f"{RULES}/exploding_gradient", seen, {"rule": "exploding_gradient"}) == 200
    )
    assert (
        conditional(judged, "PUT", f"{RULES}/exploding_gradient", seen, {"rule": "exploding_gradient"}) == 412
    )
    assert conditional(judged, "DELETE", f"{RULES}/exploding_gradient", seen) == 412
    assert conditional(judged, "PUT", f"{RULES}/new", "*", {"rule": "loss_spike"}) == 412
    assert conditional(judged, "DELETE", f"{RULES}/exploding_gradient", "*") == 204


@pytest.mark.ci
def test_the_rules_of_a_project_evaluate_its_next_runs(judged: Api) -> None:
    place = f"{PROJECT}/rules/exploding_gradient"
    assert judged.call("PUT", place, MINE).json()["origin"] == "project"
    assert [rule["name"] for rule in judged.get(f"{PROJECT}/rules")["rules"]] == ["exploding_gradient"]
    judged.driven.register("run-4")
    rule_status = judged.get(f"{PROJECT}/runs/run-4/rules/exploding_gradient")
    assert (rule_status["origin"], rule_status["config"]["params"]) == ("project", {"growth": 7})
    assert {rule["name"]: rule["origin"] for rule in judged.get(f"{PROJECT}/runs/run-4/rules")["rules"]} == {
        "exploding_gradient": "project",
        "non_finite_values": "owner",
    }
    judged.call("POST", f"{PROJECT}/runs", {"run": "run-4", "rules": [{"rule": "exploding_gradient"}]})
    assert judged.get(f"{PROJECT}/runs/run-4/rules/exploding_gradient")["origin"] == "operator"
    seen = judged.call("GET", place).headers["etag"]
    assert conditional(judged, "DELETE", place, '"other"') == 412
    assert conditional(judged, "DELETE", place, seen) == 204
    assert judged.status("GET", place) == 404
    assert judged.get(f"{PROJECT}/rules")["rules"] == []
    assert judged.get(f"{PROJECT}/runs/run-2/rules/exploding_gradient")["origin"] == "owner"
