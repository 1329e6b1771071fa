"""A STAND-IN, NOT AWS: what moto lacks of SageMaker's training jobs, in front of moto.

Moto takes each request first, and what it refuses is refused. What it does not do is done here: a job's command runs as a
process of this machine, as the container's would; its output goes to moto's CloudWatch Logs; its state is that process's; it can be
stopped; and each request is held against the service's model, lengths and patterns too, which botocore does not look at.
It proves no IAM, no image, no network and no timing of AWS's.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session

REGION = "us-east-1"
ACCOUNT = "123456789012"

_KEPT = frozenset(("host", "content-length", "connection", "accept-encoding"))


class RefusalError(Exception):
    """An error as AWS answers it."""

    def __init__(self, code: str, said: str, status: int = 400) -> None:
        super().__init__(said)
        self.code, self.said, self.status = code, said, status


class LostError(Exception):
    """What was asked is done, and its answer never comes."""


@dataclass(frozen=True)
class Asked:
    """One call.

    Attributes:
        service: "sagemaker".
        operation: as the model names it.
        body: what was asked.
        forward: asks moto the same, or something else; gives its answer.
    """

    service: str
    operation: str
    body: dict[str, Any]
    forward: Callable[..., dict[str, Any]] = field(repr=False)


@dataclass
class StandIn:
    """A running stand-in.

    Attributes:
        url: where it answers.
        moto: moto's own.
        folder: for its jobs' files.
        workdir: the working directory of every image.
        calls: what it was asked.
        faults: operation → what is raised instead of an answer, once for each entry; `LostError` once it is done.
        services: service → who answers.
    """

    url: str
    moto: str
    folder: Path
    workdir: Path
    calls: list[Asked] = field(default_factory=list)
    faults: dict[str, list[Exception]] = field(default_factory=dict)
    services: dict[str, Callable[[Asked], dict[str, Any]]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def answer(self, asked: Asked) -> dict[str, Any]:
        """What is said to a call; raises `RefusalError` or `LostError`."""
        with self.lock:
            self.calls.append(asked)
            planned = self.faults.get(asked.operation) or []
            fault = planned.pop(0) if planned else None
        if fault is not None and not isinstance(fault, LostError):
            raise fault
        try:
            return self.services[asked.service](asked)
        finally:
            if fault is not None:
                raise fault


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            said = self.stand_in.answer(self._asked(body))
        except LostError:
            self.close_connection = True
            return
        except RefusalError as error:
            self._say(
                error.status, {"__type": error.code, "message": error.said, "Message": error.said}, error.code
            )
            return
        self._say(200, said)

    def _asked(self, body: bytes) -> Asked:
        target = self.headers.get("X-Amz-Target", "")
        service, operation = "sagemaker", target.partition(".")[2]
        held = json.loads(body)
        check(_model(service).operation_model(operation).input_shape, held, operation)

        def forward(path: str = self.path, asked: Any = held, name: str = operation) -> dict[str, Any]:
            headers = {key: value for key, value in self.headers.items() if key.lower() not in _KEPT}
            headers["X-Amz-Target"] = f"SageMaker.{name}"
            data = json.dumps(asked).encode()
            call = urllib.request.Request(self.stand_in.moto + path, data, headers, method="POST")
            try:
                with urllib.request.urlopen(call) as answer:
                    answered: dict[str, Any] = json.loads(answer.read() or b"{}")
                    return answered
            except urllib.error.HTTPError as error:
                said = json.loads(error.read())
                code = str(said.get("__type") or error.headers.get("x-amzn-ErrorType") or said.get("code"))
                raise RefusalError(
                    code, str(said.get("message") or said.get("Message")), error.code
                ) from error

        return Asked(service, operation, held, forward)

    def _say(self, status: int, said: Mapping[str, Any], code: str = "") -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("x-amzn-ErrorType", code)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True


@contextmanager
def serving(moto: str, folder: Path) -> Iterator[StandIn]:
    """Start one on a free port."""

    class Handler(_Handler):
        pass

    server = _Server(("127.0.0.1", 0), Handler)
    stand_in = StandIn(f"http://127.0.0.1:{server.server_port}", moto, folder, folder)
    Handler.stand_in = stand_in
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check(shape: Any, value: Any, place: str) -> None:
    """Hold a request against the service's own model.

    Raises:
        RefusalError: it does not fit.
    """
    kind = shape.type_name
    if kind == "structure":
        _require(isinstance(value, dict), place, "is no object")
        for name in shape.required_members:
            _require(name in value, place, f"lacks {name}")
        for name, held in value.items():
            _require(name in shape.members, place, f"has an unknown {name}")
            check(shape.members[name], held, f"{place}.{name}")
        return
    facts = shape.metadata
    if kind in ("list", "map", "string"):
        _require(len(value) >= facts.get("min", 0), place, f"is shorter than {facts.get('min')}")
        _require(len(value) <= facts.get("max", len(value)), place, f"is longer than {facts.get('max')}")
    if kind == "string":
        pattern = re.sub(r"\\p\{[LN]\}", r"\\w", facts.get("pattern", r"[\S\s]*")).replace(
            r"\p{Z}", r"\s"
        )  # Java's
        _require(re.fullmatch(pattern, value) is not None, place, f"{value!r} does not fit")
        _require(value in (facts.get("enum") or [value]), place, f"{value!r} is none of its values")
    elif kind == "list":
        for number, held in enumerate(value):
            check(shape.member, held, f"{place}[{number}]")
    elif kind == "map":
        for name, held in value.items():
            check(shape.key, name, place)
            check(shape.value, held, f"{place}.{name}")
    elif kind in ("integer", "long"):
        _require(
            facts.get("min", value) <= value <= facts.get("max", value), place, f"{value} is out of bounds"
        )


def _require(holds: bool, place: str, why: str) -> None:
    if not holds:
        raise RefusalError("ValidationException", f"{place} {why}")


@functools.cache
def _model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)
