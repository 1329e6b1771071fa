"""Background reports to the service: the registration that ``watchstep run`` could not make, and announcements of segments.

What ``watchstep run`` could not do when it started the program, and the recorder does in the background.

The launch hands it over by the environment: a registration that no service took (rules, the job), rules that no store took,
and whether a tombstone was looked for. One thread of the first rank registers, and ends when that is done::

    waiting ──service found, 2xx──▶ done
       ▲ │
       └─┴─no service, no answer, 401, 403, 429, 5xx: again after a pause
         └─any other refusal: given up, in health

Telling the service of segments, on a thread of its own: neither writing nor training waits for an answer.

One request names one segment. The answers hold the control document, which is heard here first. What the service is not told of it finds
by listing the store, for the number of a later segment shows the gap: while it is slow, the newest is enough.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.service.client import ServiceClient, ServicePause
from watchstep.capture.service.location import FoundService, ServiceLocation
from watchstep.capture.stop import ControlReader
from watchstep.errors import ConfigError, FormatError, ServiceError
from watchstep.format.control import ControlDocument
from watchstep.format.layout import SegmentKey
from watchstep.platform.process import join_until
from watchstep.platform.transport import ServiceAddress, ServiceRefusedError, UnreachableError

LAUNCH = "WATCHSTEP_LAUNCH"
_MOST_BYTES = 100_000  # Linux takes 128 KiB for a variable
_JOIN_SECONDS = 1.0
_JOB_REFUSED = {HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY}
"""What a service answers where it takes the run and not its job."""


@dataclass(frozen=True)
class LaunchState:
    """What a launch hands over to the recorder.

    Attributes:
        location: where a service of this machine may be found; None for one that was named, and where nothing is left to do.
        run: of the registration; empty where there is none left.
        attempt: of the registration: the one that the job is.
        job: the job to bind; None where the token of the launch may not.
        rules: for the registration, and for the run's document where the store did not take it.
        verified: whether a tombstone was looked for.
        warned: the user was told that the service does not answer, or refuses the token.
    """

    location: ServiceLocation | None = None
    run: str = ""
    attempt: str = ""
    job: dict[str, Any] | None = None
    rules: tuple[dict[str, Any], ...] = ()
    verified: bool = True
    warned: bool = False

    def encode(self) -> str:
        """As the value of an environment variable.

        Raises:
            FormatError: it is too large for one.
        """
        text = base64.b64encode(zlib.compress(json.dumps(asdict(self), default=str).encode())).decode()
        if len(text) > _MOST_BYTES:
            raise FormatError(
                f"rules: {len(text)} bytes, over the {_MOST_BYTES} that can wait for a service",
                "start the program again when the service answers, or use fewer rules",
            )
        return text

    @classmethod
    def decode(cls, text: str) -> LaunchState:
        """Read what `encode` gave.

        Raises:
            FormatError: it is something else.
        """
        try:
            data = json.loads(zlib.decompress(base64.b64decode(text)))
            location = data.pop("location")
            if location is not None:
                location = ServiceLocation(location["url"], tuple(location["homes"]), location["store_url"])
            return replace(cls(**data), location=location, rules=tuple(data["rules"]))
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise FormatError(f"{LAUNCH}: not of 'watchstep run' ({error!r})", "unset it") from error

    @classmethod
    def from_environment(
        cls, health: RecorderHealth, variables: Mapping[str, str] = os.environ
    ) -> LaunchState:
        """What the launch of this program left; nothing where there was none. A variable of another form is a fault in health.

        Of what the launch has warned, nothing is logged again.
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
        """Where a service of this machine answers now, for the recorder; None where none is found, or one was named.

        A note of a service that is damaged, or another user's, is a fault in health.
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


class RunRegistration:
    """Registers a run in the background, for as long as its recording goes on."""

    def __init__(
        self,
        state: LaunchState,
        project: str,
        client: ServiceClient,
        control: ControlReader,
        health: RecorderHealth,
    ) -> None:
        """Nothing is asked yet.

        Args:
            state: what is to be registered.
            project: of the run.
            client: what announces later; it is told where the service is.
            control: told of the document in the answer.
            health: says what is still to be done, and what failed.
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
        """Register until it is done, or `close`."""
        self._health.note("registration", "the service does not know this run's job and rules yet")
        self._thread.start()

    def close(self) -> None:
        """Ask no more. Waits for nothing."""
        self._ended.set()

    def join(self, is_late: Callable[[], bool]) -> None:
        """Wait for what is being asked, until it is late."""
        join_until(self._thread, is_late, _JOIN_SECONDS)

    def _work(self) -> None:
        pause = ServicePause()
        while not self._ended.wait(pause.left):
            try:
                service = self._location.find()
                if service is None:
                    pause.failed(
                        UnreachableError("service: none watches the store", "start 'watchstep serve'")
                    )
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
        answer = register(service.operator, self._project, state.run, state.attempt, state.rules, state.job)
        control = control_in(answer.data)
        self._client.move(service.recorder)
        self._health.withdraw("registration")
        if answer.job_refusal is not None:
            self._health.fault("registration", answer.job_refusal)
        self._control.receive(control, state.attempt)


@dataclass(frozen=True)
class Registered:
    """A service's answer to a registration.

    Attributes:
        data: the answer.
        job_refusal: why the job was not bound; None where it was, or where there is none.
    """

    data: dict[str, Any]
    job_refusal: ServiceRefusedError | None = None


def register(
    operator: ServiceAddress,
    project: str,
    run: str,
    attempt: str,
    rules: tuple[dict[str, Any], ...],
    job: dict[str, Any] | None,
) -> Registered:
    """Make a run known with its rules, and bind its job; without the job where the token may only record. Safe to repeat.

    Raises:
        RefusedError: the service refuses.
        UnreachableError: it does not answer.
    """
    client = ServiceClient(operator, project)
    body = {"run": run, "attempt": attempt, "rules": list(rules)}
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
    """The control document in the answer to a registration.

    Raises:
        ServiceError: there is none.
    """
    try:
        return ControlDocument.from_data(answer["control"])
    except (KeyError, FormatError) as error:
        raise ServiceError(
            "service: no control document in its answer", "see that it is of this version"
        ) from error


_MOST_WAITING = 64
_SLOW_SECONDS = 1.0
"""After an answer that took so long, of the segments that wait only the newest is announced."""
_LOCATING_SECONDS = 1.0


class Announcer:
    """Announces segments in order, with pauses after failures. Thread-safe; the thread starts with the first segment."""

    def __init__(
        self,
        service: ServiceClient,
        registration: Mapping[str, object],
        control: ControlReader,
        health: RecorderHealth,
        is_urgent: Callable[[], bool],
    ) -> None:
        """Nothing is announced yet.

        Args:
            service: where to announce.
            registration: ``run`` and ``rules`` to register the run with, once and before anything else.
            control: told of the document in each answer.
            health: for faults; told to the service with each segment.
            is_urgent: whether the service shall evaluate before other runs.
        """
        self._service = service
        self._registration = registration
        self._control = control
        self._health = health
        self._is_urgent = is_urgent
        self._registered = False
        self._pause = ServicePause()
        self._waiting: deque[SegmentKey] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._cost: Callable[[float], None] | None = None

    @property
    def is_left_alone(self) -> bool:
        """Whether the service has refused, and is not to be asked yet."""
        return self._pause.goes_on

    def report_cost(self, report: Callable[[float], None]) -> None:
        """Tell of the processor time of each request, in seconds."""
        self._cost = report

    def announce(self, key: SegmentKey) -> None:
        """Have the service told of a segment. Never waits; of too many the oldest are left out."""
        with self._changed:
            self._waiting.append(key)
            self._skip(_MOST_WAITING)
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._work, name="watchstep-announcer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def hurry(self) -> None:
        """The process is about to end: ask once more at once."""
        with self._changed:
            self._pause.hurry()
            self._changed.notify_all()

    def close(self, is_late: Callable[[], bool]) -> None:
        """Announce what waits, and end where the service refuses or does not answer; wait for that until it is late."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        join_until(self._thread, is_late)

    def _work(self) -> None:
        while (key := self._next()) is not None:
            began, cpu = time.monotonic(), time.thread_time()
            done = self._announced(key)
            with self._changed:
                if done and self._waiting and self._waiting[0] == key:
                    self._waiting.popleft()
                if time.monotonic() - began >= _SLOW_SECONDS:
                    self._skip(1)
            if self._cost is not None:
                self._cost(time.thread_time() - cpu)

    def _next(self) -> SegmentKey | None:
        """Wait for a segment that can be announced now; None where it is time to end."""
        with self._changed:
            while not (self._waiting and self._service.is_located and not self._pause.goes_on):
                if self._closing:
                    return None
                pause = self._pause.left or _LOCATING_SECONDS
                self._changed.wait(pause if self._waiting else None)
            return self._waiting[0]

    def _skip(self, size: int) -> None:
        while len(self._waiting) > size:
            self._waiting.popleft()
            self._health.count("skipped_announcements")

    def _announced(self, key: SegmentKey) -> bool:
        """Whether the service needs to hear of a segment no more: it was told, or would refuse it again."""
        try:
            self._announce(key)
        except ServiceError as error:
            self._health.fault("service", error)
            self._pause.failed(error)
            return isinstance(error, ServiceRefusedError) and error.is_final and self._registered
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the program
            self._health.fault("service", error)
            self._pause.failed(UnreachableError(str(error), ""))
            return False
        return True

    def _announce(self, key: SegmentKey) -> None:
        if not self._registered:
            self._service.register({**self._registration, "attempt": key.writer.attempt})
            self._registered = True
        run = str(self._registration["run"])
        control = self._service.announce(run, key, self._health.as_data(), urgent=self._is_urgent())
        self._pause.answered()
        self._health.unexpect("service")
        self._control.accept(control)
