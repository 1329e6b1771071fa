"""Actions that fail or hang: webhooks, stops that are tried again, and backends that do not respond."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from sqlalchemy import select

from tests.services.channels.http_server import HttpServer, status
from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.recording import PROJECT, Recording, nan_from
from tests.services.stoppable import Stoppable
from watchstep.errors import StoreError, WatchstepError
from watchstep.format.control import ControlDocument
from watchstep.format.documents import OnStop
from watchstep_launch.backend import Backend, BackendDownError, JobHandle, JobStatus
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.db.models import ActionRow, BoundJobRow, RunRow
from watchstep_services.dispatch import target as targeting
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import register
from watchstep_services.runs.stops import request_stop
from watchstep_services.scheduler import celery_app
from watchstep_services.scheduler.queue import WorkQueue

MAX_TRIES = 3


def fired(driven: Driven, url: str) -> ActionRow:
    """The webhook action of an alert that has fired."""
    rule = RuleConfig.model_validate(
        {"rule": "non_finite_values", "name": "notifying", "actions": [{"webhook": url}]}
    )
    _, run_id = driven.record(nan_from(5), rules=[rule])
    return driven.actions(run_id, "webhook")[0]


def test_an_event_is_delivered_once(driven: Driven, receiver: HttpServer) -> None:
    action = driven.finish(fired(driven, receiver.url).id)
    assert action.state == "done"
    assert [headers["content-type"] for headers in receiver.headers] == ["application/cloudevents+json"]
    (event,) = receiver.events
    assert event in driven.events(action.run_id)
    assert (event["id"], event["specversion"], event["type"]) == (
        action.event_id,
        "1.0",
        "io.watchstep.alert.firing",
    )
    assert event["data"]["finding"]["step"] == 5
    assert event["data"]["rule_config"]["name"] == "notifying"
    assert driven.finish(action.id).tries == 1
    assert len(receiver.events) == 1


def test_a_receiver_that_fails_is_tried_again(driven_sqlite: Driven, receiver: HttpServer) -> None:
    receiver.answers = [status(500), status(429)]
    action = driven_sqlite.finish(fired(driven_sqlite, receiver.url).id)
    assert [outcome for outcome, _ in driven_sqlite.tries(action.id)] == ["error", "error", "done"]
    assert len({event["id"] for event in receiver.events}) == 1


def test_a_delivery_that_is_refused_is_not_repeated(driven_sqlite: Driven, receiver: HttpServer) -> None:
    receiver.answers = [status(404)]
    assert driven_sqlite.finish(fired(driven_sqlite, receiver.url).id).state == "failed"
    assert len(receiver.events) == 1


def test_the_number_of_tries_is_limited(driven_sqlite: Driven) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    driven = driven_sqlite.with_settings(max_tries=3)
    action = driven.finish(fired(driven, f"http://127.0.0.1:{port}/").id)
    assert (action.state, action.tries) == ("failed", 3)
    assert "ConnectError" in action.outcome


def stopping(
    driven: Driven, backend: Backend, on_stop: OnStop = "raise", **settings: float
) -> tuple[Driven, Recording, int, int]:
    """A run on that backend that a rule stops; the run's id, and the stop's."""
    driven = Driven(replace(driven.service, backends={"far": backend})).with_settings(**settings)
    recording, run_id = driven.begin(on_stop=on_stop)
    driven.bind(run_id, JobHandle("far", "7", {}))
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    (action,) = driven.actions(run_id)
    return driven, recording, run_id, action.id


def tried(driven: Driven, action_id: int) -> AttemptResult:
    """The result of the next try, which is due now."""
    driven.change(ActionRow, action_id, next_ns=0)
    result = dispatch(driven.service, action_id)
    assert result is not None
    return result


@dataclass
class Away(Stoppable):
    """A backend that does not answer for now."""

    here: bool = False
    running: bool = True
    error: WatchstepError = field(
        default_factory=lambda: BackendDownError("job 7: the cluster does not answer", "try again")
    )

    def status(self, job: JobHandle) -> JobStatus:
        if not self.here:
            raise self.error
        return JobStatus("running") if self.running else JobStatus("ended", 86)

    def stop(self, job: JobHandle) -> JobStatus:
        self.running = False
        return self.status(job)

    kill = stop


@pytest.fixture
def stop_requested(driven_sqlite: Driven) -> tuple[Driven, Away, int]:
    """A run that must be stopped, on a backend that does not answer."""
    backend = Away(error=StoreError("job 7: nobody answers", "try again"))
    driven, _, _, action_id = stopping(
        driven_sqlite, backend, "ignore", max_tries=MAX_TRIES, grace_seconds=0.0
    )
    return driven, backend, action_id


def test_a_stop_is_tried_until_its_backend_answers(stop_requested: tuple[Driven, Away, int]) -> None:
    driven, backend, action_id = stop_requested
    for number in range(2 * MAX_TRIES):
        action = driven.dispatched(action_id)
        assert (action.state, action.tries) == ("pending", number + 1)
    driven.change(ActionRow, action_id, tries=2000)  # its pause no longer doubles
    assert driven.dispatched(action_id).state == "pending"
    backend.here = True
    assert driven.finish(action_id).state == "done"
    assert not backend.running


@pytest.mark.parametrize("change", [{"state": "completed"}, {"attempt": "a2"}])
def test_a_stop_with_nothing_left_to_stop_is_given_up(
    stop_requested: tuple[Driven, Away, int], change: dict[str, str]
) -> None:
    driven, _, action_id = stop_requested
    driven.change(RunRow, driven.get(ActionRow, action_id).run_id, **change)
    assert driven.finish(action_id).state == "failed"
    assert len(driven.tries(action_id)) == MAX_TRIES


def test_workers_get_a_stop_request_while_the_backend_does_not_answer(driven_sqlite: Driven) -> None:
    driven, recording, run_id, action_id = stopping(
        driven_sqlite, Away(), grace_seconds=0.0, silent_seconds=1e-9
    )
    assert tried(driven, action_id).result == "advanced"
    assert ControlDocument.decode(recording.store.get("control.json")).stop is not None
    # The state is unknown: it is polled again, and not given up.
    assert tried(driven, action_id).result == "error"
    recording.end("stopped", 7)
    discover(driven.service, run_id)
    assert tried(driven, action_id).result == "done"
    (done,) = driven.events(run_id, "stop.done")
    assert done["data"]["how"] == "cooperative"


def test_a_program_that_does_not_listen_is_terminated_once_the_backend_answers(driven_sqlite: Driven) -> None:
    backend = Away()
    driven, _, _, action_id = stopping(
        driven_sqlite, backend, "ignore", grace_seconds=0.0, silent_seconds=1e-9
    )
    assert [tried(driven, action_id).result for _ in range(3)] == ["error"] * 3
    backend.here = True
    assert tried(driven, action_id).result == "done"
    assert not backend.running


@dataclass
class Hanging(Stoppable):
    """A backend that does not answer until it is released."""

    released: threading.Event = field(default_factory=threading.Event)
    polled: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    state: str = "running"

    def status(self, job: JobHandle) -> JobStatus:
        del job
        self.polled.release()
        assert self.released.wait(60)
        return JobStatus("running") if self.state == "running" else JobStatus("ended", -15)

    def stop(self, job: JobHandle) -> JobStatus:
        self.state = "ended"
        return self.status(job)

    kill = stop


@pytest.fixture
def backend() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.released.set()


def control(driven: Driven, run_id: int) -> ControlDocument:
    return ControlDocument.from_data(driven.run(run_id).control)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targeting, "STATUS_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_workers_get_a_stop_request_while_the_backend_hangs(driven_sqlite: Driven, backend: Hanging) -> None:
    driven, recording, _, stop = stopping(driven_sqlite, backend)
    came_to = tried(driven, stop)
    assert (came_to.result, came_to.detail) == ("advanced", "asked all workers to stop at step 8")
    assert not backend.released.is_set()
    assert ControlDocument.decode(recording.store.get("control.json")).stop is not None
    backend.released.set()
    assert driven.with_settings(grace_seconds=0.0).finish(stop).state == "done"
    assert backend.state == "ended"


@pytest.mark.usefixtures("impatient")
def test_a_job_that_reported_its_end_gets_no_request(driven_sqlite: Driven, backend: Hanging) -> None:
    driven, recording, run_id, stop = stopping(driven_sqlite, backend)
    recording.end(last_step=7)
    discover(driven.service, run_id)
    assert tried(driven, stop).result == "skipped"
    assert not control(driven, run_id).tombstone


def test_a_job_that_has_ended_and_whose_backend_answers_gets_no_request(
    driven_sqlite: Driven, backend: Hanging
) -> None:
    backend.state = "ended"
    backend.released.set()
    driven, _, run_id, stop = stopping(driven_sqlite, backend)
    assert tried(driven, stop).result == "skipped"
    assert not control(driven, run_id).tombstone


@pytest.mark.parametrize("refusing", [False, True])
@pytest.mark.usefixtures("impatient")
def test_a_slow_backend_is_waited_for_where_only_it_can_stop_the_job(
    driven_sqlite: Driven,
    backend: Hanging,
    monkeypatch: pytest.MonkeyPatch,
    refusing: bool,
) -> None:
    """Its program does not read requests, or the store refuses them."""
    on_stop: OnStop = "raise" if refusing else "ignore"
    driven, _, _, stop = stopping(driven_sqlite, backend, on_stop)
    if refusing:

        def refuse(*_: object) -> None:
            raise StoreError("store: refused", "try again")

        monkeypatch.setattr(targeting, "mirror", refuse)
    backend.released.set()
    assert tried(driven.with_settings(grace_seconds=0.0), stop).result in ("advanced", "done", "error")
    assert driven.with_settings(grace_seconds=0.0).finish(stop).state == "done"
    assert backend.state == "ended"


@pytest.mark.ci
def test_stops_at_a_backend_that_hangs_delay_no_other_projects_stop(
    driven_sqlite: Driven, backend: Hanging
) -> None:
    driven = Driven(replace(driven_sqlite.service, backends={"far": backend}))
    stops: list[int] = []
    for project, run in (*((PROJECT, f"run-{number}") for number in range(20)), ("other", "run-1")):
        driven_sqlite.recording(run=run, project=project).begin(on_stop="ignore").write(0, 0, 7)
        run_id = register(driven.service, project, run, (), "operator")
        driven.discover(run_id)
        if project == PROJECT:
            driven.bind(run_id, JobHandle("far", run, {}))
        with driven.service.database.write() as session:
            stop = request_stop(session, driven.service.base_url, run_id, "a1", ("", "enough"))
        assert stop is not None
        stops.append(stop)
    work = WorkQueue(1)
    work.start(driven.service)
    try:
        for stop in stops:
            work.action_due(stop)
        assert backend.polled.acquire(timeout=60)
        assert work.wait_until(lambda: driven.actions(run_id)[0].state == "done", 60)
        assert not backend.released.is_set()
    finally:
        backend.released.set()
        work.close()


def test_a_backend_that_hangs_keeps_no_process_of_production_from_other_work(
    driven_sqlite: Driven, backend: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, _, _, stop = stopping(driven_sqlite, backend, "ignore")
    monkeypatch.setattr(celery_app, "service", lambda: driven.service)
    work = WorkQueue(1)
    work.start(driven.service)
    monkeypatch.setattr(celery_app, "_threads_in", lambda _process: work)
    try:
        celery_app.dispatch_action(stop)
        assert backend.polled.acquire(timeout=60)
        assert driven.tries(stop) == [], "it waits for the backend in a thread"
    finally:
        backend.released.set()
        work.close()
    assert backend.state == "ended"


@dataclass
class FarAndHanging(Hanging):
    """A backend whose status is cached."""

    poll_seconds: ClassVar[float] = 2.0


def test_no_evaluation_waits_for_a_backend_for_long(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchstep_services.runs.lifecycle._STATUS_SECONDS", 0.05)
    far = FarAndHanging()
    driven, _, run_id, _ = stopping(driven, far)
    for _ in range(3):
        assert advance_run(driven.service, run_id) == "running"  # its recorder has announced
    assert far.polled.acquire(timeout=10)
    assert not far.polled.acquire(blocking=False)  # polled once, and nobody waits for the answer again
    assert driven.one(select(BoundJobRow.state)) == "unknown"
    far.released.set()

    def is_seen() -> bool:
        advance_run(driven.service, run_id)
        return driven.one(select(BoundJobRow.state)) == "running"

    eventually(is_seen)  # the late answer is used, though the backend is not polled again yet
    assert not far.polled.acquire(blocking=False)
