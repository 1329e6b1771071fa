"""Encoded segments on their way to the store, and the notices by which ranks of a node describe them to each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from watchstep.format.layout import SegmentKey, WriterId

Blocks = Mapping[str, tuple[int, ...]]
"""Process → numbers of its blocks, ascending. A process is named by a token that it draws, a block by its own count."""


@dataclass(frozen=True)
class Notice:
    """Said to every follower before an object is made.

    Attributes:
        key: the object's name.
        blocks: what will be in it.
        term: what the lock file held when this was said: see `Handing.may_inherit`.
    """

    key: SegmentKey
    blocks: Blocks
    term: str


@dataclass(frozen=True)
class Doubt:
    """Blocks that may be on the store: somebody meant to make an object of them, and was not heard of again.

    Attributes:
        key: the object's name.
        token: whose blocks.
        numbers: which ones; the oldest that the process holds.
    """

    key: SegmentKey
    token: str
    numbers: tuple[int, ...]


_NUMBER = r"(0|[1-9][0-9]{0,17})"
_PLACE = re.compile(rf"segment-{_NUMBER}-{_NUMBER}-{_NUMBER}-{_NUMBER}")


@dataclass(frozen=True)
class SegmentPlace:
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
    def parse(cls, name: str) -> SegmentPlace | None:
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

    place: SegmentPlace
    data: bytes
