"""The compiled kernel gives the same counts for every instruction set, every way to process a chunk, and more than 2**31 elements."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hatch_build import FLAGS, FOLDER, SOURCES
from watchstep.format.statistics import COUNT_COLUMNS
from watchstep.kernels import native_kernel
from watchstep.kernels.array_kernel import checksum_array, measure_array
from watchstep.kernels.native_kernel import KIND_OF_WIDTH, KINDS, MemoryRange, NativeKernel

ROOT = Path(__file__).parents[3]
FLOAT32 = KINDS["float32"]
Numbers = NDArray[np.float32]
Sort = Callable[[np.random.Generator, int], Numbers]


@pytest.fixture(scope="module", params=[512, 256, 0], ids=["widest", "AVX2", "plain"])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernel:
    """The kernel, built to use registers of so many bits at most."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("kernel") / f"_statistics_{request.param}.so"
    sources = [str(ROOT / FOLDER / name) for name in SOURCES]
    widest = f"-DWATCHSTEP_WIDEST={request.param}"
    subprocess.run([compiler, *FLAGS, widest, *sources, "-lm", "-o", str(library)], check=True)
    return NativeKernel(ctypes.CDLL(str(library)))


def normal(rng: np.random.Generator, n: int) -> Numbers:
    return rng.standard_normal(n, np.float32)


def half_zeros(rng: np.random.Generator, n: int) -> Numbers:
    x = normal(rng, n)
    x[x < 0] = -0.0
    return x


def of_binades(low: int, high: int) -> Sort:
    """Magnitudes spread evenly over powers of two."""

    def draw(rng: np.random.Generator, n: int) -> Numbers:
        x: Numbers = np.ldexp(rng.choice([-1.0, 1.0], n), rng.integers(low, high, n)).astype(np.float32)
        return x

    return draw


def two_heaps(rng: np.random.Generator, n: int) -> Numbers:
    x: Numbers = normal(rng, n) * rng.choice(np.array([1.0, 1e-30], np.float32), n)
    return x


def any_bits(rng: np.random.Generator, n: int) -> Numbers:
    """NaN of every payload, infinities, subnormals."""
    return rng.integers(0, 2**32, n, np.uint32).view(np.float32)


def first_narrow_then_wide(rng: np.random.Generator, n: int) -> Numbers:
    x = normal(rng, n)
    x[n // 3 : n // 2] = of_binades(-149, 127)(rng, n // 2 - n // 3)
    return x


SORTS: list[Sort] = [
    normal,
    half_zeros,
    of_binades(-20, 10),
    of_binades(-60, 40),
    of_binades(-149, -120),
    of_binades(126, 128),
    two_heaps,
    any_bits,
    first_narrow_then_wide,
    lambda _, n: np.full(n, 0.375, np.float32),
    lambda _, n: np.full(n, -np.inf, np.float32),
    lambda _, n: np.full(n, 1e-45, np.float32),
    lambda _, n: np.full(n, -0.0, np.float32),
]

sizes = st.one_of(st.integers(0, 200), st.integers(2000, 2100), st.integers(4000, 9000))


@pytest.mark.release
@given(sort=st.sampled_from(SORTS), size=sizes, bad=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
def test_counts_are_those_of_numpy(kernel: NativeKernel, sort: Sort, size: int, bad: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = sort(rng, size)
    if size:
        x[rng.integers(0, size, bad)] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40], bad)
    row, due = kernel.measure([MemoryRange(x.ctypes.data, x.size, FLOAT32)]).collect(), measure_array(x)
    for name in COUNT_COLUMNS:
        assert getattr(row, name)[0] == getattr(due, name)[0], name
    for name in ("min", "max", "abs_min"):
        assert np.array_equal(getattr(row, name), getattr(due, name), equal_nan=True), name
    assert np.array_equal(row.histogram.bins, due.histogram.bins)
    assert np.array_equal(row.histogram.counts, due.histogram.counts)


@pytest.mark.release
@given(
    power=st.integers(-149, 126),
    mean=st.sampled_from([0.0, 1.0, 1e3]),
    size=sizes,
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_at_every_scale(kernel: NativeKernel, power: int, mean: float, size: int, seed: int) -> None:
    """The squares of vanished and of exploded gradients exceed the range of float32."""
    drawn = (normal(np.random.default_rng(seed), size) + mean) / max(1.0, mean)
    x = np.ldexp(np.clip(drawn, -1, 1), power).astype(np.float32)
    row, due = kernel.measure([MemoryRange(x.ctypes.data, x.size, FLOAT32)]).collect(), measure_array(x)
    size_of_mean = float(due.abs_sum[0]) / max(1, size)
    for name, relative in (("abs_sum", 4e-6), ("square_sum", 4e-6)):
        assert float(getattr(row, name)[0]) == pytest.approx(
            float(getattr(due, name)[0]), rel=relative, abs=0
        )
    if size:
        assert float(row.mean[0]) == pytest.approx(float(due.mean[0]), rel=0, abs=4e-6 * size_of_mean)
    assert float(row.m2[0]) == pytest.approx(float(due.m2[0]), rel=8e-6, abs=1e-13 * float(due.square_sum[0]))


@pytest.mark.ci
def test_tensors_of_one_call_share_nothing(kernel: NativeKernel) -> None:
    """Tensors of every kind, in one call and one by one."""
    rng = np.random.default_rng(0)
    arrays = [sort(rng, size) for size in (3, 700, 5000) for sort in SORTS]
    memories = [MemoryRange(x.ctypes.data, x.size, FLOAT32) for x in arrays]
    together = kernel.measure(memories).collect()
    for place, memory in enumerate(memories):
        bins, counts = kernel.measure([memory]).collect().histogram.row(0)
        assert np.array_equal(together.histogram.row(place)[0], bins)
        assert np.array_equal(together.histogram.row(place)[1], counts)


def test_equal_elements_have_no_spread(kernel: NativeKernel) -> None:
    x = np.full(10_000, 1.1, np.float32)
    row = kernel.measure([MemoryRange(x.ctypes.data, x.size, FLOAT32)]).collect()
    assert float(row.m2[0]) == 0
    assert float(row.mean[0]) == float(np.float32(1.1))
    assert float(row.abs_sum[0]) == pytest.approx(10_000 * float(np.float32(1.1)), rel=1e-12)


@given(size=sizes, width=st.sampled_from(sorted(KIND_OF_WIDTH)), seed=st.integers(0, 2**32 - 1))
def test_checksums_are_those_of_numpy(kernel: NativeKernel, size: int, width: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 256, size * width, np.uint8).view(f"u{width}")
    assert kernel.checksums([MemoryRange(x.ctypes.data, size, KIND_OF_WIDTH[width])])[0] == checksum_array(x)


ELEMENTS = 2**31 + 12_345


@pytest.mark.release
@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere reading pages that were never written may take memory"
)
def test_elements_past_2_to_the_31_count() -> None:
    kernel = native_kernel.load()
    if kernel is None:
        pytest.skip("the compiled kernel is not built")
    memory = np.zeros(ELEMENTS, np.uint8)
    memory[[0, 2**31 - 1, 2**31, ELEMENTS - 1]] = [
        0x3C,
        0xC0,
        0x7C,
        0x7F,
    ]  # as float8_e5m2: 1, -2, infinity, NaN
    row = kernel.measure([MemoryRange(memory.ctypes.data, ELEMENTS, KINDS["float8_e5m2"])]).collect()
    counts = (row.count[0], row.zero[0], row.negative[0], row.pos_inf[0], row.nan[0])
    assert counts == (ELEMENTS, ELEMENTS - 4, 1, 1, 1)
    assert (row.min[0], row.max[0], row.abs_sum[0]) == (-2, 1, 3)
    bins, found = row.histogram.row(0)
    assert dict(zip(bins.tolist(), found.tolist(), strict=True)) == {0: 1, 3: 1}
