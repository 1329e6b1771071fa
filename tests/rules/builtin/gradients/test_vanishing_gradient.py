from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.rules.runs import all_at_once, in_steps, norms, steps_of
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block
from watchstep.format.tensors import Placement
from watchstep_rules.builtin.gradients.vanishing_gradient import VanishingGradientParams
from watchstep_rules.config.rule_config import RuleConfig

FIRST, LAST = "first.weight:gradient", "last.weight:gradient"


def found(block: Block, name: str = FIRST, **params: object) -> list[int]:
    return steps_of(all_at_once(RuleConfig(rule="vanishing_gradient", params=params), block), name)


def test_a_layer_that_starves_while_another_learns_is_found() -> None:
    block = in_steps(norms("first", [2e-9, 1e-9, 1e-9]), norms("last", [1e-2] * 3))
    assert found(block) == [0, 1, 2]
    assert found(block, LAST) == []


def test_a_layer_whose_gradient_is_all_zero_is_found() -> None:
    assert found(in_steps(norms("first", [0.0] * 3), norms("last", [1e-2] * 3))) == [0, 1, 2]


def test_a_recurrent_weight_is_fine_while_the_state_is_empty() -> None:
    def cell(state: float, given: float) -> Block:
        weights = {"cell.weight_hh:gradient": state, "cell.weight_ih:gradient": given, LAST: 1e-2}
        infos = {name: tensor(name, "gradients") for name in weights}
        return block_of(
            [Row(step, infos[name], [value] * 4) for step in range(60) for name, value in weights.items()]
        )

    assert found(cell(0.0, 1e-2), "cell.weight_hh:gradient") == []
    assert found(cell(1e-12, 1e-2), "cell.weight_hh:gradient")
    assert found(cell(0.0, 0.0), "cell.weight_hh:gradient")


def test_a_converged_training_is_fine() -> None:
    decay = [10.0**-step for step in range(14)]
    assert found(in_steps(norms("first", decay), norms("last", decay))) == []
    assert found(in_steps(norms("first", [1.0, 0.0, 0.0]), norms("last", [1.0, 0.0, 0.0]))) == []


def losses(values: list[float]) -> list[Row]:
    info = tensor("loss", "losses", shape=())
    return [Row(step, info, [value]) for step, value in enumerate(values)]


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
    assert found(in_steps(first, last, losses(values))) == list(steps)


def test_a_training_that_never_began_is_found_in_every_layer() -> None:
    block = in_steps(norms("first", [0.0] * 3), norms("last", [0.0, 1e-11, 0.0]))
    outcome = all_at_once(RuleConfig(rule="vanishing_gradient"), block)
    assert steps_of(outcome, FIRST) == [0, 1, 2]
    assert steps_of(outcome, LAST) == [0, 2]
    assert "no layer has learned yet" in outcome.findings[0].message


def test_a_layer_that_begins_late_is_fine_from_then_on() -> None:
    block = in_steps(norms("first", [0.0, 1.0, 0.0]), norms("last", [0.0, 1.0, 0.0]))
    assert found(block) == [0]


def test_a_layer_that_wakes_up_is_fine() -> None:
    growing = [1e-12 * 1.3**step for step in range(20)]
    assert found(in_steps(norms("first", growing), norms("last", [1.0] * 20))) == [
        0,
        1,
        2,
    ]  # not yet twice its first


def test_a_gradient_that_batches_make_larger_and_smaller_does_not_wake_up() -> None:
    sizes = [2e-9, 3e-9, 1e-9, 3.9e-9, 2e-9]
    assert found(in_steps(norms("first", sizes), norms("last", [1.0] * 5))) == [0, 1, 2, 3, 4]


def test_a_training_without_anything_to_learn_yet_is_fine() -> None:
    loss = tensor("loss", "losses", shape=())
    rows = norms("first", [0.0] * 4)
    assert found(in_steps(rows, [Row(step, loss, [0.0]) for step in range(4)])) == []
    assert found(in_steps(rows, [Row(step, loss, [0.7]) for step in range(4)])) == [0, 1, 2, 3]


def test_a_zero_initialised_layer_is_fine_with_the_default_hold() -> None:
    block = in_steps(
        norms("first", [0.0, *(1e-8 * 2**step for step in range(12))]), norms("last", [1.0] * 13)
    )
    outcome = all_at_once(
        RuleConfig.model_validate({"rule": "vanishing_gradient", "for": {"steps": 10}}), block
    )
    assert [transition.phase.value for transition in outcome.transitions] == ["pending", "inactive"]


def test_small_layers_beside_small_layers_are_fine() -> None:
    assert found(in_steps(norms("first", [2e-9, 1e-9]), norms("last", [1e-7, 1e-7]))) == []


def test_vectors_are_omitted_unless_they_are_requested() -> None:
    block = in_steps(norms("first", [0.0] * 2, shape=(8,)), norms("last", [1.0] * 2))
    assert found(block) == []
    assert found(block, min_dimensions=1) == [0, 1]
    assert found(in_steps(norms("first", [0.0] * 2, shape=(8,)))) == []


def test_rows_that_a_batch_does_not_touch_do_not_make_an_embedding_small() -> None:
    embedding = gradient("first", shape=(50_000, 8))
    last = gradient("last")
    rows = [[Row(step, embedding, [*([0.0] * 999), 5e-5]), Row(step, last, [1e-2])] for step in range(3)]
    assert found(block_of([row for step in rows for row in step]), relative=1e-3) == []


def test_infinite_elements_do_not_count_and_nothing_finite_is_not_judged() -> None:
    block = in_steps(norms("first", [float("nan")] * 3), norms("last", [1.0] * 3))
    assert found(block) == []


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
    assert found(block_of(stages)) == [0, 1]


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
    assert found(block_of(rows)) == []


def test_modes_are_judged_apart() -> None:
    rows = [Row(0, gradient("last"), [1.0]), Row(1, gradient("first"), [0.0], mode="eval")]
    outcome = all_at_once(RuleConfig(rule="vanishing_gradient"), block_of(rows))
    assert [finding.mode for finding in outcome.findings] == ["eval"]


def test_thresholds_are_the_users_to_set() -> None:
    block = in_steps(norms("first", [2e-5, 1e-5]), norms("last", [1.0, 1.0]))
    assert found(block) == []
    assert found(block, threshold=1e-4, settling=0) == [0, 1]
    assert found(block, threshold=1e-4, relative=1e-6) == []


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


@pytest.mark.parametrize(
    "params",
    [
        {"threshold": 0},
        {"relative": 0},
        {"relative": 1.1},
        {"min_dimensions": -1},
        {"treshold": 1},
        {"threshold": float("nan")},
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VanishingGradientParams.model_validate(params)


def test_a_size_near_the_limit_is_reported_only_once_the_first_steps_are_over() -> None:
    last = norms("last", [1e-2] * 60)
    assert found(in_steps(norms("first", [9e-8] * 60), last)) == list(range(50, 60))
    assert found(in_steps(norms("first", [9e-8] * 20 + [3e-7] * 40), last)) == []
    assert found(in_steps(norms("first", [9e-9] * 3), norms("last", [1e-2] * 3))) == [0, 1, 2]
