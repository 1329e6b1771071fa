"""The whole service in one process: SQLite, threads, a local folder. For a laptop or one machine.

Leases of an embedded service that was killed are taken over at once by the next one of its home.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

import uvicorn
from sqlalchemy import true

from watchstep.capture.service.location import SERVICE_NOTE, make_home
from watchstep.errors import ConfigError, MissingStoreError, ServiceError
from watchstep.platform.process import ProcessIdentity
from watchstep.store.local import StoreIdentity
from watchstep.store.store import Store, checked_scheme
from watchstep_launch.backend_registry import BACKENDS_FILE
from watchstep_services.api.app import create_app
from watchstep_services.api.middleware.connections import server_options
from watchstep_services.auth.token_register import forget_named
from watchstep_services.auth.tokens import create_token
from watchstep_services.core.settings import NANOSECONDS, Settings
from watchstep_services.db.clock import now_ns
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.engine import Database
from watchstep_services.db.lease import ACTION_LEASE, RUN_LEASE
from watchstep_services.db.models import ActionRow
from watchstep_services.db.schema import upgrade
from watchstep_services.dispatch.dispatch import next_due_ns
from watchstep_services.retention.upkeep import UpkeepThreads
from watchstep_services.runs.rule_configs import apply_owner_rules
from watchstep_services.scheduler.queue import WorkQueue
from watchstep_services.scheduler.sweep import Work, find_due, sweep
from watchstep_services.service.context import Service, owner_receivers, owner_rules
from watchstep_services.tenancy.projects import own_store

if TYPE_CHECKING:
    from typing_extensions import Self


def end_leases(database: Database) -> None:
    """End every lease on runs, and let every stop that waits be tried at once.

    Only for a database that no other process uses. What a process that died had claimed is fenced: a new claim has a
    new number.
    """
    with database.write() as session:
        RUN_LEASE.expire_all(session, true())
        ACTION_LEASE.expire_all(session, ActionRow.kind == "stop", now_ns())


_UPKEEP_AT_ONCE = 100
_START_SECONDS = 30.0
_OVERDUE_SECONDS = 0.25
_LEAST_SECONDS = 0.01
_MAKER = "watchstep serve"
_STORE_NOTE = "store-identity"
"""In the home: the location and the id of the store, so that none is made in its place."""

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn in a thread, which says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class EmbeddedService:
    """A running service. Use it as a context manager; what it does at the end is quick and complete.

    Attributes:
        url: of the API.
        operator_token: may do everything; made at start and worthless after the end.
        recorder_token: for the programs that it watches; may register and announce runs, as long as the other.
        service: for those who share the process.
    """

    url: str
    operator_token: str
    recorder_token: str
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
        """Wait until a condition holds, looking after every piece of work; False if it does not in time."""
        return self._queue.wait_until(done, timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `stop_waiting` is called, by a signal handler, say; False if it is not in time, in seconds."""
        return self._stopping.wait(timeout)

    def stop_waiting(self) -> None:
        """Let `wait` return."""
        self._stopping.set()

    def _start(self) -> None:
        home = self.settings.home_folder
        make_home(home)  # hashes of tokens and addresses of webhooks lie there
        self._lock(home)
        rules, receivers = owner_rules(self.settings), owner_receivers(self.settings)
        store = _own_store(self.settings.store, home)
        listener = self._listen()
        database = open_encrypted_database(self.settings)
        self._undo.append(database.close)
        upgrade(database)
        if not self.settings.database_url.get_secret_value():
            # The database is the home's, and the home is locked: whoever had the leases has ended.
            end_leases(database)
        self._queue = WorkQueue(self.settings.workers)
        settings = self.settings.model_copy(update={"store": store.location})
        with database.write() as session:
            own_store(session, store.location)
        self.service = Service(
            settings,
            database,
            self.url,
            rules,
            self._queue,
            receiver_file=receivers,
            owner_backends=home / BACKENDS_FILE,
        )
        apply_owner_rules(database, rules)
        self.operator_token, self.recorder_token = self._own_tokens(database, home)
        self._undo.append(self.service.patience.close)
        self._undo.append(self.service.hanging_stores.close)
        self._undo.append(self.service.intake.shutdown)
        self._undo.append(self.service.status_threads.shutdown)
        self._undo.append(self.service.look_threads.shutdown)
        self._queue.start(self.service)
        self._undo.append(self._queue.close)
        self._serve(listener)
        sweeper = threading.Thread(target=self._sweep_for_ever, name="watchstep-sweep", daemon=True)
        sweeper.start()
        self._undo.append(sweeper.join)
        keeper = threading.Thread(target=self._keep_for_ever, name="watchstep-keeper", daemon=True)
        keeper.start()
        self._undo.append(keeper.join)
        self._undo.append(self._queue.wake.set)
        self._undo.append(self._stopping.set)
        self._publish(home)

    def _own_tokens(self, database: Database, home: Path) -> tuple[str, str]:
        """One of an operator and one of a recorder; those of an earlier process that was killed go first."""
        name = f"serve in {''.join(part if part.isprintable() else '?' for part in str(home)[-100:])}"
        forget_named(database, name, _MAKER)
        self._undo.append(lambda: forget_named(database, name, _MAKER))
        operator = create_token(database, "operator", name=name, created_by=_MAKER)
        return operator, create_token(database, "recorder", name=name, created_by=_MAKER)

    def _lock(self, home: Path) -> None:
        # Whoever can open the file can lock it, and would keep the service from starting.
        descriptor = os.open(home / "service.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o600)
        held: IO[str] = os.fdopen(descriptor, "w", encoding="ascii")
        self._undo.append(held.close)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"home {home}: another watchstep service runs there",
                "use that one, or give this one another WATCHSTEP_HOME",
            ) from error

    def _listen(self) -> socket.socket:
        address = (self.settings.host, self.settings.port)
        family = socket.AF_INET6 if ":" in self.settings.host else socket.AF_INET
        try:
            listener = socket.create_server(address, family=family)
        except OSError as error:
            raise ConfigError(
                f"address {address[0]}:{address[1]}: cannot be listened on ({error.strerror or error})",
                "choose another WATCHSTEP_PORT (0 takes a free one) or WATCHSTEP_HOST",
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
        self._undo.append(app.state.streams.close)  # what does not end by itself
        if not server.listening.wait(_START_SECONDS):
            raise ServiceError(f"service {self.url}: did not start", "see the log above for the reason")

    def _publish(self, home: Path) -> None:
        """Tell the CLI on this machine, and nobody else: the file is for its owner only."""
        place = home / SERVICE_NOTE
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
                    "store": self.service.settings.store,
                },
                file,
            )
        partial.replace(place)
        self._undo.append(lambda: place.unlink(missing_ok=True))

    def _sweep_for_ever(self) -> None:
        swept = float("-inf")
        while not self._stopping.is_set():
            self._queue.wake.clear()
            pause = self.settings.sweep_seconds
            try:
                if time.monotonic() - swept >= self.settings.sweep_seconds:
                    self._hand_out(sweep(self.service))
                    swept = time.monotonic()
                else:
                    self._hand_out(find_due(self.service))
                pause = pause_before(next_due_ns(self.service), pause)
            except Exception:  # noqa: BLE001 - everything else relies on the sweep: it says so and goes on
                _log.exception("a sweep failed; the next follows")
            self._queue.tell()
            self._queue.wake.wait(
                min(pause, max(_LEAST_SECONDS, swept + self.settings.sweep_seconds - time.monotonic()))
            )

    def _keep_for_ever(self) -> None:
        threads = UpkeepThreads(self.service, _UPKEEP_AT_ONCE)
        while not self._stopping.wait(self.settings.upkeep_seconds):
            threads.start()
        threads.close()

    def _hand_out(self, work: Work) -> None:
        for run_id in work.runs:
            self._queue.run_changed(run_id)
        for action_id in work.actions:
            self._queue.action_due(action_id)
        for number in work.backtests:
            self._queue.backtest_due(number)


def pause_before(due_ns: int | None, most: float) -> float:
    """Seconds until actions are looked for again, unless something wakes us before.

    Args:
        due_ns: nanoseconds until the next is due, negative if it is overdue; None for none.
        most: seconds at the most.
    """
    if due_ns is None:
        return most
    # One that is overdue waits for a thread, whose end wakes us: asking again at once changes nothing.
    return min(most, max(_LEAST_SECONDS, due_ns / NANOSECONDS) if due_ns > 0 else _OVERDUE_SECONDS)


def _own_store(url: str, home: Path) -> Store:
    """Open the service's own store, made where it is missing, unless the home remembers that there was one.

    Raises:
        MissingStoreError: it is a folder that is missing, or another store than the one that the home remembers.
        ConfigError, StoreError: as `Store.open`.
    """
    note = home / _STORE_NOTE
    place = url if checked_scheme(url) else str(Path(url).expanduser().absolute())
    remembered = ""
    with contextlib.suppress(FileNotFoundError):
        location, _, found = note.read_text(encoding="utf-8").strip().rpartition(" ")
        if location == place:
            remembered = found
    identity = StoreIdentity(remembered)
    try:
        store = Store.open(url, create=True, identity=identity)
    except MissingStoreError as error:
        raise MissingStoreError(
            error.what, f"bring the folder back; if it was removed on purpose, remove {note}"
        ) from error
    if identity.id and identity.id != remembered:
        descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.fchmod(descriptor, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{place} {identity.id}\n")
    return store
