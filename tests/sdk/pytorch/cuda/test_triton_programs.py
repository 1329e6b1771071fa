"""The Triton programs give the figures of the exact reference, and compile to machine code for their target GPUs. They are interpreted here; no device is tested."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.sdk.kernels.test_kernels import assert_agrees
from tests.sdk.pytorch.cuda.interpreter import DEVICE, kernel
from tests.sdk.reference import exact_row
from watchstep.format.statistics import StatisticsBatch
from watchstep.pytorch.kernel import device_tensors

pytestmark = pytest.mark.release

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def measured(tensors: list[Tensor]) -> StatisticsBatch:
    return kernel().measure(device_tensors([tensor.to(DEVICE) for tensor in tensors])).collect()


def assert_rows_agree(tensors: list[Tensor]) -> None:
    batch = measured(tensors)
    assert len(batch) == len(tensors)
    for place, tensor in enumerate(tensors):
        row = batch.take(np.array([place], np.intp))
        assert_agrees(row, exact_row(tensor.detach().double().flatten().tolist()), relative=3e-6)


def nonfinite_of(tensors: list[Tensor]) -> int:
    landing = kernel().check_nonfinite([tensor.to(DEVICE) for tensor in tensors])
    landing.wait()
    return int(landing.results[0])


def from_bits(bits: list[int], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(bits, WIDTHS[dtype.itemsize])).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_any_bits_of_every_type(dtype: torch.dtype, data: st.DataObject) -> None:
    bits = st.integers(0, 2 ** (8 * dtype.itemsize) - 1)
    assert_rows_agree([from_bits(data.draw(st.lists(bits, max_size=60)), dtype)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_holds_nothing_finite_has_no_norm(bad: float) -> None:
    assert_rows_agree([torch.full((40, 30), bad), torch.zeros(3)])


values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -(2.0**-149), 2.0**127]),
    st.floats(-1e6, 1e6, width=32),
    st.floats(-(2.0**-120), 2.0**-120, width=32),
)
tensors_of_any_type = st.builds(
    lambda elements, dtype: torch.tensor(elements, dtype=torch.float64).to(dtype),
    st.lists(values, max_size=20),
    st.sampled_from(DTYPES),
)


@given(tensors=st.lists(tensors_of_any_type, min_size=1, max_size=6))
def test_many_tensors_of_mixed_types_in_one_launch(tensors: list[Tensor]) -> None:
    assert_rows_agree(tensors)


@settings(max_examples=20)
@given(
    elements=st.sampled_from([2047, 2048, 2049, 32_767, 32_768, 32_769, 70_001]),
    skipped=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_blocks_and_spans_at_any_alignment(
    elements: int, skipped: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(elements + skipped, generator=generator) * 3 + 1).to(dtype)
    assert_rows_agree([tensor[skipped:]])


NORMAL = torch.randn(5000, generator=torch.Generator().manual_seed(0))
HARD = {
    "a mean far from zero": NORMAL * 1e-3 + 10,
    "subnormals alone": NORMAL * 1e-41,
    "subnormals beside the least number that leaves them out": torch.cat(
        [NORMAL * 1e-40, torch.tensor([2.0**-55])]
    ),
    "squares below float32": NORMAL * 1e-30,
    "squares above float32": NORMAL * 1e37,
    "every power of two": torch.exp2(torch.arange(-149, 128).float()),
    "one large among small": torch.cat([torch.full((4095,), -0.1), torch.tensor([1e10])]),
    "nothing finite": torch.full((3000,), math.nan),
    "blocks with nothing finite": torch.cat([torch.full((2048,), -math.inf), NORMAL]),
    "negatives alone": -NORMAL.abs() - 1,
    "zeros": torch.zeros(3000),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_sums(name: str) -> None:
    assert_rows_agree([HARD[name]])


def test_nan_payloads_are_nan() -> None:
    assert int(measured([from_bits([0x7FC00001, 0x7F800001, 0xFFC12345], torch.float32)]).nan[0]) == 3


def test_empty_tensors_and_scalars() -> None:
    assert_rows_agree([torch.empty(0), torch.tensor(2.5), torch.empty(3, 0, 2), torch.tensor(-1.0)])
    assert_rows_agree([torch.empty(0)])


def test_views_are_measured_as_they_read() -> None:
    base = torch.arange(240, dtype=torch.float32).reshape(2, 4, 5, 6)
    assert_rows_agree(
        [
            base.reshape(8, 30).t(),
            base.reshape(8, 30)[1::2, ::3],
            base.permute(0, 2, 3, 1),
            base.to(memory_format=torch.channels_last),
            base[:1].expand(3, 4, 5, 6),
        ]
    )


def test_two_passes_agree_to_the_last_bit() -> None:
    tensors = [NORMAL, NORMAL.bfloat16()]
    first, second = measured(tensors), measured(tensors)
    for name in ("mean", "m2", "abs_sum", "square_sum"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()


class Named(Tensor):
    """A subclass with plain memory."""


def test_subclasses_are_their_memory() -> None:
    tensor: Tensor = NORMAL.clone().as_subclass(Named)
    assert_rows_agree([tensor, torch.nn.Parameter(NORMAL)])


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_distributed_tensor_is_its_local_part() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensor = distribute_tensor(NORMAL, init_device_mesh("cpu", (1,)), [Shard(0)])
    batch = measured([tensor])
    assert_agrees(batch, exact_row(NORMAL.double().tolist()), relative=3e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_check_finds_non_finite_values(dtype: torch.dtype, bad: float) -> None:
    good = [NORMAL.to(dtype), torch.full((9,), 57344.0 if dtype != torch.float8_e4m3fn else 448.0).to(dtype)]
    assert nonfinite_of(good) == 0
    spoilt = torch.tensor([1.0, bad]).to(dtype)
    if torch.isfinite(spoilt.double()).all():
        pytest.skip(f"{dtype} has no infinity, and {bad} becomes its largest number")
    assert nonfinite_of([*good, spoilt]) == 1


def test_eight_checks_cover_a_large_tensor() -> None:
    tensor = torch.zeros(9 * 32_768 + 5)
    assert not any(nonfinite_of([tensor]) for _ in range(8))
    for place in (0, 5 * 32_768 + 7, 9 * 32_768 + 4):
        spoilt = tensor.clone()
        spoilt[place] = math.inf
        assert sum(nonfinite_of([spoilt]) for _ in range(8)) == 1


def test_a_check_without_tensors() -> None:
    assert nonfinite_of([torch.empty(0)]) == 0


def test_memory_is_used_again_once_it_is_collected() -> None:
    first = kernel().measure([torch.ones(3, device=DEVICE)])
    second = kernel().measure([torch.full((1,), math.nan, device=DEVICE)])
    assert second.collect().nan.tolist() == [1]
    assert second.nonfinite is True
    assert first.collect().count.tolist() == [3]
    assert first.nonfinite is False
    third = kernel().measure([torch.zeros(2, device=DEVICE)])
    assert third.collect().zero.tolist() == [2]
    assert first.collect().zero.tolist() == [0]


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from watchstep.pytorch.cuda import programs

BLOCKS = {"BLOCK": programs.BLOCK, "BLOCKS": programs.BLOCKS}
for function, arguments, constants in [
    (programs.measure_spans, {"table": "*i64", "partials": "*fp64", "rows": "*i64", "regions": "i32"}, BLOCKS),
    (
        programs.merge_spans,
        {"table": "*i64", "partials": "*fp64", "rows": "*i64", "regions": "i32", "programs": "i32"},
        {"MERGED": programs.MERGED},
    ),
    (
        programs.check_spans,
        {"table": "*i64", "flag": "*i64", "regions": "i32", "turn": "i32", "slices": "i32"},
        BLOCKS,
    ),
]:
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(arguments.values()) if kind[0] == "*"}
    compiled = triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", int(sys.argv[1]), 32),
        options={"num_warps": 4, "enable_fp_fusion": False, "maxnreg": 128},
    )
    assert compiled.asm["cubin"]
    print(function.__name__, "wide" if "ld.global.v4" in compiled.asm["ptx"] else "narrow")
"""


@pytest.mark.parametrize("capability", [80, 90], ids=["A100", "H100, H200"])
def test_programs_compile(capability: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: it has builds for Linux alone")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    # Elements are read sixteen bytes a thread at once; what merges reads little.
    assert found.stdout.split("\n")[:3] == ["measure_spans wide", "merge_spans narrow", "check_spans wide"]
