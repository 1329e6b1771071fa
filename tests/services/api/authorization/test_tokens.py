"""Tokens of projects and of runs through the API."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.services.api.conftest import Api, Client
from tests.services.api.walking import Answer, Ask, ask, asking, operations
from tests.services.driving import Driven
from watchstep_services.api.app import create_app
from watchstep_services.auth import LIFETIME_SECONDS, OVER_SECONDS, Role, id_of, identify, revoke
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import RunRow, Token
from watchstep_services.retention import delete_rows

ALL = "/v1/tokens"
VISION = "/v1/projects/vision/tokens"
VISION_RUNS = "/v1/projects/vision/runs"
BODY = {"role": "recorder", "name": "cluster a"}
PROJECT = "test"
RUNS = f"/v1/projects/{PROJECT}/runs"
MINE = f"{RUNS}/mine/tokens"
SEGMENT = {"attempt": "a1", "segments": [{"node": "n0", "writer": "w0", "seq": 0, "first": 0, "last": 9}]}
DAY = 86_400 * NANOSECONDS


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
    assert ask(api.client.app, "POST", VISION_RUNS, created["token"], {"run": "run-1"}).status == 200
    seen = api.call("GET", f"{ALL}/{created['id']}", role="admin").json()
    assert seen["last_used_ns"] >= created["created_ns"]
    assert "token" not in seen
    gone = api.call("DELETE", f"{ALL}/{created['id']}", role="admin").json()
    assert (gone["state"], gone["revoked_by"][:5]) == ("revoked", "admin")
    assert ask(api.client.app, "POST", VISION_RUNS, created["token"], {"run": "run-1"}).status == 401
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
        assert api.status(method, place, body, role="admin", project="vision") == status, (
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
        assert api.status(method, place, BODY if method == "POST" else None, role=role) == 403


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
def run_api(driven: Driven) -> Iterator[RunTokenApi]:
    quick = driven.with_settings(requests_per_minute=0, failures_per_minute=0)
    app = create_app(quick.service)
    with asking(app) as ask:
        yield RunTokenApi(Api(Client(app), quick), ask)


def test_an_operator_creates_a_token_that_records_its_run(run_api: RunTokenApi) -> None:
    run_api.data("POST", RUNS, run_api.operator, {"run": "mine"})
    created = run_api.ask("POST", MINE, run_api.operator, {"name": "job of run mine"})
    assert (created.status, created.headers["cache-control"]) == (201, "no-store")
    answer = run_api.api_json(created)
    assert (answer["role"], answer["project"], answer["run"], answer["name"]) == (
        "recorder",
        PROJECT,
        "mine",
        "job of run mine",
    )
    assert answer["expires_ns"] - answer["created_ns"] == LIFETIME_SECONDS * NANOSECONDS
    assert answer["created_by"] == f"operator, token {id_of(run_api.operator)}"
    token = answer["token"]
    assert run_api("POST", RUNS, token, {"run": "mine"}).status == 200
    announced = run_api.data("POST", f"{RUNS}/mine/announcements", token, SEGMENT)
    assert "version" in announced["control"]
    lent = run_api("POST", f"{RUNS}/mine/attempts/a1/credentials", token)
    assert (lent.status, "no role" in lent.text) == (422, True)
    again = run_api("POST", f"{RUNS}/mine/announcements", token, {**SEGMENT, "attempt": "a1-r1"})
    assert again.status == 200


@pytest.mark.ci
def test_another_run_looks_like_a_missing_one(run_api: RunTokenApi) -> None:
    token = run_api.create()
    run_api.data("POST", RUNS, run_api.operator, {"run": "hers"})
    own = {"run": "mine"}
    for operation in operations():
        if operation.permission == "none":
            continue
        existing, unknown = (
            run_api(operation.method, operation.at({"project": PROJECT, "run": run}), token, SEGMENT)
            for run in ("hers", "nobodys")
        )
        assert existing.status >= 400, operation
        if "{run}" in operation.path:
            expected = 404 if operation.permission == "record" else 403
            assert existing.status == expected, (operation.path, existing)
            assert existing.text == unknown.text.replace("nobodys", "hers"), operation.path
        elif (operation.method, operation.path) != ("POST", "/v1/projects/{project}/runs"):
            answer = run_api(operation.method, operation.at({"project": PROJECT, **own}), token)
            assert answer.status == 403, (operation.path, answer)
    hers, nobodys = (run_api("POST", RUNS, token, {"run": run}) for run in ("hers", "nobodys"))
    assert (hers.status, nobodys.status) == (404, 404)
    assert hers.text == nobodys.text.replace("nobodys", "hers")
    assert run_api("POST", "/v1/projects/other/runs", token, {"run": "mine"}).status == 403
    spied = run_api("GET", f"{RUNS}/nobodys", run_api.operator)
    assert spied.status == 404, "none was made"
    for odd in ("Mine", "mine%20", "mine%00", "%2e%2e", "mine%2f..%2fhers"):
        assert run_api("POST", f"{RUNS}/{odd}/announcements", token, SEGMENT).status >= 400, odd


def test_a_run_token_cannot_bind_allow_or_create_another(run_api: RunTokenApi) -> None:
    token = run_api.create()
    job = {"backend": "local", "id": "1", "identity": {}}
    assert run_api("POST", RUNS, token, {"run": "mine", "attempt": "a1", "job": job}).status == 403
    assert run_api("POST", RUNS, token, {"run": "mine", "allow_stop": "please"}).status == 403
    assert run_api("POST", MINE, token, {}).status == 403
    assert run_api("POST", f"{RUNS}/mine/stop", token, {}).status == 403


def test_only_operators_of_the_project_create_run_tokens(run_api: RunTokenApi) -> None:
    run_api.data("POST", RUNS, run_api.operator, {"run": "mine"})
    others: list[tuple[Role, str | None]] = [("viewer", None), ("recorder", None), ("operator", "other")]
    for role, project in others:
        assert run_api("POST", MINE, run_api.api.token(role, project), {}).status == 403


def test_an_operator_cannot_create_tokens_of_another_operators_run(run_api: RunTokenApi) -> None:
    bob = run_api.api.token("operator", PROJECT)
    run_api.data("POST", RUNS, run_api.operator, {"run": "mine"})
    run_api.data("POST", RUNS, bob, {"run": "mine"})  # a second word changes nothing
    refused = run_api("POST", MINE, bob, {})
    assert (refused.status, id_of(run_api.operator) in refused.text) == (403, True)
    assert run_api("POST", MINE, run_api.admin, {}).status == 201
    assert run_api("POST", f"{RUNS}/nobodys/tokens", bob, {}).status == 404
    run_api.data("DELETE", f"/v1/tokens/{id_of(run_api.operator)}", run_api.admin)
    run_api.change(attempt="a1")
    assert "is running" in run_api("POST", MINE, bob, {}).text
    run_api.change(state="failed", ended_ns=run_api.now())
    assert run_api("POST", MINE, bob, {}).status == 201
    assert run_api("POST", MINE, run_api.api.token("operator", PROJECT), {}).status == 403


@pytest.mark.ci
def test_a_run_without_an_owner_is_taken_over_if_it_is_not_running(run_api: RunTokenApi) -> None:
    recorder = run_api.api.token("recorder", PROJECT)
    run_api.data("POST", RUNS, recorder, {"run": "mine"})
    run_api.change(attempt="a1")
    assert run_api("POST", MINE, run_api.operator, {}).status == 403
    run_api.change(attempt="")
    assert run_api("POST", MINE, run_api.operator, {}).status == 201
    run_api.change(attempt="a1")
    assert run_api("POST", MINE, run_api.operator, {}).status == 201


def test_a_run_token_expires_two_weeks_after_the_end_of_its_run(run_api: RunTokenApi) -> None:
    token = run_api.create()
    ended = run_api.now() - OVER_SECONDS * NANOSECONDS
    for state in ("completed", "failed", "stopped"):
        run_api.change(state=state, ended_ns=ended + DAY)
        assert run_api.works(token)
        run_api.change(state=state, ended_ns=ended)
        assert not run_api.works(token)
    listed = run_api.data("GET", MINE, run_api.operator)["tokens"][0]
    assert (listed["state"], listed["expires_ns"]) == ("expired", ended + OVER_SECONDS * NANOSECONDS)
    assert run_api.data("GET", f"{MINE}?active=true", run_api.operator)["tokens"] == []
    run_api.change(state="lost", ended_ns=ended)
    assert run_api.works(token), "the run has not announced, as a job that waits in a queue"
    run_api.change(state="running", ended_ns=None)
    assert run_api.works(token)
    assert len(run_api.data("GET", f"{MINE}?active=true", run_api.operator)["tokens"]) == 1


def test_a_run_token_expires_after_its_lifetime(run_api: RunTokenApi) -> None:
    token = run_api.create()
    run_api.age(token, 89 * DAY)
    assert run_api.works(token)
    run_api.age(token, DAY)
    assert not run_api.works(token)
    for seconds, status in ((0, 422), (366 * 86_400 + 1, 422), (366 * 86_400, 201)):
        assert run_api("POST", MINE, run_api.operator, {"lifetime_seconds": seconds}).status == status


def test_a_run_token_is_deleted_with_its_run(run_api: RunTokenApi) -> None:
    token = run_api.create()
    with run_api.api.driven.service.database.write() as session:
        delete_rows(session, session.execute(select(RunRow.id)).scalar_one())
    # By what this process remembers.
    assert run_api("POST", RUNS, token, {"run": "mine"}).status in {401, 404}
    run_api.data("POST", RUNS, run_api.operator, {"run": "mine"})
    assert not run_api.works(token), "the name is not the run"


@pytest.mark.ci
def test_a_run_token_outlives_the_expiry_but_not_the_revocation_of_its_creator(run_api: RunTokenApi) -> None:
    short = run_api.data(
        "POST", "/v1/tokens", run_api.admin, {"role": "admin", "name": "short", "lifetime_seconds": 3600}
    )
    token = run_api.create(by=short["token"])
    run_api.age(short["token"], 3600 * NANOSECONDS)
    assert run_api.works(token)
    revoked = run_api.data("DELETE", f"/v1/tokens/{short['id']}?keep_created=true", run_api.admin)
    assert (revoked["state"], revoked["run_tokens"]) == ("revoked", [])
    assert run_api.works(token)
    gone = run_api.data("DELETE", f"/v1/tokens/{short['id']}", run_api.admin)
    assert gone["run_tokens"] == [id_of(token)]
    assert not run_api.works(token)
    seen = run_api.data("GET", f"{MINE}/{id_of(token)}", run_api.operator)
    assert (seen["state"], short["id"] in seen["revoked_by"]) == ("revoked", True)


def test_a_revoked_but_cached_token_creates_no_run_token(run_api: RunTokenApi) -> None:
    run_api.create()
    revoke(run_api.api.driven.service.database, id_of(run_api.operator), None, "of another process")
    refused = run_api("POST", MINE, run_api.operator, {})
    assert refused.status in {401, 403}
    assert not run_api.data("GET", f"{MINE}?active=true", run_api.admin)["tokens"]


def test_a_run_token_is_listed_and_revoked(run_api: RunTokenApi) -> None:
    first, second = run_api.create(), run_api.create()
    run_api.create("hers")
    for place in ("/v1/tokens", f"/v1/projects/{PROJECT}/tokens"):
        runs = [row["run"] for row in run_api.data("GET", f"{place}?limit=1000", run_api.admin)["tokens"]]
        assert (runs.count("mine"), runs.count("hers")) == (2, 1)
    assert len(run_api.data("GET", MINE, run_api.operator)["tokens"]) == 2
    assert run_api("GET", f"{RUNS}/nobodys/tokens", run_api.operator).status == 404
    assert run_api("DELETE", f"{RUNS}/hers/tokens/{id_of(first)}", run_api.operator).status == 404
    assert run_api("GET", f"{RUNS}/hers/tokens/{id_of(first)}", run_api.operator).status == 404
    assert run_api("POST", f"{RUNS}/mine/announcements", first, SEGMENT).status == 200
    gone = run_api.data("DELETE", f"{MINE}/{id_of(first)}", run_api.operator)
    assert gone["revoked_by"] == f"operator, token {id_of(run_api.operator)}"
    assert run_api("POST", f"{RUNS}/mine/announcements", first, SEGMENT).status == 401
    run_api.data("DELETE", f"/v1/projects/{PROJECT}/tokens/{id_of(second)}", run_api.admin)
    assert not run_api.works(second)
    assert run_api("DELETE", f"{MINE}/{id_of(run_api.operator)}", run_api.operator).status == 404


def test_an_archived_project_gets_no_run_tokens(run_api: RunTokenApi) -> None:
    run_api.data("POST", RUNS, run_api.operator, {"run": "mine"})
    run_api.data("PATCH", f"/v1/projects/{PROJECT}", run_api.admin, {"archived": True})
    assert run_api("POST", MINE, run_api.operator, {}).status == 409


@pytest.mark.ci
def test_a_run_token_is_shown_once(run_api: RunTokenApi, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        token = run_api.create()
        run_api.works(token)
        run_api("POST", f"{RUNS}/hers/announcements", token, SEGMENT)
    secret = token.split("_", 2)[2]  # it may contain underscores
    assert id_of(token) in caplog.text, "its creator is logged"
    assert secret not in caplog.text
    for place in (MINE, f"{MINE}/{id_of(token)}", "/v1/tokens?limit=1000"):
        assert secret not in run_api("GET", place, run_api.admin).text
