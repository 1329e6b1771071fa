"""A branch amid layers that learn may get no gradient for good: an auxiliary head whose loss ends, or a branch that is not selected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

from tests.rules.recording import EVERYTHING
from watchstep import Hook, open_run
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.engine.alert import Phase

STEPS = 90


class Branches(nn.Module):
    """Two branches that are always computed; the second gets no gradient from a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(12, 32), nn.Linear(32, 3)
        self.main, self.other = (
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.stem(x))
        return self.main(hidden), self.other(hidden)


@pytest.mark.parametrize("ends", [0, 40])
@pytest.mark.parametrize("is_auxiliary", [True, False])
def test_a_branch_that_is_computed_and_not_used_raises_no_alarm(
    is_auxiliary: bool, ends: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = optim.AdamW(model.parameters(), 2e-3)
    truth = torch.randn(12, 3)
    with Hook(tmp_path, config=EVERYTHING) as hook:
        hook.watch(model, optimizer)
        for step in range(STEPS):
            x = torch.randn(32, 12)
            optimizer.zero_grad()
            main, other = model(x)
            is_used = step < ends
            logits = model.head(main + other if is_used and not is_auxiliary else main)
            loss = nn.functional.cross_entropy(logits, (x @ truth).argmax(1))
            (loss + other.square().mean() if is_used and is_auxiliary else loss).backward()
            optimizer.step()
    outcomes = backtest(open_run(hook.run_url).rows(), DEFAULT_RULES)
    fired = {
        outcome.config.name
        for outcome in outcomes
        if outcome.config.severity != "info"
        and any(change.phase is Phase.FIRING for change in outcome.transitions)
    }
    assert fired == set()
