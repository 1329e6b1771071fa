"""Tokens through the API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.api.conftest import Api
from tests.services.api.walking import ask
from watchstep_services.auth import Role, id_of, identify

ALL = "/v1/tokens"
VISION = "/v1/projects/vision/tokens"
RUNS = "/v1/projects/vision/runs"
BODY = {"role": "recorder", "name": "cluster a"}


def make(api: Api, place: str, body: dict[str, Any], **by: Any) -> dict[str, Any]:
    answer = api.call("POST", place, body, role="admin", **by)
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    created: dict[str, Any] = answer.json()
    return created


def test_an_admin_creates_lists_and_revokes_tokens(api: Api) -> None:
    created = make(api, ALL, {**BODY, "project": "vision", "lifetime_seconds": 600})
    assert (created["state"], created["role"], created["project"], created["name"]) == (
        "active",
        "recorder",
        "vision",
        "cluster a",
    )
    assert created["expires_ns"] - created["created_ns"] == 600 * 10**9
    assert created["created_by"].startswith("admin, token ")
    assert ask(api.client.app, "POST", RUNS, created["token"], {"run": "run-1"}).status == 200
    seen = api.call("GET", f"{ALL}/{created['id']}", role="admin").json()
    assert seen["last_used_ns"] >= created["created_ns"]
    assert "token" not in seen
    gone = api.call("DELETE", f"{ALL}/{created['id']}", role="admin").json()
    assert (gone["state"], gone["revoked_by"][:5]) == ("revoked", "admin")
    assert ask(api.client.app, "POST", RUNS, created["token"], {"run": "run-1"}).status == 401
    listed = api.call("GET", f"{ALL}?limit=1000", role="admin")
    assert created["id"] in {token["id"] for token in listed.json()["tokens"]}
    assert created["token"] not in listed.text
    active = api.call("GET", f"{ALL}?limit=1000&active=true", role="admin").json()["tokens"]
    assert created["id"] not in {token["id"] for token in active}


def test_tokens_are_listed_in_pages(api: Api) -> None:
    created = [make(api, VISION, {**BODY, "name": f"number {place}"})["id"] for place in range(5)]
    found: list[str] = []
    rest = "?limit=2"
    while rest:
        answer = api.call("GET", f"{VISION}{rest}", role="admin").json()
        found += [token["id"] for token in answer["tokens"]]
        rest = f"?limit=2&page_token={answer['next_page_token']}" if answer["next_page_token"] else ""
    assert sorted(found) == sorted(created)


def test_an_admin_of_a_project_manages_its_tokens_only(api: Api) -> None:
    created = make(api, VISION, BODY, project="vision")
    assert created["project"] == "vision"
    foreign = make(api, ALL, {**BODY, "project": "language"})
    everywhere = make(api, ALL, BODY)
    for method, place, status in (
        ("GET", ALL, 403),
        ("POST", ALL, 403),
        ("DELETE", f"{ALL}/{created['id']}", 403),
        ("POST", "/v1/projects/language/tokens", 403),
        ("GET", f"{VISION}/{foreign['id']}", 404),
        ("DELETE", f"{VISION}/{foreign['id']}", 404),
        ("DELETE", f"{VISION}/{everywhere['id']}", 404),
        ("DELETE", f"{VISION}/{created['id']}", 200),
    ):
        body = BODY if method == "POST" else None
        assert api.call(method, place, body, role="admin", project="vision").status_code == status, (
            method,
            place,
        )
    listed = api.call("GET", f"{VISION}?limit=1000", role="admin", project="vision").json()["tokens"]
    assert {token["project"] for token in listed} == {"vision"}
    for token in (foreign, everywhere):
        assert identify(api.driven.service.database, token["token"]) is not None


def test_an_expiring_token_creates_none_with_a_later_expiry(api: Api) -> None:
    short = make(api, ALL, {"role": "admin", "name": "for an hour", "lifetime_seconds": 3600})["token"]
    for body in (BODY, {**BODY, "lifetime_seconds": 7200}):
        refused = ask(api.client.app, "POST", ALL, short, body)
        assert (refused.status, "your own token expires" in refused.text) == (403, True)
    assert ask(api.client.app, "POST", ALL, short, {**BODY, "lifetime_seconds": 60}).status == 201


@pytest.mark.parametrize("role", ["viewer", "recorder", "operator"])
def test_only_admins(api: Api, role: Role) -> None:
    for method, place in (("GET", ALL), ("POST", ALL), ("GET", VISION), ("POST", VISION)):
        assert api.call(method, place, BODY if method == "POST" else None, role=role).status_code == 403


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "king"}, {"name": ""}, {"name": "x" * 129}, {"name": "a\nb"}, {"lifetime_seconds": 0},
        {"lifetime_seconds": 10**12}, {"project": "../x"}, {"secret": "mine"},
    ],
)  # fmt: skip
def test_an_invalid_token_request_is_reported(api: Api, changes: dict[str, Any]) -> None:
    answer = api.call("POST", ALL, {**BODY, **changes}, role="admin")
    assert (answer.status_code, answer.json()["hint"] != "") == (422, True)


def test_the_id_is_in_the_token(api: Api) -> None:
    created = make(api, ALL, BODY)
    assert id_of(created["token"]) == created["id"]
