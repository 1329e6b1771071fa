from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.rules.recording import evaluate_training
from tests.rules.runs import all_at_once
from tests.rules.trainings.parts import Task
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep import Hook
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleMemory

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
    outcome = all_at_once(RuleConfig(rule="poor_initialization"), block_of(rows))
    return sorted(finding.tensor for finding in outcome.findings)


def of_gains(*gains: float) -> list[Row]:
    return [weight(f"layer{place}", place, spread(gain)) for place, gain in enumerate(gains)]


def test_units_that_stay_equal_are_found() -> None:
    assert found(weight("a", 1, [0.1, 0.1]), weight("b", 2, [0.3, 0.3]), *of_gains(1.0)) == ["a.weight"]
    assert found(weight("a", 1, [0.0, 0.0]), weight("b", 2, [0.0, 0.0])) == ["a.weight", "b.weight"]


def test_what_begins_at_zero_on_purpose_is_fine() -> None:
    zero = [weight("branch", 5, [0.0, 0.0]), weight("head", 6, [0.0, 0.0])]
    assert found(*of_gains(1.0, 1.0), *zero) == []
    assert found(weight("only", 1, [0.0, 0.0])) == []


def test_layers_at_zero_beside_a_random_one_of_one_input_are_fine() -> None:
    """As in a flow whose coupling layers look at one of two coordinates, and begin as the identity."""
    zero = [weight("a.2", 1, [0.0, 0.0]), weight("b.2", 3, [0.0, 0.0])]
    column = replace(tensor("a.0.weight", "weights", order=0, shape=(16, 1)), module_type="Linear")
    assert found(Row(0, column, [0.5, -0.5]), *zero) == []
    assert found(Row(0, column, [0.0, 0.0]), *zero) == ["a.2.weight", "b.2.weight"]
    assert found(Row(0, replace(column, module_type="Embedding"), [0.5, -0.5]), *zero) != []


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


def outputs(*spreads: float, step: int = 0) -> list[Row]:
    """Outputs of layers with such a spread: a batch of four, ten units each."""
    return [
        Row(
            step, replace(info, module=f"layer{place}", module_type="Linear", role="output"), [0.0, 2 * width]
        )
        for place, width in enumerate(spreads)
        for info in [tensor(f"layer{place}:output", "activations", order=place, shape=(4, 10))]
    ]


def loss_of(value: float) -> Row:
    return Row(0, tensor("loss", "losses", shape=()), [value])


def test_a_signal_that_dies_or_runs_away_between_layers_is_found() -> None:
    small, usual = of_gains(0.2, 0.2, 0.2, 0.2), of_gains(1.0, 1.0, 1.0, 1.0)
    assert found(*small, *outputs(1.0, 0.06, 0.005, 0.001)) == ["layer2:output"]
    assert found(*usual, *outputs(1.0, 0.06, 0.005, 0.001)) == []
    assert found(*usual, *outputs(1.0, 9.0, 80.0, 800.0)) == ["layer3:output"]
    assert found(*small, *outputs(1.0, 0.5, 0.2, 0.001)) == []
    assert found(*small, *outputs(1.0, 0.0, 0.2, 0.2)) == []


def test_large_weights_that_are_sure_before_they_learnt_are_found() -> None:
    head = [*of_gains(1.0), weight("layer1", 1, spread(8.0))]
    sure = outputs(1.0, 6.0)
    assert found(*head, *sure, loss_of(9.0)) == ["loss"]
    assert found(*head, *sure, loss_of(5.0)) == []
    assert found(*head, *sure, loss_of(400.0)) == []
    assert found(*head, *outputs(1.0, 1.5), loss_of(9.0)) == []
    assert found(*of_gains(1.0, 2.0), *sure, loss_of(9.0)) == []
    norm = weight("norm", 9, [1.0, 1.0], "BatchNorm1d")
    assert found(*head, norm, *sure, loss_of(9.0)) == ["loss"]


def test_loud_inputs_and_measured_targets_are_another_fault() -> None:
    head = [*of_gains(1.0), weight("layer1", 1, spread(8.0)), *outputs(1.0, 6.0), loss_of(9.0)]
    pixels = replace(tensor("model:input", "inputs", role="input"), dtype="float32")
    assert found(*head, Row(0, pixels, [100.0, 200.0])) == []
    assert found(*head, Row(0, pixels, [0.5, -0.5])) == ["loss"]
    assert found(*head, Row(0, replace(pixels, dtype="int64"), [100.0, 200.0])) == ["loss"]
    targets = replace(tensor("labels", "labels"), dtype="float32")
    assert found(*head, Row(0, targets, [0.3, 0.7])) == []


def test_an_embedding_that_the_last_layer_shares_counts_as_its_weight() -> None:
    words = replace(tensor("words.weight", "weights", order=0, shape=(10, 64)), module_type="Embedding")
    rows = [Row(0, words, [1.0, -1.0]), *outputs(1.0, 8.0), loss_of(15.0)]
    assert found(*rows) == ["loss"]
    assert found(*rows, weight("layer1", 1, spread(1.0))) == []


def test_only_the_first_step_is_judged() -> None:
    later = [replace(row, step=1) for row in of_gains(8.0, 8.0)]
    outcome = all_at_once(RuleConfig(rule="poor_initialization"), block_of([*of_gains(1.0, 1.0), *later]))
    assert outcome.findings == []
    assert outcome.memory != RuleMemory()


def test_the_finding_states_the_gain() -> None:
    outcome = all_at_once(RuleConfig(rule="poor_initialization"), block_of(of_gains(8.0, 8.0)))
    assert outcome.findings[0].message == (
        "layer0.weight begins with a gain rms * sqrt(fan in) of 8, at least 3, as do others; "
        "1 to 1.41 keeps a signal's size"
    )


@pytest.mark.parametrize("parts", [1, 4])
def test_a_first_loss_that_is_divided_among_micro_batches_is_judged_whole(parts: int, tmp_path: Path) -> None:
    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
        nn.init.normal_(model[2].weight, std=1.5)  # type: ignore[arg-type]  # a Linear
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        hook.watch(model, optimizer)
        batches = Task(1).batches(steps=2 * parts)
        for _ in range(2):
            for _ in range(parts):
                x, y = next(batches)
                (nn.functional.cross_entropy(model(x), y) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()

    outcome = evaluate_training(train, "poor_initialization", tmp_path, {"above_guess": 1.5})
    assert [finding.tensor for finding in outcome] == ["loss"]


def test_small_weights_are_found_beside_an_empty_shard_of_a_gradient() -> None:
    empty = Row(0, gradient("a"), [])
    assert found(*of_gains(0.01, 0.01, 0.01), empty, *SMALL) == ["layer0.weight", "layer1.weight"]
    assert found(*of_gains(0.01, 0.01, 0.01), empty, SMALL[0]) == []


def test_each_of_many_workers_is_judged() -> None:
    rows = [replace(row, worker=worker) for worker in range(500) for row in of_gains(8.0, 8.0)]
    assert found(*rows) == ["layer0.weight"] * 500 + ["layer1.weight"] * 500
