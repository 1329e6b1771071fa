from __future__ import annotations

import numpy as np
import pytest

from tests.rules.losses import Curve, falling, noisy, run_of
from tests.rules.runs import all_at_once
from watchstep_rules.config import RuleConfig

COURSE = noisy(falling(2.0, 0.4, 200, 30.0), 0.05)


def with_spike(steps: int, height: float = 3.0, curve: Curve = COURSE) -> Curve:
    spiked: Curve = curve.copy()
    spiked[150 : 150 + steps] += height
    return spiked


def found(losses: Curve, **params: object) -> list[int]:
    said = all_at_once(RuleConfig(rule="loss_spike", params=params), run_of(losses))
    return [finding.step for finding in said.findings]


def test_a_jump_that_lasts_is_found_and_one_that_comes_back_is_not() -> None:
    assert found(with_spike(50))[0] == 154
    assert found(with_spike(4)) == []
    assert found(with_spike(1), lasting=1) == [150]


@pytest.mark.parametrize(
    "losses",
    [
        COURSE,
        noisy(np.full(300, 1.0), 0.4),
        with_spike(50, height=0.3),
        falling(1e3, 1e-6, 300, 10.0),
        with_spike(50, height=0.01, curve=falling(2.0, 1e-3, 200, 10.0)),
        falling(2.0, 8.0, 300, 100.0),
    ],
    ids=["falls", "noisy", "less than twice", "steep", "close to zero", "rises slowly"],
)
def test_what_is_no_jump_is_left_alone(losses: Curve) -> None:
    assert found(losses) == []


def test_the_message_holds_the_jump_against_the_level() -> None:
    losses = np.concatenate([np.linspace(0.9, 1.1, 50), np.full(5, 4.0)])
    said = all_at_once(RuleConfig(rule="loss_spike"), run_of(losses))
    (finding,) = said.findings
    assert (finding.step, finding.value) == (54, 4.0)
    assert finding.threshold == pytest.approx(2.0, abs=0.2)
    assert finding.message == ("loss is 4, the lowest of the last 5 is 4; the median of the 50 before is 1")


def test_a_loss_below_zero_has_a_level_as_well() -> None:
    losses = np.concatenate([noisy(np.full(100, -5.0), 0.01), np.full(20, 3.0)])
    assert found(losses)[0] == 104
