"""How much of one kind of work is under way at once: of one project, so that none takes all, and of the process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from watchstep_services.api.schemas.problems import RequestRefusedError


class Slots:
    """Places for work that occupies a thread. Thread-safe; who finds none is refused at once, for a queue would only hide it.

    Args:
        per_project: places of one project.
        total: places of the process.
        what: takes a place, in an error.
    """

    def __init__(self, per_project: int, total: int, what: str = "queries") -> None:
        self._per_project, self._total, self._what = per_project, total, what
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, project: str) -> Iterator[None]:
        """Hold a place for the length of the block.

        Args:
            project: whose place; empty for work of no project.

        Raises:
            RefusedError: 429; there is none.
        """
        with self._lock:
            if self._taken[project] >= self._per_project or self._taken.total() >= self._total:
                whose = (
                    f"of project {project}"
                    if project and self._taken[project] >= self._per_project
                    else "of all projects"
                )
                raise RequestRefusedError(
                    429,
                    f"too many {self._what} {whose} are under way",
                    "send it again when one of them is answered",
                )
            self._taken[project] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[project] -= 1
                if not self._taken[project]:
                    del self._taken[project]
