"""Every store: an object is put, listed, read and deleted, under a name that no run and no project can have."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from watchstep.store.store import Store
from watchstep_services.checks.finding import CheckFinding, failed
from watchstep_services.core.settings import Settings
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Project
from watchstep_services.stores.opening import Stores

PROBES = ".watchstep/probe/"
"""Projects and runs begin with a letter or digit, so that this is nobody's."""

_CONTENT = b"watchstep check-config; may be deleted"


def check_stores(settings: Settings, database: Database | None) -> Iterator[CheckFinding]:
    """Try the service's own store, and that of every project by its registered role."""
    stores = Stores()
    own = f"store {settings.store}"
    location = ""
    try:
        opened = Store.open(settings.store)
        location = opened.location
        yield from _probe(own, opened, PROBES)
    except Exception as error:  # noqa: BLE001 - told; the others are tried all the same
        yield failed(own, error, "check WATCHSTEP_STORE and the credentials of this process")
    if database is None:
        return
    try:
        with database.read() as session:
            places = [
                project.place for project in session.execute(select(Project).order_by(Project.name)).scalars()
            ]
    except SQLAlchemyError:
        return  # no tables yet; the check of the database says so
    for place in places:
        registered = place.registration
        if registered == StoreRegistration(registered.url) and registered.url in {settings.store, location}:
            continue  # the service's own, with its own credentials: it has been tried
        what = f"store {place.registration.url} of project {place.project}"
        try:
            # Its role may touch what is the project's, and nothing beside it.
            yield from _probe(what, stores.of(place), f"{place.project}/{PROBES}")
        except Exception as error:  # noqa: BLE001 - as above
            yield failed(what, error, "check the store's registration, its role and its external id")


def _probe(what: str, store: Store, prefix: str) -> Iterator[CheckFinding]:
    key = f"{prefix}{uuid.uuid4().hex}"
    store.put(key, _CONTENT)
    try:
        if store.get(key, limit=1024) != _CONTENT:
            yield CheckFinding(
                what, "failed", f"{key}: reads as something else", "the store is no faithful one"
            )
            return
        if key not in {entry.key for entry in store.entries(prefix)}:
            yield CheckFinding(
                what, "failed", f"{key}: is not listed", "allow s3:ListBucket, or another store's like"
            )
            return
    finally:
        store.delete(key)
    yield CheckFinding(what, "ok", "puts, reads, lists, deletes")
