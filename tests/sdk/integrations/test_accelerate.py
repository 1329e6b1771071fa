"""Loops of Accelerate, recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.sdk.integrations.models import column, last_good_of, loader, request_stop, run_of_ranks
from tests.sdk.training import EVERY_STEP, small_model
from watchstep import Hook, open_run
from watchstep.errors import ConfigError

accelerate: Any = pytest.importorskip(
    "accelerate", reason="ACCELERATE IS NOT INSTALLED: recording its loops is not proven by this run"
)
from watchstep.integrations.accelerate import watch  # noqa: E402 - it needs accelerate


@pytest.fixture(autouse=True)
def _its_state_is_new() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    model = small_model()
    wrapped: tuple[Any, Any, Any] = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader(64)
    )
    return wrapped


def train(accelerator: Any, model: Any, optimizer: Any, data: Any, hook: Hook) -> list[float]:
    losses = []
    for x, y in data:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if hook.stopped is not None:
            break
    return losses


def test_one_line_records_a_loop(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, data = prepared(accelerator)
    hook = watch(accelerator, model, optimizer, store_url=tmp_path, run="r", config=EVERY_STEP)
    losses = train(accelerator, model, optimizer, data, hook)
    accelerator.log({"accuracy": 0.5}, step=8)
    assert accelerator.get_tracker("watchstep", unwrap=True) is hook
    accelerator.end_training()
    assert not hook.health["faults"]
    run = open_run(hook.run_url)
    for name in ("0.weight", "0.weight:gradient", "0:output"):
        assert list(column(run, name)) == list(range(8)), name
    assert list(column(run, "loss").values()) == pytest.approx(losses)
    assert column(run, "accuracy") == {7: 0.5}
    (end,) = run.ends()
    assert (end.state, end.last_step) == ("completed", 7)


def test_micro_batches_are_one_step_whose_loss_is_their_mean(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, data = prepared(accelerator)
    hook = watch(accelerator, model, optimizer, store_url=tmp_path, first_step=10, config=EVERY_STEP)
    losses = train(accelerator, model, optimizer, data, hook)
    hook.close()
    due = {10: sum(losses[:3]) / 3, 11: sum(losses[3:6]) / 3, 12: sum(losses[6:]) / 2}  # the last is short
    assert column(open_run(hook.run_url), "loss") == pytest.approx(due)


def test_a_loop_that_polls_stops_by_itself(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, data = prepared(accelerator)
    hook = watch(accelerator, model, optimizer, store_url=tmp_path, on_stop="check", config=EVERY_STEP)
    request_stop(hook, 2)
    assert len(train(accelerator, model, optimizer, data, hook)) == 3
    hook.close()
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.last_step) == ("stopped", 2)
    with pytest.raises(ConfigError, match="rulez"):
        watch(accelerator, model, optimizer, rulez="rules.yaml")


_RANKS = """
import sys
from tests.sdk.integrations.test_accelerate import *
accelerator = accelerate.Accelerator(cpu=True)
model, optimizer, data = prepared(accelerator)
hook = watch(accelerator, model, optimizer, store_url=sys.argv[1] + "/runs", on_stop="check", config=EVERY_STEP)
request_stop(hook, 2)
assert len(train(accelerator, model, optimizer, data, hook)) == 3
accelerator.end_training()
assert not hook.health["faults"], hook.health["faults"]
"""


@pytest.mark.ci
def test_ranks_record_one_run_and_stop_after_the_same_step(tmp_path: Path) -> None:
    run = run_of_ranks(tmp_path, _RANKS, ranks=2)
    assert run.tensor("0.weight").statistics().to_pydict()["step"] == [0, 1, 2]


@pytest.mark.parametrize(("judged_seconds", "remaining"), [(3600.0, 4), (0.0, 2)])
def test_its_rotation_leaves_what_may_be_the_last_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged_seconds: float, remaining: int
) -> None:
    monkeypatch.setattr("watchstep.capture.checkpoint_notes.EVALUATED_SECONDS", judged_seconds)
    naming = accelerate.utils.ProjectConfiguration(
        str(tmp_path / "project"), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = accelerate.Accelerator(cpu=True, project_config=naming)
    model, optimizer, data = prepared(accelerator)
    hook = watch(accelerator, model, optimizer, store_url=tmp_path, run="r", config=EVERY_STEP)
    for _ in range(4):
        train(accelerator, model, optimizer, list(data)[:1], hook)
        accelerator.save_state()
    accelerator.end_training()
    assert not hook.health["faults"]
    assert len(list((tmp_path / "project" / "checkpoints").iterdir())) == remaining
    assert naming.total_limit == 1
    path, step = last_good_of(hook)
    assert (path.name, step) == ("checkpoint_2", 2)
