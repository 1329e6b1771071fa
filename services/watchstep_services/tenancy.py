"""Projects, registered stores, and the locations of projects on them.

Registered backends, and the project that owns a job.

A job that one project has bound cannot be bound by another one, which could otherwise have it stopped.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import delete, exists, func, not_, select, text, update
from sqlalchemy.orm import Session

from watchstep.capture.service.location import local_folder
from watchstep.errors import ConfigError, NotFoundError, WatchstepError
from watchstep.format.layout import check_name
from watchstep.store.errors import PROVIDERS
from watchstep.store.store import checked_scheme
from watchstep_launch.backend import IN_SERVICE, OVER, JobHandle, checked_settings, read
from watchstep_launch.backends.local import backend as local
from watchstep_launch.backends.slurm import backend as slurm
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import insert_missing
from watchstep_services.db.models import (
    BackendRow,
    BoundJobRow,
    JobOwner,
    Project,
    ProjectBackend,
    ProjectCapture,
    ProjectStore,
    RunRow,
    StoreRow,
)
from watchstep_services.stores.opening import check_endpoint

Location = tuple[str, str, tuple[str, ...]]
"""Kind of store, bucket, and the parts of the prefix."""


def find_project(session: Session, name: str) -> Project:
    """Find a project.

    Raises:
        BadNameError: the name is not valid.
        NotFoundError: it does not exist.
    """
    row = session.get(Project, check_name("project", name))
    if row is None:
        raise NotFoundError(f"project {name!r}: not found", "an admin creates it first")
    return row


def open_project(session: Session, name: str) -> Project:
    """Find a project that accepts runs.

    Raises:
        BadNameError: the name is not valid.
        NotFoundError: it does not exist.
        ConflictError: it is archived.
    """
    row = find_project(session, name)
    if row.archived_ns is not None:
        raise archived(name)
    return row


def capture_document(session: Session, project: str) -> dict[str, Any] | None:
    """The capture document of a project; None if it has none."""
    row = session.get(ProjectCapture, project)
    return None if row is None else row.document


def archived(name: str) -> ConflictError:
    """The error for a project that accepts no more runs."""
    return ConflictError(f"project {name!r}: archived", "use another project, or have an admin restore it")


def create_project(
    session: Session, name: str, store: StoreRow, prefix: str = "", description: str = ""
) -> bool:
    """Create a project on a store; return False if it exists, which leaves it unchanged.

    Raises:
        BadNameError: the name or the prefix is not valid.
        ConflictError: its location is inside another project's, or the other's inside its own.
    """
    check_name("project", name)
    _one_at_a_time(session)
    now = read_clock(session)
    values = {"name": name, "description": description, "created_ns": now}
    if not insert_missing(session, Project, values):
        return False
    add_place(session, name, store, checked_prefix(prefix)).is_current = True
    session.flush()
    return True


def move_project(
    session: Session, project: Project, store: StoreRow, prefix: str, *, moves_runs: bool = False
) -> None:
    """Change the store or the prefix of a project's new runs. Its objects are not moved.

    Args:
        session: a transaction.
        project: the project.
        store: the store.
        prefix: the prefix below the store.
        moves_runs: earlier runs are read from the new location, too, to which they were copied. Otherwise they are read from the store
            that they were registered with.

    Raises:
        BadNameError: the prefix is not valid.
        ConflictError: as raised by `create_project`.
    """
    make_current(session, project, add_place(session, project.name, store, checked_prefix(prefix)))
    if moves_runs:
        placed = project.placed
        session.execute(update(RunRow).filter_by(project=project.name).values(project_store_id=placed.id))
        session.execute(
            delete(ProjectStore).where(ProjectStore.project == project.name, ProjectStore.id != placed.id)
        )


def make_current(session: Session, project: Project, placed: ProjectStore) -> None:
    """Put new runs of a project on one of its stores."""
    if project.placed is not placed:
        project.placed.is_current = False
        session.flush()
        placed.is_current = True
    placed.listed_ns = 0
    session.flush()
    session.expire(project, ["placed"])


def add_place(session: Session, project: str, store: StoreRow, prefix: str = "") -> ProjectStore:
    """Add a location to those of a project. If it has it already, it is accessed as the store is registered.

    Raises:
        ConflictError: it is inside another project's location, or the other's inside it.
    """
    _one_at_a_time(session)
    place = StorePlace(store.id, store.version, store.registration, prefix, project)
    for placed in places_of(session, project):
        is_same = placed.place.registration.endpoint == store.endpoint
        if is_same and location_of(placed.place) == location_of(place):
            placed.store_id, placed.prefix = store.id, prefix
            session.flush()
            session.expire(placed, ["store"])
            return placed
    check_apart(session, place)
    placed = ProjectStore(project=project, store_id=store.id, prefix=prefix, is_current=False)
    session.add(placed)
    session.flush()
    return placed


def places_of(session: Session, project: str) -> Sequence[ProjectStore]:
    """The locations of a project, that of new runs first."""
    rows = select(ProjectStore).filter_by(project=project)
    return session.execute(rows.order_by(ProjectStore.is_current.desc(), ProjectStore.id)).scalars().all()


@dataclass(frozen=True)
class NamedStore:
    """The store that a recorder names, looked up outside of transactions, because the path may be one of a disk that does not answer.

    Attributes:
        url: its URL as the recorder names it.
        written: location of the project's objects on it by the URL alone.
        location: the same with symbolic links followed.
    """

    url: str
    written: Location
    location: Location

    @classmethod
    def of(cls, url: str, project: str) -> NamedStore | None:
        """Look up a store; None for an empty URL.

        Raises:
            ConfigError: the URL is invalid.
        """
        below = (project,)
        return cls(url, _location(url, below, follow=False), _location(url, below)) if url else None


def place_for(
    session: Session, project: Project, store: NamedStore | None, own: Sequence[StoreRow]
) -> ProjectStore | None:
    """Find the location of a run of a project by the store that its recorder writes to.

    Args:
        session: a transaction.
        project: the project.
        store: the store that the recorder names; None for the store of new runs.
        own: the service's own stores, one of which is added to a project whose new runs are on another of them.

    Returns:
        The location; None if no store is named, or a folder that is none of the project's: each machine may have another path for it.

    Raises:
        StoreNotAllowedError: it is a bucket that is not registered for the project.
        ConflictError: as raised by `add_place`.
    """
    if store is None:
        return None
    places = places_of(session, project.name)
    candidates = own if project.placed.store.is_own else ()
    # The URL as it is written first: nothing is looked up on a disk for it.
    for locate, named in ((_written, store.written), (_remembered, store.location)):
        for placed in places:
            if locate(placed.place.registration.url, _below(placed.place)) == named:
                return placed
        for row in candidates:
            if locate(row.url, (project.name,)) == named:
                return add_place(session, project.name, row)
    if store.location[0] == "file":
        return None
    raise StoreNotAllowedError(
        f"store {store.url[:200]!r}: not registered for project {project.name!r}",
        f"an admin registers it; or use one of: {', '.join(placed.place.location for placed in places)}",
    )


def check_apart(session: Session, place: StorePlace) -> None:
    """Refuse a location that overlaps another project's, because runs of one would be runs of the other.

    Raises:
        ConflictError: it overlaps; the message names the other project.
    """
    mine = location_of(place)
    others = select(ProjectStore).where(ProjectStore.project != place.project)
    for row in session.execute(others).scalars():
        other = row.place
        if overlap(mine, location_of(other)):
            raise ConflictError(
                f"project {place.project!r} at {place.location}/{place.project}: its location overlaps that of "
                f"project {other.project!r} at {other.location}/{other.project}",
                "give it another prefix, or another store",
            )


def _one_at_a_time(session: Session) -> None:
    """Serialize creations, so that concurrent ones see each other; SQLite does so anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text("LOCK TABLE project_stores IN SHARE ROW EXCLUSIVE MODE"))


OWN = "default"
"""Name of the service's own store, unless it is taken."""


def find_store(session: Session, name: str) -> StoreRow:
    """Find a registered store.

    Raises:
        NotFoundError: it does not exist.
    """
    row = session.execute(select(StoreRow).filter_by(name=name)).scalar_one_or_none()
    if row is None:
        raise NotFoundError(f"store {name!r}: not registered", "list the stores to see their names")
    return row


def register_store(session: Session, name: str, registration: StoreRegistration) -> StoreRow:
    """Register a store that was checked by `checked`.

    Raises:
        BadNameError: the name is not valid.
        ConflictError: the name is taken.
    """
    check_name("store", name)
    if not _insert(session, name, registration):
        raise ConflictError(f"store {name!r}: already registered", "change it, or choose another name")
    return find_store(session, name)


def change_store(session: Session, name: str, registration: StoreRegistration) -> StoreRow:
    """Change the registration of a store, for all processes from now on.

    Raises:
        NotFoundError: it does not exist.
        ConflictError: locations of projects on it would overlap others.
    """
    row = find_store(session, name)
    if row.registration == registration:
        return row
    row.url, row.role_arn, row.external_id = registration.url, registration.role_arn, registration.external_id
    row.region, row.endpoint = registration.region, registration.endpoint
    row.version += 1
    row.updated_ns = read_clock(session)
    session.flush()
    for placed in session.execute(select(ProjectStore).filter_by(store_id=row.id)).scalars():
        check_apart(session, placed.place)
    return row


def remove_store(session: Session, name: str) -> None:
    """Delete the registration of a store. Its objects are not changed.

    Raises:
        NotFoundError: it does not exist.
        ConflictError: projects use it.
    """
    row = find_store(session, name)
    session.execute(
        delete(ProjectStore).where(
            ProjectStore.store_id == row.id,
            not_(ProjectStore.is_current),
            not_(exists().where(RunRow.project_store_id == ProjectStore.id)),
        )
    )
    users = session.execute(
        select(func.count()).select_from(ProjectStore).filter_by(store_id=row.id)
    ).scalar_one()
    if users:
        raise ConflictError(
            f"store {name!r}: in use by {users} projects", "move them and their runs to another store first"
        )
    session.delete(row)


def own_store(session: Session, url: str) -> StoreRow:
    """The service's own store, registered if absent. Its owner names it, and no token can."""
    row = _by_url(session, url)
    if row is None:
        insert = StoreRegistration(url)
        if not _insert(session, OWN, insert) and _by_url(session, url) is None:
            _insert(session, f"{OWN}-{sha256(url.encode()).hexdigest()[:8]}", insert)
        row = _by_url(session, url)
        assert row is not None
    row.is_own = True
    return row


def own_stores(session: Session) -> Sequence[StoreRow]:
    """The stores that the service's owner has started it on."""
    return session.execute(select(StoreRow).filter_by(is_own=True).order_by(StoreRow.id)).scalars().all()


def serve_store(session: Session, url: str) -> None:
    """Make a store the service's own. New runs of the projects on its other own stores are on it from now on.

    Their earlier runs are read from the store that they were registered with, and new ones are found there, too.
    """
    store = own_store(session, url)
    for project in session.execute(select(Project)).unique().scalars().all():
        if project.placed.store.is_own and project.placed.store_id != store.id:
            make_current(session, project, add_place(session, project.name, store))


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


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{1,254}@[A-Za-z0-9][A-Za-z0-9.-]{1,254}")
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=@+,-]{1,255}")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,512}")
_EXTERNAL_ID = re.compile(r"[A-Za-z0-9+=,.@:/_-]{2,1224}")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_ENDPOINT = re.compile(
    r"https?://[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[0-9]{1,5})?/?|https?://\[[0-9a-fA-F:]{2,45}\](:[0-9]{1,5})?/?"
)
_MOST_URL = 1024
_HINT = "use s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, of letters, digits and . _ = @ + , -"


def checked(registration: StoreRegistration, local_stores: Path | None) -> StoreRegistration:
    """Check a registration; return it with a normalized URL.

    Args:
        registration: the registration.
        local_stores: the folder below which folders may be registered; None for no folders.

    Raises:
        ConfigError: a part of it is not valid.
    """
    scheme = checked_scheme(registration.url)
    if scheme in {"", "file"}:
        url = _checked_folder(registration.url, local_stores)
    else:
        url = _checked_bucket(registration.url, scheme)
    _check_access(registration)
    check_endpoint(registration.endpoint)
    return replace(registration, url=url)


def checked_prefix(prefix: str) -> str:
    """Check a project's prefix below its store; return it without slashes at its ends, empty for none.

    Raises:
        BadNameError: a part of it is not valid in a key.
        ConfigError: it is too long.
    """
    parts = prefix.strip("/").split("/") if prefix.strip("/") else []
    if len(prefix) > _MOST_URL // 2:
        raise ConfigError(f"prefix of {len(prefix)} characters: too long", f"use at most {_MOST_URL // 2}")
    return "/".join(check_name("prefix", part) for part in parts)


def location_of(place: StorePlace) -> Location:
    """The location of a project's objects, in a form that can be compared."""
    return _location(place.registration.url, _below(place))


def _below(place: StorePlace) -> tuple[str, ...]:
    return (*place.prefix.split("/"), place.project) if place.prefix else (place.project,)


def _location(url: str, below: tuple[str, ...], *, follow: bool = True) -> Location:
    if (folder := local_folder(url)) is not None:
        path = os.path.realpath(folder) if follow else os.path.normpath(folder)
        return "file", "", (*PurePosixPath(path).parts, *below)
    parts = urlsplit(url)
    inner = tuple(part for part in parts.path.split("/") if part)
    return PROVIDERS[parts.scheme], parts.netloc, (*inner, *below)


_Locate = Callable[[str, tuple[str, ...]], Location]
_written: _Locate = functools.partial(_location, follow=False)
_remembered: _Locate = functools.lru_cache(maxsize=4096)(_location)
"""For registered stores; transactions do not look them up each time."""


def overlap(first: Location, second: Location) -> bool:
    """Whether one location contains the other.

    Buckets of the same name at two services that speak S3 count as the same, to be safe.
    """
    shared = min(len(first[2]), len(second[2]))
    return first[:2] == second[:2] and first[2][:shared] == second[2][:shared]


def _checked_bucket(url: str, scheme: str) -> str:
    parts = urlsplit(url)
    if len(url) > _MOST_URL or parts.query or parts.fragment or any(mark in url for mark in "?#%\\"):
        raise ConfigError(f"store {url[:200]!r}: not a plain URL", _HINT)
    named = _ACCOUNT if "@" in parts.netloc and scheme.startswith("abfs") else _BUCKET
    if not named.fullmatch(parts.netloc) or ".." in parts.netloc:
        raise ConfigError(f"store {url!r}: {parts.netloc!r} is not a valid bucket name", _HINT)
    inner = parts.path.strip("/")
    for part in inner.split("/") if inner else ():
        if not _PART.fullmatch(part):
            raise ConfigError(f"store {url!r}: {part!r} is not valid in a prefix", _HINT)
    return f"{scheme}://{parts.netloc}/{inner}".rstrip("/")


def _checked_folder(url: str, local_stores: Path | None) -> str:
    if local_stores is None:
        raise ConfigError(
            f"store {url!r}: folders of the service's machine are not allowed",
            "use a bucket; or name a folder below which stores may be registered, in WATCHSTEP_LOCAL_STORES",
        )
    parts = urlsplit(url)
    if parts.netloc or "%" in url or "\0" in url:
        raise ConfigError(f"store {url!r}: not a plain path", "give an absolute path")
    path = Path(parts.path if parts.scheme else url)
    if not path.is_absolute():
        raise ConfigError(f"store {url!r}: not an absolute path", "give an absolute path")
    allowed, whole = local_stores.expanduser().resolve(), path.resolve()
    if not whole.is_relative_to(allowed):
        raise ConfigError(f"store {url!r}: not below {allowed}", "use a folder below it")
    return str(whole)


def _check_access(registration: StoreRegistration) -> None:
    """Check role, external id, region and endpoint, which are for S3, and against injection into other fields."""
    fields = {
        "role": (registration.role_arn, _ROLE, "an ARN such as arn:aws:iam::123456789012:role/watchstep"),
        "external id": (registration.external_id, _EXTERNAL_ID, "2 to 1224 letters, digits and + = , . @ : / _ -"),
        "region": (registration.region, _REGION, "a region such as eu-central-1"),
        "endpoint": (registration.endpoint, _ENDPOINT, "a URL such as https://minio.example.com:9000"),
    }  # fmt: skip
    for name, (value, pattern, example) in fields.items():
        if value and not registration.is_s3:
            raise ConfigError(f"store {registration.url!r}: has no {name}", f"omit the {name}: it is for S3")
        if value and not pattern.fullmatch(value):
            raise ConfigError(f"{name} {value[:200]!r}: not valid", f"give {example}")
    if registration.external_id and not registration.role_arn:
        raise ConfigError("external id: given without a role", "give the role's ARN, or omit the external id")


class StoreNotAllowedError(WatchstepError):
    """A token names a store that is not registered for its project, or not that of the run."""


class ConflictError(ConfigError):
    """Another object prevents the change: a name is taken, an object is in use, or a project is archived."""


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
    if (checked := read(file).get(name)) is None:
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
