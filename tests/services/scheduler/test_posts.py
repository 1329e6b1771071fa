"""Receivers that do not answer hold up nobody's stop."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.services.driving import Driven
from tests.services.recording import Recording
from watchstep.store import Store
from watchstep_services.database.models import Action
from watchstep_services.database.records import add_action
from watchstep_services.dispatcher.dispatch import due_actions
from watchstep_services.dispatcher.request import request_stop
from watchstep_services.evaluator.discover import discover
from watchstep_services.scheduler.queue import WorkQueue


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
            return session.get_one(Action, action).state

    try:
        for action in (*posts, stop):
            queue.action_due(action)
        assert queue.wait_until(lambda: state_of(stop) == "done", 60)
        assert {state_of(post) for post in posts} == {"pending"}
    finally:
        deaf.close()  # refuses what waits
        queue.close()
