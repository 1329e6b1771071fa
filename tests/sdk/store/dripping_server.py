"""A server whose response never ends: it sends a few bytes now and then."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
ANSWERS = {
    "body": (_OK + b"content-length: 100000\r\n\r\n", b" "),
    "chunks": (_OK + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "headers": (_OK, b"x-a: b\r\n"),
    "line": (_OK + b"x-a: ", b"b"),
    "refusal": (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 100000\r\n\r\n", b" "),
}
"""The beginning of a response and its repeated rest, by the part that does not end."""


@contextmanager
def dripping(part: str, seconds: float = 0.02) -> Iterator[str]:
    """The URL of such a server.

    Args:
        part: one of `ANSWERS`.
        seconds: between two pieces.
    """
    beginning, piece = ANSWERS[part]
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(65536)
                connection.sendall(beginning)
                while not ended.wait(seconds):
                    connection.sendall(piece)
            except OSError:
                pass  # the other side has left

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            if ended.is_set():
                connection.close()
                return
            threads.append(threading.Thread(target=answer, args=(connection,)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            socket.create_connection(listener.getsockname()).close()
            for thread in threads:
                thread.join()
