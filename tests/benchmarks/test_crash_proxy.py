"""The crash benchmark's proxy: what it forwards, what it cuts, and that it leaves no socket open."""

from __future__ import annotations

import gc
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from benchmarks.crash.proxy import Proxy

_PATIENCE = 60.0


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that says what it hears."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def say(held: socket.socket) -> None:
        with held, suppress(OSError):
            while data := held.recv(1 << 16):
                held.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                held, _ = listener.accept()
                threads.append(threading.Thread(target=say, args=(held,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    accepting.join(_PATIENCE)
    for thread in threads:
        thread.join(_PATIENCE)


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    proxy = Proxy(echo)
    proxy.start()
    yield proxy
    proxy.close()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), _PATIENCE)


def test_what_is_said_arrives_and_so_does_the_answer(proxy: Proxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"hello")
        assert client.recv(5, socket.MSG_WAITALL) == b"hello"


def test_a_cut_resets_all_that_are_connected(proxy: Proxy) -> None:
    with connect(proxy) as first, connect(proxy) as second:
        for client in (first, second):
            client.sendall(b"hello")
            assert client.recv(5, socket.MSG_WAITALL) == b"hello"
        assert proxy.cut() == 2
        for client in (first, second):
            with pytest.raises(ConnectionResetError):
                client.recv(1)


def test_a_commit_is_heard_and_its_answer_is_not(proxy: Proxy) -> None:
    with connect(proxy) as client:
        proxy.swallow_a_commit()
        client.sendall(b"BEGIN")
        assert client.recv(5, socket.MSG_WAITALL) == b"BEGIN"
        client.sendall(b"COMMIT")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert proxy.swallowed == 1


def test_no_socket_is_left_open(echo: int) -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    targets = (echo, gone.getsockname()[1])
    gone.close()
    with ExitStack() as stack:
        for target in targets:
            proxy = Proxy(target)
            proxy.start()
            clients = [stack.enter_context(connect(proxy)) for _ in range(8)]
            clients[0].sendall(b"hello")
            clients[1].setblocking(False)
            with suppress(BlockingIOError, OSError):  # more than anybody reads
                while True:
                    clients[1].send(b"x" * (1 << 16))
            clients[2].close()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                proxy.close()  # while some are only being connected
                del proxy
                gc.collect()
            assert [str(warning.message) for warning in seen] == []
