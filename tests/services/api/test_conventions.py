"""Common behavior of lists, changes and creations."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Query, Request, Response
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from sqlalchemy import select

from tests.services.api.conftest import Api, Client
from tests.services.driving import Driven
from watchstep.errors import ConfigError
from watchstep_services.api import openapi
from watchstep_services.api.middleware.etags import IfMatch, require_match, tag
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.queries.state import Queries
from watchstep_services.api.schemas import problems
from watchstep_services.api.schemas.filters import time_ns
from watchstep_services.api.schemas.paging import ListOrder, Paged
from watchstep_services.auth import Role
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ApiRequest, RunRow
from watchstep_services.runs.registration import ensure_project, register
from watchstep_services.tenancy import find_project

router = APIRouter()
CREATED: list[str] = []
STORED = {"n": 1}


class Thing(BaseModel):
    n: int


@router.post("/v1/things", dependencies=[Once], status_code=201)
def create(body: Thing) -> Thing:
    if body.n < 0:
        raise ConfigError("n: below nothing", "send more")
    if body.n == 0:
        raise ZeroDivisionError
    CREATED.append(str(body.n))
    return Thing(n=len(CREATED))


@router.get("/v1/thing")
def look(response: Response) -> Thing:
    tag(response, Thing(**STORED))
    return Thing(**STORED)


@router.put("/v1/thing")
def change(body: Thing, if_match: IfMatch = None) -> Thing:
    require_match(if_match, Thing(**STORED))
    STORED["n"] = body.n
    return body


@router.get("/v1/runs")
def runs(request: Request, paging: Paged, descending: Annotated[bool, Query()] = False) -> dict[str, Any]:
    database: Database = request.app.state.service.database
    with database.read() as session:
        rows, token = paging.fetch(
            session, RunRow, (), ListOrder(RunRow.state), ListOrder(RunRow.id, descending)
        )
    return {"runs": [row.run for row in rows], "next": token}


@pytest.fixture
def client(driven: Driven) -> Client:
    """On each kind of database."""
    app = FastAPI()
    app.state.service = driven.service
    app.state.queries = Queries.of(driven.service)
    problems.install(app)
    openapi.install_conventions(app)
    app.include_router(router)
    CREATED.clear()
    STORED["n"] = 1
    return Client(app)


def post(client: Client, n: int, key: str, token: str = "t") -> httpx.Response:
    headers = {"idempotency-key": key, "content-type": "application/json", "authorization": f"Bearer {token}"}
    return client.request("POST", "/v1/things", content=json.dumps({"n": n}), headers=headers)


def test_a_request_with_a_key_is_executed_once_and_its_response_repeated(client: Client) -> None:
    first, again = post(client, 7, "a"), post(client, 7, "a")
    assert (first.status_code, first.json()) == (again.status_code, again.json()) == (201, {"n": 1})
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert post(client, 7, "b").json() == {"n": 2}
    assert post(client, 7, "a", token="another").json() == {"n": 3}
    other = post(client, 8, "a")
    assert (other.status_code, other.json()["type"]) == (409, "urn:watchstep:problem:conflict")
    assert CREATED == ["7", "7", "7"]


def test_a_refused_or_failed_request_releases_its_key(client: Client) -> None:
    assert post(client, -1, "a").status_code == 422
    assert post(client, 0, "a").status_code == 500
    assert post(client, 5, "a").status_code == 201


def test_a_response_with_a_secret_is_not_stored(api: Api) -> None:
    token = api.token("admin")

    def creation(key: str, place: str = "/v1/tokens") -> httpx.Response:
        headers = {
            "idempotency-key": key,
            "content-type": "application/json",
            "authorization": f"Bearer {token}",
        }
        body = json.dumps({"role": "viewer", "name": "a screen"})
        return api.client.request("POST", place, content=body, headers=headers)

    first, again = creation("a"), creation("a")
    assert (first.status_code, again.status_code) == (201, 409)
    assert "shown only once" in again.json()["detail"]
    assert "revoke it" in again.json()["hint"]
    secret = first.json()["token"].split("_", 2)[2]
    with api.driven.service.database.read() as session:
        stored_bodies = session.execute(select(ApiRequest.body)).scalars().all()
    assert [secret in body for body in stored_bodies] == [False]
    assert creation("b").status_code == 201
    of_project = "/v1/projects/vision/tokens"
    assert [creation("c", of_project).status_code, creation("c", of_project).status_code] == [201, 409]


def test_one_of_many_concurrent_requests_is_executed(client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(client, 3, "same").status_code, range(16)))
    assert set(answers) <= {201, 409}
    assert 201 in answers
    assert CREATED == ["3"]


def test_a_key_expires(client: Client, driven: Driven) -> None:
    post(client, 1, "a")
    driven.change(ApiRequest, expires_ns=0)
    assert post(client, 2, "a").status_code == 201
    assert CREATED == ["1", "2"]


def test_an_unchanged_response_is_not_sent_again(client: Client) -> None:
    first = client.get("/v1/thing")
    etag = first.headers["etag"]
    for condition in (etag, f'"x", W/{etag}', "*"):
        again = client.request("GET", "/v1/thing", headers={"if-none-match": condition})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert client.request("GET", "/v1/thing", headers={"if-none-match": '"x"'}).json() == {"n": 1}


def test_a_concurrent_change_is_not_overwritten(client: Client) -> None:
    def put(n: int, **headers: str) -> int:
        headers["content-type"] = "application/json"
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return client.request("PUT", "/v1/thing", content=json.dumps({"n": n}), headers=sent).status_code

    etag = client.get("/v1/thing").headers["etag"]
    assert put(2, if_match=etag) == 200
    assert put(3, if_match=etag) == 412
    assert client.get("/v1/thing").json() == {"n": 2}
    assert put(3, if_match="*") == 200
    assert put(4) == 200


def add_runs(driven: Driven, names: list[str], state: str = "created") -> None:
    with driven.service.database.write() as session:
        ensure_project(session, driven.service, "vision")
        placed = find_project(session, "vision").placed
        for name in names:
            session.add(
                RunRow(
                    project="vision",
                    run=name,
                    project_store_id=placed.id,
                    state=state,
                    control={},
                    created_ns=1,
                    last_seen_ns=1,
                )
            )


@pytest.mark.parametrize("descending", [False, True])
def test_pages_neither_skip_nor_repeat_items(client: Client, driven: Driven, descending: bool) -> None:
    add_runs(driven, [f"a{n}" for n in range(7)], "running")
    add_runs(driven, [f"b{n}" for n in range(6)], "created")
    seen: list[str] = []
    place: str | None = f"/v1/runs?limit=3&descending={descending}"
    page = 0
    while place:
        answer = client.get(place)
        seen += answer.json()["runs"]
        page += 1
        add_runs(driven, [f"new{page}"], "completed")  # sorts first
        token = answer.json()["next"]
        assert (token is not None) == ("link" in answer.headers)
        place = answer.headers["link"].partition(">")[0].removeprefix("<") if token else None
        assert place is None or ("limit=3" in place and token in place)
    old = [name for name in seen if not name.startswith("new")]
    assert sorted(old) == sorted({f"a{n}" for n in range(7)} | {f"b{n}" for n in range(6)})
    assert len(seen) == len(set(seen))


@given(st.one_of(st.text(max_size=40), st.binary(max_size=30).map(lambda data: data.hex())))
def test_a_made_up_page_token_is_refused(text: str) -> None:
    from watchstep_services.api.schemas import paging

    with suppress(ConfigError):
        assert paging._read(text)


@pytest.mark.parametrize(
    "token", ["x", "WyJhIl0", "WzFd", "W10", "e30", "WyJhIiwgImIiXQ", "WzEsIDk5OTk5OTk5OTk5OTk5OTk5OTk5OTld"]
)
def test_a_token_of_another_list_is_refused(client: Client, token: str) -> None:
    answer = client.get(f"/v1/runs?page_token={token}")
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:watchstep:problem:invalid")


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("1970-01-01T00:00:01Z", 10**9),
        ("1970-01-01T01:00:00.5+01:00", 5 * 10**8),
        ("12345", 12345),
        ("1969-12-31T23:59:59Z", -(10**9)),
    ],
)
def test_times_are_parsed(text: str, at: int) -> None:
    assert time_ns("since", text) == at


@given(st.text(max_size=40))
def test_an_invalid_time_is_refused(text: str) -> None:
    with suppress(ConfigError):
        assert -(2**63) <= time_ns("since", text) < 2**63


def test_the_real_lists_have_etags(api: Api) -> None:
    register(api.driven.service, "vision", "run-1", (), "recorder")
    first = api.call("GET", "/v1/rules")
    assert first.status_code == 200
    assert api.status("GET", "/v1/rules", headers={"if-none-match": first.headers["etag"]}) == 304


def test_an_unknown_query_parameter_is_refused(api: Api) -> None:
    requests: tuple[tuple[Role, str, str], ...] = (
        ("viewer", "/v1/projects/vision/runs?stat=running", "state"),
        ("viewer", "/v1/projects/vision/runs?limit=3&Limit=3", "limit"),
        ("admin", "/v1/tokens?active=true&activ=", "active"),
        ("viewer", "/v1/rules?x=1", "accepts no query parameters"),
    )
    for role, path, status in requests:
        refused = api.call("GET", path, role=role)
        assert (refused.status_code, refused.headers["content-type"]) == (422, "application/problem+json"), (
            path
        )
        assert status in refused.json()["hint"], refused.text
    assert api.status("GET", "/v1/projects/vision/runs?limit=3", role="viewer") == 200
    assert api.status("GET", "/v1/tokens?active=true", role="admin") == 200
    for path in ("/healthz?probe=1", "/docs?x=1", "/metrics?x=1"):
        assert api.status("GET", path, role="admin") == 200, path


def test_a_problem_with_an_unpaired_surrogate_is_encoded() -> None:
    detail = json.loads(bytes(problems.problem(422, "Invalid", "key 'a\ud800'", "\udfff").body))
    assert (detail["detail"], detail["hint"]) == (r"key 'a\ud800'", r"\udfff")
