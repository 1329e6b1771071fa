"""Losses found at ``backward()``, where the program does not log them.

No hook of PyTorch sees ``backward()``, and a `TorchFunctionMode` costs 1.7 times the CPU; so
`torch.autograd.backward`, which ``Tensor.backward`` calls, is wrapped once for the process. Each place in the program
that calls it is one loss: the first is named ``loss``, the next ``loss_2``. Under a gradient scaler the loss before
scaling is taken. Losses found here are marked derived: where the program divides its loss for accumulation, and
`watchstep.pytorch.losses` does not know by how much, they are as the program divided them.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from watchstep.pytorch.losses import divisor_of, loss_function
from watchstep.pytorch.observable import observable

Place = tuple[str, int]
_UNSCALED = "_watchstep_unscaled"
_FUNCTION = "_watchstep_function"
_DIVISOR = "_watchstep_divisor"
_MOST_PLACES = 16
_PASSED_OVER = {"torch", "accelerate"}
"""Packages that call ``backward()`` for a program: who calls them is the place."""

_installed: list[bool] = []

_LIGHTNING = {"lightning", "pytorch_lightning"}


@dataclass(frozen=True)
class FoundLoss:
    """A loss as ``backward()`` met it.

    Attributes:
        place: file and line of the program that called ``backward()``.
        value: before scaling, off the graph.
        function: the function that computed it, as `loss_function` names it.
        divisor: by what the program divided it last; 1 where it did not.
    """

    place: Place
    value: Tensor
    function: str = ""
    divisor: float = 1.0


class LossListener(Protocol):
    """Is told of losses, before their gradients are computed."""

    def backward_begins(self) -> None:
        """A backward pass is about to begin, whatever from."""
        ...

    def found(self, loss: FoundLoss) -> None:
        """A loss of the step that is under way."""
        ...

    def failed(self, error: Exception) -> None:
        """Looking for a loss failed."""
        ...


_listeners: list[weakref.ref[LossListener]] = []


def listen(listener: LossListener) -> None:
    """Tell a listener of losses for as long as it lives."""
    install()
    _listeners.append(weakref.ref(listener))


def forget(listener: LossListener) -> None:
    """Tell it no more."""
    _listeners[:] = [held for held in _listeners if held() not in {None, listener}]


def install() -> None:
    """Wrap `torch.autograd.backward` and the gradient scaler, once."""
    if _installed:
        return
    _installed.append(True)
    torch.autograd.backward = _telling(torch.autograd.backward)
    scaler = torch.amp.GradScaler
    scaler.scale = _remembering(scaler.scale)  # type: ignore[method-assign]


def _telling(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _listeners and observable():
                for held in _listeners:
                    if (listener := held()) is not None:
                        listener.backward_begins()
                if isinstance(tensors, Tensor) and tensors.numel() == 1:
                    _tell(tensors, sys._getframe(1))  # noqa: SLF001 - the documented way to a caller's frame
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            _report(error)
        return backward(tensors, *args, **kwargs)

    return call


def _remembering(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def call(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if torch.compiler.is_compiling():
            return scaled
        try:
            if isinstance(outputs, Tensor) and isinstance(scaled, Tensor) and scaled is not outputs:
                setattr(scaled, _UNSCALED, outputs.detach())
                setattr(scaled, _FUNCTION, loss_function(outputs))
                setattr(scaled, _DIVISOR, divisor_of(outputs))
        except Exception as error:  # noqa: BLE001 - as above
            _report(error)
        return scaled

    return call


def _report(error: Exception) -> None:
    """Count a fault of this module in the health of all that listen."""
    for held in _listeners:
        if (listener := held()) is not None:
            listener.failed(error)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _tell(loss: Tensor, frame: FrameType) -> None:
    value = getattr(loss, _UNSCALED, None)
    if value is None:
        found = FoundLoss(_place_of(frame), loss.detach(), loss_function(loss), divisor_of(loss))
    else:
        function, divisor = getattr(loss, _FUNCTION, ""), getattr(loss, _DIVISOR, 1.0)
        found = FoundLoss(_place_of(frame), value, function, divisor)
    for held in _listeners:
        if (listener := held()) is not None:
            listener.found(found)


def _place_of(frame: FrameType | None) -> Place:
    """The place outside PyTorch and Accelerate from which ``backward()`` is called."""
    while frame is not None and _package_of(frame) in _PASSED_OVER:
        frame = frame.f_back
    frame = _beyond_lightning(frame)
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def _beyond_lightning(frame: FrameType | None) -> FrameType | None:
    """Who called a LightningModule's ``manual_backward``; the same frame where nobody did."""
    above = frame
    while above is not None and _package_of(above) in _LIGHTNING:
        if above.f_code.co_name == "manual_backward":
            return above.f_back
        above = above.f_back
    return frame


class LossNames:
    """Names for places: the first is ``loss``, the next ``loss_2``, up to sixteen. One for all models of a hook."""

    def __init__(self) -> None:
        self._names: dict[Place, str] = {}
        self._last: weakref.ref[FoundLoss] | None = None

    def is_new(self, loss: FoundLoss) -> bool:
        """Whether this loss was not asked about before: each watched model is told of it."""
        if self._last is not None and self._last() is loss:
            return False
        self._last = weakref.ref(loss)
        return True

    def of(self, place: Place) -> str | None:
        """The name of the loss at a place; None past the sixteenth."""
        if place not in self._names:
            if len(self._names) >= _MOST_PLACES:
                return None
            self._names[place] = f"loss_{len(self._names) + 1}" if self._names else "loss"
        return self._names[place]


class SummedLosses:
    """Adds up what the backward passes of one step start from, where a program divides its loss among them."""

    def __init__(self) -> None:
        self._step = -1
        self._sums: dict[str, Tensor] = {}

    def of(self, step: int, name: str, value: Tensor) -> Tensor:
        """The sum so far, with one part more. Nothing is waited for."""
        if step != self._step:
            self._step, self._sums = step, {}
        held = self._sums.get(name)
        self._sums[name] = value if held is None else held + value
        return self._sums[name]
