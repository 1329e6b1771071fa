from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.format.tensors import TensorInfo
from watchstep_rules.signals.baseline import (
    MAX_PHASES,
    MAX_RUNS,
    Baseline,
    BaselineRun,
    BaselineTensor,
    Span,
    merge_summaries,
    phase_of,
    ranges_of,
)


def summary(*phases: Span | None, shape: tuple[int, ...] = ()) -> BaselineRun:
    return BaselineRun(tensors={"loss": BaselineTensor(shape=shape, statistic="mean", phases=phases)})


def merged(*summaries: BaselineRun) -> Baseline | None:
    return merge_summaries({f"run-{place}": each for place, each in enumerate(summaries)})


def phases(*summaries: BaselineRun) -> tuple[Span | None, ...]:
    baseline = merged(*summaries)
    assert baseline is not None
    return baseline.tensors["loss"].phases


def test_phases_double_in_length() -> None:
    assert phase_of(np.arange(8)).tolist() == [0, 1, 1, 2, 2, 2, 2, 3]


@given(st.integers(0, 2**39 - 2))
def test_a_step_is_within_its_phase(step: int) -> None:
    phase = int(phase_of(np.array([step]))[0])
    assert 2**phase - 1 <= step <= 2 ** (phase + 1) - 2


def test_steps_beyond_the_last_phase_are_in_it() -> None:
    assert phase_of(np.array([2**62])).tolist() == [MAX_PHASES - 1]


def test_two_runs_make_no_baseline() -> None:
    assert merged(summary((1.0, 1.0)), summary((1.0, 1.0))) is None


def test_a_range_is_widened_by_a_factor_of_two_at_least() -> None:
    assert phases(summary((1.0, 1.0)), summary((1.0, 1.0)), summary((1.0, 1.0))) == ((0.5, 2.0),)


def test_a_range_is_widened_by_its_own_factor_where_that_is_more() -> None:
    found = phases(summary((1.0, 2.0)), summary((2.0, 4.0)), summary((4.0, 8.0)))
    assert found[0] == pytest.approx((1 / 8, 64.0))


def test_a_range_across_zero_is_widened_by_its_length() -> None:
    assert phases(summary((-1.0, 1.0)), summary((0.0, 1.0)), summary((0.0, 3.0))) == ((-5.0, 7.0),)


def test_a_phase_that_fewer_than_three_runs_reached_has_no_range() -> None:
    long = summary((1.0, 1.0), (1.0, 1.0))
    assert phases(long, long, summary((1.0, 1.0))) == ((0.5, 2.0), None)


def test_the_shape_of_the_newest_run_counts() -> None:
    new, old = summary((9.0, 9.0), shape=(2,)), summary((1.0, 1.0), shape=(3,))
    baseline = merged(new, new, old, new)
    assert baseline is not None
    assert baseline.tensors["loss"].shape == (2,)
    assert baseline.tensors["loss"].phases == ((4.5, 18.0),)
    baseline = merged(new, new, old)
    assert baseline is not None
    assert baseline.tensors == {}


def test_only_the_newest_runs_count() -> None:
    baseline = merged(*[summary((1.0, 1.0))] * MAX_RUNS, summary((1000.0, 1000.0)))
    assert baseline is not None
    assert baseline.runs == tuple(f"run-{place}" for place in range(MAX_RUNS))
    assert baseline.tensors["loss"].phases == ((0.5, 2.0),)


spans = st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=2).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(spans, min_size=3, max_size=MAX_RUNS))
def test_a_range_holds_all_that_it_was_made_of(seen: list[tuple[float, float]]) -> None:
    (span,) = phases(*(summary(each) for each in seen))
    assert span is not None
    assert span[0] <= min(low for low, _ in seen)
    assert span[1] >= max(high for _, high in seen)
    assert Baseline.model_validate_json(merged(*(summary(each) for each in seen)).model_dump_json())  # type: ignore[union-attr]


def test_a_tensor_of_another_shape_has_no_range() -> None:
    baseline = merged(*[summary((1.0, 1.0))] * 3)
    assert baseline is not None
    same = TensorInfo("loss", ("losses",), "loss")
    other = TensorInfo("loss", ("losses",), "loss", shape=(2,))
    ranges = ranges_of(baseline, (same, other, TensorInfo("new", ("losses",), "loss")))
    assert ranges.spans[0, 0].tolist() == [0.5, 2.0]
    assert np.isnan(ranges.spans[1:]).all()
    assert np.isnan(ranges.spans[:, -1]).all()
