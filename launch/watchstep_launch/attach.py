"""Taking up a job that others launched: its run is judged by more rules, and its job can be stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format import documents
from watchstep.format.layout import ATTEMPTS
from watchstep.platform.process import record_process
from watchstep.reading.run import Run, open_run
from watchstep_launch.backend import Backend, ChecksOwner, JobHandle
from watchstep_launch.backend_registry import KINDS, open_backend
from watchstep_launch.backends.local.backend import Local
from watchstep_launch.job_record import JobRecord
from watchstep_launch.registration import Registering, config_of, known_as, settings_of
from watchstep_launch.service_location import judge_of
from watchstep_rules.config.attached import AttachedRule
from watchstep_rules.config.rule_config import RuleConfig

_GOES_ON = frozenset(("open", "stopping"))


def attach(
    run: str,
    job: str,
    rules: Sequence[AttachedRule | RuleConfig] = (),
    *,
    backend: Backend | None = None,
    backend_name: str = "",
    service: str = "",
) -> JobRecord:
    """See `Job.attach`."""
    configs = [config_of(rule) for rule in rules]
    kind, job_id = _parts(job)
    runs_on = open_backend(kind, {}) if backend is None else backend
    opened = _open(run)
    attempt = _attempt_of(opened)
    handle = _running(runs_on, job_id)
    store = opened.location.rsplit("/", 2)[0]
    store_url = store if urlsplit(store).scheme else Path(store).as_uri()
    judge = judge_of(service, store_url)
    document = opened.document
    asked = Registering(judge.address().operator, document.project, document.run)
    asked.know((), "")
    _check_place(asked, store_url)
    if isinstance(runs_on, Local):
        record_process(int(handle.id), runs_on.records.folder)
    asked.bind(attempt, replace(handle, backend=known_as(runs_on, judge, backend_name)))
    # Only now: rules that stop are of no use to a run whose job nobody can stop.
    asked.know(configs, "who attached to it")
    settings = settings_of(runs_on)
    record = JobRecord(
        document.project, document.run, attempt, store_url, handle, runs_on.kind, settings, judge
    )
    record.save()
    return record


def _parts(job: str) -> tuple[str, str]:
    kind, colon, job_id = job.partition(":")
    if not colon or not job_id:
        raise ConfigError(f"job {job!r}: no job", "name it KIND:ID, as in slurm:1234")
    if kind not in KINDS:
        raise ConfigError(
            f"job {job!r}: backend kind {kind!r} is not known", f"use one of: {', '.join(sorted(KINDS))}"
        )
    return kind, job_id


def _open(run: str) -> Run:
    try:
        return open_run(run)
    except NotFoundError as error:
        raise NotFoundError(
            error.what,
            "check the URL, <store>/<project>/<run>; a job is attached to once its program has begun to record",
        ) from error


def _attempt_of(run: Run) -> str:
    """The attempt that goes on.

    Raises:
        ConfigError: none has begun, or the newest is over.
    """
    named = f"run {run.document.project}/{run.id}"
    state = run.state()
    if state == "created":
        raise ConfigError(f"{named}: has no attempt yet", "attach once its program has begun to record")
    if state not in _GOES_ON:
        raise ConfigError(f"{named}: is over ({state})", "attach to a run that goes on")
    held = [
        documents.decode(
            documents.AttemptDocument, run.store.get(entry.key, limit=documents.MAX_BYTES), entry.key
        )
        for entry in run.store.entries(ATTEMPTS)
    ]
    return max(held, key=lambda attempt: (attempt.started_ns, attempt.attempt)).attempt


def _check_place(asked: Registering, store_url: str) -> None:
    """A service that looks elsewhere would never see a row of the run, and say nothing of it.

    Raises:
        ConfigError: it does.
    """
    location = asked.location().rstrip("/")
    read = location if urlsplit(location).scheme else Path(location).as_uri()
    if read != store_url.rstrip("/"):
        raise ConfigError(
            f"run {asked.project}/{asked.run}: lies in {store_url}, and the service at {asked.address.url} reads"
            f" this project's runs from {location}",
            "name the service that watches the run's store, or the run in the service's store",
        )


def _running(backend: Backend, job_id: str) -> JobHandle:
    """The job that goes by this id.

    Raises:
        JobNotFoundError: none does.
        ConfigError: it is over.
        BackendError: it is another user's, or the backend does not answer.
    """
    handle = backend.reattach(job_id)
    status = backend.status(handle)
    if status.is_over:
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        raise ConfigError(
            f"job {backend.kind}:{job_id}: is over ({status.state}{code})", "attach to a job that runs"
        )
    # Rules that stop are of no use to a job that may not be stopped; and who may not stop it has no say in who does.
    if isinstance(backend, ChecksOwner):
        backend.check_may_stop(handle)
    return handle
