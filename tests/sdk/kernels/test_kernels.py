"""All kernels give the figures of the exact reference: exact counts, and sums within their bounds; parts and scaled tensors give those of the whole."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.sdk.reference import ExactRow, exact_row
from watchstep.format.statistics import COUNT_COLUMNS, VALUE_COLUMNS, StatisticsBatch, l1, l2
from watchstep.kernels import native_kernel
from watchstep.kernels.array_kernel import measure_array
from watchstep.kernels.measurement import Completed, Measurement, Merged, Reordered, Rescaled
from watchstep.pytorch.device_kernel import (
    measure_by_operations,
    measure_on_device,
    nonfinite_by_operations,
    to_batch,
)
from watchstep.pytorch.gate import GradientGate, any_is_nonfinite_on_host
from watchstep.pytorch.kernel import TorchKernel, checksums

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
Measure = Callable[[Tensor], StatisticsBatch]


def by_default(tensor: Tensor) -> StatisticsBatch:
    """The compiled kernel, where it is built and knows the type."""
    return TorchKernel().measure([tensor]).collect()


def by_numpy(tensor: Tensor) -> StatisticsBatch:
    return measure_array((tensor if tensor.dtype == torch.float64 else tensor.float()).numpy())


def by_torch(tensor: Tensor) -> StatisticsBatch:
    """The operations that run on devices, on the host."""
    counts, values, bins = measure_on_device(tensor)
    return to_batch(counts[None], values[None], bins[None])


each = pytest.mark.parametrize("measure", [by_default, by_numpy, by_torch])


def test_the_compiled_kernel_is_there_where_a_compiler_is() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: the compiled kernel is not built, and numpy serves")
    assert native_kernel.load() is not None


def assert_agrees(row: StatisticsBatch, exact: ExactRow, *, relative: float = 4e-6) -> None:
    """Counts, extremes and histograms to the last; sums within the bound that the compiled kernel states."""
    assert len(row) == 1
    for name in COUNT_COLUMNS:
        assert int(getattr(row, name)[0]) == getattr(exact, name), name
    for name in ("min", "max", "abs_min"):
        measured, due = float(getattr(row, name)[0]), getattr(exact, name)
        assert (math.isnan(measured) and due is None) or measured == due, name
    bins, counts = row.histogram.row(0)
    assert dict(zip(bins.tolist(), counts.tolist(), strict=True)) == exact.histogram
    size = float(exact.abs_sum)
    mean = float(row.mean[0])
    if exact.mean is None:
        assert math.isnan(mean)
    else:
        finite = exact.count - exact.nan - exact.pos_inf - exact.neg_inf
        assert mean == pytest.approx(float(exact.mean), abs=relative * size / finite + 1e-320)
    assert float(row.abs_sum[0]) == pytest.approx(size, rel=relative, abs=1e-320)
    assert float(row.square_sum[0]) == pytest.approx(float(exact.square_sum), rel=relative, abs=1e-320)
    assert float(row.m2[0]) == pytest.approx(
        float(exact.m2), rel=2 * relative, abs=1e-13 * float(exact.square_sum) + 1e-320
    )
    for norm in (l1, l2):  # sums of what is not there are 0; its norm is none
        assert math.isnan(float(norm(row)[0])) == (exact.mean is None and exact.count > 0)


elements = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 2.0**-149, 65504.0]),
    st.floats(-1e6, 1e6, width=32),
)


@each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(values=st.lists(elements, max_size=60))
def test_every_dtype_and_value(measure: Measure, dtype: torch.dtype, values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert_agrees(measure(tensor), exact_row(tensor.double().tolist()))


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_holds_nothing_finite_has_no_norm(measure: Measure, bad: float) -> None:
    assert_agrees(measure(torch.full((70, 70), bad)), exact_row([bad] * 4900))


@pytest.mark.release
@each
def test_chunks_merge(measure: Measure) -> None:
    tensor = torch.randn(200_001, generator=torch.Generator().manual_seed(0)) * 3 + 10
    tensor[::1000] = math.nan
    assert_agrees(measure(tensor), exact_row(tensor.double().tolist()))


@each
@pytest.mark.parametrize("values", [[3, -4, 0], [True, False]])
def test_integers_and_booleans(measure: Measure, values: list[int]) -> None:
    tensor = torch.tensor(values)
    assert_agrees(measure(tensor), exact_row(tensor.double().tolist()))


@each
def test_strided_views_are_measured_as_they_read(measure: Measure) -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()[1::2, ::3]
    assert_agrees(measure(tensor), exact_row(tensor.double().flatten().tolist()))


@each
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors(measure: Measure, shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 2.5)
    assert_agrees(measure(tensor), exact_row(tensor.double().flatten().tolist()))


@each
def test_nan_payloads_are_nan(measure: Measure) -> None:
    bits = np.array([0x7FC00001, 0x7F800001, 0xFFC12345], np.uint32)
    assert int(measure(torch.from_numpy(bits.view(np.float32))).nan[0]) == 3


def test_complex_tensors_are_their_parts() -> None:
    row = TorchKernel().measure([torch.tensor([1 + 2j, -3 + 0j])]).collect()
    assert_agrees(row, exact_row([1.0, 2.0, -3.0, 0.0]))


def test_sparse_tensors_are_their_values() -> None:
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2]]), torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=True
    )
    assert_agrees(TorchKernel().measure([tensor]).collect(), exact_row([1.0, 5.0]))


def test_measuring_changes_nothing() -> None:
    tensor = torch.randn(1000, requires_grad=True)
    before, state = tensor.detach().clone(), torch.random.get_rng_state()
    TorchKernel().measure([tensor])
    assert torch.equal(tensor, before)
    assert tensor.grad is None
    assert torch.equal(torch.random.get_rng_state(), state)


def test_several_tensors_give_a_row_each() -> None:
    batch = TorchKernel().measure([torch.ones(3), torch.zeros(2), torch.full((1,), math.nan)]).collect()
    assert batch.count.tolist() == [3, 2, 1]
    assert batch.zero.tolist() == [0, 2, 0]
    assert batch.nan.tolist() == [0, 0, 1]


def test_nonfinite_is_available_at_once_on_the_host() -> None:
    assert TorchKernel().measure([torch.ones(3)]).nonfinite is False
    assert TorchKernel().measure([torch.tensor([math.inf])]).nonfinite is True


@given(
    st.lists(st.floats(-8, 8, width=32) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_repeated_elements_are_measured_as_if_they_were_copied(
    values: list[float], times: int, more: int
) -> None:
    small = torch.tensor(values, dtype=torch.float32)
    expanded = small[None, :, None].expand(times, len(values), more)
    seen, copied = by_default(expanded), by_default(expanded.clone(memory_format=torch.contiguous_format))
    for name in COUNT_COLUMNS:
        assert getattr(seen, name).tolist() == getattr(copied, name).tolist()
    for name in ("min", "max", "abs_min", "mean", "m2", "abs_sum", "square_sum"):
        np.testing.assert_allclose(getattr(seen, name), getattr(copied, name), rtol=1e-6, atol=1e-9)
    for own, others in zip(seen.histogram.row(0), copied.histogram.row(0), strict=True):
        np.testing.assert_array_equal(own, others)


def test_an_expanded_tensor_is_not_copied() -> None:
    row = by_default(torch.tensor(-2.0).expand(1 << 20, 1 << 20))
    assert (row.count[0], row.negative[0], row.mean[0]) == (1 << 40, 1 << 40, -2.0)
    assert not any_is_nonfinite_on_host([torch.tensor(1.0).expand(1 << 20, 1 << 20)])
    assert any_is_nonfinite_on_host([torch.tensor(math.nan).expand(1 << 20, 1 << 20)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_whose_memory_was_freed_has_no_elements(dtype: torch.dtype) -> None:
    whole = torch.ones(1000, dtype=dtype)
    freed = [whole, whole[500:], whole.view(10, 100).t()]
    whole.untyped_storage().resize_(0)
    rows = TorchKernel().measure([*freed, torch.ones(3)]).collect()
    assert rows.count.tolist() == [0, 0, 0, 3]
    assert not any_is_nonfinite_on_host(freed)
    assert checksums(freed[:1]).shape == (1,)


def of_ones(*sizes: int) -> Measurement:
    return TorchKernel().measure([torch.ones(size) for size in sizes])


def test_parts_are_returned_in_the_requested_order() -> None:
    several = Reordered.of([((3, 0), of_ones(4, 1)), ((1,), of_ones(2)), ((2,), of_ones(3))])
    assert several.collect().count.tolist() == [1, 2, 3, 4]


class Unknown:
    """A measurement whose device has not answered."""

    nonfinite: bool | None = None
    collect = Completed.collect


def test_one_bad_part_is_enough_to_know() -> None:
    bad, good = TorchKernel().measure([torch.full((1,), math.nan)]), of_ones(1)
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
    assert not gate.loss_is_bad(torch.tensor(1.0), 1.0)
    assert gate.loss_is_bad(torch.tensor(math.inf), math.inf)


ELEMENTS = st.lists(
    st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)
    | st.sampled_from([np.nan, np.inf, -np.inf]),
    max_size=30,
)


def measured_list(values: list[float]) -> Completed:
    return Completed(measure_array(np.asarray(values, np.float64)))


def assert_close(found: StatisticsBatch, due: StatisticsBatch) -> None:
    for name in COUNT_COLUMNS:
        assert getattr(found, name).tolist() == getattr(due, name).tolist()
    for name in VALUE_COLUMNS:
        np.testing.assert_allclose(getattr(found, name), getattr(due, name), rtol=1e-9, atol=1e-9)


def assert_same_bins(found: StatisticsBatch, due: StatisticsBatch) -> None:
    assert found.histogram.offsets.tolist() == due.histogram.offsets.tolist()
    assert found.histogram.bins.tolist() == due.histogram.bins.tolist()
    assert found.histogram.counts.tolist() == due.histogram.counts.tolist()


@given(ELEMENTS, st.integers(-20, 40))
def test_a_power_of_two_is_exact(values: list[float], exponent: int) -> None:
    scale = 2.0**exponent
    found = Rescaled(measured_list([value * scale for value in values]), lambda: scale).collect()
    due = measured_list(values).collect()
    for name in ("min", "max", "abs_min"):
        np.testing.assert_array_equal(getattr(found, name), getattr(due, name))
    assert_close(found, due)
    assert_same_bins(found, due)


@given(ELEMENTS, st.floats(1e-3, 1e6))
def test_other_numbers_are_within_rounding_and_one_bin(values: list[float], scale: float) -> None:
    found = Rescaled(measured_list([value * scale for value in values]), lambda: scale).collect()
    due = measured_list(values).collect()
    assert_close(found, due)
    assert found.histogram.counts.sum() == due.histogram.counts.sum()
    if len(due.histogram.bins):
        assert abs(int(found.histogram.bins[0] >> 1) - int(due.histogram.bins[0] >> 1)) <= 1


@given(st.lists(st.lists(ELEMENTS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_parts_are_the_whole(tensors: list[list[list[float]]]) -> None:
    parts = [(owner, measured_list(part)) for owner, group in enumerate(tensors) for part in group]
    merged = Merged([part for _, part in parts], [owner for owner, _ in parts], len(tensors))
    whole = StatisticsBatch.concatenate(
        [measured_list(list(chain.from_iterable(group))).collect() for group in tensors]
    )
    assert_close(merged.collect(), whole)
    assert_same_bins(merged.collect(), whole)
    assert merged.nonfinite == bool(whole.nonfinite.any())


@pytest.mark.parametrize(("values", "bad"), [([1.0], False), ([1.0, np.nan], True)])
def test_what_is_not_finite_stays_so(values: list[float], bad: bool) -> None:
    assert Rescaled(measured_list(values), lambda: 2.0).nonfinite == bad
