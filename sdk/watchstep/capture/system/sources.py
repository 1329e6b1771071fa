"""Sources of system rows: control groups, this process, its machine, and NVIDIA GPUs.

Limits of a control group (a container's, a batch job's; versions 1 and 2) apply to all groups below it, so the groups above count as well.
Inside a container the path in ``/proc/self/cgroup`` may not exist: then the mount itself is the container's group. Source: Linux,
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.

GPUs are read by NVML, written against its documented interface and that of its binding ``nvidia-ml-py``; no GPU has run it yet.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from watchstep.format.system_figures import (
    CPU,
    CPUS,
    DATA_WORKERS,
    GPU,
    GPU_MEMORY,
    MEMORY,
    MEMORY_PRIVATE,
    NODE_CPU,
    NODE_DISK_READ,
    NODE_DISK_WRITTEN,
    NODE_IO_STALL,
    NODE_IOWAIT,
    NODE_MEMORY,
    NODE_NETWORK_RECEIVED,
    NODE_NETWORK_SENT,
)
from watchstep.platform.process import ProcessIdentity

_PART = 65_536


class FigureSource(Protocol):
    """Source of figures of one kind."""

    def sample(self, seconds: float) -> dict[str, float]:
        """Return the current figures by name.

        Args:
            seconds: Seconds since the last call, the period of rates. The first call omits rates.

        Raises:
            OSError, ValueError: The figures are not available.
        """
        ...

    def close(self) -> None:
        """Release resources."""
        ...


class Counters:
    """Monotonic totals, and their increases since the last call."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}

    def added(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the increases by name. New and decreased totals are omitted."""
        before, self._before = self._before, totals
        return {
            name: total - before[name]
            for name, total in totals.items()
            if name in before and total >= before[name]
        }


def content(path: str) -> bytes:
    """Read a file of the kernel with little overhead.

    Raises:
        OSError: The file cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = part = os.read(file, _PART)
        while part:  # a read returns at most one page of some files
            part = os.read(file, _PART)
            text += part
    finally:
        os.close(file)
    return text


_MOUNT = Path("sys/fs/cgroup")


@dataclass(frozen=True)
class CpuGroup:
    """A group with limited processor time.

    Attributes:
        cpus: Limit in CPUs, not always an integer.
        usage: File with its used processor time.
        seconds: Seconds per unit in that file.
    """

    cpus: float
    usage: Path
    seconds: float

    def used(self) -> float:
        """Return the used processor time in seconds."""
        words = self.usage.read_text(encoding="ascii").split()
        number = words[words.index("usage_usec") + 1] if "usage_usec" in words else words[0]
        return int(number) * self.seconds


@dataclass(frozen=True)
class MemoryGroup:
    """A group with limited memory.

    Attributes:
        limit: Limit in bytes.
        usage: File with its used memory.
        details: File with the part of the kernel's file cache.
        cache: Name of that figure.
    """

    limit: int
    usage: Path
    details: Path
    cache: str

    def used(self) -> int:
        """Return the used bytes, without files that were not used recently: the kernel releases these when it needs memory."""
        words = self.details.read_text(encoding="ascii").split()
        cached = int(words[words.index(self.cache) + 1]) if self.cache in words else 0
        return max(0, int(self.usage.read_text(encoding="ascii")) - cached)


def allowed_cpus(root: Path = Path("/")) -> float:
    """Return the number of CPUs for this process, by its affinity and its groups."""
    group = cpu_group(root)
    own = len(os.sched_getaffinity(0))
    return own if group is None else min(own, group.cpus)


def cpu_group(root: Path = Path("/")) -> CpuGroup | None:
    """Return the group with the lowest limit of processor time, or None."""
    groups = []
    for folder in _groups(root, ""):
        quota = _words(folder / "cpu.max")
        if len(quota) == 2 and quota[0] != "max" and (folder / "cpu.stat").exists():
            groups.append(CpuGroup(int(quota[0]) / int(quota[1]), folder / "cpu.stat", 1e-6))
    used = next(iter(_groups(root, "cpuacct")), None)
    for folder in _groups(root, "cpu"):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0 and used is not None:
            groups.append(CpuGroup(int(quota[0]) / int(period[0]), used / "cpuacct.usage", 1e-9))
    return min(groups, key=lambda group: group.cpus, default=None)


def memory_group(root: Path = Path("/")) -> MemoryGroup | None:
    """Return the group with the lowest limit of memory, or None."""
    groups = []
    for folder in _groups(root, ""):
        limit = _words(folder / "memory.max")
        if limit and limit[0] != "max":
            groups.append(
                MemoryGroup(int(limit[0]), folder / "memory.current", folder / "memory.stat", "inactive_file")
            )
    for folder in _groups(root, "memory"):
        limit = _words(folder / "memory.limit_in_bytes")
        if limit and int(limit[0]) < 2**60:  # version 1 writes its largest number for no limit
            usage, details = folder / "memory.usage_in_bytes", folder / "memory.stat"
            groups.append(MemoryGroup(int(limit[0]), usage, details, "total_inactive_file"))
    return min(groups, key=lambda group: group.limit, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of a controller's group and all groups above it, innermost first; of version 2 if it is empty."""
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
    """Return a file's words or lines; empty for a missing file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines() if whole_lines else text.split()


class Process:
    """Figures of all threads of this process. Processor time is read from a clock, memory from ``/proc/self/statm`` (proc(5))."""

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
        """Do nothing."""


_told: list[int] = []


def seconds_before_recording() -> float | None:
    """Return the seconds since the start of the process; None if it was not started for this training.

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
        """Do nothing."""

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


_DRIVER = Path("dev/nvidiactl")


class Gpus:
    """Those that the process may use, by ``CUDA_VISIBLE_DEVICES``.

    Numbers are NVML's, by the order on the bus; where a machine has unlike GPUs CUDA may number them otherwise.
    """

    def __init__(self) -> None:
        """Find them.

        Raises:
            ImportError: the binding is not installed.
            OSError: NVML finds no driver, or does not answer.
        """
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            names = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        chosen = visible(names, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._handles = {index: handles[index] for index in chosen}

    def sample(self, seconds: float) -> dict[str, float]:  # noqa: ARG002 - a source's; NVML averages by itself
        """Shares, by NVML over the last sixth of a second to second; what a GPU does not tell (MIG) is left out."""
        nvml, figures = self._nvml, {}
        for index, handle in self._handles.items():
            try:
                figures[f"{GPU}{index}"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            except nvml.NVMLError_NotSupported:
                pass
            except nvml.NVMLError as error:
                raise OSError(f"NVML: {error}") from error
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                figures[f"{GPU}{index}{GPU_MEMORY}"] = memory.used / memory.total
            except nvml.NVMLError_NotSupported:
                pass
            except nvml.NVMLError as error:
                raise OSError(f"NVML: {error}") from error
        return figures

    def close(self) -> None:
        """NVML counts who uses it."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error


def driver_is_there(root: Path = Path("/")) -> bool:
    """Whether this machine has a GPU of NVIDIA's that this process could use."""
    return (root / _DRIVER).exists()


def visible_count() -> int | None:
    """How many GPUs ``CUDA_VISIBLE_DEVICES`` names; None where it is not set."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if setting is None else len([word for word in setting.split(",") if word.strip()])


def visible(names: list[str], setting: str | None) -> list[int]:
    """Places of the GPUs that CUDA shows to a program.

    Args:
        names: the UUID of each.
        setting: the variable ``CUDA_VISIBLE_DEVICES``: numbers, or beginnings of UUIDs; what follows one that is none
            does not count (CUDA programming guide, environment variables). None where it is not set.
    """
    if setting is None:
        return list(range(len(names)))
    chosen: list[int] = []
    for word in (part.strip() for part in setting.split(",")):
        matches = [index for index, name in enumerate(names) if str(index) == word or _begins(name, word)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return chosen


def _begins(name: str, word: str) -> bool:
    return word.startswith("GPU-") and name.startswith(word)


def _text(name: Any) -> str:
    """Older bindings give bytes."""
    return name.decode() if isinstance(name, bytes) else str(name)
