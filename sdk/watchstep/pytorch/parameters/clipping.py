"""Gradient clipping by `torch.nn.utils`: detected before gradients change, and recorded only for steps that are made.

Programs import ``clip_grad_norm_`` by name, so replacing it in its module would have no effect. But each clipping function is a
closure around the function that does the work; this inner function is replaced once per process. If a gradient scaler skips a
step after the program has clipped, the measurements are discarded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad

from watchstep.capture.steps.record import Condition
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.kernels.measurement import Measurement
from watchstep.pytorch import internals
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.observable import observable
from watchstep.pytorch.parameters.parameters import MeasuredGradients, Parameters


class ClipListener(Protocol):
    """Receives every call of a clipping function."""

    def clipping(self, parameters: Sequence[Tensor]) -> None:
        """Handle parameters whose gradients are about to be clipped."""
        ...

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Handle the total norm of their gradients before clipping, as computed by the function."""
        ...


_listeners: list[weakref.ref[ClipListener]] = []
_installed: list[bool] = []


def listen(listener: ClipListener) -> None:
    """Register a listener. Only a weak reference to it is kept."""
    if not _installed:
        _installed.append(True)
        _install()
    _listeners.append(weakref.ref(listener))


def forget(listener: ClipListener) -> None:
    """Unregister a listener."""
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]


def _install() -> None:
    wrappers = {"clip_grad_value_": _before, "clip_grad_norm_": _around_norm}
    for name, cell in internals.clipping_functions(clip_grad).items():
        cell.cell_contents = wrappers.get(name, _before_with_norm)(cell.cell_contents)


def _is_inactive() -> bool:
    return not _listeners or not observable()


def _before(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_inactive():
            return clip(parameters, *args, **kwargs)
        parameter_list = _as_list(parameters)
        _notify_clipping(parameter_list)
        return clip(parameter_list, *args, **kwargs)

    return call


def _before_with_norm(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_inactive():
            return clip(parameters, max_norm, total_norm, *args, **kwargs)
        parameter_list = _as_list(parameters)
        _notify_clipping(parameter_list)
        _notify_norm(parameter_list, total_norm)
        return clip(parameter_list, max_norm, total_norm, *args, **kwargs)

    return call


def _around_norm(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_inactive():
            return clip(parameters, *args, **kwargs)
        parameter_list = _as_list(parameters)
        _notify_clipping(parameter_list)
        norm = clip(parameter_list, *args, **kwargs)
        _notify_norm(parameter_list, norm)
        return norm

    return call


def _as_list(parameters: Any) -> list[Any]:
    """Return the parameters as a list: an iterator can be consumed only once."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _notify_clipping(parameters: list[Any]) -> None:
    for reference in tuple(_listeners):  # it may change meanwhile
        if (listener := reference()) is not None:
            listener.clipping(parameters)


def _notify_norm(parameters: list[Any], norm: Any) -> None:
    if isinstance(norm, Tensor):
        for reference in tuple(_listeners):  # it may change meanwhile
            if (listener := reference()) is not None:
                listener.clipped(parameters, norm)


NORM = "gradient_norm"
_MAX_NORMS = 16


@dataclass(frozen=True)
class _Clip:
    """One call of a clipping function.

    Attributes:
        backward: Number of backward passes before it. Another pass changes the gradients.
        ids: Ids of the measured parameters.
    """

    backward: int
    ids: frozenset[int]
    measured: tuple[MeasuredGradients, ...]


@dataclass(frozen=True)
class _Norm:
    """Norm that a clipping function computed, with the ids of its parameters."""

    backward: int
    ids: frozenset[int]
    value: float | Measurement


class ClippedGradients:
    """Measures gradients of one model before clipping, if configured, and their norms.

    Attributes:
        numbered: Step of the last recorded norm, and its number in that step.
        released_nonfinite: Whether some gradient of the last release is known to be NaN or infinite before clipping.
    """

    def __init__(self, session: Session, parameters: Parameters) -> None:
        self._session = session
        self._recorder = session.recorder
        self._parameters = parameters
        self._before_clipping = session.config.gradients == "before_clipping"
        self._backward = 0
        self._clips: list[_Clip] = []
        self._norms: list[_Norm] = []
        self._released_clips: list[_Clip] = []
        self._released_norms: list[_Norm] = []
        self.numbered = (-1, 0)
        self.released_nonfinite = False

    def after_backward(self) -> None:
        """Handle another backward pass, which changes the clipped gradients."""
        self._backward += 1

    def clipping(self, clipped: Sequence[Tensor]) -> None:
        """Measure the gradients of parameters that have not been clipped since the backward pass, if they are due or kept in memory."""
        if not self._before_clipping or self._is_between_steps:
            return
        ids = self._parameters.watched(clipped)
        self._clips = [clip for clip in self._clips if clip.backward == self._backward or not clip.ids & ids]
        failed = (clip.ids for clip in self._released_clips if clip.backward == self._backward)
        ids = ids.difference(*(clip.ids for clip in self._clips), *failed)
        if ids:
            chosen = {id(parameter): parameter for parameter in clipped if id(parameter) in ids}
            gradients = self._parameters.gradients_of(list(chosen.values()), self._recorder.step)
            self._clips.append(_Clip(self._backward, ids, tuple(gradients)))

    def clipped(self, clipped: Sequence[Tensor], norm: Tensor) -> None:
        """Keep the total norm of a call until its step is made."""
        if norm.numel() != 1 or self._is_between_steps:
            return
        if hasattr(norm, "to_local"):
            self._session.health.note(
                "gradient_norm",
                "not recorded of sharded gradients: workers would have to wait for each other",
            )
            return
        if not self._session.schedule.due((tensors.METRICS,), self._recorder.step):
            return
        ids = self._parameters.watched(clipped)
        self._norms = [norm for norm in self._norms if norm.backward == self._backward or not norm.ids & ids]
        if ids and len(self._norms) < _MAX_NORMS:
            on_host = norm.device.type == "cpu"
            value = norm.detach().item() if on_host else TorchKernel().measure([norm])
            self._norms.append(_Norm(self._backward, ids, value))

    def take_back(self, updated: Collection[int], numbered: tuple[int, int]) -> None:
        """Reuse the measurements of a step that raised for the next step, unless gradients were added since.

        Args:
            updated: Ids of the parameters of the step.
            numbered: Value of `numbered` before `release`.
        """
        ids = frozenset(updated)
        self._clips += [c for c in self._released_clips if c.ids & ids and c.backward == self._backward]
        self._norms += [n for n in self._released_norms if n.ids & ids and n.backward == self._backward]
        self.updated(ids)
        self.numbered = numbered

    def updated(self, updated: Collection[int]) -> None:
        """Forget released measurements of parameters whose step is made."""
        if self._released_clips or self._released_norms:
            ids = frozenset(updated)
            self._released_clips = [clip for clip in self._released_clips if not clip.ids & ids]
            self._released_norms = [norm for norm in self._released_norms if not norm.ids & ids]

    def release(self, updated: Iterable[int], condition: Condition | None) -> frozenset[int]:
        """Record the measurements of parameters that an optimizer is about to update.

        Args:
            updated: Ids of the parameters.
            condition: Condition that the step is made, if this is not known yet.

        Returns:
            Ids of the parameters with measured gradients.
        """
        ids = frozenset(updated) if self._clips or self._norms else frozenset()
        for norm in self._norms:
            if norm.ids & ids:
                self._record_norm(norm, condition)
        measured: set[int] = set()
        self.released_nonfinite = False
        for clip in self._clips:
            if clip.ids & ids:
                measured |= clip.ids
                for result in clip.measured:
                    self.released_nonfinite |= bool(result.measurement.nonfinite)
                    self._parameters.record(result, self._recorder.step, condition)
        self._released_clips += [clip for clip in self._clips if clip.ids & ids]
        self._released_norms += [norm for norm in self._norms if norm.ids & ids]
        self._forget(ids)
        return frozenset(measured)

    def drop(self, updated: Collection[int]) -> None:
        """Discard the measurements of parameters whose step is skipped."""
        self._forget(frozenset(updated))

    def _forget(self, ids: frozenset[int]) -> None:
        self._clips = [clip for clip in self._clips if not clip.ids & ids]
        self._norms = [norm for norm in self._norms if not norm.ids & ids]

    def _record_norm(self, norm: _Norm, condition: Condition | None) -> None:
        """Record a norm: the first of a step as ``gradient_norm``, the next as ``gradient_norm_2``."""
        step, number = self.numbered
        number = number + 1 if step == self._recorder.step else 1
        self.numbered = (self._recorder.step, number)
        name = NORM if number == 1 else f"{NORM}_{number}"
        if isinstance(norm.value, float):
            self._recorder.scalar(name, norm.value, derived=True)
        else:
            self._recorder.awaited_scalar(name, norm.value, derived=True, condition=condition)

    @property
    def _is_between_steps(self) -> bool:
        """Return whether the last step is over and the next has not begun: then clipping belongs to no step."""
        return self._recorder.last_finished == self._recorder.step
