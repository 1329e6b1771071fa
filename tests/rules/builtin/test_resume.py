"""A resume that restored other values than those of the step, and what resembles one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.runs import all_at_once, follow, found_by, in_steps, one_by_one
from tests.sdk.format.blocks import Row, tensor
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig

LOSS = tensor("loss", "losses", shape=())
RATE = tensor("optimizer:learning_rate/0", "metrics", shape=())
STATE = tensor("optimizer:has_state", "metrics", shape=())
SCALE = tensor("gradient_scaler:scale", "metrics", shape=())
IN_PROCESS = tensor("training:in_process", "metrics", shape=())
WEIGHTS = tuple(tensor(f"{name}.weight", "weights", order=order) for order, name in enumerate("abcd"))
RESUMED = 200
Values = dict[TensorInfo, list[float]]


def rate_at(step: int) -> float:
    return 0.1 * 0.99**step


def size_at(step: int) -> float:
    return 1.0 + 0.005 * step


def reference(steps: int = 300) -> dict[str, list[tuple[int, float]]]:
    """An earlier attempt: a rate that decays, an optimizer with state, weights that grow, and a loss that has fallen."""
    every = range(steps)
    return {
        "loss": [(step, 2.0 if step < 50 else 0.5 + 0.01 * (step % 3)) for step in every],
        RATE.name: [(step, rate_at(step)) for step in every],
        STATE.name: [(0, 0.0), (1, 1.0)],
        SCALE.name: [(0, 65536.0), (100, 1024.0)],
        **{info.name: [(step, size_at(step)) for step in every] for info in WEIGHTS},
    }


def resumed(first: int = RESUMED, changes: Values | None = None, place: int | None = None) -> Block:
    """Twelve steps of an attempt that restored everything, but for changes."""
    at = first if place is None else place
    values: Values = {
        LOSS: [0.5] * 12,
        RATE: [rate_at(at + step) for step in range(12)],
        STATE: [1.0, 1.0],
        SCALE: [1024.0],
        **{info: [size_at(at + step) for step in range(12)] for info in WEIGHTS},
        **(changes or {}),
    }
    return in_steps(
        *[
            [Row(first + step, info, [value]) for step, value in enumerate(series)]
            for info, series in values.items()
        ]
    )


def message(block: Block, steps: int = 300) -> str:
    """The messages of all findings."""
    config = RuleConfig(rule="resume_mismatch", params={"reference": reference(steps)})
    return "\n".join(finding.message for finding in all_at_once(config, block).findings)


found = found_by("resume_mismatch")
ANEW: Values = {info: [size_at(step) for step in range(12)] for info in WEIGHTS}


@pytest.mark.parametrize("first", [RESUMED, 0])
def test_a_complete_resume_is_silent(first: int) -> None:
    assert message(resumed(first, place=RESUMED)) == ""


@pytest.mark.parametrize("first", [RESUMED, 0])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {RATE: [rate_at(step) for step in range(12)]},
            "learning_rate/0 is 0.1 after the resume, and was 0.01",
        ),
        ({RATE: [0.05] * 12}, "learning_rate/0 is 0.05 after the resume"),
        ({STATE: [0.0, 1.0]}, "momentum and other averages of step"),
        ({SCALE: [65536.0]}, "scale is 6.554e+04 after the resume, and was 1024 at step"),
        ({LOSS: [1.9] * 12}, "loss is 1.9 in the median of 5 steps after the resume, and was 0.51 before"),
        ({RATE: [0.1], STATE: [0.0, 1.0]}, "; optimizer:has_state is 0 at the first update"),
    ],
)
def test_what_was_not_restored_is_named(first: int, changes: Values, words: str) -> None:
    text = message(resumed(first, changes, place=RESUMED))
    assert words in text
    assert text.count("\n") == 0


def test_a_schedule_that_begins_anew_with_its_warm_up_is_found() -> None:
    warmed = {**reference(), RATE.name: [(0, 1e-4), (10, 0.1), (299, 0.09)]}
    assert found(resumed(changes={RATE: [1e-4, 2e-4]}), reference=warmed) == [RESUMED]
    assert found(resumed(changes={RATE: [5e-4, 6e-4]}), reference=warmed) == []  # lower on purpose


def test_in_one_process_higher_losses_show_that_it_is_no_other_phase() -> None:
    text = message(
        resumed(changes={IN_PROCESS: [1.0], RATE: [9.0] * 12, STATE: [0.0, 1.0], LOSS: [3.0] * 12})
    )
    assert "learning_rate/0 is 9 after the resume" in text
    assert "; optimizer:has_state is 0" in text
    assert "; loss is 3 in the median" in text
    assert text.count("\n") == 0


def test_a_cycle_that_begins_at_the_resume_is_silent_if_one_has_begun_before() -> None:
    cycles = {**reference(), RATE.name: [(step, 0.1 - 0.0009 * (step % 100)) for step in range(RESUMED)]}
    assert found(resumed(changes={RATE: [0.1, 0.0991]}), reference=cycles) == []
    assert found(resumed(changes={RATE: [0.2, 0.2]}), reference=cycles) == [RESUMED]


def test_weights_that_were_not_loaded_are_found_if_the_step_is_known() -> None:
    text = message(resumed(changes={**ANEW, STATE: [0.0, 1.0], LOSS: [2.0] * 12}))
    assert (
        "the weights are not those of step 199: the rms of a.weight and 3 others is that of the run's first steps"
        in text
    )
    assert "loss" not in text  # one cause


@pytest.mark.parametrize(
    ("first", "changes", "steps"),
    [
        (0, {**ANEW, RATE: [9.0] * 12, STATE: [0.0, 1.0]}, 300),  # a training from the beginning
        (0, {info: [3.7] * 12 for info in WEIGHTS}, 100),  # weights of no earlier step
        (RESUMED, {IN_PROCESS: [1.0], RATE: [9.0] * 12}, 300),  # another phase
        (
            RESUMED,
            {IN_PROCESS: [1.0], STATE: [0.0, 1.0], LOSS: [3.0] * 12},
            300,
        ),  # with other data
        (
            0,
            {IN_PROCESS: [1.0], STATE: [0.0, 1.0], LOSS: [3.0] * 12},
            300,
        ),  # a fold from the weights of an earlier training
        (RESUMED, {RATE: [9.0] * 12, STATE: [0.0, 1.0]}, 100),  # what precedes was not recorded
        (RESUMED, {RATE: [rate_at(RESUMED) / 3] * 12}, 300),  # a lower rate on purpose
        (RESUMED, {LOSS: [0.7, 0.4, 0.6, 0.9, 0.6]}, 300),
        (RESUMED, {LOSS: [float("nan")] * 12}, 300),
    ],
)
def test_what_resembles_a_resume_is_silent(first: int, changes: Values, steps: int) -> None:
    assert message(resumed(first, changes, place=RESUMED), steps) == ""


def test_an_optimizer_that_never_has_state_has_not_lost_it() -> None:
    plain = {**reference(), STATE.name: [(0, 0.0), (1, 0.0)]}
    assert found(resumed(changes={STATE: [0.0, 0.0]}), reference=plain) == []


def test_later_steps_are_not_compared() -> None:
    late = in_steps([Row(RESUMED + 30, RATE, [9.0])])
    assert found(late, reference={RATE.name: [(0, 0.1), (RESUMED + 20, 0.1)]}) == [RESUMED + 30]
    block = in_steps([Row(RESUMED, LOSS, [0.5]), Row(RESUMED + 30, RATE, [9.0])])
    assert found(block, reference=reference()) == []


@given(seed=st.integers(0, 2**32), first=st.sampled_from([RESUMED, 0]))
def test_a_split_between_steps_changes_nothing(seed: int, first: int) -> None:
    random = Random(seed)
    odd = [0.0, 0.01, 1.0, 65536.0, float("nan"), float("inf")]
    changes = {
        info: [random.choice(odd) for _ in range(random.randint(1, 12))]
        for info in (LOSS, RATE, STATE, SCALE, *WEIGHTS[:2])
        if random.random() < 0.5
    }
    block = resumed(first, changes, place=RESUMED)
    config = RuleConfig(rule="resume_mismatch", params={"reference": reference()})
    whole, split = all_at_once(config, block), follow(config, one_by_one(block))
    assert (split.findings, split.memory.state) == (whole.findings, whole.memory.state)
