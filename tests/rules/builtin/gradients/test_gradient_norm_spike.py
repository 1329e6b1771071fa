from __future__ import annotations

import numpy as np
import pytest

from tests.rules.builtin.losses.losses import noisy
from tests.rules.runs import all_at_once, in_steps, norms
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Finding


def found(*layers: list[float], **params: object) -> list[Finding]:
    rows = [norms(name, values) for name, values in zip("abc", layers, strict=False)]
    return all_at_once(RuleConfig(rule="gradient_norm_spike", params=params), in_steps(*rows)).findings


STEADY = noisy(np.ones(60), 0.1).tolist()


def spiked(height: float) -> list[float]:
    return [*STEADY[:40], height, *STEADY[41:]]


def test_a_spike_of_the_whole_is_found_at_the_layer_that_has_most_of_it() -> None:
    (finding,) = found(STEADY, spiked(30.0))
    assert (finding.step, finding.tensor) == (40, "b.weight:gradient")
    assert finding.value == pytest.approx(30.0, rel=0.01)
    assert finding.threshold == pytest.approx(14.0, rel=0.1)
    assert "100% of its square is b.weight:gradient" in finding.message


def test_what_is_large_for_a_small_layer_alone_is_no_spike_of_the_whole() -> None:
    assert found([100 * value for value in STEADY], spiked(30.0)) == []


@pytest.mark.parametrize(
    "course",
    [
        spiked(5.0),
        [2.0**step for step in range(60)],
        np.exp(np.random.default_rng(1).normal(0, 1.2, 60)).tolist(),
    ],
    ids=["less than growth", "grows steadily", "scatters by factors"],
)
def test_what_is_no_spike_is_ignored(course: list[float]) -> None:
    assert found(course) == []


def test_until_the_window_is_full_nothing_is_reported() -> None:
    assert found([1.0] * 19 + [1e6]) == []
    assert [finding.step for finding in found([1.0] * 20 + [1e6])] == [20]


def test_what_is_not_finite_or_zero_is_omitted() -> None:
    course = [*[1.0] * 10, float("nan"), 0.0, *[1.0] * 9, 1e3, 1.0, 1e3]
    assert [finding.step for finding in found(course)] == [23]
