"""What is usual for a tensor: ranges of earlier runs, deviations from its own past, and constant thresholds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from watchstep.errors import FormatError
from watchstep.format.layout import baseline_document
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.reading.columns import needs_of
from watchstep.store.store import Store
from watchstep_rules.baseline import read_baseline
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.baseline import (
    MAX_DIMENSIONS,
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
from watchstep_rules.signals.constant_thresholds import ConstantThreshold, constant_thresholds
from watchstep_rules.signals.deviations import (
    MAX_DEVIATIONS,
    MIN_STEPS,
    STATISTICS,
    Deviation,
    deviations_of,
)

# Ranges of earlier runs


def summary(*phases: Span | None, shape: tuple[int, ...] = ()) -> BaselineRun:
    return BaselineRun(tensors={"loss": BaselineTensor(shape=shape, statistic="mean", phases=phases)})


def merged(*summaries: BaselineRun) -> Baseline | None:
    return merge_summaries({f"run-{place}": each for place, each in enumerate(summaries)})


def phases(*summaries: BaselineRun) -> tuple[Span | None, ...]:
    baseline = merged(*summaries)
    assert baseline is not None
    return baseline.tensors["loss"].phases


def test_a_baseline_with_more_than_a_tensor_can_have_is_refused(tmp_path: Path) -> None:
    """A recorder may write one, of which evaluators keep several."""
    store = Store.open(tmp_path, create=True)

    def write(dimensions: int, run: str) -> None:
        tensor = {"shape": [1] * dimensions, "statistic": "mean", "phases": []}
        store.put(baseline_document("a1"), json.dumps({"runs": [run], "tensors": {"loss": tensor}}).encode())

    write(MAX_DIMENSIONS, "r" * 128)
    assert read_baseline(store, "a1") is not None
    for dimensions, run in ((MAX_DIMENSIONS + 1, "r"), (1, "r" * 129)):
        write(dimensions, run)
        with pytest.raises(FormatError, match="not a baseline"):
            read_baseline(store, "a1")


def test_phases_double_in_length() -> None:
    assert phase_of(np.arange(8)).tolist() == [0, 1, 1, 2, 2, 2, 2, 3]


@given(st.integers(0, 2**39 - 2))
def test_a_step_is_within_its_phase(step: int) -> None:
    phase = int(phase_of(np.array([step]))[0])
    assert 2**phase - 1 <= step <= 2 ** (phase + 1) - 2


def test_steps_beyond_the_last_phase_are_in_it() -> None:
    assert phase_of(np.array([2**62])).tolist() == [MAX_PHASES - 1]


def test_four_runs_make_no_baseline() -> None:
    assert merged(*[summary((1.0, 1.0))] * 4) is None


def test_a_range_is_widened_by_a_factor_of_two_at_least() -> None:
    assert phases(*[summary((1.0, 1.0))] * 5) == ((0.5, 2.0),)


def test_a_range_is_widened_by_its_own_factor_where_that_is_more() -> None:
    found = phases(*[summary((2.0, 4.0))] * 3, summary((1.0, 2.0)), summary((4.0, 8.0)))
    assert found[0] == pytest.approx((1 / 8, 64.0))


def test_a_range_across_zero_is_widened_by_its_length() -> None:
    assert phases(*[summary((0.0, 1.0))] * 3, summary((-1.0, 1.0)), summary((0.0, 3.0))) == ((-5.0, 7.0),)


def test_a_phase_that_fewer_than_five_runs_reached_has_no_range() -> None:
    long = summary((1.0, 1.0), (1.0, 1.0))
    assert phases(*[long] * 4, summary((1.0, 1.0))) == ((0.5, 2.0), None)


def test_the_shape_of_the_newest_run_counts() -> None:
    new, old = summary((9.0, 9.0), shape=(2,)), summary((1.0, 1.0), shape=(3,))
    baseline = merged(new, new, old, new, new, new)
    assert baseline is not None
    assert baseline.tensors["loss"].shape == (2,)
    assert baseline.tensors["loss"].phases == ((4.5, 18.0),)
    baseline = merged(*[new] * 4, old)
    assert baseline is not None
    assert baseline.tensors == {}


def test_only_the_newest_runs_count() -> None:
    baseline = merged(*[summary((1.0, 1.0))] * MAX_RUNS, summary((1000.0, 1000.0)))
    assert baseline is not None
    assert baseline.runs == tuple(f"run-{place}" for place in range(MAX_RUNS))
    assert baseline.tensors["loss"].phases == ((0.5, 2.0),)


spans = st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=2).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(spans, min_size=5, max_size=MAX_RUNS))
def test_a_range_holds_all_that_it_was_made_of(seen: list[tuple[float, float]]) -> None:
    (span,) = phases(*(summary(each) for each in seen))
    assert span is not None
    assert span[0] <= min(low for low, _ in seen)
    assert span[1] >= max(high for _, high in seen)
    assert Baseline.model_validate_json(merged(*(summary(each) for each in seen)).model_dump_json())  # type: ignore[union-attr]


def test_a_tensor_of_another_shape_has_no_range() -> None:
    baseline = merged(*[summary((1.0, 1.0))] * 5)
    assert baseline is not None
    same = TensorInfo("loss", ("losses",), "loss")
    other = TensorInfo("loss", ("losses",), "loss", shape=(2,))
    ranges = ranges_of(baseline, (same, other, TensorInfo("new", ("losses",), "loss")))
    assert ranges.spans[0, 0].tolist() == [0.5, 2.0]
    assert np.isnan(ranges.spans[1:]).all()
    assert np.isnan(ranges.spans[:, -1]).all()


def test_only_the_harmful_direction_of_losses_and_metrics_is_a_deviation() -> None:
    baseline = merged(*[summary((1.0, 1.0))] * 5)
    assert baseline is not None
    catalogue = (
        TensorInfo("loss", ("losses",), "loss"),
        TensorInfo("accuracy", ("metrics",), "metric"),
        TensorInfo("perplexity", ("metrics",), "metric"),
        TensorInfo("weight:gradient", ("gradients",), "gradient"),
    )
    ranges = ranges_of(baseline, catalogue)
    assert ranges.low_is_bad.tolist() == [False, True, False, True]
    assert ranges.high_is_bad.tolist() == [True, False, False, True]


# The ranking of tensors by their distance from their own earlier values.


Series = dict[str, np.ndarray[Any, Any]]
ONSET = 100


def series_of(
    tensor: int, rms: np.ndarray[Any, Any], worker: int = 0, mode: str = "train", **others: Any
) -> Series:
    """Rows of one tensor at the steps from 0 on."""
    rows = len(rms)
    figures = {name: np.broadcast_to(np.asarray(others.get(name, 0.0)), rows) for name in STATISTICS}
    constant = {"tensor": tensor, "worker": worker, "replica": 0, "stage": 0, "mode": MODES.index(mode)}
    columns = {name: np.full(rows, value) for name, value in constant.items()}
    return {**columns, **figures, "rms": rms, "step": np.arange(rows)}


def noisy(seed: int, last: float = 1.0, drift: float = 0.0) -> np.ndarray[Any, Any]:
    """A statistic with 10 % of noise, drift a step, and a factor from the onset on."""
    steps = np.arange(ONSET + 5)
    noise = np.random.default_rng(seed).normal(0, 0.1, len(steps))
    return np.exp(noise + drift * steps) * np.where(steps >= ONSET, last, 1.0)


def deviations(*blocks: Series) -> list[Deviation]:
    return deviations_of(blocks, [f"t{place}" for place in range(20)], ONSET)


def test_tensors_are_ranked_by_spreads_up_and_down_alike() -> None:
    blocks = [series_of(place, noisy(place)) for place in range(3)]
    blocks += [series_of(3, noisy(3, 100.0)), series_of(4, noisy(4, 1e-4))]
    first, second = deviations(*blocks)
    assert (first.tensor, second.tensor) == ("t4", "t3")
    assert (second.statistic, second.step) == ("rms", ONSET)
    assert second.value > second.high > 1 > second.low > 0
    assert second.spreads > 20


def test_drift_is_no_deviation_and_a_fall_against_it_is() -> None:
    assert not deviations(series_of(0, noisy(0, drift=0.05)))
    assert [deviation.tensor for deviation in deviations(series_of(0, noisy(0, 0.02, drift=0.05)))] == ["t0"]


def test_outliers_before_the_onset_do_not_widen_the_range() -> None:
    values = noisy(0, 100.0)
    values[::10] *= 1e6
    assert [deviation.tensor for deviation in deviations(series_of(0, values))] == ["t0"]


def test_values_that_are_not_finite_rank_first() -> None:
    share = np.where(np.arange(ONSET + 5) >= ONSET, 0.001, 0.0)
    first, second = deviations(series_of(0, noisy(0, 1e9)), series_of(1, noisy(1), nonfinite_share=share))
    assert (first.tensor, first.statistic, second.tensor) == ("t1", "nonfinite_share", "t0")


def test_tensors_that_were_zero_and_means_that_are_zero_by_symmetry_have_a_scale() -> None:
    steps = np.arange(ONSET + 5)
    begins = np.where(steps >= ONSET, 1e-30, 0.0)
    assert not deviations(series_of(0, begins, mean=begins, abs_max=begins))  # a bias that begins to learn
    assert not deviations(series_of(0, np.ones(len(steps)), mean=begins))
    (deviation,) = deviations(series_of(0, np.ones(len(steps)), mean=np.where(steps >= ONSET, 0.5, 0.0)))
    assert (deviation.statistic, round(deviation.spreads)) == ("mean", 50)


def test_one_value_that_is_not_finite_outranks_any_distance() -> None:
    share = np.where(np.arange(ONSET + 5) >= ONSET, 1e-9, 0.0)
    constant = np.where(np.arange(ONSET + 5) >= ONSET, 1e30, 1.0)
    blocks = [series_of(0, np.ones(ONSET + 5), mean=constant), series_of(1, noisy(1), nonfinite_share=share)]
    assert [deviation.tensor for deviation in deviations(*blocks)] == ["t1", "t0"]


def test_rows_without_a_value_are_omitted() -> None:
    values = noisy(0, 100.0)
    values[::3] = np.nan
    (deviation,) = deviations(series_of(0, values))
    assert (deviation.tensor, deviation.step) == ("t0", ONSET)


def test_a_constant_deviates_by_more_than_rounding_only() -> None:
    constant = np.ones(ONSET + 1)
    assert not deviations(series_of(0, np.append(constant[:-1], 1.0 + 1e-6)))
    assert deviations(series_of(0, np.append(constant[:-1], 2.0)))


def test_few_steps_other_modes_and_what_is_too_many_are_omitted() -> None:
    late = {name: column[ONSET - MIN_STEPS + 1 :] for name, column in series_of(0, noisy(0, 100.0)).items()}
    assert not deviations(late)
    assert not deviations(series_of(0, noisy(0, 100.0), mode="eval"))
    assert not deviations()
    many = [series_of(place, noisy(place, 100.0)) for place in range(20)]
    assert len(deviations(*many)) == MAX_DEVIATIONS


@pytest.mark.parametrize(("before", "found"), [(3, True), (2, False)])
def test_values_that_are_not_finite_deviate_from_few_finite_ones(before: int, found: bool) -> None:
    share = np.where(np.arange(ONSET + 5) >= ONSET, 0.25, 0.0)
    rows = series_of(0, noisy(0), nonfinite_share=share)
    late = {name: column[ONSET - before :] for name, column in rows.items()}
    assert [deviation.statistic for deviation in deviations(late)] == ["nonfinite_share"] * found


def test_the_worker_that_deviates_is_named() -> None:
    workers = [series_of(0, noisy(worker, 100.0 if worker == 2 else 1.0), worker) for worker in range(4)]
    (deviation,) = deviations(*workers)
    assert deviation.worker == 2


@pytest.mark.ci
@settings(max_examples=30, deadline=None)
@given(
    order=st.randoms(use_true_random=False),
    cuts=st.lists(st.integers(0, 630), max_size=6),
    seed=st.integers(0, 99),
)
def test_neither_the_order_of_rows_nor_their_blocks_change_the_ranking(
    order: Any, cuts: list[int], seed: int
) -> None:
    whole = [series_of(place, noisy(seed + place, 3.0**place), place % 2) for place in range(6)]
    joined = {name: np.concatenate([block[name] for block in whole]) for name in whole[0]}
    rows = list(range(len(joined["step"])))
    order.shuffle(rows)
    blocks = [
        {name: column[part] for name, column in joined.items()}
        for part in (np.array(piece, np.intp) for piece in np.split(np.array(rows), sorted(cuts)))
    ]
    assert deviations(*blocks) == deviations(*whole)


# Constant thresholds name existing rules, parameters and figures.


EXPECTED: list[tuple[str, dict[str, float], list[tuple[str, str, float, str]]]] = [
    ("vanishing_gradient", {"threshold": 1e-5}, [("abs_mean", "threshold", 1e-5, "below")]),
    ("all_zero", {}, [("zero_share", "share", 1.0, "above")]),
    ("tensor_variance", {"min_threshold": 0.5}, [("variance", "min_threshold", 0.5, "below")]),
    ("exploding_gradient", {}, []),
]


@pytest.mark.parametrize(("rule", "params", "expected"), EXPECTED)
def test_thresholds_of_a_config(
    rule: str, params: dict[str, float], expected: list[tuple[str, str, float, str]]
) -> None:
    config = RuleConfig(rule=rule, params=params)
    found = constant_thresholds(config.rule, config.parameters)
    assert found == [ConstantThreshold(*entry) for entry in expected]  # type: ignore[arg-type]
    for threshold in found:
        assert needs_of(threshold.figure)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-3e-38, 3e-38, "always 0 before (worker 1)"),
        (1.0, 2.0, "usually 1 to 2, 12 deviations away (worker 1)"),
    ],
)
def test_a_range_of_one_value_is_stated_as_that_value(low: float, high: float, words: str) -> None:
    deviation = Deviation(
        tensor="x", statistic="mean", worker=1, step=3, value=7.0, low=low, high=high, spreads=12.0
    )
    assert deviation.as_line() == f"x: mean 7 at step 3, {words}"


def test_elements_that_are_not_finite_are_a_share() -> None:
    deviation = Deviation(
        tensor="x",
        statistic="nonfinite_share",
        worker=1,
        step=3,
        value=0.000244,
        low=0.0,
        high=0.5,
        spreads=9.0,
    )
    assert deviation.as_line() == "x: 0.024% of its elements are not finite at step 3 (worker 1)"
