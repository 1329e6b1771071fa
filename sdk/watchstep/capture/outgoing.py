"""What is on its way to the store: an encoded segment, and its place, which does not yet say who wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from watchstep.layout import SegmentKey, WriterId

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_PLACE = re.compile(rf"segment-{_NUMBER}-{_NUMBER}-{_NUMBER}-{_NUMBER}")


@dataclass(frozen=True)
class Place:
    """A segment's number among those of its process, its steps, and how many rows it holds."""

    seq: int
    first: int
    last: int
    rows: int

    @property
    def name(self) -> str:
        """As a part of a file's name."""
        return f"segment-{self.seq}-{self.first}-{self.last}-{self.rows}"

    @classmethod
    def parse(cls, name: str) -> Place | None:
        """Read a place's name; None where it is none."""
        found = _PLACE.fullmatch(name)
        return cls(*map(int, found.groups())) if found else None

    def key(self, writer: WriterId, base: int = 0) -> SegmentKey:
        """Its key, once the writer is known, and the number of the block that is this writer's first."""
        return SegmentKey(writer, self.seq - base, self.first, self.last)


@dataclass(frozen=True)
class Outgoing:
    """An encoded segment.

    Attributes:
        place: what it is; segments go to the store in the order of their numbers.
        data: its bytes.
    """

    place: Place
    data: bytes
