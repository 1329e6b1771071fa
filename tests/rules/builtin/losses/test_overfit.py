from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.builtin.losses.losses import Curve, falling, in_pieces, noisy, run_of
from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block
from watchstep.format.tensors import Mode
from watchstep_rules.builtin.losses.overfit import OverfitParams
from watchstep_rules.config.rule_config import RuleConfig

LEARNS = noisy(falling(2.3, 0.001, 300, 40), 0.1)
FALLS = falling(2.3, 0.5, 30, 3)
TURNS = 0.5 + np.abs(np.arange(30) - 6) * 0.06


def found(block: Block, **params: object) -> list[int]:
    outcome = all_at_once(RuleConfig(rule="overfit", params=params), block)
    return [finding.step for finding in outcome.findings]


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
    assert found(evaluated(TURNS, GROWS, name, mode)) == []


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
    assert found(evaluated(TURNS, metric, name, mode)) == found(FAULTY["turns and rises"])


def test_the_loss_of_a_value_function_is_no_validation_loss() -> None:
    info, value = tensor("loss", "losses", shape=()), tensor("value_loss", "losses", shape=())
    rows = [Row(step, info, [loss]) for step, loss in enumerate(LEARNS)]
    rows += [Row(10 * place, value, [loss]) for place, loss in enumerate(TURNS)]
    assert found(block_of(sorted(rows, key=lambda row: row.step))) == []


@pytest.mark.parametrize("name", FAULTY)
def test_validation_that_rises_while_training_falls_is_found(name: str) -> None:
    steps = found(FAULTY[name])
    assert steps
    assert steps[0] >= 50


@pytest.mark.parametrize("name", HEALTHY)
def test_others_are_fine(name: str) -> None:
    assert found(HEALTHY[name]) == []


@pytest.mark.parametrize(
    "name", ["val_loss", "VALLoss", "evals/loss", "validatorLoss", "Loss/valid", "test-losses"]
)
def test_a_validation_loss_is_recognized_by_its_name_as_well(name: str) -> None:
    train, held_out = tensor("train_loss", "losses", shape=()), tensor(name, "losses", shape=())
    rows = [Row(step, train, [loss]) for step, loss in enumerate(LEARNS)]
    rows += [Row(10 * place, held_out, [loss]) for place, loss in enumerate(TURNS)]
    assert found(block_of(sorted(rows, key=lambda row: row.step)))


def test_of_several_training_losses_that_of_the_same_name_counts() -> None:
    names = {name: tensor(name, "losses", shape=()) for name in ("loss", "kl_loss")}
    rows = [Row(step, info, [loss]) for step, loss in enumerate(LEARNS) for info in names.values()]
    rows += [Row(10 * place, names["loss"], [loss], "eval") for place, loss in enumerate(TURNS)]
    assert found(block_of(sorted(rows, key=lambda row: row.step)))
    rows = [
        row if row.mode == "train" else Row(row.step, tensor("nll_loss", "losses"), row.values, "eval")
        for row in rows
    ]
    assert found(block_of(sorted(rows, key=lambda row: row.step))) == []


def test_thresholds_are_the_users_to_set() -> None:
    block = FAULTY["rises and stays up"]
    assert found(block, rise=3.0) == []
    assert found(block, of_first=2.0) == []
    assert found(block, train_fall=0.9999) == []
    assert found(block, patience=2)[0] < found(block, patience=12)[0]
    assert found(block, patience=100) == []


def test_the_finding_states_since_when() -> None:
    finding = all_at_once(RuleConfig(rule="overfit"), FAULTY["turns and rises"]).findings[0]
    assert (finding.mode, finding.threshold) == ("eval", 0.5)
    assert "its minimum was 0.5 at step 60; the training loss has fallen from" in finding.message


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(FAULTY) + sorted(HEALTHY)),
    cuts=st.lists(st.integers(1, 299), max_size=12, unique=True),
)
def test_a_run_in_pieces_is_judged_as_the_whole(name: str, cuts: list[int]) -> None:
    block = {**FAULTY, **HEALTHY}[name]
    config = RuleConfig(rule="overfit")
    assert in_pieces(config, block, cuts) == in_pieces(config, block, [])


@pytest.mark.parametrize("params", [{"patience": 0}, {"rise": 0}, {"train_fall": 1}, {"window": 0}, {"x": 1}])
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OverfitParams.model_validate(params)
