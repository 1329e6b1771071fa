"""System figures from files of the machine, from files that the test writes, and from NVML."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from tests.sdk.programs import run_program
from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.system.sampler import opened
from watchstep.capture.system.sources import (
    Gpus,
    NodeCpu,
    NodeDisks,
    NodeMemory,
    NodeNetwork,
    Process,
    allowed_cpus,
    cpu_group,
    driver_is_there,
    memory_group,
    visible,
)
from watchstep.format.system_figures import (
    CPU,
    CPUS,
    FIGURES,
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
    is_gpu,
    is_gpu_memory,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

GIB = 1024**3


def written(root: Path, files: dict[str, str]) -> Path:
    """A tree of such files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def stat(busy: int, idle: int, waits: int) -> str:
    return f"cpu  {busy} 0 0 {idle} {waits} 0 0 0 0 0\ncpu0 1 2 3\nintr 1 2 3\n"


def test_the_machines_cpus_are_busy_by_what_was_added(tmp_path: Path) -> None:
    root = written(
        tmp_path,
        {"proc/stat": stat(100, 500, 10), "proc/pressure/io": "some avg10=0 total=4000000\nfull x\n"},
    )
    source = NodeCpu(root)
    assert source.sample(1.0) == {}
    written(
        root, {"proc/stat": stat(130, 550, 30), "proc/pressure/io": "some avg10=0 total=4500000\nfull x\n"}
    )
    assert source.sample(2.0) == pytest.approx({NODE_CPU: 0.3, NODE_IOWAIT: 0.2, NODE_IO_STALL: 0.25})
    assert NODE_CPU not in source.sample(1.0)  # not a tick went by


def test_idle_time_that_falls_is_no_figure(tmp_path: Path) -> None:
    source = NodeCpu(written(tmp_path, {"proc/stat": stat(100, 500, 10)}))
    source.sample(1.0)
    written(tmp_path, {"proc/stat": stat(150, 550, 9)})
    assert source.sample(1.0) == {}


CONTAINER_V2 = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 2000000\nuser_usec 1\n",
    "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
}
CONTAINER_V1 = {
    "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpuacct.usage": "2000000000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"cache 9\ntotal_inactive_file {GIB // 2}\n",
}
JOB_V2 = {  # no container: the path is the machine's, and limits stand above it
    "proc/self/cgroup": "0::/system.slice/job.scope/task\n",
    "sys/fs/cgroup/system.slice/job.scope/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/system.slice/job.scope/cpu.stat": "usage_usec 2000000\n",
    "sys/fs/cgroup/system.slice/job.scope/task/cpu.max": "max 100000\n",
    "sys/fs/cgroup/system.slice/job.scope/task/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/memory.max": f"{2 * GIB}\n",
    "sys/fs/cgroup/system.slice/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/system.slice/memory.stat": f"inactive_file {GIB // 2}\n",
}
HYBRID = {**CONTAINER_V1, "proc/self/cgroup": CONTAINER_V1["proc/self/cgroup"] + "0::/docker/abc\n"}


@pytest.mark.parametrize(
    "files", [CONTAINER_V2, CONTAINER_V1, JOB_V2, HYBRID], ids=["v2", "v1", "job", "hybrid"]
)
def test_limits_of_a_control_group_are_found_in_every_layout(files: dict[str, str], tmp_path: Path) -> None:
    root = written(tmp_path, files)
    processor, memory = cpu_group(root), memory_group(root)
    assert processor is not None
    assert memory is not None
    assert processor.cpus == 1.5
    assert processor.used() == pytest.approx(2.0)
    assert (memory.limit, memory.used()) == (2 * GIB, GIB // 2)
    assert allowed_cpus(root) == min(1.5, len(os.sched_getaffinity(0)))


UNLIMITED = {
    "no groups": {},
    "no limit": {
        **CONTAINER_V2,
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "sys/fs/cgroup/memory.max": "max\n",
    },
    "no limit by version 1": {
        **CONTAINER_V1,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    },
    "not mounted": {"proc/self/cgroup": "0::/\n4:memory:/x\n"},
}


@pytest.mark.parametrize("name", UNLIMITED)
def test_an_unlimited_group_has_no_limit(name: str, tmp_path: Path) -> None:
    root = written(tmp_path, UNLIMITED[name])
    assert cpu_group(root) is None
    assert memory_group(root) is None
    assert allowed_cpus(root) == len(os.sched_getaffinity(0))


def test_a_container_is_measured_by_what_it_may_take(tmp_path: Path) -> None:
    machine = {
        "proc/stat": stat(0, 0, 0),
        "proc/meminfo": f"MemTotal: {16 * 1024**2} kB\nMemAvailable: {8 * 1024**2} kB\n",
    }
    root = written(tmp_path, {**CONTAINER_V2, **machine})
    source = NodeCpu(root)
    source.sample(1.0)
    written(root, {"proc/stat": stat(1, 99, 0), "sys/fs/cgroup/cpu.stat": "usage_usec 3500000\n"})
    assert source.sample(2.0)[NODE_CPU] == pytest.approx(0.5)  # 1.5 s in 2 s, of 1.5 CPUs
    assert NodeMemory(root).sample(1.0) == {NODE_MEMORY: 0.25}
    written(root, {"sys/fs/cgroup/memory.max": f"{999 * GIB}\n"})  # more than there is
    assert NodeMemory(root).sample(1.0) == {NODE_MEMORY: 0.5}


def test_disks_are_counted_once(tmp_path: Path) -> None:
    lines = "259 0 nvme0n1 1 0 {0} 0 1 0 {1} 0\n259 1 nvme0n1p1 1 0 {0} 0 1 0 {1} 0\n253 0 dm-0 1 0 {0} 0 1 0 {1} 0\n"
    root = written(tmp_path, {"proc/diskstats": lines.format(100, 50)})
    for name in ("nvme0n1", "dm-0", "loop0"):
        (root / "sys/block" / name).mkdir(parents=True)
    source = NodeDisks(root)
    assert source.sample(1.0) == {}
    written(root, {"proc/diskstats": lines.format(104, 52)})
    assert source.sample(2.0) == {NODE_DISK_READ: 1024.0, NODE_DISK_WRITTEN: 512.0}


def test_the_loopback_is_no_network(tmp_path: Path) -> None:
    head = "Inter-|   Receive\n face |bytes\n"
    lines = head + "    lo: 9{0} 0 0 0 0 0 0 0 9{0} 0\n  eth0:{0} 0 0 0 0 0 0 0 {1} 0\n"
    source = NodeNetwork(written(tmp_path, {"proc/self/net/dev": lines.format(100, 10)}))
    source.sample(1.0)
    written(tmp_path, {"proc/self/net/dev": lines.format(300, 20)})
    assert source.sample(0.5) == {NODE_NETWORK_RECEIVED: 400.0, NODE_NETWORK_SENT: 20.0}
    written(tmp_path, {"proc/self/net/dev": lines.format(1, 30)})  # an interface went
    assert source.sample(1.0) == {NODE_NETWORK_SENT: 10.0}


def test_what_a_process_takes_is_seen() -> None:
    source = Process()
    first = source.sample(1.0)
    # Mapped, for an allocator may give memory that the process has long had.
    with mmap.mmap(-1, 64 * 1024**2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.write(os.urandom(len(mapping)))
        second = source.sample(1.0)
        taken = len(mapping)
    assert second[MEMORY_PRIVATE] - first[MEMORY_PRIVATE] >= 0.9 * taken
    assert second[MEMORY] >= second[MEMORY_PRIVATE]
    assert second[CPU] > 0
    assert first[CPUS] == second[CPUS] > 0


LOAD = """
import time
from watchstep.capture.system.sources import Process
from watchstep.capture.system.sources import NodeCpu
sources = Process(), NodeCpu()
[source.sample(1.0) for source in sources]
began = time.perf_counter()
while time.process_time() < 1.0:
    pass
seconds = time.perf_counter() - began
cpu = sources[0].sample(seconds)
node = sources[1].sample(seconds)
print(cpu["system/cpu"] * cpu["system/cpus"] * seconds, node["system/node_cpu"])
"""


@pytest.mark.ci
def test_a_process_that_is_busy_is_reported_as_that(tmp_path: Path) -> None:
    taken, node = map(float, run_program(tmp_path, LOAD).split())
    assert 0.5 < taken < 1.5  # seconds of a processor
    assert 0 < node <= 1


def test_the_first_rank_of_a_machine_speaks_for_it() -> None:
    def names(local_rank: int) -> set[str]:
        health = RecorderHealth()
        identity = Identity(
            "p", "r", "a", worker=4 + local_rank, world_size=8, local_size=4, local_rank=local_rank
        )
        sources = opened(identity, health, gpus=False)
        figures = [{**source.sample(1.0), **source.sample(1.0)} for source in sources]
        for source in sources:
            source.close()
        assert not health.as_data()["faults"]
        return {name for found in figures for name in found}

    assert {MEMORY, CPU, CPUS} <= names(1)
    assert not any(name.startswith("system/node_") for name in names(1))
    assert {MEMORY, NODE_MEMORY} <= names(0)
    assert names(0) <= {figure.name for figure in FIGURES}


NAMES = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]


@pytest.mark.parametrize(
    ("variable", "due"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1,7,2", [1]),  # what follows one that is none does not count
        ("1,1", [1]),
        ("GPU-cc", [2]),
        ("GPU-a", []),  # two begin so
        ("MIG-123", []),
        ("NoDevFiles", []),
    ],
)
def test_a_program_uses_what_cuda_shows_it(variable: str | None, due: list[int]) -> None:
    assert visible(NAMES, variable) == due


@pytest.mark.skipif(
    not driver_is_there(), reason="NO GPU HERE: what NVML says of one is not proven by this run"
)
def test_a_gpu_reports_its_utilization_and_memory() -> None:
    source = Gpus()
    figures = source.sample(1.0)
    source.close()
    assert any(is_gpu_memory(name) for name in figures)
    assert all(is_gpu(name) or is_gpu_memory(name) for name in figures)
    assert all(0 <= share <= 1 for share in figures.values())
