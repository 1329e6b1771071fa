"""Actions that fail or hang: webhooks, stops that are tried again, and backends that do not respond."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from sqlalchemy import select

from tests.services.dispatch.receiver import Receiver, receiving
from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.recording import PROJECT, Recording, nan_from
from tests.services.stoppable import Stoppable
from watchstep.errors import StoreError
from watchstep.format.control import ControlDocument
from watchstep.format.documents import OnStop
from watchstep.store.store import Store
from watchstep_launch.backend import BackendDownError, JobHandle, JobStatus
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.models import ActionRow, BoundJobRow, RunRow
from watchstep_services.dispatch import target as targeting
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.runs import attempts
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import register
from watchstep_services.runs.stops import request_stop
from watchstep_services.scheduler import celery_app
from watchstep_services.scheduler.queue import WorkQueue

MAX_TRIES = 3


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def fired(driven: Driven, store: Store, url: str) -> ActionRow:
    """The webhook action of an alert that has fired."""
    rule = RuleConfig.model_validate(
        {"rule": "non_finite_values", "name": "notifying", "actions": [{"webhook": url}]}
    )
    recording = Recording(store).begin()
    run_id = driven.register(rules=[rule])
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    return next(action for action in driven.actions(run_id) if action.kind == "webhook")


def test_an_event_is_delivered_once(driven: Driven, folder_store: Store, receiver: Receiver) -> None:
    action = driven.finish(fired(driven, folder_store, receiver.url).id)
    assert action.state == "done"
    assert receiver.types == ["application/cloudevents+json"]
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


def test_a_receiver_that_fails_is_tried_again(
    driven: Driven, folder_store: Store, receiver: Receiver
) -> None:
    receiver.answers = [500, 429]
    action = driven.finish(fired(driven, folder_store, receiver.url).id)
    assert [outcome for outcome, _ in driven.tries(action.id)] == ["error", "error", "done"]
    assert len({event["id"] for event in receiver.events}) == 1


def test_a_delivery_that_is_refused_is_not_repeated(
    driven: Driven, folder_store: Store, receiver: Receiver
) -> None:
    receiver.answers = [404]
    assert driven.finish(fired(driven, folder_store, receiver.url).id).state == "failed"
    assert len(receiver.events) == 1


def test_the_number_of_tries_is_limited(driven_sqlite: Driven, folder_store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    driven = driven_sqlite.with_settings(max_tries=3)
    action = driven.finish(fired(driven, folder_store, f"http://127.0.0.1:{port}/").id)
    assert (action.state, action.tries) == ("failed", 3)
    assert "ConnectError" in action.outcome


@dataclass
class Unreachable(Stoppable):
    """A backend that does not answer the first so many times."""

    silent: int
    gone: bool = False

    def status(self, job: JobHandle) -> JobStatus:
        self.silent -= 1
        if self.silent >= 0:
            raise StoreError(f"job {job.id}: nobody answers", "try again")
        return JobStatus("ended", -15) if self.gone else JobStatus("running")

    def stop(self, job: JobHandle) -> JobStatus:
        self.gone = True
        return self.status(job)

    kill = stop


@pytest.fixture
def stop_requested(driven: Driven, folder_store: Store) -> tuple[Driven, Unreachable, int]:
    """A run that must be stopped, on a backend that does not answer."""
    backend = Unreachable(silent=MAX_TRIES + 1100)
    driven = Driven(replace(driven.service, backends={"far": backend})).with_settings(
        max_tries=MAX_TRIES, grace_seconds=0.0
    )
    recording = Recording(folder_store).begin(on_stop="ignore")
    run_id = driven.register()
    with driven.service.database.write() as session:
        attempts.ensure(session, run_id, "a1")
        session.add(
            BoundJobRow(
                run_id=run_id, attempt="a1", backend="far", job_id="7", identity={}, bound_by="operator"
            )
        )
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    (action,) = driven.actions(run_id)
    return driven, backend, action.id


def try_again(driven: Driven, action_id: int) -> ActionRow:
    with driven.service.database.write() as session:
        session.get_one(ActionRow, action_id).next_ns = 0
    dispatch(driven.service, action_id)
    with driven.service.database.read() as session:
        return session.get_one(ActionRow, action_id)


def test_a_stop_is_tried_until_its_backend_answers(stop_requested: tuple[Driven, Unreachable, int]) -> None:
    driven, backend, action_id = stop_requested
    for number in range(2 * MAX_TRIES):
        action = try_again(driven, action_id)
        assert (action.state, action.tries) == ("pending", number + 1)
    with driven.service.database.write() as session:
        session.get_one(ActionRow, action_id).tries = 2000  # its pause no longer doubles
    assert try_again(driven, action_id).state == "pending"
    backend.silent = 0
    assert driven.finish(action_id).state == "done"
    assert backend.gone


@pytest.mark.parametrize("change", [{"state": "completed"}, {"attempt": "a2"}])
def test_a_stop_with_nothing_left_to_stop_is_given_up(
    stop_requested: tuple[Driven, Unreachable, int], change: dict[str, str]
) -> None:
    driven, _, action_id = stop_requested
    with driven.service.database.write() as session:
        for name, value in change.items():
            setattr(session.get_one(RunRow, session.get_one(ActionRow, action_id).run_id), name, value)
    assert driven.finish(action_id).state == "failed"
    assert len(driven.tries(action_id)) == MAX_TRIES


@dataclass
class Away(Stoppable):
    """A backend that does not answer for now."""

    here: bool = False
    running: bool = True

    def status(self, job: JobHandle) -> JobStatus:
        if not self.here:
            raise BackendDownError(f"job {job.id}: the cluster does not answer", "try again")
        return JobStatus("running") if self.running else JobStatus("ended", 86)

    def stop(self, job: JobHandle) -> JobStatus:
        self.running = False
        return self.status(job)

    kill = stop


def away(driven: Driven, recording: Recording) -> tuple[Driven, Away, int, int]:
    """A run that must be stopped while its backend does not answer."""
    backend = Away()
    driven = Driven(replace(driven.service, backends={"far": backend})).with_settings(
        grace_seconds=0.0, silent_seconds=1e-9
    )
    run_id = driven.register()
    with driven.service.database.write() as session:
        attempts.ensure(session, run_id, "a1")
        session.add(
            BoundJobRow(
                run_id=run_id, attempt="a1", backend="far", job_id="7", identity={}, bound_by="operator"
            )
        )
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    (action,) = driven.actions(run_id)
    return driven, backend, run_id, action.id


def tried(driven: Driven, action_id: int) -> str:
    with driven.service.database.write() as session:
        session.get_one(ActionRow, action_id).next_ns = 0
    came_to = dispatch(driven.service, action_id)
    assert came_to is not None
    return came_to.result


def test_workers_get_a_stop_request_while_the_backend_does_not_answer(
    driven: Driven, folder_store: Store
) -> None:
    recording = Recording(folder_store).begin(on_stop="raise")
    driven, _, run_id, action_id = away(driven, recording)
    assert tried(driven, action_id) == "advanced"
    document = ControlDocument.decode(recording.store.get("control.json"))
    assert document.stop is not None
    assert tried(driven, action_id) == "error"  # the state is unknown: it is polled again, and not given up
    recording.end("stopped", 7)
    discover(driven.service, run_id)
    assert tried(driven, action_id) == "done"
    (done,) = [event["data"] for event in driven.events(run_id) if event["type"] == "io.watchstep.stop.done"]
    assert done["how"] == "cooperative"


def test_a_program_that_does_not_listen_is_terminated_once_the_backend_answers(
    driven: Driven, folder_store: Store
) -> None:
    recording = Recording(folder_store).begin(on_stop="ignore")
    driven, backend, _, action_id = away(driven, recording)
    assert [tried(driven, action_id) for _ in range(3)] == ["error"] * 3
    backend.here = True
    assert tried(driven, action_id) == "done"
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


def stopping(
    driven: Driven, store: Store, backend: Hanging, on_stop: OnStop = "raise"
) -> tuple[Driven, Recording, int, int]:
    """A run on that backend that a rule stops; the run's id, and the stop's."""
    driven = Driven(replace(driven.service, backends={"far": backend}))
    recording = Recording(store).begin(on_stop=on_stop)
    run_id = driven.register()
    with driven.service.database.write() as session:
        attempts.ensure(session, run_id, "a1")
        session.add(
            BoundJobRow(
                run_id=run_id, attempt="a1", backend="far", job_id="7", identity={}, bound_by="operator"
            )
        )
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    (action,) = driven.actions(run_id)
    return driven, recording, run_id, action.id


def control(driven: Driven, run_id: int) -> ControlDocument:
    return ControlDocument.from_data(driven.run(run_id).control)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targeting, "STATUS_SECONDS", 0.0)


def test_workers_get_a_stop_request_while_the_backend_hangs(
    driven: Driven, folder_store: Store, backend: Hanging, impatient: None
) -> None:
    del impatient
    driven, recording, _, stop = stopping(driven, folder_store, backend)
    tried = dispatch(driven.service, stop)
    assert tried is not None
    assert (tried.result, tried.detail) == ("advanced", "asked all workers to stop at step 8")
    assert not backend.released.is_set()
    assert ControlDocument.decode(recording.store.get("control.json")).stop is not None
    backend.released.set()
    assert driven.with_settings(grace_seconds=0.0).finish(stop).state == "done"
    assert backend.state == "ended"


def test_a_job_that_reported_its_end_gets_no_request(
    driven: Driven, folder_store: Store, backend: Hanging, impatient: None
) -> None:
    del impatient
    driven, recording, run_id, stop = stopping(driven, folder_store, backend)
    recording.end(last_step=7)
    discover(driven.service, run_id)
    tried = dispatch(driven.service, stop)
    assert tried is not None
    assert tried.result == "skipped"
    assert not control(driven, run_id).tombstone


def test_a_job_that_has_ended_and_whose_backend_answers_gets_no_request(
    driven: Driven, folder_store: Store, backend: Hanging
) -> None:
    backend.state = "ended"
    backend.released.set()
    driven, _, run_id, stop = stopping(driven, folder_store, backend)
    tried = dispatch(driven.service, stop)
    assert tried is not None
    assert tried.result == "skipped"
    assert not control(driven, run_id).tombstone


@pytest.mark.parametrize("refusing", [False, True])
def test_a_slow_backend_is_waited_for_where_only_it_can_stop_the_job(
    driven_sqlite: Driven,
    folder_store: Store,
    backend: Hanging,
    impatient: None,
    monkeypatch: pytest.MonkeyPatch,
    refusing: bool,
) -> None:
    """Its program does not read requests, or the store refuses them."""
    del impatient
    on_stop: OnStop = "raise" if refusing else "ignore"
    driven, _, _, stop = stopping(driven_sqlite, folder_store, backend, on_stop)
    if refusing:

        def refuse(*_: object) -> None:
            raise StoreError("store: refused", "try again")

        monkeypatch.setattr(targeting, "mirror", refuse)
    backend.released.set()
    tried = dispatch(driven.with_settings(grace_seconds=0.0).service, stop)
    assert tried is not None
    assert tried.result in ("advanced", "done", "error")
    assert driven.with_settings(grace_seconds=0.0).finish(stop).state == "done"
    assert backend.state == "ended"


def test_stops_at_a_backend_that_hangs_delay_no_other_projects_stop(
    driven_sqlite: Driven, folder_store: Store, backend: Hanging
) -> None:
    driven = Driven(replace(driven_sqlite.service, backends={"far": backend}))
    stops: list[int] = []
    for project, run in (*((PROJECT, f"run-{number}") for number in range(20)), ("other", "run-1")):
        Recording(folder_store, run=run, project=project).begin(on_stop="ignore").write(0, 0, 7)
        run_id = register(driven.service, project, run, (), "operator")
        discover(driven.service, run_id)
        driven.settle(run_id)
        with driven.service.database.write() as session:
            if project == PROJECT:
                bound = BoundJobRow(
                    run_id=run_id, attempt="a1", backend="far", job_id=run, identity={}, bound_by="operator"
                )
                session.add(bound)
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
    driven_sqlite: Driven, folder_store: Store, backend: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, _, _, stop = stopping(driven_sqlite, folder_store, backend, "ignore")
    monkeypatch.setattr(celery_app, "service", lambda: driven.service)
    work = WorkQueue(1)
    work.start(driven.service)
    monkeypatch.setattr(celery_app, "_actions_in", lambda _process: work)
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


def test_no_evaluation_waits_for_a_backend_for_long(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep_services.runs.lifecycle._STATUS_SECONDS", 0.05)
    far = FarAndHanging()
    driven, _, run_id, _ = stopping(driven, folder_store, far)
    for _ in range(3):
        assert advance_run(driven.service, run_id) == "running"  # its recorder has announced
    assert far.polled.acquire(timeout=10)
    assert not far.polled.acquire(blocking=False)  # polled once, and nobody waits for the answer again
    with driven.service.database.read() as session:
        assert session.execute(select(BoundJobRow.state)).scalar_one() == "unknown"
    far.released.set()

    def is_seen() -> bool:
        advance_run(driven.service, run_id)
        with driven.service.database.read() as session:
            return session.execute(select(BoundJobRow.state)).scalar_one() == "running"

    eventually(is_seen)  # the late answer is used, though the backend is not polled again yet
    assert not far.polled.acquire(blocking=False)
