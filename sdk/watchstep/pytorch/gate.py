"""The non-finite gate: cheap enough for every step.

The loss is looked at before the backward pass, where it lies on the host. Gradients are looked at before the update:
small ones whole, of large ones another eighth at each step, so that NaN, which spreads, is seen at once and a lone
infinity within eight steps. Where the loss is bad, outputs of modules that are still in memory are measured: the first
of them that is bad says where it began.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from watchstep.capture.record import Group
from watchstep.kernels import native_kernel
from watchstep.pytorch.kernel import native_memory

_SLICES = 8


class GradientGate:
    """Looks at the gradients of an optimizer."""

    def __init__(self) -> None:
        self._turn = 0

    def holds_nonfinite(self, gradients: Sequence[Tensor]) -> bool:
        """Whether NaN or infinity was seen; False where the gradients are not plain tensors in host memory."""
        native = native_kernel.load()
        memory = native_memory(gradients) if native is not None else None
        if native is None or memory is None:
            return False
        self._turn = (self._turn + 1) % _SLICES
        return native.holds_nonfinite(memory, self._turn, _SLICES)


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
