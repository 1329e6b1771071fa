"""Stops of jobs, repeated ones, and the last good checkpoint."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.services.driving import RULES, Driven
from tests.services.jobs import STUBBORN, WILLING, eventually, launch
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.documents import Checkpoint, EndState
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle
from watchstep_launch.backends.local.backend import Local
from watchstep_rules.config.rule_config import RuleConfig, StopAction
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.failpoints import listening
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.models import ActionRow
from watchstep_services.dispatch import dispatch as dispatching
from watchstep_services.dispatch.dispatch import dispatch, due_actions, next_due_ns
from watchstep_services.dispatch.stop import try_stop
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import bind_job, register
from watchstep_services.runs.stops import allow, request_stop


def backend_of(driven: Driven) -> Local:
    backend = driven.service.backends["local"]
    assert isinstance(backend, Local)
    return backend


def fired(driven: Driven, recording: Recording, job: JobHandle | None = None) -> tuple[int, ActionRow]:
    """A run with a stop requested by its owner's rule, and that action."""
    run_id = driven.register()
    if job is not None:
        bind_job(driven.service, run_id, recording.attempt, job, "operator")
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    (action,) = driven.actions(run_id)
    return run_id, action


def control_of(recording: Recording) -> ControlDocument:
    return ControlDocument.decode(recording.store.get("control.json"))


def stop_of(recording: Recording) -> StopRequest:
    """What the workers are asked to do."""
    stop = control_of(recording).stop
    assert stop is not None
    return stop


def done_event(driven: Driven, run_id: int) -> dict[str, object]:
    (event,) = driven.events(run_id, "stop.done")
    data: dict[str, object] = event["data"]
    return data


def exits_with(code: int) -> str:
    """A program that ends with this exit code on SIGUSR1."""
    return WILLING.replace("\n\n", f"\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit({code}))\n", 1)


@pytest.mark.parametrize(("program", "how", "stages"), [(WILLING, "terminated", 3), (STUBBORN, "killed", 4)])
def test_a_job_is_requested_to_stop_then_terminated_then_killed(
    driven: Driven, tmp_path: Path, program: str, how: str, stages: int
) -> None:
    driven = driven.with_settings(grace_seconds=0.2)
    recording = driven.recording().begin(on_stop="raise")
    job = launch(backend_of(driven), tmp_path, program)
    run_id, action = fired(driven, recording, job)

    action = driven.finish(action.id)

    assert action.state == "done"
    assert backend_of(driven).status(job).state == "ended"
    tries = driven.tries(action.id)
    assert stages - 1 <= len(tries) <= stages, (
        "a job that is gone at once after the signal needs no further look"
    )
    assert tries[0] == ("advanced", "asked all workers to stop at step 8")
    stop = stop_of(recording)
    assert (stop.attempt, stop.step, control_of(recording).version) == ("a1", 8, 1)
    assert control_of(recording).tombstone
    assert control_of(recording).as_data() == ControlDocument.from_data(driven.run(run_id).control).as_data()
    assert done_event(driven, run_id)["how"] == how
    assert done_event(driven, run_id)["stopped_at_step"] == 7
    assert driven.with_settings(grace_seconds=0.0).run(run_id).state in {"running", "created"}
    assert advance_run(driven.with_settings(grace_seconds=0.0).service, run_id) == "stopped"


def test_a_job_that_ends_on_a_stop_request(driven_sqlite: Driven, tmp_path: Path) -> None:
    recording = driven_sqlite.recording().begin(on_stop="raise")
    job = launch(backend_of(driven_sqlite), tmp_path, WILLING)
    run_id, action = fired(driven_sqlite, recording, job)
    dispatch(driven_sqlite.service, action.id)
    recording.end("stopped", 8)  # what a worker writes before it ends on a stop request
    backend_of(driven_sqlite).stop(job)
    eventually(lambda: backend_of(driven_sqlite).status(job).state == "ended")
    assert driven_sqlite.finish(action.id).state == "done"
    assert done_event(driven_sqlite, run_id)["how"] == "cooperative"
    assert done_event(driven_sqlite, run_id)["stopped_at_step"] == 8


@pytest.mark.ci
def test_a_program_that_does_not_listen_is_terminated_at_once(driven_sqlite: Driven, tmp_path: Path) -> None:
    driven = driven_sqlite.with_settings(grace_seconds=3600.0)
    recording = driven_sqlite.recording().begin(on_stop="ignore")
    job = launch(backend_of(driven), tmp_path, WILLING)
    run_id, action = fired(driven, recording, job)
    assert driven.finish(action.id).state == "done"
    assert done_event(driven, run_id)["how"] == "terminated"


def test_a_job_that_has_ended_is_a_recorded_no_op(driven_sqlite: Driven, tmp_path: Path) -> None:
    recording = driven_sqlite.recording().begin()
    job = launch(backend_of(driven_sqlite), tmp_path, WILLING)
    backend_of(driven_sqlite).kill(job)
    eventually(lambda: backend_of(driven_sqlite).status(job).state == "ended")
    run_id, action = fired(driven_sqlite, recording, job)
    assert driven_sqlite.finish(action.id).state == "skipped"
    assert done_event(driven_sqlite, run_id)["how"] == "already ended"
    assert driven_sqlite.run(run_id).control["version"] == 0


def test_without_a_job_the_workers_last_words_count(driven: Driven) -> None:
    recording = driven.recording().begin(world_size=2)
    run_id, action = fired(driven, recording)
    dispatch(driven.service, action.id)
    stop = stop_of(recording)
    assert stop.step == 7 + 16  # of several workers each learns of it with its next announcement only
    recording.end("stopped", stop.step)
    recording.end("stopped", stop.step, worker=1)
    assert driven.finish(action.id).state == "done"
    assert done_event(driven, run_id)["stopped_at_step"] == stop.step


def test_a_program_that_trained_to_its_end_was_not_stopped(driven_sqlite: Driven) -> None:
    recording = driven_sqlite.recording().begin()
    run_id, action = fired(driven_sqlite, recording)
    dispatch(driven_sqlite.service, action.id)
    recording.end("completed", 899)
    action = driven_sqlite.finish(action.id)
    assert (action.state, "ended by itself" in action.outcome) == ("done", True)
    assert done_event(driven_sqlite, run_id)["how"] == "requested"


@pytest.mark.ci
@pytest.mark.parametrize(("ends", "message"), [(("failed",), "failed by itself"), ((), "no worker reported")])
def test_a_job_that_crashes_after_a_stop_request_has_failed(
    driven_sqlite: Driven, tmp_path: Path, ends: tuple[EndState, ...], message: str
) -> None:
    driven = driven_sqlite.with_settings(grace_seconds=3600.0)
    recording = driven_sqlite.recording().begin(on_stop="raise")
    job = launch(backend_of(driven), tmp_path, exits_with(1))
    run_id, action = fired(driven, recording, job)
    assert dispatch(driven.service, action.id) is not None  # asks
    for state in ends:
        recording.end(state, 8)
    os.kill(int(job.id), signal.SIGUSR1)
    eventually(lambda: backend_of(driven).status(job).exit_code == 1)
    action = driven.finish(action.id)
    assert (action.state, message in action.outcome) == ("done", True)
    assert done_event(driven, run_id)["how"] == "requested"
    assert advance_run(driven.with_settings(grace_seconds=0.0).service, run_id) == "failed"


@pytest.mark.ci
@pytest.mark.parametrize("written", [False, True], ids=["exit-code-alone", "last-words"])
def test_a_job_that_ends_by_the_code_of_a_stop_has_applied_it(
    driven_sqlite: Driven, tmp_path: Path, *, written: bool
) -> None:
    recording = driven_sqlite.recording().begin(on_stop="raise")
    job = launch(backend_of(driven_sqlite), tmp_path, exits_with(86))
    run_id, action = fired(driven_sqlite, recording, job)
    dispatch(driven_sqlite.service, action.id)
    if written:
        recording.end("stopped", 8)
    os.kill(int(job.id), signal.SIGUSR1)
    eventually(lambda: backend_of(driven_sqlite).status(job).exit_code == 86)
    assert driven_sqlite.finish(action.id).state == "done"
    assert done_event(driven_sqlite, run_id)["how"] == "cooperative"
    assert advance_run(driven_sqlite.with_settings(grace_seconds=0.0).service, run_id) == "stopped"


def test_without_a_job_and_without_an_answer(driven: Driven) -> None:
    recording = driven.recording().begin()
    _, action = fired(driven.with_settings(silent_seconds=1e-9), recording)
    action = driven.with_settings(silent_seconds=1e-9).finish(action.id)
    assert action.state == "done"
    assert action.outcome.startswith("no job bound: requested from the workers")


def test_a_stop_of_an_unreachable_job_is_requested_and_then_given_up(driven_sqlite: Driven) -> None:
    recording = driven_sqlite.recording().begin()
    elsewhere = {"pid": 1, "start_ticks": 1, "boot": "another", "host": "another-host"}
    driven = driven_sqlite.with_settings(silent_seconds=1e-9)
    _, action = fired(driven, recording, JobHandle("local", "1", elsewhere))
    action = driven.finish(action.id)
    assert (action.state, "another-host" in action.outcome) == ("failed", True)
    assert control_of(recording).version == 1


def test_two_rules_make_one_stop(driven: Driven) -> None:
    twice = RuleConfig(rule="non_finite_values", name="again", actions=(StopAction(),))
    recording = driven.recording().begin()
    run_id = register(driven.service, PROJECT, "run-1", (twice,), "operator")
    with driven.service.database.write() as session:
        allow(session, PROJECT, twice, "an operator", "tried for a month")
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    assert driven.event_types(run_id).count("alert.firing") == 2
    assert driven.event_types(run_id).count("stop.requested") == 1
    assert len(driven.actions(run_id)) == 1


def test_a_rule_without_permission_stops_nothing(driven: Driven) -> None:
    stops = RuleConfig(
        rule="non_finite_values", name="mine", params={"only_nan": True}, actions=(StopAction(),)
    )
    recording = driven.recording().begin()
    quiet = Driven(replace(driven.service, owner_rules=RULES[1:]))
    run_id = quiet.register(rules=[stops])
    quiet.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    assert quiet.event_types(run_id) == ["run.started", "alert.firing", "stop.would_have"]
    assert quiet.actions(run_id) == []


def test_a_stop_of_an_attempt_that_is_over_does_nothing(driven: Driven) -> None:
    recording = driven.recording().begin()
    run_id, action = fired(driven, recording)
    again = driven.recording(attempt="a2").begin()
    driven.judge(run_id, again.write(0, 6, 9))
    assert driven.finish(action.id).state == "skipped"
    assert driven.run(run_id).control["version"] == 0


def resumed_beside(
    driven: Driven, root: Store, *, ahead_ns: int, seen_before: bool
) -> tuple[int, Recording, Recording]:
    """A run whose first attempt's clock is ahead, and whose second one is damaged; the service has seen the first before, or sees both at once."""
    now = time.time_ns()
    first = Recording(root).begin(started_ns=now + ahead_ns)
    run_id = driven.register()
    key = first.write(0, 0, 4)
    if seen_before:
        driven.judge(run_id, key)
    second = Recording(root, attempt="a2").begin(started_ns=time.time_ns())
    driven.judge(run_id, key, second.write(0, 5, 9, nan_from(7)))
    return run_id, first, second


def test_a_resumed_attempt_is_stopped_though_the_clock_of_the_first_was_ahead(
    driven: Driven, folder_store: Store
) -> None:
    run_id, _, second = resumed_beside(driven, folder_store, ahead_ns=6 * 3600 * 10**9, seen_before=True)
    assert driven.run(run_id).attempt == "a2"
    (action,) = driven.actions(run_id)
    dispatch(driven.service, action.id)
    assert stop_of(second).attempt == "a2"


def test_an_attempt_that_only_seems_to_be_older_is_stopped_once_the_other_has_ended(
    driven: Driven, folder_store: Store
) -> None:
    run_id, first, second = resumed_beside(driven, folder_store, ahead_ns=6 * 3600 * 10**9, seen_before=False)
    assert driven.run(run_id).attempt == "a1"
    (action,) = driven.actions(run_id)
    assert driven.dispatched(action.id).state == "pending"
    first.end("failed", last_step=4)
    discover(driven.service, run_id)
    assert driven.dispatched(action.id).state == "pending"
    assert stop_of(second).attempt == "a2"


def test_an_attempt_that_only_seems_to_be_older_is_stopped_once_the_other_is_silent(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _, second = resumed_beside(
        driven_sqlite, folder_store, ahead_ns=6 * 3600 * 10**9, seen_before=False
    )
    (action,) = driven_sqlite.actions(run_id)
    assert driven_sqlite.dispatched(action.id).state == "pending"
    monkeypatch.setattr("watchstep_services.dispatch.stop._AHEAD_NS", 1)
    driven_sqlite.judge(run_id, second.write(1, 10, 14, nan_from(10)))
    driven_sqlite.dispatched(action.id)
    assert stop_of(second).attempt == "a2"


@pytest.mark.parametrize("shared", [False, True])
def test_a_silent_attempt_with_a_job_of_its_own_is_ended_though_another_is_newer(
    driven_sqlite: Driven,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    shared: bool,
) -> None:
    """Restarts that share a job are another thing: to end it would end the newest attempt."""
    recording = driven_sqlite.recording().begin(on_stop="ignore")
    job = launch(backend_of(driven_sqlite), tmp_path, WILLING, "first")
    run_id, action = fired(driven_sqlite, recording, job)
    newest = job if shared else launch(backend_of(driven_sqlite), tmp_path, WILLING, "second")
    bind_job(driven_sqlite.service, run_id, "a2", newest, "operator")
    again = driven_sqlite.recording(attempt="a2").begin()
    driven_sqlite.judge(run_id, again.write(0, 6, 9))
    monkeypatch.setattr("watchstep_services.dispatch.stop._SILENT_NS", 0)
    assert driven_sqlite.finish(action.id).state == ("skipped" if shared else "done")
    assert backend_of(driven_sqlite).status(job).is_over == (not shared)
    assert not backend_of(driven_sqlite).status(newest).is_over
    backend_of(driven_sqlite).kill(newest)


def test_an_action_that_fails_blocks_no_other(
    driven_sqlite: Driven,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, working = driven_sqlite.recording(run="broken").begin(), driven_sqlite.recording().begin()
    run_id = driven_sqlite.register("broken")
    driven_sqlite.judge(run_id, broken.write(0, 0, 3, nan_from(1)))
    (first,) = driven_sqlite.actions(run_id)
    _, second = fired(driven_sqlite, working)
    stop = try_stop

    def fails_once(service: object, due: object) -> object:
        if due.id == first.id:  # type: ignore[attr-defined]
            raise ZeroDivisionError
        return stop(service, due)  # type: ignore[arg-type]

    monkeypatch.setitem(dispatching._KINDS, "stop", fails_once)
    assert due_actions(driven_sqlite.service) == [first.id, second.id]
    for action_id in due_actions(driven_sqlite.service):
        dispatch(driven_sqlite.service, action_id)
    assert driven_sqlite.tries(first.id)[0][0] == "error"
    assert "ZeroDivisionError" in driven_sqlite.tries(first.id)[0][1]
    assert driven_sqlite.tries(second.id)[0][0] == "advanced"


def test_an_action_whose_worker_died_is_done_by_another(driven: Driven) -> None:
    recording = driven.recording().begin()
    _, action = fired(driven, recording)
    claim = dispatching._claim(driven.service, action.id)
    assert claim is not None
    assert dispatch(driven.service, action.id) is None
    # its lease ends
    driven.change(ActionRow, action.id, next_ns=0)
    assert dispatch(driven.service, action.id) is not None
    dispatching._record(driven.service, claim, AttemptResult("done", "too late"))
    assert driven.tries(action.id) == [("advanced", "asked all workers to stop at step 8")]


def test_a_stop_waits_for_a_worker_that_died_as_long_as_its_lease_and_no_receiver(driven: Driven) -> None:
    driven = driven.with_settings(lease_seconds=20.0, webhook_seconds=600.0)
    _, action = fired(driven, driven.recording().begin(on_stop="raise"))

    def die(point: str, _: object) -> None:
        if point == "dispatch.claimed":
            raise KeyboardInterrupt

    with listening(die), pytest.raises(KeyboardInterrupt):
        dispatch(driven.service, action.id)
    waits_ns = next_due_ns(driven.service)
    assert waits_ns is not None
    assert 0 < waits_ns <= nanoseconds(20.0)


def begun(driven: Driven) -> int:
    driven.recording().begin(on_stop="ignore").write(0, 0, 7)
    run_id = driven.register()
    driven.discover(run_id)
    return run_id


def ask(driven: Driven, run_id: int, attempt: str = "a1") -> int | None:
    with driven.service.database.write() as session:
        return request_stop(session, driven.service.base_url, run_id, attempt, ("", "enough"))


def test_a_job_that_is_bound_after_a_stop_was_requested_can_be_stopped(
    driven: Driven, tmp_path: Path
) -> None:
    driven = driven.with_settings(grace_seconds=0.2)
    run_id = begun(driven)
    first = ask(driven, run_id)
    assert first is not None
    assert ask(driven, run_id) is None, "it is on its way"
    assert driven.finish(first).outcome.startswith("no job bound")
    backend = backend_of(driven)
    job = launch(backend, tmp_path, WILLING)
    bind_job(driven.service, run_id, "a1", job, "operator")

    assert ask(driven, run_id) is None, "the binding has taken it up"

    assert driven.finish(first).state == "done"
    assert backend.status(job).state == "ended"
    assert ask(driven, run_id) is None, "it was stopped"
    assert driven.event_types(run_id).count("stop.requested") == 1


def test_a_stop_of_an_attempt_that_another_follows_is_not_taken_up(driven: Driven) -> None:
    run_id = begun(driven)
    first = ask(driven, run_id)
    assert first is not None
    driven.finish(first)
    driven.recording(attempt="a2").begin(started_ns=2)
    discover(driven.service, run_id)

    assert ask(driven, run_id) is None
    assert ask(driven, run_id, "a2") is not None


def test_a_stop_that_found_no_job_is_carried_out_when_the_job_is_bound(
    driven: Driven, tmp_path: Path
) -> None:
    """As of a launch that could not register while the service was down: the stop is not requested again."""
    driven = driven.with_settings(grace_seconds=0.2)
    run_id = begun(driven)
    stop = ask(driven, run_id)
    assert stop is not None
    assert driven.finish(stop).outcome.startswith("no job bound")
    backend = backend_of(driven)
    job = launch(backend, tmp_path, WILLING)

    bind_job(driven.service, run_id, "a1", job, "recorder")

    assert driven.finish(stop).state == "done"
    assert backend.status(job).state == "ended"
    bind_job(driven.service, run_id, "a1", job, "recorder")
    assert driven.finish(stop).state == "done", "one that ended the attempt is not taken up"


def test_a_stop_names_step_tensor_job_and_the_last_good_checkpoint(
    driven_sqlite: Driven, tmp_path: Path
) -> None:
    recording = driven_sqlite.recording().begin(on_stop="ignore")
    saved = [Checkpoint(f"/c/{step}.pt", step, recording.attempt, 0, 1000 + step) for step in (1, 3, 6)]
    for checkpoint in saved:
        recording.store.put(checkpoint.key, checkpoint.encode())
    job = launch(backend_of(driven_sqlite), tmp_path, WILLING)
    run_id, action = fired(driven_sqlite, recording, job)
    driven_sqlite.finish(action.id)
    done = done_event(driven_sqlite, run_id)
    assert (done["step"], done["tensor"], done["job"]) == (5, "loss", f"local:{job.id}")
    assert done["last_good_checkpoint"] == saved[1].as_data()


@pytest.mark.ci
def test_where_no_checkpoint_is_good_none_is_named(driven_sqlite: Driven, tmp_path: Path) -> None:
    recording = driven_sqlite.recording().begin(on_stop="ignore")
    late = Checkpoint("/c/5.pt", 5, recording.attempt, 0, 1)
    recording.store.put(late.key, late.encode())
    run_id, action = fired(driven_sqlite, recording, launch(backend_of(driven_sqlite), tmp_path, WILLING))
    driven_sqlite.finish(action.id)
    assert done_event(driven_sqlite, run_id)["last_good_checkpoint"] is None
