"""Look-ups of the objects that a path names: projects, runs, alerts, and the stores of runs."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep.format.layout import check_name, run_prefix
from watchstep.store.store import Store
from watchstep_services.db.models import AlertInstanceRow, Project, RunRow
from watchstep_services.runs.discovery import corrupt_segments
from watchstep_services.service.context import Service


def find_run(session: Session, project: str, run: str) -> RunRow:
    """Return the row of a run.

    Raises:
        BadNameError: a name is not valid.
        NotFoundError: the run does not exist.
    """
    run_prefix(project, run)
    row = session.execute(select(RunRow).filter_by(project=project, run=run)).scalar_one_or_none()
    if row is None:
        raise unknown_run(project, run)
    return row


def unknown_run(project: str, run: str) -> NotFoundError:
    """Return the error for a run that does not exist, or that the caller may not see."""
    return NotFoundError(f"run {project}/{run}: not found", "register it first, or check the name")


def run_store(service: Service, project: str, run: str) -> Store:
    """Return the store of a run, with paths relative to the run.

    Raises:
        BadNameError, NotFoundError: as `find_run`.
        ConfigError, StoreError: the store cannot be opened.
    """
    with service.database.read() as session:
        row = find_run(session, project, run)
        place = row.place
    return service.stores.of_run(place, run)


def damaged_segments(service: Service, project: str, run: str) -> dict[str, str]:
    """Return the segments of a run that evaluations skipped as corrupt: path to problem.

    Queries skip them too, so that no response contains rows that no rule evaluated.

    Raises:
        BadNameError, NotFoundError: as `find_run`.
    """
    with service.database.read() as session:
        row = find_run(session, project, run)
        return corrupt_segments(session, row.id)


def find_project(session: Session, project: str) -> Project:
    """Return the row of a project.

    Raises:
        BadNameError: the name is not valid.
        NotFoundError: the project does not exist.
    """
    check_name("project", project)
    row = session.get(Project, project)
    if row is None:
        raise NotFoundError(
            f"project {project}: not found", "check the name; registering the first run creates a project"
        )
    return row


def find_alert(session: Session, project: str, run: str, fingerprint: str) -> AlertInstanceRow:
    """Return the row of an alert over all attempts of a run.

    Raises:
        BadNameError: a name is not valid.
        NotFoundError: the run or the alert does not exist.
    """
    run_row = find_run(session, project, run)
    row = session.execute(
        select(AlertInstanceRow).filter_by(run_id=run_row.id, fingerprint=fingerprint)
    ).scalar_one_or_none()
    if row is None:
        raise NotFoundError(
            f"alert {fingerprint!r} of run {project}/{run}: not found",
            "list the alerts of the run to get their fingerprints",
        )
    return row
