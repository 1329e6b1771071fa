"""Background reports to the service: a registration that ``watchstep run`` could not make, and announcements of segments.

The launch passes a pending registration in the environment: a registration that no service accepted (rules, the job), rules that no
store accepted, and whether a tombstone was checked. One thread of the first rank registers, and ends when that is done::

    waiting ──service found, 2xx──▶ done
       ▲ │
       └─┴─no service, no answer, 401, 403, 429, 5xx: retry after a pause
         └─any other refusal: given up, in health

Segments are announced by a separate thread, so that neither writing nor training waits for an answer. One request names all segments
that were written shortly after each other or during the previous request, for all ranks of a node if one of them writes for the others.
After something urgent it is sent at once. Answers contain the control document. The service discovers unannounced segments by listing
the store, because the number of a later segment shows the gap.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Any

from watchstep.capture.health import EVALUATION, RecorderHealth
from watchstep.capture.identity import ATTEMPT
from watchstep.capture.service.client import MOST_SEGMENTS, ServiceClient, ServicePause
from watchstep.capture.service.location import FoundService, ServiceLocation
from watchstep.capture.stop import ControlReader
from watchstep.errors import ConfigError, FormatError, ServiceError
from watchstep.format.control import ControlDocument
from watchstep.format.layout import SegmentKey
from watchstep.platform.process import join_until
from watchstep.platform.transport import ServiceAddress, ServiceRefusedError, UnreachableError

LAUNCH = "WATCHSTEP_LAUNCH"
_MAX_BYTES = 100_000  # Linux limits a variable to 128 KiB
_JOIN_SECONDS = 1.0
_SEARCH_SECONDS = 2.0
"""Pause between two searches for a service on this machine."""
_JOB_REFUSED = {HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY}
"""Answers of a service that accepts the run but not its job."""


@dataclass(frozen=True)
class LaunchState:
    """State that a launch passes to the recorder.

    Attributes:
        location: where to look for a service on this machine; None for a named one, and if nothing is left to do.
        run: the run to register; empty if none is left.
        attempt: the attempt of the registration, which is the job's.
        job: the job to bind; None if the launch's token may not bind it.
        rules: rules for the registration, and for the run's document if the store did not accept it.
        verified: whether a tombstone was checked.
        warned: the user was warned that the service does not answer, or refuses the token.
    """

    location: ServiceLocation | None = None
    run: str = ""
    attempt: str = ""
    job: dict[str, Any] | None = None
    rules: tuple[dict[str, Any], ...] = ()
    verified: bool = True
    warned: bool = False

    def encode(self) -> str:
        """Encode as the value of an environment variable.

        Raises:
            FormatError: it is too large.
        """
        text = base64.b64encode(zlib.compress(json.dumps(asdict(self), default=str).encode())).decode()
        if len(text) > _MAX_BYTES:
            raise FormatError(
                f"the rules have {len(text)} bytes, more than the {_MAX_BYTES} that can wait for a service",
                "start the program again when the service answers, or use fewer rules",
            )
        return text

    @classmethod
    def decode(cls, text: str) -> LaunchState:
        """Parse the result of `encode`.

        Raises:
            FormatError: the text is invalid.
        """
        try:
            data = json.loads(zlib.decompress(base64.b64decode(text)))
            location = data.pop("location")
            if location is not None:
                location = ServiceLocation(location["url"], tuple(location["homes"]), location["store_url"])
            return replace(cls(**data), location=location, rules=tuple(data["rules"]))
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise FormatError(f"{LAUNCH} was not set by 'watchstep run' ({error!r})", "unset it") from error

    @classmethod
    def from_environment(
        cls, health: RecorderHealth, variables: Mapping[str, str] = os.environ
    ) -> LaunchState:
        """Return the state that the launch of this program passed; empty without one. An invalid variable is a fault in health.

        Faults of which the launch has warned are not logged again.
        """
        text = variables.get(LAUNCH, "")
        if not text:
            return cls()
        try:
            state = cls.decode(text)
        except FormatError as error:
            health.fault("launch", error)
            return cls()
        if state.warned:
            for where in ("registration", "service"):
                health.expect(where, _is_outage)
        return state

    def recorder_address(self, health: RecorderHealth) -> ServiceAddress | None:
        """Return the current recorder address of a service on this machine; None if there is none, or one was named.

        An invalid note of a service, or another user's, is a fault in health.
        """
        try:
            service = self.location.find() if self.location is not None and not self.location.url else None
        except ConfigError as error:
            health.fault("service note", error)
            return None
        return service.recorder if service is not None else None


def _is_outage(error: BaseException) -> bool:
    return isinstance(error, UnreachableError) or (
        isinstance(error, ServiceRefusedError) and not error.is_final
    )


_stated: set[str] = set()
"""Runs of which this process has stated that the service evaluates them."""


class RunRegistration:
    """Registers a run in the background while its recording runs."""

    def __init__(
        self,
        state: LaunchState,
        project: str,
        client: ServiceClient,
        control: ControlReader,
        health: RecorderHealth,
    ) -> None:
        """Create the registration without starting it.

        Args:
            state: what to register.
            project: the run's project.
            client: client for announcements, which receives the service's address.
            control: receives the control document of the answer.
            health: reports what is pending, and failures.
        """
        assert state.location is not None
        self._location = state.location
        self._state = state
        self._project = project
        self._client = client
        self._control = control
        self._health = health
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchstep-register", daemon=True)

    def start(self) -> None:
        """Register until it succeeds, or until `close`."""
        self._health.note("registration", "the service does not know this run's job and rules yet")
        self._thread.start()

    def close(self) -> None:
        """Stop registering. Does not block."""
        self._ended.set()

    def join(self, is_late: Callable[[], bool]) -> None:
        """Wait for a request in progress, until ``is_late`` returns True."""
        join_until(self._thread, is_late, _JOIN_SECONDS)

    def _work(self) -> None:
        pause = ServicePause()
        while not self._ended.wait(pause.remaining):
            try:
                service = self._location.find()
                if service is None:
                    # A search is two small files. The service may be in the folder of a store that is back now.
                    self._ended.wait(_SEARCH_SECONDS)
                    continue
                self._register(service)
            except ServiceRefusedError as error:
                self._health.fault("registration", error)
                if error.is_final:
                    self._health.note("registration", f"given up: {error.what}"[:300])
                    return
                pause.failed(error)
            except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the program
                self._health.fault("registration", error)
                pause.failed(UnreachableError(str(error), ""))
            else:
                return

    def _register(self, service: FoundService) -> None:
        state = self._state
        answer = register(
            service.operator,
            (self._project, state.run, state.attempt),
            self._location.store_url,
            state.rules,
            state.job,
        )
        control = control_in(answer.data)
        self._client.move(service.recorder)
        self._client.receive_store(answer.data)
        self._health.withdraw("registration")
        if answer.job_refusal is not None:
            self._health.fault("registration", answer.job_refusal)
        self._control.receive(control, state.attempt)


@dataclass(frozen=True)
class Registered:
    """A service's answer to a registration.

    Attributes:
        data: the answer.
        job_refusal: why the job was not bound; None if it was, or if there is none.
    """

    data: dict[str, Any]
    job_refusal: ServiceRefusedError | None = None


def register(
    operator: ServiceAddress,
    names: tuple[str, str, str],
    store_url: str,
    rules: tuple[dict[str, Any], ...],
    job: dict[str, Any] | None,
) -> Registered:
    """Register a run with its rules, and bind its job; without the job if the token may only record. Safe to repeat.

    Args:
        operator: the service.
        names: project, run and attempt.
        store_url: URL of the store that the run is recorded to.
        rules: the rules.
        job: the job; None if there is none.

    Raises:
        ServiceRefusedError: the service refuses.
        UnreachableError: it does not answer.
    """
    project, run, attempt = names
    client = ServiceClient(operator, project)
    body = {"run": run, "attempt": attempt, "rules": list(rules), "store": store_url}
    if job is None:
        return Registered(client.register(body))
    try:
        return Registered(client.register({**body, "job": job}))
    except ServiceRefusedError as error:
        if error.status not in _JOB_REFUSED:
            raise
        # This raises for a token that may not even record, and for rules that are not valid.
        return Registered(client.register(body), error)


def control_in(answer: dict[str, Any]) -> ControlDocument:
    """Return the control document in the answer to a registration.

    Raises:
        ServiceError: there is none.
    """
    try:
        return ControlDocument.from_data(answer["control"])
    except (KeyError, FormatError) as error:
        raise ServiceError(
            "the service's answer has no control document", "check that the service has the same version"
        ) from error


_GATHER_SECONDS = 0.05
"""How long a segment waits for others to be announced with it. Much less than evaluations take, and more than a store needs for several."""

_LOCATING_SECONDS = 1.0
_QUIET_SECONDS = 30.0
_LAST_SECONDS = 1.0


class Announcer:
    """Announces segments in order, several at a time, with pauses after failures.

    Thread-safe; the thread starts with the first segment.
    """

    def __init__(
        self,
        service: ServiceClient,
        registration: Mapping[str, object],
        control: ControlReader,
        health: RecorderHealth,
        is_urgent: Callable[[], bool],
    ) -> None:
        """Create the announcer without announcements.

        Args:
            service: client of the service.
            registration: ``run``, ``rules`` and ``store`` to register the run with, once and before anything else.
            control: receives the control document of each answer.
            health: counts faults, and is reported to the service with each segment.
            is_urgent: whether the service should evaluate the run before others.
        """
        self._service = service
        self._registration = registration
        self._control = control
        self._health = health
        self._is_urgent = is_urgent
        self._registered = False
        self._pause = ServicePause()
        self._waiting: deque[SegmentKey] = deque()
        self._gather_until = 0.0
        self._fails = False
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._cost: Callable[[float], None] | None = None
        self._announced_at: float | None = None
        self._is_evaluated = False

    @property
    def is_paused(self) -> bool:
        """Whether the service has refused, and must not be contacted yet."""
        return self._pause.is_active

    def report_cost(self, report: Callable[[float], None]) -> None:
        """Set a callback for the processor seconds of each request."""
        self._cost = report

    def announce(self, key: SegmentKey) -> None:
        """Queue the announcement of a segment. Never blocks; if there are too many, the oldest are skipped."""
        with self._changed:
            if not self._waiting:
                self._gather_until = time.monotonic() + _GATHER_SECONDS
            self._waiting.append(key)
            self._skip(MOST_SEGMENTS)
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._work, name="watchstep-announcer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def hurry(self) -> None:
        """Retry at once, because the process is about to end."""
        with self._changed:
            self._pause.hurry()
            self._changed.notify_all()

    def close(self, is_late: Callable[[], bool]) -> None:
        """Announce waiting segments until the service refuses or does not answer, or ``is_late`` returns True.

        A service that did not answer the last request has one second to answer another.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        join_until(self._thread, is_late, _LAST_SECONDS if self._fails else float("inf"))

    def _work(self) -> None:
        while keys := self._next():
            cpu = time.thread_time()
            if self._announced(keys):
                self._remove(keys)
            if self._cost is not None:
                self._cost(time.thread_time() - cpu)

    def _next(self) -> tuple[SegmentKey, ...]:
        """Wait for segments of one attempt that can be announced now; none if it is time to end."""
        with self._changed:
            while True:
                is_possible = self._service.is_located and not self._pause.is_active
                if self._waiting and is_possible:
                    remaining = self._gather_until - time.monotonic()
                    if remaining <= 0 or self._closing or self._is_urgent():
                        return self._first()
                    self._changed.wait(remaining)
                elif self._closing:
                    return ()
                else:
                    pause = self._pause.remaining or _LOCATING_SECONDS
                    self._changed.wait(pause if self._waiting else None)

    def _first(self) -> tuple[SegmentKey, ...]:
        attempt = self._waiting[0].writer.attempt
        return tuple(itertools.takewhile(lambda key: key.writer.attempt == attempt, self._waiting))

    def _remove(self, keys: tuple[SegmentKey, ...]) -> None:
        with self._changed:
            for key in keys:
                if self._waiting and self._waiting[0] == key:  # else it was skipped meanwhile
                    self._waiting.popleft()

    def _skip(self, size: int) -> None:
        while len(self._waiting) > size:
            self._waiting.popleft()
            self._health.count("skipped_announcements")

    def _announced(self, keys: tuple[SegmentKey, ...]) -> bool:
        """Whether segments need no further announcement: they were announced, or would be refused again."""
        try:
            self._announce(keys)
        except ServiceError as error:
            self._fails = True
            self._health.fault("service", error)
            dropped = isinstance(error, ServiceRefusedError) and error.is_final and self._registered
            self._pause.failed(error, repeats=not dropped)
            return dropped
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the program
            self._health.fault("service", error)
            self._pause.failed(UnreachableError(str(error), ""))
            return False
        return True

    def _announce(self, keys: tuple[SegmentKey, ...]) -> None:
        if not self._registered:
            self._service.register({**self._registration, "attempt": keys[0].writer.attempt})
            self._registered = True
        run = str(self._registration["run"])
        control = self._service.announce(run, keys, self._health.as_data(), urgent=self._is_urgent())
        self._pause.answered()
        self._fails = False
        self._health.unexpect("service")
        self._control.accept(control)
        self._report_evaluation(run)

    def _report_evaluation(self, run: str) -> None:
        """State once that the service evaluates the run, and once that it does not, although it accepts its announcements."""
        if self._is_evaluated:
            return
        now = time.monotonic()
        if self._announced_at is None:
            self._announced_at = now
        if self._service.is_evaluated:
            self._is_evaluated = True
            self._health.withdraw(EVALUATION)
            # `watchstep run` stated that it was not yet. A process that trains several models one after another states it once.
            if os.environ.get(ATTEMPT) and run not in _stated:
                _stated.add(run)
                sys.stderr.write(f"watchstep: run {run}: the service evaluates it\n")
        elif now - self._announced_at >= _QUIET_SECONDS:
            self._health.note(
                EVALUATION,
                f"the service has evaluated nothing of run {run} for {_QUIET_SECONDS:.0f} s, and does not stop it;"
                " see 'watchstep runs show' and the log of the service",
            )
