"""Losses are bitwise equal with and without recording if every probe has a tensor to measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP
from watchstep import CaptureConfig, Hook
from watchstep.capture.config import PROBES, element_probe

STEPS = 60


class Reader(nn.Module):
    """Tokens, normalisation, a layer with equal initial weights, and a layer that is in no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 6)
        self.norm, self.not_in_optimizer, self.head = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3)
        nn.init.constant_(self.inner.weight, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.inner(self.words(tokens).mean(1))))
        scores: Tensor = self.head(self.not_in_optimizer(hidden))
        return scores


def losses(hook: Hook | None, *, clears: bool) -> list[float]:
    torch.manual_seed(0)
    model = Reader()
    chosen = [p for name, p in model.named_parameters() if "not_in_optimizer" not in name]
    optimizer = torch.optim.SGD(chosen, lr=0.01, momentum=0.9)
    if hook is not None:
        hook.watch(model, optimizer)
    found = []
    for _ in range(STEPS):
        tokens, labels = torch.randint(0, 20, (16, 5)), torch.randint(0, 3, (16,))
        if clears:
            optimizer.zero_grad(set_to_none=False)
        outputs = model(tokens)
        loss = nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        if hook is not None:
            hook.record(labels=labels, outputs=outputs)
        optimizer.step()
        found.append(loss.item())
    return found


ELEMENTS = CaptureConfig(
    overhead_budget=None,
    probes=(
        *PROBES,
        element_probe("inactive_units", 1.0),
        element_probe("saturated_units", "Tanh", -9.5, 9.5, 1.0),
        element_probe("unchanged", 1e-5, 1e-8, "False"),
        element_probe("weight_change", 3, 1e-9),
        element_probe("token_count", 0),
        element_probe("channel_sum", 1),
        element_probe("percentile_range", 10),
        "input_variance",
        "function_calls",
    ),
)


@pytest.mark.parametrize("config", [EVERY_STEP, CaptureConfig(), ELEMENTS])
@pytest.mark.parametrize("clears", [True, False])
def test_losses_are_the_same(config: CaptureConfig, clears: bool, tmp_path: Path) -> None:
    with Hook(tmp_path, config=config) as hook:
        watched = losses(hook, clears=clears)
    assert hook.health["faults"] == {}
    assert watched == losses(None, clears=clears)
