"""The non-finite gate: checks losses and gradients for NaN and infinity, cheap enough for every step.

The loss is checked before the backward pass. Gradients are checked before the update: small ones completely, of large
ones another eighth at each step, so that NaN, which spreads, is found at once and a single infinity within eight steps.
If the loss is not finite, module outputs that are still in memory are measured: the first non-finite one shows where
it began.

On the host the result is available at once. On a CUDA device a check is started, and its result is read, without a wait, at
the first step after its completion: one step late if the program reads a value of the device in each step, such
as its loss. Other devices are not checked.
"""

from __future__ import annotations

import cmath
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from watchstep.capture.steps.record import Group
from watchstep.kernels import native_kernel
from watchstep.pytorch import device_kernel, internals
from watchstep.pytorch.device_kernel import NonfiniteCheck
from watchstep.pytorch.kernel import all_finite, device_tensors, distinct_elements, native_ranges
from watchstep.pytorch.optimizer_map import OptimizerMap
from watchstep.pytorch.probes.staging import HostCopy

_SLICES = 8
_FIRST_UPDATES = 16
_MAX_PENDING = 8
"""Maximum number of pending checks of a device. No more are started until it has completed one."""


class GradientGate:
    """Checks the gradients of an optimizer, and losses."""

    def __init__(self) -> None:
        self._turn = 0
        self._gradients = NonfinitePolling()
        self._losses = PendingLosses()

    def has_nonfinite(self, gradients: Sequence[Tensor], *, at_once: bool = False) -> bool:
        """Return whether NaN or infinity was found: now in host memory, or earlier on a CUDA device.

        Args:
            gradients: Gradients of the next update.
            at_once: Check all of them completely, and wait for devices, because the result decides whether that update is made.
        """
        if at_once:
            return any_is_nonfinite(gradients)
        native = native_kernel.load()
        memory = native_ranges(gradients) if native is not None else None
        seen = False
        if memory is None or self._gradients.pending:
            seen = self._gradients.check(gradients)
            on_host = [gradient for gradient in gradients if gradient.device.type == "cpu"]
            memory = native_ranges(on_host) if native is not None else None
            if memory is None:
                return seen or not all_finite(on_host)
        if native is None or memory is None or not memory.addresses:
            return seen
        self._turn = (self._turn + 1) % _SLICES
        return native.any_nonfinite(memory, self._turn, _SLICES) or seen

    @property
    def pending(self) -> bool:
        """Return whether a check on a device is pending. `has_nonfinite` with no gradients reads its result."""
        return self._gradients.pending

    def loss_is_bad(self, loss: Tensor, number: complex | None, name: str = "loss") -> bool:
        """Return whether a loss is NaN or infinite: this one in host memory, an earlier one on a CUDA device.

        Args:
            loss: A tensor with one element.
            number: Its value; None if it is on a device.
            name: Name of the loss for `late_losses`.
        """
        if number is not None:
            return not cmath.isfinite(number)
        return not all(math.isfinite(value) for _, value in self._losses.add(name, loss))

    def late_losses(self) -> list[tuple[str, float]]:
        """Return the names and values of losses that the last check received from a CUDA device, oldest first."""
        return self._losses.arrived


def any_is_nonfinite(tensors: Sequence[Tensor]) -> bool:
    """Return whether any element of the tensors is NaN or infinite. This waits for devices."""
    bad = any_is_nonfinite_on_host([tensor for tensor in tensors if tensor.device.type == "cpu"])
    return bad or _any_nonfinite_on_devices([tensor for tensor in tensors if tensor.device.type != "cpu"])


def any_is_nonfinite_on_host(tensors: Sequence[Tensor]) -> bool:
    """Return whether any element of tensors in host memory is NaN or infinite."""
    native = native_kernel.load()
    memory = native_ranges(tensors) if native is not None else None
    if native is None or memory is None:
        return not all_finite(tensors)
    return native.any_nonfinite(memory)


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
    """Minimum number of an optimizer's parameters with a gradient. Fewer than before means that some no longer receive one."""

    def __init__(self) -> None:
        self._fewest: OptimizerMap[tuple[int, int]] = OptimizerMap()

    def is_fewer(self, optimizer: Optimizer, gradients: int) -> bool:
        """Return whether an update has fewer gradients than each earlier one of the optimizer.

        Args:
            optimizer: The optimizer before its update.
            gradients: Number of its parameters with a gradient.
        """
        updates, fewest = self._fewest.get(optimizer, (0, 0))
        if updates < _FIRST_UPDATES:
            self._fewest[optimizer] = (updates + 1, min(gradients, fewest) if updates else gradients)
            return False
        if gradients >= fewest:
            return False
        self._fewest[optimizer] = (updates, gradients)
        return True


class NonfinitePolling:
    """Pending checks of devices."""

    def __init__(self) -> None:
        self._pending: deque[NonfiniteCheck] = deque()

    @property
    def pending(self) -> bool:
        """Return whether a check is pending."""
        return bool(self._pending)

    @torch.no_grad()
    def check(self, tensors: Sequence[Tensor]) -> bool:
        """Start a check of the tensors on CUDA devices. Returns whether an earlier check found NaN or infinity."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.device.type == "cuda":
                by_device.setdefault(tensor.device, []).append(tensor)
        if (not by_device and not self.pending) or device_kernel.capturing():
            return False
        nonfinite = self._answers()
        if len(self._pending) < _MAX_PENDING:
            for group in by_device.values():
                self._pending.append(device_kernel.check_nonfinite(device_tensors(group)))
        return nonfinite

    def _answers(self) -> bool:
        nonfinite = False
        waiting: deque[NonfiniteCheck] = deque()
        for check in self._pending:
            answer = check.answer()
            if answer is None:
                waiting.append(check)
            nonfinite |= bool(answer)
        self._pending = waiting
        return nonfinite


class PendingLosses:
    """Losses that are being copied from a CUDA device, in order.

    Attributes:
        arrived: Losses that the last check received.
    """

    def __init__(self) -> None:
        self.arrived: list[tuple[str, float]] = []
        self._pending: deque[tuple[str, HostCopy]] = deque()

    def add(self, name: str, loss: Tensor) -> list[tuple[str, float]]:
        """Start the copy of a loss, and return the losses that have arrived, without a wait."""
        self.arrived = []
        if device_kernel.capturing():
            return self.arrived
        while self._pending and self._pending[0][1].is_complete:
            earlier, number = self._pending.popleft()
            self.arrived.append((earlier, float(number.numbers().reshape(()))))
        if loss.device.type == "cuda" and len(self._pending) < _MAX_PENDING:
            with torch.cuda.device(loss.device):
                self._pending.append((name, HostCopy(loss)))
        return self.arrived


_RECTIFIERS = frozenset(("Relu", "LeakyRelu", "Hardtanh", "Threshold", "Elu", "Silu", "Hardswish"))
"""Functions of activations that often replace the output of the layer before them, and make no finite number non-finite, by their names before ``Backward``."""


def is_own(output: Tensor, version: int) -> bool:
    """Return whether an output has the values that its layer computed, or rectified ones.

    Args:
        output: The output now, with the function that changed it last.
        version: `version_of` it when its layer returned it.
    """
    changes = version_of(output) - version
    if not changes or not internals.counts_changes():
        return True
    return changes == 1 and type(output.grad_fn).__name__.partition("Backward")[0] in _RECTIFIERS


def version_of(output: Tensor) -> int:
    """Return the number of changes of an output in place; 0 if PyTorch does not count them in inference mode."""
    return 0 if output.is_inference() else internals.version(output)


Describe = Callable[[Tensor], tuple[Group, list[Tensor]] | None]
"""Returns the group and the tensors with statistics of an output; None if it has none."""


class LiveOutputs:
    """Outputs of one forward pass, for as long as other references keep them in memory.

    Attributes:
        append: Adds a function that describes an output if it is measured, a weak reference to the output, its version, and the time of the pass.
    """

    def __init__(self) -> None:
        self._outputs: list[
            tuple[Group | Describe, tuple[weakref.ref[Tensor], ...], tuple[int, ...], int]
        ] = []
        self.append = self._outputs.append

    def forget(self) -> None:
        """Remove all outputs at the start of a step."""
        self._outputs.clear()

    def note(self, group: Group, outputs: list[Tensor]) -> None:
        """Add weak references to outputs, and the time of their computation."""
        references = tuple(weakref.ref(output) for output in outputs)
        versions = tuple(version_of(output) for output in outputs)
        self._outputs.append((group, references, versions, time.time_ns()))

    def alive(self) -> list[tuple[Group, list[Tensor], int]]:
        """Return the outputs that still exist as their layers returned them, in the order of the forward pass, with their times in nanoseconds since the epoch."""
        living = []
        for described, references, versions, time_ns in self._outputs:
            outputs = [output for reference in references if (output := reference()) is not None]
            if len(outputs) < len(references) or not all(map(is_own, outputs, versions)):
                continue
            if isinstance(described, Group):
                living.append((described, outputs, time_ns))
            elif (found := described(outputs[0])) is not None:
                living.append((*found, time_ns))
        return living
