"""Connections to addresses that were checked, and to no others, for HTTP and SMTP, with a bound on the time of one try.

The bound holds whatever the other side does: sending byte by byte can be slow, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING

import certifi
import httpcore

from watchstep_services.core.egress import EgressPolicy

if TYPE_CHECKING:
    from typing_extensions import Self


class Cutoff:
    """Cuts a connection when the time is up, which wakes whoever waits on it. Use it as a context manager."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._held: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self.passed = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            while self._held:
                self._held.pop().close()

    @property
    def left(self) -> float:
        """Seconds that are left; a little more than none where none are, as sockets take 0 for something else."""
        return max(0.001, self._end - time.monotonic())

    def watch(self, connection: socket.socket) -> None:
        """Cut this connection, too."""
        # A copy of the descriptor: TLS takes the original one away from its socket.
        with self._lock:
            self._held.append(connection.dup())
            if self.passed:
                self._cut_all()

    def _cut(self) -> None:
        with self._lock:
            self.passed = True
            self._cut_all()

    def _cut_all(self) -> None:
        for connection in self._held:
            with contextlib.suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)


def connect(reach: EgressPolicy, host: str, port: int, cutoff: Cutoff) -> socket.socket:
    """A connection to one of the host's addresses, the first that answers.

    Raises:
        AddressRefusedError: one of its addresses is not allowed.
        OSError: none answers.
    """
    problem: OSError | None = None
    for address in reach.addresses(host, port, cutoff.left):
        try:
            made = socket.create_connection((address, port), timeout=cutoff.left)
        except OSError as error:
            problem = error
            continue
        made.settimeout(cutoff.left + 1)  # the cutoff comes first, and says so
        cutoff.watch(made)
        return made
    assert problem is not None  # a host has at least one address
    raise problem


class CheckedBackend(httpcore.NetworkBackend):
    """httpcore's way to the network: looks up and checks by itself, so that TLS and ``Host`` still say the name."""

    def __init__(self, reach: EgressPolicy, cutoff: Cutoff) -> None:
        self._reach = reach
        self._cutoff = cutoff
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002 - the cutoff's is for all of it
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """A stream to one of the host's addresses.

        Raises:
            AddressRefusedError: one of them is not allowed.
            httpcore.ConnectError: none answers.
        """
        problem: Exception | None = None
        try:
            addresses = self._reach.addresses(host, port, self._cutoff.left)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        for address in addresses:
            try:
                stream = self._inner.connect_tcp(
                    address, port, self._cutoff.left, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                problem = error
                continue
            self._cutoff.watch(stream.get_extra_info("socket"))
            return stream
        assert problem is not None  # a host has at least one address
        raise problem


def tls_context() -> ssl.SSLContext:
    """Trust in the system's authorities and in those of certifi; in those of ``SSL_CERT_FILE`` alone where it is set."""
    return _tls_context(os.environ.get("SSL_CERT_FILE", ""))


@lru_cache(maxsize=8)
def _tls_context(own: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=own or None)
    if not own:
        context.load_verify_locations(certifi.where())
    return context
