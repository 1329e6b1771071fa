"""Probes: their counts on tensors with known results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP, recorded
from watchstep import Hook
from watchstep.pytorch.probes.activations import ChannelProbe, ClassCounts
from watchstep.pytorch.probes.staging import views
from watchstep.pytorch.probes.weights import GradientCosine


def counted(module: nn.Module, *passes: Tensor) -> tuple[float, float, float]:
    """Channels, dead and saturated ones, after some passes of one step."""
    probe, found = ChannelProbe(module), None
    for values in passes:
        found = probe.measure(values, 0, "train")
    assert found is not None
    columns = found.collect()
    return tuple(columns[f"{kind}channels"].item() for kind in ("", "dead_", "saturated_"))  # type: ignore[return-value]


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
        assert found is not None
        assert found.collect()["dead_channels"].tolist() == [dead]


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
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.watch(model, optimizer)
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
        assert found is not None
        seen.append(found.collect()["gradient_cosine"])
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
