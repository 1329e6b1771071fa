"""Losses that a program logs, and losses that are observed at ``backward()``.

The autograd graph shows which function computed a loss. If the last operation before ``backward()`` divides by a plain
number that equals the number of backward passes of the step, losses are recorded undivided. A division by the batch size does
not match the number of passes. Scalars are recorded without reading them on the training thread.

PyTorch has no hook for ``backward()``, and a `TorchFunctionMode` costs 1.7 times the CPU. So `torch.autograd.backward`, which
``Tensor.backward`` calls, is wrapped once per process. Each line of the program that calls it is one loss: the first is named
``loss``, the next ``loss_2``. With a gradient scaler, the loss before scaling is recorded. These losses are marked as derived:
if the program divides its loss for accumulation by a number that is not known here, they are recorded as divided.
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

from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.record import scalar_info
from watchstep.capture.steps.recorder import Recorder
from watchstep.format.tensors import OF_PROBABILITIES, Mode
from watchstep.kernels.measurement import Measurement
from watchstep.pytorch import internals
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.observable import observable
from watchstep.pytorch.tensors import full_tensors

_DIVIDES, _MULTIPLIES = "DivBackward0", "MulBackward0"
_SUMS = "SumBackward0"
"""Dividing a sum over the examples of a batch makes it a mean: an equal number of micro-batches is a coincidence."""

_MAX_DIVISOR = 1e6
"""Maximum number of micro-batches of a step. A larger divisor, e.g. infinity, is not a number of micro-batches."""


def divisor_of(loss: Tensor) -> float:
    """Return the whole number by which a loss was divided last, also as a factor of its reciprocal; 1.0 if there is none or it is unknown.

    The number is read from the tensor that PyTorch saves for the backward pass, in host memory. Hooks on saved tensors, which may
    compute, are not called.
    """
    node: Any = loss.grad_fn
    name = type(node).__name__
    if name not in {_DIVIDES, _MULTIPLIES}:
        return 1.0
    previous = node.next_functions[0][0] if node.next_functions else None
    if type(previous).__name__ == _SUMS:
        return 1.0
    saved = internals.saved_other(node)
    if saved is None or internals.is_packed(saved):
        return 1.0
    number = getattr(saved, "data", None)
    if not isinstance(number, Tensor) or number.dim() or number.device.type != "cpu" or number.requires_grad:
        return 1.0
    if number.is_complex() or internals.undispatched.is_missing:
        return 1.0
    with (
        internals.undispatched.value()
    ):  # a mode of the program or of a tracer need not observe this, or fails
        value = float(number.item())
    if name == _MULTIPLIES:
        value = 1 / value if value > 1 / _MAX_DIVISOR else 1.0
    return (
        float(round(value))
        if 2 <= value <= _MAX_DIVISOR and abs(value - round(value)) < 1e-6 * value
        else 1.0
    )


class AccumulatedLosses:
    """Multiplies the losses of a step by their divisor once it is confirmed as the number of micro-batches.

    The first step in which all losses were divided by their number confirms it. After that, a step with fewer micro-batches is also
    multiplied, e.g. the last one of an epoch.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step = -1
        self._divisors: dict[str, list[float]] = {}
        self._confirmed: dict[str, float] = {}

    def found(self, name: str, divisor: float) -> None:
        """Note the divisor of a loss of the current step."""
        if self._recorder.step != self._step:
            self._step = self._recorder.step
            self._divisors.clear()
        if divisor > 1 or self._divisors:
            self._divisors.setdefault(name, []).append(divisor)

    def undivide(self) -> None:
        """Undivide the losses of the current step. Called before the update, when all of them have been observed."""
        if not self._divisors or self._recorder.step != self._step:
            return
        for name, divisors in self._divisors.items():
            divisor = divisors[0]
            if divisor > 1 and all(number == divisor for number in divisors):
                if len(divisors) == divisor:
                    self._confirmed[name] = divisor
                if self._confirmed.get(name) == divisor:
                    self._recorder.undivide(name, divisor)
        self._divisors.clear()


_MAX_NODES = 8
_VALUE_PRESERVING = frozenset(
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
"""Operations that do not change a loss, or average it over examples."""
_NEGATES = "NegBackward"
_OF_LOGARITHMS = frozenset({"NllLoss", "NllLoss2D"})
_OF_LOGITS = frozenset({"BinaryCrossEntropyWithLogits"})
_NONE, _MEAN = 0, 1  # `torch.nn._reduction.get_enum`
_NUMBERED = re.compile(r"\d+$")


def loss_function(loss: Tensor) -> str:
    """Return the function that computed a loss, e.g. ``NllLoss``, ``MseLoss``, ``BinaryCrossEntropyWithLogits``.

    Args:
        loss: A tensor of one element with its graph.

    Returns:
        The name of autograd's node without ``Backward0``, after ``-`` if the loss is its negative, and before `OF_PROBABILITIES` if the function applies
        softmax or sigmoid, or expects logarithms, and its input has been through softmax or sigmoid; empty if the loss has no graph, or is not the plain
        value of a loss function, e.g. a sum or a product.
    """
    node: Any = loss.grad_fn
    sign = ""
    for _ in range(_MAX_NODES):
        if node is None:
            return ""
        name = _operation(type(node).__name__)
        if name == _NEGATES:
            sign = "" if sign else "-"
        elif name not in _VALUE_PRESERVING:
            kind = name.removesuffix("Backward")
            is_plain = internals.reduction_of(node, name) in {None, _NONE, _MEAN}
            if not is_plain or not ("Loss" in kind or "CrossEntropy" in kind):
                return ""
            return f"{sign}{kind}{OF_PROBABILITIES if _reads_probabilities(node, kind) else ''}"
        node = _first_input(node)
    return ""


def _reads_probabilities(node: Any, kind: str) -> bool:
    """Return whether the input of a loss function was the result of softmax or sigmoid, though the function applies it again, or expects logarithms."""
    source = _first_input(node)
    if kind in _OF_LOGARITHMS:
        if _operation(type(source).__name__) == "LogSoftmaxBackward":
            source = _first_input(source)
        return _operation(type(source).__name__) == "SoftmaxBackward"
    return kind in _OF_LOGITS and _operation(type(source).__name__) == "SigmoidBackward"


def _first_input(node: Any) -> Any:
    return node.next_functions[0][0] if node is not None and node.next_functions else None


@functools.lru_cache(maxsize=256)
def _operation(node: str) -> str:
    """Return the name of a node's class without its number. Cached, because each ``backward()`` needs it."""
    return _NUMBERED.sub("", node)


@dataclass(frozen=True)
class TensorScalar:
    """A tensor of one element in device memory."""

    tensor: Tensor

    def measure(self) -> Measurement:
        """Start to measure the scalar."""
        return TorchKernel().measure([self.tensor])

    def copy(self) -> TensorScalar:
        """Return a copy of the current value."""
        return TensorScalar(self.tensor.detach().reshape(()).clone())

    def measure_all(self, scalars: Sequence[TensorScalar]) -> Measurement:
        """Start to measure several scalars as one tensor."""
        with torch.no_grad():
            return TorchKernel().measure([torch.stack([scalar.tensor for scalar in scalars])])


def record_tensor(  # noqa: PLR0913 - the arguments of `Recorder.scalar`
    recorder: Recorder,
    name: str,
    value: Tensor,
    mode: Mode,
    *,
    derived: bool = False,
    replaces: bool = False,
    weight: int = 1,
) -> None:
    """Record a tensor of one element, and the function that computed it if the tensor still has its graph.

    Raises:
        ValueError: The tensor has another number of elements.
    """
    if value.numel() != 1:
        raise ValueError(f"a tensor of shape {tuple(value.shape)}: log one number, e.g. its mean")
    recorder.note_function(name, mode, loss_function(value))
    if value.device.type == "cpu":
        number = value.detach().item()
        recorder.scalar(name, number, mode, derived=derived, replaces=replaces, weight=weight)
        return
    save_tensor(recorder, name, value, mode, derived=derived, replaces=replaces)
    recorder.device_scalar(name, TensorScalar(value), mode, derived=derived, replaces=replaces, weight=weight)


def save_tensor(
    recorder: Recorder, name: str, value: Tensor, mode: Mode, *, derived: bool, replaces: bool
) -> None:
    """Save a tensor of one element in full, if its collection is due, and record no statistics of it."""
    if value.device.type == "cpu":
        recorder.save_number(name, value.detach().item(), mode, derived=derived, replaces=replaces)
    elif recorder.full_tensors is not None and recorder.full_tensors.active:
        info = scalar_info(name)
        replaces = replaces or info.role == "metric"
        full_tensors.save_number(
            recorder.full_tensors, recorder.step, mode, info, value, derived=derived, replaces=replaces
        )


Place = tuple[str, int]
_UNSCALED = "_watchstep_unscaled"
_FUNCTION = "_watchstep_function"
_DIVISOR = "_watchstep_divisor"
_MAX_PLACES = 16
_WRAPPERS = {"torch", "accelerate"}
"""Packages that call ``backward()`` for a program. Their caller is the place of the loss."""

_installed: list[bool] = []

_LIGHTNING = {"lightning", "pytorch_lightning"}


@dataclass(frozen=True)
class BackwardLoss:
    """A loss that was passed to ``backward()``.

    Attributes:
        place: File and line of the program that called ``backward()``.
        value: The value before scaling, detached from the graph.
        number: The value; None if it is on a device, which is not waited for.
        function: Name of the function that computed it, as returned by `loss_function`.
        divisor: Number by which the program divided it last; 1 if it did not.
        root: Backward function of the loss, while its backward pass has not begun. Whoever keeps the loss keeps the graph.
    """

    place: Place
    value: Tensor
    number: complex | None
    function: str = ""
    divisor: float = 1.0
    root: Any = None


class LossListener(Protocol):
    """Receives losses before their gradients are computed."""

    def backward_begins(self) -> None:
        """Handle the start of a backward pass from any tensor."""
        ...

    def found(self, loss: BackwardLoss) -> None:
        """Handle a loss of the current step."""
        ...

    def failed(self, error: Exception) -> None:
        """Handle a failure of the observation."""
        ...


_listeners: list[weakref.ref[LossListener]] = []


def listen(listener: LossListener) -> None:
    """Register a listener. Only a weak reference to it is kept."""
    install()
    _listeners.append(weakref.ref(listener))


def forget(listener: LossListener) -> None:
    """Unregister a listener."""
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]


def install() -> None:
    """Wrap `torch.autograd.backward` and the gradient scaler, once."""
    if _installed:
        return
    _installed.append(True)
    torch.autograd.backward = _reporting(torch.autograd.backward)
    scaler = torch.amp.GradScaler
    scaler.scale = _with_unscaled(scaler.scale)  # type: ignore[method-assign]


def _reporting(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        own_work.enter()
        try:
            if _listeners and observable():
                for reference in tuple(_listeners):  # it may change meanwhile
                    if (listener := reference()) is not None:
                        listener.backward_begins()
                if isinstance(tensors, Tensor) and tensors.numel() == 1:
                    _notify(tensors, sys._getframe(1))  # noqa: SLF001 - the documented way to a caller's frame
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            _report(error)
        finally:
            own_work.leave()
        return backward(tensors, *args, **kwargs)

    return call


def _with_unscaled(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def call(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if torch.compiler.is_compiling():
            return scaled
        own_work.depth += 1
        try:
            if isinstance(outputs, Tensor) and isinstance(scaled, Tensor) and scaled is not outputs:
                setattr(scaled, _UNSCALED, outputs.detach())
                setattr(scaled, _FUNCTION, loss_function(outputs))
                setattr(scaled, _DIVISOR, divisor_of(outputs))
        except Exception as error:  # noqa: BLE001 - as above
            _report(error)
        finally:
            own_work.depth -= 1
        return scaled

    return call


def _report(error: Exception) -> None:
    """Report a fault of this module to all listeners, which count it in their health."""
    for reference in tuple(_listeners):  # it may change meanwhile
        if (listener := reference()) is not None:
            listener.failed(error)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _notify(loss: Tensor, frame: FrameType) -> None:
    value = getattr(loss, _UNSCALED, None)
    if value is None:
        value, function, divisor = loss.detach(), loss_function(loss), divisor_of(loss)
    else:
        function, divisor = getattr(loss, _FUNCTION, ""), getattr(loss, _DIVISOR, 1.0)
    number = value.item() if value.device.type == "cpu" else None
    observed = BackwardLoss(_place_of(frame), value, number, function, divisor, loss.grad_fn)
    for reference in tuple(_listeners):  # it may change meanwhile
        if (listener := reference()) is not None:
            listener.found(observed)


def _place_of(frame: FrameType | None) -> Place:
    """Return the place outside PyTorch and Accelerate from which ``backward()`` is called."""
    package = ""
    while frame is not None and (package := _package_of(frame)) in _WRAPPERS:
        frame = frame.f_back
    if package in _LIGHTNING:
        frame = _outside_lightning(frame)
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)


def _outside_lightning(frame: FrameType | None) -> FrameType | None:
    """Return the caller of a LightningModule's ``manual_backward``; the same frame if there is none."""
    above = frame
    while above is not None and _package_of(above) in _LIGHTNING:
        if above.f_code.co_name == "manual_backward":
            return above.f_back
        above = above.f_back
    return frame


class LossNames:
    """Names of loss places: ``loss``, ``loss_2``, … up to sixteen. Shared by all models of a hook."""

    def __init__(self) -> None:
        self._names: dict[Place, str] = {}
        self._last: weakref.ref[BackwardLoss] | None = None

    def is_new(self, loss: BackwardLoss) -> bool:
        """Return whether this loss has not been passed before: every watched model receives it."""
        if self._last is not None and self._last() is loss:
            return False
        self._last = weakref.ref(loss)
        return True

    def of(self, place: Place) -> str | None:
        """Return the name of the loss at a place; None after the sixteenth."""
        if place not in self._names:
            if len(self._names) >= _MAX_PLACES:
                return None
            self._names[place] = f"loss_{len(self._names) + 1}" if self._names else "loss"
        return self._names[place]


class SummedLosses:
    """Adds up the losses of the backward passes of one step, for programs that split a loss among them."""

    def __init__(self) -> None:
        self._step = -1
        self._sums: dict[str, Tensor] = {}

    def of(self, step: int, name: str, value: Tensor) -> Tensor:
        """Add a loss, and return the sum of the step so far. This does not wait for a device."""
        if step != self._step:
            self._step, self._sums = step, {}
        total = self._sums.get(name)
        self._sums[name] = value if total is None else total + value
        return self._sums[name]
