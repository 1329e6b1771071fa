from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.builtin.losses.losses import EVERY, Curve, falling, in_pieces, noisy, run_of
from tests.rules.runs import all_at_once
from watchstep.format.block import Block
from watchstep_rules.builtin.losses.validation_loss_jump import ValidationLossJumpParams
from watchstep_rules.config.rule_config import RuleConfig

CONFIG = RuleConfig(rule="validation_loss_jump")
GOOD = [2.0, 1.2, 0.7, 0.5, 0.4, 0.35, 0.3, 0.3]


def run(evaluations: list[float] | Curve) -> Block:
    """Evaluations during a training with a falling loss."""
    return run_of(falling(2.0, 0.01, EVERY * len(evaluations), 40.0), evaluations=evaluations)


def fired(evaluations: list[float] | Curve, **params: object) -> list[int]:
    """Number of the evaluation at which each alert fires."""
    config = CONFIG.model_copy(update={"params": params})
    changes = all_at_once(config, run(evaluations)).transitions
    return [change.step // EVERY for change in changes if change.phase == "firing"]


SMALL = [2.0, 0.4, 0.1, 0.02, 0.01, 0.01, 0.005, 0.005]
SLOW = [2.0, 1.9, 1.8, 1.6, 1.4, 1.2, 0.9, 0.5, 0.4, 0.4, 0.4]
JUMPS = {
    "back where it began": [*GOOD, 2.1, 2.3, 2.2, 2.2],
    "far above, and part of it comes back": [*GOOD, 9.0, 1.6, 1.5, 1.5],
    "to a quarter of its beginning, from next to nothing": [*SMALL, 0.9, 0.6, 0.6, 0.6],
    "one evaluation is not finite": [*GOOD[:-1], float("nan"), 0.3, 2.1, 2.3, 2.2, 2.2],
}
CALM = {
    "falls": GOOD,
    "three bad evaluations": [*GOOD, 9.0, 9.0, 9.0, 0.3, 0.3],
    "falls from bad evaluation to bad evaluation": [*GOOD, 9.0, 7.0, 5.5, 4.5, 3.6, 2.9, 2.3, 1.8, 1.4, 1.0],
    "learns another task as fast as the first": [*SLOW, *([2.0] * 6), 1.0, 0.5, 0.4],
    "had such a spike before": [*GOOD, 3.0, *[0.3] * 8, 2.2, 2.2, 2.2, 2.2],
    "a slow rise": [*GOOD, *np.geomspace(0.3, 3.0, 12)],
    "had not fallen": [2.0] * 8 + [9.0] * 6,
    "from nothing to next to nothing": [*SMALL, *[0.2] * 6],
    "too soon": [2.0, 0.5, 0.4, 0.3, *[2.0] * 6],
    "scatters as far": [2.0, 0.4, 0.3, 0.2, 0.9, 0.3, 0.2, 0.2, 0.8, 0.9, 0.9, 0.9],
    "was below zero": [2.0, -0.1, *GOOD, *[3.0] * 6],
    "began at nothing": [1e-9, *[1e-10] * 6, *[1.0] * 6],
}


@pytest.mark.parametrize("name", JUMPS)
def test_a_jump_that_lasts_is_one_alert_at_its_fourth_evaluation(name: str) -> None:
    assert fired(JUMPS[name]) == [len(JUMPS[name]) - 1]


def test_a_jump_lasts_for_as_long_as_it_took_to_learn_at_first() -> None:
    assert fired([*SLOW, *[2.0] * 10]) == [len(SLOW) + 6]


@pytest.mark.parametrize("name", CALM)
def test_other_evaluations_are_ignored(name: str) -> None:
    assert fired(CALM[name]) == []


def test_evaluations_of_heavy_noise_are_ignored() -> None:
    for seed in range(6):
        scatter = np.exp(0.8 * np.random.default_rng(seed).normal(size=150))
        assert fired(falling(5.0, 0.5, 150, 3.0) * scatter) == []


def test_evaluations_of_a_few_examples_drawn_anew_are_ignored() -> None:
    for seed in range(6):
        examples = np.random.default_rng(seed).lognormal(-5.0, 3.0, size=(150, 8)).clip(max=8.0)
        assert fired(np.concatenate([[2.3, 1.2, 0.6], examples.mean(axis=1)])) == []


def test_the_alert_lasts_until_the_loss_is_below_the_bar() -> None:
    outcome = all_at_once(CONFIG, run([*GOOD, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 0.4, 0.3, 0.3]))
    assert [finding.step // EVERY for finding in outcome.findings] == [11, 12, 13]
    first = outcome.findings[0]
    assert first.message == (
        "loss on validation data is 2, at least 1.4 for 4 evaluations; it began at 2 and had fallen to 0.35"
    )
    assert first.threshold == pytest.approx(1.4)


def test_the_training_loss_is_not_judged() -> None:
    losses = np.concatenate([noisy(falling(2.0, 0.1, 100, 20.0), 0.01), np.full(50, 5.0)])
    assert all_at_once(CONFIG, run_of(losses)).findings == []


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(JUMPS) + sorted(CALM)),
    cuts=st.lists(st.integers(1, 119), max_size=12, unique=True),
)
def test_a_run_in_pieces_is_judged_as_the_whole(name: str, cuts: list[int]) -> None:
    block = run({**JUMPS, **CALM}[name])
    assert in_pieces(CONFIG, block, cuts) == in_pieces(CONFIG, block, [])


@pytest.mark.parametrize(
    "params",
    [{"window": 0}, {"lasting": 0}, {"warmup": 1}, {"fallen": 1}, {"rise": 1}, {"falls": 0}, {"x": 1}],
)
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ValidationLossJumpParams.model_validate(params)
