"""Programs whose objects raise or misbehave: they train with Watchstep as they train without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sdk.training import EVERY_STEP
from watchstep import Hook, open_run

X = torch.linspace(-1, 1, 64).view(8, 8)


def switched_off(loss: Tensor) -> None:
    (loss / float("inf")).backward()


def by_an_infinite_tensor(loss: Tensor) -> None:
    (loss / torch.tensor(float("inf"))).backward()


def annealed_to_nothing(loss: Tensor) -> None:
    (loss * 1e-310).backward()


def complex_quotient(loss: Tensor) -> None:
    (torch.complex(loss, loss) / (2 + 1j)).backward(torch.tensor(1 + 0j))


def from_a_nameless_place(loss: Tensor) -> None:
    exec("loss.backward()", {"__name__": None, "loss": loss})


@pytest.mark.parametrize(
    "backward",
    [switched_off, by_an_infinite_tensor, annealed_to_nothing, complex_quotient, from_a_nameless_place],
)
def test_backward_does_what_it_does(tmp_path: Path, backward: Callable[[Tensor], None]) -> None:
    def trained(*, watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook = Hook(tmp_path, config=EVERY_STEP) if watched else None
        if hook is not None:
            hook.watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(X).square().mean())
            optimizer.step()
        if hook is not None:
            hook.close()
            assert open_run(hook.run_url).tensor("weight:gradient").steps() == [0, 1, 2]
        return [parameter.detach() for parameter in model.parameters()]

    for with_hook, without in zip(trained(watched=True), trained(watched=False), strict=True):
        assert torch.equal(with_hook, without)


class Comparable(torch.optim.SGD):
    """Can be compared, and so cannot be hashed."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    __hash__ = None  # type: ignore[assignment]


def test_an_optimizer_that_cannot_be_hashed_is_recorded(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    optimizer = Comparable(model.parameters(), lr=0.1)
    other = Comparable([nn.Parameter(torch.zeros(1))], lr=0.1)
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.watch(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        other.step()
    hook.close()
    assert not hook.health["faults"]
    assert open_run(hook.run_url).tensor("weight:gradient").steps() == [0, 1, 2]


class ReadsItsClosure(torch.optim.SGD):
    """Asks the closure for what the program has put on it."""

    def step(self, closure: Any = None) -> Any:
        assert closure.__name__ == "closure"
        assert closure.scale == 2.0
        return super().step(closure)


def test_an_optimizer_gets_its_closure_with_name_and_attributes(tmp_path: Path) -> None:
    model = nn.Linear(8, 2)
    optimizer = ReadsItsClosure(model.parameters(), lr=0.1)
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.watch(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(X).square().mean()
        loss.backward()
        return loss

    closure.scale = 2.0  # type: ignore[attr-defined]
    for _ in range(3):
        optimizer.step(closure)
    hook.close()
    assert open_run(hook.run_url).tensor("weight:gradient").steps() == [0, 1, 2]


class UnspeakableError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise IndexError("no text")


def test_an_exception_without_a_text_passes_and_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UnspeakableError), Hook(tmp_path) as hook:  # noqa: PT012 - the hook's own end is tested
        hook.log(loss=1.0)
        raise UnspeakableError
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.reason) == ("failed", "UnspeakableError")


def test_a_sum_divided_by_the_batch_is_its_mean(tmp_path: Path) -> None:
    """Four micro-batches of four examples: the division is not one by the number of micro-batches."""
    model, losses = nn.Linear(8, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = Hook(tmp_path, config=EVERY_STEP)
    hook.watch(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        for micro in X[:, :].repeat(2, 1).view(4, 4, 8):
            loss = model(micro).square().sum() / 4
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
    hook.close()
    recorded = open_run(hook.run_url).tensor("loss").statistics()["mean"].to_pylist()
    assert max(recorded) <= max(losses) * 1.0001
