"""Access control. All cases follow from the OpenAPI document, so that new routes are covered."""

from __future__ import annotations

import itertools

import pytest
from fastapi import APIRouter

from tests.services.api.conftest import Api
from tests.services.api.walking import Operation, ask, operations
from watchstep_services.api import app as app_module
from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.policies import PERMISSION, SCOPE, describe
from watchstep_services.api.openapi import ASSETS
from watchstep_services.auth import PERMISSIONS, Role

RUNS = "/v1/projects/vision/runs"
OPEN = {"/healthz", "/readyz"}
ROLES: tuple[Role, ...] = ("viewer", "recorder", "operator", "admin")
PROJECT = "vision"


def walked(api: Api) -> list[Operation]:
    return list(operations(api.client.get("/openapi.json").json()))


def test_every_operation_has_a_policy(api: Api) -> None:
    granted = {permission for permissions in PERMISSIONS.values() for permission in permissions}
    for operation in walked(api):
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


def test_every_route_for_every_role_and_scope(api: Api) -> None:
    tokens = {
        (role, project): api.token(role, project)
        for role, project in itertools.product(ROLES, (None, PROJECT, "language"))
    }
    for operation in walked(api):
        if operation.permission == "none":
            continue
        place = operation.at({"project": PROJECT})
        for (role, project), token in tokens.items():
            answer = ask(api.client.app, operation.method, place, token)
            allowed = answer.status not in {401, 403}
            assert allowed == may(operation, role, project), (operation.method, place, role, project, answer)


def test_a_request_without_a_token_is_refused(api: Api) -> None:
    requests = [(o.method, o.at({"project": PROJECT}), o.permission) for o in walked(api)]
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


def test_a_route_without_a_policy_is_refused_for_every_token(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = APIRouter(prefix="/v1/projects/{project}/forgotten")

    @router.get("")
    def forgotten(project: str) -> dict[str, str]:
        return {"project": project}

    monkeypatch.setattr(app_module, "ROUTERS", (*app_module.ROUTERS, router))
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
