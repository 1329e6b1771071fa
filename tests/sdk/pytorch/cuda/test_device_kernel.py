"""Device kernels: partial results are merged in order, and finite checks use separate operations."""

from __future__ import annotations

import math

import pytest
import torch

from watchstep.kernels.measurement import Completed, Measurement, Reordered
from watchstep.pytorch.device_kernel import measure_by_operations, nonfinite_by_operations
from watchstep.pytorch.gate import GradientGate
from watchstep.pytorch.kernel import TorchKernel


def measured(*sizes: int) -> Measurement:
    return TorchKernel().measure([torch.ones(size) for size in sizes])


def test_parts_are_returned_in_the_requested_order() -> None:
    several = Reordered.of([((3, 0), measured(4, 1)), ((1,), measured(2)), ((2,), measured(3))])
    assert several.collect().count.tolist() == [1, 2, 3, 4]


class Unknown:
    """A measurement whose device has not answered."""

    nonfinite: bool | None = None
    collect = Completed.collect


def test_one_bad_part_is_enough_to_know() -> None:
    bad, good = TorchKernel().measure([torch.full((1,), math.nan)]), measured(1)
    assert Reordered((good, good), (0, 1)).nonfinite is False
    assert Reordered((good, Unknown()), (0, 1)).nonfinite is None
    assert Reordered((Unknown(), bad), (0, 1)).nonfinite is True


def test_operations_measure_where_no_kernel_does() -> None:
    batch = measure_by_operations([torch.tensor([1.0, -3.0]), torch.tensor([math.inf])]).collect()
    assert batch.count.tolist() == [2, 1]
    assert batch.pos_inf.tolist() == [0, 1]
    assert batch.mean[0] == -1


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_operations_find_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    good = [torch.ones(3).to(dtype), torch.empty(0).to(dtype), torch.zeros(2)]
    assert nonfinite_by_operations(good).tolist() == [0, 1]
    assert nonfinite_by_operations([*good, torch.tensor([0.0, bad]).to(dtype)]).tolist() == [1, 1]
    assert nonfinite_by_operations([torch.empty(0)]).tolist() == [0, 1]


def test_the_gate_checks_tensors_on_the_host() -> None:
    gate = GradientGate()
    assert not gate.has_nonfinite([torch.ones(3)])
    assert gate.has_nonfinite([torch.ones(3), torch.tensor([math.nan])])
    strided = torch.ones(6, 6)[::2, ::3]
    assert not gate.has_nonfinite([strided, torch.ones(2, dtype=torch.complex64)])
    strided[1, 1] = math.inf
    assert gate.has_nonfinite([torch.ones(3), strided])
    assert gate.has_nonfinite([torch.tensor([complex(0, math.nan)])])
    assert not gate.loss_is_bad(torch.tensor(1.0))
    assert gate.loss_is_bad(torch.tensor(math.inf))
