"""Find the run that a path names, and its place on the store."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep.layout import check_name, run_prefix
from watchstep.store import Store
from watchstep_services.database.models import Project, Run, Standing
from watchstep_services.service import Service
from watchstep_services.tenancy.projects import archived


def find_run(session: Session, project: str, run: str) -> Run:
    """The run's row.

    Raises:
        BadNameError: a name that cannot be one.
        NotFoundError: there is no such run.
    """
    run_prefix(project, run)
    row = session.execute(select(Run).filter_by(project=project, run=run)).scalar_one_or_none()
    if row is None:
        raise _unknown(project, run)
    return row


def find_open_run(session: Session, project: str, run: str) -> Run:
    """The run's row, of a project that takes what is recorded.

    Raises:
        BadNameError, NotFoundError: as `find_run`.
        ConflictError: the project is archived.
    """
    run_prefix(project, run)
    # One query: every announcement comes by here.
    named = select(Run, Project.archived_ns).join(Project, Project.name == Run.project)
    found = session.execute(named.where(Run.project == project, Run.run == run)).one_or_none()
    if found is None:
        raise _unknown(project, run)
    if found[1] is not None:
        raise archived(project)
    return found[0]


def _unknown(project: str, run: str) -> NotFoundError:
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


def find_standing(session: Session, project: str, run: str, fingerprint: str) -> Standing:
    """An alert of a run, over all its attempts.

    Raises:
        BadNameError: a name that cannot be one.
        NotFoundError: there is no such run, or no such alert of it.
    """
    held = find_run(session, project, run)
    row = session.execute(
        select(Standing).filter_by(run_id=held.id, fingerprint=fingerprint)
    ).scalar_one_or_none()
    if row is None:
        raise NotFoundError(
            f"alert {fingerprint!r} of run {project}/{run}: not known",
            "the list of alerts has the fingerprints",
        )
    return row
