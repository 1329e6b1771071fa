"""What the gate policy and bundles cost a step without a fault: ``python -m benchmarks.policy [--quick] [--json FILE]``.

The same training runs under several hooks, each on a copy of its own, by turns in blocks of steps in one process. Figures are ratios of process CPU
time, of medians over blocks: bundles against a hook without them, and the policy ``skip`` against ``record``. The spread is that of two equal
hooks. No statistics are measured, so that what is compared is not lost in their noise.

A vote of two ranks is measured in two processes: the time of one reduction of one number by gloo, as before each update under ``skip`` and
``stop`` with several ranks.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.capture.models import WORKLOADS, Training
from benchmarks.report import Figure, Report, arguments
from watchstep import CaptureConfig, Hook

_BARE = CaptureConfig(collections={}, overhead_budget=None, bundles=None, system=None)
_BUNDLES = CaptureConfig(collections={}, overhead_budget=None, system=None)
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "record": {"config": _BARE},
    "record again": {"config": _BARE},
    "bundles": {"config": _BUNDLES},
    "bundles and skip": {"config": _BUNDLES, "on_nonfinite": "skip"},
}
_BLOCKS = {"transformer": 7, "transformer_small": 25, "mlp": 25, "cnn": 25}
_STEPS = {"transformer": 1, "transformer_small": 4, "mlp": 8, "cnn": 4}
_TARGET = 1.01

_VOTES = """
import sys, time
import torch.distributed as dist
from watchstep.pytorch.policy.host_votes import HostVotes
dist.init_process_group("gloo")
votes, count = HostVotes("benchmark"), int(sys.argv[1])
votes.highest(1)
wall, cpu = time.perf_counter(), time.process_time()
for _ in range(count):
    votes.highest(1)
if dist.get_rank() == 0:
    print((time.perf_counter() - wall) / count, (time.process_time() - cpu) / count, flush=True)
import os
os._exit(0)
"""


def _seconds(training: Training, steps: int) -> float:
    began = time.process_time()
    for _ in range(steps):
        training.backward()
        training.update()
    return (time.process_time() - began) / steps


def add_steps(report: Report, workload: str, *, quick: bool) -> None:
    """Measure one workload."""
    blocks = 3 if quick else _BLOCKS[workload]
    trainings = {name: WORKLOADS[workload].start() for name in _VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        hooks = []
        for name, training in trainings.items():
            hook = Hook(folder, **_VARIANTS[name])
            hook.watch(training.model, training.optimizer)
            hooks.append(hook)
            _seconds(training, 3)
        for block in range(blocks):
            names = list(trainings)
            for name in names[block % len(names) :] + names[: block % len(names)]:
                times[name].append(_seconds(trainings[name], _STEPS[workload]))
        for hook in hooks:
            hook.close()
            if hook.health["faults"]:
                raise RuntimeError(
                    f"the recorder had faults, so its cost means nothing: {hook.health['faults']}"
                )
    for name, base, title, target in (
        ("record again", "record", "an equal hook: the noise", None),
        ("bundles", "record", "bundles", _TARGET),
        ("bundles and skip", "bundles", "policy skip", _TARGET),
    ):
        ratios = [first / second for first, second in zip(times[name], times[base], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        note = (
            f"{blocks} blocks of {_STEPS[workload]} steps, quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}"
        )
        report.add(f"{workload}, {title}", Figure(statistics.median(ratios), "ratio", target, note=note))
    report.add(
        f"{workload}, step", Figure(statistics.median(times["record"]) * 1e3, "ms", None, note="CPU time")
    )


def add_votes(report: Report, *, quick: bool) -> None:
    """Measure a vote of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "votes.py"
        program.write_text(_VOTES)
        torchrun = Path(sys.executable).with_name("torchrun")
        done = subprocess.run(
            [torchrun, "--standalone", "--nproc-per-node", "2", program, "200" if quick else "2000"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    wall, cpu = map(float, done.stdout.split())
    report.add("vote of two ranks, gloo, wall", Figure(wall * 1e6, "us", None, note="one machine"))
    report.add("vote of two ranks, gloo, CPU", Figure(cpu * 1e6, "us", None, note="of one rank"))
    report.remark("NCCL: not measured; the votes use gloo on the host with every backend")


def main() -> None:
    """Measure and report."""
    options = arguments("What the gate policy and bundles cost a step without a fault.").parse_args()
    report = Report("The gate policy and bundles, without a fault", options.quick)
    for workload in WORKLOADS:
        add_steps(report, workload, quick=options.quick)
    add_votes(report, quick=options.quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()
