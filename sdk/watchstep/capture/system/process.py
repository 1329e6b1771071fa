"""CPU time, memory and age of this process, and the number of its data loader workers."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from watchstep.capture.system.cgroup import allowed_cpus
from watchstep.capture.system.source import Counters, content
from watchstep.format.system_figures import CPU, CPUS, DATA_WORKERS, MEMORY, MEMORY_PRIVATE
from watchstep.platform.process import ProcessIdentity


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


_told: list[int] = []


def seconds_before_recording() -> float | None:
    """Seconds since the process began; None where it was not begun for this training.

    That is so for all but the first recording of a process, and where a person types: in a notebook's kernel and at a
    prompt. On other systems than Linux it is not known.
    """
    if os.getpid() in _told or sys.platform != "linux":
        return None
    _told[:] = [os.getpid()]
    if "ipykernel" in sys.modules or sys.flags.interactive or hasattr(sys, "ps1"):
        return None
    started = ProcessIdentity.of(os.getpid()).start_ticks / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


_NAME = "pt_data_worker"
"""What PyTorch 2.6 and later call a worker of a `DataLoader`."""
_EVERY = 10  # samples: workers come and go by epochs


class DataWorkers:
    """Children of this process, and of a fork server's, by their name (``/proc/PID/comm``)."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._processes = root / "proc"
        self._samples = 0

    def sample(self, seconds: float) -> dict[str, float]:  # noqa: ARG002 - a source's; nothing here is a rate
        """How many, each tenth time; nothing where there are none, or they are not to be told from others."""
        self._samples += 1
        if self._samples % _EVERY != 1:
            return {}
        children = self._children(os.getpid())
        below = [grandchild for child in children for grandchild in self._children(child)]
        count = sum(self._is_worker(child) for child in (*children, *below))
        return {DATA_WORKERS: float(count)} if count else {}

    def close(self) -> None:
        """Nothing is held."""

    def _children(self, pid: int) -> list[int]:
        """Of its first thread, which is where programs load data."""
        try:
            text = (self._processes / f"{pid}/task/{pid}/children").read_text(encoding="ascii")
        except OSError:  # it has ended, or the kernel does not tell
            return []
        return [int(child) for child in text.split()]

    def _is_worker(self, pid: int) -> bool:
        try:
            return (self._processes / f"{pid}/comm").read_text(
                encoding="utf-8", errors="replace"
            ).strip() == _NAME
        except OSError:  # it has ended
            return False
