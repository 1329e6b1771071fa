"""Gradients before and after clipping, and the norm that clipping computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # by name, before anything is recorded

from tests.sdk.programs import run_program
from tests.sdk.training import EVERY_STEP, batches, recorded, small_model, watching, with_sgd
from watchstep import Cadence, CaptureConfig, Run, open_run

BEFORE = replace(EVERY_STEP, gradients="before_clipping")
STEPS = 4

Clip = Callable[[nn.Sequential], Any]


def norms_of(run: Run) -> list[str]:
    """The metrics of gradient norms."""
    return [name for name in run.tensors("metrics") if name.startswith("gradient_norm")]


def by_norm(model: nn.Sequential) -> Tensor:
    return clip_grad_norm_(model.parameters(), 0.01)


def by_norm_one_by_one(model: nn.Sequential) -> Tensor:
    return clip_grad_norm_(model.parameters(), 0.01, foreach=False)


def by_value(model: nn.Sequential) -> None:
    clip_grad_value_(model.parameters(), 1e-3)


def by_given_norm(model: nn.Sequential) -> None:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, torch.nn.utils.get_total_norm(found))


def by_group(model: nn.Sequential) -> None:
    for layer in model:
        if list(layer.parameters()):
            clip_grad_norm_(layer.parameters(), 0.005)


def twice(model: nn.Sequential) -> None:
    clip_grad_norm_(model.parameters(), 0.01)
    clip_grad_value_(model.parameters(), 1e-4)


def one_tensor(model: nn.Sequential) -> None:
    clip_grad_norm_(model[0].weight, 0.001)  # type: ignore[arg-type]


CLIPS: list[Clip] = [by_norm, by_norm_one_by_one, by_value, by_given_norm, by_group, twice, one_tensor]


class Clipped:
    """A training that clips.

    Attributes:
        before, after: the largest gradient of each parameter at each step, as the program sees it.
        norms: the norm that clipping returned.
    """

    def __init__(self, clip: Clip | None, **options: Any) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.scaler = GradScaler("cpu", 2.0**10, enabled=False)
        self.clip = clip
        self.losses: list[float] = []
        self.before: list[dict[str, float]] = []
        self.after: list[dict[str, float]] = []
        self.norms: list[float] = []

    def run(self, steps: int = STEPS, each: Callable[[int], None] | None = None) -> list[float]:
        for step, (x, y) in enumerate(batches(steps)):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.before.append(self._largest())
            norm = self.clip(self.model) if self.clip is not None else None
            self.norms.append(norm.item() if norm is not None else 0.0)
            self.after.append(self._largest())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.losses.append(loss.item())
            if each is not None:
                each(step)
        return self.losses

    def _largest(self) -> dict[str, float]:
        return {
            f"{name}:gradient": p.grad.max().item()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }


def record(
    training: Clipped, store: Path, config: CaptureConfig, each: Callable[[int], None] | None = None
) -> Run:
    hook = watching(store, training.model, training.optimizer, config=config)
    training.run(each=each)
    return recorded(hook)


def largest(run: Run) -> list[dict[str, float]]:
    names = run.collections["gradients"]
    tables = {name: run.tensor(name).statistics() for name in names}
    assert all(table["step"].to_pylist() == list(range(STEPS)) for table in tables.values())
    assert all(
        table["count"].to_pylist() == [torch.Size(run.tensor(name).info.shape).numel()] * STEPS
        for name, table in tables.items()
    )
    return [{name: table["max"][step].as_py() for name, table in tables.items()} for step in range(STEPS)]


@pytest.mark.parametrize("config", [EVERY_STEP, BEFORE], ids=["after clipping", "before clipping"])
@pytest.mark.parametrize("clip", CLIPS)
def test_gradients_are_recorded_before_or_after_clipping_and_training_is_the_same(
    clip: Clip, config: CaptureConfig, tmp_path: Path
) -> None:
    watched, plain = Clipped(clip), Clipped(clip)
    gradients = largest(record(watched, tmp_path, config))
    assert gradients == (watched.before if config is BEFORE else watched.after)
    assert watched.before != watched.after
    assert watched.losses == plain.run()
    assert watched.norms == plain.norms
    for ours, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_clipping_gradients_are_measured_at_the_step(tmp_path: Path) -> None:
    training = Clipped(None)
    run = record(training, tmp_path, BEFORE)
    assert largest(run) == training.before
    assert norms_of(run) == []


@pytest.mark.parametrize("config", [EVERY_STEP, BEFORE])
def test_the_norm_is_recorded(config: CaptureConfig, tmp_path: Path) -> None:
    training = Clipped(by_norm)
    run = record(training, tmp_path, config)
    assert run.tensor("gradient_norm").statistics()["mean"].to_pylist() == training.norms
    assert run.tensor("gradient_norm").info.derived


def test_norms_of_groups_are_numbered(tmp_path: Path) -> None:
    run = record(Clipped(by_group), tmp_path, EVERY_STEP)
    assert norms_of(run) == ["gradient_norm", "gradient_norm_2", "gradient_norm_3"]
    assert run.tensor("gradient_norm_3").steps() == list(range(STEPS))


def test_the_norm_comes_as_often_as_metrics(tmp_path: Path) -> None:
    config = CaptureConfig(collections={"metrics": Cadence(every=2)})
    run = record(Clipped(by_norm), tmp_path, config)
    assert run.tensor("gradient_norm").steps() == [0, 2]


def test_the_programs_own_norm_wins(tmp_path: Path) -> None:
    training = Clipped(by_norm)
    hook = watching(tmp_path, training.model, training.optimizer)
    training.run(each=lambda step: hook.log(gradient_norm=100.0 + step))
    table = recorded(hook).tensor("gradient_norm").statistics()
    assert table["mean"].to_pylist() == [100.0, 101.0, 102.0, 103.0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_leaves_no_trace_of_its_clipping(fused: bool, tmp_path: Path) -> None:
    training = Clipped(by_norm, fused=fused)
    training.scaler = GradScaler("cpu", 2.0**10)
    overflow = training.scaler.unscale_

    def unscale(optimizer: torch.optim.Optimizer) -> None:
        if len(training.before) == 1:
            training.model[0].weight.grad.fill_(torch.inf)  # type: ignore[union-attr, operator]
        overflow(optimizer)

    training.scaler.unscale_ = unscale  # type: ignore[method-assign]
    run = record(training, tmp_path, BEFORE)
    assert run.tensor("gradient_scaler:skipped").steps() == [1]
    assert run.tensor("gradient_norm").steps() == [0, 2, 3]
    assert run.tensor("0.weight:gradient").steps() == [0, 2, 3]


@pytest.mark.parametrize("fused", [True, False])
def test_under_a_gradient_scaler(fused: bool, tmp_path: Path) -> None:
    training = Clipped(by_norm, fused=fused)
    training.scaler = GradScaler("cpu", 2.0**10)
    assert largest(record(training, tmp_path, BEFORE)) == training.before


def test_a_batch_that_the_program_gives_up_is_not_recorded(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model())
    hook = watching(tmp_path, model, optimizer, config=BEFORE)
    clipped = []
    for place, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        norm = clip_grad_norm_(model.parameters(), 0.01)
        if place % 2:
            clipped.append(norm.item())
            optimizer.step()
    run = recorded(hook)
    assert run.tensor("gradient_norm").statistics()["mean"].to_pylist() == clipped
    assert run.tensor("0.weight:gradient").statistics()["count"].to_pylist() == [128, 128]


def test_clipping_after_the_step_is_of_no_step(tmp_path: Path) -> None:
    training = Clipped(None)

    def clip(_: int) -> None:
        by_norm(training.model)

    run = record(training, tmp_path, BEFORE, clip)
    assert largest(run) == training.before
    assert norms_of(run) == []


def test_parameters_of_another_model_are_not_recorded(tmp_path: Path) -> None:
    other = small_model(3)
    other(batches(1)[0][0]).sum().backward()
    run = record(Clipped(lambda _: by_norm(other)), tmp_path, BEFORE)
    assert norms_of(run) == []


@pytest.mark.release
def test_clipping_in_compiled_code(tmp_path: Path) -> None:
    def losses(store: Path | None) -> list[float]:
        torch.compiler.reset()
        training = Clipped(torch.compile(by_norm, backend="aot_eager"))
        if store is not None:
            record(training, store, BEFORE)
        return training.losses or training.run()

    assert losses(tmp_path) == losses(None)
    torch.compiler.reset()


OLDER_PYTORCH = """
import sys
from pathlib import Path
import torch
from torch.nn.utils import clip_grad
from watchstep import CaptureConfig, Hook, open_run

inner, value = clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_
del clip_grad._clip_grads_with_norm_  # PyTorch before 2.6 has none
clip_grad.clip_grad_value_ = eval("lambda parameters, value: None", vars(clip_grad))  # nothing to exchange
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hook = Hook(Path(sys.argv[1]), config=CaptureConfig(overhead_budget=None, gradients="before_clipping"))
hook.watch(model, optimizer)
clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_ = inner, value
model(torch.ones(3, 2)).sum().backward()
largest = model.weight.grad.max().item()
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
optimizer.step()
hook.close()
run = open_run(hook.run_url)
assert [place for place in hook.health["notes"] if "clip" in place] == ["torch.nn.utils.clip_grad_value_.func"]
assert run.tensor("gradient_norm").statistics()["mean"].to_pylist() == [norm.item()]
assert run.tensor("weight:gradient").statistics()["max"].to_pylist() == [largest]
"""


@pytest.mark.ci
def test_a_pytorch_whose_clipping_is_made_otherwise(tmp_path: Path) -> None:
    run_program(tmp_path, OLDER_PYTORCH, tmp_path / "runs")


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from watchstep import CaptureConfig, Hook

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
scaler = torch.amp.GradScaler("cpu", 1024.0)
config = CaptureConfig(overhead_budget=None, gradients="before_clipping")
with Hook(sys.argv[1], run="r", config=config) as hook:
    if dist.get_rank() == 0:  # what one worker records alone must not wait for another
        hook.watch(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale(model(torch.randn(4, 8)).pow(2).mean())
        (loss * torch.inf if step == 1 else loss).backward()
        if step != 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
assert not hook.health["faults"], hook.health
assert dist.get_rank() or "gradient_norm" in hook.health["notes"], hook.health
dist.destroy_process_group()
"""


@pytest.mark.ci
def test_shards_are_measured_before_clipping_and_without_the_scale(tmp_path: Path) -> None:
    run_program(tmp_path, SHARDED, tmp_path / "runs", ranks=2)
    run = open_run(tmp_path / "runs" / "default" / "r")
    assert run.tensor("gradient_scaler:skipped").steps() == [1]
    assert run.tensor("0.weight:gradient").steps() == [0, 2, 3]
    assert "gradient_norm" not in run.collections["metrics"]
