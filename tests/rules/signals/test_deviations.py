"""The ranking of tensors by their distance from their own earlier values."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from watchstep.format.tensors import MODES
from watchstep_rules.signals.deviations import (
    MAX_DEVIATIONS,
    MIN_STEPS,
    STATISTICS,
    Deviation,
    deviations_of,
)

Series = dict[str, np.ndarray[Any, Any]]
ONSET = 100


def series(
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


def found(*blocks: Series) -> list[Deviation]:
    return deviations_of(blocks, [f"t{place}" for place in range(20)], ONSET)


def test_tensors_are_ranked_by_spreads_up_and_down_alike() -> None:
    blocks = [series(place, noisy(place)) for place in range(3)]
    blocks += [series(3, noisy(3, 100.0)), series(4, noisy(4, 1e-4))]
    first, second = found(*blocks)
    assert (first.tensor, second.tensor) == ("t4", "t3")
    assert (second.statistic, second.step) == ("rms", ONSET)
    assert second.value > second.high > 1 > second.low > 0
    assert second.spreads > 20


def test_drift_is_no_deviation_and_a_fall_against_it_is() -> None:
    assert not found(series(0, noisy(0, drift=0.05)))
    assert [deviation.tensor for deviation in found(series(0, noisy(0, 0.02, drift=0.05)))] == ["t0"]


def test_outliers_before_the_onset_do_not_widen_the_range() -> None:
    values = noisy(0, 100.0)
    values[::10] *= 1e6
    assert [deviation.tensor for deviation in found(series(0, values))] == ["t0"]


def test_values_that_are_not_finite_rank_first() -> None:
    share = np.where(np.arange(ONSET + 5) >= ONSET, 0.001, 0.0)
    first, second = found(series(0, noisy(0, 1e9)), series(1, noisy(1), nonfinite_share=share))
    assert (first.tensor, first.statistic, second.tensor) == ("t1", "nonfinite_share", "t0")


def test_tensors_that_were_zero_and_means_that_are_zero_by_symmetry_have_a_scale() -> None:
    steps = np.arange(ONSET + 5)
    begins = np.where(steps >= ONSET, 1e-30, 0.0)
    assert not found(series(0, begins, mean=begins, abs_max=begins))  # a bias that begins to learn
    assert not found(series(0, np.ones(len(steps)), mean=begins))
    (deviation,) = found(series(0, np.ones(len(steps)), mean=np.where(steps >= ONSET, 0.5, 0.0)))
    assert (deviation.statistic, round(deviation.spreads)) == ("mean", 50)


def test_one_value_that_is_not_finite_outranks_any_distance() -> None:
    share = np.where(np.arange(ONSET + 5) >= ONSET, 1e-9, 0.0)
    constant = np.where(np.arange(ONSET + 5) >= ONSET, 1e30, 1.0)
    blocks = [series(0, np.ones(ONSET + 5), mean=constant), series(1, noisy(1), nonfinite_share=share)]
    assert [deviation.tensor for deviation in found(*blocks)] == ["t1", "t0"]


def test_rows_without_a_value_are_omitted() -> None:
    values = noisy(0, 100.0)
    values[::3] = np.nan
    (deviation,) = found(series(0, values))
    assert (deviation.tensor, deviation.step) == ("t0", ONSET)


def test_a_constant_deviates_by_more_than_rounding_only() -> None:
    constant = np.ones(ONSET + 1)
    assert not found(series(0, np.append(constant[:-1], 1.0 + 1e-6)))
    assert found(series(0, np.append(constant[:-1], 2.0)))


def test_few_steps_other_modes_and_what_is_too_many_are_omitted() -> None:
    late = {name: column[ONSET - MIN_STEPS + 1 :] for name, column in series(0, noisy(0, 100.0)).items()}
    assert not found(late)
    assert not found(series(0, noisy(0, 100.0), mode="eval"))
    assert not found()
    many = [series(place, noisy(place, 100.0)) for place in range(20)]
    assert len(found(*many)) == MAX_DEVIATIONS


def test_the_worker_that_deviates_is_named() -> None:
    workers = [series(0, noisy(worker, 100.0 if worker == 2 else 1.0), worker) for worker in range(4)]
    (deviation,) = found(*workers)
    assert deviation.worker == 2


@settings(max_examples=30, deadline=None)
@given(
    order=st.randoms(use_true_random=False),
    cuts=st.lists(st.integers(0, 630), max_size=6),
    seed=st.integers(0, 99),
)
def test_neither_the_order_of_rows_nor_their_blocks_change_the_ranking(
    order: Any, cuts: list[int], seed: int
) -> None:
    whole = [series(place, noisy(seed + place, 3.0**place), place % 2) for place in range(6)]
    joined = {name: np.concatenate([block[name] for block in whole]) for name in whole[0]}
    rows = list(range(len(joined["step"])))
    order.shuffle(rows)
    blocks = [
        {name: column[part] for name, column in joined.items()}
        for part in (np.array(piece, np.intp) for piece in np.split(np.array(rows), sorted(cuts)))
    ]
    assert found(*blocks) == found(*whole)
