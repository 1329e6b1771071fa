"""Whose a job is. A job that one project bound is never another's: else one tenant could have another's job stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep_services.database.models import BackendRow, Job, JobHolder
from watchstep_services.database.upsert import insert_missing
from watchstep_services.estimator import local
from watchstep_services.estimator.backend import JobHandle
from watchstep_services.tenancy.conflict import ConflictError


def bound_job(session: Session, run_id: int, attempt: str) -> tuple[Job, str] | None:
    """The job that is bound to an attempt, and the kind of its backend, whatever that is registered as.

    Of a backend that is registered no more, its name stands for its kind.
    """
    bound = (
        select(Job, func.coalesce(BackendRow.kind, Job.backend))
        .outerjoin(BackendRow, BackendRow.name == Job.backend)
        .where(Job.run_id == run_id, Job.attempt == attempt)
    )
    row = session.execute(bound).one_or_none()
    return None if row is None else (row[0], row[1])


def settled(kind: str, job: JobHandle) -> JobHandle:
    """A job with its identity in one spelling, for what it is called by must not tell one job from itself.

    Raises:
        ConfigError: the identity is not one of its kind's, or the id is another's.
    """
    if kind != local.NAME:
        return JobHandle(job.backend, job.id, dict(job.identity))
    identity = local.identity_of(job)
    if job.id != str(identity.pid):
        raise ConfigError(
            f"job {job.id!r}: its identity is that of process {identity.pid}", "give the process id as id"
        )
    return JobHandle(job.backend, job.id, asdict(identity))


def hold(session: Session, project: str, kind: str, job: JobHandle) -> None:
    """Note that a job is a project's. Several attempts of a project may share one, as restarts under a launcher do.

    Raises:
        ConflictError: it is another project's; which, is not told.
    """
    digest = digest_of(kind, job)
    if insert_missing(session, JobHolder, {"job": digest, "project": project}):
        return
    holder = session.execute(select(JobHolder.project).filter_by(job=digest)).scalar_one()
    if holder != project:
        raise ConflictError(
            f"job {job.backend}:{job.id} is bound in another project",
            "bind the job that is this project's own",
        )


def digest_of(kind: str, job: JobHandle) -> str:
    """What a job is, whatever its backend is registered as. A process is known without what people call its host."""
    if kind == local.NAME:
        what: Any = [kind, *(job.identity.get(name) for name in ("boot", "pid", "start_ticks"))]
    else:
        what = [kind, job.id, dict(job.identity)]
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
