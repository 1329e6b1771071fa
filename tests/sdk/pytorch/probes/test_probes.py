"""Probes: their counts on tensors with known results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP, batches, recorded, train_step, watching, with_sgd
from watchstep import CaptureConfig, Hook, Run
from watchstep.errors import ConfigError
from watchstep.pytorch.probes.activations import ChannelProbe, ClassCounts, TokenProbe, spread_of_examples
from watchstep.pytorch.probes.staging import views
from watchstep.pytorch.probes.weights import GradientCosine, UnitSpread


def collected(measurement: Any) -> dict[str, Any]:
    """The columns of a probe that measured something."""
    assert measurement is not None
    columns: dict[str, Any] = measurement.collect()
    return columns


def counted(module: nn.Module, *passes: Tensor) -> tuple[float, float, float]:
    """Channels, dead and saturated ones, after some passes of one step."""
    probe, found = ChannelProbe(module), None
    for values in passes:
        found = probe.measure(values, 0, "train")
    columns = collected(found)
    return tuple(columns[f"{kind}channels"].item() for kind in ("", "dead_", "saturated_"))


def test_a_channel_is_dead_where_it_is_zero_for_every_example() -> None:
    output = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    channels, dead, saturated = counted(nn.ReLU(), output)
    assert (channels, dead) == (3, 1)
    assert np.isnan(saturated)


@pytest.mark.parametrize(("shape", "channel"), [((4, 3, 5, 5), 1), ((4, 5, 3), 2), ((6, 3), 1)])
def test_where_the_channels_lie(shape: tuple[int, ...], channel: int) -> None:
    output = torch.rand(shape) + 0.1
    output.select(channel, 1).zero_()
    assert counted(nn.ReLU(), output)[:2] == (3, 1)


def test_micro_batches_are_one_step() -> None:
    first, second = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.0, 3.0, 0.0]])
    assert counted(nn.ReLU(), first, second)[1] == 1
    probe = ChannelProbe(nn.ReLU())
    for step, dead in ((0, 2), (1, 2)):
        found = probe.measure(first if step == 0 else second, step, "train")
        assert collected(found)["dead_channels"].tolist() == [dead]


@pytest.mark.parametrize(
    ("module", "low", "high"),
    [(nn.Sigmoid(), 0.0, 1.0), (nn.Tanh(), -1.0, 1.0), (nn.Hardtanh(-2.0, 4.0), -2.0, 4.0)],
)
def test_a_channel_is_saturated_at_either_bound(module: nn.Module, low: float, high: float) -> None:
    middle = (low + high) / 2
    output = torch.tensor([[low, high, middle, low], [high, high, middle, middle]])
    channels, _, saturated = counted(module, output)
    assert (channels, saturated) == (4, 2)


def test_nan_is_neither_dead_nor_saturated() -> None:
    assert counted(nn.ReLU(), torch.tensor([[torch.nan, 0.0]]))[1] == 1
    assert counted(nn.Tanh(), torch.tensor([[torch.nan, 1.0]]))[2] == 1


def test_what_has_no_channels_is_omitted() -> None:
    assert ChannelProbe(nn.ReLU()).measure(torch.zeros(3), 0, "train") is None
    assert ChannelProbe(nn.ReLU()).measure(torch.zeros(0, 3), 0, "train") is None
    assert not ChannelProbe(nn.Linear(2, 2)).applies


def test_channels_are_in_the_record(tmp_path: Path) -> None:
    first = nn.Linear(4, 6)
    with torch.no_grad():
        first.weight.zero_()
        first.bias.copy_(torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0, 1.0]))
    model, optimizer = with_sgd(nn.Sequential(first, nn.ReLU(), nn.Linear(6, 1)), 1e-3)
    hook = watching(tmp_path, model, optimizer)
    for _ in range(2):  # two micro-batches
        model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    rows = recorded(hook).tensor("1:output").statistics().to_pydict()
    assert (rows["probe.channels"], rows["probe.dead_channels"]) == ([6.0], [2.0])
    assert rows["count"] == [60]


def test_the_cosine_to_the_gradient_before() -> None:
    cosine, owner, other = GradientCosine(), object(), object()
    g = torch.randn(300, 200)
    seen = []
    for first in (g, 2 * g, -g, torch.zeros_like(g)):
        found = cosine.measure([owner, other], [first, torch.ones(3)], 2)
        seen.append(collected(found)["gradient_cosine"])
    assert np.allclose(np.array(seen)[:, 0], [np.nan, 1, -1, np.nan], equal_nan=True)
    assert np.allclose(np.array(seen)[1:, 1], 1)
    assert cosine.measure([owner], [torch.eye(3).to_sparse()], 1) is None


def test_a_sample_sees_every_column() -> None:
    tensor = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512)
    sample = views([tensor], 1000)[0]
    assert len(sample) <= 1000
    assert len((sample.long() % 512).unique()) > 300
    assert sample.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def classes_of(*batches: Tensor) -> list[float] | None:
    """What is counted after some batches: labels, classes, the largest, the smallest, and which that is."""
    counts, found = ClassCounts(), None
    for batch in batches:
        found = counts.measure(batch)
    return None if found is None else [column.item() for column in found.collect().values()]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_classes_are_counted_over_all_batches(dtype: torch.dtype) -> None:
    batches = [torch.tensor([0, 1, 1], dtype=dtype), torch.tensor([[1], [1], [0]], dtype=dtype)]
    assert classes_of(batches[0]) == [3, 2, 2, 1, 0]
    assert classes_of(*batches) == [6, 2, 4, 2, 0]


def test_labels_that_a_loss_leaves_out_do_not_count() -> None:
    assert classes_of(torch.tensor([-100, 7, 7, 2])) == [3, 2, 2, 1, 2]


@pytest.mark.parametrize(
    "labels",
    [torch.tensor([0.5, 1.0]), torch.tensor([0.0, 2.0]), torch.tensor([3, 1000]), torch.tensor([-1])],
)
def test_what_is_no_class_makes_the_counts_unknown(labels: Tensor) -> None:
    found = (
        classes_of(labels, torch.tensor([0, 1]).to(labels.dtype)) if labels.min() >= 0 else classes_of(labels)
    )
    assert found is not None
    assert all(np.isnan(found))


@pytest.mark.parametrize("labels", [torch.ones(2, 3), torch.tensor(1), torch.tensor([True, False])])
def test_one_label_for_each_example_or_none(labels: Tensor) -> None:
    assert classes_of(labels) is None


def test_class_counts_are_recorded_with_labels(tmp_path: Path) -> None:
    with Hook(tmp_path, config=EVERY_STEP) as hook:
        for _ in range(2):
            hook.record(labels=torch.tensor([0, 0, 1]), inputs=torch.ones(3))
            hook.step()
    rows = recorded(hook).tensor("labels").statistics().to_pydict()
    assert rows["probe.labels_counted"] == [3.0, 6.0]
    assert rows["probe.smallest_class"] == [1.0, 2.0]


LABELS = torch.tensor([0, 0, 0, 1, 2, 2, -100])
GUESSES = torch.tensor([0, 2, 2, 1, 2, 0, 1])
FIGURES = ("examples", "correct", "confused", "confused_with")


def figures(run: Run, name: str) -> list[tuple[float | None, ...]]:
    rows = run.tensor(name).statistics().to_pydict()
    return list(zip(*(rows[f"probe.{figure}"] for figure in FIGURES), strict=True))


def recorded_pairs(store: Path, labels: Tensor, outputs: Tensor, times: int = 1) -> Run:
    hook = Hook(store, config=EVERY_STEP)
    for _ in range(times):
        hook.record(outputs=outputs, labels=labels)
        hook.step()
    return recorded(hook)


@pytest.mark.parametrize("scores", [True, False])
def test_counts_of_each_class(scores: bool, tmp_path: Path) -> None:
    outputs = torch.nn.functional.one_hot(GUESSES, 3).float() if scores else GUESSES
    run = recorded_pairs(tmp_path, LABELS, outputs, times=2)
    assert figures(run, "confusion/0") == [(3, 1, 2, 2), (6, 2, 4, 2)]
    assert figures(run, "confusion/1") == [(1, 1, 0, None), (2, 2, 0, None)]
    assert figures(run, "confusion/2") == [(2, 1, 1, 0), (4, 2, 2, 0)]
    rows = run.tensor("confusion/0").statistics().to_pydict()
    assert rows["mean"] == [pytest.approx(1 / 3)] * 2
    assert run.tensor("confusion/0").info.role == "confusion"


def test_a_class_without_examples_has_no_share(tmp_path: Path) -> None:
    run = recorded_pairs(tmp_path, torch.tensor([0, 0]), torch.eye(3)[:2])
    rows = run.tensor("confusion/2").statistics().to_pydict()
    assert (rows["count"], rows["probe.examples"]) == ([0], [0.0])


def test_the_last_batch_of_a_step_has_taken_in_the_others(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    for _ in range(3):
        hook.record(labels=LABELS)
        hook.record(predictions=GUESSES)
    hook.step()
    assert figures(recorded(hook), "confusion/0") == [(9, 3, 6, 2)]


def test_counts_begin_anew(tmp_path: Path) -> None:
    run = recorded_pairs(tmp_path, torch.zeros(400, dtype=torch.int64), torch.eye(2)[[0] * 400], times=4)
    assert [row[0] for row in figures(run, "confusion/0")] == [400, 800, 1200, 400]


def test_classes_that_come_later_make_the_matrix_larger(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    for labels in (torch.tensor([0, 1]), torch.tensor([0, 3])):
        hook.record(labels=labels, outputs=torch.tensor([0, 1]))
        hook.step()
    run = recorded(hook)
    assert figures(run, "confusion/0") == [(1, 1, 0, None), (2, 2, 0, None)]
    assert figures(run, "confusion/3") == [(1, 0, 1, 1)]


@pytest.mark.parametrize(
    ("labels", "outputs"),
    [
        (torch.zeros(4), torch.zeros(4, 2)),  # measured targets
        (torch.zeros(4, 7, dtype=torch.int64), torch.zeros(4, 2)),  # tokens
        (torch.zeros(4, dtype=torch.int64), torch.zeros(5, 2)),  # of other examples
        (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 101)),  # too many classes
        (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 1)),  # one number is no class
        (torch.full((4,), 100), torch.zeros(4, dtype=torch.int64)),
        (torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2)),
    ],
)
def test_what_is_no_class_is_not_counted(labels: Tensor, outputs: Tensor, tmp_path: Path) -> None:
    assert not [
        name for name in recorded_pairs(tmp_path, labels, outputs).tensors() if name.startswith("confusion")
    ]


def test_halves_of_different_steps_and_modes_do_not_meet(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.record(labels=LABELS)
    hook.step()
    hook.record(outputs=GUESSES)
    hook.record(labels=LABELS, mode="eval")
    assert not [name for name in recorded(hook).tensors() if name.startswith("confusion")]


def shares(tokens: torch.Tensor, module: nn.Module, *values: int) -> tuple[float, float]:
    columns = collected(TokenProbe(module, values, ("token_shares",)).measure(tokens))
    return columns["token_share"].item(), columns["top_token_share"].item()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_shares_are_counts_over_all(tokens: list[int]) -> None:
    most = max(tokens.count(token) for token in tokens) / len(tokens)
    tensor, module = torch.tensor(tokens), nn.Embedding(5, 2)
    assert shares(tensor, module) == pytest.approx((tokens.count(0) / len(tokens), most))
    padded = nn.Embedding(5, 2, padding_idx=3)
    assert shares(tensor, padded)[0] == pytest.approx(tokens.count(3) / len(tokens))
    assert shares(tensor, padded, 1, 2)[0] == pytest.approx((tokens.count(1) + tokens.count(2)) / len(tokens))


def test_long_inputs_are_sampled() -> None:
    tokens = torch.zeros(40_000, dtype=torch.int64)
    tokens[::2] = torch.randint(1, 1000, (20_000,), generator=torch.Generator().manual_seed(0))
    watched, top = shares(tokens.view(200, 200), nn.Embedding(1000, 2))
    assert watched == top == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("padding", [[0, 1], "pad", float("nan")])
def test_a_module_that_calls_something_else_its_padding_index_is_watched(padding: object) -> None:
    module = nn.Linear(2, 2)
    module.padding_idx = padding  # type: ignore[assignment]
    assert not TokenProbe(module, (), ("token_shares",)).applies


def test_other_modules_and_empty_inputs_have_none() -> None:
    assert not TokenProbe(nn.Linear(2, 2), (), ("token_shares",)).applies
    assert (
        TokenProbe(nn.Embedding(2, 2), (), ("token_shares",)).measure(torch.zeros(0, dtype=torch.int64))
        is None
    )


def test_they_are_recorded_with_the_embeddings_output(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 1))
    hook = Hook(tmp_path, config=CaptureConfig(overhead_budget=None, token_values=(7,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.watch(model, optimizer)
    model(torch.tensor([[7, 7, 7], [7, 1, 2]])).sum().backward()
    optimizer.step()
    rows = recorded(hook).tensor("0:output").statistics().to_pydict()
    assert rows["probe.token_share"] == rows["probe.top_token_share"] == [pytest.approx(4 / 6)]


def test_values_are_whole_numbers() -> None:
    with pytest.raises(ConfigError, match="token_values"):
        CaptureConfig(token_values=[0])  # type: ignore[arg-type]


def trained(store: Path, *, also_the_head: bool) -> Run:
    torch.manual_seed(0)
    trunk, head = nn.Linear(8, 6), nn.Linear(6, 2)
    model = nn.Sequential(trunk, nn.Tanh(), head)
    for layer in (trunk, *([head] if also_the_head else [])):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.constant_(layer.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hook = watching(store, model, optimizer)
    for x, y in batches(8):
        train_step(model, optimizer, x, y)
    return recorded(hook)


def test_units_that_nothing_distinguishes(tmp_path: Path) -> None:
    rows = trained(tmp_path, also_the_head=True).tensor("0.weight").statistics().to_pydict()
    spread, movement = rows["probe.unit_spread"], rows["probe.unit_movement"]
    assert spread[0] == movement[0] == 0
    assert movement[-1] > 1e-3
    assert all(distance <= 1e-3 * moved for distance, moved in zip(spread, movement, strict=True))


def test_units_that_part(tmp_path: Path) -> None:
    rows = trained(tmp_path, also_the_head=False).tensor("0.weight").statistics().to_pydict()
    spread = rows["probe.unit_spread"]
    assert spread[0] == 0
    assert any(distance is not None and distance > 0 for distance in spread)


@pytest.mark.parametrize(
    "weight",
    [torch.ones(4), torch.ones(1, 5), torch.ones(3, 0), torch.eye(3).to_sparse(), torch.ones(2, 2).int()],
)
def test_what_has_no_units_to_compare(weight: torch.Tensor) -> None:
    probe = UnitSpread()
    assert probe.measure([weight]) is None
    assert probe.measure([weight]) is None


def test_what_it_measures() -> None:
    weight, moved = torch.tensor([[1.0, 2.0], [1.0, 2.5]]), torch.ones(2, 3, 300)
    probe = UnitSpread()
    found = collected(probe.measure([weight, moved]))
    assert [column.tolist() for column in found.values()] == [[0.5, 0.0], [0.0, 0.0]]
    moved += 0.25
    spread, movement = collected(probe.measure([weight, moved])).values()
    assert np.isnan(spread[0])
    assert (spread[1], movement[1]) == (0.0, 0.25)


def test_the_share_that_differs_between_examples() -> None:
    def share(values: Tensor) -> float:
        return float(collected(spread_of_examples(values))["example_spread"][0])

    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)) + 2
    assert share(x) == pytest.approx(float(x.var(0, correction=0).sum() / x.square().mean(0).sum()), rel=1e-4)
    assert share(torch.ones(8, 4, 4)) == pytest.approx(0, abs=1e-6)
    assert share(1e3 + 1e-2 * x) < 1e-5
    assert np.isnan(share(torch.zeros(8, 4)))
    assert 0 < share(torch.randn(100, 5000) + 1) < 1
    for values in (
        torch.ones(7, 4),
        torch.ones(8),
        torch.ones(0, 4),
        torch.ones(8, 0),
        torch.ones(8, 3).long(),
    ):
        assert spread_of_examples(values) is None


def test_it_is_measured_at_the_ends_of_parts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))
    model, optimizer = with_sgd(nn.Sequential(nn.Sequential(encoder, nn.Linear(6, 2))), 1e-3)
    hook = watching(tmp_path, model, optimizer)
    model(torch.randn(16, 4)).sum().backward()
    optimizer.step()
    run = recorded(hook)
    measured = {
        name
        for name in ("0.0.0", "0.0.2", "0.0.4", "0.1")
        if np.isfinite(
            run.tensor(f"{name}:output").statistics().to_pydict()["probe.example_spread"][0] or np.nan
        )
    }
    assert measured == {"0.0.0", "0.0.4", "0.1"}
