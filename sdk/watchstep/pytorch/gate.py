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

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from watchstep.capture.record import Group
from watchstep.kernels import native_kernel
from watchstep.pytorch import device_kernel
from watchstep.pytorch.device_kernel import Look
from watchstep.pytorch.kernel import all_finite, device_tensors, native_memory

_SLICES = 8
_MOST_LOOKS = 8
"""A device that is further behind is not asked again until it has answered."""


class GradientGate:
    """Looks at the gradients of an optimizer, and at losses."""

    def __init__(self) -> None:
        self._turn = 0
        self._gradients = LateLooks()
        self._losses = LateLooks()

    def holds_nonfinite(self, gradients: Sequence[Tensor], *, at_once: bool = False) -> bool:
        """Whether NaN or infinity was seen: now in host memory, or earlier on a CUDA device.

        Args:
            gradients: of the update that comes next.
            at_once: look at all of them, whole, and wait for devices: the answer decides whether that update is made.
        """
        if at_once:
            return _hold_any(gradients)
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
        return native.holds_nonfinite(memory, self._turn, _SLICES) or seen

    def loss_is_bad(self, loss: Tensor) -> bool:
        """Whether a loss is NaN or infinite: this one in host memory, an earlier one on a CUDA device."""
        if loss.device.type == "cpu":
            return not bool(torch.isfinite(loss).all())
        return self._losses.look([loss])


def _hold_any(tensors: Sequence[Tensor]) -> bool:
    """Whether some element is NaN or infinite, of all of them; waits for devices."""
    native = native_kernel.load()
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    memory = native_memory(on_host) if native is not None else None
    if native is None or memory is None:
        bad = not all_finite(on_host)
    else:
        bad = bool(memory) and native.holds_nonfinite(memory, 0, 1)
    return bad or _hold_any_on_devices([tensor for tensor in tensors if tensor.device.type != "cpu"])


@torch.no_grad()
def _hold_any_on_devices(tensors: Sequence[Tensor]) -> bool:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    if not by_device or device_kernel.capturing():
        return False
    found = [device_kernel.found_by_operations(device_tensors(held))[0] for held in by_device.values()]
    return any(bool(one.item()) for one in found)


class LateLooks:
    """Looks that devices have not answered yet."""

    def __init__(self) -> None:
        self._under_way: deque[Look] = deque()

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
        found = self._answers()
        if len(self._under_way) < _MOST_LOOKS:
            for held in by_device.values():
                self._under_way.append(device_kernel.look(device_tensors(held)))
        return found

    def _answers(self) -> bool:
        found = False
        waiting: deque[Look] = deque()
        for look in self._under_way:
            answer = look.answer()
            if answer is None:
                waiting.append(look)
            found |= bool(answer)
        self._under_way = waiting
        return found


class LiveOutputs:
    """Outputs of one forward pass, as long as something else keeps them in memory."""

    def __init__(self) -> None:
        self._held: list[tuple[Group, list[weakref.ref[Tensor]]]] = []

    def forget(self) -> None:
        """A new step begins."""
        self._held = []

    def note(self, group: Group, outputs: list[Tensor]) -> None:
        """Remember outputs, without keeping them."""
        self._held.append((group, [weakref.ref(output) for output in outputs]))

    def alive(self) -> list[tuple[Group, list[Tensor]]]:
        """Those that are still there, in the order of the forward pass."""
        found = []
        for group, references in self._held:
            outputs = [output for reference in references if (output := reference()) is not None]
            if len(outputs) == len(references):
                found.append((group, outputs))
        return found
