"""The Triton kernel on a CUDA device: its share of the memory's bandwidth, its waits, and a bf16 transformer's step."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.report import Figure, Report
from watchstep import Cadence, CaptureConfig, Hook
from watchstep.kernels.measurement import Measurement
from watchstep.pytorch import device_kernel
from watchstep.pytorch.kernel import TorchKernel

_BYTES = 2**30
_ROUNDS = 30
_ROUNDS_QUICK = 5
_SHARE = 0.6
_STEPS = 50
_WARM_STEPS = 20
_BUSY_CYCLES = 5_000_000
_DTYPES = (torch.float32, torch.bfloat16)


def add_cuda_figures(report: Report, *, quick: bool) -> None:
    """Bandwidth over 1 GB, synchronisations of one measurement, and what all statistics add to a step.

    The theoretical bandwidth is the device's memory clock times its bus; a sum of the same tensor tells how much of it
    a plain read reaches. Times are the device's own, least of the rounds.
    """
    if not torch.cuda.is_available():
        _not_measured(
            report, "not measured: this machine has no CUDA device, or PyTorch is built without CUDA"
        )
        return
    report.remark(
        f"CUDA device: {torch.cuda.get_device_name()}; Triton: {device_kernel.reason() or 'serves'}"
    )
    rounds = _ROUNDS_QUICK if quick else _ROUNDS
    for dtype in _DTYPES:
        _add_bandwidth(report, dtype, rounds)
    _add_synchronisations(report)
    _add_steps(report, 5 if quick else _STEPS)


def _not_measured(report: Report, why: str) -> None:
    report.remark(f"cuda: {why}")
    for dtype in _DTYPES:
        report.add(_named(dtype, "of_theoretical"), Figure(None, "ratio", _SHARE, "at least", why))
        report.add(_named(dtype, "of_sum"), Figure(None, "ratio", note=why))
    report.add("cuda/synchronisations", Figure(None, "count", 0, note=why))
    report.add("cuda/transformer_bf16/step", Figure(None, "ms", note=why))
    report.add("cuda/transformer_bf16/all_statistics", Figure(None, "ratio", note=why))


def _named(dtype: torch.dtype, figure: str) -> str:
    return f"cuda/{str(dtype).removeprefix('torch.')}/{figure}"


def _add_bandwidth(report: Report, dtype: torch.dtype, rounds: int) -> None:
    tensor = torch.randn(_BYTES // dtype.itemsize, device="cuda").to(dtype)
    kernel = TorchKernel()
    measuring = _least_seconds(lambda: kernel.measure([tensor]), rounds, after=_collect)
    summing = _least_seconds(functools.partial(torch.sum, tensor), rounds)
    rate, plain = _BYTES / measuring, _BYTES / summing
    note = f"{rate / 1e9:.0f} GB/s, a sum {plain / 1e9:.0f} GB/s"
    whole = _theoretical_bandwidth()
    share = Figure(rate / whole if whole else None, "ratio", _SHARE, "at least", note)
    report.add(_named(dtype, "of_theoretical"), share)
    report.add(_named(dtype, "of_sum"), Figure(rate / plain, "ratio", note=note))


def _collect(measurement: Measurement) -> None:
    measurement.collect()


def _theoretical_bandwidth() -> float | None:
    """Bytes a second: two transfers a clock over the whole bus; None where the driver does not tell."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    return float(2 * kilohertz * 1e3 * bits / 8) or None


def _least_seconds(
    call: Callable[[], Any], rounds: int, after: Callable[[Any], object] = lambda _: None
) -> float:
    """By the device's clock; what is compiled and allocated at first use is over before.

    The device is kept busy until the call is wholly queued, so that the host's part is not counted.
    """
    times = []
    for _ in range(rounds + 3):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001 - the one way to keep a stream busy
        began.record()
        result = call()
        ended.record()
        ended.synchronize()
        after(result)
        times.append(began.elapsed_time(ended) / 1e3)
    return float(min(times[3:]))


def _add_synchronisations(report: Report) -> None:
    tensors = [torch.randn(1000, device="cuda", dtype=dtype) for dtype in _DTYPES for _ in range(50)]
    TorchKernel().measure(tensors).collect()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        TorchKernel().measure(tensors)
    torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(warning.message) for warning in found)
    report.add("cuda/synchronisations", Figure(waits, "count", 0, note="as PyTorch's debug mode counts them"))


def _add_steps(report: Report, steps: int) -> None:
    bare = _step_milliseconds(steps, recorded=False)
    recorded = _step_milliseconds(steps, recorded=True)
    report.add("cuda/transformer_bf16/step", Figure(bare, "ms", note="302 M parameters, 8x512 vectors"))
    note = f"{recorded:.2f} ms: weights, biases and gradients at every step"
    report.add("cuda/transformer_bf16/all_statistics", Figure(recorded / bare, "ratio", note=note))


def _step_milliseconds(steps: int, *, recorded: bool) -> float:
    """Mean over the steps, by the device's clock."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    inputs = torch.randn(8, 512, 1024, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as store:
        hook = None
        if recorded:
            collections = {name: Cadence() for name in ("weights", "biases", "gradients")}
            hook = Hook(store, config=CaptureConfig(collections=collections, overhead_budget=None))
            hook.watch(model, optimizer)
        for _ in range(_WARM_STEPS):
            step()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(steps):
            step()
        ended.record()
        ended.synchronize()
        if hook is not None:
            hook.close()
    return float(began.elapsed_time(ended)) / steps
