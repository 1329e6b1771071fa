"""The control document of a run, and the answers of workers to a stop that they shall agree on.

The service writes the document, as ``control.json`` and in the answer to every announcement. Processes read it off the
training thread. A higher version replaces a lower one. An answer of a worker is an object whose key holds everything
that it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from watchstep.errors import FormatError
from watchstep.format.documents import parse_json
from watchstep.format.layout import STOPS, check_name
from watchstep.store.store import Store

MAX_BYTES = 1024 * 1024
_MAX_MEMORY = 32 * 1024 * 1024
MOST_SNAPSHOTS = 32
"""Snapshot requests that a document keeps: the newest."""


@dataclass(frozen=True)
class StopRequest:
    """Ask every worker of an attempt to stop at one step.

    Attributes:
        attempt: which attempt.
        step: each worker stops when it has finished this step, or a later one if it is past it.
        reason: one sentence for people.
        event: id of the event that caused it.
        agreed: whether all workers know of the step. Until they do, each answers (`StopAnswer`) and passes the step by no means.
    """

    attempt: str
    step: int
    reason: str
    event: str = ""
    agreed: bool = True


@dataclass(frozen=True)
class SnapshotRequest:
    """Ask for the full tensors of a step, or of the next one if it has passed.

    Attributes:
        id: each is answered once.
        step: the step wanted.
        attempt: which attempt; any where it is empty.
    """

    id: str
    step: int
    attempt: str = ""


@dataclass(frozen=True)
class ControlDocument:
    """What is asked of a run.

    Attributes:
        version: grows by one with each change; 0 asks nothing.
        stop: the stop, keyed by its attempt.
        snapshots: snapshot requests.
        cadence: collection → measure every so many steps; replaces the worker's own choice.
        tombstone: reason why no new attempt may start; empty where one may.
        admitted: the one attempt that may start all the same, until it is stopped itself; empty for none.
    """

    version: int = 0
    stop: StopRequest | None = None
    snapshots: tuple[SnapshotRequest, ...] = ()
    cadence: tuple[tuple[str, int], ...] = ()
    tombstone: str = ""
    admitted: str = ""

    def with_stop(self, stop: StopRequest) -> ControlDocument:
        """The next version: this attempt stops, and no other starts."""
        return replace(self, version=self.version + 1, stop=stop, tombstone=stop.reason, admitted="")

    def with_snapshot(self, request: SnapshotRequest) -> ControlDocument:
        """The next version: these tensors are wanted as well. The same document where they are asked for already."""
        if any(asked.id == request.id for asked in self.snapshots):
            return self
        asked = (*self.snapshots, request)[-MOST_SNAPSHOTS:]
        return replace(self, version=self.version + 1, snapshots=asked)

    def asked_of(self, attempt: str) -> tuple[SnapshotRequest, ...]:
        """The snapshots that this attempt is asked for."""
        return tuple(asked for asked in self.snapshots if asked.attempt in ("", attempt))

    def with_cadence(self, cadence: Mapping[str, int]) -> ControlDocument:
        """The next version: collections are measured every so many steps; those left out as the workers choose."""
        chosen = tuple(sorted(cadence.items()))
        return self if chosen == self.cadence else replace(self, version=self.version + 1, cadence=chosen)

    def without_tombstone(self) -> ControlDocument:
        """The next version: new attempts may start. A stop stays one of its own attempt."""
        if not self.tombstone:
            return self
        return replace(self, version=self.version + 1, tombstone="", admitted="")

    def with_admitted(self, attempt: str) -> ControlDocument:
        """The next version: this attempt, and what a cluster starts again of it, may start; others still may not."""
        if not self.tombstone or self.admitted == attempt:
            return self
        return replace(self, version=self.version + 1, admitted=attempt)

    def admits(self, attempt: str) -> bool:
        """Whether an attempt may start."""
        if not self.tombstone:
            return True
        return bool(self.admitted) and (attempt == self.admitted or attempt.startswith(f"{self.admitted}-r"))

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    def encode(self) -> bytes:
        """The bytes of ``control.json``."""
        return json.dumps(self.as_data(), indent=1).encode()

    @classmethod
    def from_data(cls, data: Any) -> ControlDocument:
        """Read what `as_data` gave.

        Raises:
            FormatError: it has another form.
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
                    for s in data.get("snapshots", ())
                ),
                cadence=tuple((str(name), _whole(every, 1)) for name, every in data.get("cadence", ())),
                tombstone=str(data.get("tombstone", "")),
                admitted=str(data.get("admitted", "")),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"control document: {error!r}", "let the service write it anew") from error

    @classmethod
    def decode(cls, data: bytes) -> ControlDocument:
        """Read the bytes of ``control.json``.

        Raises:
            FormatError: they are something else.
        """
        try:
            return cls.from_data(parse_json(data, _MAX_MEMORY))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"control document: {error}", "let the service write it anew") from error


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{str(value)[:80]!r} is not a whole number of at least {least}")
    return value


AnswerState = Literal["ready", "passed", "left", "refuses"]
"""
======= ====================================================================================================
ready   it has not finished the step yet, and will not go beyond it before it is told more
passed  it had finished the step before it heard of it
left    it was ready, has waited at the step for as long as it does, and goes on
refuses its program has not agreed to be stopped so
======= ====================================================================================================
"""

_KEY = re.compile(
    rf"{STOPS}[^/]+/(?P<asked>\d{{1,19}})/(?P<worker>\d{{1,9}})-(?P<state>ready|passed|left|refuses)-(?P<at>\d{{1,19}})\.json"
)


@dataclass(frozen=True)
class StopAnswer:
    """A worker's answer.

    Attributes:
        worker: its rank.
        asked: the step that it was asked to stop at.
        state: see `AnswerState`.
        at: the last step that it had finished, 0 before the first.
    """

    worker: int
    asked: int
    state: AnswerState
    at: int

    def key(self, attempt: str) -> str:
        """Its object, relative to the run."""
        return f"{_prefix(attempt, self.asked)}{self.worker}-{self.state}-{self.at}.json"

    def encode(self) -> bytes:
        """The object's bytes; readers need no more than its name."""
        return json.dumps(asdict(self)).encode()


def find_answers(run_store: Store, attempt: str, asked: int) -> list[StopAnswer]:
    """What the workers of an attempt have answered of one step, by one listing.

    Raises:
        StoreError: the store does not answer.
    """
    matches = (_KEY.fullmatch(entry.key) for entry in run_store.entries(_prefix(attempt, asked)))
    return [
        StopAnswer(
            int(match["worker"]), int(match["asked"]), cast("AnswerState", match["state"]), int(match["at"])
        )
        for match in matches
        if match is not None
    ]


def _prefix(attempt: str, asked: int) -> str:
    return f"{STOPS}{check_name('attempt', attempt)}/{asked}/"
