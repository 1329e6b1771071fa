"""Work on several objects at once, a few ahead of what is being used."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from watchstep.store import Store

_OF_A_BUCKET = 16
"""Objects of a bucket that are fetched at once: most of the time is waiting for its answers."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def readers_of(store: Store) -> int:
    """How many objects of a store are read at once. More threads than cores only pass the GIL around for a folder."""
    return min(_OF_A_BUCKET, max(2, os.cpu_count() or 1)) if store.is_local else _OF_A_BUCKET


def ahead(work: Callable[[Item], Result], items: Iterable[Item], readers: int) -> Iterator[Result]:
    """The results in order. Twice ``readers`` are under way or waiting at the most, so that memory is bounded."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(readers, "watchstep-reader") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= 2 * readers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
