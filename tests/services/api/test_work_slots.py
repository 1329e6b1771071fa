"""Limits of requests that wait for a process, a receiver or a store, while others are answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from anyio import to_thread
from sqlalchemy import event

from tests.services.api.conftest import Api
from tests.services.channels.http_server import http_server, stall
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.pool import POOL, BusyError
from watchstep_rules.custom.sandbox.process import StartError
from watchstep_rules.custom.sql import rule as sql_rule
from watchstep_rules.custom.sql.process import SqlProgram, checked
from watchstep_services.auth import Role
from watchstep_services.runs import registration

RUNS = "/v1/projects/vision/runs"
RULE = {"rule": "sql", "name": "mine", "params": {"query": "SELECT tensor FROM statistics WHERE l2 > 7"}}


@contextmanager
def blocked_check(monkeypatch: pytest.MonkeyPatch, api: Api) -> Iterator[None]:
    """A registration whose rule is being checked for as long as the block takes."""
    entered, released = threading.Event(), threading.Event()

    def blocking(query: str) -> Any:
        entered.set()
        assert released.wait(60)
        return checked(query)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(sql_rule, "checked", blocking)
        first = threads.submit(
            api.call, "POST", RUNS, {"run": "first", "rules": [RULE]}, role="recorder", project="vision"
        )
        try:
            assert entered.wait(60)
            yield
        finally:
            released.set()
        assert first.result(60).status_code == 200


def test_rule_checks_of_a_project_block_no_other_request(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = (
        ("POST", RUNS, {"run": "second", "rules": [RULE]}),
        ("PUT", "/v1/projects/vision/rules/mine", RULE),
        ("PUT", f"{RUNS}/plain/rules/mine", RULE),
        ("POST", "/v1/projects/vision/backtests", {"runs": ["plain"], "rules": [RULE]}),
        ("POST", "/v1/projects/vision/stop-grants", {"rule": "mine", "config": RULE, "reason": "mine"}),
    )
    api.driven.register()
    with blocked_check(monkeypatch, api):
        for method, path, body in requests:
            refused = api.call(method, path, body)
            assert (refused.status_code, refused.headers.get("retry-after")) == (429, "1"), (
                path,
                refused.text,
            )
            assert "too many rule checks of project vision" in refused.text
        assert api.status("POST", RUNS, {"run": "plain", "rules": [{"rule": "overfit"}]}) == 200
        assert api.status("GET", RUNS) == 200
        assert api.client.get("/healthz").status_code == 200
    assert api.status("POST", RUNS, {"run": "second", "rules": [RULE]}) == 200


@contextmanager
def blocked_registration(monkeypatch: pytest.MonkeyPatch, api: Api) -> Iterator[threading.Event]:
    """A registration of project vision that continues when the event is set, at the end of the block at the latest."""
    entered, released = threading.Event(), threading.Event()
    check = registration.check

    def blocking(requested: Sequence[RuleConfig]) -> None:
        if requested and not entered.is_set():
            entered.set()
            assert released.wait(60)
        check(requested)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(registration, "check", blocking)
        body = {"run": "first", "rules": [{"rule": "overfit"}]}
        first = threads.submit(api.call, "POST", RUNS, body, role="recorder", project="vision")
        try:
            assert entered.wait(60)
            yield released
        finally:
            released.set()
        assert first.result(60).status_code == 200


@pytest.mark.parametrize("rules", [[], [{"rule": "overfit"}]], ids=["plain", "with rules"])
def test_a_project_registers_one_run_at_a_time(
    api: Api, monkeypatch: pytest.MonkeyPatch, rules: list[dict[str, Any]]
) -> None:
    second = {"run": "second", "rules": rules}
    monkeypatch.setattr("watchstep_services.api.middleware.request_limits.REGISTRATION_SECONDS", 0.1)
    with blocked_registration(monkeypatch, api):
        refused = api.call("POST", RUNS, second, role="recorder", project="vision")
        assert (refused.status_code, refused.headers.get("retry-after")) == (429, "1")
        assert "too many registrations of project vision" in refused.text
        others = "/v1/projects/language/runs"
        assert api.status("POST", others, {"run": "other", "rules": rules}) == 200
    assert api.status("GET", f"{RUNS}/second") == 404  # a refused registration has no effect afterwards
    assert api.status("POST", RUNS, second, role="recorder", project="vision") == 200


def test_registrations_of_one_second_wait_and_occupy_no_threads(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"authorization": f"Bearer {api.token('recorder', 'vision')}"}
    viewer = {"authorization": f"Bearer {api.token('viewer', 'vision')}"}

    async def register(released: threading.Event) -> list[int]:
        transport = httpx.ASGITransport(api.client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as client:
            bodies = [{"run": f"run-{number}"} for number in range(60)]
            waiting = [asyncio.create_task(client.post(RUNS, json=body, headers=headers)) for body in bodies]
            assert (await client.get(RUNS, headers=viewer)).status_code == 200
            released.set()
            return [(await answer).status_code for answer in waiting]

    monkeypatch.setattr("watchstep_services.api.middleware.request_limits.REGISTRATION_SECONDS", 60.0)
    with blocked_registration(monkeypatch, api) as released:
        assert asyncio.run(register(released)) == [200] * 60


def test_a_registration_prepares_its_rules_before_the_transaction(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = api.driven.service.database
    write, dump = type(database).write, RuleConfig.model_dump
    open_transactions: list[int] = []
    dumped_in: list[int] = []
    statements: list[str] = []

    @contextmanager
    def observed(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        with write(self, *arguments, **options) as session:
            open_transactions.append(1)
            try:
                yield session
            finally:
                open_transactions.pop()

    def dumped(self: RuleConfig, **options: Any) -> Any:
        dumped_in.append(len(open_transactions))
        return dump(self, **options)

    def execute(_connection: Any, _cursor: Any, statement: str, *_others: Any) -> None:
        if open_transactions:
            statements.append(statement)

    def register(count: int, steps: int) -> list[str]:
        statements.clear()
        rules = [
            {"rule": "overfit", "name": f"r{number}", "keep_firing": {"steps": steps + number}}
            for number in range(count)
        ]
        body = {"run": f"of-{count}", "rules": rules}
        assert api.status("POST", RUNS, body, role="recorder", project="vision") == 200
        return list(statements)

    for count in (1, 5):
        register(count, 10)
    monkeypatch.setattr(type(database), "write", observed)
    monkeypatch.setattr(RuleConfig, "model_dump", dumped)
    event.listen(database.engine, "before_cursor_execute", execute)
    one, five, same = register(1, 20), register(5, 20), register(5, 20)
    event.remove(database.engine, "before_cursor_execute", execute)
    assert dumped_in
    assert not any(dumped_in)
    assert len(five) == len(one)
    assert not any("rule_" in statement for statement in same if not statement.startswith("SELECT"))


def test_a_recorders_rules_are_counted_before_any_is_checked(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_queries: list[str] = []
    monkeypatch.setattr(sql_rule, "checked", checked_queries.append)
    for number, message in ((4, "4 SQL rules"), (101, "101 rules")):
        rules = [{**RULE, "name": f"r{place}"} for place in range(number)]
        refused = api.call("POST", RUNS, {"run": "run-1", "rules": rules}, role="recorder")
        assert (refused.status_code, message in refused.text) == (422, True)
    assert checked_queries == []


def test_a_rule_that_cannot_be_checked_now_is_refused_and_not_stored(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "watchstep_rules.custom.sandbox.pool._WAIT_SECONDS", dict.fromkeys(POOL.processes, 0.0)
    )
    body = {
        "run": "run-1",
        "rules": [{**RULE, "params": {"query": "SELECT tensor FROM statistics WHERE l2 > 8"}}],
    }
    with ExitStack() as working:
        for _ in range(POOL.processes["checks"]):
            working.enter_context(POOL.child(SqlProgram.for_query(0), "checks", object()))
        refused = api.call("POST", RUNS, body)
        assert (refused.status_code, refused.headers.get("retry-after")) == (503, "1")
        assert api.status("GET", f"{RUNS}/run-1") == 404
    assert api.status("POST", RUNS, body) == 200


def test_a_rule_whose_name_is_no_text_is_the_callers_error(api: Api) -> None:
    roles: tuple[Role, ...] = ("operator", "recorder")
    for role in roles:
        refused = api.call("POST", RUNS, {"run": "run-1", "rules": [{"rule": []}, {"rule": {}}]}, role=role)
        assert refused.status_code == 422


def test_a_query_is_checked_once_for_a_request(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    checked_queries: list[str] = []

    def wrong(query: str) -> Any:
        checked_queries.append(query)
        if len(checked_queries) == 1:
            raise StartError(query, "start no process")
        raise ValueError("it has an error")

    monkeypatch.setattr(sql_rule, "checked", wrong)
    body = {"run": "run-1", "rules": [RULE]}
    assert (api.status("POST", RUNS, body), len(checked_queries)) == (200, 1)
    assert (api.status("POST", RUNS, body), len(checked_queries)) == (422, 2)


def test_reading_a_rule_config_checks_no_query(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api.status("PUT", "/v1/projects/vision/rules/mine", RULE) == 200

    def refused(query: str) -> Any:
        raise BusyError(query, "a read asked for it")

    monkeypatch.setattr(sql_rule, "checked", refused)
    assert api.status("POST", RUNS, {"run": "run-1"}) == 200
    shown = api.call("GET", f"{RUNS}/run-1")
    assert shown.status_code == 200
    assert "mine" in {rule["name"] for rule in shown.json()["rules"]}
    assert api.status("GET", f"{RUNS}/run-1/rules") == 200
    assert api.status("GET", f"{RUNS}/run-1/rules/mine") == 200


def test_health_and_readiness_respond_while_all_request_threads_are_busy(api: Api) -> None:
    async def ask() -> list[int]:
        threads = to_thread.current_default_thread_limiter()
        for _ in range(int(threads.total_tokens)):
            threads.acquire_on_behalf_of_nowait(object())
        transport = httpx.ASGITransport(api.client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as client:
            return [(await client.get(path)).status_code for path in ("/healthz", "/readyz")]

    async def ask_in_time() -> list[int]:
        return await asyncio.wait_for(ask(), 60)

    assert asyncio.run(ask_in_time()) == [200, 200]


def test_tests_of_an_unresponsive_receiver_occupy_few_threads(api: Api) -> None:
    at = "/v1/projects/vision/receivers/slow"
    taken = threading.Semaphore(0)
    with http_server() as server, ThreadPoolExecutor(2) as threads:
        stalled = stall(server)

        def arrived(handler: Any) -> None:
            taken.release()
            stalled(handler)

        server.answers = [arrived, arrived]
        put = api.call("PUT", at, {"name": "slow", "kind": "webhook", "url": server.url})
        assert put.status_code == 200, put.text
        waiting = [threads.submit(api.call, "POST", f"{at}/test", {}) for _ in range(2)]
        for _ in waiting:
            assert taken.acquire(timeout=60)
        refused = api.call("POST", f"{at}/test", {})
        assert (refused.status_code, refused.headers.get("retry-after")) == (429, "1")
        assert api.status("GET", at) == 200
        assert api.client.get("/healthz").status_code == 200
        server.released.set()
        assert [answer.result(60).status_code for answer in waiting] == [200, 200]
        assert api.call("POST", f"{at}/test", {}).json()["result"] == "done"


def test_store_checks_occupy_few_threads(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.driven.register()
    entered, released = threading.Semaphore(0), threading.Event()

    def blocking(*_arguments: Any) -> list[Any]:
        entered.release()
        assert released.wait(60)
        return []

    monkeypatch.setattr("watchstep_services.api.routes.projects.check_store", blocking)
    at = "/v1/projects/vision/check"
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(api.call, "POST", at) for _ in range(2)]
        try:
            for _ in waiting:
                assert entered.acquire(timeout=60)
            assert api.status("POST", at) == 429
            assert api.client.get("/healthz").status_code == 200
        finally:
            released.set()
        assert [answer.result(60).status_code for answer in waiting] == [200, 200]
