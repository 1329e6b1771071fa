"""Production on this machine: PostgreSQL, Redis, API, workers and scheduler as processes, and what CPU each took."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.services.postgres import running_postgres
from tests.services.redis import free_port, running_redis
from watchstep.store.store import Store
from watchstep_services.auth import create_token
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.schema import upgrade

_CELERY = ("-m", "celery", "-A", "watchstep_services.scheduler.celery_app")
_START_SECONDS = 120.0


@dataclass
class Production:
    """Where production runs.

    Attributes:
        url: of the API.
        folder: for logs.
        store: a local folder.
        database: opened by the benchmark itself; what it asks counts as PostgreSQL's work.
        recorder: a token.
        parts: process ids by name: api, worker-0 …, scheduler, postgres, redis.
    """

    url: str
    folder: Path
    store: str
    database: Database
    recorder: str
    environment: dict[str, str]
    parts: dict[str, int] = field(default_factory=dict)

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU of each part so far, with all that it started."""
        return {name: cpu_of(pid) for name, pid in self.parts.items()}

    @contextmanager
    def process(self, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        """A part as a process of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            running = subprocess.Popen(
                [sys.executable, *command],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.parts[name] = running.pid
        try:
            yield running
        finally:
            _end(running)

    def worker(self, number: int, processes: int) -> contextlib.AbstractContextManager[Any]:
        """A Celery worker with so many processes, as docker-compose.yml starts it."""
        here = ("--concurrency", str(processes), "--loglevel", "WARNING", "--hostname", f"w{number}@%h")
        return self.process(f"worker-{number}", *_CELERY, "worker", *here)


def _end(running: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        running.send_signal(signal.SIGCONT)
        running.terminate()
    try:
        running.wait(30)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(running.pid, signal.SIGKILL)  # children of one that was killed


def cpu_of(pid: int) -> float:
    """Seconds of CPU of a process and its children, dead ones that were waited for included."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    spent = 0.0
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            spent += times.user + times.system + times.children_user + times.children_system
    return spent


@contextmanager
def production(workers: int, processes: int, **settings: str) -> Iterator[Production]:
    """Start everything; settings are environment variables without their prefix."""
    port = free_port()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ws-bench-")))
        postgres = stack.enter_context(running_postgres())
        broker = stack.enter_context(running_redis())
        url = stack.enter_context(postgres.new_database())
        database = open_database(url)
        stack.callback(database.close)
        upgrade(database)
        store = Store.open(folder / "runs", create=True).location
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "WATCHSTEP_STORE": store,
            "WATCHSTEP_DATABASE_URL": url,
            "WATCHSTEP_BROKER_URL": broker.url,
            "WATCHSTEP_PUBLIC_URL": f"http://127.0.0.1:{port}",
            **{f"WATCHSTEP_{name.upper()}": value for name, value in settings.items()},
        }
        recorder = create_token(database, "recorder")
        made = Production(f"http://127.0.0.1:{port}", folder, store, database, recorder, environment)
        made.parts["redis"] = broker.client.info()["process_id"]
        with database.read() as session:
            backend = session.connection().exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        made.parts["postgres"] = psutil.Process(backend).ppid()
        listen = ("--no-access-log", "--log-level", "warning", "--host", "127.0.0.1", "--port", str(port))
        api = ("-m", "uvicorn", "--factory", "watchstep_services.api.production:create", *listen)
        stack.enter_context(made.process("api", *api))
        for number in range(workers):
            stack.enter_context(made.worker(number, processes))
        beat = ("beat", "--schedule", "beat-schedule", "--pidfile=", "--loglevel", "WARNING")
        stack.enter_context(made.process("scheduler", *_CELERY, *beat))
        _await(f"{made.url}/readyz")
        yield made


def _await(url: str) -> None:
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
