"""The compiled kernel against one norm of the same tensor, on one thread."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.report import Figure, Report
from watchstep.kernels import native_kernel
from watchstep.kernels.native_kernel import KINDS, Kind, MemoryRange

_BYTES = 64 * 2**20
_ROUNDS = 15
_ROUNDS_QUICK = 5
_TARGETS = {"histogram": 5.0, "no histogram": 2.0}
_KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "float16")


def add_kernel_figures(report: Report, *, quick: bool) -> None:
    """Ratios for 64 MB of normally distributed numbers; the targets hold for float32."""
    kernel = native_kernel.load()
    torch.set_num_threads(1)
    for kind in _KINDS:
        if kernel is None:
            report.add(f"kernel/{kind}", Figure(None, "ratio", note="the kernel was not compiled here"))
            continue
        dtype = getattr(torch, kind)
        tensor = torch.randn(_BYTES // dtype.itemsize).to(dtype)
        memory = [MemoryRange(tensor.data_ptr(), tensor.numel(), KINDS[kind])]
        runs: dict[str, Callable[[], object]] = {
            "norm": functools.partial(torch.linalg.vector_norm, tensor),
            "histogram": functools.partial(kernel.measure, memory),
            "no histogram": functools.partial(kernel.measure, memory, histogram=False),
        }
        times = _interleaved(runs, _ROUNDS_QUICK if quick else _ROUNDS)
        least = {name: min(found) for name, found in times.items()}
        for name, target in _TARGETS.items():
            spread = statistics.median(times[name]) / least[name]
            rate = _BYTES / least[name] / 1e9
            note = (
                f"{rate:.1f} GB/s, the norm {_BYTES / least['norm'] / 1e9:.1f} GB/s, median/min {spread:.2f}"
            )
            figure = Figure(
                least[name] / least["norm"], "ratio", target if kind == "float32" else None, note=note
            )
            report.add(f"kernel/{kind}/{name.replace(' ', '_')}", figure)


def _interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of CPU of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, call in runs.items():
            began = time.process_time()
            call()
            times[name].append(time.process_time() - began)
    return {name: found[1:] for name, found in times.items()}
