"""What is on its way to the store: an encoded object, and its place, which does not yet say who wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from watchstep.layout import SegmentKey, SnapshotKey, WriterId
from watchstep.tensors import MODES

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_SEGMENT = re.compile(rf"segment-{_NUMBER}-{_NUMBER}-{_NUMBER}-{_NUMBER}")
_SNAPSHOT = re.compile(rf"snapshot-{_NUMBER}-{_NUMBER}-({'|'.join(MODES)})")


@dataclass(frozen=True)
class SegmentPlace:
    """A segment: its number, its steps, and how many rows it holds."""

    seq: int
    first: int
    last: int
    rows: int

    @property
    def name(self) -> str:
        """As a part of a file's name."""
        return f"segment-{self.seq}-{self.first}-{self.last}-{self.rows}"

    def key(self, writer: WriterId) -> SegmentKey:
        """Its key, once the writer is known."""
        return SegmentKey(writer, self.seq, self.first, self.last)


@dataclass(frozen=True)
class SnapshotPlace:
    """A snapshot: of which worker, step and mode."""

    worker: int
    step: int
    mode: str

    rows = 0

    @property
    def name(self) -> str:
        """As a part of a file's name."""
        return f"snapshot-{self.worker}-{self.step}-{self.mode}"

    def key(self, writer: WriterId) -> SnapshotKey:
        """Its key, once the attempt is known."""
        return SnapshotKey(writer.attempt, self.worker, self.step, self.mode)


Place = SegmentPlace | SnapshotPlace


def place_of(name: str) -> Place | None:
    """Read a place's name; None where it is none."""
    if found := _SEGMENT.fullmatch(name):
        seq, first, last, rows = map(int, found.groups())
        return SegmentPlace(seq, first, last, rows)
    if found := _SNAPSHOT.fullmatch(name):
        return SnapshotPlace(int(found[1]), int(found[2]), found[3])
    return None


@dataclass(frozen=True)
class Outgoing:
    """An encoded object.

    Attributes:
        order: objects go to the store in this order.
        place: what it is.
        data: its bytes.
    """

    order: int
    place: Place
    data: bytes
