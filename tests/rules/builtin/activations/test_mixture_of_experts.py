"""Experts without examples are no fault; layers that are used and get no gradient are one, also next to such experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

from tests.rules.recording import EVERYTHING
from tests.rules.runs import all_at_once
from watchstep import Hook, open_run
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.engine.alert import Phase

STEPS = 60
ABOUT_GRADIENTS = ("weight_not_updating", "gradients_cease", "vanishing_gradient")


class Mixture(nn.Module):
    """Each example is routed to one of four experts; the last is not chosen while it is starved."""

    def __init__(self, *, computes_all: bool) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(16, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)
        )
        self.computes_all = computes_all
        self.detaches_stem = False
        self.starves_last = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(x))
        if self.detaches_stem:
            hidden = hidden.detach()
        weights = self.router(hidden).softmax(1)
        best = torch.arange(len(x)) % (3 if self.starves_last else 4)
        output = hidden
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if self.computes_all:
                output = output + expert(hidden) * (weights[:, number] * chosen).unsqueeze(1)
            elif chosen.any():
                update = weights[chosen, number].unsqueeze(1) * expert(hidden[chosen])
                output = output.index_add(0, torch.where(chosen)[0], update)
        logits: Tensor = self.head(output)
        return logits


def alarms(
    folder: Path, *, computes_all: bool = False, detached_from: int = STEPS, starved_from: int = 0
) -> dict[str, set[str]]:
    """The layers for which each rule's alert fires, of rules whose severity is warning or critical."""
    torch.manual_seed(0)
    model = Mixture(computes_all=computes_all)
    optimizer = optim.AdamW(model.parameters(), 2e-3)
    truth = torch.randn(12, 3)
    with Hook(folder, config=EVERYTHING) as hook:
        hook.watch(model, optimizer)
        for step in range(STEPS):
            model.detaches_stem = step >= detached_from
            model.starves_last = step >= starved_from
            x = torch.randn(24, 12)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x @ truth).argmax(1)).backward()
            optimizer.step()
    rows = open_run(hook.run_url).rows()
    found: dict[str, set[str]] = {}
    for config in DEFAULT_RULES:
        if config.rule in ABOUT_GRADIENTS and config.severity != "info":
            outcome = all_at_once(config, rows)
            if any(change.phase is Phase.FIRING for change in outcome.notified):
                found[config.rule] = {finding.module for finding in outcome.findings}
    return found


@pytest.mark.parametrize("computes_all", [False, True])
def test_an_expert_without_examples_raises_no_alarm(computes_all: bool, tmp_path: Path) -> None:
    assert alarms(tmp_path / "always", computes_all=computes_all) == {}
    assert alarms(tmp_path / "later", computes_all=computes_all, starved_from=30) == {}


def test_a_used_layer_that_never_gets_a_gradient_alarms_beside_an_expert_without_examples(
    tmp_path: Path,
) -> None:
    assert alarms(tmp_path, detached_from=0) == {"weight_not_updating": {"stem"}}


def test_a_used_layer_that_loses_its_gradient_alarms_beside_an_expert_without_examples(
    tmp_path: Path,
) -> None:
    assert alarms(tmp_path, detached_from=30, starved_from=30) == {"gradients_cease": {"stem"}}
