"""Trainers that fetch batches ahead, accumulate and evaluate: each step has the samples that the model got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings(
        # The DataLoader that the Trainer makes asks for pinned memory, and there is no accelerator.
        "ignore:'pin_memory' argument is set as true:UserWarning"
    ),
]


def test_the_transformers_trainer(tmp_path: Path) -> None:
    """With accumulation and evaluations, in the order of the forward passes."""
    pytest.importorskip("transformers")
    import torch

    from tests.sdk.integrations.models import Classifier, Examples
    from tests.sdk.integrations.test_transformers import recorded, trainer
    from watchstep.integrations.transformers import WatchstepCallback

    passes: list[Any] = []

    class Observed(Classifier):
        def forward(self, x: Any, labels: Any) -> Any:
            if self.training:
                passes.append(x.detach().clone())
            return super().forward(x, labels)

    callback = WatchstepCallback(str(tmp_path / "store"))
    trainer(
        tmp_path,
        callback,
        model=Observed(),
        max_steps=5,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    ).train()
    examples = Examples(64)
    inputs = torch.stack([examples[index]["x"] for index in range(64)])
    truth = [[int((inputs == row).all(1).nonzero()[0, 0]) for row in batch] for batch in passes]
    run = recorded(callback)
    batches = [run.samples(step) for step in range(5)]
    assert [len(found) for found in batches] == [2] * 5
    assert [list(batch.ids) for found in batches for batch in found] == truth
