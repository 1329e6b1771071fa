"""Silences, acknowledgements, grants and the audit log over the API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.api.conftest import Api
from tests.services.driving import Driven
from tests.services.recording import nan_from

PROJECT = "/v1/projects/vision"
RUN = f"{PROJECT}/runs/run-1"
MINE: dict[str, Any] = {
    "rule": "non_finite_values",
    "name": "mine",
    "labels": {"team": "vision"},
    "params": {"only_nan": True},
    "actions": ["stop"],
}


def fired(api: Api, role: Any = "recorder", **options: Any) -> int:
    """A run whose loss is NaN, with a rule of its own; returns its id."""
    answer = api.call("POST", f"{PROJECT}/runs", {"run": "run-1", "rules": [MINE], **options}, role=role)
    assert answer.status_code == 200, answer.text
    recording = api.driven.recording().begin()
    api.driven.judge(1, recording.write(0, 0, 7, nan_from(5)))
    return 1


def fingerprint(api: Api, name: str = "mine") -> str:
    alerts = api.call("GET", f"{RUN}/alerts").json()["alerts"]
    (found,) = [alert["fingerprint"] for alert in alerts if alert["name"] == name]
    return str(found)


def test_a_silence_is_previewed_created_listed_and_expired(api: Api) -> None:
    fired(api)
    body = {"matchers": ["team=vision", "run=~run-.*"]}
    (alert,) = api.call("POST", f"{PROJECT}/silences/preview", body).json()["alerts"]
    assert (alert["run"], alert["labels"]["name"], alert["labels"]["team"]) == ("run-1", "mine", "vision")
    silence = {**body, "reason": "a sweep", "duration_seconds": 3600}
    assert api.status("POST", f"{PROJECT}/silences", silence, role="viewer") == 403
    created = api.call("POST", f"{PROJECT}/silences", silence).json()
    assert (created["state"], created["suppresses_stop"], "operator" in created["author"]) == (
        "active",
        False,
        True,
    )
    assert created["ends_ns"] - created["starts_ns"] == 3600 * 10**9
    assert [
        entry["id"] for entry in api.call("GET", f"{PROJECT}/silences?state=active").json()["silences"]
    ] == [1]
    assert api.status("GET", "/v1/projects/other/silences/1") == 404
    assert api.status("DELETE", "/v1/projects/other/silences/1") == 404
    alert_path = f"{RUN}/alerts/{fingerprint(api)}"
    covering = api.call("GET", alert_path).json()["silence"]
    assert (covering["id"], covering["reason"], covering["suppresses_stop"]) == (1, "a sweep", False)
    ended = api.call("DELETE", f"{PROJECT}/silences/1").json()
    assert api.call("GET", alert_path).json()["silence"] is None
    assert (ended["state"], bool(ended["expired_by"])) == ("expired", True)
    assert api.call("DELETE", f"{PROJECT}/silences/1").json() == ended
    assert api.call("GET", f"{PROJECT}/silences?state=active").json()["silences"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matchers": ["run=~("]}, "regular expression"),
        ({"matchers": ["run!=nothing"]}, "every alert"),
        ({"matchers": ["nothing"]}, "not a matcher"),
        ({"matchers": []}, "matchers"),
        ({"reason": " "}, "reason"),
        ({"duration_seconds": None}, "duration_seconds"),
        ({"duration_seconds": None, "ends": "2001-01-01T00:00:00Z"}, "silence"),
        ({"ends": "2101-01-01T00:00:00Z"}, "duration_seconds"),
        ({"starts": "yesterday"}, "yesterday"),
    ],
)
def test_an_invalid_silence_is_refused(api: Api, change: dict[str, Any], message: str) -> None:
    api.driven.register()
    body = {"matchers": ["run=run-1"], "reason": "why", "duration_seconds": 60, **change}
    answer = api.call("POST", f"{PROJECT}/silences", body)
    assert (answer.status_code, message in answer.json()["detail"]) == (422, True), answer.text


def test_an_alert_is_acknowledged_and_the_acknowledgement_withdrawn(api: Api) -> None:
    run_id = fired(api)
    place = f"{RUN}/alerts/{fingerprint(api)}"
    assert api.call("GET", place).json()["acknowledgement"] is None
    assert api.status("PUT", f"{place}/acknowledgement", {}, role="viewer") == 403
    taken = api.call("PUT", f"{place}/acknowledgement", {"comment": "on it"}).json()["acknowledgement"]
    assert (taken["comment"], "operator" in taken["who"]) == ("on it", True)
    assert api.driven.event_types(run_id)[-1] == "alert.acknowledged"
    assert api.call("DELETE", f"{place}/acknowledgement").json()["acknowledgement"] is None
    assert api.status("GET", f"{RUN}/alerts/{'0' * 32}") == 404
    assert api.status("GET", f"{RUN}/alerts/none") == 422


def test_a_rule_stops_while_an_operator_allows_it(api: Api) -> None:
    run_id = fired(api)
    (would_have,) = [event["data"] for event in api.driven.events(run_id, "stop.would_have")]
    assert would_have["because"] == "not_allowed"
    assert "watchstep rules allow-stop mine --project vision" in would_have["hint"]
    assert would_have["evidence"]["segments"]
    grants = f"{PROJECT}/stop-grants"
    body = {"rule": "mine", "reason": "a month of backtests"}
    assert api.status("POST", grants, body, role="recorder") == 403
    assert api.status("POST", grants, {**body, "rule": "none"}) == 404
    granted = api.call("POST", grants, body).json()
    assert granted["digest"] == would_have["digest"]
    assert api.call("POST", grants, body).json()["id"] == granted["id"]
    assert {rule["name"]: rule["granted_stop"] for rule in api.call("GET", RUN).json()["rules"]}["mine"]

    def stops_of(attempt: str) -> list[str]:
        api.driven.judge(run_id, api.driven.recording(attempt=attempt).begin().write(0, 0, 7, nan_from(5)))
        lines = api.call("GET", f"{PROJECT}/audit?run=run-1&attempt={attempt}").json()["entries"]
        return [line["kind"] for line in reversed(lines) if line["who"] == "rule mine"]

    owners = {"rule": "non_finite_values", "name": "non_finite_values", "params": {"max_elements": 10**6}}
    api.call("POST", f"{PROJECT}/runs", {"run": "run-1", "rules": [owners]})
    assert stops_of("a2") == ["requested"]
    other = {**MINE, "params": {"only_nan": False}}
    api.call("POST", f"{PROJECT}/runs", {"run": "run-1", "rules": [other]}, role="recorder")
    assert stops_of("a3") == ["would_have"]
    api.call("POST", f"{PROJECT}/runs", {"run": "run-1", "rules": [MINE]}, role="recorder")
    revoked = api.call("POST", f"{grants}/{granted['id']}/revoke", {"reason": "it cried wolf"}).json()
    assert revoked["revoked_reason"] == "it cried wolf"
    assert stops_of("a4") == ["would_have"]
    assert (
        api.status("POST", f"/v1/projects/other/stop-grants/{granted['id']}/revoke", {"reason": "x"}) == 404
    )


def test_rules_with_different_parameters_are_distinguished_by_run_or_digest(api: Api) -> None:
    for run, share in (("run-1", 1), ("run-2", 2)):
        rules = [{**MINE, "params": {"max_elements": share}}]
        api.call("POST", f"{PROJECT}/runs", {"run": run, "rules": rules})
    body = {"rule": "mine", "reason": "tried"}
    several = api.call("POST", f"{PROJECT}/stop-grants", body)
    assert (several.status_code, "2 different configs" in several.json()["detail"]) == (422, True)
    grant = api.call("POST", f"{PROJECT}/stop-grants", {**body, "run": "run-2"}).json()
    assert grant["judges"]["params"]["max_elements"] == 2
    again = api.call("POST", f"{PROJECT}/stop-grants", {**body, "digest": grant["digest"][:12]}).json()
    assert again["id"] == grant["id"]


def test_an_operator_but_no_recorder_may_allow_stops_at_registration(api: Api) -> None:
    refused = api.call(
        "POST",
        f"{PROJECT}/runs",
        {"run": "run-1", "rules": [MINE], "allow_stop": "please"},
        role="recorder",
    )
    assert refused.status_code == 403
    run_id = fired(api, "operator", allow_stop="my own launch")
    effective = {
        line["who"]: line["data"]["allowed"]["reason"]
        for line in api.call("GET", f"{PROJECT}/audit").json()["entries"]
        if line["kind"] in ("requested", "repeated")
    }
    assert effective == {"rule mine": "my own launch", "rule non_finite_values": "it contains 'stop'"}
    assert len(api.driven.actions(run_id)) == 1


def test_the_audit_log_contains_a_stop_from_the_grant_to_the_end(api: Api) -> None:
    run_id = fired(api)
    (action,) = api.driven.actions(run_id)
    # The next attempt has begun, and nothing of this one was found since: nothing is there to stop any more.
    api.driven.judge(run_id, api.driven.recording(attempt="a2").begin().write(0, 0, 3))
    api.driven.finish(action.id)
    api.call("POST", f"{RUN}/stop", {"attempt": "a1", "reason": "again"})
    lines = list(reversed(api.call("GET", f"{PROJECT}/audit?run=run-1").json()["entries"]))
    assert [line["kind"] for line in lines] == ["requested", "would_have", "tried", "ended", "repeated"]
    requested, ended, repeated = lines[0], lines[3], lines[4]
    assert requested["who"] == "rule non_finite_values"
    assert requested["data"]["allowed"]["by"] == "owner"
    assert requested["data"]["step"] == 5
    assert requested["data"]["evidence"]["segments"]
    assert (ended["data"]["state"], ended["data"]["tries"]) == ("skipped", 1)
    assert "operator" in repeated["who"]
    first = api.call("GET", f"{PROJECT}/audit?run=run-1&limit=3").json()
    second = api.call("GET", f"{PROJECT}/audit?run=run-1&page_token={first['next_page_token']}").json()
    assert list(reversed(first["entries"] + second["entries"])) == lines
    assert api.call("GET", "/v1/projects/other/audit").json()["entries"] == []


def test_entries_of_the_audit_log_cannot_be_changed_or_deleted(driven: Driven) -> None:
    from sqlalchemy import text
    from sqlalchemy.exc import DatabaseError

    from watchstep_services.runs.stops import Subject, note

    with driven.service.database.write() as session:
        note(session, "requested", Subject("vision", "run-1", "a1"), "somebody", 1, {})
    for change in ("UPDATE stop_audit SET who = 'nobody'", "DELETE FROM stop_audit"):
        with pytest.raises(DatabaseError, match="only grows"), driven.service.database.write() as session:
            session.execute(text(change))
