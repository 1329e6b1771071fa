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
SEGMENT = {"attempt": "a1", "node": "n0", "writer": "w0", "seq": 0, "first": 0, "last": 9}
DAY = 86_400 * NANOSECONDS


class Asked:
    """Requests to one application, which knows tokens as a process does."""

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

    def made(self, run: str = "mine", by: str = "", **body: Any) -> str:
        """A token of a run that an operator registers."""
        self.data("POST", RUNS, by or self.operator, {"run": run})
        return str(self.data("POST", f"{RUNS}/{run}/tokens", by or self.operator, body)["token"])

    def works(self, token: str, run: str = "mine") -> bool:
        """Whether a token announces for a run, asked of a process that does not remember it."""
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
def asked(driven: Driven) -> Iterator[Asked]:
    quick = driven.with_settings(requests_per_minute=0, failures_per_minute=0)
    app = create_app(quick.service)
    with asking(app) as ask:
        yield Asked(Api(Client(app), quick), ask)


def test_an_operator_creates_a_token_that_records_its_run(asked: Asked) -> None:
    asked.data("POST", RUNS, asked.operator, {"run": "mine"})
    made = asked.ask("POST", MINE, asked.operator, {"name": "job of run mine"})
    assert (made.status, made.headers["cache-control"]) == (201, "no-store")
    held = asked.api_json(made)
    assert (held["role"], held["project"], held["run"], held["name"]) == (
        "recorder",
        PROJECT,
        "mine",
        "job of run mine",
    )
    assert held["expires_ns"] - held["created_ns"] == LIFETIME_SECONDS * NANOSECONDS
    assert held["created_by"] == f"operator, token {id_of(asked.operator)}"
    token = held["token"]
    assert asked("POST", RUNS, token, {"run": "mine"}).status == 200
    told = asked.data("POST", f"{RUNS}/mine/announcements", token, SEGMENT)
    assert "version" in told["control"]
    lent = asked("POST", f"{RUNS}/mine/attempts/a1/credentials", token)
    assert (lent.status, "no role" in lent.text) == (422, True)
    again = asked("POST", f"{RUNS}/mine/announcements", token, {**SEGMENT, "attempt": "a1-r1", "seq": 1})
    assert again.status == 200


def test_another_run_looks_like_a_missing_one(asked: Asked) -> None:
    token = asked.made()
    asked.data("POST", RUNS, asked.operator, {"run": "hers"})
    document = asked.api.client.app.openapi()
    own = {"run": "mine"}
    for operation in operations(document):
        if operation.permission == "none":
            continue
        known, unknown = (
            asked(operation.method, operation.at({"project": PROJECT, "run": run}), token, SEGMENT)
            for run in ("hers", "nobodys")
        )
        assert known.status >= 400, operation
        if "{run}" in operation.path:
            expected = 404 if operation.permission == "record" else 403
            assert known.status == expected, (operation.path, known)
            assert known.text == unknown.text.replace("nobodys", "hers"), operation.path
        elif (operation.method, operation.path) != ("POST", "/v1/projects/{project}/runs"):
            answer = asked(operation.method, operation.at({"project": PROJECT, **own}), token)
            assert answer.status == 403, (operation.path, answer)
    hers, nobodys = (asked("POST", RUNS, token, {"run": run}) for run in ("hers", "nobodys"))
    assert (hers.status, nobodys.status) == (404, 404)
    assert hers.text == nobodys.text.replace("nobodys", "hers")
    assert asked("POST", "/v1/projects/other/runs", token, {"run": "mine"}).status == 403
    spied = asked("GET", f"{RUNS}/nobodys", asked.operator)
    assert spied.status == 404, "none was made"
    for odd in ("Mine", "mine%20", "mine%00", "%2e%2e", "mine%2f..%2fhers"):
        assert asked("POST", f"{RUNS}/{odd}/announcements", token, SEGMENT).status >= 400, odd


def test_a_run_token_cannot_bind_allow_or_create_another(asked: Asked) -> None:
    token = asked.made()
    job = {"backend": "local", "id": "1", "identity": {}}
    assert asked("POST", RUNS, token, {"run": "mine", "attempt": "a1", "job": job}).status == 403
    assert asked("POST", RUNS, token, {"run": "mine", "allow_stop": "please"}).status == 403
    assert asked("POST", MINE, token, {}).status == 403
    assert asked("POST", f"{RUNS}/mine/stop", token, {}).status == 403


def test_only_operators_of_the_project_create_run_tokens(asked: Asked) -> None:
    asked.data("POST", RUNS, asked.operator, {"run": "mine"})
    others: list[tuple[Role, str | None]] = [("viewer", None), ("recorder", None), ("operator", "other")]
    for role, project in others:
        assert asked("POST", MINE, asked.api.token(role, project), {}).status == 403


def test_an_operator_cannot_create_tokens_of_another_operators_run(asked: Asked) -> None:
    bob = asked.api.token("operator", PROJECT)
    asked.data("POST", RUNS, asked.operator, {"run": "mine"})
    asked.data("POST", RUNS, bob, {"run": "mine"})  # a second word changes nothing
    refused = asked("POST", MINE, bob, {})
    assert (refused.status, id_of(asked.operator) in refused.text) == (403, True)
    assert asked("POST", MINE, asked.admin, {}).status == 201
    assert asked("POST", f"{RUNS}/nobodys/tokens", bob, {}).status == 404
    asked.data("DELETE", f"/v1/tokens/{id_of(asked.operator)}", asked.admin)
    asked.change(attempt="a1")
    assert "is running" in asked("POST", MINE, bob, {}).text
    asked.change(state="failed", ended_ns=asked.now())
    assert asked("POST", MINE, bob, {}).status == 201
    assert asked("POST", MINE, asked.api.token("operator", PROJECT), {}).status == 403


def test_a_run_without_an_owner_is_taken_over_if_it_is_not_running(asked: Asked) -> None:
    recorder = asked.api.token("recorder", PROJECT)
    asked.data("POST", RUNS, recorder, {"run": "mine"})
    asked.change(attempt="a1")
    assert asked("POST", MINE, asked.operator, {}).status == 403
    asked.change(attempt="")
    assert asked("POST", MINE, asked.operator, {}).status == 201
    asked.change(attempt="a1")
    assert asked("POST", MINE, asked.operator, {}).status == 201


def test_a_run_token_expires_two_weeks_after_the_end_of_its_run(asked: Asked) -> None:
    token = asked.made()
    ended = asked.now() - OVER_SECONDS * NANOSECONDS
    for state in ("completed", "failed", "stopped"):
        asked.change(state=state, ended_ns=ended + DAY)
        assert asked.works(token)
        asked.change(state=state, ended_ns=ended)
        assert not asked.works(token)
    listed = asked.data("GET", MINE, asked.operator)["tokens"][0]
    assert (listed["state"], listed["expires_ns"]) == ("expired", ended + OVER_SECONDS * NANOSECONDS)
    assert asked.data("GET", f"{MINE}?active=true", asked.operator)["tokens"] == []
    asked.change(state="lost", ended_ns=ended)
    assert asked.works(token), "nothing was heard of it, as of a job that waits for long"
    asked.change(state="running", ended_ns=None)
    assert asked.works(token)
    assert len(asked.data("GET", f"{MINE}?active=true", asked.operator)["tokens"]) == 1


def test_a_run_token_expires_after_its_lifetime(asked: Asked) -> None:
    token = asked.made()
    asked.age(token, 89 * DAY)
    assert asked.works(token)
    asked.age(token, DAY)
    assert not asked.works(token)
    for seconds, status in ((0, 422), (366 * 86_400 + 1, 422), (366 * 86_400, 201)):
        assert asked("POST", MINE, asked.operator, {"lifetime_seconds": seconds}).status == status


def test_a_run_token_is_deleted_with_its_run(asked: Asked) -> None:
    token = asked.made()
    with asked.api.driven.service.database.write() as session:
        delete_rows(session, session.execute(select(RunRow.id)).scalar_one())
    assert asked("POST", RUNS, token, {"run": "mine"}).status in {401, 404}  # by what this process remembers
    asked.data("POST", RUNS, asked.operator, {"run": "mine"})
    assert not asked.works(token), "the name is not the run"


def test_a_run_token_outlives_the_expiry_but_not_the_revocation_of_its_creator(asked: Asked) -> None:
    short = asked.data(
        "POST", "/v1/tokens", asked.admin, {"role": "admin", "name": "short", "lifetime_seconds": 3600}
    )
    token = asked.made(by=short["token"])
    asked.age(short["token"], 3600 * NANOSECONDS)
    assert asked.works(token)
    kept = asked.data("DELETE", f"/v1/tokens/{short['id']}?keep_created=true", asked.admin)
    assert (kept["state"], kept["made"]) == ("revoked", [])
    assert asked.works(token)
    gone = asked.data("DELETE", f"/v1/tokens/{short['id']}", asked.admin)
    assert gone["made"] == [id_of(token)]
    assert not asked.works(token)
    seen = asked.data("GET", f"{MINE}/{id_of(token)}", asked.operator)
    assert (seen["state"], short["id"] in seen["revoked_by"]) == ("revoked", True)


def test_a_revoked_but_cached_token_creates_no_run_token(asked: Asked) -> None:
    asked.made()
    revoke(asked.api.driven.service.database, id_of(asked.operator), None, "of another process")
    refused = asked("POST", MINE, asked.operator, {})
    assert refused.status in {401, 403}
    assert not asked.data("GET", f"{MINE}?active=true", asked.admin)["tokens"]


def test_a_run_token_is_listed_and_revoked(asked: Asked) -> None:
    first, second = asked.made(), asked.made()
    asked.made("hers")
    for place in ("/v1/tokens", f"/v1/projects/{PROJECT}/tokens"):
        runs = [row["run"] for row in asked.data("GET", f"{place}?limit=1000", asked.admin)["tokens"]]
        assert (runs.count("mine"), runs.count("hers")) == (2, 1)
    assert len(asked.data("GET", MINE, asked.operator)["tokens"]) == 2
    assert asked("GET", f"{RUNS}/nobodys/tokens", asked.operator).status == 404
    assert asked("DELETE", f"{RUNS}/hers/tokens/{id_of(first)}", asked.operator).status == 404
    assert asked("GET", f"{RUNS}/hers/tokens/{id_of(first)}", asked.operator).status == 404
    assert asked("POST", f"{RUNS}/mine/announcements", first, SEGMENT).status == 200
    gone = asked.data("DELETE", f"{MINE}/{id_of(first)}", asked.operator)
    assert gone["revoked_by"] == f"operator, token {id_of(asked.operator)}"
    assert asked("POST", f"{RUNS}/mine/announcements", first, SEGMENT).status == 401
    asked.data("DELETE", f"/v1/projects/{PROJECT}/tokens/{id_of(second)}", asked.admin)
    assert not asked.works(second)
    assert asked("DELETE", f"{MINE}/{id_of(asked.operator)}", asked.operator).status == 404


def test_an_archived_project_gets_no_run_tokens(asked: Asked) -> None:
    asked.data("POST", RUNS, asked.operator, {"run": "mine"})
    asked.data("PATCH", f"/v1/projects/{PROJECT}", asked.admin, {"archived": True})
    assert asked("POST", MINE, asked.operator, {}).status == 409


def test_a_run_token_is_shown_once(asked: Asked, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        token = asked.made()
        asked.works(token)
        asked("POST", f"{RUNS}/hers/announcements", token, SEGMENT)
    secret = token.rpartition("_")[2]
    assert id_of(token) in caplog.text, "who made it is told"
    assert secret not in caplog.text
    for place in (MINE, f"{MINE}/{id_of(token)}", "/v1/tokens?limit=1000"):
        assert secret not in asked("GET", place, asked.admin).text
