"""Units of a layer with equal initial weights, until they diverge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.sdk.training import EVERY_STEP, batches, recorded
from watchstep import Hook, Run
from watchstep.pytorch.probes.weights import UnitSpread


def trained(store: Path, *, also_the_head: bool) -> Run:
    torch.manual_seed(0)
    trunk, head = nn.Linear(8, 6), nn.Linear(6, 2)
    model = nn.Sequential(trunk, nn.Tanh(), head)
    for layer in (trunk, *([head] if also_the_head else [])):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.constant_(layer.bias, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hook = Hook(store, config=EVERY_STEP)
    hook.watch(model, optimizer)
    for x, y in batches(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
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
    found = probe.measure([weight, moved])
    assert found is not None
    assert [column.tolist() for column in found.collect().values()] == [[0.5, 0.0], [0.0, 0.0]]
    moved += 0.25
    found = probe.measure([weight, moved])
    assert found is not None
    spread, movement = found.collect().values()
    assert np.isnan(spread[0])
    assert (spread[1], movement[1]) == (0.0, 0.25)
