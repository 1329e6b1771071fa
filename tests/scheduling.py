"""Distribution of whole test files to worker processes, also after a worker crashed."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]  # the package has no types
    """Distributes files like ``--dist loadfile``, and gives a crashed worker's files to another.

    After a crash, pytest-xdist 3.8 also gives the worker's completed files away. A worker that receives one waits for more
    tests forever. It also repeats the test that crashed, which then crashes each worker that follows.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker that ended. Returns the test that it crashed in, or None."""
        files: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        crashed: str | None = None
        for file, tests in files.items():
            pending = [name for name, is_complete in tests.items() if not is_complete]
            if pending and crashed is None:
                crashed = pending.pop(0)
            if pending:
                self.workqueue[file] = dict.fromkeys(pending, False)
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def schedule(self) -> None:
        """Distribute files at the start, and to each worker that replaces another."""
        is_start = self.collection is None
        super().schedule()
        if not is_start:
            # A worker begins its last test when it has received another one, or that there is none.
            for node in self.nodes:
                self._reschedule(node)


def make_scheduler(config: Any, log: Any) -> FileScheduling | None:
    """Return the scheduler for ``--dist loadfile``, and None for other modes."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
