"""Solid ground beside the service: jobs that count who stops them, a receiver that counts what it is told.

One HTTP server of the harness, which never dies. The service's processes reach it from `counting.CountingBackend`, from
webhooks, and from their points.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

_STUBBORN_ENDS = frozenset({"kill"})
_WILLING_ENDS = frozenset({"stop", "kill"})


@dataclass
class CountedJob:
    """A job that is no process: it is gone once somebody has stopped it, or has ended by itself.

    Attributes:
        stubborn: only a kill ends it.
        lock: held by whoever changes it, and by its recorder while it writes: what is gone writes nothing.
        gone: whether it has ended.
        exit_code: once it is gone.
        ended_by: what ended it; empty where it did so by itself.
        calls: every call, by its verb.
    """

    stubborn: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: bool = False
    exit_code: int | None = None
    ended_by: str = ""
    calls: Counter[str] = field(default_factory=Counter)

    def called(self, verb: str) -> None:
        """Somebody asks for its status, its stop or its kill."""
        with self.lock:
            self.calls[verb] += 1
            if not self.gone and verb in (_STUBBORN_ENDS if self.stubborn else _WILLING_ENDS):
                self.gone, self.ended_by = True, verb
                self.exit_code = -9 if verb == "kill" else -15

    def ends(self, exit_code: int) -> None:
        """It ends by itself. Called with the lock held."""
        if not self.gone:
            self.gone, self.exit_code = True, exit_code


class Ground:
    """The server. `url` is where it listens.

    Attributes:
        jobs: by id.
        told: how often each event came to the receiver, by its id.
        faults: what a point of a process may ask for, by name.
    """

    def __init__(self, faults: dict[str, Callable[[], object]]) -> None:
        self.jobs: dict[str, CountedJob] = {}
        self.told: Counter[str] = Counter()
        self.faults = faults
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """What a request comes to."""
        _, kind, *rest = path.split("/")
        if kind == "told":
            self.told[json.loads(body)["id"]] += 1
            return {}
        if kind == "faults":
            self.faults[rest[0]]()
            return {}
        job = self.jobs[unquote(rest[0])]
        job.called(rest[1])
        return {"gone": job.gone, "exit_code": job.exit_code}


def _handler(ground: Ground) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = self.rfile.read(length)
            if len(body) < length:
                return  # whoever asked was killed meanwhile
            answer = json.dumps(ground.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_arguments: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # whoever asked was killed meanwhile
                super().handle()

    return Handler
