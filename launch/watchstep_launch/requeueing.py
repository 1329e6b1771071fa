"""Relaunching a job that a rule has stopped: once for each stop, by the first waiting process.

The launching side does this, because only it has the program, its environment and the right to submit. A lock admits one process, and the
intent is saved before the submission. A process that finds an intent looks for the job by its name. If it cannot determine
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
from watchstep_launch.job_record import JobRecord, end, job_name, load, record_path
from watchstep_launch.registration import LaunchRegistration, recorder_token
from watchstep_launch.relaunch import Intent, Relaunch

_SUBMISSION_POLL_SECONDS = 1.0


def submitted_job(backend: Backend, record: JobRecord, intent: Intent) -> JobHandle | None:
    """Return the job of an intended submission, over or not; None if it is certain that there is none and will be none.

    Waits as long as the submission may still be in progress (`FindsByName.submission_seconds`).

    Raises:
        BackendDownError: the answer cannot be determined, or the job ran and the backend no longer knows it.
        BackendError: the backend does not answer, or refuses.
    """
    while True:
        ended = intent.remaining_seconds(_submission_seconds(backend)) <= 0.0
        job = _named(backend, intent.name)
        if job is not None:
            return job
        if ended:
            break
        time.sleep(
            min(_SUBMISSION_POLL_SECONDS, max(0.0, intent.remaining_seconds(_submission_seconds(backend))))
        )
    if _has_recorded(record, intent.attempt):
        raise BackendDownError(
            f"job {intent.name!r} ran as attempt {intent.attempt} of run {record.project}/{record.run}, but"
            f" {backend.kind} no longer knows it",
            "see the run for its result; launch it again if it is not over",
        )
    return None


def job_of_earlier_submission(backend: Backend, intent: Intent) -> JobHandle | None:
    """Return the job of an earlier submission after a backend has refused its name as a duplicate; None if there is none.

    Raises:
        BackendError: the backend does not answer, or refuses.
    """
    if not isinstance(backend, FindsByName) or backend.submission_seconds:
        return None
    job = backend.find(intent.name)
    return None if job is None or backend.status(job).is_over else job


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
        f"the launcher ended while it submitted job {name!r}, which the backend may have accepted",
        "look for the job by its name: attach to it if it runs, or launch the run again if it does not",
    )


def _submission_seconds(backend: Backend) -> float:
    return backend.submission_seconds if isinstance(backend, FindsByName) else 0.0


def _has_recorded(record: JobRecord, attempt: str) -> bool:
    """Whether a program was started as this attempt. Most backends know a job for less time than the store keeps its attempt."""
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
class _GoodCheckpoint:
    """The last good checkpoint and the reason, from a stop event."""

    path: str
    step: int
    reason: str


def launched_again(record: JobRecord, backend: Backend) -> JobRecord | None:
    """Return the launch that follows one that is over, made now or meanwhile by another process; None if none is to follow.

    Args:
        record: the launch that is over, after its run has been evaluated completely.
        backend: the backend that it ran on.

    Raises:
        SubmissionRejectedError: the job cannot be started again; nothing runs.
        BackendDownError, CredentialsExpiredError: the backend did not accept the job, or it is unknown whether it did. Waiting again
            resolves this if the backend can determine it, and submits nothing otherwise.
        ServiceError: the service does not answer, or refuses. Waiting again continues from there.
    """
    if record.relaunch is None or record.service is None:
        return None
    with _lock(record):
        latest = load(record.run, record.project)
        if latest.attempt != record.attempt:
            return latest
        relaunch = latest.relaunch
        if relaunch is None:
            return None
        handle: JobHandle | None = None
        if relaunch.intent is not None:
            handle = submitted_job(backend, latest, relaunch.intent)
        else:
            if relaunch.done >= relaunch.limit:
                return None
            _await_stop(latest)
            if (good := _last_good_checkpoint(latest)) is None:
                return None
            relaunch = _save_intent(latest, relaunch, good)
        return _submit_intended(latest, relaunch, backend, handle)


def _save_intent(record: JobRecord, relaunch: Relaunch, good: _GoodCheckpoint) -> Relaunch:
    """Permit a new attempt despite the run's tombstone, and save that it is about to be launched."""
    intent = Intent(new_nonce(), job_name(record.run), good.path, good.step, time.time())
    reason = f"requeue {relaunch.done + 1} of {relaunch.limit} by its launcher, from {good.path} (step {good.step}), after: {good.reason}"
    _client(record).allow_restart(record.run, reason[:1000], intent.attempt)
    _log.warning(
        "run %s/%s is launched again from %s: %s", record.project, record.run, good.path, good.reason
    )
    intended = replace(relaunch, intent=intent)
    replace(record, relaunch=intended).save()
    return intended


def _submit_intended(
    record: JobRecord, relaunch: Relaunch, backend: Backend, handle: JobHandle | None
) -> JobRecord:
    """Submit the intended launch unless it was submitted, and register it with the service."""
    assert record.service is not None
    assert relaunch.intent is not None
    address, intent = record.service.address(), relaunch.intent
    settled = replace(relaunch, done=relaunch.done + 1, intent=None)
    if handle is None:
        variables = {LAUNCHED: intent.attempt, RESUME_FROM: intent.path, FIRST_STEP: str(intent.step + 1)}
        launch = Launch(
            relaunch.command,
            {**relaunch.environment, **variables, SERVICE: address.recorder.url},
            Path(relaunch.folder),
            name=intent.name,
            secrets={
                TOKEN: recorder_token(address, record.project, record.run, record.service.recorder_token)
            },
        )
        try:
            handle = backend.submit(launch)
        except SubmissionRejectedError:
            handle = job_of_earlier_submission(backend, intent)
            if handle is None:  # nothing runs
                replace(record, relaunch=settled).save()
                raise
    following = replace(record, attempt=intent.attempt, handle=handle, relaunch=settled)
    try:
        LaunchRegistration(address.operator, record.project, record.run, record.store).bind(
            intent.attempt, replace(handle, backend=relaunch.bound_as)
        )
    except BaseException:  # as for every launch, a job that no service can stop is ended
        end(backend, handle, 0.0)
        replace(
            record, relaunch=replace(relaunch, intent=None)
        ).save()  # the next waiting process launches another job
        raise
    following.save()  # last: if this process ends earlier, the next one finds the job by its name
    return following


def _await_stop(record: JobRecord) -> None:
    """Wait until the stop is recorded as done, which happens shortly after its job is over."""
    client, deadline = _client(record), time.monotonic() + _STOP_SECONDS
    while any(action.kind == "stop" and action.state == "pending" for action in client.actions(record.run)):
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


def _last_good_checkpoint(record: JobRecord) -> _GoodCheckpoint | None:
    """Return the last good checkpoint if a rule has stopped this launch and such a checkpoint is known."""
    for event in _client(record).events(record.run, types=("io.watchstep.stop.done",)):
        data: Any = event.data
        attempt = str(data.get("attempt", ""))
        mine = attempt == record.attempt or attempt.startswith(f"{record.attempt}-r")
        if not mine or data.get("step") is None:  # stops that people request have no step
            continue
        good = data.get("last_good_checkpoint")
        if good is None:
            _log.warning(
                "run %s/%s is not launched again: no checkpoint from before step %s is known", record.project, record.run, data["step"]
            )  # fmt: skip
            return None
        return _GoodCheckpoint(str(good["path"]), int(good["step"]), str(data.get("reason", "")))
    return None


def _client(record: JobRecord) -> Client:
    if record.service is None:
        raise ServiceError(f"no service evaluates run {record.project}/{record.run}", "launch it with rules")
    address = record.service.address().operator
    return Client(address.url, address.token, record.project)


@contextmanager
def _lock(record: JobRecord) -> Iterator[None]:
    """Admit one process at a time to decide on a relaunch."""
    with record_path(record.project, record.run).with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
