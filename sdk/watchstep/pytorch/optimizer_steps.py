"""When an optimizer steps: one pair of global hooks for the process, told to whoever listens.

An optimizer whose class inherits ``step`` from another optimizer fires PyTorch's hooks once for each class; only the
outermost pair counts.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from watchstep.pytorch.observable import observable


class StepListener(Protocol):
    """Is told of every step of every optimizer."""

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The gradients are as the optimizer will see them, unless a closure is to compute them."""
        ...

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The parameters are updated. May raise `StopTraining`."""
        ...


_listeners: list[weakref.ref[StepListener]] = []
_depth: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_installed: list[Any] = []
_begun = [0]


def listen(listener: StepListener) -> None:
    """Tell a listener of steps for as long as it lives."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before))
        _installed.append(register_optimizer_step_post_hook(_after))
    _listeners.append(weakref.ref(listener))


def forget(listener: StepListener) -> None:
    """Tell it no more."""
    _listeners[:] = [held for held in _listeners if held() not in {None, listener}]


def settle() -> None:
    """No optimizer is inside a step now: one that raised inside ``step`` counts from anew."""
    if _depth:
        _depth.clear()


def begun() -> int:
    """How many steps of optimizers have begun since someone listens."""
    return _begun[0]


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(kwargs.get("closure")) or any(callable(argument) for argument in args)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not observable():
        return  # a compiled step is not observed: what is traced has no memory to look at
    depth = _depth.get(optimizer, 0)
    _depth[optimizer] = depth + 1
    if depth == 0:
        _begun[0] += 1
        has_closure = _has_closure(_without_self(optimizer, args), kwargs)
        for held in _listeners:
            if (listener := held()) is not None:
                listener.before_step(optimizer, has_closure=has_closure)


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not observable():
        return
    depth = _depth.get(optimizer, 1) - 1
    _depth[optimizer] = depth
    if depth == 0:
        has_closure = _has_closure(_without_self(optimizer, args), kwargs)
        for held in _listeners:
            if (listener := held()) is not None:
                listener.after_step(optimizer, has_closure=has_closure)


def _without_self(optimizer: Optimizer, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1:] if args and args[0] is optimizer else args
