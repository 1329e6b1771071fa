"""Connections to addresses that were checked, and to no others: for HTTP and for SMTP."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterable
from functools import lru_cache

import certifi
import httpcore

from watchstep_services.dispatcher.receivers.cutoff import Cutoff
from watchstep_services.dispatcher.receivers.reach import Reach


def connect(reach: Reach, host: str, port: int, cutoff: Cutoff) -> socket.socket:
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

    def __init__(self, reach: Reach, cutoff: Cutoff) -> None:
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
