"""A rule that fires has the workers keep full tensors, without a change to the program."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from watchstep import CaptureConfig, Hook, open_run
from watchstep.capture.config import Bounds
from watchstep.errors import NotFoundError
from watchstep.format.snapshot import Snapshot
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

RULES = "rules:\n  - {rule: non_finite_values, actions: [snapshot]}\n"
WAIT = 60.0


def test_a_rule_that_fires_has_full_tensors_taken(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    settings = load_settings(
        home=tmp_path / "home", store=str(tmp_path / "runs"), rules_file=rules,
        sweep_seconds=0.05, listing_seconds=0.05,
    )  # fmt: skip
    quick = CaptureConfig(bounds=Bounds(flush_seconds=0.02, control_seconds=0.02))
    with EmbeddedService(settings), Hook(tmp_path / "runs", run="r", config=quick) as hook:
        taken = train_until_taken(hook)
    assert {"0.weight", "0.bias"} <= set(taken.tensors)


def train_until_taken(hook: Hook) -> Snapshot:
    """Train until full tensors that the service asked for are on the store; the loss logged at step 3 is NaN."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    hook.watch(model, optimizer)
    deadline, step = time.monotonic() + WAIT, 0
    while time.monotonic() < deadline:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        hook.log(loss=float("nan") if step == 3 else 1.0)
        optimizer.step()
        step += 1
        try:
            run = open_run(hook.run_url)
        except NotFoundError:
            continue  # nothing is written yet
        for key in run.snapshots():
            held = run.open_snapshot(key)
            if held.metadata["reason"] == "request":
                return held
    raise AssertionError(f"nothing was asked for in {step} steps: {hook.health}")
