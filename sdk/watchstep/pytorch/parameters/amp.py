"""Mixed precision under `torch.amp.GradScaler`: skipped updates, unscaled gradients, and the scaler's metrics.

The scaler skips an update if a gradient is NaN or infinite. This is how it adjusts its scale, not a fault. Most optimizers are
then not called, so their hooks do not fire: ``GradScaler.step`` is wrapped once per process. Fused optimizers are always called,
with scaled gradients, and read the divisor and whether to skip from ``grad_scale`` and ``found_inf``.

If the scale is a power of two, the default of `torch.amp.GradScaler`, the statistics are divided, which is exact and costs
nothing extra. For another scale, copies are divided and measured in parts of bounded size.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from watchstep.capture.steps.metric_names import SCALE, SKIPPED
from watchstep.capture.steps.record import Condition
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import scalars
from watchstep.kernels.measurement import Completed, Kernel, Measurement, Merged, Rescaled
from watchstep.pytorch import internals
from watchstep.pytorch.kernel import device_tensors
from watchstep.pytorch.losses import record_tensor
from watchstep.pytorch.parameters import optimizer_steps
from watchstep.pytorch.probes.staging import HostCopy


class ScalerListener(Protocol):
    """Receives every step of every enabled gradient scaler."""

    def scaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Handle an optimizer that is about to step or be skipped. ``scale`` is the scale of its gradients, one element."""
        ...

    def skipped(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Handle an optimizer that was not called, because a gradient is NaN or infinite. May raise `StopTraining`."""
        ...


@dataclass(frozen=True)
class Scaling:
    """Effect of a gradient scaler on the current step of an optimizer.

    Attributes:
        scale: Factor by which the gradients are still multiplied, one element; None for unscaled gradients.
        powers_of_two: Whether the scale is a power of two according to the scaler's factors.
        skips: Whether the update is known to be skipped.
        overflow: Number on a device that is nonzero if the update is skipped.
    """

    scale: Tensor | None = None
    powers_of_two: bool = True
    skips: bool = False
    overflow: HostCopy | None = None

    @property
    def updates(self) -> _Overflow | None:
        """Condition that the update is made; None if this is already known."""
        return None if self.overflow is None else _Overflow(self.overflow, expected=False)

    @property
    def is_skipped(self) -> _Overflow | None:
        """Condition that the update is skipped; None if this is already known."""
        return None if self.overflow is None else _Overflow(self.overflow, expected=True)


@dataclass(frozen=True)
class _Overflow:
    """Condition that a gradient was NaN or infinite, or that none was."""

    number: HostCopy
    expected: bool

    def is_met(self) -> bool:
        """Wait for the device, and return whether the condition is met."""
        return bool(self.number.numbers() != 0) == self.expected


PLAIN = Scaling()
_listeners: list[weakref.ref[ScalerListener]] = []
_installed: list[bool] = []
_stepping: list[Any] = []
_without_hooks: MutableMapping[Any, bool] = internals.weak_id_dictionary.value()


def listen(listener: ScalerListener) -> None:
    """Register a listener. Only a weak reference to it is kept."""
    if not _installed:
        _installed.append(True)
        scaler = torch.amp.GradScaler
        scaler.step = _reporting(scaler.step)  # type: ignore[method-assign]
    _listeners.append(weakref.ref(listener))


def forget(listener: ScalerListener) -> None:
    """Unregister a listener."""
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]


def scaling_of(optimizer: Optimizer) -> Scaling:
    """Return the scaling of an optimizer whose step has begun. Values are read only from host memory."""
    if not internals.takes_scale(optimizer):
        return PLAIN
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    scale = scale if isinstance(scale, Tensor) else None
    exact = not _stepping or _has_powers_of_two(_stepping[-1])
    if not isinstance(overflow, Tensor):
        return Scaling(scale, exact)
    if overflow.device.type == "cpu":
        return Scaling(scale, exact, skips=bool(overflow.item()))
    return Scaling(scale, exact, overflow=HostCopy(overflow))


def gradients_are_scaled(optimizer: Optimizer) -> bool:
    """Return whether the gradients of an optimizer are still multiplied by a scale, during a step of a scaler; else False.

    Those of a fused optimizer remain scaled, unless the program calls ``unscale_``; those of others until the scaler steps them.
    """
    if not _stepping:
        return False
    is_fused = internals.takes_scale(optimizer)
    if is_fused and hasattr(optimizer, "found_inf"):  # it is the one that steps
        return isinstance(getattr(optimizer, "grad_scale", None), Tensor)
    state = internals.scaler_state(_stepping[-1], optimizer)
    stage = getattr(state.get("stage"), "name", "READY")
    return stage == "READY" or (stage == "STEPPED" and is_fused)


def _reporting(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def call(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _listeners or not isinstance(optimizer, Optimizer):
            return step(self, optimizer, *args, **kwargs)
        # A scaler that is not enabled has no scale: that is no fault of PyTorch.
        scale = internals.scale_of(self) if self.is_enabled() else None
        if scale is None:
            return step(self, optimizer, *args, **kwargs)
        for reference in tuple(_listeners):  # it may change meanwhile
            if (listener := reference()) is not None:
                listener.scaled(optimizer, scale)
        steps_before = optimizer_steps.begun()
        _stepping.append(self)
        try:
            result = step(self, optimizer, *args, **kwargs)
            if optimizer_steps.begun() == steps_before and _overflowed(self, optimizer):
                for reference in tuple(_listeners):  # it may change meanwhile
                    if (listener := reference()) is not None:
                        listener.skipped(optimizer, scale)
        finally:
            _stepping.pop()
        return result

    return call


def _overflowed(scaler: Any, optimizer: Any) -> bool:
    """Return whether the scaler found NaN or infinity, for an optimizer that fired no hook.

    The scaler has just read the same value, so this does not wait for a device. An optimizer that stepped without firing a
    hook is compiled or not PyTorch's, and is not checked again.
    """
    if optimizer in _without_hooks:
        return False
    state = internals.scaler_state(scaler, optimizer)
    overflowed = any(bool(flag.item()) for flag in state.get("found_inf_per_device", {}).values())
    if not overflowed:
        _without_hooks[optimizer] = True
    return overflowed


def _has_powers_of_two(scaler: Any) -> bool:
    """Return whether the scaler's initial scale and factors are powers of two, and so every scale that it computes."""
    numbers = (internals.first_scale(scaler), scaler.get_growth_factor(), scaler.get_backoff_factor())
    return all(map(is_power_of_two, numbers))


_DEVICE_INTERVAL = 100


class ScalerMetrics:
    """Records ``gradient_scaler:scale`` when it changes, and 1 as ``gradient_scaler:skipped`` at each skipped step.

    A scale on a device is not read, but recorded at skipped steps and at every hundredth step. Both metrics belong to the
    collection ``metrics``, independent of its cadence.
    """

    def __init__(self, session: Session) -> None:
        self._recorder = session.recorder
        self._enabled = tensors.METRICS in session.config.chosen
        self._last: float | None = None

    def scale(self, scale: Tensor, *, skipped: bool = False) -> None:
        """Record the scale of the current step.

        Args:
            scale: The scale, one element.
            skipped: Whether the step is known to be skipped.
        """
        if not self._enabled:
            return
        if scale.device.type != "cpu":
            if skipped or self._recorder.step % _DEVICE_INTERVAL == 0:
                record_tensor(self._recorder, SCALE, scale, "train")
            return
        number = scale.item()
        if number != self._last:
            self._last = number
            self._recorder.scalar(SCALE, number)

    def skipped(self, condition: Condition | None = None) -> None:
        """Record that the current step is skipped, unconditionally or if a condition is met later."""
        if not self._enabled:
            return
        if condition is None:
            self._recorder.scalar(SKIPPED, 1.0)
        else:
            self._recorder.awaited_scalar(SKIPPED, Completed(scalars([1.0])), condition=condition)


_CHUNK = 4 * 1024 * 1024
"""Number of elements that are copied at once: 16 MB in float32."""


def is_power_of_two(number: float) -> bool:
    """Return whether a number is a power of two: then division by it changes only exponents."""
    return number > 0 and math.frexp(number)[0] == 0.5


@torch.no_grad()
def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Return a gradient divided by a scale of one element, at least in float32. Does not wait for a device."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.to(wide) / scale.to(device=gradient.device, dtype=wide, non_blocking=True)


@torch.no_grad()
def measure_unscaled(
    kernel: Kernel, gradients: Sequence[Tensor], scale: Tensor, *, powers_of_two: bool
) -> Measurement:
    """Start to measure gradients divided by a scale.

    Args:
        kernel: The kernel.
        gradients: Dense gradients of real floating-point types.
        scale: Factor by which they are multiplied, one element.
        powers_of_two: Whether a scale on a device, which is not read, is a power of two.
    """
    if scale.device.type == "cpu":
        number = scale.item()
        if is_power_of_two(number):
            return Rescaled(kernel.measure(gradients), lambda: number)
    elif powers_of_two:
        pending = HostCopy(scale)
        return Rescaled(kernel.measure(gradients), lambda: float(pending.numbers()))
    return _measure_chunks(kernel, gradients, scale)


def _measure_chunks(kernel: Kernel, gradients: Sequence[Tensor], scale: Tensor) -> Measurement:
    parts, owners = [], []
    tensors = device_tensors(gradients)
    for owner, tensor in enumerate(tensors):
        flat = tensor.as_strided((tensor.numel(),), (1,))  # dense in any order, which does not matter
        wide = torch.promote_types(tensor.dtype, torch.float32)
        local_scale = scale.to(device=tensor.device, dtype=wide, non_blocking=True)
        for piece in flat.split(_CHUNK):
            parts.append(kernel.measure([piece.to(wide) / local_scale]))
            owners.append(owner)
    return Merged(parts, owners, len(tensors))
