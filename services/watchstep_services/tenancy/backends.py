"""Registered backends, and the project that owns a job.

A job that one project has bound cannot be bound by another one, which could otherwise have it stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep_launch import backend_registry
from watchstep_launch.backend import OVER, JobHandle
from watchstep_launch.backend_registry import IN_SERVICE, checked_settings
from watchstep_launch.backends.local import backend as local
from watchstep_launch.backends.slurm import backend as slurm
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import insert_missing
from watchstep_services.db.models import BackendRow, BoundJobRow, JobOwner, ProjectBackend
from watchstep_services.stores.opening import check_endpoint
from watchstep_services.tenancy.projects import ConflictError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


def find_backend(session: Session, name: str) -> BackendRow:
    """Find a registered backend.

    Raises:
        NotFoundError: it does not exist.
    """
    row = session.execute(select(BackendRow).filter_by(name=name)).scalar_one_or_none()
    if row is None:
        raise NotFoundError(f"backend {name!r}: not registered", "list the backends to see their names")
    return row


def register_backend(session: Session, name: str, kind: str, settings: dict[str, Any]) -> BackendRow:
    """Register a backend, which no project may use yet.

    Raises:
        ConfigError: name, kind or settings are not valid.
        ConflictError: the name is taken.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"backend name {name!r}: not valid", "use 1 to 32 of a-z, 0-9, '_' and '-'")
    checked = _checked_settings(kind, settings)
    now = read_clock(session)
    values = {
        "name": name, "kind": kind, "settings": checked, "version": 1, "created_ns": now, "updated_ns": now,
    }  # fmt: skip
    if not insert_missing(session, BackendRow, values):
        raise ConflictError(f"backend {name!r}: already registered", "change it, or choose another name")
    return find_backend(session, name)


def change_backend(session: Session, name: str, settings: dict[str, Any]) -> BackendRow:
    """Change the settings of a backend, but not its kind.

    Raises:
        NotFoundError: it does not exist.
        ConfigError: the settings are not valid.
    """
    row = find_backend(session, name)
    checked = _checked_settings(row.kind, settings)
    if checked != row.settings:
        row.settings, row.version, row.updated_ns = checked, row.version + 1, read_clock(session)
    return row


def remove_backend(session: Session, name: str) -> None:
    """Delete the registration of a backend, and the projects' permissions to use it.

    Raises:
        NotFoundError: it does not exist.
        ConflictError: bound jobs on it may still run.
    """
    row = find_backend(session, name)
    running = session.execute(
        select(BoundJobRow.id).where(BoundJobRow.backend == name, BoundJobRow.state.not_in(OVER)).limit(1)
    ).first()
    if running is not None:
        raise ConflictError(
            f"backend {name!r}: jobs on it may still run", "wait for them, or remove it from its projects"
        )
    session.execute(delete(ProjectBackend).filter_by(backend_id=row.id))
    session.delete(row)


def backends_of(session: Session, project: str) -> list[BackendRow]:
    """Backends that a project may use, by name."""
    allowed = (
        select(BackendRow).join(ProjectBackend).where(ProjectBackend.project == project).order_by(BackendRow.name)
    )  # fmt: skip
    return list(session.execute(allowed).scalars())


def allow_backends(session: Session, project: str, names: list[str]) -> None:
    """Set the backends that a project may use. Bound jobs on other backends can still be stopped.

    Raises:
        NotFoundError: one is not registered.
    """
    rows = [find_backend(session, name) for name in names]
    session.execute(delete(ProjectBackend).filter_by(project=project))
    for row in rows:
        insert_missing(session, ProjectBackend, {"project": project, "backend_id": row.id})


def allowed_backend(session: Session, project: str, name: str) -> BackendRow:
    """Find a backend that a project may use.

    Raises:
        ConfigError: the project may not use it, or it does not exist; the message does not distinguish these.
    """
    allowed = {row.name: row for row in backends_of(session, project)}
    if name not in allowed:
        hint = f"use one of: {', '.join(allowed)}" if allowed else "none is registered for it"
        raise ConfigError(
            f"backend {name!r}: not registered for project {project!r}", f"{hint}; an admin registers others"
        )
    return allowed[name]


def allow_local(session: Session, project: str) -> None:
    """Allow processes of this machine as jobs of a project."""
    now = read_clock(session)
    values = {
        "name": local.NAME, "kind": local.NAME, "settings": {}, "version": 1, "created_ns": now, "updated_ns": now,
    }  # fmt: skip
    insert_missing(session, BackendRow, values)
    row = find_backend(session, local.NAME)
    if row.kind == local.NAME:
        insert_missing(session, ProjectBackend, {"project": project, "backend_id": row.id})


def allow_owned(session: Session, project: str, file: Path, name: str) -> None:
    """Allow a project to use a backend of the owner's file; does nothing if the file has none of this name.

    Raises:
        ConfigError: the file, or its entry for the backend, is not valid.
    """
    if (checked := backend_registry.read(file).get(name)) is None:
        return
    now = read_clock(session)
    settings = checked_settings(checked.kind, checked.settings)
    values = {
        "name": name, "kind": checked.kind, "settings": settings, "version": 1, "created_ns": now, "updated_ns": now,
    }  # fmt: skip
    insert_missing(session, BackendRow, values)
    insert_missing(
        session, ProjectBackend, {"project": project, "backend_id": find_backend(session, name).id}
    )


def _checked_settings(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    if kind not in IN_SERVICE:
        raise ConfigError(
            f"backend kind {kind!r}: not supported by a service",
            f"use one of: {', '.join(sorted(IN_SERVICE))}",
        )
    checked = checked_settings(kind, settings)
    check_endpoint(str(checked.get("address", "")))  # of a Ray cluster
    return checked


_RESTART = re.compile(r"(?P<first>.+?)(?:-r\d+)+")


@dataclass(frozen=True)
class BoundJob:
    """The job that is bound to an attempt.

    Attributes:
        row: its row in the database.
        kind: kind of its backend; the backend's name if it is no longer registered.
        settings: settings of its backend; empty if it is no longer registered.
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


def claim_job(session: Session, project: str, kind: str, job: JobHandle) -> None:
    """Record a project as the owner of a job. Several attempts of a project may share one, as restarts under a launcher do.

    Raises:
        ConflictError: another project owns it; the message does not name it.
    """
    digest = digest_of(kind, job)
    if insert_missing(session, JobOwner, {"job": digest, "project": project}):
        return
    owner = session.execute(select(JobOwner.project).filter_by(job=digest)).scalar_one()
    if owner != project:
        raise ConflictError(
            f"job {job.backend}:{job.id} is bound in another project",
            "bind a job of this project",
        )


def digest_of(kind: str, job: JobHandle) -> str:
    """A hash of a job's identity, independent of its backend's name.

    A process is identified without its host's name, a Slurm job without what a requeue changes.
    """
    if kind == local.NAME:
        identity: Any = [kind, *(job.identity.get(name) for name in ("boot", "pid", "start_ticks"))]
    elif kind == slurm.NAME:
        identity = [kind, job.id, *(job.identity.get(name) for name in ("cluster", "name"))]
    else:
        identity = [kind, job.id, dict(job.identity)]
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
