from __future__ import annotations

from dataclasses import replace

from tests.rules.runs import all_at_once
from tests.sdk.blocks import Row, block_of, gradient, tensor
from watchstep_rules.config import RuleConfig
from watchstep_rules.judge import RuleMemory

SMALL = [
    Row(0, tensor("a.bias:gradient", "gradients", role="gradient", shape=(16,)), [1.0]),
    Row(0, gradient("a"), [1e-4]),
]


def weight(name: str, order: int, values: list[float], kind: str = "Linear", step: int = 0) -> Row:
    """A weight of 16 units with 16 inputs: its gain is four times its root mean square."""
    info = tensor(f"{name}.weight", "weights", order=order, shape=(16, 16))
    return Row(step, replace(info, module_type=kind), values)


def spread(gain: float) -> list[float]:
    return [gain / 4, -gain / 4]


def found(*rows: Row) -> list[str]:
    said = all_at_once(RuleConfig(rule="poor_initialization"), block_of(rows))
    return sorted(finding.tensor for finding in said.findings)


def of_gains(*gains: float) -> list[Row]:
    return [weight(f"layer{place}", place, spread(gain)) for place, gain in enumerate(gains)]


def test_units_that_stay_equal_are_found() -> None:
    assert found(weight("a", 1, [0.1, 0.1]), weight("b", 2, [0.3, 0.3]), *of_gains(1.0)) == ["a.weight"]
    assert found(weight("a", 1, [0.0, 0.0]), weight("b", 2, [0.0, 0.0])) == ["a.weight", "b.weight"]


def test_what_begins_at_zero_on_purpose_is_fine() -> None:
    zero = [weight("branch", 5, [0.0, 0.0]), weight("head", 6, [0.0, 0.0])]
    assert found(*of_gains(1.0, 1.0), *zero) == []
    assert found(weight("only", 1, [0.0, 0.0])) == []


def test_scales_embeddings_and_single_outputs_are_no_layers() -> None:
    ones = [weight("norm", 1, [1.0, 1.0], "LayerNorm"), weight("words", 2, [1.0, 1.0], "Embedding")]
    assert found(*ones) == []
    head = replace(tensor("head.weight", "weights", order=3, shape=(1, 16)), module_type="Linear")
    assert found(Row(0, head, [0.5, 0.5]), Row(0, replace(head, name="h.weight"), [0.5, 0.5])) == []


def test_large_weights_are_found_and_common_ones_are_not() -> None:
    assert found(*of_gains(8.0, 5.6, 1.0)) == ["layer0.weight", "layer1.weight"]
    for common in (0.58, 1.0, 1.41, 1.67, 2.5):
        assert found(*of_gains(*[common] * 20)) == []
    assert found(*of_gains(8.0, 1.0, 1.0)) == []


def test_small_weights_are_found_where_the_input_has_no_say() -> None:
    assert found(*of_gains(0.008, 0.008, 0.008), *SMALL) == ["layer0.weight", "layer1.weight"]
    assert found(*of_gains(1.0, 1.0, 0.008), *SMALL) == []
    large = [SMALL[0], Row(0, gradient("a"), [0.5])]
    assert found(*of_gains(0.008, 0.008, 0.008), *large) == []


def test_normalisation_takes_any_scale_out() -> None:
    norm = weight("norm", 9, [1.0, 1.0], "BatchNorm1d")
    assert found(*of_gains(8.0, 8.0, 8.0), norm) == []
    assert found(*of_gains(0.008, 0.008, 0.008), norm, *SMALL) == []


def test_only_the_first_step_is_judged() -> None:
    later = [replace(row, step=1) for row in of_gains(8.0, 8.0)]
    said = all_at_once(RuleConfig(rule="poor_initialization"), block_of([*of_gains(1.0, 1.0), *later]))
    assert said.findings == []
    assert said.memory != RuleMemory()


def test_the_finding_says_the_gain() -> None:
    said = all_at_once(RuleConfig(rule="poor_initialization"), block_of(of_gains(8.0, 8.0)))
    assert said.findings[0].message == (
        "layer0.weight begins with a gain rms * sqrt(fan in) of 8, at least 3, as do others; "
        "1 to 1.41 keeps a signal's size"
    )
