from __future__ import annotations

import pytest

from tests.services.api.conftest import Api
from watchstep_services.api.access import OPEN_PATHS

RUNS = "/v1/projects/vision/runs"


def test_every_route_but_the_open_ones_needs_a_token(api: Api) -> None:
    paths = api.client.get("/openapi.json").json()["paths"]
    walked = 0
    for path, methods in paths.items():
        for method in methods:
            place = path.format(project="vision", run="run-1", name="nan_or_inf", number=1)
            for headers in ({}, {"authorization": "Bearer ws_guessed"}, {"authorization": "Basic eDp5"}):
                answer = api.client.request(method, place, headers=headers)
                assert (answer.status_code == 401) == (path not in OPEN_PATHS), (method, path)
            walked += path not in OPEN_PATHS
    assert walked >= 11


def test_the_open_ones_answer(api: Api) -> None:
    for path in OPEN_PATHS:
        assert api.client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("role", "method", "path", "status"),
    [
        ("viewer", "GET", RUNS, 200),
        ("viewer", "POST", RUNS, 403),
        ("recorder", "GET", RUNS, 403),
        ("recorder", "POST", RUNS, 200),
        ("recorder", "POST", f"{RUNS}/run-1/stop", 403),
        ("recorder", "PUT", f"{RUNS}/run-1/job", 403),
        ("viewer", "GET", "/v1/rules", 200),
        ("viewer", "GET", "/v1/projects/vision/backtests/1", 403),
        ("recorder", "POST", "/v1/projects/vision/backtests", 403),
    ],
)
def test_roles(api: Api, role: str, method: str, path: str, status: int) -> None:
    body = {"run": "run-1"} if method == "POST" else None
    answer = api.call(method, path, body, role=role)  # type: ignore[arg-type]
    assert answer.status_code == status


def test_a_token_of_one_project_reaches_no_other(api: Api) -> None:
    assert api.call("GET", RUNS, project="vision").status_code == 200
    answer = api.call("GET", RUNS, project="language")
    assert answer.status_code == 403
    assert "language" in answer.json()["detail"]
    assert api.call("POST", RUNS, {"run": "x"}, role="recorder", project="language").status_code == 403
