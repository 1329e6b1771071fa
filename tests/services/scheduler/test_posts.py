"""Receivers that do not answer hold up nobody's stop."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

from tests.services.dispatch.receiver import receiving
from tests.services.driving import Driven, make_service
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig, StopAction, WebhookAction
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ActionRow
from watchstep_services.db.records import add_action
from watchstep_services.dispatch.dispatch import due_actions
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.registration import register
from watchstep_services.runs.stops import request_stop
from watchstep_services.scheduler.queue import WorkQueue
from watchstep_services.scheduler.work import evaluate_longest_due


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """A server whose connections nobody takes."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server


def waiting(driven: Driven, store: Store, url: str, posts: int) -> tuple[list[int], int]:
    """Ids of posts that are due, and of a stop that is due after all of them."""
    Recording(store).begin(on_stop="ignore").write(0, 0, 7)
    run_id = driven.register()
    discover(driven.service, run_id)
    driven.settle(run_id)
    with driven.service.database.write() as session:
        made = []
        for number in range(posts):
            cause = {
                "event_id": str(number),
                "at_ns": number + 1,
                "payload": {"url": url, "event": {"id": str(number)}},
            }
            made.append(add_action(session, run_id, "webhook", f"webhook:{number}", cause))
        stop = request_stop(session, driven.service.base_url, run_id, "a1", ("", "enough"))
    assert stop is not None
    return [action for action in made if action is not None], stop


def test_no_number_of_posts_hides_a_stop_from_the_sweep(driven_sqlite: Driven, folder_store: Store) -> None:
    posts, stop = waiting(driven_sqlite, folder_store, "http://127.0.0.1:1/", 150)
    due = due_actions(driven_sqlite.service)
    assert due[0] == stop
    assert due[1:] == posts[:100]


def test_a_stop_does_not_wait_for_receivers(
    driven_sqlite: Driven, folder_store: Store, deaf: socket.socket
) -> None:
    driven = driven_sqlite.with_settings(allowed_addresses="loopback", webhook_seconds=600.0)
    posts, stop = waiting(driven, folder_store, f"http://127.0.0.1:{deaf.getsockname()[1]}/", 8)
    queue = WorkQueue(1)
    queue.start(driven.service)

    def state_of(action: int) -> str:
        with driven.service.database.read() as session:
            return session.get_one(ActionRow, action).state

    try:
        for action in (*posts, stop):
            queue.action_due(action)
        assert queue.wait_until(lambda: state_of(stop) == "done", 60)
        assert {state_of(post) for post in posts} == {"pending"}
    finally:
        deaf.close()  # refuses what waits
        queue.close()


def test_an_evaluation_asks_once_whom_its_actions_tell(sqlite: Database, folder_store: Store) -> None:
    queue, asked = WorkQueue(1), list[str]()
    with receiving() as first, receiving() as second:
        tells = tuple(WebhookAction(url=receiver.url) for receiver in (first, second))
        rules = (RuleConfig(rule="non_finite_values", actions=(StopAction(), *tells)),)
        made = make_service(sqlite, folder_store, rules, allowed_addresses="loopback", silent_seconds=1e-9)
        driven = Driven(replace(made, notifier=queue))
        queue.start(driven.service)
        recording = Recording(folder_store).begin()
        run_id = driven.register()
        driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))

        def note(*executed: Any) -> None:
            statement = str(executed[2])
            if "actions.payload" in statement and "runs.project" in statement:
                asked.append(statement)

        event.listen(sqlite.engine, "before_cursor_execute", note)
        try:
            evaluate_longest_due(driven.service, run_id)
            assert queue.wait_until(lambda: bool(first.events and second.events), 60)
        finally:
            event.remove(sqlite.engine, "before_cursor_execute", note)
            queue.close()
    made_actions = {action.id: action.kind for action in driven.actions(run_id)}
    assert sorted(made_actions.values()) == ["stop", "webhook", "webhook"]
    (stop,) = [number for number, kind in made_actions.items() if kind == "stop"]
    assert len(driven.tries(stop)) == 1, "it is tried by who asked for it"
    assert len(asked) == 1


def test_the_first_of_each_project_comes_before_the_second_of_any(
    driven: Driven, folder_store: Store
) -> None:
    many, _ = waiting(driven, folder_store, "http://127.0.0.1:1/", 150)
    other = register(driven.service, "audio", "run-1", (), "recorder")
    with driven.service.database.write() as session:
        later = [
            add_action(
                session, other, "webhook", f"later:{n}", {"event_id": "e", "at_ns": 10**9 + n, "payload": {}}
            )
            for n in range(2)
        ]
    posts = [number for number in due_actions(driven.service) if number in {*many, *later}]
    assert posts[:4] == [many[0], later[0], many[1], later[1]]
    assert len(posts) == 100


def test_receivers_that_do_not_answer_delay_no_other_project(
    driven_sqlite: Driven, folder_store: Store, deaf: socket.socket
) -> None:
    driven = driven_sqlite.with_settings(allowed_addresses="loopback", webhook_seconds=600.0)
    posts, _ = waiting(driven, folder_store, f"http://127.0.0.1:{deaf.getsockname()[1]}/", 60)
    other = register(driven.service, "audio", "run-1", (), "recorder")
    queue = WorkQueue(1)
    queue.start(driven.service)
    try:
        with receiving() as answering:
            payload = {"url": answering.url, "event": {"id": "other"}}
            with driven.service.database.write() as session:
                post = add_action(
                    session, other, "webhook", "other", {"event_id": "e", "at_ns": 1, "payload": payload}
                )
            for action in (*posts, post):
                assert action is not None
                queue.action_due(action)
            assert queue.wait_until(lambda: len(answering.events) == 1, 60)
    finally:
        deaf.close()  # refuses what waits
        queue.close()
