"""What the SDK says to the service: registrations and announcements. Hints, never a must."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from watchstep.capture import trace_context
from watchstep.capture.kept_connections import Answer, KeptConnections
from watchstep.control import ControlDocument
from watchstep.errors import ConfigError, FormatError, ServiceError
from watchstep.layout import SegmentKey

SERVICE = "WATCHSTEP_SERVICE"
TOKEN = "WATCHSTEP_TOKEN"  # noqa: S105 - the name of a variable
_TIMEOUT_SECONDS = 5.0
_LENDING_SECONDS = 30.0  # the service asks AWS meanwhile
_LONGEST_PAUSE = 30.0
_MAX_ANSWER = 4 * 1024 * 1024


class RefusalError(ServiceError):
    """The service answered with a refusal.

    Attributes:
        status: HTTP's.
        after_seconds: when it may be asked again, if it said so.
    """

    def __init__(self, status: int, what: str, mend: str, after_seconds: float | None = None) -> None:
        super().__init__(what, mend)
        self.status = status
        self.after_seconds = after_seconds


@dataclass(frozen=True)
class ServiceAddress:
    """Where the service answers, and the token to show it."""

    url: str
    token: str = ""

    @classmethod
    def from_environment(cls) -> ServiceAddress | None:
        """The service that ``WATCHSTEP_SERVICE`` names, if it names one.

        Raises:
            ConfigError: it is no http or https URL.
        """
        url = os.environ.get(SERVICE, "")
        return cls.checked(url, os.environ.get(TOKEN, "")) if url else None

    @classmethod
    def checked(cls, url: str, token: str) -> ServiceAddress:
        """An address.

        Raises:
            ConfigError: it is no http or https URL.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"service {url!r}: no http or https URL", "use the URL that 'watchstep serve' prints"
            )
        return cls(url.rstrip("/"), token)


class ServiceClient:
    """A few requests for one project. Blocks up to five seconds each; never called on the training thread."""

    def __init__(self, address: ServiceAddress, project: str) -> None:
        self._address = address
        # Announcements come from a thread of their own, on which the program has no span.
        self._parent = trace_context.current_span()
        self.pause_seconds = 0.0
        """What the last answer asked for between two announcements; the service lags where it is not 0."""
        self._connections = KeptConnections(address.url)
        self._runs = f"{address.url}/v1/projects/{quote(project, safe='')}/runs"

    def register(self, registration: Mapping[str, Any]) -> dict[str, Any]:
        """Make a run known, with its rules and job.

        Args:
            registration: the body of ``POST /v1/projects/{project}/runs``.

        Raises:
            ServiceError: the service refused, or did not answer.
        """
        return self._post(self._runs, registration)

    def credentials(self, run: str, attempt: str) -> dict[str, Any]:
        """Credentials that write one attempt.

        Returns:
            The answer of ``POST …/attempts/{attempt}/credentials``.

        Raises:
            ServiceError: the service refused, or did not answer.
        """
        named = f"{quote(run, safe='')}/attempts/{quote(attempt, safe='')}"
        return self._post(f"{self._runs}/{named}/credentials", {}, seconds=_LENDING_SECONDS)

    def announce(
        self, run: str, key: SegmentKey, health: Mapping[str, Any], *, urgent: bool = False
    ) -> ControlDocument:
        """Say that a segment lies on the store.

        What follows from it belongs to one trace: that of this thread's current span, or of the one in which the client
        was made, or else a new one.

        Returns:
            The control document of the run.

        Raises:
            ServiceError: the service refused, or did not answer.
        """
        body = {
            "attempt": key.writer.attempt,
            "node": key.writer.node,
            "writer": key.writer.writer,
            "seq": key.seq,
            "first": key.first,
            "last": key.last,
            "health": health,
            "urgent": urgent,
        }
        trace = trace_context.current_span() or self._parent or trace_context.new_trace()
        answer = self._post(
            f"{self._runs}/{quote(run, safe='')}/announcements", body, {trace_context.HEADER: trace}
        )
        try:
            control = ControlDocument.from_data(answer["control"])
        except (KeyError, FormatError) as error:
            raise ServiceError(
                f"service {self._address.url}: no control document in its answer", _MEND
            ) from error
        self.pause_seconds = _pause(answer.get("pause_seconds"))
        return control

    def _post(
        self,
        url: str,
        body: Mapping[str, Any],
        more: Mapping[str, str] = MappingProxyType({}),
        *,
        seconds: float = _TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        headers = {
            "Content-Type": "application/json", "Authorization": f"Bearer {self._address.token}", **more
        }  # fmt: skip
        content = json.dumps(body, default=str).encode()
        try:
            answer = self._connections.post(url, content, headers, seconds, _MAX_ANSWER)
            if answer.status >= 300:
                raise _refusal(self._address.url, answer)
            data = json.loads(answer.content)
        except (OSError, ValueError) as error:
            raise ServiceError(f"service {self._address.url}: no answer ({error})", _MEND) from error
        if not isinstance(data, dict):
            raise ServiceError(f"service {self._address.url}: an answer of another form", _MEND)
        return data


_MEND = "check the URL, and that 'watchstep serve' runs there; recording goes on without it"


def _pause(asked: Any) -> float:
    """Seconds, where an answer holds a number of them; no answer can hold a recorder up for long."""
    told = float(asked) if type(asked) in (int, float) else 0.0
    return min(told, _LONGEST_PAUSE) if told > 0 else 0.0


def _refusal(url: str, answer: Answer) -> RefusalError:
    status = answer.status
    try:
        problem = json.loads(answer.content)
        detail, mend = str(problem.get("detail", "")), str(problem.get("mend", ""))
    except (ValueError, AttributeError):
        detail, mend = "", ""
    said = detail or http.client.responses.get(status, "")
    # A date in its place, as proxies may write it, is read as no word: the recorder's own pause follows.
    after = float(answer.retry_after) if answer.retry_after.isdecimal() else None
    return RefusalError(status, f"service {url}: refused ({status} {said})", mend or _MEND, after)
