"""Losses: those that a program logs, and those that are found at ``backward()``.

Losses: the function that computed a loss, division by the number of micro-batches, and scalars that are tensors.

autograd's graph tells which function computed a loss. If the last operation before ``backward()`` divides by a plain
number, and as many backward passes make up the step, losses are recorded undivided. A division by the batch size does not
match the number of passes. Scalars are recorded without reading them on the training thread.

Losses found at ``backward()``, where the program does not log them.

No hook of PyTorch sees ``backward()``, and a `TorchFunctionMode` costs 1.7 times the CPU; so
`torch.autograd.backward`, which ``Tensor.backward`` calls, is wrapped once for the process. Each place in the program
that calls it is one loss: the first is named ``loss``, the next ``loss_2``. Under a gradient scaler the loss before
scaling is taken. Losses found here are marked derived: where the program divides its loss for accumulation, and
`watchstep.pytorch.losses` does not know by how much, they are as the program divided them.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from watchstep.capture.recorder import Recorder
from watchstep.format.tensors import Mode
from watchstep.kernels.measurement import Measurement
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.observable import observable

_DIVIDES, _MULTIPLIES = "DivBackward0", "MulBackward0"
_SUMS = "SumBackward0"
"""A sum over the examples of a batch becomes a mean by the division: as many micro-batches as examples are a coincidence."""

_MOST = 1e6
"""Micro-batches that a step has at most. What is divided by infinity, or by a number without an inverse, is no mean of them."""


def divisor_of(loss: Tensor) -> float:
    """By what whole number a loss was divided last, also as a factor that is one over it; 1.0 where it was not, or nobody knows.

    The number is read where PyTorch keeps it for the backward pass, in host memory. Hooks on saved tensors, which may compute, are not called.
    """
    node: Any = loss.grad_fn
    name = node.name() if node is not None else ""
    if name not in {_DIVIDES, _MULTIPLIES}:
        return 1.0
    before = node.next_functions[0][0] if node.next_functions else None
    if before is not None and before.name() == _SUMS:
        return 1.0
    saved = getattr(node, "_raw_saved_other", None)
    if saved is None or getattr(saved, "unpack_hook", None) is not None:
        return 1.0
    number = getattr(saved, "data", None)
    if not isinstance(number, Tensor) or number.dim() or number.device.type != "cpu" or number.requires_grad:
        return 1.0
    if number.is_complex():
        return 1.0
    value = float(number.item())
    if name == _MULTIPLIES:
        value = 1 / value if value > 1 / _MOST else 1.0
    return float(round(value)) if 2 <= value <= _MOST and abs(value - round(value)) < 1e-6 * value else 1.0


class AccumulatedLosses:
    """Multiplies the losses of a step by their divisor, once that is known to be the number of its micro-batches.

    It is known at the end of the first step whose losses were all divided by their number. From then on a step with fewer, as the last of an
    epoch, is multiplied as well.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step = -1
        self._divisors: dict[str, list[float]] = {}
        self._known: dict[str, float] = {}

    def found(self, name: str, divisor: float) -> None:
        """A loss of the step under way is recorded as it was divided."""
        if self._recorder.step != self._step:
            self._step = self._recorder.step
            self._divisors.clear()
        if divisor > 1 or self._divisors:
            self._divisors.setdefault(name, []).append(divisor)

    def undivide(self) -> None:
        """The losses of the step have all been found: an update comes."""
        if not self._divisors or self._recorder.step != self._step:
            return
        for name, divisors in self._divisors.items():
            divisor = divisors[0]
            if divisor > 1 and all(number == divisor for number in divisors):
                if len(divisors) == divisor:
                    self._known[name] = divisor
                if self._known.get(name) == divisor:
                    self._recorder.undivide(name, divisor)
        self._divisors.clear()


_MOST_NODES = 8
_KEEPS_THE_VALUE = frozenset(
    {
        "AliasBackward",
        "CloneBackward",
        "MeanBackward",
        "ReshapeAliasBackward",
        "SqueezeBackward",
        "ToCopyBackward",
        "UnsqueezeBackward",
        "ViewBackward",
    }
)
"""Operations that leave a loss as it is, or take the mean of the examples'."""
_MEAN, _SUM = 1, 2  # `torch.nn._reduction.get_enum`
_NUMBERED = re.compile(r"\d+$")


def loss_function(loss: Tensor) -> str:
    """The function that a loss is the plain value of, e.g. ``NllLoss``, ``MseLoss``, ``BinaryCrossEntropyWithLogits``.

    Args:
        loss: one element, on its graph.

    Returns:
        The name of autograd's node without ``Backward0``; empty where the loss is no longer on its graph, or is a sum, a
        product or anything else of a function's value.
    """
    node: Any = loss.grad_fn
    if node is None:
        return ""
    for _ in range(_MOST_NODES):
        name = _operation(type(node).__name__)
        if name not in _KEEPS_THE_VALUE:
            kind = name.removesuffix("Backward")
            is_plain = getattr(node, "_saved_reduction", _MEAN) != _SUM
            return kind if is_plain and ("Loss" in kind or "CrossEntropy" in kind) else ""
        node = node.next_functions[0][0]
    return ""


@functools.lru_cache(maxsize=256)
def _operation(node: str) -> str:
    """The name of a node's class without its number; cached, because it is needed at each ``backward()``."""
    return _NUMBERED.sub("", node)


@dataclass(frozen=True)
class TensorScalar:
    """A tensor of one element in a device's memory."""

    tensor: Tensor

    def measure(self) -> Measurement:
        """Start to measure it."""
        return TorchKernel().measure([self.tensor])

    def copy(self) -> TensorScalar:
        """The number as it is now."""
        return TensorScalar(self.tensor.detach().reshape(()).clone())

    def measure_all(self, scalars: Sequence[TensorScalar]) -> Measurement:
        """Start to measure several as one tensor."""
        with torch.no_grad():
            return TorchKernel().measure([torch.stack([scalar.tensor for scalar in scalars])])


def record_tensor(
    recorder: Recorder, name: str, value: Tensor, mode: Mode, *, derived: bool = False, replaces: bool = False
) -> None:
    """Record a tensor of one element; where it is still on its graph, the function that computed it is recorded too.

    Raises:
        ValueError: it has another number of elements.
    """
    if value.numel() != 1:
        raise ValueError(f"a tensor of shape {tuple(value.shape)}: log one number, e.g. its mean")
    recorder.note_function(name, mode, loss_function(value))
    if value.device.type == "cpu":
        recorder.scalar(name, value.detach().item(), mode, derived=derived, replaces=replaces)
        return
    recorder.device_scalar(name, TensorScalar(value), mode, derived=derived, replaces=replaces)


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
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]


def install() -> None:
    """Wrap `torch.autograd.backward` and the gradient scaler, once."""
    if _installed:
        return
    _installed.append(True)
    torch.autograd.backward = _reporting(torch.autograd.backward)
    scaler = torch.amp.GradScaler
    scaler.scale = _remembering(scaler.scale)  # type: ignore[method-assign]


def _reporting(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if _listeners and observable():
                for reference in _listeners:
                    if (listener := reference()) is not None:
                        listener.backward_begins()
                if isinstance(tensors, Tensor) and tensors.numel() == 1:
                    _notify(tensors, sys._getframe(1))  # noqa: SLF001 - the documented way to a caller's frame
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
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener.failed(error)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _notify(loss: Tensor, frame: FrameType) -> None:
    value = getattr(loss, _UNSCALED, None)
    if value is None:
        observed = FoundLoss(_place_of(frame), loss.detach(), loss_function(loss), divisor_of(loss))
    else:
        function, divisor = getattr(loss, _FUNCTION, ""), getattr(loss, _DIVISOR, 1.0)
        observed = FoundLoss(_place_of(frame), value, function, divisor)
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener.found(observed)


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
        total = self._sums.get(name)
        self._sums[name] = value if total is None else total + value
        return self._sums[name]
