from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.builtin.losses.losses import Curve, falling, in_pieces, noisy, run_of
from tests.rules.runs import all_at_once
from watchstep_rules.config.rule_config import RuleConfig

COURSE = noisy(falling(2.0, 0.4, 200, 30.0), 0.05)


def then(curve: Curve, rest: Curve) -> Curve:
    """A curve of 150 losses, and what follows."""
    return np.concatenate([curve[:150], rest])


def with_spike(steps: int, height: float = 3.0, curve: Curve = COURSE) -> Curve:
    spiked: Curve = curve.copy()
    spiked[150 : 150 + steps] += height
    return spiked


def found(losses: Curve, **params: object) -> list[int]:
    outcome = all_at_once(RuleConfig(rule="loss_spike", params=params), run_of(losses))
    return [finding.step for finding in outcome.findings]


def test_a_jump_that_lasts_is_found_and_one_that_returns_is_not() -> None:
    assert found(with_spike(50))[0] == 159
    assert found(with_spike(9)) == []
    assert found(with_spike(1), lasting=1) == [150]
    assert found(with_spike(50, height=0.8)) == []
    assert found(with_spike(50, height=0.8), of_first=0.25, lasting=5)[0] == 154


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


@pytest.mark.parametrize("name", SPIKES)
def test_a_disaster_is_found_within_some_losses(name: str) -> None:
    assert found(SPIKES[name])[0] <= 170


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
    assert 150 < found(EARLY[name])[0] <= 162


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


@pytest.mark.parametrize("name", CALM)
def test_what_is_no_jump_is_ignored(name: str) -> None:
    assert found(CALM[name]) == []


def test_the_message_compares_the_jump_with_the_level() -> None:
    losses = np.concatenate([np.linspace(0.9, 1.1, 50), np.full(10, 4.0)])
    outcome = all_at_once(RuleConfig(rule="loss_spike"), run_of(losses))
    (finding,) = outcome.findings
    assert (finding.step, finding.value) == (59, 4.0)
    assert finding.threshold == pytest.approx(2.0, abs=0.2)
    assert finding.message == ("loss is 4, the lowest of the last 10 is 4; the median of the 50 before is 1")


def test_a_loss_below_zero_has_a_level_as_well() -> None:
    losses = np.concatenate([noisy(np.full(100, -5.0), 0.01), np.full(20, 3.0)])
    assert found(losses)[0] == 109


@pytest.mark.parametrize("cut", range(155, 162))
def test_the_newest_loss_may_be_the_one_that_dips_wherever_the_run_is_cut(cut: int) -> None:
    course = np.concatenate([np.full(50, 2.0), np.full(100, 0.002), np.full(9, 2.0), [0.97, 0.002]])
    block, config = run_of(course), RuleConfig(rule="loss_spike")
    assert in_pieces(config, block, [cut]) == in_pieces(config, block, [])
    assert found(course) == [159]


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(SPIKES) + sorted(CALM)),
    cuts=st.lists(st.integers(1, 178), max_size=12, unique=True),
)
def test_a_run_in_pieces_is_judged_as_the_whole(name: str, cuts: list[int]) -> None:
    block, config = run_of({**SPIKES, **CALM}[name]), RuleConfig(rule="loss_spike")
    assert in_pieces(config, block, cuts) == in_pieces(config, block, [])
