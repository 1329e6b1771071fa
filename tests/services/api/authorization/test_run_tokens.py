"""Tokens of one run, through the API, on both databases."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.services.api.conftest import Api, Client
from tests.services.api.walking import Answer, Ask, asking, operations
from tests.services.driving import Driven
from watchstep_services.api.app import create_app
from watchstep_services.auth import LIFETIME_SECONDS, OVER_SECONDS, Role, id_of, revoke
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import RunRow, Token
from watchstep_services.retention import delete_rows

PROJECT = "test"
RUNS = f"/v1/projects/{PROJECT}/runs"
MINE = f"{RUNS}/mine/tokens"
SEGMENT = {"attempt": "a1", "segments": [{"node": "n0", "writer": "w0", "seq": 0, "first": 0, "last": 9}]}
DAY = 86_400 * NANOSECONDS


class RunTokenApi:
    """Requests to one application, which caches tokens as a process does."""

    def __init__(self, api: Api, ask: Ask) -> None:
        self.api = api
        self.ask = ask
        self.operator = api.token("operator", PROJECT)
        self.admin = api.token("admin")

    def __call__(self, method: str, path: str, token: str, body: object = None) -> Answer:
        return self.ask(method, path, token, body)

    def data(self, method: str, path: str, token: str, body: object = None) -> dict[str, Any]:
        answer = self.ask(method, path, token, body)
        assert answer.status < 300, answer
        return self.api_json(answer)

    @staticmethod
    def api_json(answer: Answer) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(answer.text)
        return data

    def create(self, run: str = "mine", by: str = "", **body: Any) -> str:
        """A token of a run that an operator registers."""
        self.data("POST", RUNS, by or self.operator, {"run": run})
        return str(self.data("POST", f"{RUNS}/{run}/tokens", by or self.operator, body)["token"])

    def works(self, token: str, run: str = "mine") -> bool:
        """Whether a token announces for a run, in a process without it in its cache."""
        self.api.client.app.state.token_cache.discard(id_of(token))
        answer = self.ask("POST", f"{RUNS}/{run}/announcements", token, SEGMENT)
        assert answer.status in {200, 401}, answer
        return answer.status == 200

    def change(self, run: str = "mine", **values: Any) -> None:
        """The run's row, as the life of the run would have it."""
        with self.api.driven.service.database.write() as session:
            session.execute(update(RunRow).where(RunRow.run == run).values(**values))

    def age(self, token: str, ns: int) -> None:
        """Make a token older, as if it had been made before."""
        with self.api.driven.service.database.write() as session:
            row = session.get_one(Token, id_of(token))
            row.created_ns -= ns
            row.expires_ns = None if row.expires_ns is None else row.expires_ns - ns

    def now(self) -> int:
        with self.api.driven.service.database.read() as session:
            return read_clock(session)


@pytest.fixture
def api(driven: Driven) -> Iterator[RunTokenApi]:
    quick = driven.with_settings(requests_per_minute=0, failures_per_minute=0)
    app = create_app(quick.service)
    with asking(app) as ask:
        yield RunTokenApi(Api(Client(app), quick), ask)


def test_an_operator_creates_a_token_that_records_its_run(api: RunTokenApi) -> None:
    api.data("POST", RUNS, api.operator, {"run": "mine"})
    created = api.ask("POST", MINE, api.operator, {"name": "job of run mine"})
    assert (created.status, created.headers["cache-control"]) == (201, "no-store")
    answer = api.api_json(created)
    assert (answer["role"], answer["project"], answer["run"], answer["name"]) == (
        "recorder",
        PROJECT,
        "mine",
        "job of run mine",
    )
    assert answer["expires_ns"] - answer["created_ns"] == LIFETIME_SECONDS * NANOSECONDS
    assert answer["created_by"] == f"operator, token {id_of(api.operator)}"
    token = answer["token"]
    assert api("POST", RUNS, token, {"run": "mine"}).status == 200
    announced = api.data("POST", f"{RUNS}/mine/announcements", token, SEGMENT)
    assert "version" in announced["control"]
    lent = api("POST", f"{RUNS}/mine/attempts/a1/credentials", token)
    assert (lent.status, "no role" in lent.text) == (422, True)
    again = api("POST", f"{RUNS}/mine/announcements", token, {**SEGMENT, "attempt": "a1-r1"})
    assert again.status == 200


def test_another_run_looks_like_a_missing_one(api: RunTokenApi) -> None:
    token = api.create()
    api.data("POST", RUNS, api.operator, {"run": "hers"})
    document = api.api.client.app.openapi()
    own = {"run": "mine"}
    for operation in operations(document):
        if operation.permission == "none":
            continue
        existing, unknown = (
            api(operation.method, operation.at({"project": PROJECT, "run": run}), token, SEGMENT)
            for run in ("hers", "nobodys")
        )
        assert existing.status >= 400, operation
        if "{run}" in operation.path:
            expected = 404 if operation.permission == "record" else 403
            assert existing.status == expected, (operation.path, existing)
            assert existing.text == unknown.text.replace("nobodys", "hers"), operation.path
        elif (operation.method, operation.path) != ("POST", "/v1/projects/{project}/runs"):
            answer = api(operation.method, operation.at({"project": PROJECT, **own}), token)
            assert answer.status == 403, (operation.path, answer)
    hers, nobodys = (api("POST", RUNS, token, {"run": run}) for run in ("hers", "nobodys"))
    assert (hers.status, nobodys.status) == (404, 404)
    assert hers.text == nobodys.text.replace("nobodys", "hers")
    assert api("POST", "/v1/projects/other/runs", token, {"run": "mine"}).status == 403
    spied = api("GET", f"{RUNS}/nobodys", api.operator)
    assert spied.status == 404, "none was made"
    for odd in ("Mine", "mine%20", "mine%00", "%2e%2e", "mine%2f..%2fhers"):
        assert api("POST", f"{RUNS}/{odd}/announcements", token, SEGMENT).status >= 400, odd


def test_a_run_token_cannot_bind_allow_or_create_another(api: RunTokenApi) -> None:
    token = api.create()
    job = {"backend": "local", "id": "1", "identity": {}}
    assert api("POST", RUNS, token, {"run": "mine", "attempt": "a1", "job": job}).status == 403
    assert api("POST", RUNS, token, {"run": "mine", "allow_stop": "please"}).status == 403
    assert api("POST", MINE, token, {}).status == 403
    assert api("POST", f"{RUNS}/mine/stop", token, {}).status == 403


def test_only_operators_of_the_project_create_run_tokens(api: RunTokenApi) -> None:
    api.data("POST", RUNS, api.operator, {"run": "mine"})
    others: list[tuple[Role, str | None]] = [("viewer", None), ("recorder", None), ("operator", "other")]
    for role, project in others:
        assert api("POST", MINE, api.api.token(role, project), {}).status == 403


def test_an_operator_cannot_create_tokens_of_another_operators_run(api: RunTokenApi) -> None:
    bob = api.api.token("operator", PROJECT)
    api.data("POST", RUNS, api.operator, {"run": "mine"})
    api.data("POST", RUNS, bob, {"run": "mine"})  # a second word changes nothing
    refused = api("POST", MINE, bob, {})
    assert (refused.status, id_of(api.operator) in refused.text) == (403, True)
    assert api("POST", MINE, api.admin, {}).status == 201
    assert api("POST", f"{RUNS}/nobodys/tokens", bob, {}).status == 404
    api.data("DELETE", f"/v1/tokens/{id_of(api.operator)}", api.admin)
    api.change(attempt="a1")
    assert "is running" in api("POST", MINE, bob, {}).text
    api.change(state="failed", ended_ns=api.now())
    assert api("POST", MINE, bob, {}).status == 201
    assert api("POST", MINE, api.api.token("operator", PROJECT), {}).status == 403


def test_a_run_without_an_owner_is_taken_over_if_it_is_not_running(api: RunTokenApi) -> None:
    recorder = api.api.token("recorder", PROJECT)
    api.data("POST", RUNS, recorder, {"run": "mine"})
    api.change(attempt="a1")
    assert api("POST", MINE, api.operator, {}).status == 403
    api.change(attempt="")
    assert api("POST", MINE, api.operator, {}).status == 201
    api.change(attempt="a1")
    assert api("POST", MINE, api.operator, {}).status == 201


def test_a_run_token_expires_two_weeks_after_the_end_of_its_run(api: RunTokenApi) -> None:
    token = api.create()
    ended = api.now() - OVER_SECONDS * NANOSECONDS
    for state in ("completed", "failed", "stopped"):
        api.change(state=state, ended_ns=ended + DAY)
        assert api.works(token)
        api.change(state=state, ended_ns=ended)
        assert not api.works(token)
    listed = api.data("GET", MINE, api.operator)["tokens"][0]
    assert (listed["state"], listed["expires_ns"]) == ("expired", ended + OVER_SECONDS * NANOSECONDS)
    assert api.data("GET", f"{MINE}?active=true", api.operator)["tokens"] == []
    api.change(state="lost", ended_ns=ended)
    assert api.works(token), "the run has not announced, as a job that waits in a queue"
    api.change(state="running", ended_ns=None)
    assert api.works(token)
    assert len(api.data("GET", f"{MINE}?active=true", api.operator)["tokens"]) == 1


def test_a_run_token_expires_after_its_lifetime(api: RunTokenApi) -> None:
    token = api.create()
    api.age(token, 89 * DAY)
    assert api.works(token)
    api.age(token, DAY)
    assert not api.works(token)
    for seconds, status in ((0, 422), (366 * 86_400 + 1, 422), (366 * 86_400, 201)):
        assert api("POST", MINE, api.operator, {"lifetime_seconds": seconds}).status == status


def test_a_run_token_is_deleted_with_its_run(api: RunTokenApi) -> None:
    token = api.create()
    with api.api.driven.service.database.write() as session:
        delete_rows(session, session.execute(select(RunRow.id)).scalar_one())
    assert api("POST", RUNS, token, {"run": "mine"}).status in {401, 404}  # by what this process remembers
    api.data("POST", RUNS, api.operator, {"run": "mine"})
    assert not api.works(token), "the name is not the run"


def test_a_run_token_outlives_the_expiry_but_not_the_revocation_of_its_creator(api: RunTokenApi) -> None:
    short = api.data(
        "POST", "/v1/tokens", api.admin, {"role": "admin", "name": "short", "lifetime_seconds": 3600}
    )
    token = api.create(by=short["token"])
    api.age(short["token"], 3600 * NANOSECONDS)
    assert api.works(token)
    revoked = api.data("DELETE", f"/v1/tokens/{short['id']}?keep_created=true", api.admin)
    assert (revoked["state"], revoked["run_tokens"]) == ("revoked", [])
    assert api.works(token)
    gone = api.data("DELETE", f"/v1/tokens/{short['id']}", api.admin)
    assert gone["run_tokens"] == [id_of(token)]
    assert not api.works(token)
    seen = api.data("GET", f"{MINE}/{id_of(token)}", api.operator)
    assert (seen["state"], short["id"] in seen["revoked_by"]) == ("revoked", True)


def test_a_revoked_but_cached_token_creates_no_run_token(api: RunTokenApi) -> None:
    api.create()
    revoke(api.api.driven.service.database, id_of(api.operator), None, "of another process")
    refused = api("POST", MINE, api.operator, {})
    assert refused.status in {401, 403}
    assert not api.data("GET", f"{MINE}?active=true", api.admin)["tokens"]


def test_a_run_token_is_listed_and_revoked(api: RunTokenApi) -> None:
    first, second = api.create(), api.create()
    api.create("hers")
    for place in ("/v1/tokens", f"/v1/projects/{PROJECT}/tokens"):
        runs = [row["run"] for row in api.data("GET", f"{place}?limit=1000", api.admin)["tokens"]]
        assert (runs.count("mine"), runs.count("hers")) == (2, 1)
    assert len(api.data("GET", MINE, api.operator)["tokens"]) == 2
    assert api("GET", f"{RUNS}/nobodys/tokens", api.operator).status == 404
    assert api("DELETE", f"{RUNS}/hers/tokens/{id_of(first)}", api.operator).status == 404
    assert api("GET", f"{RUNS}/hers/tokens/{id_of(first)}", api.operator).status == 404
    assert api("POST", f"{RUNS}/mine/announcements", first, SEGMENT).status == 200
    gone = api.data("DELETE", f"{MINE}/{id_of(first)}", api.operator)
    assert gone["revoked_by"] == f"operator, token {id_of(api.operator)}"
    assert api("POST", f"{RUNS}/mine/announcements", first, SEGMENT).status == 401
    api.data("DELETE", f"/v1/projects/{PROJECT}/tokens/{id_of(second)}", api.admin)
    assert not api.works(second)
    assert api("DELETE", f"{MINE}/{id_of(api.operator)}", api.operator).status == 404


def test_an_archived_project_gets_no_run_tokens(api: RunTokenApi) -> None:
    api.data("POST", RUNS, api.operator, {"run": "mine"})
    api.data("PATCH", f"/v1/projects/{PROJECT}", api.admin, {"archived": True})
    assert api("POST", MINE, api.operator, {}).status == 409


def test_a_run_token_is_shown_once(api: RunTokenApi, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        token = api.create()
        api.works(token)
        api("POST", f"{RUNS}/hers/announcements", token, SEGMENT)
    secret = token.rpartition("_")[2]
    assert id_of(token) in caplog.text, "its creator is logged"
    assert secret not in caplog.text
    for place in (MINE, f"{MINE}/{id_of(token)}", "/v1/tokens?limit=1000"):
        assert secret not in api("GET", place, api.admin).text
