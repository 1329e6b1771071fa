"""Unread responses over real sockets: clients are disconnected, and unread bytes are limited."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from tests.services.api.middleware.test_connections import WAIT, served
from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.recording import Recording
from watchstep.format.layout import SnapshotKey
from watchstep.store.store import Store
from watchstep_services.api.middleware.transports import UnreadBytes
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.auth import create_token

SIZE = 24 * 1024 * 1024
VALUES = np.arange(SIZE // 4, dtype=np.int32)
PLACE = "/v1/projects/vision/runs/run-1/snapshots/a1/0/5/train/tensor?name=large"
MEGABYTE = 1024 * 1024


@pytest.fixture
def recorded(driven_sqlite: Driven, folder_store: Store) -> Driven:
    from safetensors.numpy import save

    recording = Recording(folder_store).begin()
    recording.store.put(SnapshotKey("a1", 0, 5, "train").path, save({"large": VALUES}))
    driven_sqlite.register()
    return driven_sqlite


@contextmanager
def unread_request(address: tuple[str, int], token: str, path: str = PLACE) -> Iterator[socket.socket]:
    """A connection with a small buffer that has sent a request."""
    with socket.socket() as client_socket:
        client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client_socket.settimeout(WAIT)
        client_socket.connect(address)
        client_socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        yield client_socket


def reset(connection: socket.socket) -> bool:
    """Whether the server ends the connection, without reading of it."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(WAIT * 1000))


def test_a_client_that_reads_nothing_is_disconnected(
    recorded: Driven, protocol: type[asyncio.Protocol], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with (
        served(recorded, protocol, write_seconds=0.4) as (address, token),
        unread_request(address, token) as slow,
    ):
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert reset(slow)
        with unread_request(address, token, "/healthz") as other:
            assert other.recv(12) == b"HTTP/1.1 200"
    assert [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_a_slow_client_gets_the_whole_response(recorded: Driven, protocol: type[asyncio.Protocol]) -> None:
    with served(recorded, protocol) as (address, token):
        url = f"http://{address[0]}:{address[1]}{PLACE}"
        headers = {"authorization": f"Bearer {token}"}
        whole = httpx.get(url, headers=headers, timeout=WAIT)
        assert (whole.status_code, whole.headers["content-length"]) == (200, str(SIZE))
        assert whole.content == VALUES.tobytes()
        first, last = 3 * MEGABYTE + 1, 13 * MEGABYTE + 1
        piece = httpx.get(url, headers={**headers, "range": f"bytes={first}-{last}"}, timeout=WAIT)
        assert (piece.status_code, piece.headers["content-range"]) == (206, f"bytes {first}-{last}/{SIZE}")
        assert piece.content == VALUES.tobytes()[first : last + 1]


def test_unread_bytes_of_a_token_are_limited_and_others_continue(
    recorded: Driven, protocol: type[asyncio.Protocol]
) -> None:
    other = create_token(recorded.service.database, "viewer", "vision")
    with served(recorded, protocol, unread_mb=20, write_seconds=WAIT) as (address, token):
        with unread_request(address, token) as slow:
            assert slow.recv(12) == b"HTTP/1.1 200"
            url = f"http://{address[0]}:{address[1]}{PLACE}"
            refused = httpx.get(url, headers={"authorization": f"Bearer {token}"}, timeout=WAIT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            # A part of it, not all of it, is what the slow one holds.
            assert f"{4 * MEGABYTE} bytes of responses are unread" in refused.json()["detail"]
            with unread_request(address, other) as second:
                assert second.recv(12) == b"HTTP/1.1 200"

        def answered() -> bool:
            with unread_request(address, token) as again:
                return again.recv(12) == b"HTTP/1.1 200"

        eventually(answered)


def test_shares_of_tokens_projects_and_the_process() -> None:
    unread = UnreadBytes(8)
    unread.reserve(3 * MEGABYTE, "vision", "first")  # more than its share, but its only one
    with pytest.raises(RequestRefusedError, match="token first: 3145728 bytes"):
        unread.reserve(1, "vision", "first")
    unread.reserve(MEGABYTE, "vision", "second")
    with pytest.raises(RequestRefusedError, match="project vision"):
        unread.reserve(MEGABYTE, "vision", "third")
    unread.reserve(4 * MEGABYTE, "text", "fourth")
    with pytest.raises(RequestRefusedError, match="the process"):
        unread.reserve(MEGABYTE, None, "fifth")
    unread.release(3 * MEGABYTE, "vision", "first")
    unread.reserve(MEGABYTE, None, "fifth")
    unread.reserve(MEGABYTE, "vision", "first")
