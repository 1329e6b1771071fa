"""Which forward passes count as training: not those without gradients, of other threads, or of a backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.sdk.training import (
    Composed,
    Training,
    batches,
    recorded,
    small_model,
    watched_training,
    watching,
    with_sgd,
)
from watchstep import Cadence, CaptureConfig, Collection, Hook

BATCH = 32 * 16  # elements of the first layer's output in one pass
X = torch.ones(4, 8)


def counts(hook: Hook, name: str = "0:output", mode: str = "train") -> list[int]:
    table = recorded(hook).tensor(name).statistics()
    return [
        row["count"]
        for row in table.to_pylist()
        if row["mode"] == mode  # of each step, in their order
    ]


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_is_no_training_pass(
    tmp_path: Path, disabled: Callable[[], AbstractContextManager[None]]
) -> None:
    hook, training = watched_training(tmp_path)

    def measure(_step: int, _loss: Tensor) -> None:
        with disabled():
            training.model(X)
            training.model[0](X)  # type: ignore[index]

    training.run(3, measure)
    assert counts(hook) == [BATCH] * 3


def test_a_pass_without_gradients_between_forward_and_backward(tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model())
    hook = watching(tmp_path, model, optimizer)
    average = {name: 0.5 * tensor.detach() for name, tensor in model.named_parameters()}
    for x, y in batches(3):
        loss = nn.functional.cross_entropy(model(x), y)
        with torch.no_grad():
            torch.func.functional_call(model, average, (x,))
        loss.backward()
        optimizer.step()
    assert counts(hook) == [BATCH] * 3


def test_such_a_pass_is_recorded_in_the_mode_that_the_program_names(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)

    def measure(_step: int, _loss: Tensor) -> None:
        hook.mode = "eval"
        with torch.no_grad():
            training.model(X)
        hook.mode = "train"

    training.run(2, measure)
    table = recorded(hook).tensor("0:output").statistics().to_pylist()
    assert [(row["mode"], row["count"]) for row in table if row["mode"] == "eval"] == [("eval", 4 * 16)] * 2


@pytest.mark.parametrize("gradients", [True, False])
def test_another_thread_that_serves_the_model_is_not_recorded(tmp_path: Path, gradients: bool) -> None:
    hook, training = watched_training(tmp_path)

    def serve() -> None:
        with torch.set_grad_enabled(gradients):
            training.model(X)

    def each(_step: int, _loss: Tensor) -> None:
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()

    losses = training.run(4, each)
    run = recorded(hook)
    assert run.steps() == [0, 1, 2, 3]
    assert run.tensor("loss").statistics()["mean"].to_pylist() == losses
    assert run.tensor("0:output").statistics()["count"].to_pylist() == [BATCH] * 4


def test_a_training_that_moves_to_another_thread_is_recorded_there(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)
    for _ in range(2):
        thread = threading.Thread(target=training.run, args=(3,))
        thread.start()
        thread.join()
    assert counts(hook) == [BATCH] * 6


def without_gradients(module: Any, x: Tensor) -> Any:
    """As a program uses a frozen backbone."""
    with torch.no_grad():
        features = module.backbone(x)
    return module.head(features)


def test_frozen_parts_of_a_training_pass_are_recorded(tmp_path: Path) -> None:
    model = Composed(without_gradients, backbone=nn.Linear(8, 16), head=nn.Linear(16, 2))
    hook, training = watched_training(tmp_path, Training(model))
    training.run(3)
    assert counts(hook, "backbone:output") == [BATCH] * 3


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_passes_count_once(tmp_path: Path, whole: bool, reentrant: bool) -> None:
    def forward(module: Any, x: Tensor) -> Any:
        return module.inner(x) if whole else checkpoint(module.inner, x, use_reentrant=reentrant)

    model, optimizer = with_sgd(Composed(forward, inner=small_model()))
    hook = watching(tmp_path, model, optimizer)
    for _ in range(2):
        x = torch.ones(4, 8, requires_grad=True)
        scores = checkpoint(model, x, use_reentrant=reentrant) if whole else model(x)
        scores.sum().backward()
        optimizer.step()
    assert counts(hook, "inner.0:output") == [4 * 16] * 2


def test_after_a_pass_that_raises_others_are_distinguished_as_before(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path)

    def fail(_step: int, _loss: Tensor) -> None:
        with pytest.raises(RuntimeError, match="shapes"):
            training.model(torch.ones(4, 9))
        with torch.no_grad():
            training.model[0](X)  # type: ignore[index]

    training.run(2, fail)
    assert counts(hook) == [BATCH] * 2


def by_budget(**options: Any) -> CaptureConfig:
    """Collections of activations and inputs that the budget measures at each step, whatever it costs."""
    chosen = {
        name: Collection(cadence=Cadence(**{"every": None, **options})) for name in ("activations", "inputs")
    }
    return CaptureConfig(collections=chosen, overhead_budget=0.5, allowance_seconds=10.0)


def accumulate(hook: Hook, model: Any, optimizer: Any, bad: Callable[[int, int], bool]) -> None:
    """Three micro-batches in each of four steps; the last one calls a module that the others do not."""
    for step in range(4):
        for number in range(3):
            x = torch.ones(32, 8)
            if bad(step, number):
                x[0, 0] = torch.nan
            hidden = model.first(x)
            (model.second(hidden) if number == 2 else hidden).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.close()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4), nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("config", "passes"),
    [(by_budget(), 1), (by_budget(every=1), 3), (by_budget(steps=(0, 1, 2, 3)), 3)],
    ids=["budget", "cadence", "steps"],
)
def test_the_budget_measures_a_module_in_the_first_pass_of_a_step_that_calls_it(
    tmp_path: Path, config: CaptureConfig, passes: int
) -> None:
    model, optimizer = with_sgd(Branching())
    hook = watching(tmp_path, model, optimizer, config=config)
    accumulate(hook, model, optimizer, lambda *_: False)
    assert counts(hook, "first:output") == [passes * 32 * 4] * 4
    assert counts(hook, "second:output") == [32 * 2] * 4


def test_all_passes_that_follow_a_bad_one_are_measured(tmp_path: Path) -> None:
    model, optimizer = with_sgd(Branching())
    hook = watching(tmp_path, model, optimizer, config=by_budget())
    accumulate(hook, model, optimizer, lambda step, number: (step, number) == (1, 1))
    first = recorded(hook).tensor("first:output").statistics().to_pylist()
    assert [row["nan"] > 0 for row in first[:2]] == [False, True]
    assert first[1]["count"] == 3 * 32 * 4
