"""A backend that does not answer delays neither the stop request to the workers nor stops of other projects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from sqlalchemy import select

from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.recording import PROJECT, Recording, nan_from
from tests.services.stoppable import Stoppable
from watchstep.errors import StoreError
from watchstep.format.control import ControlDocument
from watchstep.format.documents import OnStop
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle, JobStatus
from watchstep_services.db.models import BoundJobRow
from watchstep_services.dispatch import target as targeting
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.runs import attempts
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import register
from watchstep_services.runs.stops import request_stop
from watchstep_services.scheduler import celery_app
from watchstep_services.scheduler.queue import WorkQueue


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
