"""Projects: made by admins, each on its own prefix of a registered store."""

from __future__ import annotations

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep.format.layout import check_name
from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Project, ProjectStore, StoreRow
from watchstep_services.db.upsert import insert_missing
from watchstep_services.tenancy.conflict import ConflictError
from watchstep_services.tenancy.locations import checked_prefix, location_of, overlap


def find_project(session: Session, name: str) -> Project:
    """A project.

    Raises:
        BadNameError: the name cannot be one.
        NotFoundError: there is none of this name.
    """
    row = session.get(Project, check_name("project", name))
    if row is None:
        raise NotFoundError(f"project {name!r}: not known", "an admin makes it first")
    return row


def open_project(session: Session, name: str) -> Project:
    """A project that takes runs.

    Raises:
        BadNameError: the name cannot be one.
        NotFoundError: there is none of this name.
        ConflictError: it is archived.
    """
    row = find_project(session, name)
    if row.archived_ns is not None:
        raise archived(name)
    return row


def archived(name: str) -> ConflictError:
    """What to say of a project that takes nothing more."""
    return ConflictError(f"project {name!r}: archived", "use another project, or have an admin take it back")


def make_project(
    session: Session, name: str, store: StoreRow, prefix: str = "", description: str = ""
) -> bool:
    """Make a project on a store; False where it is there already, as it is.

    Raises:
        BadNameError: the name or the prefix cannot be used.
        ConflictError: its objects would lie within another project's, or the other's within its own.
    """
    check_name("project", name)
    _one_at_a_time(session)
    now = read_clock(session)
    values = {"name": name, "listed_ns": 0, "description": description, "created_ns": now}
    if not insert_missing(session, Project, values):
        return False
    held = {"project": name, "store_id": store.id, "prefix": checked_prefix(prefix)}
    insert_missing(session, ProjectStore, held)
    check_apart(session, find_project(session, name).place)
    return True


def move_project(session: Session, project: Project, store: StoreRow, prefix: str) -> None:
    """Give a project another store or prefix; its objects are not moved.

    Raises:
        BadNameError: the prefix cannot be used.
        ConflictError: as of `make_project`.
    """
    _one_at_a_time(session)
    project.placed.store_id, project.placed.prefix = store.id, checked_prefix(prefix)
    session.flush()
    session.expire(project.placed)
    project.listed_ns = 0
    check_apart(session, project.place)


def check_apart(session: Session, place: StorePlace) -> None:
    """Refuse a place that is within another project's, or has one within itself: runs of one would be runs of the other.

    Raises:
        ConflictError: with the other's name.
    """
    mine = location_of(place)
    others = select(Project).where(Project.name != place.project)
    for other in session.execute(others).unique().scalars():
        if overlap(mine, location_of(other.place)):
            raise ConflictError(
                f"project {place.project!r} at {place.location}/{place.project}: its objects would lie among those of "
                f"project {other.name!r} at {other.place.location}/{other.name}",
                "give it another prefix, or another store",
            )


def _one_at_a_time(session: Session) -> None:
    """Two that are made at once must see each other; on SQLite one transaction writes at a time anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("LOCK TABLE project_stores IN SHARE ROW EXCLUSIVE MODE"))
