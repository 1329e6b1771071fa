"""Rules over validation losses, by made curves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.builtin.losses import EVERY, Curve, falling, in_pieces, noisy, run_of
from tests.rules.runs import all_at_once, found_by
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep.format.tensors import Mode
from watchstep_rules.config.rule_config import RuleConfig

# overfit


LEARNS = noisy(falling(2.3, 0.001, 300, 40), 0.1)
FALLS = falling(2.3, 0.5, 30, 3)
TURNS = 0.5 + np.abs(np.arange(30) - 6) * 0.06


overfits = found_by("overfit")


FAULTY = {
    "turns and rises": run_of(LEARNS, evaluations=TURNS),
    "turns and rises, with noise": run_of(LEARNS, evaluations=noisy(TURNS, 0.05)),
    "rises from the first": run_of(LEARNS, evaluations=0.7 + 0.05 * np.arange(30)),
    "rises and stays up": run_of(LEARNS, evaluations=np.minimum(TURNS, 1.0)),
    "large": run_of(1e4 * LEARNS, evaluations=1e4 * TURNS),
    "a log-likelihood": run_of(LEARNS - 3, evaluations=TURNS * 2 - 3),
}
HEALTHY = {
    "falls": run_of(LEARNS, evaluations=FALLS),
    "stays above training": run_of(LEARNS, evaluations=FALLS + 1),
    "flat and noisy": run_of(LEARNS, evaluations=noisy(FALLS, 0.15)),
    "training does not fall": run_of(noisy(np.full(300, 1.0), 0.1), evaluations=TURNS),
    "both rise": run_of(LEARNS[::-1], evaluations=TURNS),
    "one bad evaluation": run_of(LEARNS, evaluations=[*FALLS[:15], 9.0, *FALLS[15:29]]),
    "rises and comes back": run_of(
        LEARNS, evaluations=FALLS + 0.8 * np.exp(-(((np.arange(30) - 10) / 1.5) ** 2))
    ),
    "doubles close to nothing": run_of(LEARNS, evaluations=falling(2.3, 0.01, 30, 1) + 0.001 * np.arange(30)),
    "no training loss": run_of(np.full(300, np.nan), evaluations=TURNS),
    "no evaluation": run_of(LEARNS),
    "evaluations are not finite": run_of(LEARNS, evaluations=np.full(30, np.nan)),
}


def evaluated(turns: Curve, metric: Curve, name: str = "accuracy", mode: Mode = "eval") -> Block:
    """A validation loss and a metric every ten steps."""
    info, share = tensor("loss", "losses", shape=()), tensor(name, "metrics", shape=())
    rows = [Row(step, info, [loss]) for step, loss in enumerate(LEARNS)]
    for place, (loss, value) in enumerate(zip(turns, metric, strict=True)):
        rows += [Row(10 * place, info, [loss], "eval"), Row(10 * place, share, [value], mode)]
    return block_of(sorted(rows, key=lambda row: row.step))


GROWS = np.linspace(0.3, 0.9, 30)


@pytest.mark.parametrize(("name", "mode"), [("accuracy", "eval"), ("val_f1", "train")])
def test_a_model_that_gets_better_by_a_metric_of_validation_does_not_overfit(name: str, mode: Mode) -> None:
    assert overfits(evaluated(TURNS, GROWS, name, mode)) == []


@pytest.mark.parametrize(
    ("metric", "name", "mode"),
    [
        (np.minimum(GROWS, GROWS[6]), "accuracy", "eval"),
        (
            np.minimum(GROWS, GROWS[6]) + np.linspace(0.0, 0.01, 30) * (-1.0) ** np.arange(30),
            "accuracy",
            "eval",
        ),
        (GROWS[::-1], "accuracy", "eval"),
        (GROWS, "accuracy", "train"),
        (GROWS, "perplexity", "eval"),
    ],
    ids=["stays", "stays, with noise", "gets worse", "of training", "less is better"],
)
def test_another_metric_does_not_hide_it(metric: Curve, name: str, mode: Mode) -> None:
    assert overfits(evaluated(TURNS, metric, name, mode)) == overfits(FAULTY["turns and rises"])


def test_the_loss_of_a_value_function_is_no_validation_loss() -> None:
    info, value = tensor("loss", "losses", shape=()), tensor("value_loss", "losses", shape=())
    rows = [Row(step, info, [loss]) for step, loss in enumerate(LEARNS)]
    rows += [Row(10 * place, value, [loss]) for place, loss in enumerate(TURNS)]
    assert overfits(block_of(sorted(rows, key=lambda row: row.step))) == []


@pytest.mark.parametrize("name", FAULTY)
def test_validation_that_rises_while_training_falls_is_found(name: str) -> None:
    steps = overfits(FAULTY[name])
    assert steps
    assert steps[0] >= 50


@pytest.mark.parametrize("name", HEALTHY)
def test_others_are_fine(name: str) -> None:
    assert overfits(HEALTHY[name]) == []


@pytest.mark.parametrize(
    "name", ["val_loss", "VALLoss", "evals/loss", "validatorLoss", "Loss/valid", "test-losses"]
)
def test_a_validation_loss_is_recognized_by_its_name_as_well(name: str) -> None:
    train, held_out = tensor("train_loss", "losses", shape=()), tensor(name, "losses", shape=())
    rows = [Row(step, train, [loss]) for step, loss in enumerate(LEARNS)]
    rows += [Row(10 * place, held_out, [loss]) for place, loss in enumerate(TURNS)]
    assert overfits(block_of(sorted(rows, key=lambda row: row.step)))


def test_of_several_training_losses_that_of_the_same_name_counts() -> None:
    names = {name: tensor(name, "losses", shape=()) for name in ("loss", "kl_loss")}
    rows = [Row(step, info, [loss]) for step, loss in enumerate(LEARNS) for info in names.values()]
    rows += [Row(10 * place, names["loss"], [loss], "eval") for place, loss in enumerate(TURNS)]
    assert overfits(block_of(sorted(rows, key=lambda row: row.step)))
    rows = [
        row if row.mode == "train" else Row(row.step, tensor("nll_loss", "losses"), row.values, "eval")
        for row in rows
    ]
    assert overfits(block_of(sorted(rows, key=lambda row: row.step))) == []


def test_thresholds_are_the_users_to_set() -> None:
    block = FAULTY["rises and stays up"]
    assert overfits(block, rise=3.0) == []
    assert overfits(block, of_first=2.0) == []
    assert overfits(block, train_fall=0.9999) == []
    assert overfits(block, patience=2)[0] < overfits(block, patience=12)[0]
    assert overfits(block, patience=100) == []


def test_the_finding_states_since_when() -> None:
    finding = all_at_once(RuleConfig(rule="overfit"), FAULTY["turns and rises"]).findings[0]
    assert (finding.mode, finding.threshold) == ("eval", 0.5)
    assert "its minimum was 0.5 at step 60; the training loss has fallen from" in finding.message


# overtraining


def overtrained(losses: Curve, evaluations: Curve | None = None, **params: object) -> list[tuple[int, str]]:
    block = run_of(losses, evaluations=() if evaluations is None else evaluations)
    outcome = all_at_once(RuleConfig(rule="overtraining", params=params), block)
    return [(finding.step, finding.mode) for finding in outcome.findings]


def test_a_loss_that_came_to_rest_is_found_after_its_patience() -> None:
    losses = np.concatenate([falling(2.0, 0.5, 200, 20.0), np.full(600, 0.5)])
    steps = [step for step, _ in overtrained(losses)]
    assert 600 < steps[0] < 700
    assert steps[-1] == 799
    assert overtrained(losses, patience_train=700) == []


def test_a_loss_that_still_falls_is_fine() -> None:
    assert overtrained(noisy(falling(2.0, 0.0, 900, 300.0), 0.1)) == []


def test_evaluations_have_a_patience_of_their_own() -> None:
    losses, flat = falling(2.0, 0.0, 300, 300.0), np.full(30, 0.7)
    assert overtrained(losses, flat) == [(step, "eval") for step in range(200, 300, 10)]
    assert overtrained(losses, falling(2.0, 0.1, 30, 30.0)) == []


def test_single_losses_count_and_delta_is_absolute_as_in_amazons_rule() -> None:
    amazon: dict[str, Any] = {
        "window": 1,
        "as_share": False,
        "patience_train": 5,
        "patience_validation": 10,
        "delta": 0.01,
    }
    assert overtrained(np.array([1.0, 0.995, 0.994, 0.993, 0.992, 0.991, 0.98]), **amazon) == [(5, "train")]
    assert overtrained(np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]), **amazon) == []


def test_what_is_not_finite_is_omitted() -> None:
    assert overtrained(np.array([1.0, *[np.nan] * 9]), window=1, patience_train=5) == []


# validation_loss_jump


CONFIG = RuleConfig(rule="validation_loss_jump")
GOOD = [2.0, 1.2, 0.7, 0.5, 0.4, 0.35, 0.3, 0.3]


def evaluations_run(evaluations: list[float] | Curve) -> Block:
    """Evaluations during a training with a falling loss."""
    return run_of(falling(2.0, 0.01, EVERY * len(evaluations), 40.0), evaluations=evaluations)


def fired(evaluations: list[float] | Curve, **params: object) -> list[int]:
    """Number of the evaluation at which each alert fires."""
    config = CONFIG.model_copy(update={"params": params})
    changes = all_at_once(config, evaluations_run(evaluations)).transitions
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


@pytest.mark.ci
def test_evaluations_of_heavy_noise_are_ignored() -> None:
    for seed in range(6):
        scatter = np.exp(0.8 * np.random.default_rng(seed).normal(size=150))
        assert fired(falling(5.0, 0.5, 150, 3.0) * scatter) == []


def test_evaluations_of_a_few_examples_drawn_anew_are_ignored() -> None:
    for seed in range(6):
        examples = np.random.default_rng(seed).lognormal(-5.0, 3.0, size=(150, 8)).clip(max=8.0)
        assert fired(np.concatenate([[2.3, 1.2, 0.6], examples.mean(axis=1)])) == []


def test_the_alert_lasts_until_the_loss_is_below_the_bar() -> None:
    outcome = all_at_once(CONFIG, evaluations_run([*GOOD, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 0.4, 0.3, 0.3]))
    assert [finding.step // EVERY for finding in outcome.findings] == [11, 12, 13]
    first = outcome.findings[0]
    assert first.message == (
        "loss on validation data is 2, at least 1.4 for 4 evaluations; it began at 2 and had fallen to 0.35"
    )
    assert first.threshold == pytest.approx(1.4)


def test_the_training_loss_is_not_judged() -> None:
    losses = np.concatenate([noisy(falling(2.0, 0.1, 100, 20.0), 0.01), np.full(50, 5.0)])
    assert all_at_once(CONFIG, run_of(losses)).findings == []


IN_PIECES = {
    **{("overfit", name): block for name, block in {**FAULTY, **HEALTHY}.items()},
    **{("validation_loss_jump", name): evaluations_run(course) for name, course in {**JUMPS, **CALM}.items()},
}


@settings(max_examples=30, deadline=None)
@given(which=st.sampled_from(sorted(IN_PIECES)), cuts=st.lists(st.integers(1, 299), max_size=12, unique=True))
def test_a_run_in_pieces_is_judged_as_the_whole(which: tuple[str, str], cuts: list[int]) -> None:
    block, config = IN_PIECES[which], RuleConfig(rule=which[0])
    within = [cut for cut in cuts if cut <= int(block.step.max())]
    assert in_pieces(config, block, within) == in_pieces(config, block, [])
