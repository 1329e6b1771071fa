from __future__ import annotations

from dataclasses import replace

from tests.services.driving import Driven
from tests.services.recording import nan_from
from watchstep_launch.backend import JobStatus
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import Facts, advance_run, next_state

NEW = Facts(
    has_rows=False,
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
    gone = {"has_rows": True, "job": JobStatus("ended", -15), "gone_for_ns": GRACE}
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
    assert state(has_rows=True, job=JobStatus("unknown"), silent_ns=SILENT) == "lost"
    assert state(has_rows=True, job=JobStatus("vanished"), gone_for_ns=GRACE) == "failed"
    assert state(has_rows=True) == "running"
    assert state(has_rows=True, ends=("completed",)) == "running"
    assert state(has_rows=True, ends=("completed", "completed")) == "completed"
    assert state(has_rows=True, ends=("completed", "completed"), unread=True) == "running"
    assert state(has_rows=True, ends=("completed", "failed")) == "failed"
    assert state(has_rows=True, ends=("failed", "stopped")) == "stopped"
    assert state(has_rows=True, silent_ns=SILENT) == "lost"
    assert state(has_rows=True, silent_ns=SILENT, job=JobStatus("running")) == "running"
    assert state(has_rows=True, job=gone, gone_for_ns=GRACE - 1) == "running"
    assert state(has_rows=True, job=gone, gone_for_ns=GRACE) == "completed"
    assert state(has_rows=True, job=failed, gone_for_ns=GRACE) == "failed"
    assert state(has_rows=True, job=failed, gone_for_ns=GRACE, stopped=True) == "stopped"
    applied = JobStatus("ended", 86)
    assert state(has_rows=True, job=applied, gone_for_ns=GRACE) == "stopped"
    assert state(has_rows=True, job=applied, gone_for_ns=GRACE, ends=("failed",)) == "failed"


def test_what_has_ended_goes_on_only_where_its_end_was_none() -> None:
    ended = {"has_rows": True, "before": "completed"}
    complete = {**ended, "ends": ("completed", "completed")}
    gone = {**ended, "job": JobStatus("ended", 0), "gone_for_ns": GRACE}
    for over in (complete, gone, {**complete, "job": JobStatus("running")}):
        assert state(**over, unread=True) == "completed"
        assert state(**over, stopping=True) == "completed"
    assert state(**complete, job=JobStatus("ended", 1)) == "failed"  # how it ended may be known later
    assert state(**ended, ends=("completed",)) == "running"  # one more worker became known


def test_the_exit_code_of_a_job_says_more_than_an_end_in_good_order() -> None:
    ended = {"has_rows": True, "ends": ("completed", "completed")}
    assert state(**ended, job=JobStatus("ended", 0)) == "completed"
    assert state(**ended, job=JobStatus("ended")) == "completed"
    assert state(**ended, job=JobStatus("ended", 1)) == "failed"
    assert state(**ended, job=JobStatus("ended", 7), stopped=True) == "stopped"
    assert state(**ended, job=JobStatus("ended", 86)) == "completed"  # asked to stop, and trained to its end
    assert state(has_rows=True, ends=("completed", "stopped"), job=JobStatus("ended", 1)) == "stopped"
    # The process that wrote the last end is waited for, as long as a job's last words are.
    assert state(**ended, job=JobStatus("running"), silent_ns=GRACE - 1) == "running"
    assert state(**ended, job=JobStatus("running"), silent_ns=GRACE) == "completed"


def test_events_tell_start_and_end(driven: Driven) -> None:
    recording, run_id = driven.begin()
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

    again = driven.recording(attempt="a2").begin()
    again.write_all([9])
    driven.discover(run_id)
    assert advance_run(driven.service, run_id) == "running"
    assert driven.event_types(run_id) == ["run.ended", "run.started"]


def test_a_run_starts_before_the_alerts_of_its_first_evaluation(driven: Driven) -> None:
    recording, run_id = driven.begin()
    recording.write_all([3, 7], nan_from(5))
    discover(driven.service, run_id)
    driven.settle(run_id)  # nobody has looked at the run's life yet
    assert driven.event_types(run_id)[:2] == ["run.started", "alert.firing"]
    started = driven.events(run_id)[0]["data"]
    assert (started["attempt"], started["before"], started["last_step"]) == ("a1", "created", 7)
    assert driven.run(run_id).state == "running"
    assert advance_run(driven.service, run_id) == "running"
    assert driven.event_types(run_id).count("run.started") == 1


def test_so_does_another_attempt_of_a_run_that_is_over(driven: Driven) -> None:
    first = driven.recording().begin()
    run_id = driven.register()
    first.write_all([7])
    first.end("failed", 7)
    driven.discover(run_id)
    assert advance_run(driven.service, run_id) == "failed"
    again = driven.recording(attempt="a2").begin()
    again.write_all([3, 7], nan_from(5))
    driven.discover(run_id)
    assert driven.event_types(run_id)[:3] == ["run.ended", "run.started", "alert.firing"]


def test_an_attempt_that_is_replaced_before_anybody_saw_its_end_has_ended_first(driven: Driven) -> None:
    first = driven.recording().begin()
    run_id = driven.register()
    first.write_all([7])
    driven.discover(run_id)
    first.end("stopped", 7)
    again = driven.recording(attempt="a2").begin()
    again.write_all([3, 7], nan_from(5))
    driven.discover(run_id)
    assert advance_run(driven.service, run_id) == "running"
    types = ["run.started", "run.ended", "run.started", "alert.firing"]
    assert driven.event_types(run_id)[:4] == types
    ended = driven.events(run_id)[1]["data"]
    assert (ended["attempt"], ended["state"]) == ("a1", "stopped")
    assert driven.events(run_id)[2]["data"]["attempt"] == "a2"
    assert driven.run(run_id).state == "running"


def test_a_restart_inside_a_launch_is_no_end_of_the_launch(driven: Driven) -> None:
    first = driven.recording().begin()
    run_id = driven.register()
    first.write_all([7])
    driven.discover(run_id)
    first.end("failed", 7)
    again = driven.recording(attempt="a1-r1").begin()
    again.write_all([3, 7])
    driven.discover(run_id)
    assert advance_run(driven.service, run_id) == "running"
    assert driven.event_types(run_id) == ["run.started"]


def test_rows_that_come_after_the_end_start_no_run(driven: Driven) -> None:
    recording, run_id = driven.begin()
    recording.write_all([3])
    recording.written["w0"].append(recording.key(1, 4, 7))
    recording.end("completed", 7)
    driven.discover(run_id)
    assert advance_run(driven.service, run_id) == "completed"
    recording.write(1, 4, 7, nan_from(5))
    discover(driven.service, run_id)
    assert advance_run(driven.service, run_id) == "completed"
    driven.settle(run_id)
    assert advance_run(driven.service, run_id) == "completed"
    assert driven.event_types(run_id)[:2] == ["run.ended", "alert.firing"]
    assert "run.started" not in driven.event_types(run_id)
    (stop,) = driven.actions(run_id)
    assert driven.finish(stop.id).state == "skipped"
    assert advance_run(driven.service, run_id) == "completed"
    assert [kind for kind in driven.event_types(run_id) if kind.startswith("run.")] == ["run.ended"]


def test_a_run_that_was_lost_goes_on_when_it_is_heard_of(driven: Driven) -> None:
    recording, run_id = driven.record(last=3)
    assert advance_run(driven.with_settings(silent_seconds=1e-9).service, run_id) == "lost"
    driven.judge(run_id, recording.write(1, 4, 7))
    assert advance_run(driven.service, run_id) == "running"
