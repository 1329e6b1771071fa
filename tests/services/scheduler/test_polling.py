"""The loops of workers, and the posting of their tasks."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select, update

from tests.services.channels.http_server import http_server
from tests.services.driving import Driven, make_service, statements
from tests.services.jobs import recorded_process
from tests.services.notify.clock import Clock, open_with
from tests.services.recording import Recording, nan_from
from watchstep.format import documents
from watchstep.format.documents import AttemptDocument
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig, StopAction, WebhookAction
from watchstep_services.api.routes.announcements import pause_seconds
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ActionRow, BoundJobRow, RunRow
from watchstep_services.db.records import add_action, hint, put_segments
from watchstep_services.dispatch.dispatch import due_actions
from watchstep_services.runs import discovery as discovering
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import discover_runs, register
from watchstep_services.runs.stops import request_stop
from watchstep_services.scheduler import polling
from watchstep_services.scheduler.polling import MOST_POLLS, claim_polls, poll_due_runs, poll_run
from watchstep_services.scheduler.queue import WorkQueue
from watchstep_services.scheduler.sweep import find_due, note_requested, sweep
from watchstep_services.scheduler.work import evaluate_longest_due
from watchstep_services.service.context import Service


def set_run(driven: Driven, run_id: int, **values: int) -> None:
    with driven.service.database.write() as session:
        session.execute(update(RunRow).where(RunRow.id == run_id).values(**values))


def test_a_look_is_taken_once(driven: Driven) -> None:
    run_id = driven.register()
    assert [one.run.id for one in claim_polls(driven.service)] == [run_id]
    assert claim_polls(driven.service) == []


@pytest.mark.ci
def test_all_that_is_due_is_looked_at_in_portions(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "_LOCAL_SECONDS", 3600.0)  # a busy machine puts off what it does not reach
    slow = driven_sqlite.with_settings(listing_seconds=1000.0)
    runs = [slow.register(f"run-{number}") for number in range(MOST_POLLS + 3)]
    poll_due_runs(slow.service, 1e9)
    assert all(slow.run(run_id).listed_ns for run_id in runs)
    assert claim_polls(slow.service) == []


def test_listings_in_vain_become_rare_and_found_ones_frequent(driven: Driven) -> None:
    slow = driven.with_settings(listing_seconds=2.0)
    recording = driven.recording().begin()
    run_id = slow.register()
    poll_run(slow.service, claim_polls(slow.service)[0])
    for quiet in (4, 8, 16, 30, 30):  # it announces all there is, a little later each time than we look
        with slow.service.database.write() as session:
            now = read_clock(session)
        set_run(
            slow, run_id, poll_ns=0, listed_ns=now - 90 * NANOSECONDS, last_seen_ns=now - 80 * NANOSECONDS
        )
        poll_run(slow.service, claim_polls(slow.service)[0])
        assert slow.run(run_id).poll_interval_ns == quiet * NANOSECONDS
    recording.write(0, 0, 3)  # nobody announces this one
    set_run(slow, run_id, poll_ns=0, listed_ns=1, last_seen_ns=1)
    poll_run(slow.service, claim_polls(slow.service)[0])
    assert slow.run(run_id).poll_interval_ns == 2 * NANOSECONDS


def test_a_look_that_somebody_wants_meanwhile_is_not_put_off(driven: Driven) -> None:
    run_id = driven.register()
    (one,) = claim_polls(driven.service)
    set_run(driven, run_id, poll_ns=0)
    poll_run(driven.service, one)
    assert driven.run(run_id).poll_ns == 0


def test_a_run_that_starts_again_is_looked_at_at_once(driven: Driven) -> None:
    first = driven.recording().begin()
    run_id = driven.register()
    announced(driven, run_id, first, 0)
    first.end("failed", 3)
    discovering.discover(driven.service, run_id)
    assert advance_run(driven.service, run_id) == "failed"
    set_run(driven, run_id, poll_ns=0)
    poll_run(driven.service, claim_polls(driven.service)[0])
    assert claim_polls(driven.service) == []  # a run that is over is looked at seldom
    announced(driven, run_id, driven.recording(attempt="a2").begin(), 0)
    assert driven.run(run_id).state == "running"
    assert [taken.run.id for taken in claim_polls(driven.service)] == [run_id]


def test_a_program_that_goes_on_after_its_run_has_ended_is_looked_at_until_it_is_over(driven: Driven) -> None:
    def state() -> str:
        with driven.service.database.read() as session:
            return session.execute(select(BoundJobRow.state).filter_by(run_id=run_id)).scalar_one()

    recording, run_id = driven.begin()
    with recorded_process() as job:
        driven.bind(run_id, job)
        announced(driven, run_id, recording, 0)
        recording.end("completed", 3)
        discovering.discover(driven.service, run_id)
        set_run(driven, run_id, last_seen_ns=1)  # long ago: the end of the program is not waited for
        assert advance_run(driven.service, run_id) == "completed"
        assert state() == "running"
        poll_run(driven.service, claim_polls(driven.service)[0])
        poll_ns = driven.run(run_id).poll_ns
    set_run(driven, run_id, poll_ns=0)
    poll_run(driven.service, claim_polls(driven.service)[0])
    assert state() in ("ended", "vanished")
    assert driven.run(run_id).state == "completed"
    assert poll_ns - time.time_ns() < 10 * NANOSECONDS


def announced(driven: Driven, run_id: int, recording: Recording, seq: int) -> None:
    """A segment is written, announced with a message to the workers, and judged."""
    key = recording.write(seq, 4 * seq, 4 * seq + 3)
    with driven.service.database.write() as session:
        put_segments(session, run_id, [key], read_clock(session))
        hint(session, run_id, requested=True)
    driven.settle(run_id)


def test_what_a_listing_finds_waits_for_no_earlier_message(driven: Driven) -> None:
    recording, run_id = driven.begin()
    announced(driven, run_id, recording, 0)
    assert find_due(driven.service).runs == ()
    recording.write(1, 4, 7)
    discovering.discover(driven.service, run_id)
    assert find_due(driven.service).runs == (run_id,)


def test_a_run_that_ends_is_not_left_due_after_the_clock_was_set_back(
    tmp_path: Path, sqlite_tables: Path, folder_store: Store
) -> None:
    clock = Clock()
    database = open_with(clock, sqlite_tables, tmp_path / "clock.sqlite")
    driven = Driven(make_service(database, folder_store))
    recording, run_id = driven.begin()
    announced(driven, run_id, recording, 0)
    clock.move(-3600)
    recording.end("completed", 3)
    discovering.discover(driven.service, run_id)
    set_run(
        driven, run_id, requested_ns=clock.now_ns + 3600 * NANOSECONDS
    )  # a message from before, which was lost
    assert advance_run(driven.service, run_id) == "completed"
    assert find_due(driven.service).runs == (run_id,)
    driven.settle(run_id)
    assert driven.run(run_id).due_ns is None
    assert find_due(driven.service).runs == ()
    database.close()


def test_a_message_is_waited_for_before_another_is_sent(driven: Driven) -> None:
    key = driven.recording().begin().write(0, 0, 3)
    run_id = driven.register()
    with driven.service.database.write() as session:
        put_segments(session, run_id, [key], read_clock(session))
    with driven.service.database.write() as session:
        now = read_clock(session)
    set_run(driven, run_id, due_ns=1, requested_ns=now)
    assert find_due(driven.service).runs == ()
    set_run(driven, run_id, requested_ns=now - 60 * NANOSECONDS)  # the broker has lost it
    assert find_due(driven.service).runs == (run_id,)
    note_requested(driven.service, find_due(driven.service).runs)
    assert find_due(driven.service).runs == ()


def test_a_run_of_which_nothing_is_heard_is_lost_and_comes_back(driven: Driven) -> None:
    recording, run_id = driven.record(last=3)
    sweep(driven.service)
    assert driven.run(run_id).state == "running"
    set_run(driven, run_id, last_seen_ns=1, poll_ns=0)
    sweep(driven.service)
    assert driven.run(run_id).state == "lost"
    recording.write(1, 4, 7)
    set_run(driven, run_id, poll_ns=0, listed_ns=1)
    for found in sweep(driven.service).runs:
        driven.settle(found)
    set_run(driven, run_id, poll_ns=0)
    sweep(driven.service)
    assert driven.run(run_id).state == "running"
    types = driven.event_types(run_id)
    assert [kind for kind in types if kind.startswith("run.")] == ["run.started", "run.ended", "run.started"]


@pytest.mark.parametrize(("lag", "pause"), [(0.0, 0.0), (0.9, 0.0), (1.0, 2.0), (4.0, 8.0), (600.0, 10.0)])
def test_recorders_are_asked_to_announce_less_often_while_the_service_lags(lag: float, pause: float) -> None:
    assert pause_seconds(int(lag * NANOSECONDS)) == pytest.approx(pause)


@pytest.mark.ci
def test_a_fault_of_ours_with_one_run_is_that_runs_trouble_alone(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = driven.register("bad"), driven.register("good")

    def discover(service: Service, run_id: int) -> discovering.Listing:
        if run_id == bad:
            raise KeyError("nobody expected it")
        return found(service, run_id)

    found = discovering.discover
    monkeypatch.setattr("watchstep_services.scheduler.polling.discover", discover)
    before = metrics.REGISTRY.get_sample_value("watchstep_sweep_faults_total", {"of": "run"})
    sweep(driven.service)
    after = metrics.REGISTRY.get_sample_value("watchstep_sweep_faults_total", {"of": "run"})
    assert before is not None
    assert after == before + 1
    assert "KeyError" in driven.run(bad).health["store"]
    assert driven.run(good).listed_ns
    assert driven.run(bad).poll_ns, "it has its next turn"
    assert "bad cannot be polled" in caplog.text


def test_an_attempt_that_begins_in_a_folder_is_found_at_once(driven: Driven) -> None:
    driven = driven.with_settings(listing_seconds=1e-9)
    recording = driven.recording().begin()
    recording.write(0, 0, 3)
    recording.end("completed", 3)
    run_id = driven.register()
    driven.discover(run_id)
    assert advance_run(driven.service, run_id) == "completed"
    poll_run(driven.service, claim_polls(driven.service)[0])
    discover_runs(driven.service)
    poll_due_runs(driven.service, 1e9)
    assert claim_polls(driven.service) == []

    again = driven.recording(attempt="a2")
    again.store.put("attempts/a2.json", documents.encode(AttemptDocument("a2", 2, 1, "raise")))
    again.write(0, 0, 9, nan_from(5))
    discover_runs(driven.service)
    poll_due_runs(driven.service, 1e9)
    driven.settle(run_id)
    assert driven.run(run_id).attempt == "a2"
    assert driven.actions(run_id)


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """A server whose connections nobody takes."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server


def waiting(driven: Driven, url: str, posts: int) -> tuple[list[int], int]:
    """Ids of posts that are due, and of a stop that is due after all of them."""
    driven.recording().begin(on_stop="ignore").write(0, 0, 7)
    run_id = driven.register()
    driven.discover(run_id)
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


def test_no_number_of_posts_hides_a_stop_from_the_sweep(driven_sqlite: Driven) -> None:
    posts, stop = waiting(driven_sqlite, "http://127.0.0.1:1/", 150)
    due = due_actions(driven_sqlite.service)
    assert due[0] == stop
    assert due[1:] == posts[:100]


def test_a_stop_does_not_wait_for_receivers(driven_sqlite: Driven, deaf: socket.socket) -> None:
    driven = driven_sqlite.with_settings(allowed_addresses="loopback", webhook_seconds=600.0)
    posts, stop = waiting(driven, f"http://127.0.0.1:{deaf.getsockname()[1]}/", 8)
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
    queue = WorkQueue(1)
    with http_server() as first, http_server() as second:
        tells = tuple(WebhookAction(url=receiver.url) for receiver in (first, second))
        rules = (RuleConfig(rule="non_finite_values", actions=(StopAction(), *tells)),)
        made = make_service(sqlite, folder_store, rules, allowed_addresses="loopback", silent_seconds=1e-9)
        driven = Driven(replace(made, notifier=queue))
        queue.start(driven.service)
        recording = Recording(folder_store).begin()
        run_id = driven.register()
        driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
        try:
            with statements(sqlite) as executed:
                evaluate_longest_due(driven.service, run_id)
                assert queue.wait_until(lambda: bool(first.events and second.events), 60)
        finally:
            queue.close()
    made_actions = {action.id: action.kind for action in driven.actions(run_id)}
    assert sorted(made_actions.values()) == ["stop", "webhook", "webhook"]
    (stop,) = [number for number, kind in made_actions.items() if kind == "stop"]
    assert len(driven.tries(stop)) == 1, "it is tried by who asked for it"
    asked = [text for text in executed if "actions.payload" in text and "runs.project" in text]
    assert len(asked) == 1


def test_the_first_of_each_project_comes_before_the_second_of_any(driven: Driven) -> None:
    many, _ = waiting(driven, "http://127.0.0.1:1/", 150)
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
    driven_sqlite: Driven, deaf: socket.socket
) -> None:
    driven = driven_sqlite.with_settings(allowed_addresses="loopback", webhook_seconds=600.0)
    posts, _ = waiting(driven, f"http://127.0.0.1:{deaf.getsockname()[1]}/", 60)
    other = register(driven.service, "audio", "run-1", (), "recorder")
    queue = WorkQueue(1)
    queue.start(driven.service)
    try:
        with http_server() as answering:
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
