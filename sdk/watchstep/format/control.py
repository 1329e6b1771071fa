"""The control document of a run, and the workers' answers to a stop at a common step.

The service writes the document, as ``control.json`` and in the response to every announcement. Processes read it outside the
training thread. A higher version replaces a lower one. A worker's answer is an object with the complete content
in its key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from watchstep.errors import FormatError
from watchstep.format.capture_needs import MAX_NEEDS, CaptureNeed, needs_from_data
from watchstep.format.documents import parse_json
from watchstep.format.layout import STOPS, check_name
from watchstep.store.store import Store

MAX_BYTES = 1024 * 1024
_MAX_MEMORY = 32 * 1024 * 1024
MAX_SNAPSHOTS = 32
"""Maximum number of snapshot requests in a document. The newest are kept."""

RULE_REASON = re.compile(
    r"(?:rule )?(?P<rule>\S{1,128}): bad from step (?P<step>\d{1,18}): (?P<message>.*)", re.DOTALL
)
"""The reason of a stop by a rule, as the service and a guard write it."""


@dataclass(frozen=True)
class StopRequest:
    """A request to every worker of an attempt to stop at one step.

    Attributes:
        attempt: The attempt.
        step: Each worker stops after this step, or after its current step if it is past it.
        reason: One sentence for users.
        event: Id of the event that caused it.
        agreed: Whether all workers know the step. Until then each worker answers (`StopAnswer`) and does not pass the step.
    """

    attempt: str
    step: int
    reason: str
    event: str = ""
    agreed: bool = True


@dataclass(frozen=True)
class SnapshotRequest:
    """A request for the complete tensors of a step, or of the next step if that one has passed.

    Attributes:
        id: Id of the request. Each is fulfilled once.
        step: The requested step.
        attempt: The attempt; empty for any.
    """

    id: str
    step: int
    attempt: str = ""


@dataclass(frozen=True)
class ControlDocument:
    """Requests to a run.

    Attributes:
        version: Incremented with each change; 0 for a document without requests.
        stop: The stop request of an attempt.
        snapshots: Snapshot requests.
        cadence: Number of steps between measurements by collection; overrides the worker's own.
        tombstone: Reason why no new attempt may start; empty if new attempts may start.
        admitted: The attempt that may start despite the tombstone, until it is stopped itself; empty for no attempt.
        needs: What the rules of the run need the workers to capture.
    """

    version: int = 0
    stop: StopRequest | None = None
    snapshots: tuple[SnapshotRequest, ...] = ()
    cadence: tuple[tuple[str, int], ...] = ()
    tombstone: str = ""
    admitted: str = ""
    needs: tuple[CaptureNeed, ...] = ()

    def with_stop(self, stop: StopRequest) -> ControlDocument:
        """Return the next version, which stops this attempt and allows no other to start."""
        return replace(self, version=self.version + 1, stop=stop, tombstone=stop.reason, admitted="")

    def with_snapshot(self, request: SnapshotRequest) -> ControlDocument:
        """Return the next version with this request, or the same document if it already has the request."""
        if any(earlier.id == request.id for earlier in self.snapshots):
            return self
        snapshots = (*self.snapshots, request)[-MAX_SNAPSHOTS:]
        return replace(self, version=self.version + 1, snapshots=snapshots)

    def requests_of(self, attempt: str) -> tuple[SnapshotRequest, ...]:
        """Return the snapshot requests for this attempt."""
        return tuple(request for request in self.snapshots if request.attempt in ("", attempt))

    def with_cadence(self, cadence: Mapping[str, int]) -> ControlDocument:
        """Return the next version with these numbers of steps between measurements. Workers choose those of other collections."""
        chosen = tuple(sorted(cadence.items()))
        return self if chosen == self.cadence else replace(self, version=self.version + 1, cadence=chosen)

    def with_needs(self, needs: Sequence[CaptureNeed]) -> ControlDocument:
        """Return the next version with the needs of the run's rules, or the same document if it already has them."""
        chosen = tuple(needs[:MAX_NEEDS])
        return self if chosen == self.needs else replace(self, version=self.version + 1, needs=chosen)

    def without_tombstone(self) -> ControlDocument:
        """Return the next version, which allows new attempts. A stop request of an attempt remains."""
        if not self.tombstone:
            return self
        return replace(self, version=self.version + 1, tombstone="", admitted="")

    def with_admitted(self, attempt: str) -> ControlDocument:
        """Return the next version, which allows this attempt, and its restarts by a cluster, to start, but no others."""
        if not self.tombstone or self.admitted == attempt:
            return self
        return replace(self, version=self.version + 1, admitted=attempt)

    def admits(self, attempt: str) -> bool:
        """Return whether an attempt may start."""
        if not self.tombstone:
            return True
        return bool(self.admitted) and (attempt == self.admitted or attempt.startswith(f"{self.admitted}-r"))

    def as_data(self) -> dict[str, Any]:
        """Return a form that can be encoded as JSON."""
        return asdict(self)

    def encode(self) -> bytes:
        """Encode as the content of ``control.json``."""
        return json.dumps(self.as_data(), indent=1).encode()

    @classmethod
    def from_data(cls, data: Any) -> ControlDocument:
        """Read the result of `as_data`. Only the newest `MAX_SNAPSHOTS` requests are read.

        Raises:
            FormatError: The data has another form.
        """
        try:
            stop = data.get("stop")
            return cls(
                version=_whole(data["version"]),
                stop=StopRequest(
                    str(stop["attempt"]),
                    _whole(stop["step"]),
                    str(stop["reason"]),
                    str(stop.get("event", "")),
                    stop.get("agreed", True) is not False,
                )
                if stop
                else None,
                snapshots=tuple(
                    SnapshotRequest(str(s["id"]), _whole(s["step"]), str(s.get("attempt", "")))
                    for s in data.get("snapshots", ())[-MAX_SNAPSHOTS:]
                ),
                cadence=tuple((str(name), _whole(every, 1)) for name, every in data.get("cadence", ())),
                tombstone=str(data.get("tombstone", "")),
                admitted=str(data.get("admitted", "")),
                needs=needs_from_data(data.get("needs", ())),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"control document: {error!r}", "let the service rewrite it") from error

    @classmethod
    def decode(cls, data: bytes) -> ControlDocument:
        """Decode the content of ``control.json``.

        Raises:
            FormatError: The bytes are not a control document.
        """
        try:
            return cls.from_data(parse_json(data, _MAX_MEMORY))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"control document: {error}", "let the service rewrite it") from error


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{str(value)[:80]!r} is not a whole number of at least {least}")
    return value


AnswerState = Literal["ready", "passed", "left", "refuses"]
"""
======= ====================================================================================================
ready   the worker has not finished the step, and does not go beyond it without another request
passed  the worker had finished the step before it received the request
left    the worker was ready, has waited at the step for its maximum time, and continues
refuses the worker's program does not permit such a stop
======= ====================================================================================================
"""

_KEY = re.compile(
    rf"{STOPS}[^/]+/(?P<requested>\d{{1,19}})/(?P<worker>\d{{1,9}})-(?P<state>ready|passed|left|refuses)-(?P<at>\d{{1,19}})\.json"
)


@dataclass(frozen=True)
class StopAnswer:
    """A worker's answer.

    Attributes:
        worker: Rank of the worker.
        requested_step: The requested step.
        state: See `AnswerState`.
        at: The last step that it had finished; 0 before the first.
    """

    worker: int
    requested_step: int
    state: AnswerState
    at: int

    def key(self, attempt: str) -> str:
        """Return the key of its object, relative to the run."""
        return f"{_prefix(attempt, self.requested_step)}{self.worker}-{self.state}-{self.at}.json"

    def encode(self) -> bytes:
        """Encode as the object's content. Readers need only the key."""
        return json.dumps(asdict(self)).encode()


def find_answers(run_store: Store, attempt: str, requested_step: int) -> list[StopAnswer]:
    """Return the answers of an attempt's workers for one step. This lists one prefix.

    Raises:
        StoreError: The store is unreachable.
    """
    matches = (_KEY.fullmatch(entry.key) for entry in run_store.entries(_prefix(attempt, requested_step)))
    return [
        StopAnswer(
            int(match["worker"]),
            int(match["requested"]),
            cast("AnswerState", match["state"]),
            int(match["at"]),
        )
        for match in matches
        if match is not None
    ]


def _prefix(attempt: str, requested_step: int) -> str:
    return f"{STOPS}{check_name('attempt', attempt)}/{requested_step}/"
