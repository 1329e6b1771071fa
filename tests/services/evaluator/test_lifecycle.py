from __future__ import annotations

from dataclasses import replace

from tests.services.driving import Driven
from tests.services.recording import Recording
from watchstep.store import Store
from watchstep_services.estimator.backend import JobStatus
from watchstep_services.evaluator.discover import discover
from watchstep_services.evaluator.lifecycle import Facts, advance_run, next_state

NEW = Facts(
    heard=False,
    world_size=2,
    ends=(),
    unread=False,
    job=None,
    gone_for_ns=0,
    stopping=False,
    stopped=False,
    silent_ns=0,
)
GRACE, SILENT = 10, 100


def state(**changes: object) -> str:
    return next_state(replace(NEW, **changes), GRACE, SILENT)  # type: ignore[arg-type]


def test_what_a_stop_comes_to_is_waited_for() -> None:
    gone = {"heard": True, "job": JobStatus("ended", -15), "gone_for_ns": GRACE}
    assert state(**gone, stopping=True) == "running"
    assert state(**gone, stopped=True) == "stopped"
    assert (
        state(**gone, stopping=True, silent_ns=SILENT) == "failed"
    )  # the stop itself does not come to an end


def test_the_life_of_a_run() -> None:
    gone, failed = JobStatus("ended", 0), JobStatus("ended", 1)
    assert state() == "created"
    assert state(job=JobStatus("running")) == "running"
    assert state(job=JobStatus("queued"), silent_ns=SILENT) == "created"
    assert state(heard=True, job=JobStatus("unknown"), silent_ns=SILENT) == "lost"
    assert state(heard=True, job=JobStatus("vanished"), gone_for_ns=GRACE) == "failed"
    assert state(heard=True) == "running"
    assert state(heard=True, ends=("completed",)) == "running"
    assert state(heard=True, ends=("completed", "completed")) == "completed"
    assert state(heard=True, ends=("completed", "completed"), unread=True) == "running"
    assert state(heard=True, ends=("completed", "failed")) == "failed"
    assert state(heard=True, ends=("failed", "stopped")) == "stopped"
    assert state(heard=True, silent_ns=SILENT) == "lost"
    assert state(heard=True, silent_ns=SILENT, job=JobStatus("running")) == "running"
    assert state(heard=True, job=gone, gone_for_ns=GRACE - 1) == "running"
    assert state(heard=True, job=gone, gone_for_ns=GRACE) == "completed"
    assert state(heard=True, job=failed, gone_for_ns=GRACE) == "failed"
    assert state(heard=True, job=failed, gone_for_ns=GRACE, stopped=True) == "stopped"


def test_events_tell_start_and_end(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    assert advance_run(driven.service, run_id) == "created"
    recording.write_all([3, 7])
    recording.end("failed", 7)
    discover(driven.service, run_id)
    assert advance_run(driven.service, run_id) == "created"
    driven.settle(run_id)
    assert advance_run(driven.service, run_id) == "failed"
    assert advance_run(driven.service, run_id) == "failed"
    assert driven.event_types(run_id) == ["run.ended"]
    assert driven.events(run_id)[0]["data"]["last_step"] == 7

    again = Recording(folder_store, attempt="a2").begin()
    again.write_all([9])
    discover(driven.service, run_id)
    driven.settle(run_id)
    assert advance_run(driven.service, run_id) == "running"
    assert driven.event_types(run_id) == ["run.ended", "run.started"]
