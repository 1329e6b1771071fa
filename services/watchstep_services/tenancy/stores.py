"""The stores that admins registered."""

from __future__ import annotations

from hashlib import sha256

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep.format.layout import check_name
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Project, ProjectStore, StoreRow
from watchstep_services.db.upsert import insert_missing
from watchstep_services.tenancy.conflict import ConflictError
from watchstep_services.tenancy.projects import check_apart

OWN = "default"
"""How the service's own store is called, unless the name is taken."""


def find_store(session: Session, name: str) -> StoreRow:
    """A registered store.

    Raises:
        NotFoundError: there is none of this name.
    """
    row = session.execute(select(StoreRow).filter_by(name=name)).scalar_one_or_none()
    if row is None:
        raise NotFoundError(f"store {name!r}: not registered", "see the stores for their names")
    return row


def register_store(session: Session, name: str, registration: StoreRegistration) -> StoreRow:
    """Register a store; its parts were checked by `locations.checked`.

    Raises:
        BadNameError: the name cannot be used.
        ConflictError: the name is taken.
    """
    check_name("store", name)
    if not _insert(session, name, registration):
        raise ConflictError(f"store {name!r}: registered already", "change it, or choose another name")
    return find_store(session, name)


def change_store(session: Session, name: str, registration: StoreRegistration) -> StoreRow:
    """Change how a store is reached, for all processes from now on.

    Raises:
        NotFoundError: there is none of this name.
        ConflictError: projects on it would lie within others.
    """
    row = find_store(session, name)
    if row.registration == registration:
        return row
    row.url, row.role_arn, row.external_id = registration.url, registration.role_arn, registration.external_id
    row.region, row.endpoint = registration.region, registration.endpoint
    row.version += 1
    row.updated_ns = read_clock(session)
    session.flush()
    on_it = select(Project).join(ProjectStore).where(ProjectStore.store_id == row.id)
    for project in session.execute(on_it).unique().scalars():
        check_apart(session, project.place)
    return row


def remove_store(session: Session, name: str) -> None:
    """Forget a store. Nothing on it is touched.

    Raises:
        NotFoundError: there is none of this name.
        ConflictError: projects use it.
    """
    row = find_store(session, name)
    users = session.execute(
        select(func.count()).select_from(ProjectStore).filter_by(store_id=row.id)
    ).scalar_one()
    if users:
        raise ConflictError(f"store {name!r}: {users} projects use it", "give them another store first")
    session.delete(row)


def own_store(session: Session, url: str) -> StoreRow:
    """The service's own store, registered where it is not: its owner names it, no token does."""
    row = _by_url(session, url)
    if row is None:
        insert = StoreRegistration(url)
        if not _insert(session, OWN, insert) and _by_url(session, url) is None:
            _insert(session, f"{OWN}-{sha256(url.encode()).hexdigest()[:8]}", insert)
        row = _by_url(session, url)
        assert row is not None
    return row


def _by_url(session: Session, url: str) -> StoreRow | None:
    named = select(StoreRow).filter_by(url=url, role_arn="", endpoint="", region="").order_by(StoreRow.id)
    return session.execute(named.limit(1)).scalar_one_or_none()


def _insert(session: Session, name: str, registration: StoreRegistration) -> bool:
    now = read_clock(session)
    values = {
        "name": name, "url": registration.url, "role_arn": registration.role_arn, "external_id": registration.external_id,
        "region": registration.region, "endpoint": registration.endpoint, "version": 1, "created_ns": now, "updated_ns": now,
    }  # fmt: skip
    return insert_missing(session, StoreRow, values)
