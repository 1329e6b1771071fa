"""How much of the machine's memory is used, or of the container's."""

from __future__ import annotations

from pathlib import Path

from watchstep.capture.system.cgroup import memory_group
from watchstep.capture.system.source import content
from watchstep.system_figures import NODE_MEMORY


class NodeMemory:
    """Of the container's limit where it is below the machine's memory, else of that (``/proc/meminfo``, proc(5))."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._memory = str(root / "proc/meminfo")
        self._group = memory_group(root)
        if self._group is not None and self._group.limit >= self._of_machine()[0]:
            self._group = None

    def sample(self, seconds: float) -> dict[str, float]:  # noqa: ARG002 - a source's; nothing here is a rate
        """A share."""
        if self._group is not None:
            return {NODE_MEMORY: self._group.used() / self._group.limit}
        total, available = self._of_machine()
        return {NODE_MEMORY: 1 - available / total}

    def close(self) -> None:
        """Nothing is held."""

    def _of_machine(self) -> tuple[int, int]:
        """Bytes in all, and that could be taken without swapping."""
        words = content(self._memory).split(maxsplit=12)
        total, available = (int(words[words.index(name) + 1]) for name in (b"MemTotal:", b"MemAvailable:"))
        return 1024 * total, 1024 * available
