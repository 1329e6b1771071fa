"""Losses that a program divides by the number of micro-batches of a step, found in the graph of the loss.

The last operation before ``backward()`` is a division by a plain number, and as many backward passes make up the step: then the losses
are recorded undivided. A division by the size of a batch is no such number, for as many passes there are not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from watchstep.capture.recorder import Recorder

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
