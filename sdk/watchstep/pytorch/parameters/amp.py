"""Mixed precision under `torch.amp.GradScaler`: skipped updates, unscaled gradients, and the scaler's metrics.

The scaler skips an update where a gradient is NaN or infinite. That is how it finds its scale, and not a fault.
Most optimizers are then not called at all, so none of their hooks fires: ``GradScaler.step`` is wrapped once for the
process. Fused optimizers are called in any case, with scaled gradients, and find the divisor and whether to skip in
``grad_scale`` and ``found_inf``.

If the scale is a power of two, the default of `torch.amp.GradScaler`, the statistics are divided: exact, and no more work
than without a scaler. For another scale, copies in parts of bounded size are divided and measured.
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
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.record import Condition
from watchstep.capture.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import scalars
from watchstep.kernels.measurement import Completed, Kernel, Measurement, Merged, Rescaled
from watchstep.pytorch.kernel import device_tensors
from watchstep.pytorch.losses import record_tensor
from watchstep.pytorch.parameters import optimizer_steps
from watchstep.pytorch.probes.staging import OnTheWay


class ScalerListener(Protocol):
    """Is told of every step of every enabled gradient scaler."""

    def scaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """An optimizer is about to step, or to be left out. The scale is that of its gradients, of one element."""
        ...

    def skipped(self, optimizer: Optimizer, scale: Tensor) -> None:
        """The optimizer was not called: a gradient is NaN or infinite. May raise `StopTraining`."""
        ...


@dataclass(frozen=True)
class Scaling:
    """What a gradient scaler does to the step of an optimizer that is being called.

    Attributes:
        scale: what the gradients are still multiplied by, one element; None where they are as the program knows them.
        powers_of_two: whether the scale is one, as far as the scaler's factors say.
        skips: whether the update is known to be left out.
        overflow: on a device: not zero where the update is left out.
    """

    scale: Tensor | None = None
    powers_of_two: bool = True
    skips: bool = False
    overflow: OnTheWay | None = None

    @property
    def updates(self) -> _Overflow | None:
        """Holds where the update is made; None where that is known."""
        return None if self.overflow is None else _Overflow(self.overflow, found=False)

    @property
    def is_skipped(self) -> _Overflow | None:
        """Holds where the update is left out; None where that is known."""
        return None if self.overflow is None else _Overflow(self.overflow, found=True)


@dataclass(frozen=True)
class _Overflow:
    """Whether a gradient was NaN or infinite."""

    number: OnTheWay
    found: bool

    def is_met(self) -> bool:
        """The answer; waits for the device."""
        return bool(self.number.numbers() != 0) == self.found


PLAIN = Scaling()
_listeners: list[weakref.ref[ScalerListener]] = []
_installed: list[bool] = []
_stepping: list[Any] = []
_unobserved: MutableMapping[Any, bool] = WeakIdKeyDictionary()


def listen(listener: ScalerListener) -> None:
    """Tell a listener of gradient scalers' steps for as long as it lives."""
    if not _installed:
        _installed.append(True)
        scaler = torch.amp.GradScaler
        scaler.step = _reporting(scaler.step)  # type: ignore[method-assign]
    _listeners.append(weakref.ref(listener))


def forget(listener: ScalerListener) -> None:
    """Tell it no more."""
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]


def scaling_of(optimizer: Optimizer) -> Scaling:
    """What a gradient scaler says to an optimizer whose step has begun. Reads it in host memory alone."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return PLAIN
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    scale = scale if isinstance(scale, Tensor) else None
    exact = not _stepping or _has_powers_of_two(_stepping[-1])
    if not isinstance(overflow, Tensor):
        return Scaling(scale, exact)
    if overflow.device.type == "cpu":
        return Scaling(scale, exact, skips=bool(overflow.item()))
    return Scaling(scale, exact, overflow=OnTheWay(overflow))


def _reporting(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def call(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        scale = getattr(self, "_scale", None)
        if torch.compiler.is_compiling() or not _listeners or not self.is_enabled() or scale is None:
            return step(self, optimizer, *args, **kwargs)
        if not isinstance(optimizer, Optimizer):
            return step(self, optimizer, *args, **kwargs)
        for reference in _listeners:
            if (listener := reference()) is not None:
                listener.scaled(optimizer, scale)
        begun = optimizer_steps.begun()
        _stepping.append(self)
        try:
            result = step(self, optimizer, *args, **kwargs)
        finally:
            _stepping.pop()
        if optimizer_steps.begun() == begun and _overflowed(self, optimizer):
            for reference in _listeners:
                if (listener := reference()) is not None:
                    listener.skipped(optimizer, scale)
        return result

    return call


def _overflowed(scaler: Any, optimizer: Any) -> bool:
    """Whether the scaler found NaN or infinity, of an optimizer that fired no hook.

    It has just read the same itself, and nothing has been asked of the device since: no wait. An optimizer that fired
    none although it stepped is compiled, or none of PyTorch's; it is not asked about again.
    """
    if optimizer in _unobserved:
        return False
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    overflowed = any(bool(flag.item()) for flag in state.get("found_inf_per_device", {}).values())
    if not overflowed:
        _unobserved[optimizer] = True
    return overflowed


def _has_powers_of_two(scaler: Any) -> bool:
    """Whether every scale that it comes to by itself is a power of two."""
    numbers = (getattr(scaler, name, 2.0) for name in ("_init_scale", "_growth_factor", "_backoff_factor"))
    return all(map(is_power_of_two, numbers))


SCALE = "gradient_scaler:scale"
SKIPPED = "gradient_scaler:skipped"
_EVERY = 100


class ScalerMetrics:
    """Records ``gradient_scaler:scale`` when it changes, and 1 as ``gradient_scaler:skipped`` at each skipped step.

    On a device the scale is not read; it is recorded at skipped steps and at every hundredth. These two are of
    the collection ``metrics``, whatever its cadence.
    """

    def __init__(self, session: Session) -> None:
        self._recorder = session.recorder
        self._wanted = tensors.METRICS in session.config.chosen
        self._last: float | None = None

    def scale(self, scale: Tensor, *, skipped: bool = False) -> None:
        """The scale of the step under way.

        Args:
            scale: one element.
            skipped: whether the step is known to be left out.
        """
        if not self._wanted:
            return
        if scale.device.type != "cpu":
            if skipped or self._recorder.step % _EVERY == 0:
                record_tensor(self._recorder, SCALE, scale, "train")
            return
        number = scale.item()
        if number != self._last:
            self._last = number
            self._recorder.scalar(SCALE, number)

    def skipped(self, condition: Condition | None = None) -> None:
        """The step under way is left out; or is, if a condition holds that is known later."""
        if not self._wanted:
            return
        if condition is None:
            self._recorder.scalar(SKIPPED, 1.0)
        else:
            self._recorder.awaited_scalar(SKIPPED, Completed(scalars([1.0])), condition=condition)


_PART = 4 * 1024 * 1024
"""Elements that are copied at once: 16 MB in float32."""


def is_power_of_two(number: float) -> bool:
    """Whether dividing by it only changes exponents."""
    return number > 0 and math.frexp(number)[0] == 0.5


@torch.no_grad()
def measure_unscaled(
    kernel: Kernel, gradients: Sequence[Tensor], scale: Tensor, *, powers_of_two: bool
) -> Measurement:
    """Start to measure.

    Args:
        kernel: measures.
        gradients: of real floating-point types, dense.
        scale: one element, by which they are multiplied.
        powers_of_two: whether the scale is one, where it lies on a device and is not read.
    """
    if scale.device.type == "cpu":
        number = scale.item()
        if is_power_of_two(number):
            return Rescaled(kernel.measure(gradients), lambda: number)
    elif powers_of_two:
        awaited = OnTheWay(scale)
        return Rescaled(kernel.measure(gradients), lambda: float(awaited.numbers()))
    return _by_parts(kernel, gradients, scale)


def _by_parts(kernel: Kernel, gradients: Sequence[Tensor], scale: Tensor) -> Measurement:
    parts, owners = [], []
    tensors = device_tensors(gradients)
    for owner, tensor in enumerate(tensors):
        flat = tensor.as_strided(
            (tensor.numel(),), (1,)
        )  # dense in some order, and the order does not matter
        wide = torch.promote_types(tensor.dtype, torch.float32)
        here = scale.to(device=tensor.device, dtype=wide, non_blocking=True)
        for piece in flat.split(_PART):
            parts.append(kernel.measure([piece.to(wide) / here]))
            owners.append(owner)
    return Merged(parts, owners, len(tensors))
