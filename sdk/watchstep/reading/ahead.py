"""Work on several objects at once, a few ahead of what is being used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

READERS = 8
"""Objects that are fetched and unpacked at once; both release the GIL."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results in order. Twice `READERS` are under way or waiting at the most, so that memory is bounded."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(READERS, "watchstep-reader") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= 2 * READERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
