"""Rules over the training loss, by made curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.builtin.losses import (
    LOSS,
    Curve,
    chi_squared,
    classes,
    falling,
    in_pieces,
    noisy,
    run_of,
)
from tests.rules.runs import all_at_once, first_message, found_by, steps_of
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block, concatenate
from watchstep.format.tensors import OF_PROBABILITIES
from watchstep_rules.config.rule_config import RuleConfig

# loss_not_decreasing


LN10, LN2 = math.log(10), math.log(2)
TEN = [50] * 10
TARGETS = np.random.default_rng(5).normal(size=64)
FLAT = np.ones(400)
RNG = np.random.default_rng


def firing_steps(rule: str, block: Block, hold: int, **params: object) -> list[int]:
    """The steps at which a rule's alert fires that waits for so many steps."""
    config = RuleConfig.model_validate({"rule": rule, "params": params, "for": {"steps": hold}})
    return [change.step for change in all_at_once(config, block).transitions if change.phase == "firing"]


def not_decreasing(block: Block, **params: object) -> list[int]:
    return firing_steps("loss_not_decreasing", block, hold=5, **params)


EXPLODED = np.array([2.3, 35260.0, 1e16, 5e27, 3e27, 519.0, 472.0, 554.0, 687.0, 811.0])
"""What a learning rate of 1,000 makes of the first losses of a classifier."""

STUCK = {
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
LEARNING = {
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


def test_the_same_noise_with_and_without_progress_are_distinguished() -> None:
    def curve(end: float) -> Curve:
        return noisy(falling(2.3, end, 300, 60), 0.05)

    assert not_decreasing(run_of(curve(2.3), labels=TEN))
    assert not_decreasing(run_of(curve(1.6), labels=TEN)) == []


def test_of_several_losses_only_the_one_called_so_is_judged() -> None:
    def of(*names: str) -> Block:
        infos = [tensor(name, "losses", shape=()) for name in names]
        return block_of([Row(step, info, [1.0]) for step in range(200) for info in infos])

    assert not_decreasing(of("g_loss"))
    assert not_decreasing(of("d_loss", "g_loss")) == []
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

    assert not_decreasing(beside("kl_loss"))
    assert not_decreasing(beside(part)) == []
    assert not_decreasing(beside("kl_loss", derived=True))
    assert not_decreasing(beside(part, derived=True)) == []


def test_a_loss_that_was_named_as_the_first_of_several_is_no_sum() -> None:
    infos = [replace(tensor(name, "losses", shape=()), derived=True) for name in ("loss", "loss_2")]
    both = block_of([Row(step, info, [1.0]) for step in range(200) for info in infos])
    assert not_decreasing(both) == []
    assert not_decreasing(block_of([Row(step, infos[0], [1.0]) for step in range(200)]))


def test_losses_that_are_logged_now_and_then_begin_late_and_are_no_resumed_run() -> None:
    info = tensor("loss", "losses", shape=())
    losses = noisy(FLAT, 0.02)
    assert not_decreasing(block_of([Row(50 * row + 49, info, [loss]) for row, loss in enumerate(losses)]))


def test_of_several_workers_the_lowest_is_judged() -> None:
    info = tensor("loss", "losses", shape=())
    rows = [
        Row(step, info, [loss], worker=worker)
        for step in range(200)
        for worker, loss in enumerate((0.99**step, 1.0))
    ]
    assert not_decreasing(block_of(rows)) == []


def test_a_loss_that_jumped_and_falls_since_does_not_rise() -> None:
    """A loss that gets a second term, which is learnt at once."""
    first = noisy(falling(0.1, 0.02, 200, 10), 0.05)
    assert not_decreasing(run_of(np.concatenate([first, noisy(falling(2.3, 0.3, 200, 20), 0.05)]))) == []
    assert not_decreasing(run_of(np.concatenate([first, noisy(np.full(200, 2.3), 0.05)])))


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
    judged = not_decreasing(block_of([Row(step, info, [1.0]) for step in range(300)]))
    assert bool(judged) == (name in TRAINING)


def test_the_finding_states_where_it_began_and_where_it_is() -> None:
    outcome = all_at_once(RuleConfig(rule="loss_not_decreasing"), run_of(2 * FLAT))
    finding = outcome.findings[0]
    assert (finding.step, finding.value, finding.threshold) == (109, 2.0, 2.0)
    assert finding.message == "loss is 2 on average, it began at 2, and has not moved for 100 steps"
    rising = all_at_once(RuleConfig(rule="loss_not_decreasing"), STUCK["the sign is wrong"])
    assert "and still rises" in rising.findings[0].message


def test_patience_is_the_users_to_set() -> None:
    assert not_decreasing(run_of(FLAT[:60])) == []
    assert not_decreasing(run_of(FLAT[:60]), patience=40) == [53]


# slow_convergence


SLOW_STEPS = 250


def is_slow(block: Block, **params: object) -> bool:
    return bool(firing_steps("slow_convergence", block, hold=5, **params))


def ramp(first: float, last: float) -> list[float]:
    return [float(ratio) for ratio in np.geomspace(first, last, SLOW_STEPS // 5)]


SINKING = falling(LN10, 0, SLOW_STEPS, 4000)
SLOW = {
    "sinks below its noise": run_of(noisy(SINKING, 0.02), update=1e-4, labels=TEN),
    "sinks below its noise, labels unknown": run_of(noisy(SINKING, 0.02), update=1e-4),
    "does not seem to move": run_of(noisy(np.full(SLOW_STEPS, 35.0), 0.15), update=1e-5),
    "sinks steadily, updates are modest": run_of(falling(1.2, 0, SLOW_STEPS, 2000), update=1e-3),
    "a loss that is scaled down": run_of(noisy(np.full(SLOW_STEPS, 0.02), 0.003), update=1e-4, labels=TEN),
    "the learning rate has decayed too soon": run_of(
        noisy(falling(2.30, 2.24, SLOW_STEPS, 10), 0.01), update=ramp(1e-2, 1e-8)
    ),
}
FAST_ENOUGH = {
    "learns": run_of(noisy(falling(LN10, 0.1, SLOW_STEPS, 60), 0.1), update=1e-4),
    "has converged": run_of(noisy(falling(LN10, 0.05, SLOW_STEPS, 10), 0.2), update=1e-6),
    "updates are ordinary": run_of(noisy(SINKING, 0.02), update=5e-3),
    "no update at all": run_of(noisy(SINKING, 0.02), update=0.0),
    "updates are not known": run_of(noisy(SINKING, 0.02)),
    "warm-up": run_of(noisy(SINKING, 0.02), update=ramp(1e-8, 1e-3)),
    "a plateau ends": run_of(2.3 - np.exp((np.arange(SLOW_STEPS) - 260) / 20), update=1e-3),
    "begins trained": run_of(noisy(np.full(SLOW_STEPS, 0.04), 0.2), update=1e-4, labels=TEN),
    "a policy's gain": run_of(noisy(np.full(SLOW_STEPS, -0.1), 1.0), update=1e-4),
}


def with_inputs(block: Block, size: float, dtype: str = "float32") -> Block:
    info = replace(tensor("model:input", "inputs", role="input"), dtype=dtype)
    rows = block_of([Row(step, info, [size, -size]) for step in range(0, SLOW_STEPS, 5)])
    return concatenate([block, rows]).ordered()


def test_steps_are_small_where_inputs_are() -> None:
    ordinary = run_of(noisy(SINKING, 0.02), update=5e-3)
    assert is_slow(with_inputs(ordinary, 0.01))
    assert not is_slow(with_inputs(ordinary, 0.5))
    assert not is_slow(with_inputs(ordinary, 0.01, "int64"))


def test_integer_labels_that_are_no_classes_are_no_evidence_about_the_loss() -> None:
    tokens = replace(tensor("labels", "labels", shape=(16,)), dtype="int64")
    rows = block_of([Row(step, tokens, list(range(16))) for step in range(0, SLOW_STEPS, 5)])
    flat = run_of(noisy(np.full(SLOW_STEPS, 2.7), 0.1), update=1e-4)
    assert is_slow(concatenate([flat, rows]).ordered())


def test_slow_convergence_thresholds_are_the_users_to_set() -> None:
    block = run_of(noisy(SINKING, 0.02), update=5e-3)
    assert is_slow(block, small_update=1e-2)
    assert not is_slow(SLOW["sinks below its noise"], small_update=1e-5, modest_update=1e-5)
    assert not is_slow(SLOW["sinks below its noise"], max_fall=0.001)


def test_the_finding_states_how_far_it_came_and_how_small_updates_are() -> None:
    assert first_message("slow_convergence", run_of(np.full(120, 2.0), update=1e-4)) == (
        "loss has gone from 2 to 2, and no weight changes by more than 0.0001 of its size in a step"
    )


def with_rate(values: dict[int, float], worker: int = 0) -> Block:
    """Slow from the start, with a learning rate that has a row where it changes."""
    info = tensor("optimizer:learning_rate/0", "metrics", role="metric", shape=())
    rate = block_of([Row(step, info, [value], worker=worker) for step, value in values.items()])
    return concatenate([SLOW["does not seem to move"], rate]).ordered()


@pytest.mark.parametrize(
    ("values", "words", "cause", "action"),
    [
        (
            {0: 0.1, 40: 1e-5},
            "; optimizer:learning_rate/0 fell from 0.1 to 1e-05 at step 40",
            "The learning rate fell from 0.1 to 1e-05 at step 40 (optimizer:learning_rate/0)",
            "Look at what lowered the learning rate at step 40, and keep 0.1 for longer.",
        ),
        (
            {0: 0.1, 40: 0.0},
            "; optimizer:learning_rate/0 fell from 0.1 to 0 at step 40",
            "The learning rate fell from 0.1 to 0 at step 40",
            "Look at what lowered the learning rate at step 40",
        ),
        (
            {0: 1e-3, 10: 1.0},
            "; optimizer:learning_rate/0 rose from 0.001 to 1 at step 10",
            "The learning rate rose from 0.001 to 1 at step 10",
            "Look at what raised the learning rate at step 10",
        ),
        ({0: 0.1}, "", "The learning rate is too low.", "Raise the learning rate by factors of three"),
        (
            {0: 0.0, 40: 0.1},
            "",
            "The learning rate is too low.",
            "Raise the learning rate by factors of three",
        ),
        ({step: 0.1 * 0.97**step for step in range(200)}, "", "The learning rate is too low.", "Raise"),
    ],
)
def test_a_learning_rate_that_jumped_or_fell_before_is_named(
    values: dict[int, float], words: str, cause: str, action: str
) -> None:
    config = RuleConfig(rule="slow_convergence")
    findings = all_at_once(config, with_rate(values)).findings[:50]
    assert findings
    for finding in findings:
        assert finding.message.endswith(words or "of its size in a step")
        advice = config.implementation.advice(finding)
        assert advice.usual_causes[0].startswith(cause)
        assert advice.what_to_try[0].startswith(action)


def test_a_change_of_the_rate_long_before_is_not_named() -> None:
    findings = all_at_once(
        RuleConfig(rule="slow_convergence", params={"patience": 50}), with_rate({0: 0.1, 20: 1e-5})
    ).findings
    named = [finding.step for finding in findings if "learning_rate" in finding.message]
    assert named
    assert max(named) == 120
    assert max(finding.step for finding in findings) > 120


# loss_spike


COURSE = noisy(falling(2.0, 0.4, 200, 30.0), 0.05)


def then(curve: Curve, rest: Curve) -> Curve:
    """A curve of 150 losses, and what follows."""
    return np.concatenate([curve[:150], rest])


def with_spike(steps: int, height: float = 3.0, curve: Curve = COURSE) -> Curve:
    spiked: Curve = curve.copy()
    spiked[150 : 150 + steps] += height
    return spiked


def spikes(losses: Curve, **params: object) -> list[int]:
    return found_by("loss_spike")(run_of(losses), **params)


def test_a_jump_that_lasts_is_found_and_one_that_returns_is_not() -> None:
    assert spikes(with_spike(50))[0] == 159
    assert spikes(with_spike(9)) == []
    assert spikes(with_spike(1), lasting=1) == [150]
    assert spikes(with_spike(50, height=0.8)) == []
    assert spikes(with_spike(50, height=0.8), of_first=0.25, lasting=5)[0] == 154


SPIKES = {
    "explodes and stays high": then(COURSE, noisy(np.full(100, 389_864.0), 0.5)),
    "explodes and comes down slowly": then(COURSE, noisy(falling(1e6, 50.0, 100, 20), 0.2)),
    "grows tenfold in ten losses": then(COURSE, 0.4 * 10 ** (np.arange(60) / 10)),
    "its sign is turned around": then(COURSE, -0.4 * 2.0 ** np.arange(30)),
    "back where it began, after rounding took it below zero": then(
        falling(2.0, -1e-8, 200, 8.0), noisy(np.full(60, 2.2), 0.02)
    ),
    "a likelihood explodes": then(noisy(falling(5.0, -3.0, 200, 20.0), 0.02), noisy(np.full(60, 400.0), 0.2)),
}


FLOORED = noisy(falling(3.6, 2.0, 150, 30.0), 0.03)
EARLY = {
    "back where it began, above a floor": then(FLOORED, noisy(np.full(60, 3.9), 0.01)),
    "back where it began, but for one small batch": then(
        COURSE, np.array([3.0, 2.2, 2.4, 1.7, 2.3, 2.6, 2.2, 2.5, 2.1, 2.4])
    ),
    "back where it began, and noisy": then(
        falling(1.1, 0.27, 200, 15.0) + 0.06 * (noisy(np.ones(200), 1.0) - 1), np.full(30, 1.12)
    ),
    "its sign is flipped, above a floor": then(FLOORED, 2.0 + 0.1 * 1.35 ** np.arange(13)),
    "its sign is flipped, above nothing": then(COURSE, np.minimum(0.4 * 1.25 ** np.arange(40), 2.3)),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_loss_that_climbs_or_is_back_above_its_floor_is_found_within_twelve_losses(name: str) -> None:
    assert 150 < spikes(EARLY[name])[0] <= 162


def test_the_message_omits_a_loss_that_dips_once() -> None:
    losses = then(COURSE, np.array([3.0, 2.2, 2.4, 1.7, 2.3, 2.6, 2.2, 2.5, 2.1, 2.4]))
    losses[153] = 1.3
    (finding,) = all_at_once(RuleConfig(rule="loss_spike"), run_of(losses)).findings
    assert (finding.step, finding.value) == (159, 2.1)
    assert "the lowest but one of the last 10 is 2.1" in finding.message


def test_a_climb_is_reported_by_the_mean_of_its_newer_half() -> None:
    losses = np.concatenate([np.linspace(4.0, 1.0, 20), np.full(60, 1.0), [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]])
    outcome = all_at_once(RuleConfig(rule="loss_spike"), run_of(losses))
    finding = outcome.findings[0]
    assert (finding.step, finding.value) == (85, 4.0)
    assert finding.message == (
        "loss is 4.5, the mean of the last 3, which climb, is 4; the median of the 50 before is 1"
    )


CALM = {
    "another task above a floor, learnt as fast": then(FLOORED, noisy(falling(4.5, 2.0, 100, 12), 0.02)),
    "back for nine losses, two of them lower": then(
        COURSE, np.array([3.0, 2.2, 2.4, 1.4, 2.3, 1.3, 2.2, 2.5, 2.1, 2.4, 0.4])
    ),
    "a rate that restarts": then(COURSE, 0.4 + 1.2 * np.array([0.2, 0.9, 0.5, 1.0, 0.6, 0.9, *[0.3] * 40])),
    "climbs by a third of what it had learnt": then(COURSE, 0.4 + np.minimum(0.05 * np.arange(40), 0.5)),
    "falls": COURSE,
    "noisy": noisy(np.full(300, 1.0), 0.4),
    "less than it began at": with_spike(50, height=1.0),
    "steep": falling(1e3, 1e-6, 300, 10.0),
    "close to zero": with_spike(50, height=0.01, curve=falling(2.0, 1e-3, 200, 10.0)),
    "rises slowly": falling(2.0, 8.0, 300, 100.0),
    "a first loss of nothing": then(
        np.concatenate([np.full(10, 1e-9), noisy(np.full(140, 0.5), 0.1)]), noisy(np.full(100, 0.9), 0.1)
    ),
    "the classes in another order": then(COURSE, noisy(falling(9.0, 0.4, 100, 12), 0.05)),
    "a likelihood that falls below zero": noisy(falling(5.0, -3.0, 400, 40), 0.02),
    "a game that swings as far as it did long ago": np.concatenate(
        [2.0 * np.sin(np.arange(60) / 9.5), noisy(np.full(90, 0.1), 0.3), np.full(50, 1.5)]
    ),
    "a generator's loss that goes below zero by and by": np.concatenate(
        [noisy(np.full(150, 1.0), 0.02), np.linspace(0.98, -0.9, 50)]
    ),
    "a climb on the edge of stability that comes back": then(
        noisy(falling(0.08, 0.0185, 200, 15.0), 0.01),
        np.array([0.019, 0.021, 0.024, 0.032, 0.045, 0.06, 0.053, 0.03, *[0.018] * 40]),
    ),
    "longer sequences, which climb after a leap": then(
        noisy(falling(1.5, 0.074, 200, 15.0), 0.1),
        np.array([2.07, 1.43, 1.37, 0.2, 0.3, 0.4, 1.19, 1.3, 1.4, 0.9, 0.8, 0.7, *[0.5] * 40]),
    ),
    "a game's loss, of which eight spreads are all it learned": then(
        falling(0.575, 0.2, 200, 15.0) + 0.042 * (noisy(np.ones(200), 1.0) - 1), np.full(40, 0.58)
    ),
}


def test_the_message_compares_the_jump_with_the_level() -> None:
    losses = np.concatenate([np.linspace(0.9, 1.1, 50), np.full(10, 4.0)])
    outcome = all_at_once(RuleConfig(rule="loss_spike"), run_of(losses))
    (finding,) = outcome.findings
    assert (finding.step, finding.value) == (59, 4.0)
    assert finding.threshold == pytest.approx(2.0, abs=0.2)
    assert finding.message == ("loss is 4, the lowest of the last 10 is 4; the median of the 50 before is 1")


def test_a_loss_below_zero_has_a_level_as_well() -> None:
    losses = np.concatenate([noisy(np.full(100, -5.0), 0.01), np.full(20, 3.0)])
    assert spikes(losses)[0] == 109


@pytest.mark.parametrize("cut", range(155, 162))
def test_the_newest_loss_may_be_the_one_that_dips_wherever_the_run_is_cut(cut: int) -> None:
    course = np.concatenate([np.full(50, 2.0), np.full(100, 0.002), np.full(9, 2.0), [0.97, 0.002]])
    block, config = run_of(course), RuleConfig(rule="loss_spike")
    assert in_pieces(config, block, [cut]) == in_pieces(config, block, [])
    assert spikes(course) == [159]


# lost_progress


LEARNT = noisy(falling(2.4, 0.2, 200, 30.0), 0.1)


def learnt_then(*rest: Curve) -> Curve:
    return np.concatenate([LEARNT, *rest])


def lost(block: Block, **params: object) -> list[int]:
    return firing_steps("lost_progress", block, hold=3, **params)


LOST = {
    "inputs become constant": run_of(learnt_then(noisy(np.full(150, LN10), 0.03))),
    "from a high start to what a guess is worth": run_of(
        np.concatenate([falling(30.0, 0.2, 200, 10), noisy(np.full(150, LN10), 0.03)]),
        labels=TEN,
    ),
    "labels are shuffled": run_of(learnt_then(noisy(falling(6.0, LN10, 200, 15), 0.05))),
    "it rises step by step": run_of(learnt_then(noisy(np.linspace(0.2, 5.0, 150), 0.05))),
}
PROGRESSING = {
    "converges": run_of(LEARNT),
    "another task, learnt as fast": run_of(learnt_then(noisy(falling(2.4, 0.2, 200, 30), 0.1))),
    "half of it is back": run_of(learnt_then(noisy(np.full(150, 1.2), 0.05))),
    "a spike that comes back": run_of(learnt_then(np.full(15, 3.0), LEARNT[-50:])),
    "had never fallen by half": run_of(np.concatenate([falling(2.4, 1.5, 200, 30), np.full(150, 2.4)])),
    "a policy's gain": run_of(noisy(np.sin(np.arange(500) / 60), 0.3)),
    "resumed": run_of(learnt_then(noisy(np.full(150, LN10), 0.03)), first_step=3000),
    "began at nothing": run_of(np.concatenate([np.full(10, 1e-9), np.zeros(40), noisy(np.ones(200), 0.1)])),
}


def test_the_message_states_what_was_lost() -> None:
    losses = np.concatenate([np.full(10, 2.0), np.full(40, 0.5), np.full(40, 2.0)])
    outcome = all_at_once(RuleConfig(rule="lost_progress"), run_of(losses))
    finding = outcome.findings[0]
    assert finding.message == "loss is 2 on average, it began at 2 and had come down to 0.5"
    assert finding.step == 83
    assert finding.threshold == pytest.approx(1.6)


# oscillating_loss


STEPS = np.arange(240)


def oscillates(block: Block, **params: object) -> bool:
    return bool(firing_steps("oscillating_loss", block, hold=3, **params))


BURSTS = np.concatenate([[30.0], RNG(3).uniform(40, 5000, 239)])
CALM_VALIDATION = falling(2.3, 0.3, 24, 5)
SWINGS = {
    "overshoots, worse than with_message the same for all": run_of(BURSTS, labels=[60, 40]),
    "overshoots, labels unknown": run_of(BURSTS),
    "jumps from side to side": run_of(1.2 + 0.4 * (-1.0) ** STEPS),
    "jumps from side to side, with noise": run_of(noisy(1.2 + 0.4 * (-1.0) ** STEPS, 0.05)),
    "swings with a period of six": run_of(5 + 2 * np.cos(np.pi * STEPS / 3)),
    "validation swings": run_of(
        noisy(falling(2.3, 0.1, 240, 20), 0.3), evaluations=[2.3, 2.5, *([0.3, 0.9] * 11)]
    ),
}
STEADY = {
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


def test_the_scale_of_the_loss_does_not_matter_where_labels_are_not_recorded() -> None:
    for scale in (1e-6, 1e6):
        assert oscillates(run_of(scale * BURSTS))


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
    assert oscillates(with_labels(LEAPS, in_order))
    assert not oscillates(with_labels(LEAPS, RNG_LABELS))
    assert not oscillates(with_labels(np.concatenate([LEAPS[:8], LEAPS[8:] / 10]), in_order))
    rare = [[0.0] * 15 + [float(step % 9 == 0)] for step in range(240)]
    assert not oscillates(with_labels(LEAPS, rare))


def test_a_wide_swing_is_found_where_gradients_are_never_cleared() -> None:
    assert oscillates(with_labels(LEAPS, RNG_LABELS, stale=1.0))
    assert not oscillates(with_labels(LEAPS, RNG_LABELS, stale=0.0))
    assert not oscillates(with_labels(falling(2.3, 0.3, 240, 40), RNG_LABELS, stale=1.0))


def test_oscillating_loss_thresholds_are_the_users_to_set() -> None:
    assert not oscillates(SWINGS["overshoots, labels unknown"], above_first=1e4)
    assert not oscillates(SWINGS["overshoots, labels unknown"], swing=50)
    assert not oscillates(SWINGS["jumps from side to side, with noise"], alternation=0.999)
    assert oscillates(SWINGS["jumps from side to side"], window=12)


def test_the_finding_states_between_what_it_swings() -> None:
    assert (
        first_message("oscillating_loss", SWINGS["jumps from side to side"])
        == "loss oscillated between 0.8 and 1.6 over 40 records"
    )


# All of them


@dataclass(frozen=True)
class Curves:
    """Runs that a rule is for and runs that it is not for.

    Attributes:
        hold: steps for which the rule's alert waits.
        expected: the steps at one of which the first alert of each faulty run fires.
    """

    faulty: dict[str, Block]
    healthy: dict[str, Block]
    hold: int = 1
    expected: range = range(1000)

    def __getitem__(self, name: str) -> Block:
        return {**self.faulty, **self.healthy}[name]


def runs_of(curves: dict[str, Curve]) -> dict[str, Block]:
    return {name: run_of(curve) for name, curve in curves.items()}


@pytest.mark.parametrize(
    ("level", "shapes", "fires"),
    [
        (LN10, [(32, 10)], True),
        (LN10, [(32, 10, 4, 4)], True),
        (LN10, [], False),
        (LN10, [(32, 5)], False),
        (LN10, [(32, 10), (32, 3)], False),
        (0.9 * LN10, [(32, 10)], False),
    ],
)
def test_a_guess_between_the_outputs_of_a_model_needs_no_labels(
    level: float, shapes: list[tuple[int, ...]], fires: bool
) -> None:
    losses = run_of(noisy(level * FLAT[:150], 0.02), function="NllLoss")
    outputs = [
        Row(0, tensor(f"net{number}:output", "outputs", role="output", shape=shape), [0.1, 0.2])
        for number, shape in enumerate(shapes)
    ]
    block = concatenate([losses, block_of(outputs)]) if outputs else losses
    assert bool(firing_steps("loss_not_decreasing", block, 5)) == fires


# invalid_objective


NLL, STEPS = "NllLoss", np.arange(120)
PROBABILITIES = f"{NLL}{OF_PROBABILITIES}"
INVALID = {
    "negated": run_of(noisy(-1.4 * np.exp(STEPS / 30), 0.05), function=f"-{NLL}"),
    "of probabilities": run_of(noisy(falling(2.3, 1.5, 120, 30), 0.02), function=PROBABILITIES),
    "rises from its start": run_of(noisy(LN10 * np.exp(STEPS / 40), 0.05), function=NLL),
    "rises, and its negative is minimized": run_of(
        noisy(LN10 * np.exp(STEPS / 40), 0.05), function=f"-{NLL}"
    ),
    "falls without an end": run_of(noisy(-0.1 * np.exp(STEPS / 8), 0.05)),
}
VALID = {
    "negated, but maximized": run_of(noisy(falling(-2.3, -0.05, 120, 30), 0.05), function=f"-{NLL}"),
    "negated, of adversaries that grow weaker": run_of(noisy(np.full(120, -2.0), 0.3), function=f"-{NLL}"),
    "a log-likelihood of a density": run_of(noisy(3 - 0.2 * STEPS, 0.05)),
    "a critic that grows": run_of(noisy(-0.01 - 0.5 * STEPS, 0.1)),
    "a policy's gain": run_of(RNG(2).normal(size=120) * 0.1),
    "a classifier that learns": run_of(noisy(falling(2.3, 0.1, 120, 30), 0.1), function=NLL),
    "another task after the first": run_of(
        noisy([*falling(2.3, 0.1, 60, 10), *falling(7.0, 1.0, 60, 10)], 0.05), function=NLL
    ),
    "a squared error of values that grow": run_of(noisy(0.1 * np.exp(STEPS / 20), 0.1), function="MseLoss"),
    "a small loss that grows within what a guess has": run_of(
        noisy(0.05 + STEPS * 0.003, 0.05), function=NLL
    ),
}


CURVES = {
    "loss_not_decreasing": Curves(STUCK, LEARNING, hold=5),
    "slow_convergence": Curves(SLOW, FAST_ENOUGH, hold=5),
    "invalid_objective": Curves(INVALID, VALID, hold=3, expected=range(9, 80)),
    "loss_spike": Curves(runs_of(SPIKES), runs_of(CALM), expected=range(171)),
    "lost_progress": Curves(LOST, PROGRESSING, hold=3, expected=range(201, 290)),
    "oscillating_loss": Curves(SWINGS, STEADY, hold=3),
}
FAULTY = [(rule, name) for rule, curves in CURVES.items() for name in curves.faulty]
HEALTHY = [(rule, name) for rule, curves in CURVES.items() for name in curves.healthy]


@pytest.mark.parametrize(("rule", "name"), FAULTY)
def test_a_loss_that_a_rule_is_for_is_found(rule: str, name: str) -> None:
    curves = CURVES[rule]
    assert firing_steps(rule, curves[name], curves.hold)[0] in curves.expected


@pytest.mark.parametrize(("rule", "name"), HEALTHY)
def test_a_loss_that_learns_or_cannot_be_judged_is_fine(rule: str, name: str) -> None:
    assert firing_steps(rule, CURVES[rule][name], CURVES[rule].hold) == []


@settings(max_examples=examples(80), deadline=None)
@given(
    which=st.sampled_from([*FAULTY, *HEALTHY]),
    cuts=st.lists(st.integers(1, 299), max_size=12, unique=True),
)
def test_a_run_in_pieces_is_judged_as_the_whole(which: tuple[str, str], cuts: list[int]) -> None:
    rule, name = which
    block, config = CURVES[rule][name], RuleConfig(rule=rule)
    first, last = int(block.step.min()), int(block.step.max())
    within = [first + cut for cut in cuts if first + cut <= last]
    assert in_pieces(config, block, within) == in_pieces(config, block, [])
