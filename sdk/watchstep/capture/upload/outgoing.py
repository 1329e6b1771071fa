"""Encoded segments on their way to the store: notices about them between ranks of a node, and several ranks' blocks in one segment."""

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
from watchstep.format.segment_checks import whole
from watchstep.store.store import Store

Blocks = Mapping[str, tuple[int, ...]]
"""Process → numbers of its blocks, ascending. A process is identified by a random token, a block by its process's count."""


@dataclass(frozen=True)
class Notice:
    """An announcement to every follower, before an object is created.

    Attributes:
        key: the object's key.
        blocks: the blocks that it will contain.
        term: content of the lock file at that time: see `Handing.may_inherit`.
    """

    key: SegmentKey
    blocks: Blocks
    term: str


@dataclass(frozen=True)
class Doubt:
    """Blocks that may be on the store: a leader announced an object with them, and no result is known.

    Attributes:
        key: the object's key.
        token: the process that the blocks belong to.
        numbers: numbers of the blocks; the oldest ones of the process.
    """

    key: SegmentKey
    token: str
    numbers: tuple[int, ...]


_NUMBER = r"(0|[1-9][0-9]{0,17})"
_PLACE = re.compile(rf"segment-{_NUMBER}-{_NUMBER}-{_NUMBER}-{_NUMBER}")


@dataclass(frozen=True)
class SegmentPlace:
    """A segment's number among those of its process, its steps, and its number of rows."""

    seq: int
    first: int
    last: int
    rows: int

    @property
    def name(self) -> str:
        """The place as a part of a file name."""
        return f"segment-{self.seq}-{self.first}-{self.last}-{self.rows}"

    @classmethod
    def parse(cls, name: str) -> SegmentPlace | None:
        """Parse a place's name; None if it is invalid."""
        match = _PLACE.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None

    def key(self, writer: WriterId, base: int = 0) -> SegmentKey:
        """Return the segment's key for a writer whose first block has the number ``base``."""
        return SegmentKey(writer, self.seq - base, self.first, self.last)


@dataclass(frozen=True)
class Outgoing:
    """An encoded segment.

    Attributes:
        place: its number and steps; segments are stored in the order of their numbers.
        data: its bytes.
    """

    place: SegmentPlace
    data: bytes


BLOCKS = b"watchstep.blocks"
"""Metadata key of the list of blocks in a segment that may contain several ranks' blocks."""

_MAX_MEMORY = 64 * 1024 * 1024  # of that list


def merge(items: Mapping[str, Sequence[Outgoing]], decoded: Mapping[tuple[str, int], Block]) -> bytes:
    """Merge blocks into one segment.

    Args:
        items: the blocks of each process.
        decoded: their rows, by process and number.
    """
    numbers = {token: [item.place.seq for item in blocks] for token, blocks in items.items()}
    rows = concatenate([decoded[token, number] for token, sent in numbers.items() for number in sent])
    return segment.encode(rows.ordered(), more={BLOCKS: json.dumps(numbers).encode()})


def rows_of(token: str, item: Outgoing) -> Block:
    """Decode a block's rows.

    Raises:
        FormatError: they do not match its place.
    """
    block = segment.decode(item.data, f"{item.place.name} of process {token}")
    place = item.place
    if len(block) != place.rows or (
        len(block) and not (place.first <= int(block.step.min()) and int(block.step.max()) <= place.last)
    ):
        raise FormatError(f"{place.name} of process {token} contains other rows", "update all ranks together")
    return block


def blocks_of(data: bytes, name: str) -> Blocks:
    """Return the blocks in a segment according to its metadata; empty without such metadata.

    Raises:
        FormatError: the data is not a segment.
    """
    with whole(name):
        metadata = parse_json(segment.metadata_of(data, name).get(BLOCKS, b"{}"), _MAX_MEMORY)
        return {str(token): tuple(map(int, numbers)) for token, numbers in metadata.items()}


def settle(store: Store, doubt: Doubt, waiting: Sequence[Outgoing]) -> Blocks:
    """Determine what became of an announced object, and create it if it does not exist.

    The first process to create it determines its contents: a request of the announcing process that is still in progress is
    refused by the store from then on.

    Args:
        store: the run's store.
        doubt: the object, and the blocks for it.
        waiting: those blocks.

    Returns:
        The blocks in the object.

    Raises:
        StoreError: the store refuses.
    """
    path = doubt.key.path
    while True:
        try:
            return blocks_of(store.get(path, limit=segment.MAX_BYTES), path)
        except NotFoundError:
            pass
        except FormatError:
            return {}  # damaged, so readers ignore it
        decoded = {(doubt.token, item.place.seq): rows_of(doubt.token, item) for item in waiting}
        if store.create(path, merge({doubt.token: waiting}, decoded)):
            return {doubt.token: tuple(item.place.seq for item in waiting)}
