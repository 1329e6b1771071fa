"""Whether the service would work as it is configured: every connection is tried, and what is wrong is reported with a hint.

What a check found.

Redis: whether it answers, and whether Celery may use it.

The broker's queues: how much waits in each, and whether a worker takes from it.

The database: whether it answers, its schema, what its user may do, and its clock.

Every store: an object is put, listed, read and deleted, under a name that no run and no project can have.

All checks, in the order in which one wants to correct what they find.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from sqlalchemy import select, text
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep.store.store import Store
from watchstep_services.core.settings import NANOSECONDS, Settings, unknown_variables
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.core.telemetry import tracing
from watchstep_services.db.clock import read_clock
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Base, Project
from watchstep_services.db.schema import status
from watchstep_services.scheduler.celery_client import QUEUE, URGENT
from watchstep_services.service.context import owner_receivers, owner_rules
from watchstep_services.stores.opening import Stores

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class CheckFinding:
    """One line of the table.

    Attributes:
        what: what was tried.
        state: ``warning``: it works, and may not be what is meant; ``failed``: it does not work.
        detail: what was found.
        hint: what to do about it.
    """

    what: str
    state: State
    detail: str
    hint: str = ""

    def as_data(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def failed(what: str, error: Exception, hint: str = "") -> CheckFinding:
    """A check that raised."""
    if isinstance(error, WatchstepError):
        return CheckFinding(what, "failed", error.what, error.hint)
    return CheckFinding(what, "failed", f"{type(error).__name__}: {error}".split("\n", 1)[0][:500], hint)


_SECONDS = 5.0


def check_broker(settings: Settings) -> CheckFinding:
    """Push to a list and take from it, as Celery does."""
    url = settings.broker_url.get_secret_value()
    if not url:
        return CheckFinding("broker", "ok", "none: embedded")
    shown = _shown(url)
    try:
        import redis
    except ModuleNotFoundError as error:
        return failed("broker", error, "pip install 'watchstep[production]'")
    key = f"watchstep-probe-{uuid.uuid4().hex}"
    try:
        with redis.Redis.from_url(url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS) as client:
            client.lpush(key, "1")
            client.expire(key, 60)
            taken = client.brpop([key], timeout=int(_SECONDS))
    except (redis.RedisError, ValueError, OSError) as error:
        return failed(f"broker {shown}", error, "check WATCHSTEP_BROKER_URL and that Redis runs")
    if taken is None:
        return CheckFinding(
            f"broker {shown}", "failed", "what was pushed did not come back", "see Redis' memory policy"
        )
    return CheckFinding(f"broker {shown}", "ok", "pushes and takes")


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}{parts.path}"


_ANSWER_SECONDS = 2.0
_IMPATIENT = {"max_retries": 1, "interval_start": 0, "socket_timeout": 5.0, "socket_connect_timeout": 5.0}


def check_queues(settings: Settings) -> Iterator[CheckFinding]:
    """Ask workers which queues they take from, and Redis how much waits. The broker is known to answer.

    Where no worker runs and nothing waits, that is in order: the service is not started. A worker that does not answer within two
    seconds is not seen.
    """
    if not settings.broker_url:
        return
    try:
        takers, waiting = _asked(settings)
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
        yield failed("queues", error, "see that Redis runs, and its log")
        return
    for queue in (QUEUE, URGENT):
        yield _found(queue, takers[queue], waiting[queue], workers=takers.total() > 0)


def _asked(settings: Settings) -> tuple[Counter[str], dict[str, int]]:
    """Of each queue the workers that take from it, and what waits in it."""
    from watchstep_services.scheduler.celery_client import make_celery

    celery = make_celery(settings)
    celery.conf.broker_transport_options = {**celery.conf.broker_transport_options, **_IMPATIENT}
    with celery, celery.connection_for_write() as connection:
        answers = celery.control.inspect(timeout=_ANSWER_SECONDS, connection=connection).active_queues() or {}
        client: Any = connection.default_channel.client
        waiting = {queue: int(client.llen(queue)) for queue in (QUEUE, URGENT)}
    return Counter(queue["name"] for queues in answers.values() for queue in queues), waiting


def _found(queue: str, takers: int, waiting: int, *, workers: bool) -> CheckFinding:
    what = f"queue {queue}"
    if takers:
        return CheckFinding(
            what, "ok", f"{waiting} wait, {takers} {'worker takes' if takers == 1 else 'workers take'}"
        )
    if workers:
        hint = (
            "those that run are of an earlier version, or take from chosen queues: start a `watchstep worker`"
        )
        return CheckFinding(what, "warning", f"{waiting} wait, and no worker takes from it", hint)
    if waiting:
        return CheckFinding(
            what, "warning", f"{waiting} wait, and no worker answers", "start a `watchstep worker`"
        )
    return CheckFinding(what, "ok", "empty; no worker answers")


MOST_SKEW_SECONDS = 5.0
"""Between this process's clock and the database's. Leases follow the database's alone; times in logs do not."""


def check_database(database: Database, settings: Settings) -> Iterator[CheckFinding]:
    """Try the database."""
    try:
        database.check()
    except WatchstepError as error:
        yield failed("database", error)
        return
    yield CheckFinding("database", "ok", database.shown_url)
    yield _schema(database, settings)
    yield _rights(database, settings)
    yield _clock(database)


def _schema(database: Database, settings: Settings) -> CheckFinding:
    found = status(database)
    if found.is_current:
        return CheckFinding("database schema", "ok", str(found))
    if found.is_known and settings.migrate == "at_start":
        return CheckFinding(
            "database schema", "warning", str(found), "the next process that starts brings it up to date"
        )
    hint = "run 'watchstep database upgrade'" if found.is_known else "start the later version of Watchstep"
    return CheckFinding("database schema", "failed", str(found), hint)


def _rights(database: Database, settings: Settings) -> CheckFinding:
    """What the service does with its tables, tried on all of them and rolled back."""
    held = status(database).held
    refused = []
    try:
        with database.engine.connect() as connection:
            for table in Base.metadata.sorted_tables if held else ():
                for verb in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                    if not _may(connection.dialect.name, connection, verb, table.name):
                        refused.append(f"{verb} {table.name}")  # noqa: PERF401 - reads better so
            if settings.migrate == "at_start":
                connection.execute(text(f"CREATE TABLE watchstep_probe_{uuid.uuid4().hex} (id INTEGER)"))
            connection.rollback()
    except SQLAlchemyError as error:
        wanted = "grant CREATE on its schema, or set WATCHSTEP_MIGRATE=never and upgrade as another user"
        return failed("database rights", error, wanted)
    if refused:
        shown = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
        return CheckFinding(
            "database rights", "failed", f"not allowed: {shown}", "grant them to the URL's user"
        )
    return CheckFinding(
        "database rights", "ok", "reads, writes" + (", makes tables" * (settings.migrate == "at_start"))
    )


def _may(dialect: str, connection: object, verb: str, table: str) -> bool:
    if dialect != "postgresql":  # SQLite knows no users; that the file can be written to, the new table tells
        return True
    asked = text("SELECT to_regclass(:name) IS NULL OR has_table_privilege(:name, :verb)")
    return bool(connection.execute(asked, {"name": table, "verb": verb}).scalar_one())  # type: ignore[attr-defined]


def _clock(database: Database) -> CheckFinding:
    before = time.time_ns()
    with database.read() as session:
        theirs = read_clock(session)
    after = time.time_ns()
    # The answer belongs to some moment between; only what lies beyond both is skew.
    skew = max(before - theirs, theirs - after, 0) / NANOSECONDS
    said = f"{skew:.1f} s apart from the database's"
    if skew > MOST_SKEW_SECONDS:
        return CheckFinding(
            "clock", "warning", said, "run NTP on both machines: times in logs will not agree"
        )
    return CheckFinding("clock", "ok", said)


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


def check_configuration(settings: Settings) -> Iterator[CheckFinding]:
    """Try everything that the service needs. No object and no row is left behind."""
    yield from _variables()
    yield from _files(settings)
    try:
        database = open_encrypted_database(settings)
    except WatchstepError as error:
        yield failed("database", error)
        yield from _broker(settings)
        yield from check_stores(settings, None)
        return
    try:
        found = list(check_database(database, settings))
        yield from found
        yield from _broker(settings)
        yield from check_stores(settings, database if found[0].state == "ok" else None)
    finally:
        database.close()


def _broker(settings: Settings) -> Iterator[CheckFinding]:
    found = check_broker(settings)
    yield found
    if found.state == "ok":
        yield from check_queues(settings)


def _variables() -> Iterator[CheckFinding]:
    unknown = list(unknown_variables(os.environ))
    for name, meant in unknown:
        hint = f"did you mean {meant}?" if meant else "remove it; see docs/reference/settings.md"
        yield CheckFinding(f"variable {name}", "failed", "no such setting", hint)
    if not unknown:
        yield CheckFinding("settings", "ok", "every WATCHSTEP_ variable is known")
    asked = any(os.environ.get(name) for name in tracing.ENDPOINTS)
    if asked and not tracing.wanted():
        yield CheckFinding(
            "traces", "warning", "asked for, and not installed", "pip install 'watchstep[telemetry]'"
        )


def _files(settings: Settings) -> Iterator[CheckFinding]:
    try:
        rules = owner_rules(settings)
        yield CheckFinding("rules", "ok", f"{len(rules)}, from {settings.rules_file or 'the defaults'}")
    except WatchstepError as error:
        yield failed("rules", error)
    try:
        receivers = owner_receivers(settings)
        yield CheckFinding(
            "receivers", "ok", f"{len(receivers.names)}, from {settings.receivers_file or 'no file'}"
        )
    except WatchstepError as error:
        yield failed("receivers", error)
