"""Whose a job is. A job that one project bound is never another's: else one tenant could have another's job stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep_launch.backend import JobHandle
from watchstep_launch.backends.local import backend as local
from watchstep_launch.backends.slurm import backend as slurm
from watchstep_services.db.models import BackendRow, BoundJobRow, JobOwner
from watchstep_services.db.upsert import insert_missing
from watchstep_services.tenancy.conflict import ConflictError

_RESTART = re.compile(r"(?P<first>.+?)(?:-r\d+)+")


@dataclass(frozen=True)
class BoundJob:
    """The job that is bound to an attempt.

    Attributes:
        row: in the database.
        kind: of its backend, whatever that is registered as; the backend's name where it is registered no more.
        settings: of its backend; none where it is registered no more.
    """

    row: BoundJobRow
    kind: str
    settings: Mapping[str, Any]

    @property
    def job(self) -> JobHandle:
        """The job."""
        return JobHandle(self.row.backend, self.row.job_id, self.row.identity)


def launch_of(attempt: str) -> str:
    """The first attempt of the launch that an attempt belongs to: ``a1`` of ``a1`` and of ``a1-r2``."""
    restart = _RESTART.fullmatch(attempt)
    return attempt if restart is None else restart["first"]


def bound_job(session: Session, run_id: int, attempt: str) -> BoundJob | None:
    """The job that is bound to an attempt, or to the first attempt of its launch."""
    bound = _bound(session, run_id, attempt)
    if bound is None and (first := launch_of(attempt)) != attempt:
        return _bound(session, run_id, first)
    return bound


def _bound(session: Session, run_id: int, attempt: str) -> BoundJob | None:
    bound = (
        select(BoundJobRow, BackendRow)
        .outerjoin(BackendRow, BackendRow.name == BoundJobRow.backend)
        .where(BoundJobRow.run_id == run_id, BoundJobRow.attempt == attempt)
    )
    row = session.execute(bound).one_or_none()
    if row is None:
        return None
    job, backend = row
    return (
        BoundJob(job, job.backend, {}) if backend is None else BoundJob(job, backend.kind, backend.settings)
    )


def hold(session: Session, project: str, kind: str, job: JobHandle) -> None:
    """Note that a job is a project's. Several attempts of a project may share one, as restarts under a launcher do.

    Raises:
        ConflictError: it is another project's; which, is not told.
    """
    digest = digest_of(kind, job)
    if insert_missing(session, JobOwner, {"job": digest, "project": project}):
        return
    holder = session.execute(select(JobOwner.project).filter_by(job=digest)).scalar_one()
    if holder != project:
        raise ConflictError(
            f"job {job.backend}:{job.id} is bound in another project",
            "bind the job that is this project's own",
        )


def digest_of(kind: str, job: JobHandle) -> str:
    """What a job is, whatever its backend is registered as.

    A process is known without what people call its host; a job of Slurm's without what a requeue changes.
    """
    if kind == local.NAME:
        what: Any = [kind, *(job.identity.get(name) for name in ("boot", "pid", "start_ticks"))]
    elif kind == slurm.NAME:
        what = [kind, job.id, *(job.identity.get(name) for name in ("cluster", "name"))]
    else:
        what = [kind, job.id, dict(job.identity)]
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
