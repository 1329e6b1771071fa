"""Rules over weights: how they begin, and who updates them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from tests.rules.recording import evaluate_training, fit
from tests.rules.runs import all_at_once, first_message
from tests.rules.trainings.parts import Task
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep import CaptureConfig, Hook, open_run
from watchstep.format.tensors import Placement
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleMemory
from watchstep_rules.rule import Finding

# poor_initialization


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


def poorly_initialized(*rows: Row) -> list[str]:
    outcome = all_at_once(RuleConfig(rule="poor_initialization"), block_of(rows))
    return sorted(finding.tensor for finding in outcome.findings)


def of_gains(*gains: float) -> list[Row]:
    return [weight(f"layer{place}", place, spread(gain)) for place, gain in enumerate(gains)]


def test_units_that_stay_equal_are_found() -> None:
    assert poorly_initialized(weight("a", 1, [0.1, 0.1]), weight("b", 2, [0.3, 0.3]), *of_gains(1.0)) == [
        "a.weight"
    ]
    assert poorly_initialized(weight("a", 1, [0.0, 0.0]), weight("b", 2, [0.0, 0.0])) == [
        "a.weight",
        "b.weight",
    ]


def test_what_begins_at_zero_on_purpose_is_fine() -> None:
    zero = [weight("branch", 5, [0.0, 0.0]), weight("head", 6, [0.0, 0.0])]
    assert poorly_initialized(*of_gains(1.0, 1.0), *zero) == []
    assert poorly_initialized(weight("only", 1, [0.0, 0.0])) == []


def test_layers_at_zero_beside_a_random_one_of_one_input_are_fine() -> None:
    """As in a flow whose coupling layers look at one of two coordinates, and begin as the identity."""
    zero = [weight("a.2", 1, [0.0, 0.0]), weight("b.2", 3, [0.0, 0.0])]
    column = replace(tensor("a.0.weight", "weights", order=0, shape=(16, 1)), module_type="Linear")
    assert poorly_initialized(Row(0, column, [0.5, -0.5]), *zero) == []
    assert poorly_initialized(Row(0, column, [0.0, 0.0]), *zero) == ["a.2.weight", "b.2.weight"]
    assert poorly_initialized(Row(0, replace(column, module_type="Embedding"), [0.5, -0.5]), *zero) != []


def test_scales_embeddings_and_single_outputs_are_no_layers() -> None:
    ones = [weight("norm", 1, [1.0, 1.0], "LayerNorm"), weight("words", 2, [1.0, 1.0], "Embedding")]
    assert poorly_initialized(*ones) == []
    head = replace(tensor("head.weight", "weights", order=3, shape=(1, 16)), module_type="Linear")
    assert (
        poorly_initialized(Row(0, head, [0.5, 0.5]), Row(0, replace(head, name="h.weight"), [0.5, 0.5])) == []
    )


def test_large_weights_are_found_and_common_ones_are_not() -> None:
    assert poorly_initialized(*of_gains(8.0, 5.6, 1.0)) == ["layer0.weight", "layer1.weight"]
    for common in (0.58, 1.0, 1.41, 1.67, 2.5):
        assert poorly_initialized(*of_gains(*[common] * 20)) == []
    assert poorly_initialized(*of_gains(8.0, 1.0, 1.0)) == []


def test_small_weights_are_found_where_the_input_has_no_say() -> None:
    assert poorly_initialized(*of_gains(0.008, 0.008, 0.008), *SMALL) == ["layer0.weight", "layer1.weight"]
    assert poorly_initialized(*of_gains(1.0, 1.0, 0.008), *SMALL) == []
    large = [SMALL[0], Row(0, gradient("a"), [0.5])]
    assert poorly_initialized(*of_gains(0.008, 0.008, 0.008), *large) == []


def test_normalisation_takes_any_scale_out() -> None:
    norm = weight("norm", 9, [1.0, 1.0], "BatchNorm1d")
    assert poorly_initialized(*of_gains(8.0, 8.0, 8.0), norm) == []
    assert poorly_initialized(*of_gains(0.008, 0.008, 0.008), norm, *SMALL) == []


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
    assert poorly_initialized(*small, *outputs(1.0, 0.06, 0.005, 0.001)) == ["layer2:output"]
    assert poorly_initialized(*usual, *outputs(1.0, 0.06, 0.005, 0.001)) == []
    assert poorly_initialized(*usual, *outputs(1.0, 9.0, 80.0, 800.0)) == ["layer3:output"]
    assert poorly_initialized(*small, *outputs(1.0, 0.5, 0.2, 0.001)) == []
    assert poorly_initialized(*small, *outputs(1.0, 0.0, 0.2, 0.2)) == []


def test_large_weights_that_are_sure_before_they_learnt_are_found() -> None:
    head = [*of_gains(1.0), weight("layer1", 1, spread(8.0))]
    sure = outputs(1.0, 6.0)
    assert poorly_initialized(*head, *sure, loss_of(9.0)) == ["loss"]
    assert poorly_initialized(*head, *sure, loss_of(5.0)) == []
    assert poorly_initialized(*head, *sure, loss_of(400.0)) == []
    assert poorly_initialized(*head, *outputs(1.0, 1.5), loss_of(9.0)) == []
    assert poorly_initialized(*of_gains(1.0, 2.0), *sure, loss_of(9.0)) == []
    norm = weight("norm", 9, [1.0, 1.0], "BatchNorm1d")
    assert poorly_initialized(*head, norm, *sure, loss_of(9.0)) == ["loss"]


def test_loud_inputs_and_measured_targets_are_another_fault() -> None:
    head = [*of_gains(1.0), weight("layer1", 1, spread(8.0)), *outputs(1.0, 6.0), loss_of(9.0)]
    pixels = replace(tensor("model:input", "inputs", role="input"), dtype="float32")
    assert poorly_initialized(*head, Row(0, pixels, [100.0, 200.0])) == []
    assert poorly_initialized(*head, Row(0, pixels, [0.5, -0.5])) == ["loss"]
    assert poorly_initialized(*head, Row(0, replace(pixels, dtype="int64"), [100.0, 200.0])) == ["loss"]
    targets = replace(tensor("labels", "labels"), dtype="float32")
    assert poorly_initialized(*head, Row(0, targets, [0.3, 0.7])) == []


def test_an_embedding_that_the_last_layer_shares_counts_as_its_weight() -> None:
    words = replace(tensor("words.weight", "weights", order=0, shape=(10, 64)), module_type="Embedding")
    rows = [Row(0, words, [1.0, -1.0]), *outputs(1.0, 8.0), loss_of(15.0)]
    assert poorly_initialized(*rows) == ["loss"]
    assert poorly_initialized(*rows, weight("layer1", 1, spread(1.0))) == []


def test_only_the_first_step_is_judged() -> None:
    later = [replace(row, step=1) for row in of_gains(8.0, 8.0)]
    outcome = all_at_once(RuleConfig(rule="poor_initialization"), block_of([*of_gains(1.0, 1.0), *later]))
    assert outcome.findings == []
    assert outcome.memory != RuleMemory()


def test_the_finding_states_the_gain() -> None:
    assert first_message("poor_initialization", block_of(of_gains(8.0, 8.0))) == (
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
    assert poorly_initialized(*of_gains(0.01, 0.01, 0.01), empty, *SMALL) == [
        "layer0.weight",
        "layer1.weight",
    ]
    assert poorly_initialized(*of_gains(0.01, 0.01, 0.01), empty, SMALL[0]) == []


def test_each_of_many_workers_is_judged() -> None:
    rows = [replace(row, worker=worker) for worker in range(500) for row in of_gains(8.0, 8.0)]
    assert poorly_initialized(*rows) == ["layer0.weight"] * 500 + ["layer1.weight"] * 500


# symmetric_units


CONSTANT = 0.05


def trained_from_constants(
    hook: Hook, *, constant: tuple[int, ...], value: float = CONSTANT, adam: bool = False
) -> None:
    """Train three layers, of which some begin at a constant."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 5))
    for place in constant:
        layer = model[place]
        nn.init.constant_(layer.weight, value)  # type: ignore[arg-type]  # a Tensor
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # a Tensor
    optimizer = optim.AdamW(model.parameters(), 1e-2) if adam else optim.SGD(model.parameters(), 0.1)
    fit(hook, model, optimizer, Task(1).batches(steps=30))


def symmetric(folder: Path, *constant: int, value: float = CONSTANT, adam: bool = False) -> set[str]:
    findings = evaluate_training(
        lambda hook: trained_from_constants(hook, constant=constant, value=value, adam=adam),
        "symmetric_units",
        folder,
    )
    return {finding.tensor for finding in findings}


@pytest.mark.ci
def test_layers_that_begin_at_one_number_and_their_twins(tmp_path: Path) -> None:
    for adam in (False, True):
        assert symmetric(tmp_path / f"a{adam}", 0, 2, 4, adam=adam) == {"0.weight", "2.weight"}
        assert symmetric(tmp_path / f"b{adam}", 0, 2, adam=adam) == {"0.weight"}
        assert symmetric(tmp_path / f"c{adam}", adam=adam) == set()


def test_a_head_that_begins_at_zero_parts(tmp_path: Path) -> None:
    assert symmetric(tmp_path / "a", 4, value=0.0) == set()
    assert symmetric(tmp_path / "b", 2, 4, value=0.0, adam=True) == set()


def test_the_finding_states_how_far(tmp_path: Path) -> None:
    findings = evaluate_training(
        lambda hook: trained_from_constants(hook, constant=(0, 2, 4)),
        "symmetric_units",
        tmp_path,
        {"records": 10},
    )
    assert "the 16 units of 0.weight have moved by" in findings[0].message
    assert findings[0].value < findings[0].threshold == 0.01


# absent_from_optimizer


def trained_with_head(hook: Hook, *, late: bool, frozen: bool = False, average: bool = False) -> None:
    """Train a model whose head is replaced after or before the optimizer is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    if not late:
        model[2] = nn.Linear(16, 5)
    optimizer = optim.SGD(model.parameters(), 0.05)
    if late:
        model[2] = nn.Linear(16, 5)
    model[2].requires_grad_(requires_grad=not frozen)

    def averaged(_: int) -> None:
        with torch.no_grad():
            for parameter in model[2].parameters():
                parameter.mul_(0.999)

    fit(hook, model, optimizer, Task(1).batches(steps=101), after=averaged if average else lambda _: None)


def absent(folder: Path, *, late: bool, frozen: bool = False, average: bool = False) -> list[tuple[int, str]]:
    findings = evaluate_training(
        lambda hook: trained_with_head(hook, late=late, frozen=frozen, average=average),
        "absent_from_optimizer",
        folder,
        config=CaptureConfig(),
    )
    return [(finding.step, finding.tensor) for finding in findings]


@pytest.mark.ci
def test_a_layer_that_is_made_after_the_optimizer_and_its_twin(tmp_path: Path) -> None:
    assert absent(tmp_path / "a", late=True) == [(step, "2.weight:not_in_optimizer") for step in (75, 100)]
    assert absent(tmp_path / "b", late=False) == []


@pytest.mark.ci
def test_what_is_frozen_or_moved_by_hand_is_ignored(tmp_path: Path) -> None:
    assert absent(tmp_path / "a", late=True, frozen=True) == []
    assert absent(tmp_path / "b", late=True, average=True) == []


Left = Callable[[nn.Sequential], list[nn.Parameter]]


def names(
    folder: Path,
    select: Left,
    *others: Left,
    each: Callable[[int, list[optim.Optimizer]], None] = lambda _step, _optimizers: None,
    **params: object,
) -> set[str]:
    """Train with an optimizer of some parameters, and further optimizers that step as ``each`` defines."""

    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
        optimizers: list[optim.Optimizer] = [optim.SGD(some(model), 0.05) for some in (select, *others)]
        batches = Task(1).batches(steps=126)
        fit(hook, model, optimizers[0], batches, after=lambda step: each(step, optimizers))

    outcome = evaluate_training(train, "absent_from_optimizer", folder, params, config=CaptureConfig())
    return {finding.tensor.removesuffix(":not_in_optimizer") for finding in outcome}


def part(*places: int) -> Left:
    return lambda model: [parameter for place in places for parameter in model[place].parameters()]


@pytest.mark.ci
def test_a_head_that_is_trained_alone_is_reported_only_if_requested(tmp_path: Path) -> None:
    assert names(tmp_path / "a", part(4)) == set()
    trunk = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert names(tmp_path / "b", part(4), strict=True) == trunk


@pytest.mark.ci
def test_layers_between_others_and_biases_beside_weights(tmp_path: Path) -> None:
    assert names(tmp_path / "a", part(0, 4)) == {"2.weight"}
    weights: Left = lambda model: [parameter for parameter in model.parameters() if parameter.dim() > 1]  # noqa: E731
    assert names(tmp_path / "b", weights) == {"0.bias", "2.bias", "4.bias"}


@pytest.mark.ci
def test_optimizers_that_alternate_have_their_own_parameters(tmp_path: Path) -> None:
    def by_turns(step: int, optimizers: list[optim.Optimizer]) -> None:
        if step == 110:
            optimizers[1].step()

    assert names(tmp_path / "seldom", part(0, 4), part(2), each=by_turns) == set()
    assert names(tmp_path / "never yet", part(0, 4), part(2)) == set()


@pytest.mark.ci
def test_what_is_taken_out_of_a_group_in_mid_run(tmp_path: Path) -> None:
    def once(step: int, optimizers: list[optim.Optimizer]) -> None:
        if step == 40:
            group = optimizers[0].param_groups[0]
            group["params"] = group["params"][-2:]

    everything = part(0, 2, 4)
    assert names(tmp_path, everything, each=once) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.ci
def test_an_optimizer_of_another_model_in_the_place_of_the_first(tmp_path: Path) -> None:
    def train(hook: Hook) -> None:
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5)) for _ in range(2))
        optimizer = optim.SGD(model.parameters(), 0.05)
        hook.watch(model, optimizer)
        for step, (x, y) in enumerate(Task(1).batches(steps=151)):
            if step == 30:
                optimizer = optim.SGD(other.parameters(), 0.05)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            hook.step()

    outcome = evaluate_training(train, "absent_from_optimizer", tmp_path, config=CaptureConfig())
    assert {finding.tensor for finding in outcome} >= {
        "0.weight:not_in_optimizer",
        "2.weight:not_in_optimizer",
    }
    assert outcome[0].step == 125


@pytest.mark.ci
def test_one_fault_is_one_report(tmp_path: Path) -> None:
    with Hook(tmp_path, run="run", config=CaptureConfig()) as hook:
        trained_with_head(hook, late=True)
    backtest = backtest_run(open_run(hook.run_url), DEFAULT_RULES)
    messages = [
        (outcome.config.rule, change.step)
        for outcome in backtest.attempts[0].outcomes
        for change in outcome.fired
        if change.finding and change.finding.role == "not_in_optimizer" and not change.inhibited_by
    ]
    assert messages == [("weight_not_updating", 50)]


# replica_divergence


FIRST, LAST = (
    tensor(f"{name}.weight:checksum", "checksums", order=order, shape=())
    for order, name in enumerate(("first", "last"))
)


def diverged(*steps: list[float]) -> list[Finding]:
    """Checksums of the last weight on each worker, while the first one's stay equal."""
    rows = [
        Row(
            100 * step, info, [value if info is LAST else 7.0], worker=worker, place=Placement(replica=worker)
        )
        for step, values in enumerate(steps)
        for worker, value in enumerate(values)
        for info in (FIRST, LAST)
    ]
    return all_at_once(RuleConfig(rule="replica_divergence"), block_of(rows)).findings


def test_equal_replicas_are_fine_and_others_are_found() -> None:
    assert diverged([5.0, 5.0], [6.0, 6.0]) == []
    (finding,) = diverged([5.0, 5.0], [6.0, 6.0 + 2**-20])
    assert (finding.step, finding.worker, finding.tensor) == (100, 1, "last.weight:checksum")


def test_the_majority_of_replicas_identifies_the_divergent_one() -> None:
    (finding,) = diverged([1.0, 5.0, 5.0, 5.0])
    assert finding.worker == 0
    assert finding.message == (
        "last.weight:checksum of worker 0 differs from that of worker 1: of 4 workers 1 have other weights"
    )


def test_two_against_two_the_lowest_rank_is_right() -> None:
    assert [finding.worker for finding in diverged([1.0, 5.0, 5.0, 1.0])] == [1, 2]


def test_a_single_worker_does_not_diverge() -> None:
    assert diverged([1.0], [2.0]) == []
