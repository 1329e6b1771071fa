from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.rules.runs import all_at_once, in_steps, steps_of
from tests.sdk.blocks import Row, gradient, tensor
from watchstep_rules.config import RuleConfig

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


def found(*layers: list[Row], name: str = "a") -> list[int]:
    return steps_of(
        all_at_once(RuleConfig(rule="weight_not_updating"), in_steps(*layers)), f"{name}.weight:update"
    )


def test_an_optimizer_that_stops_is_found_and_one_that_goes_on_is_not() -> None:
    alive = gradients("a", [0.1, 0.12, 0.09, 0.1, 0.11])
    assert found(updates("a", [1e-3, 1e-3, 0.0, 0.0, 0.0]), alive) == [2, 3, 4]
    assert found(updates("a", [1e-3] * 5), alive) == []


def test_a_learning_rate_that_a_schedule_brings_to_zero_is_fine() -> None:
    cosine = [1e-3 * (20 - step) ** 2 / 400 for step in range(20)] + [0.0] * 4
    assert found(updates("a", cosine), gradients("a", [0.1] * 24)) == []


def test_a_schedule_that_ends_long_before_the_training_is_found() -> None:
    falling = [10.0**-step for step in range(2, 9)] + [0.0] * 30
    assert found(updates("a", falling), gradients("a", [0.1] * 37)) == list(range(25, 37))


def test_a_converged_training_is_fine() -> None:
    decay = [10.0**-step for step in range(6)]
    assert found(updates("a", [*decay[:4], 0.0, 0.0]), gradients("a", decay)) == []
    assert found(updates("a", [1e-3, 0.0, 0.0]), gradients("a", [0.1, 0.0, 0.0])) == []


def test_a_layer_that_stands_still_beside_others_is_the_authors_choice() -> None:
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


def test_a_layer_whose_output_nothing_uses_is_no_cut() -> None:
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


def test_the_finding_says_what_was_seen() -> None:
    block = in_steps(updates("a", [1e-3, 0.0]), gradients("a", [0.1, 0.1]))
    (finding,) = all_at_once(RuleConfig(rule="weight_not_updating"), block).findings
    assert finding.message == (
        "a.weight:update is 0 of the weight, at most 1e-08 is none: no weight changes, though there are gradients"
    )
