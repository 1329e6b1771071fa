"""Gradients that a program does not clear, and all ways in which programs clear them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP, batches, recorded, small_model, watching, with_sgd
from watchstep import Cadence, CaptureConfig

STEPS = 12
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def stale_steps(
    store: Path, step: Step, *, config: CaptureConfig = EVERY_STEP, steps: int = STEPS, fused: bool = False
) -> dict[int, float]:
    """The steps with a stale-gradients metric, and its value."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    hook = watching(store, model, optimizer, config=config)
    for x, y in batches(steps):
        step(model, optimizer, x, y)
    run = recorded(hook)
    if "gradients:stale" not in run.tensors():
        return {}
    rows = run.tensor("gradients:stale").statistics().to_pydict()
    return dict(zip(rows["step"], rows["mean"], strict=True))


def never(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    optimizer.step()


def never_but_clipped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def never_with_micro_batches(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    for part, labels in zip(x.split(8), y.split(8), strict=True):
        loss_of(model, part, labels).backward()
    optimizer.step()


@pytest.mark.parametrize("step", [never, never_but_clipped, never_with_micro_batches])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_not_cleared(step: Step, fused: bool, tmp_path: Path) -> None:
    assert stale_steps(tmp_path, step, fused=fused) == dict.fromkeys(range(1, STEPS), 1.0)


def before(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    never(model, optimizer, x, y)


def in_place(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    never_but_clipped(model, optimizer, x, y)


def after(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    never(model, optimizer, x, y)
    optimizer.zero_grad(set_to_none=False)


def by_the_model(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss = loss_of(model, x, y)
    model.zero_grad()
    loss.backward()
    optimizer.step()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    never(model, optimizer, x, y)
    for parameter in model.parameters():
        parameter.grad = None


def in_place_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    never(model, optimizer, x, y)


def micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for part, labels in zip(x.split(8), y.split(8), strict=True):
        (loss_of(model, part, labels) / 4).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def of_one_loss_and_then_two(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    """The first pass is from several tensors at once."""
    optimizer.zero_grad()
    torch.autograd.backward([loss_of(model, x[:8], y[:8]), loss_of(model, x[8:], y[8:])])
    loss_of(model, x, y).backward()
    optimizer.step()


def given_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Gradients are replaced while another model runs a pass."""
    nn.Linear(8, 1)(x).sum().backward()
    found = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    optimizer.step()


def with_a_scaler(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss_of(model, x, y) * (float("inf") if x[0, 0] > 0.5 else 1.0)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def checkpointed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    from torch.utils.checkpoint import checkpoint

    optimizer.zero_grad(set_to_none=False)
    output = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    nn.functional.cross_entropy(output, y).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "step",
    [
        before,
        in_place,
        after,
        by_the_model,
        by_hand,
        in_place_by_hand,
        micro_batches,
        of_one_loss_and_then_two,
        given_by_hand,
        with_a_scaler,
        checkpointed,
    ],
)
def test_ways_to_clear_them(step: Step, tmp_path: Path) -> None:
    assert stale_steps(tmp_path, step) == {}


def test_a_program_that_forgets_them_for_a_while(tmp_path: Path) -> None:
    numbers = iter(range(STEPS))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        (never if 4 <= next(numbers) < 7 else before)(model, optimizer, x, y)

    assert stale_steps(tmp_path, step) == {4: 1.0, 5: 1.0, 6: 1.0, 7: 0.0}


def test_a_program_that_begins_to_forget_them_late_is_still_seen(tmp_path: Path) -> None:
    numbers = iter(range(200))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        (never if next(numbers) >= 150 else before)(model, optimizer, x, y)

    found = stale_steps(tmp_path, step, config=CaptureConfig(), steps=200)
    assert set(found.values()) == {1.0}
    assert 150 <= min(found) <= 154


def test_the_metric_can_be_omitted(tmp_path: Path) -> None:
    assert stale_steps(tmp_path, never, config=CaptureConfig(probes=("channels",))) == {}
    assert stale_steps(tmp_path, never, config=CaptureConfig(collections={})) == {}


def test_a_closure_that_clears(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    hook = watching(tmp_path, model, optimizer)
    for x, y in batches(4):

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, x, y)
            loss.backward()
            return loss.item()

        optimizer.step(closure)
    assert "gradients:stale" not in recorded(hook).tensors()


class Game(nn.Module):
    """A judge of what a maker makes; each gets gradients of the other's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)


@pytest.mark.parametrize("clears", [True, False])
def test_two_optimizers_of_a_game(clears: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    game = Game()
    makes = torch.optim.SGD(game.maker.parameters(), lr=1e-3)
    judges = torch.optim.SGD(game.judge.parameters(), lr=1e-3)
    hook = watching(tmp_path, game, makes)
    for x, _ in batches(6):
        makes.zero_grad(set_to_none=False)
        game.judge(game.maker(x)).sum().backward()
        makes.step()
        if clears:
            judges.zero_grad(set_to_none=False)
        (game.judge(x) - game.judge(game.maker(x))).sum().backward()
        judges.step()
    names = [name for name in recorded(hook).tensors() if "stale" in name]
    assert names == ([] if clears else ["gradients:stale_2"])


@pytest.mark.release
def test_a_compiled_model(tmp_path: Path) -> None:
    torch.compiler.reset()
    inner = small_model()
    optimizer = torch.optim.SGD(inner.parameters(), lr=1e-3)
    hook = watching(tmp_path, inner, optimizer)
    model: nn.Module = torch.compile(inner, backend="aot_eager")  # type: ignore[assignment]
    for x, y in batches(3):
        in_place(model, optimizer, x, y)
    for x, y in batches(3):
        never(model, optimizer, x, y)
    rows = recorded(hook).tensor("gradients:stale").statistics().to_pydict()
    torch.compiler.reset()
    assert rows["step"] == [3, 4, 5]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU HERE: that nothing waits for it is not proven by this run"
)
@pytest.mark.parametrize("clears", [True, False])
def test_on_a_device_nothing_waits(clears: bool, tmp_path: Path) -> None:
    model, optimizer = with_sgd(small_model().cuda(), 1e-3)
    hook = watching(tmp_path, model, optimizer, config=CaptureConfig({"metrics": Cadence()}))
    given = [(x.cuda(), y.cuda()) for x, y in batches(STEPS)]
    for step, (x, y) in enumerate(given):
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        if clears:
            optimizer.zero_grad(set_to_none=False)
        loss_of(model, x, y).backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    run = recorded(hook)
    if clears:
        assert "gradients:stale" not in run.tensors()
        return
    rows = run.tensor("gradients:stale").statistics().to_pydict()
    assert dict(zip(rows["step"], rows["mean"], strict=True)) == dict.fromkeys(range(1, STEPS), 1.0)
