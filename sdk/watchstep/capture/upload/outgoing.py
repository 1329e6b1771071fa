"""Encoded segments on their way to the store: notices that describe them between ranks of a node, and several ranks' blocks in one segment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from watchstep.errors import FormatError, NotFoundError
from watchstep.format import segment
from watchstep.format.block import Block, concatenate
from watchstep.format.documents import parse_json
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.store.store import Store

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
        match = _PLACE.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None

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


BLOCKS = b"watchstep.blocks"
"""Key of the list of blocks in the metadata of a segment that several ranks may be in."""

_MAX_MEMORY = 64 * 1024 * 1024  # of that list


def merge(items: Mapping[str, Sequence[Outgoing]], decoded: Mapping[tuple[str, int], Block]) -> bytes:
    """One segment of blocks.

    Args:
        items: the blocks of each process.
        decoded: their rows, by process and number.
    """
    numbers = {token: [item.place.seq for item in blocks] for token, blocks in items.items()}
    rows = concatenate([decoded[token, number] for token, sent in numbers.items() for number in sent])
    return segment.encode(rows.ordered(), more={BLOCKS: json.dumps(numbers).encode()})


def rows_of(token: str, item: Outgoing) -> Block:
    """A block's rows.

    Raises:
        FormatError: they are not what its place says.
    """
    block = segment.decode(item.data, f"{item.place.name} of process {token}")
    place = item.place
    if len(block) != place.rows or (
        len(block) and not (place.first <= int(block.step.min()) and int(block.step.max()) <= place.last)
    ):
        raise FormatError(f"{place.name} of process {token}: holds other rows", "update all ranks together")
    return block


def blocks_of(data: bytes, name: str) -> Blocks:
    """Which blocks a segment holds, as it says itself; none where it says nothing.

    Raises:
        FormatError: it is no segment.
    """
    with segment.whole(name):
        metadata = parse_json(segment.metadata_of(data, name).get(BLOCKS, b"{}"), _MAX_MEMORY)
        return {str(token): tuple(map(int, numbers)) for token, numbers in metadata.items()}


def settle(store: Store, doubt: Doubt, waiting: Sequence[Outgoing]) -> Blocks:
    """Find out what became of an announced object, and make it where it is not there.

    Whoever makes it first decides what is in it: a request of the one that announced it, should it still be under way, is
    refused by the store from then on.

    Args:
        store: seen from the run.
        doubt: the object, and the blocks to make it of.
        waiting: those blocks.

    Returns:
        What the object holds.

    Raises:
        StoreError: the store refused.
    """
    path = doubt.key.path
    while True:
        try:
            return blocks_of(store.get(path, limit=segment.MAX_BYTES), path)
        except NotFoundError:
            pass
        except FormatError:
            return {}  # damaged: no reader takes anything from it
        decoded = {(doubt.token, item.place.seq): rows_of(doubt.token, item) for item in waiting}
        if store.create(path, merge({doubt.token: waiting}, decoded)):
            return {doubt.token: tuple(item.place.seq for item in waiting)}
