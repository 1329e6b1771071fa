"""The whole service in one process, with SQLite, threads and a local folder, for one machine.

The leases of a killed embedded service expire as soon as the next one starts in the same home.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

import uvicorn
from sqlalchemy import select, true

from watchstep.capture.service.location import SERVICE_NOTE, listed, local_folder, make_home
from watchstep.errors import ConfigError, MissingStoreError, ServiceError
from watchstep.platform.process import ProcessIdentity
from watchstep.store.known_stores import HOME_NOTE, note_in_home, noted_id
from watchstep.store.local import StoreIdentity, refuse_replacement
from watchstep.store.store import Store, checked_scheme
from watchstep_launch.backend import BACKENDS_FILE
from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.connections import server_options
from watchstep_services.auth import create_token, forget_named
from watchstep_services.core.settings import NANOSECONDS, Settings
from watchstep_services.db.clock import now_ns
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.engine import Database
from watchstep_services.db.lease import ACTION_LEASE, RUN_LEASE
from watchstep_services.db.models import ActionRow, StoreRow
from watchstep_services.db.schema import upgrade
from watchstep_services.dispatch.dispatch import next_due_ns
from watchstep_services.retention import UpkeepThreads
from watchstep_services.runs.rule_configs import apply_owner_rules
from watchstep_services.scheduler.queue import WorkQueue
from watchstep_services.scheduler.sweep import Work, find_due, sweep
from watchstep_services.service.context import Service, owner_receivers, owner_rules
from watchstep_services.service.rule_time import EvaluationThreads
from watchstep_services.stores.opening import Stores
from watchstep_services.tenancy import serve_store

if TYPE_CHECKING:
    from typing_extensions import Self


def expire_leases(database: Database) -> None:
    """Expire all leases on runs, and retry all pending stops at once.

    Call it only for a database that no other process uses. Claims of a process that died are fenced, because each claim gets a new
    number.
    """
    with database.write() as session:
        RUN_LEASE.expire_all(session, true())
        ACTION_LEASE.expire_all(session, ActionRow.kind == "stop", now_ns())


PAGE_SECONDS = 12 * 3600.0
"""Lifetime of the token in `EmbeddedService.page_link`: a working day, also if the service restarts meanwhile."""

_UPKEEP_AT_ONCE = 100
_START_SECONDS = 30.0
_OVERDUE_SECONDS = 0.25
_MIN_SECONDS = 0.01
_CREATOR = "watchstep serve"

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn in a thread, with an event that is set when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class EmbeddedService:
    """A running service. Use it as a context manager.

    Attributes:
        url: URL of the API.
        operator_token: operator token, which is valid while the service runs.
        recorder_token: recorder token for the watched programs, which is valid while the service runs.
        page_link: address of the web page with an admin token, which is valid for `PAGE_SECONDS`.
        service: the service object, for code in the same process.
    """

    url: str
    operator_token: str
    recorder_token: str
    page_link: str
    service: Service

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stopping = threading.Event()
        self._undo: list[Callable[[], None]] = []

    @property
    def database(self) -> Database:
        """The service's database."""
        return self.service.database

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop, in the reverse order of the start."""
        while self._undo:
            self._undo.pop()()

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait until a condition is true, checking it after every task; False on a timeout."""
        return self._queue.wait_until(done, timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `stop_waiting` is called, for example by a signal handler; False on a timeout, in seconds."""
        return self._stopping.wait(timeout)

    def stop_waiting(self) -> None:
        """Make `wait` return."""
        self._stopping.set()

    def _start(self) -> None:
        home = self.settings.home_folder
        folder = local_folder(self.settings.store)
        if folder is not None and folder in home.parents:
            refuse_replacement(folder)  # before the home in it is created
        make_home(home)  # contains token hashes and webhook addresses
        self._lock(home)
        rules, receivers = owner_rules(self.settings), owner_receivers(self.settings)
        store, identity = _own_store(self.settings.store, home)
        listener = self._listen()
        database = open_encrypted_database(self.settings)
        self._undo.append(database.close)
        upgrade(database)
        if not self.settings.database_url.get_secret_value():
            # The database is in the home, which is locked, so that all owners of leases have ended.
            expire_leases(database)
        # One thread more than runs of one project may occupy.
        self._queue = WorkQueue(self.settings.workers + 1)
        settings = self.settings.model_copy(update={"store": store.location})
        with database.write() as session:
            serve_store(session, store.location)
            registered = session.execute(select(StoreRow.url).order_by(StoreRow.id)).scalars()
            stores = list(dict.fromkeys((store.location, *registered)))
        self.service = Service(
            settings,
            database,
            self.url,
            rules,
            self._queue,
            receiver_file=receivers,
            owner_backends=home / BACKENDS_FILE,
            evaluation_threads=EvaluationThreads(settings.workers),
            stores=Stores(
                {url: StoreIdentity(noted_id(home, url)) for url in stores} | {store.location: identity}
            ),
        )
        apply_owner_rules(database, rules)
        self.operator_token, self.recorder_token, page_token = self._own_tokens(database, home)
        self.page_link = f"{self.url}/#token={page_token}"
        self._undo.append(self.service.stores.close)
        self._undo.append(self.service.bulkhead.close)
        self._undo.append(self.service.hanging_stores.close)
        self._undo.append(self.service.intake.shutdown)
        self._undo.append(self.service.status_threads.shutdown)
        self._undo.append(self.service.look_threads.shutdown)
        self._queue.start(self.service)
        self._undo.append(self._queue.close)
        self._serve(listener)
        sweeper = threading.Thread(target=self._sweep_loop, name="watchstep-sweep", daemon=True)
        sweeper.start()
        self._undo.append(sweeper.join)
        upkeep = threading.Thread(target=self._upkeep_loop, name="watchstep-upkeep", daemon=True)
        upkeep.start()
        self._undo.append(upkeep.join)
        self._undo.append(self._queue.wake.set)
        self._undo.append(self._stopping.set)
        self._publish(home, stores)

    def _own_tokens(self, database: Database, home: Path) -> tuple[str, str, str]:
        """Create an operator token, a recorder token and one for the page, after removing those of an earlier process that was killed."""
        name = f"serve in {''.join(character if character.isprintable() else '?' for character in str(home)[-100:])}"
        forget_named(database, name, _CREATOR)
        self._undo.append(lambda: forget_named(database, name, _CREATOR))
        operator = create_token(database, "operator", name=name, created_by=_CREATOR)
        recorder = create_token(database, "recorder", name=name, created_by=_CREATOR)
        # Whoever runs the service owns its database: the link may do everything.
        # The link is valid for its time, also after a restart, so its token is deleted only once it has expired.
        of_page = f"page of {name}"
        forget_named(database, of_page, _CREATOR, only_expired=True)
        page = create_token(
            database, "admin", name=of_page, created_by=_CREATOR, lifetime_seconds=PAGE_SECONDS
        )
        return operator, recorder, page

    def _lock(self, home: Path) -> None:
        # Owner-only, because any user who can open the file could lock it and prevent the service from starting.
        descriptor = os.open(home / "service.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)
        lock_file: IO[str] = os.fdopen(descriptor, "w", encoding="ascii")
        self._undo.append(lock_file.close)
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                # `watchstep_launch.service_location` recognizes this text in the log of a sidecar.
                f"home {home}: another watchstep service runs there",
                "use that service, or set another WATCHSTEP_HOME",
            ) from error

    def _listen(self) -> socket.socket:
        address = (self.settings.host, self.settings.port)
        family = socket.AF_INET6 if ":" in self.settings.host else socket.AF_INET
        try:
            listener = socket.create_server(address, family=family)
        except OSError as error:
            raise ConfigError(
                f"address {address[0]}:{address[1]}: cannot listen ({error.strerror or error})",
                "set another WATCHSTEP_PORT (0 selects a free port) or WATCHSTEP_HOST",
            ) from error
        self._undo.append(listener.close)
        host = f"[{self.settings.host}]" if family == socket.AF_INET6 else self.settings.host
        self.url = self.settings.public_url.rstrip("/") or f"http://{host}:{listener.getsockname()[1]}"
        return listener

    def _serve(self, listener: socket.socket) -> None:
        app = create_app(self.service)
        config = uvicorn.Config(app, access_log=False, lifespan="off", **server_options())
        server = _Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="watchstep-api", daemon=True
        )
        thread.start()
        self._undo.append(thread.join)
        self._undo.append(lambda: setattr(server, "should_exit", True))
        self._undo.append(app.state.streams.close)  # streams do not end by themselves
        if not server.listening.wait(_START_SECONDS):
            raise ServiceError(f"service {self.url}: did not start", "see the log above for the reason")

    def _publish(self, home: Path, stores: Sequence[str]) -> None:
        """Write the service note for the CLI on this machine. Only its owner can read the file."""
        path = home / SERVICE_NOTE
        partial = home / f".{SERVICE_NOTE}.{os.getpid()}"
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "url": self.url,
                    "operator_token": self.operator_token,
                    "recorder_token": self.recorder_token,
                    "process": asdict(ProcessIdentity.of(os.getpid())),
                    "stores": stores,
                },
                file,
            )
        partial.replace(path)
        self._undo.append(lambda: path.unlink(missing_ok=True))
        listing = ExitStack()
        listing.enter_context(listed(home))
        self._undo.append(listing.close)

    def _sweep_loop(self) -> None:
        last_sweep = float("-inf")
        while not self._stopping.is_set():
            self._queue.wake.clear()
            pause = self.settings.sweep_seconds
            try:
                if time.monotonic() - last_sweep >= self.settings.sweep_seconds:
                    self._enqueue(sweep(self.service))
                    last_sweep = time.monotonic()
                else:
                    self._enqueue(find_due(self.service))
                pause = pause_before(next_due_ns(self.service), pause)
            except Exception:  # noqa: BLE001 - everything else relies on the sweep, so it logs the error and continues
                _log.exception("sweep failed; the next sweep follows")
            self._queue.notify_waiting()
            self._queue.wake.wait(
                min(pause, max(_MIN_SECONDS, last_sweep + self.settings.sweep_seconds - time.monotonic()))
            )

    def _upkeep_loop(self) -> None:
        threads = UpkeepThreads(self.service, _UPKEEP_AT_ONCE)
        while not self._stopping.wait(self.settings.upkeep_seconds):
            threads.start()
        threads.close()

    def _enqueue(self, work: Work) -> None:
        for run_id in work.runs:
            self._queue.run_changed(run_id)
        for action_id in work.actions:
            self._queue.action_due(action_id)
        for number in work.backtests:
            self._queue.backtest_due(number)


def pause_before(due_ns: int | None, most: float) -> float:
    """Return the seconds until the next check for due actions, unless an event wakes the loop earlier.

    Args:
        due_ns: nanoseconds until the next action is due, negative if it is overdue; None: no action.
        most: maximum number of seconds.
    """
    if due_ns is None:
        return most
    # An overdue action waits for a thread, which wakes the loop at its end, so that an immediate check has no effect.
    return min(most, max(_MIN_SECONDS, due_ns / NANOSECONDS) if due_ns > 0 else _OVERDUE_SECONDS)


def _own_store(url: str, home: Path) -> tuple[Store, StoreIdentity]:
    """Open the service's own store. Creates a missing store, unless the home contains a note of an earlier one.

    Raises:
        MissingStoreError: the folder is missing, or is a different store than the one in the note.
        ConfigError, StoreError: as `Store.open`.
    """
    location = url if checked_scheme(url) else str(Path(url).expanduser().absolute())
    known_id = noted_id(home, location)
    identity = StoreIdentity(known_id)
    try:
        store = Store.open(url, create=True, identity=identity)
    except MissingStoreError as error:
        if not known_id:
            raise
        raise MissingStoreError(
            error.what,
            f"restore the folder; if it was removed on purpose, remove its line from {home / HOME_NOTE}",
        ) from error
    if identity.id and identity.id != known_id:
        note_in_home(home, location, identity.id)
    return store, identity
