from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rules.builtin.losses.losses import Curve, falling, in_pieces, noisy, run_of
from tests.rules.runs import all_at_once
from watchstep.format.block import Block
from watchstep_rules.builtin.losses.lost_progress import LostProgressParams
from watchstep_rules.config.rule_config import RuleConfig

LN10 = math.log(10)
TEN = [50] * 10
LEARNT = noisy(falling(2.4, 0.2, 200, 30.0), 0.1)


def then(*rest: Curve) -> Curve:
    return np.concatenate([LEARNT, *rest])


def found(block: Block, **params: object) -> list[int]:
    config = RuleConfig.model_validate({"rule": "lost_progress", "params": params, "for": {"steps": 3}})
    return [change.step for change in all_at_once(config, block).transitions if change.phase == "firing"]


LOST = {
    "inputs become constant": run_of(then(noisy(np.full(150, LN10), 0.03))),
    "from a high start to what a guess is worth": run_of(
        np.concatenate([falling(30.0, 0.2, 200, 10), noisy(np.full(150, LN10), 0.03)]), labels=TEN
    ),
    "labels are shuffled": run_of(then(noisy(falling(6.0, LN10, 200, 15), 0.05))),
    "it rises step by step": run_of(then(noisy(np.linspace(0.2, 5.0, 150), 0.05))),
}
PROGRESSING = {
    "converges": run_of(LEARNT),
    "another task, learnt as fast": run_of(then(noisy(falling(2.4, 0.2, 200, 30), 0.1))),
    "half of it is back": run_of(then(noisy(np.full(150, 1.2), 0.05))),
    "a spike that comes back": run_of(then(np.full(15, 3.0), LEARNT[-50:])),
    "had never fallen by half": run_of(np.concatenate([falling(2.4, 1.5, 200, 30), np.full(150, 2.4)])),
    "a policy's gain": run_of(noisy(np.sin(np.arange(500) / 60), 0.3)),
    "resumed": run_of(then(noisy(np.full(150, LN10), 0.03)), first_step=3000),
    "began at nothing": run_of(np.concatenate([np.full(10, 1e-9), np.zeros(40), noisy(np.ones(200), 0.1)])),
}


@pytest.mark.parametrize("name", LOST)
def test_a_loss_that_is_back_and_stays_is_found(name: str) -> None:
    assert 200 < found(LOST[name])[0] < 290


@pytest.mark.parametrize("name", PROGRESSING)
def test_a_loss_that_falls_again_or_never_had_is_ignored(name: str) -> None:
    assert found(PROGRESSING[name]) == []


def test_the_message_states_what_was_lost() -> None:
    losses = np.concatenate([np.full(10, 2.0), np.full(40, 0.5), np.full(40, 2.0)])
    outcome = all_at_once(RuleConfig(rule="lost_progress"), run_of(losses))
    finding = outcome.findings[0]
    assert finding.message == "loss is 2 on average, it began at 2 and had come down to 0.5"
    assert finding.step == 83
    assert finding.threshold == pytest.approx(1.6)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(LOST) + sorted(PROGRESSING)),
    cuts=st.lists(st.integers(1, 199), max_size=12, unique=True),
)
def test_a_run_in_pieces_is_judged_as_the_whole(name: str, cuts: list[int]) -> None:
    block, config = {**LOST, **PROGRESSING}[name], RuleConfig(rule="lost_progress")
    first = int(block.step.min())
    assert in_pieces(config, block, [first + cut for cut in cuts]) == in_pieces(config, block, [])


@pytest.mark.parametrize("params", [{"window": 1}, {"fallen": 1}, {"back": 0}, {"lasting": 0}, {"x": 1}])
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LostProgressParams.model_validate(params)
