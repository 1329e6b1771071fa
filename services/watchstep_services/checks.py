"""Checks of the service's configuration, for ``watchstep check-config``: tries every connection and reports problems with hints.

- Broker: whether Redis responds and allows what Celery does.
- Queues: the number of waiting messages, and the workers that consume them.
- Database: whether it responds, its schema, the rights of its user, and its clock.
- Stores: puts, lists, reads and deletes an object, under a name that no run and no project can have.

The checks run in the order in which to fix their problems.
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
from watchstep_services.db.models import Base, ProjectStore
from watchstep_services.db.schema import status
from watchstep_services.scheduler.celery_client import QUEUE, URGENT
from watchstep_services.service.context import owner_receivers, owner_rules
from watchstep_services.stores.opening import Stores

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class ConfigurationCheck:
    """Result of a check.

    Attributes:
        what: the checked part of the configuration.
        state: ``warning``: works, but may not be intended; ``failed``: does not work.
        detail: details of the result.
        hint: how to solve the problem.
    """

    what: str
    state: State
    detail: str
    hint: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def failed(what: str, error: Exception, hint: str = "") -> ConfigurationCheck:
    """Return the result of a check that raised an error."""
    if isinstance(error, WatchstepError):
        return ConfigurationCheck(what, "failed", error.what, error.hint)
    return ConfigurationCheck(
        what, "failed", f"{type(error).__name__}: {error}".split("\n", 1)[0][:500], hint
    )


_SECONDS = 5.0


def check_broker(settings: Settings) -> ConfigurationCheck:
    """Check Redis: push to a list and pop from it, like Celery."""
    url = settings.broker_url.get_secret_value()
    if not url:
        return ConfigurationCheck("broker", "ok", "none: embedded service")
    location = _location(url)
    try:
        import redis
    except ModuleNotFoundError as error:
        return failed("broker", error, "pip install 'watchstep[production]'")
    key = f"watchstep-probe-{uuid.uuid4().hex}"
    try:
        with redis.Redis.from_url(url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS) as client:
            client.lpush(key, "1")
            client.expire(key, 60)
            popped = client.brpop([key], timeout=int(_SECONDS))
    except (redis.RedisError, ValueError, OSError) as error:
        return failed(f"broker {location}", error, "check WATCHSTEP_BROKER_URL, and that Redis runs")
    if popped is None:
        return ConfigurationCheck(
            f"broker {location}", "failed", "a pushed value was lost", "check the memory policy of Redis"
        )
    return ConfigurationCheck(f"broker {location}", "ok", "push and pop succeeded")


def _location(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}{parts.path}"


_RESPONSE_SECONDS = 2.0
_SHORT_TIMEOUTS = {
    "max_retries": 1,
    "interval_start": 0,
    "socket_timeout": 5.0,
    "socket_connect_timeout": 5.0,
}


def check_queues(settings: Settings) -> Iterator[ConfigurationCheck]:
    """Check the queues: the workers that consume them, and the number of waiting messages. Requires a working broker.

    No workers and empty queues are ok, because the service may not be started. A worker that does not respond within two seconds is
    not counted.
    """
    if not settings.broker_url:
        return
    try:
        consumers, waiting = _queue_state(settings)
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
        yield failed("queues", error, "check that Redis runs, and its log")
        return
    for queue in (QUEUE, URGENT):
        yield _queue_result(queue, consumers[queue], waiting[queue], workers=consumers.total() > 0)


def _queue_state(settings: Settings) -> tuple[Counter[str], dict[str, int]]:
    """Return for each queue the number of workers that consume it, and of waiting messages."""
    from watchstep_services.scheduler.celery_client import make_celery

    celery = make_celery(settings)
    celery.conf.broker_transport_options = {**celery.conf.broker_transport_options, **_SHORT_TIMEOUTS}
    with celery, celery.connection_for_write() as connection:
        responses = (
            celery.control.inspect(timeout=_RESPONSE_SECONDS, connection=connection).active_queues() or {}
        )
        client: Any = connection.default_channel.client
        waiting = {queue: int(client.llen(queue)) for queue in (QUEUE, URGENT)}
    return Counter(queue["name"] for queues in responses.values() for queue in queues), waiting


def _queue_result(queue: str, consumers: int, waiting: int, *, workers: bool) -> ConfigurationCheck:
    what = f"queue {queue}"
    if consumers:
        return ConfigurationCheck(
            what, "ok", f"{waiting} waiting, {consumers} {'worker' if consumers == 1 else 'workers'}"
        )
    if workers:
        hint = "the running workers have an earlier version, or consume selected queues only: start a `watchstep worker`"
        return ConfigurationCheck(
            what, "warning", f"{waiting} waiting, and no worker consumes the queue", hint
        )
    if waiting:
        return ConfigurationCheck(
            what, "warning", f"{waiting} waiting, and no worker responds", "start a `watchstep worker`"
        )
    return ConfigurationCheck(what, "ok", "empty; no worker responds")


MAX_SKEW_SECONDS = 5.0
"""Tolerated difference between the clocks of this process and the database. Leases only use the latter; log times do not."""


def check_database(database: Database, settings: Settings) -> Iterator[ConfigurationCheck]:
    """Check the database."""
    try:
        database.check()
    except WatchstepError as error:
        yield failed("database", error)
        return
    yield ConfigurationCheck("database", "ok", database.shown_url)
    yield _schema(database, settings)
    yield _rights(database, settings)
    yield _clock(database)


def _schema(database: Database, settings: Settings) -> ConfigurationCheck:
    schema = status(database)
    if schema.is_current:
        return ConfigurationCheck("database schema", "ok", str(schema))
    if schema.is_known and settings.migrate == "at_start":
        return ConfigurationCheck(
            "database schema", "warning", str(schema), "the next process that starts upgrades it"
        )
    hint = "run 'watchstep database upgrade'" if schema.is_known else "use the later version of Watchstep"
    return ConfigurationCheck("database schema", "failed", str(schema), hint)


def _rights(database: Database, settings: Settings) -> ConfigurationCheck:
    """Check the rights on all tables, in a transaction that is rolled back."""
    revision = status(database).revision
    refused = []
    try:
        with database.engine.connect() as connection:
            for table in Base.metadata.sorted_tables if revision else ():
                for verb in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                    if not _may(connection.dialect.name, connection, verb, table.name):
                        refused.append(f"{verb} {table.name}")  # noqa: PERF401 - more readable
            if settings.migrate == "at_start":
                connection.execute(text(f"CREATE TABLE watchstep_probe_{uuid.uuid4().hex} (id INTEGER)"))
            connection.rollback()
    except SQLAlchemyError as error:
        hint = "grant CREATE on the schema, or set WATCHSTEP_MIGRATE=never and upgrade as another user"
        return failed("database rights", error, hint)
    if refused:
        listed = ", ".join(refused[:5]) + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")
        return ConfigurationCheck(
            "database rights", "failed", f"not allowed: {listed}", "grant these rights to the user of the URL"
        )
    return ConfigurationCheck(
        "database rights", "ok", "read, write" + (", create tables" * (settings.migrate == "at_start"))
    )


def _may(dialect: str, connection: object, verb: str, table: str) -> bool:
    if dialect != "postgresql":  # SQLite has no users; the new table shows that the file is writable
        return True
    query = text("SELECT to_regclass(:name) IS NULL OR has_table_privilege(:name, :verb)")
    return bool(connection.execute(query, {"name": table, "verb": verb}).scalar_one())  # type: ignore[attr-defined]


def _clock(database: Database) -> ConfigurationCheck:
    before = time.time_ns()
    with database.read() as session:
        database_ns = read_clock(session)
    after = time.time_ns()
    # The database read its clock at some time between the two; only the excess beyond them is skew.
    skew = max(before - database_ns, database_ns - after, 0) / NANOSECONDS
    detail = f"{skew:.1f} s from the clock of the database"
    if skew > MAX_SKEW_SECONDS:
        return ConfigurationCheck(
            "clock", "warning", detail, "run NTP on both machines, because times in logs do not match"
        )
    return ConfigurationCheck("clock", "ok", detail)


PROBES = ".watchstep/probe/"
"""Names of projects and runs start with a letter or digit, so that none can have this prefix."""

_CONTENT = b"watchstep check-config; may be deleted"


def check_stores(settings: Settings, database: Database | None) -> Iterator[ConfigurationCheck]:
    """Check the service's own store, and that of every project with its registered role."""
    stores = Stores()
    own = f"store {settings.store}"
    location = ""
    try:
        opened = Store.open(settings.store)
        location = opened.location
        yield from _probe(own, opened, PROBES)
    except Exception as error:  # noqa: BLE001 - reported; the other stores are still checked
        yield failed(own, error, "check WATCHSTEP_STORE and the credentials of this process")
    if database is None:
        return
    try:
        with database.read() as session:
            rows = select(ProjectStore).order_by(ProjectStore.project, ProjectStore.id)
            places = [row.place for row in session.execute(rows).scalars()]
    except SQLAlchemyError:
        return  # no tables yet, which the check of the database reports
    for place in places:
        registered = place.registration
        if registered == StoreRegistration(registered.url) and registered.url in {settings.store, location}:
            continue  # the service's own store, which is already checked
        what = f"store {place.registration.url} of project {place.project}"
        try:
            # The role may access objects of the project only.
            yield from _probe(what, stores.of(place), f"{place.project}/{PROBES}")
        except Exception as error:  # noqa: BLE001 - as above
            yield failed(what, error, "check the store's registration, its role and its external id")


def _probe(what: str, store: Store, prefix: str) -> Iterator[ConfigurationCheck]:
    key = f"{prefix}{uuid.uuid4().hex}"
    store.put(key, _CONTENT)
    try:
        if store.get(key, limit=1024) != _CONTENT:
            yield ConfigurationCheck(
                what, "failed", f"{key}: has a different content after writing", "use another store"
            )
            return
        if key not in {entry.key for entry in store.entries(prefix)}:
            yield ConfigurationCheck(
                what,
                "failed",
                f"{key}: not listed",
                "allow s3:ListBucket, or the equivalent of another store",
            )
            return
    finally:
        store.delete(key)
    yield ConfigurationCheck(what, "ok", "put, get, list and delete succeeded")


def check_configuration(settings: Settings) -> Iterator[ConfigurationCheck]:
    """Check everything that the service needs, without leaving objects or rows behind."""
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
        results = list(check_database(database, settings))
        yield from results
        yield from _broker(settings)
        yield from check_stores(settings, database if results[0].state == "ok" else None)
    finally:
        database.close()


def _broker(settings: Settings) -> Iterator[ConfigurationCheck]:
    result = check_broker(settings)
    yield result
    if result.state == "ok":
        yield from check_queues(settings)


def _variables() -> Iterator[ConfigurationCheck]:
    unknown = list(unknown_variables(os.environ))
    for name, suggestion in unknown:
        hint = f"did you mean {suggestion}?" if suggestion else "remove it; see docs/reference/settings.md"
        yield ConfigurationCheck(f"variable {name}", "failed", "unknown setting", hint)
    if not unknown:
        yield ConfigurationCheck("settings", "ok", "all WATCHSTEP_ variables are known")
    is_configured = any(os.environ.get(name) for name in tracing.ENDPOINTS)
    if is_configured and not tracing.wanted():
        yield ConfigurationCheck(
            "traces", "warning", "configured, but not installed", "pip install 'watchstep[telemetry]'"
        )


def _files(settings: Settings) -> Iterator[ConfigurationCheck]:
    try:
        rules = owner_rules(settings)
        yield ConfigurationCheck("rules", "ok", f"{len(rules)}, from {settings.rules_file or 'the defaults'}")
    except WatchstepError as error:
        yield failed("rules", error)
    try:
        receivers = owner_receivers(settings)
        yield ConfigurationCheck(
            "receivers", "ok", f"{len(receivers.names)}, from {settings.receivers_file or 'no file'}"
        )
    except WatchstepError as error:
        yield failed("receivers", error)
