"""A stop without effect can be requested again while its attempt runs."""

from __future__ import annotations

from pathlib import Path

from tests.services.driving import Driven
from tests.services.jobs import WILLING, launch
from tests.services.recording import Recording
from watchstep.store.store import Store
from watchstep_launch.backends.local.backend import Local
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.registration import bind_job
from watchstep_services.runs.stops import request_stop


def begun(driven: Driven, store: Store) -> int:
    Recording(store).begin(on_stop="ignore").write(0, 0, 7)
    run_id = driven.register()
    discover(driven.service, run_id)
    driven.settle(run_id)
    return run_id


def ask(driven: Driven, run_id: int, attempt: str = "a1") -> int | None:
    with driven.service.database.write() as session:
        return request_stop(session, driven.service.base_url, run_id, attempt, ("", "enough"))


def test_a_job_that_is_bound_after_a_stop_was_requested_can_be_stopped(
    driven: Driven, folder_store: Store, tmp_path: Path
) -> None:
    driven = driven.with_settings(grace_seconds=0.2)
    run_id = begun(driven, folder_store)
    first = ask(driven, run_id)
    assert first is not None
    assert ask(driven, run_id) is None, "it is on its way"
    assert driven.finish(first).outcome.startswith("no job bound")
    backend = driven.service.backends["local"]
    assert isinstance(backend, Local)
    job = launch(backend, tmp_path, WILLING)
    bind_job(driven.service, run_id, "a1", job, "operator")

    assert ask(driven, run_id) is None, "the binding has taken it up"

    assert driven.finish(first).state == "done"
    assert backend.status(job).state == "ended"
    assert ask(driven, run_id) is None, "it was stopped"
    assert driven.event_types(run_id).count("stop.requested") == 1


def test_a_stop_of_an_attempt_that_another_follows_is_not_taken_up(
    driven: Driven, folder_store: Store
) -> None:
    run_id = begun(driven, folder_store)
    first = ask(driven, run_id)
    assert first is not None
    driven.finish(first)
    Recording(folder_store, attempt="a2").begin(started_ns=2)
    discover(driven.service, run_id)

    assert ask(driven, run_id) is None
    assert ask(driven, run_id, "a2") is not None


def test_a_stop_that_found_no_job_is_carried_out_when_the_job_is_bound(
    driven: Driven, folder_store: Store, tmp_path: Path
) -> None:
    """As of a launch that could not register while the service was down: the stop is not requested again."""
    driven = driven.with_settings(grace_seconds=0.2)
    run_id = begun(driven, folder_store)
    stop = ask(driven, run_id)
    assert stop is not None
    assert driven.finish(stop).outcome.startswith("no job bound")
    backend = driven.service.backends["local"]
    assert isinstance(backend, Local)
    job = launch(backend, tmp_path, WILLING)

    bind_job(driven.service, run_id, "a1", job, "recorder")

    assert driven.finish(stop).state == "done"
    assert backend.status(job).state == "ended"
    bind_job(driven.service, run_id, "a1", job, "recorder")
    assert driven.finish(stop).state == "done", "one that ended the attempt is not taken up"
