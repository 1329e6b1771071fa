"""Rules over gradients of layers, by made series."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from tests.rules.builtin.losses import noisy
from tests.rules.recording import evaluate_training
from tests.rules.runs import all_at_once, first_message, found_by, in_steps, norms, steps_of
from tests.sdk.format.blocks import Row, Values, block_of, gradient, tensor
from tests.sdk.training import batches, small_model
from watchstep import CaptureConfig, Hook
from watchstep.capture.steps.metric_names import STOPPED
from watchstep.capture.steps.record import report_info
from watchstep.format.block import Block
from watchstep.format.tensors import Placement, TensorInfo
from watchstep.stopping import FROM_ANOTHER_RANK
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.engine.alert import Phase
from watchstep_rules.engine.incident import explain
from watchstep_rules.rule import Finding

# exploding_gradient


A = "a.weight:gradient"
CALM = [1.0, 0.8, 1.2] * 10


exploding = found_by("exploding_gradient", A)


ALONE: dict[str, tuple[list[float], list[int]]] = {
    "grows far beyond its past": ([*CALM, 130.0, 1e6], [30, 31]),
    "grows by a tenth at each step": ([1.1**step for step in range(300)], []),
    **{f"constant at {scale}": ([scale * norm for norm in CALM], []) for scale in (1e-6, 1e6)},
    **{f"grows from {scale}": ([scale * norm for norm in [*CALM, 130.0]], [30]) for scale in (1e-6, 1e6)},
    "a hard batch after convergence": ([*(10.0 ** (-step / 8) for step in range(80)), 0.5, 1e-9], []),
    "outliers and a restart of the learning rate": ([*CALM, 50.0, *CALM, 30.0, 30.0, 30.0], []),
    "first records that settle": ([1e-3, 1.0, 9.0, *CALM], []),
    "explodes within its first records": ([1.0, 1e5, 1e22], [1, 2]),
    "NaN alone, which is another rule's": ([*CALM, math.nan, math.inf, math.nan], []),
    "nothing but NaN": ([math.nan] * 30, []),
    "without a past": ([1e30], []),
    "after zeros alone": ([0.0, 0.0, 1e30], []),
    "findings do not raise the bar": ([*CALM, 1e6, 200.0, 1.0, 200.0], [30, 31, 33]),
    "begins beyond float64": ([1e300, *CALM], []),
    "goes beyond float64": ([*CALM, 1e9, 1e300], [30, 31]),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_layer_that_explodes_is_found_by_its_own_past(name: str) -> None:
    sizes, steps = ALONE[name]
    assert exploding(in_steps(norms("a", sizes))) == steps


ASLEEP = [0.0] * 30
BESIDE: dict[str, tuple[list[Row], list[int]]] = {
    **{
        f"begins at zero, and wakes up after {sleep}": (
            norms("a", [*[0.0] * sleep, 1e-9, 1e-6, 1e-3, 0.3, 0.9, 0.9]),
            [],
        )
        for sleep in (1, 15, 40)
    },
    "leaves numeric noise": (norms("a", [*[1e-9, 2e-9, 1e-9] * 10, 0.1, 0.5, 0.9]), []),
    "had no gradient, and has a large one": (norms("a", [*ASLEEP, 9000.0]), []),
    "had no gradient, and explodes": (norms("a", [*ASLEEP, 11000.0]), [30]),
    "joins later": (norms("a", [100.0, 100.0], first=35), []),
    "joins later, and explodes": (norms("a", [1e5], first=35), [35]),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_layer_without_a_past_is_compared_with_the_others(name: str) -> None:
    rows, steps = BESIDE[name]
    others = norms("b", [1.0] * (1 + max(40, rows[-1].step)))
    assert exploding(in_steps(rows, others)) == steps


def test_growth_step_by_step_is_found() -> None:
    assert exploding(in_steps(norms("a", [2.0**step for step in range(60)])))[0] == 16


def test_a_training_that_diverges_from_its_first_step_is_found_by_its_loss() -> None:
    growing = norms("a", [5.0**step for step in range(6)])
    rises = with_losses([2.0 * 25.0**step for step in range(6)], growing)
    assert exploding(rises) == [3, 4, 5]
    assert exploding(with_losses([2.0 * 0.5**step for step in range(6)], growing)) == []
    assert first_message("exploding_gradient", rises) == (
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


def with_losses(values: list[float], *layers: list[Row]) -> Block:
    return in_steps(*layers, losses(values))


def updates(name: str, ratios: list[float]) -> list[Row]:
    info = tensor(f"{name}.weight:update", "updates")
    return [Row(step, info, [ratio], probes={"update_ratio": ratio}) for step, ratio in enumerate(ratios)]


def test_nan_after_a_loss_that_rose_is_an_explosion() -> None:
    gradients = [*norms("a", [1.0, 2.0]), *norms("a", [math.nan, math.nan], first=4)]
    assert exploding(with_losses([1.0, 2.0, 1e6, 1e20, math.nan, math.nan], gradients)) == [4, 5]
    assert exploding(with_losses([1.0, 2.0, 0.9, 1.1, math.nan, math.nan], gradients)) == []


def test_nan_after_a_step_as_large_as_most_weights_is_an_explosion() -> None:
    gradients = norms("a", [1.0, math.nan, math.nan])
    losses = [2.3, math.nan, math.nan]
    overwritten = [updates("a", [5.0]), updates("b", [1.0]), updates("c", [0.01])]
    assert exploding(with_losses(losses, gradients, *overwritten)) == [1, 2]
    usual = [updates("a", [5.0]), updates("b", [0.1]), updates("c", [0.01])]
    assert exploding(with_losses(losses, gradients, *usual)) == []
    assert exploding(with_losses(losses, gradients, *usual), overwrites=0.1) == [1, 2]


def test_an_explosion_between_two_looks_is_reported_though_the_loss_settles() -> None:
    gradients = [*norms("a", [1.0, 20.0]), *norms("a", [0.01] * 6, first=4)]
    losses = [2.3, 4.0, 1e5, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3]
    assert exploding(with_losses(losses, gradients, updates("a", [0.8, 3.0]))) == [4, 5, 6]
    assert exploding(with_losses(losses, gradients, updates("a", [0.8, 0.1]))) == []
    steady = [*norms("a", [1.0, 2.0]), *norms("a", [0.01] * 6, first=4)]
    assert exploding(with_losses(losses, steady, updates("a", [0.8, 3.0]))) == []
    assert exploding(with_losses([2.3] * 10, gradients, updates("a", [0.8, 3.0]))) == []


LOADED = tensor("weights:loaded", "metrics", role="metric", shape=())


def test_an_explosion_has_no_aftermath_once_the_program_has_loaded_weights() -> None:
    gradients = [*norms("a", [1.0, 20.0]), *norms("a", [0.01] * 6, first=4)]
    layers = (gradients, updates("a", [0.8, 3.0]))
    losses = [2.3, 4.0, 1e5, *[2.3] * 7]
    assert exploding(with_losses(losses, *layers)) == [4, 5, 6]
    assert exploding(with_losses(losses, *layers, [Row(3, LOADED, [1.0])])) == []


def test_an_alert_that_resolves_after_weights_were_loaded_says_so() -> None:
    config = RuleConfig(rule="exploding_gradient", hold=MinimumDuration(steps=2))
    layers = norms("a", [1.0, 1e5, 1e5, 1.0, 1.0, 1.0])
    losses = [2.3, 1e6, 1e6, 2.3, 2.3, 2.3]
    resolved = all_at_once(config, with_losses(losses, layers, [Row(2, LOADED, [1.0])])).transitions[-1]
    assert (resolved.phase, resolved.step, resolved.loaded_at) == (Phase.RESOLVED, 4, 2)
    assert explain(config, resolved).title == (
        "exploding_gradient (warning) resolved at step 4: the program loaded weights after step 2"
    )
    assert all_at_once(config, with_losses(losses, layers)).transitions[-1].loaded_at is None


def test_an_explosion_lasts_until_the_loss_returns() -> None:
    dead = norms("a", [1.0, 1e5, 0.0, 0.0, 0.0])
    assert exploding(with_losses([1.0, 2.0, 1e6, 1e6, 1.5], dead)) == [1, 2, 3]
    assert exploding(with_losses([1.0, 2.0, 1.0, 1e6, 1.5], dead)) == [1]
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


def test_the_median_follows_a_lasting_change() -> None:
    hits = exploding(in_steps(norms("a", [*CALM, *([500.0] * 40)])))
    assert hits[0] == 30
    assert 35 <= hits[-1] <= 45


def test_workers_and_modes_have_pasts_of_their_own() -> None:
    info = gradient("a")
    rows = [
        Row(step, info, [100.0 if worker else 1.0], worker=worker) for step in range(30) for worker in (0, 1)
    ]
    assert exploding(block_of(rows)) == []
    rows += [Row(30, info, [1.0]), Row(31, info, [9000.0], mode="eval"), Row(32, info, [9000.0])]
    outcome = all_at_once(RuleConfig(rule="exploding_gradient"), block_of(rows))
    assert [(finding.step, finding.worker, finding.mode) for finding in outcome.findings] == [
        (32, 0, "train")
    ]


def test_growth_window_and_warmup_are_the_users_to_set() -> None:
    block = in_steps(norms("a", [*CALM, 15.0]))
    assert exploding(block) == []
    assert exploding(block, growth=10) == [30]
    assert exploding(in_steps(norms("a", [1.0, 1.0, 150.0]))) == []
    assert exploding(in_steps(norms("a", [1.0, 1.0, 150.0])), warmup=2, window=2) == [2]


def test_the_finding_says_value_and_limit() -> None:
    outcome = all_at_once(RuleConfig(rule="exploding_gradient"), in_steps(norms("a", [*([1.0] * 30), 130.0])))
    (finding,) = outcome.findings
    assert (finding.value, finding.threshold) == (130.0, 100.0)
    assert finding.message == f"norm of {A} is 130, over 100 from earlier records"


# vanishing_gradient


FIRST, LAST = "first.weight:gradient", "last.weight:gradient"


def vanishing(block: Block, name: str = FIRST, **params: object) -> list[int]:
    return found_by("vanishing_gradient", name)(block, **params)


DECAY = [10.0**-step for step in range(14)]
PAIRS: dict[str, tuple[list[float], list[float], list[int]]] = {
    "starves while another learns": ([2e-9, 1e-9, 1e-9], [1e-2] * 3, [0, 1, 2]),
    "is all zero": ([0.0] * 3, [1e-2] * 3, [0, 1, 2]),
    "has converged": (DECAY, DECAY, []),
    "has converged at once": ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], []),
    "begins late, and is fine from then on": ([0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0]),
    "wakes up": ([1e-12 * 1.3**step for step in range(20)], [1.0] * 20, [0, 1, 2]),  # not yet twice its first
    "does not wake up by larger batches": ([2e-9, 3e-9, 1e-9, 3.9e-9, 2e-9], [1.0] * 5, [0, 1, 2, 3, 4]),
    "is small beside small ones": ([2e-9, 1e-9], [1e-7, 1e-7], []),
    "is not finite": ([math.nan] * 3, [1.0] * 3, []),
    "is near the limit, which counts once the first steps are over": (
        [9e-8] * 60,
        [1e-2] * 60,
        [*range(50, 60)],
    ),
    "was near the limit": ([9e-8] * 20 + [3e-7] * 40, [1e-2] * 60, []),
    "is far below the limit": ([9e-9] * 3, [1e-2] * 3, [0, 1, 2]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_layer_that_starves_while_another_learns_is_found(name: str) -> None:
    first, last, steps = PAIRS[name]
    assert vanishing(in_steps(norms("first", first), norms("last", last))) == steps


def test_a_layer_that_learns_is_not_reported() -> None:
    assert vanishing(in_steps(norms("first", [2e-9, 1e-9, 1e-9]), norms("last", [1e-2] * 3)), LAST) == []


def test_a_recurrent_weight_is_fine_while_the_state_is_empty() -> None:
    def cell(state: float, given: float) -> Block:
        weights = {"cell.weight_hh:gradient": state, "cell.weight_ih:gradient": given, LAST: 1e-2}
        infos = {name: tensor(name, "gradients") for name in weights}
        return block_of(
            [Row(step, infos[name], [value] * 4) for step in range(60) for name, value in weights.items()]
        )

    assert vanishing(cell(0.0, 1e-2), "cell.weight_hh:gradient") == []
    assert vanishing(cell(1e-12, 1e-2), "cell.weight_hh:gradient")
    assert vanishing(cell(0.0, 0.0), "cell.weight_hh:gradient")


def losses(values: list[float]) -> list[Row]:
    return [Row(step, LOSS, [value]) for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([0.697] * 5 + [0.010] * 15, range(5, 7)),
        ([0.697] * 20, range(5, 20)),
        ([1e-7] * 20, range(0)),
    ],
    ids=["a classifier that is sure", "one that is not", "a loss that is nothing"],
)
def test_where_a_loss_has_converged_a_layer_may_starve(values: list[float], steps: range) -> None:
    first, last = norms("first", [1e-3] * 5 + [1e-9] * 15), norms("last", [1e-2] * 20)
    if not steps:
        first = norms("first", [1e-12] * 20)
    assert vanishing(in_steps(first, last, losses(values))) == list(steps)


def test_a_training_that_never_began_is_found_in_every_layer() -> None:
    block = in_steps(norms("first", [0.0] * 3), norms("last", [0.0, 1e-11, 0.0]))
    outcome = all_at_once(RuleConfig(rule="vanishing_gradient"), block)
    assert steps_of(outcome, FIRST) == [0, 1, 2]
    assert steps_of(outcome, LAST) == [0, 2]
    assert "no layer has learned yet" in outcome.findings[0].message


def test_a_training_without_anything_to_learn_yet_is_fine() -> None:
    assert vanishing(with_losses([0.0] * 4, norms("first", [0.0] * 4))) == []
    assert vanishing(with_losses([0.7] * 4, norms("first", [0.0] * 4))) == [0, 1, 2, 3]


def test_a_zero_initialised_layer_is_fine_with_the_default_hold() -> None:
    block = in_steps(
        norms("first", [0.0, *(1e-8 * 2**step for step in range(12))]), norms("last", [1.0] * 13)
    )
    outcome = all_at_once(
        RuleConfig.model_validate({"rule": "vanishing_gradient", "for": {"steps": 10}}), block
    )
    assert [transition.phase.value for transition in outcome.transitions] == ["pending", "inactive"]


def test_vectors_are_omitted_unless_they_are_requested() -> None:
    block = in_steps(norms("first", [0.0] * 2, shape=(8,)), norms("last", [1.0] * 2))
    assert vanishing(block) == []
    assert vanishing(block, min_dimensions=1) == [0, 1]
    assert vanishing(in_steps(norms("first", [0.0] * 2, shape=(8,)))) == []


def test_rows_that_a_batch_does_not_touch_do_not_make_an_embedding_small() -> None:
    embedding = gradient("first", shape=(50_000, 8))
    last = gradient("last")
    rows = [[Row(step, embedding, [*([0.0] * 999), 5e-5]), Row(step, last, [1e-2])] for step in range(3)]
    assert vanishing(block_of([row for step in rows for row in step]), relative=1e-3) == []


@pytest.mark.parametrize("rule", ["vanishing_gradient", "sagemaker_vanishing_gradient", "all_zero"])
def test_a_gradient_that_blew_up_has_not_vanished(rule: str) -> None:
    block = in_steps(norms("first", [1.0, float("nan"), float("inf")]), norms("last", [1.0] * 3))
    assert all_at_once(RuleConfig(rule=rule), block).findings == []


def test_layers_of_other_workers_count_as_learning() -> None:
    stages = [
        Row(step, gradient(name), [value], worker=worker)
        for step in range(2)
        for worker, (name, value) in enumerate([("first", 0.0), ("last", 1.0)])
    ]
    assert vanishing(block_of(stages)) == [0, 1]


def test_shards_are_judged_as_one_layer() -> None:
    rows = [
        row
        for step in range(2)
        for row in (
            Row(step, gradient("first"), [0.0], worker=0, place=Placement(0, 2)),
            Row(step, gradient("last"), [1.0], worker=0),
            Row(step, gradient("first"), [1.0], worker=1, place=Placement(1, 2)),
        )
    ]
    assert vanishing(block_of(rows)) == []


def test_modes_are_judged_apart() -> None:
    rows = [Row(0, gradient("last"), [1.0]), Row(1, gradient("first"), [0.0], mode="eval")]
    outcome = all_at_once(RuleConfig(rule="vanishing_gradient"), block_of(rows))
    assert [finding.mode for finding in outcome.findings] == ["eval"]


def test_thresholds_are_the_users_to_set() -> None:
    block = in_steps(norms("first", [2e-5, 1e-5]), norms("last", [1.0, 1.0]))
    assert vanishing(block) == []
    assert vanishing(block, threshold=1e-4, settling=0) == [0, 1]
    assert vanishing(block, threshold=1e-4, relative=1e-6) == []


def test_the_finding_says_value_and_threshold() -> None:
    outcome = all_at_once(
        RuleConfig(rule="vanishing_gradient"),
        in_steps(norms("first", [2e-10, 1e-10]), norms("last", [1e-5, 1e-5])),
    )
    finding = outcome.findings[-1]
    assert finding.value == 1e-10
    assert finding.threshold == pytest.approx(1e-9)
    assert finding.message == (
        "mean |gradient| of first.weight:gradient is 1e-10, below 1e-09, while other layers learn"
    )


# gradient_norm_spike


def spikes(*layers: list[float], **params: object) -> list[Finding]:
    rows = [norms(name, values) for name, values in zip("abc", layers, strict=False)]
    return all_at_once(RuleConfig(rule="gradient_norm_spike", params=params), in_steps(*rows)).findings


STEADY = noisy(np.ones(60), 0.1).tolist()


def spiked(height: float) -> list[float]:
    return [*STEADY[:40], height, *STEADY[41:]]


def test_a_spike_of_the_whole_is_found_at_the_layer_that_has_most_of_it() -> None:
    (finding,) = spikes(STEADY, spiked(30.0))
    assert (finding.step, finding.tensor) == (40, "b.weight:gradient")
    assert finding.value == pytest.approx(30.0, rel=0.01)
    assert finding.threshold == pytest.approx(14.0, rel=0.1)
    assert "100% of its square is b.weight:gradient" in finding.message


def test_what_is_large_for_a_small_layer_alone_is_no_spike_of_the_whole() -> None:
    assert spikes([100 * value for value in STEADY], spiked(30.0)) == []


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
    assert spikes(course) == []


def test_until_the_window_is_full_nothing_is_reported() -> None:
    assert spikes([1.0] * 19 + [1e6]) == []
    assert [finding.step for finding in spikes([1.0] * 20 + [1e6])] == [20]


def test_what_is_not_finite_or_zero_is_omitted() -> None:
    course = [*[1.0] * 10, float("nan"), 0.0, *[1.0] * 9, 1e3, 1.0, 1e3]
    assert [finding.step for finding in spikes(course)] == [23]


# number_format_headroom


GRADIENT, OUTPUT = gradient("a"), tensor("a:output", "activations")
SCALE = tensor("gradient_scaler:scale", "metrics", shape=())


def out_of_format(rows: list[Row], name: str = GRADIENT.name, **params: Any) -> list[int]:
    return found_by("number_format_headroom", name)(block_of(rows), **params)


@pytest.mark.parametrize(
    ("number_format", "lost", "representable"),
    [("fp16", 2.0**-25, 2.0**-24), ("bf16", 2.0**-134, 2.0**-133), ("fp8_e4m3", 2.0**-10, 2.0**-9)],
)
def test_what_is_below_the_smallest_number_is_lost(
    number_format: str, lost: float, representable: float
) -> None:
    rows = [Row(0, GRADIENT, [representable] * 20), Row(1, GRADIENT, [*[representable] * 18, lost, lost])]
    assert out_of_format(rows, number_format=number_format) == [1]
    assert out_of_format(rows, number_format=number_format, max_underflow=0.1) == []


@pytest.mark.parametrize(("values", "steps"), [([65000.0, 1.0], []), ([66000.0, 1.0], [0])])
def test_one_number_above_the_largest_is_found(values: Values, steps: list[int]) -> None:
    assert out_of_format([Row(0, OUTPUT, values)], OUTPUT.name) == steps


def test_zeros_are_not_lost() -> None:
    assert out_of_format([Row(0, GRADIENT, [0.0] * 9 + [1.0]), Row(1, GRADIENT, [0.0] * 9)]) == []


def test_gradients_are_judged_under_the_scale_that_the_scaler_records() -> None:
    small = [2.0**-30] * 4
    rows = [
        Row(0, GRADIENT, small),
        Row(1, SCALE, [1024.0]),
        Row(1, GRADIENT, small),
        Row(2, GRADIENT, small),
        Row(3, SCALE, [2.0]),
        Row(3, GRADIENT, small),
    ]
    assert out_of_format(rows) == [0, 3]
    assert out_of_format(rows, gradient_scale=64.0) == []
    assert out_of_format(rows, gradient_scale=1.0) == [0, 1, 2, 3]


def test_a_scale_is_no_gradients_and_does_not_move_outputs() -> None:
    rows: list[Row] = [Row(0, SCALE, [2.0**20]), Row(0, OUTPUT, [1.0])]
    for info in (SCALE, OUTPUT):
        assert out_of_format(rows, info.name) == []


def test_the_message_states_the_share_that_becomes_zero() -> None:
    assert first_message(
        "number_format_headroom", block_of([Row(0, GRADIENT, [2.0**-30, 1.0])]), gradient_scale=2.0
    ) == ("50.0% of the numbers of a.weight:gradient, times 2, would become zero in fp16, 5.0% tolerated")


def test_infos_of_other_roles_are_out_of_scope() -> None:
    info: TensorInfo = tensor("loss", "losses", shape=())
    assert out_of_format([Row(0, info, [1e-30])], "loss") == []


# missing_zero_grad


STALE_GRADIENTS = tensor("gradients:stale", "metrics", shape=())


def trained(hook: Hook, *, clears: bool, micro_batches: int = 1) -> None:
    model = small_model()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    hook.watch(model, optimizer)
    for x, y in batches(15):
        if clears:
            optimizer.zero_grad(set_to_none=False)
        for _ in range(micro_batches):
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_a_loop_without_zero_grad_and_its_twin(tmp_path: Path) -> None:
    found = evaluate_training(
        lambda hook: trained(hook, clears=False), "missing_zero_grad", tmp_path / "faulty"
    )
    assert [finding.step for finding in found] == list(range(6, 15))
    assert found[0].message == (
        "gradients:stale: at 6 steps in a row the gradients included those of the previous step; "
        "they were not cleared"
    )
    for passes in (1, 4):
        twin = evaluate_training(
            lambda hook, passes=passes: trained(hook, clears=True, micro_batches=passes),  # type: ignore[misc]  # mypy does not infer it
            "missing_zero_grad",
            tmp_path / f"{passes}",
        )
        assert twin == []


def stale_steps(values: list[float]) -> list[int]:
    rows = [Row(step, STALE_GRADIENTS, [value]) for step, value in enumerate(values)]
    return found_by("missing_zero_grad")(in_steps(rows), records=3)


def test_a_step_that_was_cleared_begins_anew() -> None:
    assert stale_steps([1, 1, 1, 1, 0, 1, 1, 1]) == [2, 3, 7]
    assert stale_steps([1, 1, 0, 1, 1, 0]) == []


# scaler_skips


SKIPPED = tensor("gradient_scaler:skipped", "metrics", shape=())
OTHER = tensor("accuracy", "metrics", shape=())


def too_many_skips(steps: Iterable[int], **params: int) -> list[int]:
    rows = [row for step in steps for row in (Row(step, OTHER, [1.0]), Row(step, SKIPPED, [1.0]))]
    return found_by("scaler_skips")(block_of(rows), **params)


def test_the_start_of_a_scaler_is_fine_and_one_that_does_not_end_is_found() -> None:
    assert too_many_skips(range(17)) == []
    assert too_many_skips(range(25)) == [19, 20, 21, 22, 23, 24]


def test_one_in_two_thousand_is_fine() -> None:
    assert too_many_skips(range(0, 100_000, 2000)) == []


def test_every_other_step_is_too_many() -> None:
    assert too_many_skips(range(0, 80, 2)) == list(range(38, 80, 2))
    assert too_many_skips(range(0, 400, 8)) == []


def test_the_message_states_how_many_of_how_many() -> None:
    rows = [Row(step, SKIPPED, [1.0]) for step in range(0, 9, 2)]
    outcome = all_at_once(RuleConfig(rule="scaler_skips", params={"skips": 5}), block_of(rows))
    assert outcome.findings[0].message.startswith(
        "gradient_scaler:skipped: 5 of the last 9 steps were skipped"
    )


@pytest.mark.parametrize("rule", ["missing_zero_grad", "recompute_mismatch", "scaler_skips"])
def test_other_metrics_are_ignored(rule: str) -> None:
    assert found_by(rule)(in_steps([Row(step, OTHER, [1.0]) for step in range(50)])) == []


# recompute_mismatch


class Checkpointed(nn.Module):
    """A block with dropout that is computed again in the backward pass, if it is checkpointed."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.block = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 16))
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        keeps = "other masks" not in self.form
        hidden = x.requires_grad_()
        if "autocast" in self.form:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = checkpoint(self._in_float32_again, hidden, use_reentrant=True)
        elif self.form != "plain":
            hidden = checkpoint(
                self.block, hidden, use_reentrant=self.form.startswith("reentrant"), preserve_rng_state=keeps
            )
        else:
            hidden = self.block(hidden)
        output: Tensor = self.head(hidden.float())
        return output

    def _in_float32_again(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not torch.is_grad_enabled()):
            output: Tensor = self.block(hidden)
        return output


def trained_by_checkpoints(hook: Hook, form: str) -> None:
    model = Checkpointed(form)
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    hook.watch(model, optimizer)
    for x, y in batches(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("form", "modules"),
    [
        ("plain", set()),
        ("reentrant", set()),
        ("other", set()),
        ("reentrant, other masks", {"block.1", "block.2"}),
        ("other, other masks", {"block.1"}),  # the last output is not needed again
        ("autocast", {"block.0", "block.1", "block.2"}),
    ],
)
def test_outputs_that_are_computed_again_are_compared(form: str, modules: set[str], tmp_path: Path) -> None:
    found = evaluate_training(
        lambda hook: trained_by_checkpoints(hook, form), "recompute_mismatch", tmp_path / "run"
    )
    assert {finding.module for finding in found} == modules
    if modules:
        # The first step shows that outputs are computed again; those of the next are compared.
        assert min(finding.step for finding in found) == 2
        assert found[0].message.startswith(f"{found[0].module}: the output that checkpointing computed again")


def trained_by_pairs(
    hook: Hook, model: Checkpointed, backward: Callable[[nn.Module, Tensor, Tensor], None]
) -> None:
    """Train with two inputs in each step."""
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    hook.watch(model, optimizer)
    for x, _ in batches(8):
        optimizer.zero_grad()
        backward(model, x, x + 1)
        optimizer.step()


def together(model: nn.Module, x: Tensor, other: Tensor) -> None:
    (model(x) - model(other)).square().mean().backward()


def both_before(model: nn.Module, x: Tensor, other: Tensor) -> None:
    first, second = model(x).square().mean(), model(other).square().mean()
    second.backward()
    first.backward()


def one_by_one(model: nn.Module, x: Tensor, other: Tensor) -> None:
    for each in (x, other):
        model(each).square().mean().backward()


def in_another_mode(model: nn.Module, x: Tensor, other: Tensor) -> None:
    (model(x) - model.eval()(other)).square().mean().backward()
    model.train()


BY_BUDGET = CaptureConfig(overhead_budget=0.5, allowance_seconds=10.0)
"""Measures the first pass of each step."""


@pytest.mark.parametrize("form", ["reentrant", "other"])
@pytest.mark.parametrize("backward", [together, both_before, in_another_mode])
def test_outputs_of_different_passes_are_not_compared(
    backward: Callable[[nn.Module, Tensor, Tensor], None], form: str, tmp_path: Path
) -> None:
    def train(hook: Hook) -> None:
        model = Checkpointed(form)
        model.block[1] = nn.Identity()  # what depends on the mode
        trained_by_pairs(hook, model, backward)

    assert evaluate_training(train, "recompute_mismatch", tmp_path / "run", config=BY_BUDGET) == []


def test_outputs_of_micro_batches_are_compared(tmp_path: Path) -> None:
    def train(hook: Hook) -> None:
        trained_by_pairs(hook, Checkpointed("other, other masks"), one_by_one)

    found = evaluate_training(train, "recompute_mismatch", tmp_path / "run", config=BY_BUDGET)
    assert {finding.module for finding in found} == {"block.1"}


# skipped_updates


def test_each_series_of_skipped_updates_is_an_alert() -> None:
    metric = tensor("updates:skipped", "metrics", role="metric", shape=())
    rows = [Row(step, metric, [value]) for step, value in ((2, 1.0), (3, 1.0), (4, 0.0), (9, 1.0), (10, 0.0))]
    config = next(config for config in DEFAULT_RULES if config.rule == "skipped_updates")
    outcome = all_at_once(config, block_of(rows))
    assert [finding.step for finding in outcome.findings] == [2, 3, 9]
    assert outcome.findings[0].message == (
        "the gate policy skipped the update of step 2: its gradients are not finite"
    )
    fired = [(change.phase.value, change.step) for change in outcome.transitions if change.finding]
    assert fired == [("firing", 2), ("resolved", 4), ("firing", 9), ("resolved", 10)]
    assert config.severity == "info"


# training_stopped


def test_a_stop_by_the_recorder_is_one_alert_of_all_ranks_with_its_reason() -> None:
    reason = "the gate policy stopped the training at step 5: the gradients of step 5 are not finite"
    report = report_info(STOPPED, f"{reason}; aten.log.default made the first NaN at losses.py:3")
    other = report_info(STOPPED, f"{reason}; the first NaN {FROM_ANOTHER_RANK}")
    loss = tensor("loss", "losses", role="loss", shape=())
    rows = [Row(step, loss, [0.5], worker=rank) for step in range(6) for rank in range(2)]
    config = next(config for config in DEFAULT_RULES if config.rule == "training_stopped")
    reports = [Row(5, other, [1.0], worker=0), Row(5, report, [1.0], worker=1)]
    outcome = all_at_once(config, block_of([*rows, *reports]))
    assert [(change.phase.value, change.step) for change in outcome.notified] == [("firing", 5)]
    assert {finding.message.partition(";")[0] for finding in outcome.findings} == {reason}
    assert outcome.notified[0].finding is not None
    assert outcome.notified[0].finding.message == report.name.partition("@")[2], "of the rank with the line"
    assert report.role == "metric", "whatever words the reason has"
    assert not config.actions
