"""Gradient clipping by `torch.nn.utils`: detected before gradients change, and measured only for steps that are made.

Programs import ``clip_grad_norm_`` by name, so replacing the name in its module would not be noticed. But each
clipping function is a closure around the one that does the work; that inner function is exchanged once for the process.
A gradient scaler may skip a step after the program has clipped: its measurements are then discarded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad

from watchstep.capture.record import Condition
from watchstep.capture.session import Session
from watchstep.format import tensors
from watchstep.kernels.measurement import Measurement
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.observable import observable
from watchstep.pytorch.parameters.parameters import MeasuredGradients, Parameters

_INNER = "func"
"""What `torch.nn.utils.clip_grad` calls the function inside, in PyTorch 2.13 and long before."""


class ClipListener(Protocol):
    """Is told of every call of a clipping function."""

    def clipping(self, parameters: Sequence[Tensor]) -> None:
        """The gradients of some parameters are about to be clipped."""
        ...

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """The norm of all their gradients together, before clipping, as the function computed it."""
        ...


_listeners: list[weakref.ref[ClipListener]] = []
_installed: list[bool] = []
_not_observed: list[str] = []


def listen(listener: ClipListener) -> None:
    """Tell a listener of clipping for as long as it lives."""
    if not _installed:
        _installed.append(True)
        _install()
    _listeners.append(weakref.ref(listener))


def forget(listener: ClipListener) -> None:
    """Tell it no more."""
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]


def not_observed() -> list[str]:
    """Clipping functions whose calls are not seen, because this version of PyTorch is made otherwise."""
    return list(_not_observed)


def _install() -> None:
    by_norm = getattr(clip_grad, "_clip_grads_with_norm_", None)  # since 2.6, where clip_grad_norm_ calls it
    around = {"clip_grad_value_": _before, "clip_grad_norm_": _around_norm}
    if by_norm is not None:
        around = {"clip_grad_value_": _before, by_norm.__name__: _before_with_norm}
    for name, wrap in around.items():
        if not _exchange(getattr(clip_grad, name, None), wrap):
            _not_observed.append(name.lstrip("_"))


def _exchange(function: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Put a wrapper in the place of the function inside a closure; whether there is one."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if _INNER not in names:
        return False
    cell = function.__closure__[names.index(_INNER)]
    if not callable(cell.cell_contents):
        return False
    cell.cell_contents = wrap(cell.cell_contents)
    return True


def _quiet() -> bool:
    return not _listeners or not observable()


def _before(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _quiet():
            return clip(parameters, *args, **kwargs)
        parameters_given = _listed(parameters)
        _notify_clipping(parameters_given)
        return clip(parameters_given, *args, **kwargs)

    return call


def _before_with_norm(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if _quiet():
            return clip(parameters, max_norm, total_norm, *args, **kwargs)
        parameters_given = _listed(parameters)
        _notify_clipping(parameters_given)
        _notify_norm(parameters_given, total_norm)
        return clip(parameters_given, max_norm, total_norm, *args, **kwargs)

    return call


def _around_norm(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _quiet():
            return clip(parameters, *args, **kwargs)
        parameters_given = _listed(parameters)
        _notify_clipping(parameters_given)
        norm = clip(parameters_given, *args, **kwargs)
        _notify_norm(parameters_given, norm)
        return norm

    return call


def _listed(parameters: Any) -> list[Any]:
    """The parameters, which may be given as an iterator that only runs once."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _notify_clipping(parameters: list[Any]) -> None:
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener.clipping(parameters)


def _notify_norm(parameters: list[Any], norm: Any) -> None:
    if isinstance(norm, Tensor):
        for reference in _listeners:
            if (listener := reference()) is not None:
                listener.clipped(parameters, norm)


NORM = "gradient_norm"
_MOST_NORMS = 16


@dataclass(frozen=True)
class _Clip:
    """One call of a clipping function.

    Attributes:
        backward: how many backward passes there had been: after another one, the gradients are others.
        ids: of the parameters, those that were measured.
    """

    backward: int
    ids: frozenset[int]
    measured: tuple[MeasuredGradients, ...]


@dataclass(frozen=True)
class _Norm:
    """The norm that a call of a clipping function found, with the ids of its parameters."""

    backward: int
    ids: frozenset[int]
    value: float | Measurement


class ClippedGradients:
    """Of one model: gradients as they were before clipping, where they are asked for, and their norms.

    Attributes:
        numbered: the step of the last norm that was recorded, and its number in that step.
        released_nonfinite: whether some gradient that was released last is known to be NaN or infinite before clipping.
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
        """Another backward pass: the gradients are no longer those that were clipped."""
        self._backward += 1

    def clipping(self, clipped: Sequence[Tensor]) -> None:
        """Measure the gradients of those parameters that were not clipped before since the backward pass."""
        if not self._before_clipping or self._nothing_under_way:
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
        """Keep the norm of all gradients of a call."""
        if norm.numel() != 1 or self._nothing_under_way:
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
        if ids and len(self._norms) < _MOST_NORMS:
            on_host = norm.device.type == "cpu"
            value = norm.detach().item() if on_host else TorchKernel().measure([norm])
            self._norms.append(_Norm(self._backward, ids, value))

    def take_back(self, updated: Collection[int], numbered: tuple[int, int]) -> None:
        """The step of these parameters raised: what was measured for it counts for the next, unless gradients were added since.

        Args:
            updated: the ids of its parameters.
            numbered: as `numbered` was before `release`.
        """
        ids = frozenset(updated)
        self._clips += [c for c in self._released_clips if c.ids & ids and c.backward == self._backward]
        self._norms += [n for n in self._released_norms if n.ids & ids and n.backward == self._backward]
        self.updated(ids)
        self.numbered = numbered

    def updated(self, updated: Collection[int]) -> None:
        """The step of these parameters is made."""
        if self._released_clips or self._released_norms:
            ids = frozenset(updated)
            self._released_clips = [clip for clip in self._released_clips if not clip.ids & ids]
            self._released_norms = [norm for norm in self._released_norms if not norm.ids & ids]

    def release(self, updated: Iterable[int], condition: Condition | None) -> frozenset[int]:
        """Their optimizer steps: record what is held of its parameters.

        Args:
            updated: the ids of its parameters.
            condition: whether the step is made, where that is not known yet.

        Returns:
            The ids of the parameters whose gradients have been measured.
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
                    self._recorder.add(
                        result.group, result.measurement, probes=result.probes, condition=condition
                    )
        self._released_clips += [clip for clip in self._clips if clip.ids & ids]
        self._released_norms += [norm for norm in self._norms if norm.ids & ids]
        self._forget(ids)
        return frozenset(measured)

    def drop(self, updated: Collection[int]) -> None:
        """The step of these parameters is left out."""
        self._forget(frozenset(updated))

    def _forget(self, ids: frozenset[int]) -> None:
        self._clips = [clip for clip in self._clips if not clip.ids & ids]
        self._norms = [norm for norm in self._norms if not norm.ids & ids]

    def _record_norm(self, norm: _Norm, condition: Condition | None) -> None:
        """The first of a step as ``gradient_norm``, the next as ``gradient_norm_2``."""
        step, number = self.numbered
        number = number + 1 if step == self._recorder.step else 1
        self.numbered = (self._recorder.step, number)
        name = NORM if number == 1 else f"{NORM}_{number}"
        if isinstance(norm.value, float):
            self._recorder.scalar(name, norm.value, derived=True)
        else:
            self._recorder.awaited_scalar(name, norm.value, derived=True, condition=condition)

    @property
    def _nothing_under_way(self) -> bool:
        """Whether the last step is over and nothing of the next has begun: then what is clipped is of no step."""
        return self._recorder.last_finished == self._recorder.step
