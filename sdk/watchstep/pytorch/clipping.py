"""When a program clips gradients by `torch.nn.utils`: told before they change.

Programs import ``clip_grad_norm_`` by name, so another function of that name in its module would not be called. But each
of the clipping functions is a closure around the one that does the work, whichever name it is known by; that inner
function is exchanged, once for the process.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad

from watchstep.pytorch.observable import observable

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
    _listeners[:] = [held for held in _listeners if held() not in {None, listener}]


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
        held = _listed(parameters)
        _tell_clipping(held)
        return clip(held, *args, **kwargs)

    return call


def _before_with_norm(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if _quiet():
            return clip(parameters, max_norm, total_norm, *args, **kwargs)
        held = _listed(parameters)
        _tell_clipping(held)
        _tell_norm(held, total_norm)
        return clip(held, max_norm, total_norm, *args, **kwargs)

    return call


def _around_norm(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _quiet():
            return clip(parameters, *args, **kwargs)
        held = _listed(parameters)
        _tell_clipping(held)
        norm = clip(held, *args, **kwargs)
        _tell_norm(held, norm)
        return norm

    return call


def _listed(parameters: Any) -> list[Any]:
    """The parameters, which may be given as an iterator that only runs once."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _tell_clipping(parameters: list[Any]) -> None:
    for held in _listeners:
        if (listener := held()) is not None:
            listener.clipping(parameters)


def _tell_norm(parameters: list[Any], norm: Any) -> None:
    if isinstance(norm, Tensor):
        for held in _listeners:
            if (listener := held()) is not None:
                listener.clipped(parameters, norm)
