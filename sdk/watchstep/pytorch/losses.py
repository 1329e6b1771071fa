"""Losses: the function that computed a loss, division by the number of micro-batches, and scalars that are tensors.

autograd's graph tells which function computed a loss. If the last operation before ``backward()`` divides by a plain
number, and as many backward passes make up the step, losses are recorded undivided. A division by the batch size does not
match the number of passes. Scalars are recorded without reading them on the training thread.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from watchstep.capture.recorder import Recorder
from watchstep.format.tensors import Mode
from watchstep.kernels.measurement import Measurement
from watchstep.pytorch.kernel import TorchKernel

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
            if divisor > 1 and all(one == divisor for one in divisors):
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
