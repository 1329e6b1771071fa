"""Opening of snapshots for requests, within the memory for decoding.

A header of the maximum size, 16 MiB, takes 300 MiB after parsing. Requests open such headers one at a time, and keep only what they
respond with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.documents import memory_needed
from watchstep.format.snapshot import MAX_HEADER, Snapshot, open_snapshot
from watchstep.reading.budget import PROCESS, ReadBudget
from watchstep.store.store import Store

_LENGTH = 8
"""Bytes before the header, which contain its length."""

_FIRST_READ = 64 * 1024
_TEXTS = 2
"""Copies of the header's text in memory while it is parsed."""

Result = TypeVar("Result")


class _Start(Store):
    """The start of an object in memory: a snapshot is opened from it without a request."""

    def __init__(self, store: Store, content: bytes) -> None:
        super().__init__(store.url, None)
        self._content = content

    def get_range(self, key: str, start: int, length: int) -> bytes:  # noqa: ARG002 - of one object only
        """Return bytes of the start."""
        return self._content[start : start + length]


def read_snapshot(
    store: Store, key: str, budget: ReadBudget, select: Callable[[Snapshot, int], Result]
) -> Result:
    """Open a snapshot, and return what is selected from its header. The header is in memory only meanwhile.

    Args:
        store: the store of the run.
        key: key of the snapshot.
        budget: budget of the query, which limits the wait for memory.
        select: returns the result from the snapshot and the size of its object. The snapshot can read no tensor.

    Raises:
        NotFoundError: the snapshot, or what is selected from it, does not exist.
        FormatError: the header is not valid.
        StoreError: the object could not be read.
        OverBudgetError: the header, or other queries, need too much of the memory for decoding.
    """
    try:
        size = store.size(key)
        content = _read_start(
            store, key, size
        )  # before reserving memory, so that a hanging store blocks none
    except NotFoundError as error:
        raise NotFoundError(
            f"snapshot {key}: not found",
            "list the snapshots again: those of a cadence make room for newer ones (TensorLimits.ring_bytes)",
        ) from error
    text = content[: _end(content)]
    needed = memory_needed(text) + _TEXTS * len(text)
    del text
    with PROCESS.reserve(needed, budget, f"header of {key}"):
        try:
            return select(open_snapshot(_Start(store, content), key, size), size)
        except (FormatError, NotFoundError) as error:
            kind = FormatError if isinstance(error, FormatError) else NotFoundError
            failure = kind(error.what, error.hint)
    raise failure  # without the traceback of the first one, which would keep the header in memory


def _read_start(store: Store, key: str, size: int) -> bytes:
    """Read an object at least up to the end of its header; less if the header's length is not valid."""
    start = store.get_range(key, 0, min(size, _FIRST_READ)) if size else b""
    end = _end(start)
    if not len(start) < end <= min(size, _LENGTH + MAX_HEADER):
        return start
    return start + store.get_range(key, len(start), end - len(start))


def _end(content: bytes) -> int:
    return _LENGTH + int.from_bytes(content[:_LENGTH], "little")
