"""When an optimizer steps: one pair of global hooks for the process, told to whoever listens.

An optimizer whose class inherits ``step`` from another optimizer fires PyTorch's hooks once for each class; only the
outermost pair counts. A step that raises fires no second hook: whether the next one runs inside it is read from the call
stack, so that a retry counts as a step of its own.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.pytorch.observable import observable


class StepListener(Protocol):
    """Is told of every step of every optimizer."""

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """The gradients are as the optimizer will see them, unless a closure is to compute them.

        Args:
            optimizer: steps.
            has_closure: whether a closure computes the gradients inside the step.
            is_retry: whether the last step of this optimizer raised, and no forward or backward pass has begun since.
        """
        ...

    def closure_done(self, optimizer: Optimizer) -> None:
        """The closure has computed the gradients, for the first time in this step, and nothing is updated yet by them."""
        ...

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The parameters are updated. May raise `StopTraining`."""
        ...

    def failed(self, error: Exception) -> None:
        """Observing a step failed."""
        ...


@dataclass
class _Step:
    """A step that has begun and not ended.

    Attributes:
        nested: inner steps of the same optimizer that have begun and not ended, as far as is known: one may have raised.
        pass_since: whether a forward or backward pass has begun since.
    """

    nested: int = 0
    pass_since: bool = False


_listeners: list[weakref.ref[StepListener]] = []
_begun_steps: MutableMapping[Optimizer, _Step] = WeakIdKeyDictionary()
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
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]


def pass_begins() -> None:
    """A forward or backward pass of training begins: a step that raised before it is not retried with the same gradients."""
    if _begun_steps:
        for step in list(_begun_steps.values()):
            step.pass_since = True


def begun() -> int:
    """How many steps of optimizers have begun since someone listens."""
    return _begun[0]


def _is_nested(optimizer: Optimizer, wrapper: FrameType) -> bool:
    """Whether a step runs inside another step of the same optimizer.

    Args:
        optimizer: steps.
        wrapper: the frame of PyTorch's wrapper of ``step``, which calls the hooks.
    """
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(kwargs.get("closure")) or any(callable(argument) for argument in args)


def _reporting_closure(optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
    """A program's closure, of whose first end in a step listeners are told. It has the closure's name and attributes."""
    reported = False

    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal reported
        result = closure(*args, **kwargs)
        if not reported:
            reported = True
            for reference in _listeners:
                if (listener := reference()) is not None:
                    listener.closure_done(optimizer)
        return result

    return call


def _report(error: Exception) -> None:
    """Count a fault of this module in the health of all that listen."""
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener.failed(error)


def _before(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not observable():
        return None  # a compiled step is not observed: what is traced has no memory to look at
    try:
        return _begin(optimizer, args, kwargs, sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
    except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training; `StopTraining` is no Exception
        _report(error)
        return None


def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: FrameType
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    step = _begun_steps.get(optimizer)
    if step is not None and _is_nested(optimizer, wrapper):
        step.nested += 1
        return None
    _begun_steps[optimizer] = _Step()
    _begun[0] += 1
    has_closure = _has_closure(_without_self(optimizer, args), kwargs)
    is_retry = step is not None and not step.pass_since
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener.before_step(optimizer, has_closure=has_closure, is_retry=is_retry)
    return _observed_closure(optimizer, args, kwargs) if has_closure else None


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not observable():
        return
    try:
        _end(optimizer, args, kwargs, sys._getframe(1))  # noqa: SLF001 - as above
    except Exception as error:  # noqa: BLE001 - as above
        _report(error)


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: FrameType) -> None:
    step = _begun_steps.get(optimizer)
    if step is None:
        return
    if step.nested and _is_nested(optimizer, wrapper):
        step.nested -= 1
        return
    del _begun_steps[optimizer]
    has_closure = _has_closure(_without_self(optimizer, args), kwargs)
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener.after_step(optimizer, has_closure=has_closure)


def _observed_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with what tells of its closure in the closure's place."""
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": _reporting_closure(optimizer, closure)}
    arguments = list(args)
    for place, argument in enumerate(arguments):
        if argument is not optimizer and callable(argument):
            arguments[place] = _reporting_closure(optimizer, argument)
            break
    return tuple(arguments), kwargs


def _without_self(optimizer: Optimizer, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1:] if args and args[0] is optimizer else args
