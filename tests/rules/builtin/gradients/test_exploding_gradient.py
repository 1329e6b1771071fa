from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from tests.rules.runs import all_at_once, in_steps, norms, steps_of
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block
from watchstep_rules.builtin.gradients.exploding_gradient import ExplodingGradientParams
from watchstep_rules.config.rule_config import RuleConfig

A, B = "a.weight:gradient", "b.weight:gradient"
CALM = [1.0, 0.8, 1.2] * 10


def found(block: Block, name: str = A, **params: object) -> list[int]:
    return steps_of(all_at_once(RuleConfig(rule="exploding_gradient", params=params), block), name)


def test_growth_far_beyond_the_past_is_found() -> None:
    assert found(in_steps(norms("a", [*CALM, 130.0, 1e6]))) == [30, 31]


def test_growth_step_by_step_is_found() -> None:
    assert found(in_steps(norms("a", [2.0**step for step in range(60)])))[0] == 16
    assert found(in_steps(norms("a", [1.1**step for step in range(300)]))) == []


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_scale_of_loss_and_targets_does_not_matter(scale: float) -> None:
    assert found(in_steps(norms("a", [scale * norm for norm in CALM]))) == []
    assert found(in_steps(norms("a", [scale * norm for norm in [*CALM, 130.0]]))) == [30]


def test_a_hard_batch_after_convergence_is_fine() -> None:
    decay = [10.0 ** (-step / 8) for step in range(80)]
    assert found(in_steps(norms("a", [*decay, 0.5, 1e-9]))) == []


def test_ordinary_outliers_and_a_restart_of_the_learning_rate_are_fine() -> None:
    assert found(in_steps(norms("a", [*CALM, 50.0, *CALM, 30.0, 30.0, 30.0]))) == []


def test_first_records_may_settle() -> None:
    assert found(in_steps(norms("a", [1e-3, 1.0, 9.0, *CALM]))) == []


def test_an_explosion_within_the_first_records_is_found() -> None:
    assert found(in_steps(norms("a", [1.0, 1e5, 1e22]))) == [1, 2]


def test_a_training_that_diverges_from_its_first_step_is_found_by_its_loss() -> None:
    loss = tensor("loss", "losses", shape=())
    growing = norms("a", [5.0**step for step in range(6)])
    for growth, steps in ((25.0, [3, 4, 5]), (0.5, [])):
        losses = [Row(step, loss, [2.0 * growth**step]) for step in range(6)]
        assert found(in_steps(growing, losses)) == steps
    outcome = all_at_once(
        RuleConfig(rule="exploding_gradient"),
        in_steps(growing, [Row(step, loss, [25.0**step]) for step in range(6)]),
    )
    assert outcome.findings[0].message == (
        "norm of a.weight:gradient is 125, over 100 from the first step, and the loss has risen"
    )


def test_an_explosion_continues_when_it_leaves_the_number_format() -> None:
    outcome = all_at_once(
        RuleConfig(rule="exploding_gradient"), in_steps(norms("a", [1.0, 1e5, math.inf, math.nan, 1.0]))
    )
    assert [(finding.step, finding.value) for finding in outcome.findings] == [
        (1, 1e5),
        (2, math.inf),
        (3, math.inf),
    ]


LOSS = tensor("loss", "losses", shape=())


def with_losses(losses: list[float], *layers: list[Row]) -> Block:
    return in_steps(*layers, [Row(step, LOSS, [loss]) for step, loss in enumerate(losses)])


def updates(name: str, ratios: list[float]) -> list[Row]:
    info = tensor(f"{name}.weight:update", "updates")
    return [Row(step, info, [ratio], probes={"update_ratio": ratio}) for step, ratio in enumerate(ratios)]


def test_nan_after_a_loss_that_rose_is_an_explosion() -> None:
    gradients = [*norms("a", [1.0, 2.0]), *norms("a", [math.nan, math.nan], first=4)]
    assert found(with_losses([1.0, 2.0, 1e6, 1e20, math.nan, math.nan], gradients)) == [4, 5]
    assert found(with_losses([1.0, 2.0, 0.9, 1.1, math.nan, math.nan], gradients)) == []


def test_nan_after_a_step_as_large_as_most_weights_is_an_explosion() -> None:
    gradients = norms("a", [1.0, math.nan, math.nan])
    losses = [2.3, math.nan, math.nan]
    overwritten = [updates("a", [5.0]), updates("b", [1.0]), updates("c", [0.01])]
    assert found(with_losses(losses, gradients, *overwritten)) == [1, 2]
    usual = [updates("a", [5.0]), updates("b", [0.1]), updates("c", [0.01])]
    assert found(with_losses(losses, gradients, *usual)) == []
    assert found(with_losses(losses, gradients, *usual), overwrites=0.1) == [1, 2]


def test_an_explosion_between_two_looks_is_reported_though_the_loss_settles() -> None:
    gradients = [*norms("a", [1.0, 20.0]), *norms("a", [0.01] * 6, first=4)]
    losses = [2.3, 4.0, 1e5, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3]
    assert found(with_losses(losses, gradients, updates("a", [0.8, 3.0]))) == [4, 5, 6]
    assert found(with_losses(losses, gradients, updates("a", [0.8, 0.1]))) == []
    steady = [*norms("a", [1.0, 2.0]), *norms("a", [0.01] * 6, first=4)]
    assert found(with_losses(losses, steady, updates("a", [0.8, 3.0]))) == []
    assert found(with_losses([2.3] * 10, gradients, updates("a", [0.8, 3.0]))) == []


def test_an_explosion_lasts_until_the_loss_returns() -> None:
    dead = norms("a", [1.0, 1e5, 0.0, 0.0, 0.0])
    assert found(with_losses([1.0, 2.0, 1e6, 1e6, 1.5], dead)) == [1, 2, 3]
    assert found(with_losses([1.0, 2.0, 1.0, 1e6, 1.5], dead)) == [1]
    outcome = all_at_once(RuleConfig(rule="exploding_gradient"), with_losses([1.0, 2.0, 1e6], dead[:3]))
    after = outcome.findings[1]
    assert after.message == (
        "gradients had a norm of 1e+05 at step 1, and 1 at the first: they overwrote weights, or the loss has not "
        "recovered. The norm of a.weight:gradient is 0 now"
    )
    assert (after.step, after.value, after.threshold) == (2, 1e5, 1.0)
    overflown = with_losses([1.0, 1e6, 1e6], norms("a", [0.0, math.inf, 0.0]))
    outcome = all_at_once(RuleConfig(rule="exploding_gradient"), overflown)
    assert outcome.findings[1].message == (
        "norm of a.weight:gradient is 0, after one that overflowed its number format"
    )


def test_nan_alone_is_another_rules() -> None:
    assert found(in_steps(norms("a", [*CALM, math.nan, math.inf, math.nan]))) == []
    assert found(in_steps(norms("a", [math.nan] * 30))) == []


def test_a_zero_initialised_layer_that_wakes_up_is_fine() -> None:
    for sleep in (1, 15, 40):
        waking = [*([0.0] * sleep), 1e-9, 1e-6, 1e-3, 0.3, 0.9, 0.9]
        assert found(in_steps(norms("a", waking), norms("b", [1.0] * len(waking)))) == []


def test_a_layer_that_leaves_numeric_noise_is_fine() -> None:
    noise = [1e-9, 2e-9, 1e-9] * 10
    assert found(in_steps(norms("a", [*noise, 0.1, 0.5, 0.9]), norms("b", [1.0] * 33))) == []


def test_a_layer_without_a_gradient_is_compared_with_the_others() -> None:
    asleep = [0.0] * 30
    assert found(in_steps(norms("a", [*asleep, 9000.0]), norms("b", [1.0] * 31))) == []
    assert found(in_steps(norms("a", [*asleep, 11000.0]), norms("b", [1.0] * 31))) == [30]


def test_a_layer_that_joins_later_is_compared_with_the_others() -> None:
    assert found(in_steps(norms("b", [1.0] * 40), norms("a", [100.0, 100.0], first=35))) == []
    assert found(in_steps(norms("b", [1.0] * 40), norms("a", [1e5], first=35))) == [35]


def test_without_any_past_nothing_is_found() -> None:
    assert found(in_steps(norms("a", [1e30]))) == []
    assert found(in_steps(norms("a", [0.0, 0.0, 1e30]))) == []


def test_the_median_follows_a_lasting_change() -> None:
    hits = found(in_steps(norms("a", [*CALM, *([500.0] * 40)])))
    assert hits[0] == 30
    assert 35 <= hits[-1] <= 45


def test_findings_do_not_raise_the_bar_for_those_that_follow() -> None:
    assert found(in_steps(norms("a", [*CALM, 1e6, 200.0, 1.0, 200.0]))) == [30, 31, 33]


def test_norms_beyond_float64_are_gone_past_the_format() -> None:
    assert found(in_steps(norms("a", [1e300, *CALM]))) == []
    assert found(in_steps(norms("a", [*CALM, 1e9, 1e300]))) == [30, 31]


def test_workers_and_modes_have_pasts_of_their_own() -> None:
    info = gradient("a")
    rows = [
        Row(step, info, [100.0 if worker else 1.0], worker=worker) for step in range(30) for worker in (0, 1)
    ]
    assert found(block_of(rows)) == []
    rows += [Row(30, info, [1.0]), Row(31, info, [9000.0], mode="eval"), Row(32, info, [9000.0])]
    outcome = all_at_once(RuleConfig(rule="exploding_gradient"), block_of(rows))
    assert [(finding.step, finding.worker, finding.mode) for finding in outcome.findings] == [
        (32, 0, "train")
    ]


def test_growth_window_and_warmup_are_the_users_to_set() -> None:
    block = in_steps(norms("a", [*CALM, 15.0]))
    assert found(block) == []
    assert found(block, growth=10) == [30]
    assert found(in_steps(norms("a", [1.0, 1.0, 150.0]))) == []
    assert found(in_steps(norms("a", [1.0, 1.0, 150.0])), warmup=2, window=2) == [2]


def test_the_finding_says_value_and_limit() -> None:
    outcome = all_at_once(RuleConfig(rule="exploding_gradient"), in_steps(norms("a", [*([1.0] * 30), 130.0])))
    (finding,) = outcome.findings
    assert (finding.value, finding.threshold) == (130.0, 100.0)
    assert finding.message == f"norm of {A} is 130, over 100 from earlier records"


@pytest.mark.parametrize(
    "params",
    [{"growth": 1}, {"window": 1}, {"window": 1001}, {"warmup": 0}, {"patience": 3}, {"growth": math.inf}],
)
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ExplodingGradientParams.model_validate(params)
