"""What the control groups of a process (a container's, a batch job's) allow it, and use; versions 1 and 2.

Limits hold for everything below a group, so those of all groups above count as well. Inside a container the path that
``/proc/self/cgroup`` names may not be there: then the mount itself is the container's group.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("sys/fs/cgroup")


@dataclass(frozen=True)
class CpuGroup:
    """A group whose processor time is limited.

    Attributes:
        cpus: how many CPUs' worth of time it may take, not always a whole number.
        usage: the file that tells what it took.
        seconds: what one unit in that file is.
    """

    cpus: float
    usage: Path
    seconds: float

    def used(self) -> float:
        """Processor time that was taken, in seconds."""
        words = self.usage.read_text(encoding="ascii").split()
        number = words[words.index("usage_usec") + 1] if "usage_usec" in words else words[0]
        return int(number) * self.seconds


@dataclass(frozen=True)
class MemoryGroup:
    """A group whose memory is limited.

    Attributes:
        limit: in bytes.
        usage: the file that tells how much is taken.
        details: the file that tells how much of it is the kernel's cache of files.
        cache: the name of that figure.
    """

    limit: int
    usage: Path
    details: Path
    cache: str

    def used(self) -> int:
        """Bytes that are taken, without files that nobody used lately: the kernel lets go of them when it needs memory."""
        words = self.details.read_text(encoding="ascii").split()
        cached = int(words[words.index(self.cache) + 1]) if self.cache in words else 0
        return max(0, int(self.usage.read_text(encoding="ascii")) - cached)


def allowed_cpus(root: Path = Path("/")) -> float:
    """CPUs that this process may use, by its affinity and its groups."""
    group = cpu_group(root)
    own = len(os.sched_getaffinity(0))
    return own if group is None else min(own, group.cpus)


def cpu_group(root: Path = Path("/")) -> CpuGroup | None:
    """The group that limits processor time most; None where none does."""
    found = []
    for folder in _groups(root, ""):
        quota = _words(folder / "cpu.max")
        if len(quota) == 2 and quota[0] != "max" and (folder / "cpu.stat").exists():
            found.append(CpuGroup(int(quota[0]) / int(quota[1]), folder / "cpu.stat", 1e-6))
    used = next(iter(_groups(root, "cpuacct")), None)
    for folder in _groups(root, "cpu"):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0 and used is not None:
            found.append(CpuGroup(int(quota[0]) / int(period[0]), used / "cpuacct.usage", 1e-9))
    return min(found, key=lambda group: group.cpus, default=None)


def memory_group(root: Path = Path("/")) -> MemoryGroup | None:
    """The group that limits memory most; None where none does."""
    found = []
    for folder in _groups(root, ""):
        limit = _words(folder / "memory.max")
        if limit and limit[0] != "max":
            found.append(
                MemoryGroup(int(limit[0]), folder / "memory.current", folder / "memory.stat", "inactive_file")
            )
    for folder in _groups(root, "memory"):
        limit = _words(folder / "memory.limit_in_bytes")
        if limit and int(limit[0]) < 2**60:  # version 1 writes its largest number for no limit
            usage, details = folder / "memory.usage_in_bytes", folder / "memory.stat"
            found.append(MemoryGroup(int(limit[0]), usage, details, "total_inactive_file"))
    return min(found, key=lambda group: group.limit, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of a controller's group and of all above it, the innermost first; version 2's where it is empty."""
    for line in _words(root / "proc/self/cgroup", whole_lines=True):
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        names = (controllers, controller) if controller else ("", "unified")
        mount = next((m for m in (root / _MOUNT / name for name in names) if m.is_dir()), None)
        if mount is None:
            return
        inner = mount / path.lstrip("/")
        while inner != mount:
            if inner.is_dir():
                yield inner
            inner = inner.parent
        yield mount
        return


def _words(path: Path, *, whole_lines: bool = False) -> list[str]:
    """A file's words, or its lines; none where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines() if whole_lines else text.split()
