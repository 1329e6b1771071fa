"""A stop is retried while there is something to stop, however long the backend does not answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.services.driving import Driven
from tests.services.recording import Recording, nan_from
from tests.services.stoppable import Stoppable
from watchstep.errors import StoreError
from watchstep.format.control import ControlDocument
from watchstep.store.store import Store
from watchstep_launch.backend import BackendDownError, JobHandle, JobStatus
from watchstep_services.db.models import ActionRow, BoundJobRow, RunRow
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.runs import attempts
from watchstep_services.runs.discovery import discover

MAX_TRIES = 3


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
