"""What the machine's disks read and write."""

from __future__ import annotations

import re
from pathlib import Path

from watchstep.capture.system.source import Counters, content
from watchstep.system_figures import NODE_DISK_READ, NODE_DISK_WRITTEN

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
