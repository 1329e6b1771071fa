"""The non-finite gate: cheap enough for every step.

The loss is looked at before the backward pass. Gradients are looked at before the update: small ones whole, of large
ones another eighth at each step, so that NaN, which spreads, is seen at once and a lone infinity within eight steps.
Where the loss is bad, outputs of modules that are still in memory are measured: the first of them that is bad says where
it began.

On the host the answer is there at once. On a CUDA device a look is started and its answer taken, without a wait, at
the first step that finds it there: one step late, where the program reads something of the device in each step, such
as its loss. Other devices are not looked at.
"""

from __future__ import annotations

import cmath
import math
import time
import weakref
from collections import deque
from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.record import Group
from watchstep.kernels import native_kernel
from watchstep.pytorch import device_kernel
from watchstep.pytorch.device_kernel import NonfiniteLook
from watchstep.pytorch.kernel import all_finite, device_tensors, distinct_elements, native_memory
from watchstep.pytorch.probes.staging import OnTheWay

_SLICES = 8
_FIRST_UPDATES = 16
_MOST_LOOKS = 8
"""A device that is further behind is not asked again until it has answered."""


class GradientGate:
    """Looks at the gradients of an optimizer, and at losses."""

    def __init__(self) -> None:
        self._turn = 0
        self._gradients = LateLooks()
        self._losses = LateLosses()

    def has_nonfinite(self, gradients: Sequence[Tensor], *, at_once: bool = False) -> bool:
        """Whether NaN or infinity was seen: now in host memory, or earlier on a CUDA device.

        Args:
            gradients: of the update that comes next.
            at_once: look at all of them, whole, and wait for devices: the answer decides whether that update is made.
        """
        if at_once:
            return any_is_nonfinite(gradients)
        native = native_kernel.load()
        memory = native_memory(gradients) if native is not None else None
        seen = False
        if memory is None or self._gradients.pending:
            seen = self._gradients.look(gradients)
            on_host = [gradient for gradient in gradients if gradient.device.type == "cpu"]
            memory = native_memory(on_host) if native is not None else None
            if memory is None:
                return seen or not all_finite(on_host)
        if native is None or not memory:
            return seen
        self._turn = (self._turn + 1) % _SLICES
        return native.has_nonfinite(memory, self._turn, _SLICES) or seen

    @property
    def pending(self) -> bool:
        """Whether a device has not answered yet; `has_nonfinite` of nothing asks for the answer."""
        return self._gradients.pending

    def loss_is_bad(self, loss: Tensor, name: str = "loss") -> bool:
        """Whether a loss is NaN or infinite: this one in host memory, an earlier one on a CUDA device.

        Args:
            loss: one element.
            name: by which it arrives from a device.
        """
        if loss.device.type == "cpu":
            return not cmath.isfinite(loss.item())  # `torch.isfinite` costs some 10 µs more
        return not all(math.isfinite(value) for _, value in self._losses.look(name, loss))

    def late_losses(self) -> list[tuple[str, float]]:
        """Losses that the last look found arrived from a CUDA device, by name, oldest first."""
        return self._losses.arrived


def any_is_nonfinite(tensors: Sequence[Tensor]) -> bool:
    """Whether some element is NaN or infinite, of all of them; waits for devices."""
    bad = any_is_nonfinite_on_host([tensor for tensor in tensors if tensor.device.type == "cpu"])
    return bad or _any_nonfinite_on_devices([tensor for tensor in tensors if tensor.device.type != "cpu"])


def any_is_nonfinite_on_host(tensors: Sequence[Tensor]) -> bool:
    """Whether some element is NaN or infinite, of tensors in host memory, looked at whole."""
    native = native_kernel.load()
    memory = native_memory(tensors) if native is not None else None
    if native is None or memory is None:
        return not all_finite(tensors)
    return bool(memory) and native.has_nonfinite(memory, 0, 1)


@torch.no_grad()
def _any_nonfinite_on_devices(tensors: Sequence[Tensor]) -> bool:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    if not by_device or device_kernel.capturing():
        return False
    flags = [
        device_kernel.nonfinite_by_operations(distinct_elements(group))[0] for group in by_device.values()
    ]
    return any(bool(flag.item()) for flag in flags)


class FewestGradients:
    """How many parameters of an optimizer have a gradient: fewer than ever says that some get none any more."""

    def __init__(self) -> None:
        self._fewest: MutableMapping[Optimizer, tuple[int, int]] = WeakIdKeyDictionary()

    def is_fewer(self, optimizer: Optimizer, gradients: int) -> bool:
        """Whether an update has fewer gradients than any of at least so many before it, counted from the optimizer's first.

        Args:
            optimizer: is about to update.
            gradients: how many of its parameters have one.
        """
        updates, fewest = self._fewest.get(optimizer, (0, 0))
        if updates < _FIRST_UPDATES:
            self._fewest[optimizer] = (updates + 1, min(gradients, fewest) if updates else gradients)
            return False
        if gradients >= fewest:
            return False
        self._fewest[optimizer] = (updates, gradients)
        return True


class LateLooks:
    """Looks that devices have not answered yet."""

    def __init__(self) -> None:
        self._under_way: deque[NonfiniteLook] = deque()

    @property
    def pending(self) -> bool:
        """Whether a device still has to answer."""
        return bool(self._under_way)

    @torch.no_grad()
    def look(self, tensors: Sequence[Tensor]) -> bool:
        """Start to look at those on CUDA devices; whether an earlier look found NaN or infinity."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.device.type == "cuda":
                by_device.setdefault(tensor.device, []).append(tensor)
        if (not by_device and not self.pending) or device_kernel.capturing():
            return False
        nonfinite = self._answers()
        if len(self._under_way) < _MOST_LOOKS:
            for group in by_device.values():
                self._under_way.append(device_kernel.look(device_tensors(group)))
        return nonfinite

    def _answers(self) -> bool:
        nonfinite = False
        waiting: deque[NonfiniteLook] = deque()
        for look in self._under_way:
            answer = look.answer()
            if answer is None:
                waiting.append(look)
            nonfinite |= bool(answer)
        self._under_way = waiting
        return nonfinite


class LateLosses:
    """Losses on their way from a CUDA device, in their order.

    Attributes:
        arrived: those that the last look found here.
    """

    def __init__(self) -> None:
        self.arrived: list[tuple[str, float]] = []
        self._under_way: deque[tuple[str, OnTheWay]] = deque()

    def look(self, name: str, loss: Tensor) -> list[tuple[str, float]]:
        """Send a loss on its way; those that have arrived. Nothing is waited for."""
        self.arrived = []
        if device_kernel.capturing():
            return self.arrived
        while self._under_way and self._under_way[0][1].is_here:
            earlier, number = self._under_way.popleft()
            self.arrived.append((earlier, float(number.numbers().reshape(()))))
        if loss.device.type == "cuda" and len(self._under_way) < _MOST_LOOKS:
            with torch.cuda.device(loss.device):
                self._under_way.append((name, OnTheWay(loss)))
        return self.arrived


class LiveOutputs:
    """Outputs of one forward pass, as long as something else keeps them in memory."""

    def __init__(self) -> None:
        self._outputs: list[tuple[Group, list[weakref.ref[Tensor]], int]] = []

    def forget(self) -> None:
        """A new step begins."""
        self._outputs = []

    def note(self, group: Group, outputs: list[Tensor]) -> None:
        """Remember outputs and when they were computed, without keeping them."""
        self._outputs.append((group, [weakref.ref(output) for output in outputs], time.time_ns()))

    def alive(self) -> list[tuple[Group, list[Tensor], int]]:
        """Those that are still there, in the order of the forward pass, each with its time in nanoseconds since the epoch."""
        living = []
        for group, references, time_ns in self._outputs:
            outputs = [output for reference in references if (output := reference()) is not None]
            if len(outputs) == len(references):
                living.append((group, outputs, time_ns))
        return living
