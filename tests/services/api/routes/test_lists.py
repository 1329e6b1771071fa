"""Lists of runs, alerts, actions, attempts and events: filters and pages, without objects of other projects."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

from tests.services.api.conftest import Api
from tests.services.recording import Recording, exploding_from, nan_from
from watchstep.store.store import Store
from watchstep_services.db.models import RunRow

PROJECT = "/v1/projects/vision"


@pytest.fixture
def judged(api: Api, folder_store: Store) -> Api:
    """run-1 has an alert and a stop request, run-2 is healthy, run-3 has not begun."""
    for name, value in (("run-1", nan_from(5)), ("run-2", exploding_from(1000))):
        recording = Recording(folder_store, name).begin()
        run_id = api.driven.register(name)
        api.driven.announce(run_id, recording.write(0, 0, 9, value))
        api.driven.settle(run_id)
    api.driven.register("run-3")
    return api


def get(api: Api, path: str) -> Any:
    answer = api.call("GET", f"{PROJECT}{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_runs_are_filtered(judged: Api) -> None:
    with judged.driven.service.database.write() as session:
        session.execute(update(RunRow).where(RunRow.run != "run-3").values(state="running"))

    def runs(query: str) -> list[str]:
        return [run["run"] for run in get(judged, f"/runs?{query}")["runs"]]

    assert runs("") == ["run-3", "run-2", "run-1"]
    assert runs("state=created") == ["run-3"]
    assert runs("state=running&state=created&limit=2") == ["run-3", "run-2"]
    assert runs("alert=firing") == ["run-1"]
    assert runs("since=2020-01-01T00:00:00Z&until=2020-01-02T00:00:00Z") == []
    assert len(runs("since=2020-01-01T00:00:00Z")) == 3
    assert get(judged, "/runs?alert=firing")["runs"][0]["alerts"] == {
        "pending": 0,
        "firing": 1,
        "resolved": 0,
        "notes": 0,
    }


def test_alerts_of_a_project_are_filtered(judged: Api) -> None:
    def alerts(query: str) -> list[tuple[str, str]]:
        return [(alert["run"], alert["name"]) for alert in get(judged, query)["alerts"]]

    assert alerts("/alerts") == alerts("/runs/run-1/alerts") == [("run-1", "non_finite_values")]
    assert alerts("/alerts?phase=firing&severity=critical&rule=non_finite_values") == [
        ("run-1", "non_finite_values")
    ]
    for other in ("phase=resolved", "severity=info", "rule=other", "label=team=vision", "until=1"):
        assert alerts(f"/alerts?{other}") == [], other
    assert alerts("/runs/run-2/alerts") == []


def test_alerts_are_found_by_label(api: Api, folder_store: Store) -> None:
    rule = {"rule": "non_finite_values", "name": "mine", "labels": {"team": "vision", "tier": "1"}}
    recording = Recording(folder_store).begin()
    api.call("POST", f"{PROJECT}/runs", {"run": "run-1", "rules": [rule]})
    api.driven.announce(1, recording.write(0, 0, 9, nan_from(5)))
    api.driven.settle(1)
    for labels, found in (
        (("team=vision",), 1),
        (("team=vision", "tier=1"), 1),
        (("team=x",), 0),
        (("x=1",), 0),
    ):
        query = "&".join(f"label={label}" for label in labels)
        assert len(get(api, f"/alerts?{query}")["alerts"]) == found, labels
    assert api.call("GET", f"{PROJECT}/alerts?label=nonsense").status_code == 422


def test_actions_and_attempts(judged: Api) -> None:
    (action,) = get(judged, "/runs/run-1/actions?kind=stop&state=pending")["actions"]
    assert get(judged, f"/runs/run-1/actions/{action['id']}") == action
    assert get(judged, "/runs/run-1/actions?kind=webhook")["actions"] == []
    assert judged.call("GET", f"{PROJECT}/runs/run-2/actions/{action['id']}").status_code == 404
    assert judged.call("GET", f"{PROJECT}/runs/run-1/actions/999").status_code == 404
    (attempt,) = get(judged, "/runs/run-1/attempts")["attempts"]
    assert (attempt["attempt"], attempt["largest"], attempt["job"]) == ("a1", 9, None)
    assert get(judged, "/runs/run-1/attempts/a1") == attempt
    assert judged.call("GET", f"{PROJECT}/runs/run-1/attempts/a2").status_code == 404


def test_events_of_a_run_and_of_the_project(judged: Api) -> None:
    of_run = get(judged, "/runs/run-1/events")
    assert [event["type"] for event in of_run["events"]][-2:] == [
        "io.watchstep.alert.firing",
        "io.watchstep.stop.requested",
    ]
    every = get(judged, "/events")["events"]
    assert [event for event in every if event["subject"] == "vision/run-1"] == of_run["events"]
    assert len(get(judged, "/events?type=io.watchstep.alert.firing")["events"]) == 1
    first = get(judged, "/events?limit=1")
    rest = get(judged, f"/events?page_token={first['next_page_token']}")
    assert [*first["events"], *rest["events"]] == every
    assert get(judged, f"/events?after={rest['after']}")["events"] == []


def test_another_project_sees_nothing_by_any_id(judged: Api) -> None:
    (action,) = get(judged, "/runs/run-1/actions?kind=stop")["actions"]
    for path in (
        "/runs/run-1/alerts",
        "/alerts",
        "/events",
        "/runs/run-1/attempts/a1",
        f"/runs/run-1/actions/{action['id']}",
    ):
        theirs = judged.call("GET", f"/v1/projects/language{path}", project="language")
        assert theirs.status_code == 404 or not any(
            theirs.json().get(name) for name in ("alerts", "events")
        ), path
        assert judged.call("GET", f"{PROJECT}{path}", project="language").status_code in {403, 404}, path


RULES = f"{PROJECT}/runs/run-2/rules"
MINE = {"rule": "exploding_gradient", "params": {"growth": 7}}


def test_an_operator_changes_the_rules_of_a_run(judged: Api, folder_store: Store) -> None:
    assert {rule["name"] for rule in get(judged, "/runs/run-2/rules")["rules"]} == {
        "non_finite_values",
        "exploding_gradient",
    }
    owners = judged.call("GET", f"{RULES}/exploding_gradient")
    assert owners.json()["origin"] == "owner"
    put = judged.call("PUT", f"{RULES}/exploding_gradient", MINE)
    assert (put.status_code, put.json()["origin"]) == (200, "operator")
    assert judged.call("GET", f"{RULES}/exploding_gradient").headers["etag"] == put.headers["etag"]
    assert put.headers["etag"] != owners.headers["etag"]
    assert judged.call("PUT", f"{RULES}/spike", {"rule": "loss_spike"}).status_code == 200
    judged.driven.announce(2, Recording(folder_store, "run-2").write(1, 10, 19))
    judged.driven.settle(2)
    states = {rule["name"]: rule["origin"] for rule in get(judged, "/runs/run-2/rules")["rules"]}
    assert states == {"non_finite_values": "owner", "exploding_gradient": "operator", "spike": "operator"}
    assert judged.call("DELETE", f"{RULES}/spike").status_code == 204
    assert judged.call("DELETE", f"{RULES}/spike").status_code == 404
    assert judged.call("GET", f"{RULES}/spike").status_code == 404


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
    assert judged.call("PUT", f"{RULES}/mine", MINE, role="recorder").status_code == 403


def conditional(api: Api, method: str, path: str, tag: str, body: str | None = None) -> int:
    headers = {
        "authorization": f"Bearer {api.token('operator')}",
        "if-match": tag,
        "content-type": "application/json",
    }
    return api.client.request(method, path, content=body, headers=headers).status_code


def test_changes_of_another_operator_are_not_overwritten(judged: Api) -> None:
    seen = judged.call("GET", f"{RULES}/exploding_gradient").headers["etag"]
    assert (
        conditional(judged, "PUT", f"{RULES}/exploding_gradient", seen, '{"rule": "exploding_gradient"}')
        == 200
    )
    assert (
        conditional(judged, "PUT", f"{RULES}/exploding_gradient", seen, '{"rule": "exploding_gradient"}')
        == 412
    )
    assert conditional(judged, "DELETE", f"{RULES}/exploding_gradient", seen) == 412
    assert conditional(judged, "PUT", f"{RULES}/new", "*", '{"rule": "loss_spike"}') == 412
    assert conditional(judged, "DELETE", f"{RULES}/exploding_gradient", "*") == 204


def test_the_rules_of_a_project_evaluate_its_next_runs(judged: Api) -> None:
    place = f"{PROJECT}/rules/exploding_gradient"
    assert judged.call("PUT", place, MINE).json()["origin"] == "project"
    assert [rule["name"] for rule in get(judged, "/rules")["rules"]] == ["exploding_gradient"]
    judged.driven.register("run-4")
    rule_status = get(judged, "/runs/run-4/rules/exploding_gradient")
    assert (rule_status["origin"], rule_status["config"]["params"]) == ("project", {"growth": 7})
    assert {rule["name"]: rule["origin"] for rule in get(judged, "/runs/run-4/rules")["rules"]} == {
        "exploding_gradient": "project",
        "non_finite_values": "owner",
    }
    judged.call("POST", f"{PROJECT}/runs", {"run": "run-4", "rules": [{"rule": "exploding_gradient"}]})
    assert get(judged, "/runs/run-4/rules/exploding_gradient")["origin"] == "operator"
    seen = judged.call("GET", place).headers["etag"]
    assert conditional(judged, "DELETE", place, '"other"') == 412
    assert conditional(judged, "DELETE", place, seen) == 204
    assert judged.call("GET", place).status_code == 404
    assert get(judged, "/rules")["rules"] == []
    assert get(judged, "/runs/run-2/rules/exploding_gradient")["origin"] == "owner"
