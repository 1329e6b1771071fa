from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.rules.runs import all_at_once, in_steps, steps_of
from tests.sdk.format.blocks import Row, gradient, tensor
from watchstep_rules.config.rule_config import RuleConfig

LOSS = tensor("loss", "losses", shape=())


def updates(name: str, ratios: Sequence[float], *, order: int = 0, dtype: str = "float32") -> list[Row]:
    """A layer's updates, by their root mean square over that of a weight of one; a hundred elements each."""
    info = replace(tensor(f"{name}.weight:update", "updates", order=order), module=name, dtype=dtype)
    return [
        Row(step, info, [ratio] * 100, probes={"update_ratio": ratio}) for step, ratio in enumerate(ratios)
    ]


def gradients(name: str, sizes: Sequence[float], *, order: int = 0) -> list[Row]:
    return [Row(step, gradient(name, order=order), [size] * 4) for step, size in enumerate(sizes)]


def losses(values: Sequence[float]) -> list[Row]:
    return [Row(step, LOSS, [value]) for step, value in enumerate(values)]


def outputs(name: str, *, order: int, kind: str = "Linear") -> list[Row]:
    info = replace(
        tensor(f"{name}:output", "activations", order=order), module=name, module_type=kind, role="output"
    )
    return [Row(0, info, [1.0])]


def found(*layers: list[Row], name: str = "a", **params: object) -> list[int]:
    config = RuleConfig.model_validate({"rule": "weight_not_updating", "params": params})
    return steps_of(all_at_once(config, in_steps(*layers)), f"{name}.weight:update")


def test_an_optimizer_that_stops_is_found_and_one_that_continues_is_not() -> None:
    alive = gradients("a", [0.1, 0.12, 0.09, 0.1, 0.11])
    assert found(updates("a", [1e-3, 1e-3, 0.0, 0.0, 0.0]), alive) == [2, 3, 4]
    assert found(updates("a", [1e-3] * 5), alive) == []


def test_a_learning_rate_that_a_schedule_brings_to_zero_is_fine() -> None:
    cosine = [1e-3 * (20 - step) ** 2 / 400 for step in range(20)] + [0.0] * 4
    assert found(updates("a", cosine), gradients("a", [0.1] * 24)) == []


def test_a_schedule_that_ends_long_before_the_training_is_found() -> None:
    falling = [10.0**-step for step in range(2, 9)] + [0.0] * 30
    assert found(updates("a", falling), gradients("a", [0.1] * 37)) == list(range(25, 37))


def test_a_rate_that_ran_down_long_before_the_end_is_found() -> None:
    falling = [10.0 ** -(2 + step / 2) for step in range(10)] + [3e-7] * 40
    alive, high = gradients("a", [0.1] * 50), losses([2.3] * 50)
    assert found(updates("a", falling), alive, high)[0] == 17
    assert found(updates("a", falling), alive, losses([2.3] * 8 + [0.5] * 42)) == []
    assert found(updates("a", falling), gradients("a", [0.1] * 8 + [1e-6] * 42), high) == []
    assert found(updates("a", falling), alive, high, ran_down=1e-7) == []


def test_a_schedule_that_ends_at_nothing_with_the_training_is_fine() -> None:
    ends = [1e-3 * (100 - step) / 100 for step in range(100)] + [1e-7] * 12
    assert found(updates("a", ends), gradients("a", [0.1] * 112), losses([2.3] * 112)) == []


def test_updates_that_are_too_small_from_the_start_are_found_unless_they_grow_or_the_loss_falls() -> None:
    alive, high = gradients("a", [0.1] * 90), losses([2.3] * 90)
    small = updates("a", [3e-7, 5e-7] * 45)
    assert found(small, alive, high) == list(range(50, 90))
    assert found(updates("a", [3e-6] * 90), alive, high) == []
    assert found(small, alive, losses([2.3] * 8 + [0.5] * 82)) == []
    momentum = [5e-7 * (1 - 0.9 ** (step + 1)) for step in range(90)]
    assert found(updates("a", momentum), alive, high)[0] == 50
    warmed_up = [2e-8 * (step + 1) for step in range(90)]
    assert found(updates("a", warmed_up), alive, high) == []


def test_occasional_zero_gradients_are_no_evidence_about_other_steps() -> None:
    seldom = gradients("a", [0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    still = updates("a", [1e-3, 1e-3, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert found(still, seldom) == []
    assert found(still, gradients("a", [0.1] * 8)) == [3, 4, 5, 6, 7]


def not_in_optimizer(
    name: str, changed: Sequence[float], *, order: int, size: float = 0.1, wide: int = 8
) -> list[Row]:
    info = replace(
        tensor(
            f"{name}.weight:not_in_optimizer",
            "not_in_optimizer",
            role="not_in_optimizer",
            order=order,
            shape=(8, wide),
        ),
        module=name,
    )
    return [Row(step, info, [size] * 4, probes={"changed": flag}) for step, flag in enumerate(changed)]


def left_out(*layers: list[Row], name: str) -> list[int]:
    outcome = all_at_once(RuleConfig(rule="weight_not_updating"), in_steps(*layers))
    return steps_of(outcome, f"{name}.weight:not_in_optimizer")


def test_forgotten_weights_of_no_optimizer_are_found() -> None:
    trunk = updates("a", [1e-3] * 3, order=1)
    assert left_out(trunk, not_in_optimizer("b", [0.0] * 3, order=2), name="b") == [0, 1, 2]
    assert left_out(trunk, not_in_optimizer("b", [0.0, 1.0, 1.0], order=2), name="b") == [0]
    assert left_out(trunk, not_in_optimizer("b", [0.0] * 3, order=2, size=0.0), name="b") == []
    nothing = not_in_optimizer("b", [0.0] * 3, order=0), not_in_optimizer("c", [0.0] * 3, order=1)
    assert left_out(*nothing, name="b") == left_out(*nothing, name="c") == [0, 1, 2]


def test_weights_that_are_omitted_on_purpose_are_fine() -> None:
    head = updates("b", [1e-3] * 3, order=2)
    assert left_out(head, not_in_optimizer("a", [0.0] * 3, order=1), name="a") == []
    adapter = updates("b", [1e-3] * 3, order=2)
    assert left_out(adapter, not_in_optimizer("c", [0.0] * 3, order=3, wide=32), name="c") == []


def test_a_converged_training_is_fine() -> None:
    decay = [10.0**-step for step in range(6)]
    assert found(updates("a", [*decay[:4], 0.0, 0.0]), gradients("a", decay)) == []
    assert found(updates("a", [1e-3, 0.0, 0.0]), gradients("a", [0.1, 0.0, 0.0])) == []


def test_a_layer_that_stalls_beside_others_is_the_authors_choice() -> None:
    still, moves = updates("a", [0.0] * 4), updates("b", [1e-3] * 4, order=1)
    assert found(still, moves, gradients("a", [0.1] * 4), gradients("b", [0.1] * 4, order=1)) == []


def test_weights_that_never_change_are_found_unless_there_is_no_loss() -> None:
    never = updates("a", [0.0] * 3), gradients("a", [0.0] * 3)
    assert found(*never) == [0, 1, 2]
    assert found(*never, losses([8.0] * 3)) == [0, 1, 2]
    assert found(*never, losses([0.0] * 3)) == []


def test_what_half_precision_rounds_away_is_found() -> None:
    for dtype, steps in (("bfloat16", [1, 2]), ("float32", [])):
        lost = updates("a", [1e-3, 1e-5, 1e-5], dtype=dtype)
        lost = [replace(row, values=[*[0.0] * 999, 1e-3] if row.step else row.values) for row in lost]
        moves = updates("b", [1e-3] * 3, order=1)
        assert found(lost, moves, gradients("a", [0.1] * 3), gradients("b", [0.1] * 3, order=1)) == steps


def test_layers_that_are_cut_off_from_the_loss_are_found() -> None:
    still, moves = updates("a", [0.0] * 3, order=1), updates("b", [1e-3] * 3, order=2)
    learns = gradients("b", [0.1] * 3, order=2)
    assert found(still, moves, learns, outputs("a", order=1)) == [0, 1, 2]
    assert found(still, moves, learns) == []  # never computed: nothing was expected of it


def test_an_unused_output_is_not_a_detached_layer() -> None:
    first, unused = updates("a", [1e-3] * 3, order=1), updates("b", [0.0] * 3, order=2)
    last = updates("c", [1e-3] * 3, order=3)
    learn = gradients("a", [0.1] * 3, order=1) + gradients("c", [0.1] * 3, order=3)
    assert found(first, unused, last, learn, outputs("b", order=2), name="b") == []


def test_a_gradient_that_is_masked_is_found_and_a_layer_without_any_is_not() -> None:
    def bias(size: float) -> list[Row]:
        info = tensor("b.bias:gradient", "gradients", role="gradient", order=2, shape=(8,))
        return [Row(step, info, [size]) for step in range(3)]

    first, masked = updates("a", [1e-3] * 3, order=1), updates("b", [0.0] * 3, order=2)
    given = gradients("a", [0.1] * 3, order=1) + gradients("b", [0.0] * 3, order=2)
    assert found(first, masked, given, bias(0.1), name="b") == [1, 2]
    assert found(first, masked, given, bias(0.0), name="b") == []
    assert found(masked, gradients("b", [0.0] * 3, order=2), losses([0.0] * 3), bias(0.1), name="b") == []


def vector(name: str, kind: str, *, order: int) -> list[Row]:
    info = tensor(f"{name}.weight:update", "updates", order=order, shape=(8,))
    info = replace(info, module=name, module_type=kind)
    return [Row(step, info, [1e-3], probes={"update_ratio": 1e-3}) for step in range(2)]


def test_normalisation_that_alone_learns_is_found() -> None:
    layers = outputs("first", order=1) + outputs("last", order=3)
    assert found(vector("a", "BatchNorm1d", order=2), layers) == [0, 1]
    assert found(vector("a", "BatchNorm1d", order=2), vector("last", "Linear", order=3), layers) == []
    assert found(vector("a", "Scales", order=2), layers) == []


def test_the_finding_states_what_was_seen() -> None:
    block = in_steps(updates("a", [1e-3, 0.0]), gradients("a", [0.1, 0.1]))
    (finding,) = all_at_once(RuleConfig(rule="weight_not_updating"), block).findings
    assert finding.message == (
        "a.weight:update is 0 of the weight, no update up to 1e-08: no weight changes, though there are gradients"
    )
