"""A batch whose entries the program has replaced, added or removed before the update is named as lost, and no other batch is replayed in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.sdk.training import small_model
from watchstep import Hook
from watchstep.format.bundle import bundle_keys, open_bundle
from watchstep.store.store import Store


class Mappings(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), index + 1.0), "y": torch.tensor(index % 2)}


def replaces(batch: dict[str, Any]) -> None:
    batch["x"] = batch["x"].log()


def removes(batch: dict[str, Any]) -> None:
    batch.pop("y")


def adds(batch: dict[str, Any]) -> None:
    batch["mask"] = torch.ones(4)


def copies(batch: dict[str, Any]) -> None:
    """As a container does that is moved to a device."""
    for name, value in list(batch.items()):
        batch[name] = value.clone()


@pytest.mark.parametrize(
    ("change", "is_lost"), [(replaces, True), (removes, True), (adds, True), (copies, False)]
)
def test_a_batch_with_other_entries_is_lost(
    change: Callable[[Any], None], is_lost: bool, tmp_path: Path
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Hook(tmp_path, run="r") as hook:
        hook.watch(model, optimizer)
        for number, batch in enumerate(DataLoader(Mappings(), batch_size=4)):
            if number == 1:
                hook.bundle()
            labels = batch["y"]
            change(batch)
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not hook.health["faults"]
    store = Store.open(hook.run_url)
    (key,) = bundle_keys(store)
    bundle = open_bundle(store, key.path)
    lost = {each.path: each.reason for each in bundle.document.lost}
    assert ("micro_batches/0/batch" in lost) == is_lost
    assert ("lost" in bundle.document.micro_batches[0]["batch"]) == is_lost
    assert "micro_batches/0/arguments" not in lost
