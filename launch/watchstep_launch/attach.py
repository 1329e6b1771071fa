"""Attaching to a job that others launched: its run is evaluated with more rules, and its job can be stopped."""

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
from watchstep_launch.backend import KINDS, Backend, ChecksOwner, JobHandle, open_backend
from watchstep_launch.backends.local.backend import Local
from watchstep_launch.job_record import JobRecord
from watchstep_launch.registration import LaunchRegistration, config_of, registered_name, settings_of
from watchstep_launch.service_location import locate_service
from watchstep_rules.config.attached import AttachedRule
from watchstep_rules.config.rule_config import RuleConfig

_ACTIVE = frozenset(("open", "stopping"))


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
    service_reference = locate_service(service, store_url)
    document = opened.document
    registration = LaunchRegistration(
        service_reference.address().operator, document.project, document.run, store_url
    )
    registration.register((), "")
    _check_store(registration, store_url)
    if isinstance(runs_on, Local):
        record_process(int(handle.id), runs_on.records.folder)
    registration.bind(
        attempt, replace(handle, backend=registered_name(runs_on, service_reference, backend_name))
    )
    # Only now: rules that stop are of no use to a run if its job cannot be stopped.
    registration.register(configs, "who attached to it")
    settings = settings_of(runs_on)
    record = JobRecord(
        document.project, document.run, attempt, store_url, handle, runs_on.kind, settings, service_reference
    )
    record.save()
    return record


def _parts(job: str) -> tuple[str, str]:
    kind, colon, job_id = job.partition(":")
    if not colon or not job_id:
        raise ConfigError(f"{job!r} does not name a job", "use KIND:ID, for example slurm:1234")
    if kind not in KINDS:
        raise ConfigError(
            f"job {job!r}: unknown backend kind {kind!r}", f"use one of: {', '.join(sorted(KINDS))}"
        )
    return kind, job_id


def _open(run: str) -> Run:
    try:
        return open_run(run)
    except NotFoundError as error:
        raise NotFoundError(
            error.what,
            "check the URL, <store>/<project>/<run>; attaching is possible once the program has started to record",
        ) from error


def _attempt_of(run: Run) -> str:
    """Return the active attempt.

    Raises:
        ConfigError: the run has no attempt yet, or the newest one is over.
    """
    name = f"run {run.document.project}/{run.id}"
    state = run.state()
    if state == "created":
        raise ConfigError(f"{name} has no attempt yet", "attach once its program has started to record")
    if state not in _ACTIVE:
        raise ConfigError(f"{name} is over ({state})", "attach to an active run")
    attempts = [
        documents.decode(
            documents.AttemptDocument, run.store.get(entry.key, limit=documents.MAX_BYTES), entry.key
        )
        for entry in run.store.entries(ATTEMPTS)
    ]
    return max(attempts, key=lambda attempt: (attempt.started_ns, attempt.attempt)).attempt


def _check_store(registration: LaunchRegistration, store_url: str) -> None:
    """Check that the service reads the run's store. Otherwise it would never see a row of the run, and report nothing.

    Raises:
        ConfigError: the service reads another store.
    """
    location = registration.location().rstrip("/")
    read = location if urlsplit(location).scheme else Path(location).as_uri()
    if read != store_url.rstrip("/"):
        raise ConfigError(
            f"run {registration.project}/{registration.run} is in {store_url}, but the service at"
            f" {registration.address.url} reads it from {location}",
            "name the service that watches the run's store, or a run in the service's store",
        )


def _running(backend: Backend, job_id: str) -> JobHandle:
    """Return the job that has this id.

    Raises:
        JobNotFoundError: there is none.
        ConfigError: the job is over.
        BackendError: the job belongs to another user, or the backend does not answer.
    """
    handle = backend.reattach(job_id)
    status = backend.status(handle)
    if status.is_over:
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        raise ConfigError(
            f"job {backend.kind}:{job_id} is over ({status.state}{code})", "attach to a running job"
        )
    # Rules that stop are of no use to a job that may not be stopped, and only a user who may stop the job may attach rules.
    if isinstance(backend, ChecksOwner):
        backend.check_may_stop(handle)
    return handle
