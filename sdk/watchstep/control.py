"""The control document of a run: what the service asks of the training processes.

The service writes it, as ``control.json`` and in the answer to every announcement; processes read it off the
training thread. A higher version replaces a lower one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from watchstep.errors import FormatError

MAX_BYTES = 1024 * 1024


@dataclass(frozen=True)
class StopRequest:
    """Ask every worker of an attempt to stop at one step.

    Attributes:
        attempt: which attempt.
        step: each worker stops when it has finished this step, or a later one if it is past it.
        reason: one sentence for people.
        event: id of the event that caused it.
    """

    attempt: str
    step: int
    reason: str
    event: str = ""


@dataclass(frozen=True)
class SnapshotRequest:
    """Ask for the full tensors of a step, or of the next one if it has passed."""

    id: str
    step: int


@dataclass(frozen=True)
class ControlDocument:
    """What is asked of a run.

    Attributes:
        version: grows by one with each change; 0 asks nothing.
        stop: the stop, keyed by its attempt.
        snapshots: snapshot requests.
        cadence: collection → measure every so many steps; replaces the worker's own choice.
        tombstone: reason why no new attempt may start; empty where one may.
    """

    version: int = 0
    stop: StopRequest | None = None
    snapshots: tuple[SnapshotRequest, ...] = ()
    cadence: tuple[tuple[str, int], ...] = ()
    tombstone: str = ""

    def with_stop(self, stop: StopRequest) -> ControlDocument:
        """The next version: this attempt stops, and no other starts."""
        return replace(self, version=self.version + 1, stop=stop, tombstone=stop.reason)

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
                )
                if stop
                else None,
                snapshots=tuple(
                    SnapshotRequest(str(s["id"]), _whole(s["step"])) for s in data.get("snapshots", ())
                ),
                cadence=tuple((str(name), _whole(every, 1)) for name, every in data.get("cadence", ())),
                tombstone=str(data.get("tombstone", "")),
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
            return cls.from_data(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"control document: {error}", "let the service write it anew") from error


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{str(value)[:80]!r} is not a whole number of at least {least}")
    return value
