"""Requests to a service, by the standard library: a training container needs nothing more."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote, urlencode

from watchstep.capture.service_client import ServiceAddress
from watchstep.errors import NotFoundError, ServiceError

JSON = "application/json"
_MAX_ANSWER = 256 * 1024 * 1024
_TRIES = 4
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 10.0
_PASSING = frozenset((429, 503, 504))
_MEND = "see that the service runs, and its URL"


class RefusedError(ServiceError):
    """The service refused.

    Attributes:
        status: of its answer.
        type: what kind of problem; ``urn:watchstep:problem:…``.
    """

    def __init__(self, status: int, kind: str, what: str, mend: str) -> None:
        super().__init__(what, mend)
        self.status = status
        self.type = kind


class MissingError(RefusedError, NotFoundError):
    """There is no such thing."""


class Transport:
    """Sends requests to one service. Thread-safe; what the service cannot do just now is tried again.

    Args:
        address: of the service.
        timeout: seconds that it may be silent.
    """

    def __init__(self, address: ServiceAddress, timeout: float) -> None:
        self.address = address
        self._timeout = timeout

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One request; its answer, read from JSON, None where it is empty.

        Raises:
            MissingError: there is no such thing.
            RefusedError: it is refused.
            ServiceError: the service does not answer.
        """
        content, _ = self.fetch(method, path, query, body, headers)
        try:
            return json.loads(content) if content else None
        except ValueError as error:
            raise ServiceError(f"{self.address.url}: its answer is no JSON ({error})", _MEND) from error

    def fetch(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        """As `call`; the answer's bytes and its headers, named in lower case."""
        sent = dict(headers or {})
        if method == "POST":
            sent.setdefault("Idempotency-Key", str(uuid.uuid4()))  # one for all tries
        for attempt in range(1, _TRIES + 1):
            try:
                with self.open(method, path, query, body, sent) as answer:
                    content = answer.read(_MAX_ANSWER + 1)
                    if len(content) > _MAX_ANSWER:
                        raise ServiceError(f"{path}: over {_MAX_ANSWER} bytes", "ask for less")
                    return content, {name.lower(): value for name, value in answer.headers.items()}
            except RefusedError as error:
                if error.status not in _PASSING or attempt == _TRIES:
                    raise
            time.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1)))
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[HTTPResponse]:
        """One request without another try; its answer, to be read within the block.

        Raises:
            MissingError, RefusedError, ServiceError: as `call`.
        """
        asked = {name: value for name, value in (query or {}).items() if value is not None and value != ()}
        url = f"{self.address.url}{path}" + (f"?{urlencode(asked, doseq=True)}" if asked else "")
        sent = {"Accept": JSON, "Authorization": f"Bearer {self.address.token}", **(headers or {})}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            sent["Content-Type"] = JSON
        request = urllib.request.Request(url, data, sent, method=method)  # noqa: S310 - the scheme was checked
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:  # noqa: S310 - as above
                yield answer
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(url, error) from None
        except (OSError, HTTPException, ValueError) as error:
            raise ServiceError(f"{self.address.url}: no answer ({error})", _MEND) from error


def segment(name: str) -> str:
    """One part of a path."""
    return quote(name, safe="")


def _refusal(url: str, error: urllib.error.HTTPError) -> RefusedError:
    kind, what, mend = "", f"{url}: answered {error.code}", "see that the URL is that of a Watchstep service"
    try:
        problem = json.loads(error.read(1024 * 1024))
        kind, what, mend = str(problem.get("type", "")), str(problem["detail"]), str(problem["mend"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError, HTTPException):
        pass
    return (MissingError if error.code == 404 else RefusedError)(error.code, kind, what, mend)
