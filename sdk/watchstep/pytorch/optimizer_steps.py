"""When an optimizer steps: one pair of global hooks for the process, told to whoever listens.

An optimizer whose class inherits ``step`` from another optimizer fires PyTorch's hooks once for each class; only the
outermost pair counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from watchstep.pytorch.observable import observable


class StepListener(Protocol):
    """Is told of every step of every optimizer."""

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The gradients are as the optimizer will see them, unless a closure is to compute them."""
        ...

    def closure_done(self, optimizer: Optimizer) -> None:
        """The closure has computed the gradients, for the first time in this step, and nothing is updated yet by them."""
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


class _ToldClosure:
    """A program's closure, of whose first end in a step listeners are told."""

    def __init__(self, optimizer: Optimizer, closure: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._closure = closure
        self._told = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._closure(*args, **kwargs)
        if not self._told:
            self._told = True
            for held in _listeners:
                if (listener := held()) is not None:
                    listener.closure_done(self._optimizer)
        return result


def _before(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not observable():
        return None  # a compiled step is not observed: what is traced has no memory to look at
    depth = _depth.get(optimizer, 0)
    _depth[optimizer] = depth + 1
    if depth == 0:
        _begun[0] += 1
        has_closure = _has_closure(_without_self(optimizer, args), kwargs)
        for held in _listeners:
            if (listener := held()) is not None:
                listener.before_step(optimizer, has_closure=has_closure)
        if has_closure:
            return _told_of(optimizer, args, kwargs)
    return None


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


def _told_of(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with what tells of its closure in the closure's place."""
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": _ToldClosure(optimizer, closure)}
    held = list(args)
    for place, argument in enumerate(held):
        if argument is not optimizer and callable(argument):
            held[place] = _ToldClosure(optimizer, argument)
            break
    return tuple(held), kwargs


def _without_self(optimizer: Optimizer, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1:] if args and args[0] is optimizer else args
