from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.builtin.losses.losses import (
    LOSS,
    Curve,
    chi_squared,
    classes,
    falling,
    in_pieces,
    noisy,
    run_of,
)
from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep_rules.builtin.losses.oscillating_loss import OscillatingLossParams
from watchstep_rules.config.rule_config import RuleConfig

LN10 = math.log(10)
STEPS = np.arange(240)
RNG = np.random.default_rng


def found(block: Block, **params: object) -> bool:
    config = RuleConfig.model_validate({"rule": "oscillating_loss", "params": params, "for": {"steps": 3}})
    return any(change.phase == "firing" for change in all_at_once(config, block).transitions)


BURSTS = np.concatenate([[30.0], RNG(3).uniform(40, 5000, 239)])
CALM_VALIDATION = falling(2.3, 0.3, 24, 5)
FAULTY = {
    "overshoots, worse than with_message the same for all": run_of(BURSTS, labels=[60, 40]),
    "overshoots, labels unknown": run_of(BURSTS),
    "jumps from side to side": run_of(1.2 + 0.4 * (-1.0) ** STEPS),
    "jumps from side to side, with noise": run_of(noisy(1.2 + 0.4 * (-1.0) ** STEPS, 0.05)),
    "swings with a period of six": run_of(5 + 2 * np.cos(np.pi * STEPS / 3)),
    "validation swings": run_of(
        noisy(falling(2.3, 0.1, 240, 20), 0.3), evaluations=[2.3, 2.5, *([0.3, 0.9] * 11)]
    ),
}
HEALTHY = {
    "noise of batches": run_of(noisy(falling(LN10, 0.3, 240, 40), 0.3)),
    "noise of a few examples": run_of(chi_squared(falling(5, 1, 240, 40), 2), labels=RNG(1).normal(size=64)),
    "noise of one example": run_of(chi_squared(falling(1, 0.8, 240, 40), 1), labels=RNG(1).normal(size=64)),
    "heavy tails close to nothing": run_of(0.01 * RNG(4).lognormal(0, 2, 240), labels=[60, 40]),
    "a large loss": run_of(chi_squared(falling(3e4, 3e3, 240, 40), 32)),
    "cyclic learning rate": run_of(falling(2.3, 0.3, 240, 30) * (1 + 0.3 * np.sin(STEPS / 6))),
    "swings that shrink": run_of(1 + np.exp(-STEPS / 15) * (-1.0) ** STEPS),
    "a swing that is small": run_of(2 + 0.02 * (-1.0) ** STEPS),
    "two batches in fixed order": run_of(falling(2.3, 0.2, 240, 12) * (1 + 0.2 * (-1.0) ** STEPS)),
    "two sides of a game": run_of(0.7 + 0.3 * np.sin(STEPS / 10), labels=[50, 50]),
    "a policy's gain": run_of(RNG(1).normal(0, 1, 240)),
    "explodes": run_of(noisy(1.2**STEPS, 0.5)),
    "sum over a batch": run_of(noisy(75 * np.exp(-STEPS / 100), 0.2), labels=[50] * 10),
    "validation comes to rest": run_of(noisy(falling(2.3, 0.1, 240, 20), 0.3), evaluations=CALM_VALIDATION),
    "not finite": run_of(np.full(240, np.nan)),
    "zero": run_of(np.zeros(240)),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_loss_that_swings_is_found(name: str) -> None:
    assert found(FAULTY[name])


@pytest.mark.parametrize("name", HEALTHY)
def test_noise_and_slow_swings_are_fine(name: str) -> None:
    assert not found(HEALTHY[name])


def test_the_scale_of_the_loss_does_not_matter_where_labels_are_not_recorded() -> None:
    for scale in (1e-6, 1e6):
        assert found(run_of(scale * BURSTS))


STALE_GRADIENTS = tensor("gradients:stale", "metrics", role="metric", shape=())
LEAPS = np.tile([2.5, 2.0, 1.5, 1.0, 0.7, 0.5, 0.4, 0.3], 30)
RNG_LABELS = RNG(2).integers(0, 4, (240, 16)).astype(float)


def with_labels(
    losses: Sequence[float] | Curve, labels: Sequence[Sequence[float]] | Curve, stale: float | None = None
) -> Block:
    info = replace(tensor("labels", "labels", shape=(16,)), dtype="int64")
    rows = []
    for step, (loss, of_batch) in enumerate(zip(losses, labels, strict=True)):
        rows += [Row(step, LOSS, [loss]), Row(step, info, list(of_batch), probes=classes([60] * 4))]
        rows += [Row(step, STALE_GRADIENTS, [stale])] if stale is not None else []
    return block_of(rows)


def test_a_wide_swing_is_found_where_batches_come_sorted_by_label() -> None:
    in_order = [[float(step // 2 % 4)] * 16 for step in range(240)]
    assert found(with_labels(LEAPS, in_order))
    assert not found(with_labels(LEAPS, RNG_LABELS))
    assert not found(with_labels(np.concatenate([LEAPS[:8], LEAPS[8:] / 10]), in_order))
    rare = [[0.0] * 15 + [float(step % 9 == 0)] for step in range(240)]
    assert not found(with_labels(LEAPS, rare))


def test_a_wide_swing_is_found_where_gradients_are_never_cleared() -> None:
    assert found(with_labels(LEAPS, RNG_LABELS, stale=1.0))
    assert not found(with_labels(LEAPS, RNG_LABELS, stale=0.0))
    assert not found(with_labels(falling(2.3, 0.3, 240, 40), RNG_LABELS, stale=1.0))


def test_thresholds_are_the_users_to_set() -> None:
    assert not found(FAULTY["overshoots, labels unknown"], above_first=1e4)
    assert not found(FAULTY["overshoots, labels unknown"], swing=50)
    assert not found(FAULTY["jumps from side to side, with noise"], alternation=0.999)
    assert found(FAULTY["jumps from side to side"], window=12)


def test_the_finding_states_between_what_it_swings() -> None:
    outcome = all_at_once(RuleConfig(rule="oscillating_loss"), FAULTY["jumps from side to side"])
    assert outcome.findings[0].message == "loss oscillated between 0.8 and 1.6 over 40 records"


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(FAULTY) + sorted(HEALTHY)),
    cuts=st.lists(st.integers(1, 239), max_size=12, unique=True),
)
def test_a_run_in_pieces_is_judged_as_the_whole(name: str, cuts: list[int]) -> None:
    block = {**FAULTY, **HEALTHY}[name]
    config = RuleConfig(rule="oscillating_loss")
    assert in_pieces(config, block, cuts) == in_pieces(config, block, [])


@pytest.mark.parametrize("params", [{"window": 2}, {"swing": 0}, {"alternation": 1}, {"x": 1}])
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OscillatingLossParams.model_validate(params)
