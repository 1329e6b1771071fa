"""The gate policy beside hooks of the program on optimizers, and with two ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sdk.programs import run_program
from tests.sdk.training import skipping
from watchstep import Hook, StopTraining


def trained(
    hooks: list[Hook], optimizer: Any, model: torch.nn.Module, steps: int = 4, bad: int | None = None
) -> None:
    """Train; the batch of one step is bad. Closes the hooks."""
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.full((2, 4), math.nan if step == bad else 1.0)
        model(x).square().mean().backward()
        optimizer.step()
    for hook in hooks:
        hook.close()
        assert hook.health["faults"] == {}


@pytest.fixture
def model() -> torch.nn.Module:
    """A small model."""
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


@pytest.fixture
def handles() -> Iterator[list[Any]]:
    """Handles of hooks that are removed after the test."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        handle.remove()


def test_a_hook_that_removes_itself_runs_once(tmp_path: Path, model: torch.nn.Module) -> None:
    def once(*_: Any) -> None:
        calls.append(1)
        handle.remove()

    calls: list[int] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = optimizer.register_step_pre_hook(once)
    hook = skipping(tmp_path, model, optimizer)
    trained([hook], optimizer, model, bad=2)
    assert calls == [1]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_two_recordings_decide_about_an_optimizer_with_hooks(tmp_path: Path, model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    hooks = [Hook(tmp_path, run=name, on_nonfinite="skip") for name in "ab"]
    for hook in hooks:
        hook.watch(model, optimizer)
    trained(hooks, optimizer, model, bad=2)
    assert [hook.health["counts"]["skipped_updates"] for hook in hooks] == [1, 1]


def test_global_hooks_see_the_gradients_of_a_skipped_update(
    tmp_path: Path, model: torch.nn.Module, handles: list[Any]
) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def note(optimizer: Any, *_: Any) -> None:
        norms.append(float(optimizer.param_groups[0]["params"][0].grad.norm()))

    norms: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = skipping(tmp_path, model, optimizer)
    handles += [register_optimizer_step_pre_hook(note), register_optimizer_step_post_hook(note)]
    trained([hook], optimizer, model, bad=2)
    assert [math.isnan(norm) for norm in norms] == [False] * 4 + [True] * 2 + [False] * 2
    assert hook.health["counts"]["skipped_updates"] == 1


@pytest.mark.parametrize("policy", ["skip", "stop"])
@pytest.mark.parametrize("scope", ["global", "optimizer"])
def test_updates_by_gradients_that_a_hook_makes_finite_are_made(
    tmp_path: Path, model: torch.nn.Module, handles: list[Any], scope: str, policy: str
) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def clean(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.nan_to_num_(1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = skipping(tmp_path, model, optimizer, policy)
    register = register_optimizer_step_pre_hook if scope == "global" else optimizer.register_step_pre_hook
    handles.append(register(clean))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trained([hook], optimizer, model, steps=1, bad=0)
    for parameter, weight in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, weight - 0.1)
    assert "skipped_updates" not in hook.health["counts"]


def test_a_prevented_step_leaves_nothing_for_later(tmp_path: Path, model: torch.nn.Module) -> None:
    """A step that raises after an update by finite gradients, a restored checkpoint, and the next step."""

    class Checks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if any(not parameter.grad.isfinite().all() for parameter in self.param_groups[0]["params"]):
                raise FloatingPointError
            return result

    optimizer = Checks(model.parameters(), lr=0.1)
    hook = skipping(tmp_path, model, optimizer)
    model(torch.full((2, 4), math.nan)).square().mean().backward()
    optimizer.step()  # without the update there is nothing to raise for
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.zero_grad()
    model(torch.zeros(2, 4)).square().mean().backward()
    optimizer.step()
    hook.close()
    assert not any(parameter.any() for parameter in model.parameters())


def test_an_optimizer_that_calls_hooks_by_itself_is_stopped_but_not_skipped(
    tmp_path: Path, model: torch.nn.Module
) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    class Own(torch.optim.SGD):
        @staticmethod
        def profile_hook_step(step: Any) -> Any:
            def call(self: Any, *args: Any) -> Any:
                for hook in _global_optimizer_pre_hooks.values():
                    hook(self, (self, *args), {})
                return step(self, *args)

            return call

        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.data -= parameter.grad

    optimizer = Own(model.parameters(), lr=0.1)
    hook = skipping(tmp_path, model, optimizer, "stop", run="stop")
    with pytest.raises(StopTraining):
        trained([hook], optimizer, model, bad=1)
    hook.close()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    hook = skipping(tmp_path, model, optimizer, run="skip")
    trained([hook], optimizer, model, bad=1)
    hook.close()
    assert list(hook.health["notes"]) == ["updates"]
    assert "Own calls hooks by itself" in hook.health["notes"]["updates"]
    assert "skipped_updates" not in hook.health["counts"]
    # It is no fault of PyTorch: updates of its optimizers are still skipped.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = skipping(tmp_path, model, theirs, run="theirs")
    trained([hook], theirs, model, bad=1)
    hook.close()
    assert hook.health["counts"]["skipped_updates"] == 1


# The ranks have no common launcher, as under mpirun, so each has an attempt of its own.
PROGRAM = """
import json, math, os, sys
if child := os.fork():  # a parent of its own
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "LOCAL", "GROUP", "MASTER"))]:
    del os.environ[name]
import torch
import torch.distributed as dist
from torch import nn
from watchstep import Hook, StopTraining

STEPS = 6
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

def train(case, policy):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    hook = Hook(sys.argv[1], run=case, on_nonfinite=policy)
    hook.watch(model, optimizer)
    stopped = None
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 8) + rank).pow(2).mean().backward()
            if step == 3 and rank == 0:
                net[0].weight.grad[0, 0] = math.nan
            optimizer.step()
            if step == 1 and (case == "all-closed" or case == "closed" and rank == 1):
                hook.close()
    except StopTraining as stop:
        stopped = stop.step
    hook.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"stopped": stopped, "weights": weights.tolist(), "health": hook.health}

results = {case: train(case, policy) for case, policy in
           (("skip", "skip"), ("limit", "skip:1"), ("stop", "stop"), ("closed", "skip"), ("all-closed", "skip"))}
print(json.dumps([rank, results]), flush=True)
os._exit(0)  # PyTorch's own threads abort some exits of such programs, also without a hook
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    output = run_program(folder, PROGRAM, folder / "runs", folder / "store", ranks=2)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    return [results for _, results in sorted(lines, key=lambda line: line[0])]


@pytest.mark.ci
@pytest.mark.parametrize("case", ["skip", "limit", "closed"])
def test_both_ranks_skip(ranks: list[dict[str, Any]], case: str) -> None:
    first, second = (results[case] for results in ranks)
    assert first["weights"] == second["weights"]
    assert not any(map(math.isnan, first["weights"]))
    assert first["stopped"] is second["stopped"] is None
    assert first["health"]["counts"]["skipped_updates"] == 1
    assert first["health"]["faults"] == second["health"]["faults"] == {}


@pytest.mark.ci
def test_both_ranks_stop_before_the_update(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["stop"] for results in ranks)
    assert first["stopped"] == second["stopped"] == 3
    assert first["weights"] == second["weights"]
    assert not any(map(math.isnan, first["weights"]))


@pytest.mark.ci
def test_without_an_open_hook_nothing_is_skipped(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["all-closed"]
    assert any(map(math.isnan, first["weights"]))
    assert "skipped_updates" not in first["health"]["counts"]
