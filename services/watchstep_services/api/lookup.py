"""Find the run that a path names."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep.layout import run_prefix
from watchstep_services.database.models import Run


def find_run(session: Session, project: str, run: str) -> Run:
    """The run's row.

    Raises:
        BadNameError: a name that cannot be one.
        NotFoundError: there is no such run.
    """
    run_prefix(project, run)
    row = session.execute(select(Run).filter_by(project=project, run=run)).scalar_one_or_none()
    if row is None:
        raise NotFoundError(f"run {project}/{run}: not known", "register it first, or check the name")
    return row
