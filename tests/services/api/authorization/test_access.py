"""Access control. All cases follow from the OpenAPI document, so that new routes are covered."""

from __future__ import annotations

import io
import itertools
import json
import logging
import secrets
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from fastapi import APIRouter

from tests.services.api.conftest import Api
from tests.services.api.walking import Operation, ask, operations
from watchstep.capture.service.client import MOST_SEGMENTS
from watchstep_services.api import app as app_module
from watchstep_services.api import lookup
from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.access import CACHE_SECONDS, TokenCache
from watchstep_services.api.middleware.policies import PERMISSION, SCOPE, describe
from watchstep_services.api.openapi import ASSETS
from watchstep_services.auth import PERMISSIONS, AuthenticatedCaller, Role, create_token, id_of, revoke
from watchstep_services.core.telemetry import logs

RUNS = "/v1/projects/vision/runs"
OPEN = {"/healthz", "/readyz"}
ROLES: tuple[Role, ...] = ("viewer", "recorder", "operator", "admin")
PROJECT = "vision"
FIRST = {"node": "n", "writer": "w", "seq": 0, "first": 0, "last": 3}
SEGMENT = {"attempt": "a1", "segments": [FIRST]}
WHO = AuthenticatedCaller("recorder", "vision", "0123456789abcdef")


def test_every_operation_has_a_policy() -> None:
    granted = {permission for permissions in PERMISSIONS.values() for permission in permissions}
    for operation in operations():
        if operation.path in OPEN:
            assert operation.permission == "none", operation.path
        else:
            assert operation.permission in granted, (
                f"{operation.method} {operation.path}: mark it with @permits(…)"
            )
            assert operation.definition["security"], operation.path
        assert ("/projects/{" in operation.path) == ("/projects/{project}" in operation.path)
        if operation.permission not in {"none", "read"} and "{project}" not in operation.path:
            assert operation.definition[SCOPE] == "all projects", operation.path


def may(operation: Operation, role: Role, project: str | None) -> bool:
    if operation.permission not in PERMISSIONS[role]:
        return False
    if "{project}" in operation.path:
        return project in {None, PROJECT}
    return project is None or operation.definition.get(SCOPE) != "all projects"


@pytest.mark.ci
def test_every_route_for_every_role_and_scope(api: Api) -> None:
    tokens = {
        (role, project): api.token(role, project)
        for role, project in itertools.product(ROLES, (None, PROJECT, "language"))
    }
    for operation in operations():
        if operation.permission == "none":
            continue
        place = operation.at({"project": PROJECT})
        for (role, project), token in tokens.items():
            answer = ask(api.client.app, operation.method, place, token)
            allowed = answer.status not in {401, 403}
            assert allowed == may(operation, role, project), (operation.method, place, role, project, answer)


@pytest.mark.ci
def test_a_request_without_a_token_is_refused(api: Api) -> None:
    requests = [(o.method, o.at({"project": PROJECT}), o.permission) for o in operations()]
    requests += [
        ("GET", "/v1/nothing", "read"),
        ("DELETE", RUNS, "read"),
        ("GET", "/nothing", "read"),
        ("GET", "/", "none"),
        ("GET", "/docs", "none"),
        *(("GET", path, "none") for path in ASSETS),
    ]
    app = create_app(api.driven.with_settings(failures_per_minute=0).service)
    for method, place, permission in requests:
        for named in ({}, {"authorization": "Bearer ws_guessed"}, {"authorization": "Basic eDp5"}):
            answer = ask(app, method, place, headers=named)
            assert (answer.status == 401) == (permission != "none"), (method, place)
            assert permission == "none" or answer.headers["www-authenticate"] == "Bearer"


def test_a_body_is_not_read_without_permission(api: Api) -> None:
    """Otherwise a broken body would be reported before the token."""
    broken = api.client.request("POST", RUNS, content="{", headers={"content-type": "application/json"})
    assert broken.status_code == 401
    token = api.token("viewer")
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    assert api.client.request("POST", RUNS, content="{", headers=headers).status_code == 403


@pytest.mark.ci
def test_a_route_without_a_policy_is_refused_for_every_token(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = APIRouter(prefix="/v1/projects/{project}/forgotten")

    @router.get("")
    def forgotten(project: str) -> dict[str, str]:
        return {"project": project}

    monkeypatch.setattr(app_module, "ROUTERS", (*app_module.ROUTERS, router))
    # The routes of a process are built once, and are there already.
    monkeypatch.setattr(app_module, "_routes", app_module._routes.__wrapped__)
    app = create_app(api.driven.service)
    assert PERMISSION not in app.openapi()["paths"]["/v1/projects/{project}/forgotten"]["get"]
    for role in ROLES:
        answer = ask(app, "GET", "/v1/projects/vision/forgotten", api.token(role))
        assert (answer.status, "no access policy" in answer.text) == (403, True)


def test_a_nested_router_is_an_error_at_the_start() -> None:
    router = APIRouter()
    router.mount("/files", APIRouter())
    with pytest.raises(TypeError, match="only plain routes"):
        describe(router)


@pytest.mark.parametrize(
    ("role", "project", "message"),
    [
        ("viewer", None, "a token of role viewer may not record"),
        ("operator", "language", "belongs to project 'language', not 'vision'"),
    ],
)
def test_a_refusal_states_its_reason(api: Api, role: Role, project: str | None, message: str) -> None:
    answer = api.call("POST", RUNS, {"run": "run-1"}, role=role, project=project)
    assert answer.status_code == 403
    assert message in answer.json()["detail"]
    assert answer.json()["hint"]


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the log of a process writes, at the lowest level."""
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    logs.configure("json", "DEBUG", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.ci
def test_the_api_and_its_log_contain_no_secret(
    api: Api, written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation, good and bad requests, with secrets in the header, the path, the query and the body."""
    planted = secrets.token_urlsafe(32)
    url = f"postgresql://watchstep:{planted}@db/watchstep"
    tokens = [api.token(role) for role in ("viewer", "recorder", "operator", "admin")]
    out: list[str] = []

    def every(*values: str) -> None:
        for operation in operations():
            for token in (*tokens, f"wst_0123456789abcdef_{planted}"):
                body = {"run": url, "password": planted, "url": url, "role": f"Bearer {planted}"}
                place = operation.at(dict.fromkeys(operation.parameters, url) | {"project": "vision"})
                for target in (
                    place,
                    f"{place}?page_token={quote(url, safe='')}&limit={quote(url, safe='')}",
                ):
                    if operation.method != "DELETE" and "/tokens" not in operation.path:
                        out.append(ask(api.client.app, operation.method, target, token, body).text)
                    else:
                        out.append(ask(api.client.app, operation.method, target, "x" + token).text)

    every()

    def fails(*_arguments: object, **_named: object) -> None:
        raise ZeroDivisionError(f"{url} Authorization: Bearer {planted} {tokens[0]}")

    monkeypatch.setattr(lookup, "run_prefix", fails)
    out.append(ask(api.client.app, "GET", "/v1/projects/vision/runs/run-1/alerts", tokens[0]).text)
    assert "ZeroDivisionError" in written.getvalue()
    output = "\n".join([*out, written.getvalue()])
    for secret in (planted, *(token.split("_", 2)[2] for token in tokens)):
        assert secret not in output


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_entry_expires_or_is_discarded() -> None:
    clock = Clock()
    cache = TokenCache(clock)
    assert cache.get("good") is None
    cache.put("good", WHO, clock())
    assert cache.get("good") == WHO
    assert cache.get("goo") is None
    clock.now += CACHE_SECONDS
    assert cache.get("good") is None
    cache.put("good", WHO, clock())
    cache.discard("another")
    assert cache.get("good") == WHO
    cache.discard(WHO.token)
    assert cache.get("good") is None


def test_the_cache_has_a_limited_size() -> None:
    cache = TokenCache(Clock())
    for number in range(11_000):
        cache.put(f"token {number}", WHO, cache.now())
    assert cache.get("token 999") is None
    assert cache.get("token 10999") == WHO


def test_a_token_revoked_by_another_process_is_refused_soon(api: Api) -> None:
    clock = Clock()
    api.client.app.state.token_cache._clock = clock
    token = create_token(api.driven.service.database, "recorder")
    assert ask(api.client.app, "POST", RUNS, token, {"run": "run-1"}).status == 200
    revoke(api.driven.service.database, id_of(token), None, "somebody else")
    clock.now += CACHE_SECONDS
    assert ask(api.client.app, "POST", RUNS, token, {"run": "run-1"}).status == 401


def test_an_invalid_announcement_gets_the_usual_error(api: Api) -> None:
    api.call("POST", RUNS, {"run": "run-1"}, role="recorder")
    path = f"{RUNS}/run-1/announcements"
    good = api.call("POST", path, SEGMENT, role="recorder")
    assert (good.status_code, good.headers["content-type"]) == (200, "application/json")
    assert good.json()["pause_seconds"] == 0.0
    for body, word in (
        ({**SEGMENT, "segments": [{**FIRST, "seq": -1}]}, "seq"),
        ([], "body"),
        ({**SEGMENT, "segments": [{**FIRST, "last": -1}]}, "last"),
        ({**SEGMENT, "segments": []}, "segments"),
        ({**SEGMENT, "segments": [FIRST] * (MOST_SEGMENTS + 1)}, "segments"),
        (None, "body"),
    ):
        bad = api.call("POST", path, body, role="recorder")
        assert bad.status_code == 422, body
        assert word in bad.json()["detail"]
    assert api.status("POST", f"{RUNS}/run-2/announcements", SEGMENT, role="recorder") == 404
    assert api.status("POST", path, SEGMENT, role="viewer") == 403
    assert api.status("POST", path, {**SEGMENT, "segments": [{**FIRST, "first": 4}]}, role="recorder") == 422
    token = api.token("recorder")
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    assert api.client.request("POST", path, content="{", headers=headers).status_code == 422
    headers["content-type"] = "text/plain"
    assert api.client.request("POST", path, content=json.dumps(SEGMENT), headers=headers).status_code == 422
