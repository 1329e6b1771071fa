from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.builtin.losses.losses import Curve, chi_squared, falling, in_pieces, noisy, run_of
from tests.rules.runs import all_at_once, steps_of
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep_rules.builtin.losses.loss_not_decreasing import LossNotDecreasingParams
from watchstep_rules.config.rule_config import RuleConfig

LN10, LN2 = math.log(10), math.log(2)
TEN = [50] * 10
TARGETS = np.random.default_rng(5).normal(size=64)
FLAT = np.ones(400)
RNG = np.random.default_rng


def found(block: Block, hold: int = 5, name: str = "loss", **params: object) -> list[int]:
    config = RuleConfig.model_validate(
        {"rule": "loss_not_decreasing", "params": params, "for": {"steps": hold}}
    )
    return [change.step for change in all_at_once(config, block).transitions if change.phase == "firing"]


EXPLODED = np.array([2.3, 35260.0, 1e16, 5e27, 3e27, 519.0, 472.0, 554.0, 687.0, 811.0])
"""What a learning rate of 1,000 makes of the first losses of a classifier."""

FAULTY = {
    "explodes at once": run_of([*EXPLODED, *noisy(450 * FLAT, 0.3)]),
    "explodes at once and comes back in part": run_of([*EXPLODED, *noisy(6 * FLAT, 0.2)], labels=TEN),
    "explodes at once and then guesses": run_of([*EXPLODED, *noisy(LN10 * FLAT, 0.02)]),
    "labels that were shuffled": run_of(noisy(LN10 * FLAT, 0.02)),
    "no update at all, no noise": run_of(LN10 * FLAT),
    "a large loss": run_of(noisy(5e4 * FLAT, 0.05)),
    "a tiny loss": run_of(noisy(5e-6 * FLAT, 0.03)),
    "noisy for long": run_of(noisy(np.full(900, 2.5), 0.06)),
    "an accuracy that stays as well": run_of(
        noisy(LN2 * FLAT, 0.02), metrics={"accuracy": 0.5 + 0.05 * RNG(3).normal(size=400)}
    ),
    "squared errors of classes": run_of(noisy(0.0901 * FLAT, 0.01), labels=TEN, function="MseLoss"),
    "saturated from the start": run_of(noisy(8 * FLAT, 0.25), labels=[100, 100]),
    "only the bias is learnt": run_of(noisy(falling(0.79, LN2, 250, 20), 0.005), labels=[100, 100]),
    "only the mean is learnt": run_of(
        chi_squared(falling(1.5 * TARGETS.var(), TARGETS.var(), 250, 8), 64), labels=TARGETS
    ),
    "the sign is wrong": run_of(noisy(1.1 ** np.arange(120) / 5, 0.05)),
}

PLATEAU = np.concatenate([falling(2.9, 2.77, 60, 10), np.full(40, 2.76), falling(2.76, 0.1, 200, 30)])
GAME = 0.7 + 0.1 * np.sin(np.arange(400) / 25)
HEALTHY = {
    "an easy batch first": run_of([0.05, *noisy(falling(2.3, 1.5, 300, 80), 0.05)]),
    "an explosion that is overcome": run_of(
        [*EXPLODED, *noisy(falling(20.0, 0.5, 300, 40), 0.1)], labels=TEN
    ),
    "a penalty that begins at nothing": run_of([*10.0 ** np.arange(-6, 0), *noisy(0.8 * FLAT, 0.5)]),
    "converges": run_of(noisy(falling(LN10, 0.1, 400, 40), 0.2)),
    "converges to nearly nothing": run_of(noisy(falling(1.0, 1e-7, 400, 10), 0.3)),
    "converges to zero": run_of(np.maximum(0, falling(1.0, -0.1, 400, 10)), labels=TEN),
    "plateau before it takes off": run_of(noisy(PLATEAU, 0.01)),
    "plateau that sinks steadily": run_of(falling(0.7, 0.6, 400, 400)),
    "begins trained": run_of(np.abs(noisy(0.05 * FLAT, 0.8)), labels=TEN),
    "begins trained, labels unknown": run_of(chi_squared(0.05 * FLAT, 2)),
    "begins trained, of 64 classes": run_of(noisy(0.5 * FLAT, 0.05), labels=[20] * 64),
    "begins trained, of 64 classes, by name": run_of(
        noisy(1.5 * FLAT, 0.03), labels=[20] * 64, function="NllLoss"
    ),
    "clicks": run_of(noisy(falling(0.6915, 0.665, 600, 200), 0.02), labels=[530, 470]),
    "clicks, labels unknown": run_of(noisy(falling(0.6915, 0.665, 600, 200), 0.02)),
    "tokens of high entropy": run_of(noisy(falling(2.9, 2.75, 900, 400), 0.08, seed=2)),
    "preferences that are learnt": run_of(
        noisy(falling(LN2, 0.675, 300, 100), 0.05), metrics={"accuracy": np.linspace(0.5, 0.7, 300)}
    ),
    "a policy whose return rises": run_of(
        noisy(4 * FLAT, 0.03), metrics={"mean_return": noisy(np.linspace(20, 200, 400), 0.2)}
    ),
    "validation falls": run_of(noisy(3 * FLAT, 0.03), evaluations=np.linspace(3.0, 2.5, 40)),
    "grows from next to nothing": run_of([1e-9] * 10 + list(noisy(0.5 * FLAT, 0.05))),
    "grows from a first loss of nothing": run_of([0.0, *np.linspace(0, 0.02, 9), *noisy(0.5 * FLAT, 0.05)]),
    "an error of values that grow": run_of(noisy(np.linspace(0.1, 0.9, 300), 0.1)),
    "resumed on a plateau": run_of(noisy(2.2 * FLAT, 0.02), first_step=5000),
    "weak signal": run_of(chi_squared(falling(1.3, 0.85, 300, 20) * TARGETS.var(), 16), labels=TARGETS),
    "one example a batch": run_of(chi_squared(falling(1.0, 0.7, 300, 30), 1)),
    "a policy's gain": run_of(RNG(1).normal(-0.05, 0.3, 400)),
    "a log-likelihood": run_of(noisy(falling(0.4, -2.0, 300, 30), 0.02)),
    "two sides of a game": run_of(noisy(GAME, 0.01), labels=[100]),
    "warm-up": run_of(noisy(LN10 * np.exp(-((np.arange(300) / 150) ** 2)), 0.02)),
    "a floor that cannot be lowered": run_of(50 + noisy(falling(11, 1.5, 300, 40), 0.05)),
    "no finite loss": run_of(np.full(200, np.nan)),
    "too few losses to tell": run_of(np.ones(100)),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_loss_that_stays_where_it_began_is_found(name: str) -> None:
    assert found(FAULTY[name])


@pytest.mark.parametrize("name", HEALTHY)
def test_a_loss_that_learns_or_cannot_be_judged_is_fine(name: str) -> None:
    assert found(HEALTHY[name]) == []


def test_the_same_noise_with_and_without_progress_are_distinguished() -> None:
    def curve(end: float) -> Curve:
        return noisy(falling(2.3, end, 300, 60), 0.05)

    assert found(run_of(curve(2.3), labels=TEN))
    assert found(run_of(curve(1.6), labels=TEN)) == []


def test_of_several_losses_only_the_one_called_so_is_judged() -> None:
    def of(*names: str) -> Block:
        infos = [tensor(name, "losses", shape=()) for name in names]
        return block_of([Row(step, info, [1.0]) for step in range(200) for info in infos])

    assert found(of("g_loss"))
    assert found(of("d_loss", "g_loss")) == []
    outcome = all_at_once(RuleConfig(rule="loss_not_decreasing"), of("kl_loss", "loss"))
    assert steps_of(outcome, "loss")
    assert not steps_of(outcome, "kl_loss")


@pytest.mark.parametrize("part", ["policy_loss", "losses/pg_loss", "actorLoss", "policy_gradient_loss"])
def test_a_sum_with_the_loss_of_a_policy_is_not_judged(part: str) -> None:
    """A critic's error grows with returns, and leads the sum."""
    rises = noisy(np.linspace(1, 60, 300), 0.05)

    def beside(name: str, *, derived: bool = False) -> Block:
        sum_of_losses = replace(tensor("loss", "losses", shape=()), derived=derived)
        infos = [tensor(name, "losses", shape=()), sum_of_losses]
        return block_of(
            [
                Row(step, info, [value])
                for step, loss in enumerate(rises)
                for info, value in zip(infos, (0.1, loss), strict=True)
            ]
        )

    assert found(beside("kl_loss"))
    assert found(beside(part)) == []
    assert found(beside("kl_loss", derived=True))
    assert found(beside(part, derived=True)) == []


def test_a_loss_that_was_named_as_the_first_of_several_is_no_sum() -> None:
    infos = [replace(tensor(name, "losses", shape=()), derived=True) for name in ("loss", "loss_2")]
    both = block_of([Row(step, info, [1.0]) for step in range(200) for info in infos])
    assert found(both) == []
    assert found(block_of([Row(step, infos[0], [1.0]) for step in range(200)]))


def test_losses_that_are_logged_now_and_then_begin_late_and_are_no_resumed_run() -> None:
    info = tensor("loss", "losses", shape=())
    losses = noisy(FLAT, 0.02)
    assert found(block_of([Row(50 * row + 49, info, [loss]) for row, loss in enumerate(losses)]))


def test_of_several_workers_the_lowest_is_judged() -> None:
    info = tensor("loss", "losses", shape=())
    rows = [
        Row(step, info, [loss], worker=worker)
        for step in range(200)
        for worker, loss in enumerate((0.99**step, 1.0))
    ]
    assert found(block_of(rows)) == []


def test_a_loss_that_jumped_and_falls_since_does_not_rise() -> None:
    """A loss that gets a second term, which is learnt at once."""
    first = noisy(falling(0.1, 0.02, 200, 10), 0.05)
    assert found(run_of(np.concatenate([first, noisy(falling(2.3, 0.3, 200, 20), 0.05)]))) == []
    assert found(run_of(np.concatenate([first, noisy(np.full(200, 2.3), 0.05)])))


VALIDATION = (
    "val_loss",
    "loss/validation",
    "valLoss",
    "testMSE",
    "VALID_LOSS",
    "evalset_loss0",
    "best_test_loss",
)
TRAINING = ("value_loss", "loss/value", "valueLoss", "deviation_loss", "device0/loss", "evaluator_loss")


@pytest.mark.parametrize("name", [*VALIDATION, *TRAINING])
def test_losses_are_of_validation_if_a_whole_word_of_their_name_matches(name: str) -> None:
    info = tensor(name, "losses", shape=())
    judged = found(block_of([Row(step, info, [1.0]) for step in range(300)]))
    assert bool(judged) == (name in TRAINING)


def test_the_finding_states_where_it_began_and_where_it_is() -> None:
    outcome = all_at_once(RuleConfig(rule="loss_not_decreasing"), run_of(2 * FLAT))
    finding = outcome.findings[0]
    assert (finding.step, finding.value, finding.threshold) == (109, 2.0, 2.0)
    assert finding.message == "loss is 2 on average, it began at 2, and has not moved for 100 steps"
    rising = all_at_once(RuleConfig(rule="loss_not_decreasing"), FAULTY["the sign is wrong"])
    assert "and still rises" in rising.findings[0].message


def test_patience_is_the_users_to_set() -> None:
    assert found(run_of(FLAT[:60])) == []
    assert found(run_of(FLAT[:60]), patience=40) == [53]


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(sorted(FAULTY) + sorted(HEALTHY)),
    cuts=st.lists(st.integers(1, 299), max_size=12, unique=True),
)
def test_a_run_in_pieces_is_judged_as_the_whole(name: str, cuts: list[int]) -> None:
    block = {**FAULTY, **HEALTHY}[name]
    config = RuleConfig(rule="loss_not_decreasing")
    last = int(block.step.max())
    assert in_pieces(config, block, [cut for cut in cuts if cut <= last]) == in_pieces(config, block, [])


@pytest.mark.parametrize(
    "params", [{"patience": 3}, {"min_fall": 0}, {"growth": 1}, {"certainty": 0}, {"x": 1}]
)
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LossNotDecreasingParams.model_validate(params)
