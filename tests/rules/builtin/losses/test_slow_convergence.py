from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.builtin.losses.losses import falling, in_pieces, noisy, run_of
from tests.rules.runs import all_at_once
from tests.sdk.format.blocks import Row, block_of, tensor
from watchstep.format.block import Block, concatenate
from watchstep_rules.builtin.losses.slow_convergence import SlowConvergenceParams
from watchstep_rules.config.rule_config import RuleConfig

LN10 = math.log(10)
TEN = [50] * 10
STEPS = 250


def found(block: Block, **params: object) -> bool:
    config = RuleConfig.model_validate({"rule": "slow_convergence", "params": params, "for": {"steps": 5}})
    return bool(all_at_once(config, block).findings)


def ramp(first: float, last: float) -> list[float]:
    return [float(ratio) for ratio in np.geomspace(first, last, STEPS // 5)]


SINKING = falling(LN10, 0, STEPS, 4000)
FAULTY = {
    "sinks below its noise": run_of(noisy(SINKING, 0.02), update=1e-4, labels=TEN),
    "sinks below its noise, labels unknown": run_of(noisy(SINKING, 0.02), update=1e-4),
    "does not seem to move": run_of(noisy(np.full(STEPS, 35.0), 0.15), update=1e-5),
    "sinks steadily, updates are modest": run_of(falling(1.2, 0, STEPS, 2000), update=1e-3),
    "a loss that is scaled down": run_of(noisy(np.full(STEPS, 0.02), 0.003), update=1e-4, labels=TEN),
    "the learning rate has decayed too soon": run_of(
        noisy(falling(2.30, 2.24, STEPS, 10), 0.01), update=ramp(1e-2, 1e-8)
    ),
}
HEALTHY = {
    "learns": run_of(noisy(falling(LN10, 0.1, STEPS, 60), 0.1), update=1e-4),
    "has converged": run_of(noisy(falling(LN10, 0.05, STEPS, 10), 0.2), update=1e-6),
    "updates are ordinary": run_of(noisy(SINKING, 0.02), update=5e-3),
    "no update at all": run_of(noisy(SINKING, 0.02), update=0.0),
    "updates are not known": run_of(noisy(SINKING, 0.02)),
    "warm-up": run_of(noisy(SINKING, 0.02), update=ramp(1e-8, 1e-3)),
    "a plateau ends": run_of(2.3 - np.exp((np.arange(STEPS) - 260) / 20), update=1e-3),
    "begins trained": run_of(noisy(np.full(STEPS, 0.04), 0.2), update=1e-4, labels=TEN),
    "a policy's gain": run_of(noisy(np.full(STEPS, -0.1), 1.0), update=1e-4),
}


@pytest.mark.parametrize("name", FAULTY)
def test_steps_too_small_to_get_anywhere_are_found(name: str) -> None:
    assert found(FAULTY[name])


@pytest.mark.parametrize("name", HEALTHY)
def test_others_are_fine(name: str) -> None:
    assert not found(HEALTHY[name])


def with_inputs(block: Block, size: float, dtype: str = "float32") -> Block:
    info = replace(tensor("model:input", "inputs", role="input"), dtype=dtype)
    rows = block_of([Row(step, info, [size, -size]) for step in range(0, STEPS, 5)])
    return concatenate([block, rows]).ordered()


def test_steps_are_small_where_inputs_are() -> None:
    ordinary = run_of(noisy(SINKING, 0.02), update=5e-3)
    assert found(with_inputs(ordinary, 0.01))
    assert not found(with_inputs(ordinary, 0.5))
    assert not found(with_inputs(ordinary, 0.01, "int64"))


def test_integer_labels_that_are_no_classes_are_no_evidence_about_the_loss() -> None:
    tokens = replace(tensor("labels", "labels", shape=(16,)), dtype="int64")
    rows = block_of([Row(step, tokens, list(range(16))) for step in range(0, STEPS, 5)])
    flat = run_of(noisy(np.full(STEPS, 2.7), 0.1), update=1e-4)
    assert found(concatenate([flat, rows]).ordered())


def test_thresholds_are_the_users_to_set() -> None:
    block = run_of(noisy(SINKING, 0.02), update=5e-3)
    assert found(block, small_update=1e-2)
    assert not found(FAULTY["sinks below its noise"], small_update=1e-5, modest_update=1e-5)
    assert not found(FAULTY["sinks below its noise"], max_fall=0.001)


def test_the_finding_states_how_far_it_came_and_how_small_updates_are() -> None:
    outcome = all_at_once(RuleConfig(rule="slow_convergence"), run_of(np.full(120, 2.0), update=1e-4))
    assert outcome.findings[0].message == (
        "loss has gone from 2 to 2, and no weight changes by more than 0.0001 of its size in a step"
    )


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(FAULTY) + sorted(HEALTHY)),
    cuts=st.lists(st.integers(1, STEPS - 1), max_size=12, unique=True),
)
def test_a_run_in_pieces_is_judged_as_the_whole(name: str, cuts: list[int]) -> None:
    block = {**FAULTY, **HEALTHY}[name]
    config = RuleConfig(rule="slow_convergence")
    assert in_pieces(config, block, cuts) == in_pieces(config, block, [])


@pytest.mark.parametrize("params", [{"patience": 3}, {"max_fall": 1}, {"small_update": 0}, {"x": 1}])
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SlowConvergenceParams.model_validate(params)


def with_rate(values: dict[int, float], worker: int = 0) -> Block:
    """Slow from the start, with a learning rate that has a row where it changes."""
    info = tensor("optimizer:learning_rate/0", "metrics", role="metric", shape=())
    rate = block_of([Row(step, info, [value], worker=worker) for step, value in values.items()])
    return concatenate([FAULTY["does not seem to move"], rate]).ordered()


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
