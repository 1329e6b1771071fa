"""Properties that need a GPU: the compiled programs, no synchronisation, graphs, and large tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP, watching
from watchstep import Hook, open_run
from watchstep.errors import WatchstepError
from watchstep.format.statistics import COUNT_COLUMNS, StatisticsBatch
from watchstep.kernels.array_kernel import measure_array
from watchstep.pytorch import device_kernel
from watchstep.pytorch.gate import GradientGate
from watchstep.pytorch.kernel import TorchKernel

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NO GPU HERE: the compiled Triton programs are not proven by this run",
)


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    """Everything that would wait for the device is an error; what is compiled and allocated at first use was so before."""
    TorchKernel().measure([torch.ones(3, device="cuda")]).collect()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def assert_same(found: StatisticsBatch, due: StatisticsBatch) -> None:
    for name in (*COUNT_COLUMNS, "min", "max", "abs_min"):
        np.testing.assert_array_equal(getattr(found, name), getattr(due, name), err_msg=name)
    for name in ("bins", "counts", "offsets"):
        np.testing.assert_array_equal(
            getattr(found.histogram, name), getattr(due.histogram, name), err_msg=name
        )
    for name in ("abs_sum", "square_sum", "m2"):
        np.testing.assert_allclose(getattr(found, name), getattr(due, name), rtol=3e-6, err_msg=name)
    distance = np.abs(found.mean - due.mean) * np.maximum(due.finite, 1)
    assert (distance <= 3e-6 * due.abs_sum).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gigabyte(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(2**30 // dtype.itemsize + 7, device="cuda").to(dtype)
    tensor[::1_000_003] = math.nan
    tensor[::2_000_003] = 1e-39
    found = TorchKernel().measure([tensor]).collect()
    assert device_kernel.reason() == ""
    assert_same(found, measure_array(tensor.cpu().float().numpy()))


def test_more_than_two_to_the_31_elements() -> None:
    tensor = torch.ones(2**31 + 5, dtype=torch.float8_e5m2, device="cuda")
    row = TorchKernel().measure([tensor]).collect()
    assert row.count.tolist() == [2**31 + 5]
    assert row.histogram.counts.tolist() == [2**31 + 5]
    assert row.mean.tolist() == [1.0]


@pytest.mark.usefixtures("no_synchronisation")
def test_a_thousand_tensors_of_mixed_types_without_a_wait() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float64]
    tensors = [torch.randn(1 + 37 * place, device="cuda").to(dtypes[place % 5]) for place in range(1000)]
    measurement = TorchKernel().measure(tensors)
    gate = GradientGate()
    gate.has_nonfinite(tensors)
    torch.cuda.set_sync_debug_mode("default")
    due = [
        measure_array((tensor if tensor.dtype == torch.float64 else tensor.float()).cpu().numpy())
        for tensor in tensors
    ]
    assert_same(measurement.collect(), StatisticsBatch.concatenate(due))


def test_tensors_on_the_host_and_on_the_device() -> None:
    tensors = [torch.ones(1), torch.ones(2, device="cuda"), torch.ones(3)]
    assert TorchKernel().measure(tensors).collect().count.tolist() == [1, 2, 3]


def test_the_gate_reports_late() -> None:
    gate = GradientGate()
    bad = torch.tensor([math.nan], device="cuda")
    gate.has_nonfinite([bad])
    gate.loss_is_bad(bad, None)
    torch.cuda.synchronize()
    good = torch.ones(1, device="cuda")
    assert gate.has_nonfinite([good])
    assert gate.loss_is_bad(good, None)
    torch.cuda.synchronize()
    assert not gate.has_nonfinite([good])
    assert not gate.loss_is_bad(good, None)


def test_measuring_during_capture_is_refused_and_spoils_nothing() -> None:
    x = torch.ones(4, device="cuda")
    TorchKernel().measure([x]).collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        with pytest.raises(WatchstepError, match="captured"):
            TorchKernel().measure([x])
        assert not GradientGate().has_nonfinite([x])
    graph.replay()
    assert y.tolist() == [2.0] * 4


def training() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 8, device="cuda")


def losses(store: Path | None, *, compiled: bool = False) -> list[float]:
    model, optimizer, x = training()
    hook = Hook(store, config=EVERY_STEP) if store else None
    called = torch.compile(model) if compiled else model
    if hook:
        hook.watch(model, optimizer)
    found = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = called(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    if hook:
        hook.close()
        assert hook.health["faults"] == {}
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_losses_are_the_same_to_the_last_bit(tmp_path: Path, compiled: bool) -> None:
    assert losses(tmp_path, compiled=compiled) == losses(None, compiled=compiled)


def test_a_step_that_is_captured_under_a_watch(tmp_path: Path) -> None:
    model, optimizer, x = training()
    hook = watching(tmp_path, model, optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).pow(2).mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = next(model.parameters()).detach().clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(before, next(model.parameters()))
    hook.close()
    assert open_run(hook.run_url).tensor("0.weight").statistics().num_rows >= 3
