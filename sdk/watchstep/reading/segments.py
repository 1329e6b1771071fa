"""The segments of a run, read once each and kept."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from watchstep.block import Block, concatenate
from watchstep.errors import FormatError, NotFoundError
from watchstep.layout import SEGMENTS, SegmentKey
from watchstep.segment import MAX_BYTES, decode
from watchstep.store import Store

_READERS = 8


class SegmentReader:
    """Reads what is new on each refresh; never forgets what it read.

    Attributes:
        damaged: segments that could not be read, and why; what others hold is there all the same.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._blocks: dict[SegmentKey, Block] = {}
        self._joined: dict[str, Block] = {}
        self.damaged: dict[str, str] = {}

    def refresh(self) -> bool:
        """Read segments that are new; whether there were any.

        Raises:
            StoreError: the store cannot be read.
        """
        new = [key for key in self._listed() if key not in self._blocks and key.path not in self.damaged]
        with ThreadPoolExecutor(_READERS) as pool:
            for key, block in zip(new, pool.map(self._read, new), strict=True):
                if block is not None:
                    self._blocks[key] = block
        if new:
            self._joined = {}
        return bool(new)

    def attempts(self) -> list[str]:
        """Attempts that have written something, in the order of their first records."""
        started: dict[str, int] = {}
        for key, block in self._blocks.items():
            if len(block):
                time = int(block.time_ns.min())
                started[key.writer.attempt] = min(time, started.get(key.writer.attempt, time))
        return sorted(started, key=lambda attempt: started[attempt])

    def rows(self, attempt: str) -> Block:
        """All rows of one attempt, by step, worker, mode and tensor."""
        if attempt not in self._joined:
            held = [self._blocks[key] for key in sorted(self._blocks) if key.writer.attempt == attempt]
            self._joined[attempt] = concatenate(held).ordered()
        return self._joined[attempt]

    def _listed(self) -> Iterator[SegmentKey]:
        for entry in self._store.entries(SEGMENTS):
            try:
                yield SegmentKey.parse(entry.key)
            except FormatError as error:
                self.damaged[entry.key] = error.what

    def _read(self, key: SegmentKey) -> Block | None:
        try:
            return decode(self._store.get(key.path, limit=MAX_BYTES), key.path)
        except (FormatError, NotFoundError) as error:
            self.damaged[key.path] = error.what
            return None
