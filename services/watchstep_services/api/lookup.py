"""Find the run that a path names, and its place on the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep.format.layout import SegmentKey, WriterId, check_name, run_prefix
from watchstep.store.store import Store
from watchstep_services.db.clock import now_ns
from watchstep_services.db.models import AlertInstanceRow, Project, RunRow, Segment
from watchstep_services.service.context import Service
from watchstep_services.tenancy.projects import archived


def find_run(session: Session, project: str, run: str) -> RunRow:
    """The run's row.

    Raises:
        BadNameError: a name that cannot be one.
        NotFoundError: there is no such run.
    """
    run_prefix(project, run)
    row = session.execute(select(RunRow).filter_by(project=project, run=run)).scalar_one_or_none()
    if row is None:
        raise unknown_run(project, run)
    return row


@dataclass(frozen=True)
class HeldRun:
    """What an announcement needs of a run; nobody else writes it until the transaction ends.

    Attributes:
        now_ns: by the database's clock.
    """

    id: int
    due_ns: int | None
    poll_interval_ns: int
    urgent_ns: int
    health: dict[str, Any]
    control: dict[str, Any]
    cached_by: str
    now_ns: int


# One query, made once: every announcement comes by here. What refers to the run need not wait for it.
_HELD = (
    select(
        RunRow.id,
        RunRow.due_ns,
        RunRow.poll_interval_ns,
        RunRow.urgent_ns,
        RunRow.health,
        RunRow.control,
        RunRow.cached_by,
        now_ns().label("now_ns"),
        Project.archived_ns,
    )
    .join(Project, Project.name == RunRow.project)
    .where(RunRow.project == bindparam("project"), RunRow.run == bindparam("run"))
    .with_for_update(of=RunRow, key_share=True)
)


def hold_open_run(session: Session, project: str, run: str) -> HeldRun:
    """A run of a project that takes what is recorded, locked.

    Raises:
        BadNameError, NotFoundError: as `find_run`.
        ConflictError: the project is archived.
    """
    run_prefix(project, run)
    found = session.execute(_HELD, {"project": project, "run": run}).one_or_none()
    if found is None:
        raise unknown_run(project, run)
    *held, archived_ns = found
    if archived_ns is not None:
        raise archived(project)
    return HeldRun(*held)


def unknown_run(project: str, run: str) -> NotFoundError:
    """What to say of a run that is not there for who asks."""
    return NotFoundError(f"run {project}/{run}: not known", "register it first, or check the name")


def run_store(service: Service, project: str, run: str) -> Store:
    """The store of a run's project, seen from the run.

    Raises:
        BadNameError, NotFoundError: as `find_run`.
        ConfigError, StoreError: the store cannot be opened.
    """
    with service.database.read() as session:
        row = find_run(session, project, run)
        place = session.get_one(Project, row.project).place
    return service.stores.of_run(place, run)


def damaged_segments(service: Service, project: str, run: str) -> dict[str, str]:
    """Segments of a run that evaluations left out, by path, and why: no answer shows what no rule was shown.

    Raises:
        BadNameError, NotFoundError: as `find_run`.
    """
    with service.database.read() as session:
        row = find_run(session, project, run)
        found = session.execute(select(Segment).filter_by(run_id=row.id, state="corrupt")).scalars()
        return {
            SegmentKey(
                WriterId(entry.attempt, entry.node, entry.writer), entry.seq, entry.first, entry.last
            ).path: entry.problem
            for entry in found
        }


def find_project(session: Session, project: str) -> Project:
    """The project's row.

    Raises:
        BadNameError: a name that cannot be one.
        NotFoundError: there is no such project.
    """
    check_name("project", project)
    row = session.get(Project, project)
    if row is None:
        raise NotFoundError(
            f"project {project}: not known", "check the name; a project begins with its first run"
        )
    return row


def find_standing(session: Session, project: str, run: str, fingerprint: str) -> AlertInstanceRow:
    """An alert of a run, over all its attempts.

    Raises:
        BadNameError: a name that cannot be one.
        NotFoundError: there is no such run, or no such alert of it.
    """
    held = find_run(session, project, run)
    row = session.execute(
        select(AlertInstanceRow).filter_by(run_id=held.id, fingerprint=fingerprint)
    ).scalar_one_or_none()
    if row is None:
        raise NotFoundError(
            f"alert {fingerprint!r} of run {project}/{run}: not known",
            "the list of alerts has the fingerprints",
        )
    return row
