"""Headroom in number formats: limits, extremes with their steps, and shares of elements."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.stored import FIRST, SECOND, new_run, sharded_rows, write
from watchstep import open_run
from watchstep.reading.compaction import compact
from watchstep.reading.headroom import FORMATS, headroom_of, read_magnitudes, shares_of

EVERY = (0, 2**62)
TYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


def test_limits_are_those_of_the_data_types() -> None:
    for each in FORMATS:
        limits = ml_dtypes.finfo(TYPES[each.name])  # type: ignore[no-untyped-call]
        assert each.largest == float(limits.max)
        assert each.smallest_normal == float(limits.smallest_normal)
        assert each.smallest == float(limits.smallest_subnormal)


@pytest.mark.parametrize(
    ("largest", "smallest", "bits", "state"),
    [
        (1.0, 2.0**-14, (math.log2(65504), 0.0), "ok"),
        (65504.0, 1.0, (0.0, 14.0), "close"),
        (65505.0, 1.0, (math.log2(65504 / 65505), 14.0), "overflow"),
        (1.0, 2.0**-20, (math.log2(65504), -6.0), "subnormal"),
        (1.0, 2.0**-25, (math.log2(65504), -11.0), "underflow"),
        (1e308, 5e-324, (math.log2(65504) - math.log2(1e308), -1060.0), "overflow"),
    ],
)
def test_headroom_of_fp16(largest: float, smallest: float, bits: tuple[float, float], state: str) -> None:
    room = headroom_of(largest, smallest)[0]
    assert room.format == "fp16"
    assert (room.overflow_bits, room.underflow_bits) == pytest.approx(bits)
    assert room.state == state


def test_a_tensor_without_elements_has_no_headroom() -> None:
    for room in headroom_of(math.nan, math.nan):
        assert (room.overflow_bits, room.underflow_bits, room.state) == (None, None, "ok")


def test_extremes_and_their_first_steps(tmp_path: Path) -> None:
    rows = [Row(step, FIRST, [value, 0.5]) for step, value in enumerate([1.0, -8.0, 8.0, 2.0**-30])]
    rows += [Row(step, SECOND, [math.nan, 0.0]) for step in range(4)]
    rows.append(Row(3, FIRST, [1e9], mode="eval"))
    write(new_run(tmp_path), [block_of(rows[:3]), block_of(rows[3:])])
    url = tmp_path / "default" / "r"
    for _ in range(2):
        found = read_magnitudes(open_run(url).index, [FIRST.name, SECOND.name], 2, "train", EVERY)
        first, second = found.tensors
        assert (first.largest, first.largest_step) == (8.0, 1)
        assert (first.smallest, first.smallest_step) == (2.0**-30, 3)
        assert math.isnan(second.largest)
        assert (second.largest_step, second.smallest_step) == (-1, -1)
        assert found.edges.tolist() == [0, 2, 4]
        assert (found.largest.tolist(), found.smallest.tolist()) == ([8.0, 8.0], [0.5, 2.0**-30])
        compact(url, delete_after=0)
    within = read_magnitudes(open_run(url).index, [FIRST.name], 2, None, (3, 3))
    assert (within.tensors[0].largest, within.tensors[0].largest_step) == (1e9, 3)


def test_extremes_of_shards(tmp_path: Path) -> None:
    write(new_run(tmp_path), [block_of(sharded_rows(range(3), 4))])
    (found,) = read_magnitudes(
        open_run(tmp_path / "default" / "r").index, [FIRST.name], 1, "train", EVERY
    ).tensors
    assert (found.largest, found.largest_step, found.smallest) == (8.0, 0, 1.0)


def test_shares_of_elements(tmp_path: Path) -> None:
    values = [2.0**16, -(2.0**15), 1.0, 2.0**-14, 2.0**-15, -(2.0**-24), 2.0**-25, 0.0]
    write(new_run(tmp_path), [block_of([Row(0, FIRST, values)])])
    shares = shares_of(open_run(tmp_path / "default" / "r").histogram(FIRST.name))
    assert (shares[0].overflow, shares[0].subnormal, shares[0].underflow) == (1 / 7, 2 / 7, 1 / 7)
    assert (shares[2].overflow, shares[2].subnormal, shares[2].underflow) == (0.0, 0.0, 0.0)
