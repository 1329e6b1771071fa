"""Receivers of a project, and what is shown of their addresses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from tests.services.api.conftest import Api
from tests.services.channels.http_server import http_server, status
from tests.services.driving import Driven
from tests.services.recording import PROJECT, nan_from
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.api.streaming import encode
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.channels.webhook import new_secret
from watchstep_services.core.redaction import action_key, host_of, redact, shown_key, without_addresses
from watchstep_services.db.encryption import SecretBox, new_key
from watchstep_services.db.models import ActionRow, ReceiverRow, ReceiverSecret
from watchstep_services.notify.directory import find_receiver, open_secrets, routes_of

AT = f"/v1/projects/{PROJECT}/receivers"
ROUTING = f"/v1/projects/{PROJECT}/routing"
SQS = {"name": "queue", "kind": "sqs", "queue_arn": "arn:aws:sqs:eu-central-1:123456789012:alerts"}
OWNED = {
    "receivers": [{"name": "owned", "kind": "webhook", "url": "https://hooks.example/owner"}],
    "route": {"receiver": "owned"},
}
VISION = "/v1/projects/vision"
RUN = f"{VISION}/runs/run-1"
SECRET = "T0/B0/very-secret"
HOOK = f"https://hooks.example:8443/services/{SECRET}"
SHOWN = "https://hooks.example:8443/…"
MINE: dict[str, Any] = {
    "rule": "non_finite_values",
    "name": "mine",
    "params": {"only_nan": True},
    "actions": ["stop", {"webhook": HOOK}],
}


@pytest.fixture
def keyed(api: Api) -> Api:
    """A service with an encryption key, and a receiver of its owner."""
    key = SecretStr(f"{new_key()},{new_key()}")
    driven = api.driven.with_settings(secret_key=key, webhook_seconds=30.0)
    driven = Driven(replace(driven.service, receiver_file=ReceiverFile.model_validate(OWNED)))
    return Api.of(driven)


def webhook(name: str = "hook", url: str = "https://hooks.example/a", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "webhook", "url": url, **more}


def put(api: Api, body: dict[str, Any], **who: Any) -> Any:
    return api.call("PUT", f"{AT}/{body['name']}", body, **who)


@pytest.mark.ci
def test_a_secret_is_written_but_never_returned(keyed: Api) -> None:
    secret = new_secret()
    first = put(keyed, webhook(secret=secret))
    assert first.status_code == 200, first.text
    shown = keyed.call("GET", f"{AT}/hook")
    for answer in (first, shown, keyed.call("GET", AT)):
        assert secret not in answer.text
    assert shown.json()["receiver"]["secret"] == {"set": True}
    with keyed.driven.service.database.read() as session:
        (row,) = session.execute(select(ReceiverSecret)).scalars()
    assert secret not in row.encrypted
    # What was shown may be sent back: the secret stays, and goes where the field goes.
    again = put(keyed, {**shown.json()["receiver"], "title": "{name}"})
    assert again.status_code == 200, again.text
    assert again.json()["receiver"]["secret"] == {"set": True}
    assert put(keyed, webhook()).json()["receiver"].get("secret") is None
    with keyed.driven.service.database.read() as session:
        assert session.execute(select(ReceiverSecret)).scalars().all() == []


def test_a_stored_secret_is_not_sent_to_another_address(keyed: Api) -> None:
    put(keyed, webhook(secret=new_secret()))
    stolen = put(keyed, webhook(url="https://evil.example/", secret={"set": True}))
    assert (stolen.status_code, "another address" in stolen.json()["detail"]) == (422, True)
    assert put(keyed, webhook("new", secret={"set": True})).status_code == 422


def test_no_secret_is_stored_without_a_key(api: Api) -> None:
    secret = new_secret()
    answer = put(api, webhook(secret=secret))
    assert (answer.status_code, "WATCHSTEP_SECRET_KEY: not set" in answer.text) == (422, True)
    assert "watchstep receivers new-key" in answer.json()["hint"]
    assert secret not in answer.text
    assert put(api, webhook()).status_code == 200


def test_a_secret_that_cannot_be_used_is_refused_and_not_repeated(keyed: Api) -> None:
    for body in (webhook(secret="hunter2"), webhook(authorization="hunter2\r\nX: y")):
        answer = put(keyed, body)
        assert (answer.status_code, "hunter2" in answer.text) == (422, False)


def test_only_admins_write_what_acts_with_the_services_rights(keyed: Api) -> None:
    from_environment = webhook(authorization={"env": "WATCHSTEP_RECEIVER_TOKEN"})
    for body in (SQS, from_environment):
        assert put(keyed, body).status_code == 403
        assert put(keyed, body, role="admin").status_code == 200
        assert put(keyed, webhook(body["name"])).status_code == 403
        assert keyed.status("DELETE", f"{AT}/{body['name']}") == 403
        assert keyed.status("DELETE", f"{AT}/{body['name']}", role="admin") == 200
    from_file = webhook(authorization={"file": "/etc/passwd"})
    assert put(keyed, from_file, role="admin").status_code == 403
    anything = webhook(authorization={"env": "WATCHSTEP_SECRET_KEY"})
    assert put(keyed, anything, role="admin").status_code == 422
    for role in ("viewer", "recorder"):
        assert put(keyed, webhook(), role=role).status_code == 403
        assert keyed.status("GET", AT, role=role) == 403


@pytest.mark.parametrize(
    ("body", "field", "secret"),
    [
        ({"kind": "pagerduty"}, "routing_key", "e93facc04764012d7bfb002500d5d1a6"),
        (
            {"kind": "teams"},
            "url",
            "https://prod-1.westeurope.logic.azure.com/workflows/1/invoke?sig=secret-signature",
        ),
    ],
)
def test_a_receiver_of_pagerduty_or_teams(keyed: Api, body: dict[str, Any], field: str, secret: str) -> None:
    with http_server() as server:
        address = {"url": server.url} if field == "routing_key" else {}
        given = secret if field == "routing_key" else server.url
        api = keyed.with_settings(allowed_addresses="loopback")
        written = put(api, {"name": "r", **body, **address, field: given})
        assert written.status_code == 200, written.text
        for status_sent in ("firing", "resolved"):
            tested = api.call("POST", f"{AT}/r/test", {"status": status_sent})
            assert tested.json()["result"] == "done", tested.text
        assert len(server.bodies) == 2
    shown = [written, keyed.call("GET", f"{AT}/r"), keyed.call("GET", AT), tested]
    assert not [answer.text for answer in shown if given in answer.text and field == "routing_key"]
    assert shown[1].json()["receiver"][field] == {"set": True}
    refused = put(
        keyed, {"name": "bad", **body, field: secret[:-1] if field == "routing_key" else f"ftp{secret}"}
    )
    assert (refused.status_code, secret[:-1] in refused.text) == (422, False)
    previewed = keyed.call("POST", f"{AT}/r/preview", {"title": "{name}", "text": "{url}"})
    assert previewed.json()["title"] == "test"


def test_projects_do_not_see_each_others_receivers(keyed: Api) -> None:
    put(keyed, webhook())
    other = AT.replace(PROJECT, "text")
    assert keyed.status("GET", f"{other}/hook") == 404
    assert keyed.status("POST", f"{other}/hook/test", {}) == 404
    assert keyed.status("DELETE", f"{other}/hook") == 404
    assert keyed.status("GET", f"{AT}/hook", project="text") in (403, 404)
    tree = {"receiver": "hook"}
    assert keyed.status("PUT", ROUTING.replace(PROJECT, "text"), tree) == 422
    assert [entry["name"] for entry in keyed.call("GET", other).json()["receivers"]] == ["owned"]


def test_receivers_of_the_owner_cannot_be_changed(keyed: Api) -> None:
    assert keyed.call("GET", f"{AT}/owned").json()["origin"] == "owner"
    assert put(keyed, webhook("owned"), role="admin").status_code == 409
    assert keyed.status("DELETE", f"{AT}/owned", role="admin") == 404


@pytest.mark.ci
def test_addresses_inside_are_refused(keyed: Api) -> None:
    for url in (
        "http://169.254.169.254/latest",
        "http://10.0.0.1/",
        "http://[fd00:ec2::254]/",
        "http://2130706433/",
    ):
        assert put(keyed, webhook(url=url)).status_code == 422


def test_changes_of_others_are_not_overwritten(keyed: Api) -> None:
    etag = put(keyed, webhook()).headers["etag"]
    assert keyed.call("GET", f"{AT}/hook").headers["etag"] == etag
    path, headers = f"{AT}/hook", {"if-match": etag}
    changes = [keyed.status("PUT", path, webhook(title=title), headers=headers) for title in ("a", "b")]
    assert changes == [200, 412]
    assert keyed.status("DELETE", path, headers=headers) == 412


def test_a_test_is_really_sent_and_signed(keyed: Api) -> None:
    with http_server() as server:
        put(keyed, webhook(url=server.url, secret=new_secret()))
        sent = keyed.call("POST", f"{AT}/hook/test", {"status": "resolved"}).json()
        assert (sent["result"], len(server.bodies)) == ("done", 1)
        event = json.loads(server.bodies[0])
        assert (event["id"], event["type"]) == (sent["notification"], "io.watchstep.notification.resolved")
        assert "webhook-signature" in server.headers[0]
        server.answers = [status(500)]
        failed = keyed.call("POST", f"{AT}/hook/test", {}).json()
        assert (failed["result"], "answered 500" in failed["detail"]) == ("error", True)


def fire(api: Api) -> None:
    rule = {
        "rule": "non_finite_values",
        "name": "mine",
        "labels": {"team": "vision"},
        "actions": [{"notify": "hook"}, {"notify": "gone"}],
    }
    api.driven.record(nan_from(5), rules=[RuleConfig.model_validate(rule)])


def test_templates_are_previewed(keyed: Api) -> None:
    put(keyed, webhook(title="{name} of {run}"))
    fire(keyed)
    preview = f"{AT}/hook/preview"
    assert keyed.call("POST", preview, {}).json()["title"] == "test of test"
    real = keyed.call(
        "POST", preview, {"run": "run-1", "name": "mine", "text": "{label.team}: {where}"}
    ).json()
    assert real["title"] == "mine of run-1"
    assert real["text"].startswith("vision: ")
    wrong = keyed.call("POST", preview, {"text": "{__class__}"})
    assert (wrong.status_code, "unknown field {__class__}" in wrong.text) == (422, True)
    assert keyed.status("POST", preview, {"run": "run-1", "name": "never"}) == 404


def test_the_tree_is_the_owners_until_a_project_has_its_own(keyed: Api) -> None:
    assert keyed.call("GET", ROUTING, role="viewer").json()["origin"] == "owner"
    put(keyed, webhook())
    tree = {
        "receiver": "owned",
        "routes": [{"receiver": "hook", "matchers": ["team=vision"], "continue": True}],
    }
    assert keyed.status("PUT", ROUTING, tree, role="viewer") == 403
    written = keyed.call("PUT", ROUTING, tree)
    assert (written.status_code, written.json()["origin"]) == (200, "project"), written.text
    # What is read can be written.
    assert keyed.call("PUT", ROUTING, keyed.call("GET", ROUTING).json()["route"]).json() == written.json()
    assert keyed.status("DELETE", f"{AT}/hook") == 409
    unknown = keyed.call("PUT", ROUTING, {"receiver": "nobody"})
    assert (unknown.status_code, "'nobody'" in unknown.json()["detail"]) == (422, True)
    fire(keyed)
    seen = keyed.call("POST", f"{ROUTING}/preview", {"run": "run-1", "name": "mine"}).json()
    assert [route["receiver"] for route in seen["routes"]] == ["hook"]
    assert (seen["labels"]["team"], seen["unknown"]) == ("vision", ["gone"])
    assert seen["routes"][0]["group_labels"] == {"project": PROJECT, "run": "run-1"}
    for severity, reached in (("warning", ["owned", "hook"]), ("info", [])):
        labels = {"labels": {"severity": severity}, "notify": ["hook"]}
        seen = keyed.call("POST", f"{ROUTING}/preview", labels).json()
        assert [route["receiver"] for route in seen["routes"]] == reached
    tried = keyed.call("POST", f"{ROUTING}/preview", {"labels": {}, "route": {"receiver": "hook"}}).json()
    assert [route["receiver"] for route in tried["routes"]] == ["hook"]
    assert keyed.call("DELETE", ROUTING).json()["origin"] == "owner"


def test_a_rule_reports_its_unknown_receivers(keyed: Api) -> None:
    put(keyed, webhook())
    fire(keyed)
    rules = keyed.call("GET", f"/v1/projects/{PROJECT}/runs/run-1").json()["rules"]
    (warning,) = next(rule["warnings"] for rule in rules if rule["name"] == "mine")
    assert "'gone'" in warning


def test_an_alertmanager_is_notified_at_its_own_interval(keyed: Api) -> None:
    put(
        keyed, {"name": "hook", "kind": "alertmanager", "url": "http://am.example:9093", "resend_seconds": 30}
    )
    tree = {"receiver": "hook", "group_wait": 60, "repeat_interval": "4h", "send_resolved": False}
    (route,) = keyed.call("POST", f"{ROUTING}/preview", {"route": tree}).json()["routes"]
    assert (route["group_wait"], route["repeat_interval"], route["send_resolved"]) == (0, 30, True)


def test_a_receiver_of_a_later_version_is_reported_and_blocks_no_other(keyed: Api) -> None:
    put(keyed, webhook("good"))
    put(keyed, webhook("later"))
    keyed.driven.change(
        ReceiverRow, (PROJECT, "later"), kind="pigeon", config={"name": "later", "kind": "pigeon", "loft": 3}
    )
    listed = {receiver["name"]: receiver for receiver in keyed.call("GET", AT).json()["receivers"]}
    assert "pigeon" in listed["later"]["problem"]
    assert (listed["good"]["problem"], listed["later"]["receiver"]) == ("", {})
    assert "loft" not in keyed.call("GET", f"{AT}/later").text
    for path in ("test", "preview"):
        refused = keyed.call("POST", f"{AT}/later/{path}", {})
        assert (refused.status_code, "run the version" in refused.json()["hint"]) == (409, True)
    with keyed.driven.service.database.read() as session:
        found = routes_of(keyed.driven.service, session, PROJECT, {}, ("good", "later"))
    assert "good" in {route.receiver for route in found}
    assert "later" not in {route.receiver for route in found}
    assert put(keyed, webhook("later")).status_code == 403, "its permissions are unknown"
    assert keyed.status("DELETE", f"{AT}/later") == 403
    assert keyed.call("DELETE", f"{AT}/later", role="admin").json()["kind"] == "pigeon"
    assert keyed.status("GET", f"{AT}/later") == 404


def test_a_decrypted_secret_is_in_no_log(keyed: Api) -> None:
    secret = "correct horse battery staple"  # of no form that the log knows
    service = keyed.driven.service
    put(keyed, webhook(secret=new_secret()))
    with service.database.write() as session:
        row = session.get_one(ReceiverSecret, (PROJECT, "hook", "secret"))
        row.encrypted = SecretBox(service.settings).encrypt(f"{PROJECT}/hook/secret", secret)
    with service.database.read() as session:
        receiver = find_receiver(service, session, PROJECT, "hook")
        assert open_secrets(service, session, PROJECT, receiver) == {"secret": secret}
    assert secret not in redact(f"the receiver says: I do not know {secret}")


def ran(api: Api) -> None:
    """A run with a rule that has fired, an action of it, and a stop without permission."""
    registered = api.call("POST", f"{VISION}/runs", {"run": "run-1", "rules": [MINE]}, role="recorder")
    assert registered.status_code == 200, registered.text
    assert SECRET not in registered.text
    assert api.status("PUT", f"{VISION}/rules/own", {**MINE, "name": "own"}) == 200
    assert api.status("PUT", f"{RUN}/rules/mine", MINE) == 200
    api.driven.judge(1, api.driven.recording().begin().write(0, 0, 7, nan_from(5)))


READ = (
    f"{VISION}/rules",
    f"{VISION}/rules/own",
    f"{RUN}/rules",
    f"{RUN}/rules/mine",
    RUN,
    f"{RUN}/alerts",
    f"{RUN}/events",
    f"{VISION}/events",
    f"{RUN}/actions",
    f"{VISION}/audit",
    f"{VISION}/stop-grants",
)


@pytest.mark.ci
def test_only_operators_see_webhook_addresses(api: Api) -> None:
    ran(api)
    of_rules = READ[:5]
    for path in READ:
        for role in ("viewer", "operator", "admin"):
            answer = api.call("GET", path, role=role)
            assert answer.status_code == 200, answer.text
            assert (SECRET in answer.text) == (path in of_rules and role != "viewer"), (path, role)
    for path in of_rules:
        assert SHOWN in str(api.call("GET", path, role="viewer").json())
    with api.driven.service.database.read() as session:
        posted = [row for row in session.query(ActionRow) if row.kind == "webhook"]
    assert {row.payload["url"] for row in posted} == {HOOK}
    assert SECRET not in json.dumps([row.payload["event"] for row in posted])


def test_operators_change_only_what_they_have_read(api: Api) -> None:
    ran(api)
    seen = api.call("GET", f"{VISION}/rules/own")

    body, headers = {**seen.json()["config"], "severity": "critical"}, {"if-match": seen.headers["etag"]}
    changes = [api.status("PUT", f"{VISION}/rules/own", body, headers=headers) for _ in range(2)]
    assert changes == [200, 412]


def test_addresses_that_earlier_versions_stored_are_not_shown() -> None:
    event = {"data": {"rule_config": {"actions": [{"kind": "webhook", "url": HOOK}, {"webhook": HOOK}]}}}
    assert SECRET.encode() not in encode(7, "io.watchstep.alert.firing", event)
    assert shown_key(f"webhook:e1:{HOOK}") == action_key("e1", HOOK)
    assert shown_key("stop:1:a1") == "stop:1:a1"


@pytest.mark.parametrize(
    ("address", "host"),
    [
        (HOOK, SHOWN),
        ("https://user:pass@a.example/x?y#z", "https://a.example/…"),
        ("http://[::1]:80/x", "http://[::1]:80/…"),
        ("http://a.example:port/", "…"),
        (7, ":///…"),
    ],
)
def test_only_the_host_of_an_address_is_shown(address: object, host: str) -> None:
    assert host_of(address) == host


def test_other_data_is_unchanged() -> None:
    data = {"kind": "notify", "url": HOOK, "list": [1, None, {"webhook": 1, "more": 2}]}
    assert without_addresses(data) == data
