"""How busy the CPUs of the machine are, or of the container."""

from __future__ import annotations

from pathlib import Path

from watchstep.capture.system.cgroup import cpu_group
from watchstep.capture.system.source import Counters, content
from watchstep.system_figures import NODE_CPU, NODE_IO_STALL, NODE_IOWAIT

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
