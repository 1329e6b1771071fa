"""Processor time and memory of this process."""

from __future__ import annotations

import os
import time
from pathlib import Path

from watchstep.capture.system.cgroup import allowed_cpus
from watchstep.capture.system.source import Counters, content
from watchstep.system_figures import CPU, CPUS, MEMORY, MEMORY_PRIVATE


class Process:
    """Of all its threads. Processor time is read from a clock, memory from ``/proc/self/statm`` (proc(5))."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._memory = str(root / "proc/self/statm")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._cpus = allowed_cpus(root)
        self._counters = Counters()

    def sample(self, seconds: float) -> dict[str, float]:
        """Share of its CPUs, and bytes."""
        resident, shared = (int(pages) * self._page for pages in content(self._memory).split()[1:3])
        figures = {MEMORY: float(resident), MEMORY_PRIVATE: float(resident - shared), CPUS: float(self._cpus)}
        for name, added in self._counters.added({CPU: time.process_time()}).items():
            figures[name] = added / seconds / self._cpus
        return figures

    def close(self) -> None:
        """Nothing is held."""
