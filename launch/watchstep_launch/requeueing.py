"""Launching a job again that a rule has stopped: once for each stop, by whichever waiting process comes first.

The launching side does it, because only it has the program, its environment and the right to submit. A lock admits one process, and the
intent is written down before the submission. A process that finds an intent looks for the job by its name. Where it cannot decide
whether that job was submitted, it submits nothing.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from watchstep.capture.identity import new_nonce
from watchstep.client import Client
from watchstep.errors import NotFoundError, ServiceError
from watchstep.format.layout import ATTEMPTS
from watchstep.platform.transport import SERVICE, TOKEN
from watchstep.reading.run import open_run
from watchstep.stopping import FIRST_STEP, RESUME_FROM
from watchstep.wrapper.environment import LAUNCHED
from watchstep_launch.backend import (
    Backend,
    BackendDownError,
    FindsByName,
    JobHandle,
    JobNotFoundError,
    Launch,
    SubmissionRejectedError,
)
from watchstep_launch.job_record import JobRecord, job_name, load, place_of
from watchstep_launch.job_status import end
from watchstep_launch.registration import Registering, recorder_token
from watchstep_launch.relaunch import Intent, Relaunch

_SUBMISSION_POLL_SECONDS = 1.0


def taken(backend: Backend, record: JobRecord, intent: Intent) -> JobHandle | None:
    """The job that somebody was about to submit, over or not; None where it is sure that there is none, and will be none.

    Waits as long as the submission may still go on (`FindsByName.submission_seconds`).

    Raises:
        BackendDownError: nobody knows, or it ran and the backend has forgotten it.
        BackendError: the backend does not answer, or refuses.
    """
    while True:
        ended = intent.may_go_on_for(_submission_seconds(backend)) <= 0.0
        found = _named(backend, intent.name)
        if found is not None:
            return found
        if ended:
            break
        time.sleep(
            min(_SUBMISSION_POLL_SECONDS, max(0.0, intent.may_go_on_for(_submission_seconds(backend))))
        )
    if _has_recorded(record, intent.attempt):
        raise BackendDownError(
            f"job {intent.name!r} ran as attempt {intent.attempt} of run {record.project}/{record.run}, and"
            f" {backend.kind} shows it no more",
            "see its run for what it came to; launch the run anew where it is not over",
        )
    return None


def came_through(backend: Backend, intent: Intent) -> JobHandle | None:
    """The job of an earlier submission, where a backend that takes no name twice has refused this one; None where there is none.

    Raises:
        BackendError: the backend does not answer, or refuses.
    """
    if not isinstance(backend, FindsByName) or backend.submission_seconds:
        return None
    found = backend.find(intent.name)
    return None if found is None or backend.status(found).is_over else found


def _named(backend: Backend, name: str) -> JobHandle | None:
    if isinstance(backend, FindsByName):
        return backend.find(name)
    for job in backend.jobs():
        if name in (job.id, job.identity.get("name"), job.details.get("name")):
            return job
    try:
        return backend.reattach(name)
    except JobNotFoundError:
        pass
    raise BackendDownError(
        f"job {name!r} was about to be submitted when its launcher ended, and may have been taken",
        "look for it by its name: attach to it where it runs, or launch the run anew where it does not",
    )


def _submission_seconds(backend: Backend) -> float:
    return backend.submission_seconds if isinstance(backend, FindsByName) else 0.0


def _has_recorded(record: JobRecord, attempt: str) -> bool:
    """Whether a program was started as this attempt: on most backends it is known for longer than the job."""
    try:
        run = open_run(f"{record.store}/{record.project}/{record.run}")
    except NotFoundError:
        return False
    names = [entry.key.rsplit("/", 1)[-1].removesuffix(".json") for entry in run.store.entries(ATTEMPTS)]
    return any(name == attempt or name.startswith(f"{attempt}-r") for name in names)


_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Good:
    """The checkpoint that a stop named, and what it said of why."""

    path: str
    step: int
    reason: str


def launched_again(record: JobRecord, backend: Backend) -> JobRecord | None:
    """The launch that follows one that is over: made now, or by somebody else meanwhile; None where none is to follow.

    Args:
        record: of the launch that is over, and whose run has been judged to the end.
        backend: what it ran on.

    Raises:
        SubmissionRejectedError: it cannot be started again; nothing runs.
        BackendDownError, CredentialsExpiredError: the backend did not take it, or nobody knows whether it did. Waiting again finds
            out where the backend can tell, and submits nothing otherwise.
        ServiceError: the service does not answer, or refuses. Waiting again goes on from there.
    """
    if record.relaunch is None or record.judge is None:
        return None
    with _alone(record):
        held = load(record.run, record.project)
        if held.attempt != record.attempt:
            return held
        relaunch = held.relaunch
        if relaunch is None:
            return None
        handle: JobHandle | None = None
        if relaunch.intent is not None:
            handle = taken(backend, held, relaunch.intent)
        else:
            if relaunch.done >= relaunch.limit:
                return None
            _await_stop(held)
            if (good := _good(held)) is None:
                return None
            relaunch = _intended(held, relaunch, good)
        return _go_on(held, relaunch, backend, handle)


def _intended(record: JobRecord, relaunch: Relaunch, good: _Good) -> Relaunch:
    """Let a new attempt pass the run's tombstone, and write down that it is about to be launched."""
    intent = Intent(new_nonce(), job_name(record.run), good.path, good.step, time.time())
    why = f"requeue {relaunch.done + 1} of {relaunch.limit} by its launcher, from {good.path} (step {good.step}), after: {good.reason}"
    _client(record).allow_restart(record.run, why[:1000], intent.attempt)
    _log.warning(
        "run %s/%s is launched again from %s: %s", record.project, record.run, good.path, good.reason
    )
    intended = replace(relaunch, intent=intent)
    replace(record, relaunch=intended).save()
    return intended


def _go_on(record: JobRecord, relaunch: Relaunch, backend: Backend, handle: JobHandle | None) -> JobRecord:
    """Submit what is intended, unless it was, and have the service know of it."""
    assert record.judge is not None
    assert relaunch.intent is not None
    address, intent = record.judge.address(), relaunch.intent
    settled = replace(relaunch, done=relaunch.done + 1, intent=None)
    if handle is None:
        given = {LAUNCHED: intent.attempt, RESUME_FROM: intent.path, FIRST_STEP: str(intent.step + 1)}
        launch = Launch(
            relaunch.command,
            {**relaunch.environment, **given, SERVICE: address.recorder.url},
            Path(relaunch.folder),
            name=intent.name,
            secrets={TOKEN: recorder_token(address, record.project, record.run, record.judge.recorder_token)},
        )
        try:
            handle = backend.submit(launch)
        except SubmissionRejectedError:
            handle = came_through(backend, intent)
            if handle is None:  # none of it runs
                replace(record, relaunch=settled).save()
                raise
    following = replace(record, attempt=intent.attempt, handle=handle, relaunch=settled)
    try:
        Registering(address.operator, record.project, record.run).bind(
            intent.attempt, replace(handle, backend=relaunch.bound_as)
        )
    except BaseException:  # as of every launch: what no service can stop is not left running
        end(backend, handle, 0.0)
        replace(
            record, relaunch=replace(relaunch, intent=None)
        ).save()  # and whoever waits next launches another
        raise
    following.save()  # last: who ends before this is followed by one who finds the job by its name
    return following


def _await_stop(record: JobRecord) -> None:
    """A stop is recorded as done a moment after its job is over."""
    client, deadline = _client(record), time.monotonic() + _STOP_SECONDS
    while any(one.kind == "stop" and one.state == "pending" for one in client.actions(record.run)):
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def _good(record: JobRecord) -> _Good | None:
    """The last good checkpoint, where a rule has stopped this launch and one is known."""
    for event in _client(record).events(record.run, types=("watchstep.stop.done",)):
        data: Any = event.data
        attempt = str(data.get("attempt", ""))
        mine = attempt == record.attempt or attempt.startswith(f"{record.attempt}-r")
        if not mine or data.get("step") is None:  # what people asked for names no step
            continue
        good = data.get("last_good_checkpoint")
        if good is None:
            _log.warning(
                "run %s/%s is not launched again: no checkpoint from before step %s is known", record.project, record.run, data["step"]
            )  # fmt: skip
            return None
        return _Good(str(good["path"]), int(good["step"]), str(data.get("reason", "")))
    return None


def _client(record: JobRecord) -> Client:
    if record.judge is None:
        raise ServiceError(f"run {record.project}/{record.run}: no service judges it", "launch it with rules")
    address = record.judge.address().operator
    return Client(address.url, address.token, record.project)


@contextmanager
def _alone(record: JobRecord) -> Iterator[None]:
    """One process at a time looks whether a run is to be launched again."""
    with place_of(record.project, record.run).with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
