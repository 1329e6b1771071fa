"""Requests of the SDK to the service: registrations and announcements, with pauses after a failure. Recording never needs them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from watchstep.capture.service import trace_context
from watchstep.errors import FormatError, ServiceError
from watchstep.format.bounded_json import parse_json
from watchstep.format.control import ControlDocument
from watchstep.format.layout import SegmentKey
from watchstep.platform.transport import (
    LONGEST_RETRY_AFTER,
    ServiceAddress,
    ServiceRefusedError,
    Transport,
    UnreachableError,
    segment,
)

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 30.0
_PAUSED = frozenset((401, 403, 429, 502, 503, 504))
_random = random.SystemRandom()  # the program's own generator stays as it is


def _jitter() -> float:
    return _random.uniform(0.0, 0.25)


class ServicePause:
    """The pause after a failure: what the service asks for, or else longer from failure to failure, 30 s at the most.

    Each is up to a quarter longer, at random: recorders that failed together must not return together.

    Args:
        clock: seconds, growing.
        jitter: the share that is added.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = _jitter
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._until = float("-inf")
        self._next = _FIRST_SECONDS

    @property
    def goes_on(self) -> bool:
        """Whether the service should not be asked yet."""
        return self._clock() < self._until

    @property
    def left(self) -> float:
        """Seconds until it may be asked."""
        return max(0.0, self._until - self._clock())

    def failed(self, error: ServiceError) -> None:
        """The service refused, did not answer, or with something else.

        Of refusals, 401, 403 and 429 are about the caller, and 502 to 504 about a service that is starting; any other makes a
        pause only if the answer names one.
        """
        after = error.after_seconds if isinstance(error, ServiceRefusedError) else None
        if isinstance(error, ServiceRefusedError) and after is None and error.status not in _PAUSED:
            return
        pause = self._next if after is None else max(self._next, min(LONGEST_RETRY_AFTER, after))
        self._until = self._clock() + pause * (1.0 + self._jitter())
        self._next = min(_LONGEST_SECONDS, 2 * self._next)

    def answered(self) -> None:
        """The service took what it was told."""
        self._until, self._next = float("-inf"), _FIRST_SECONDS

    def hurry(self) -> None:
        """The process is about to end: the service is asked once more at once."""
        self._until = float("-inf")


_TIMEOUT_SECONDS = 5.0
_LENDING_SECONDS = 30.0  # the service asks AWS meanwhile
_LONGEST_PAUSE = 30.0
_MAX_ANSWER = 4 * 1024 * 1024
_MAX_ANSWER_MEMORY = 64 * 1024 * 1024
_MEND = "check the URL, and that 'watchstep serve' runs there; recording goes on without it"


class ServiceClient:
    """A few requests for one project, each sent once: whoever asks also waits between two tries, and may be told to end meanwhile.

    Each takes five seconds at most, its answer's last byte included (30 for credentials); never called on the training thread.
    """

    def __init__(
        self,
        address: ServiceAddress | None,
        project: str,
        locate: Callable[[], ServiceAddress | None] | None = None,
    ) -> None:
        """Nothing is asked yet.

        Args:
            address: of the service; None where it is not known yet.
            project: whose runs.
            locate: says where the service answers now, when it does not at its address.
        """
        # Announcements come from a thread of their own, on which the program has no span.
        self._parent = trace_context.current_span()
        self.pause_seconds = 0.0
        """What the last answer asked for between two announcements; the service lags where it is not 0."""
        self._locate = locate
        self._runs = f"/v1/projects/{segment(project)}/runs"
        self._transport: Transport | None = None
        if address is not None:
            self.move(address)

    @property
    def is_located(self) -> bool:
        """Whether there is an address to ask."""
        return self._transport is not None

    def move(self, address: ServiceAddress) -> bool:
        """Ask at another address from now on; whether it is another."""
        if self._transport is not None and self._transport.address == address:
            return False
        self._transport = Transport(address, _TIMEOUT_SECONDS, bounds_request=True, tries=1)
        return True

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
        named = f"{segment(run)}/attempts/{segment(attempt)}"
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
        answer = self._post(f"{self._runs}/{segment(run)}/announcements", body, {trace_context.HEADER: trace})
        try:
            control = ControlDocument.from_data(answer["control"])
        except (KeyError, FormatError) as error:
            raise ServiceError(f"{self._name}: no control document in its answer", _MEND) from error
        self.pause_seconds = _pause(answer.get("pause_seconds"))
        return control

    @property
    def _name(self) -> str:
        return f"service {self._transport.address.url}" if self._transport else "service"

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        seconds = _TIMEOUT_SECONDS if seconds is None else seconds
        try:
            return self._posted(path, body, headers, seconds)
        except (ServiceRefusedError, UnreachableError) as error:
            if (isinstance(error, ServiceRefusedError) and not error.is_denial) or not self._has_moved():
                raise
        return self._posted(path, body, headers, seconds)

    def _posted(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None, seconds: float
    ) -> dict[str, Any]:
        if self._transport is None:
            raise UnreachableError("service: none is known yet", _MEND)
        content, _ = self._transport.fetch(
            "POST", path, None, body, headers, seconds=seconds, repeatable=True, most=_MAX_ANSWER
        )
        try:
            data = parse_json(content, _MAX_ANSWER_MEMORY)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self._name}: its answer is no JSON ({error})", _MEND) from error
        if not isinstance(data, dict):
            raise ServiceError(f"{self._name}: an answer of another form", _MEND)
        return data

    def _has_moved(self) -> bool:
        """Whether the service answers elsewhere, or with another token, since it was started again."""
        address = self._locate() if self._locate is not None else None
        return address is not None and self.move(address)


def _pause(asked: Any) -> float:
    """Seconds, where an answer holds a number of them; no answer can hold a recorder up for long."""
    return float(min(asked, _LONGEST_PAUSE)) if type(asked) in (int, float) and asked > 0 else 0.0
