"""CPU, memory, disks and network of the machine or of its container."""

from __future__ import annotations

import re
from pathlib import Path

from watchstep.capture.system.cgroup import cpu_group, memory_group
from watchstep.capture.system.source import Counters, content
from watchstep.format.system_figures import (
    NODE_CPU,
    NODE_DISK_READ,
    NODE_DISK_WRITTEN,
    NODE_IO_STALL,
    NODE_IOWAIT,
    NODE_MEMORY,
    NODE_NETWORK_RECEIVED,
    NODE_NETWORK_SENT,
)

_USED = "used"
_STALLED = "stalled"
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
"""Places in the first line of ``/proc/stat`` (proc(5)), in clock ticks over all CPUs."""


class NodeCpu:
    """Of the container's quota where it has one, else of the machine; who waits for disks is the machine's."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = str(root / "proc/stat")
        self._pressure = str(root / "proc/pressure/io")
        self._group = cpu_group(root)
        self._ticks: list[int] = []
        self._counters = Counters()

    def sample(self, seconds: float) -> dict[str, float]:
        """Shares since the last call."""
        ticks = [int(number) for number in content(self._stat).partition(b"\n")[0].split()[1:9]]
        before, self._ticks = self._ticks, ticks
        added = [now - then for now, then in zip(ticks, before, strict=False)]
        figures, whole = {}, sum(added)
        if whole > 0 and min(added) >= 0:  # idle time may fall by a tick or two: proc(5)
            away = sum(added[place] for place in (_IDLE, _IOWAIT, _STEAL))
            figures = {NODE_CPU: 1 - away / whole, NODE_IOWAIT: added[_IOWAIT] / whole}
        grown = self._counters.added(self._totals())
        if self._group is not None:
            figures.pop(NODE_CPU, None)
            if _USED in grown:
                figures[NODE_CPU] = grown[_USED] / seconds / self._group.cpus
        if _STALLED in grown:
            figures[NODE_IO_STALL] = min(1.0, grown[_STALLED] / seconds)
        return figures

    def close(self) -> None:
        """Nothing is held."""

    def _totals(self) -> dict[str, float]:
        """Seconds of processor time of the group, and in which some task waited for disks (kernel: accounting/psi.rst)."""
        totals = {} if self._group is None else {_USED: self._group.used()}
        try:
            some = content(self._pressure).partition(b"\n")[0]
        except OSError:  # the kernel was built or started without it
            return totals
        return {**totals, _STALLED: int(some.rpartition(b"total=")[2]) * 1e-6}


_SECTOR = 512
"""Bytes, whatever the disk's own sectors are (kernel: admin-guide/iostats.rst)."""
_OF_OTHERS = re.compile(r"(loop|ram|zram|dm-|md|sr|fd)\d")
"""What lies on other disks, or in memory, would be counted twice."""


class NodeDisks:
    """All disks together, from ``/proc/diskstats``; its partitions are no disks of their own."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = str(root / "proc/diskstats")
        blocks = root / "sys/block"
        self._disks = {disk.name.encode() for disk in blocks.iterdir() if not _OF_OTHERS.match(disk.name)}
        self._counters = Counters()

    def sample(self, seconds: float) -> dict[str, float]:
        """Bytes a second."""
        read = written = 0
        for line in content(self._stat).splitlines():
            words = line.split(maxsplit=10)
            if words[2] in self._disks:
                read, written = read + int(words[5]), written + int(words[9])
        totals = {NODE_DISK_READ: _SECTOR * read, NODE_DISK_WRITTEN: _SECTOR * written}
        return {name: added / seconds for name, added in self._counters.added(totals).items()}

    def close(self) -> None:
        """Nothing is held."""


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


class NodeNetwork:
    """All interfaces but the loopback, of this process's network namespace (``/proc/self/net/dev``, proc(5)).

    What InfiniBand carries past the kernel, as NCCL does, is not in it.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = str(root / "proc/self/net/dev")
        self._counters = Counters()

    def sample(self, seconds: float) -> dict[str, float]:
        """Bytes a second."""
        received = sent = 0
        for line in content(self._stat).splitlines()[2:]:
            name, _, numbers = line.partition(b":")
            if name.strip() != b"lo":
                words = numbers.split()
                received, sent = received + int(words[0]), sent + int(words[8])
        totals = {NODE_NETWORK_RECEIVED: received, NODE_NETWORK_SENT: sent}
        return {name: added / seconds for name, added in self._counters.added(totals).items()}

    def close(self) -> None:
        """Nothing is held."""
