"""Webhook addresses are secrets: only operators see more than their hosts, and events and the audit log contain hosts only."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.api.conftest import Api
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_services.api.streaming import encode
from watchstep_services.core.redaction import action_key, host_of, shown_key, without_addresses
from watchstep_services.db.models import ActionRow

PROJECT = "/v1/projects/vision"
RUN = f"{PROJECT}/runs/run-1"
SECRET = "T0/B0/very-secret"
HOOK = f"https://hooks.example:8443/services/{SECRET}"
SHOWN = "https://hooks.example:8443/…"
MINE: dict[str, Any] = {
    "rule": "non_finite_values",
    "name": "mine",
    "params": {"only_nan": True},
    "actions": ["stop", {"webhook": HOOK}],
}


def ran(api: Api, store: Store) -> None:
    """A run with a rule that has fired, an action of it, and a stop without permission."""
    registered = api.call("POST", f"{PROJECT}/runs", {"run": "run-1", "rules": [MINE]}, role="recorder")
    assert registered.status_code == 200, registered.text
    assert SECRET not in registered.text
    assert api.call("PUT", f"{PROJECT}/rules/own", {**MINE, "name": "own"}).status_code == 200
    assert api.call("PUT", f"{RUN}/rules/mine", MINE).status_code == 200
    api.driven.announce(1, Recording(store).begin().write(0, 0, 7, nan_from(5)))
    api.driven.settle(1)


READ = (
    f"{PROJECT}/rules",
    f"{PROJECT}/rules/own",
    f"{RUN}/rules",
    f"{RUN}/rules/mine",
    RUN,
    f"{RUN}/alerts",
    f"{RUN}/events",
    f"{PROJECT}/events",
    f"{RUN}/actions",
    f"{PROJECT}/audit",
    f"{PROJECT}/stop-grants",
)


def test_only_operators_see_webhook_addresses(api: Api, folder_store: Store) -> None:
    ran(api, folder_store)
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


def test_operators_change_only_what_they_have_read(api: Api, folder_store: Store) -> None:
    ran(api, folder_store)
    seen = api.call("GET", f"{PROJECT}/rules/own")

    def changed(tag: str) -> int:
        headers = {"if-match": tag, "authorization": f"Bearer {api.token('operator')}"}
        body = json.dumps({**seen.json()["config"], "severity": "critical"})
        headers["content-type"] = "application/json"
        return api.client.request("PUT", f"{PROJECT}/rules/own", content=body, headers=headers).status_code

    assert [changed(seen.headers["etag"]), changed(seen.headers["etag"])] == [200, 412]


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
