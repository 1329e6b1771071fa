"""Steps of optimizers: one pair of global hooks per process, which notify listeners.

If the class of an optimizer inherits ``step`` from another optimizer, PyTorch's hooks fire once for each class; only the
outermost pair counts. A step that raises fires no second hook. Whether the next step is nested in it is determined from the call
stack, so that a retry counts as a separate step.
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
    """Receives every step of every optimizer."""

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """Handle the start of a step. The gradients are final, unless a closure computes them.

        Args:
            optimizer: The optimizer.
            has_closure: Whether a closure computes the gradients inside the step.
            is_retry: Whether the last step of this optimizer raised, and no forward or backward pass has begun since.
        """
        ...

    def closure_done(self, optimizer: Optimizer) -> None:
        """Handle the first end of the closure in a step: it has computed the gradients, and nothing is updated yet."""
        ...

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Handle the end of a step: the parameters are updated. May raise `StopTraining`."""
        ...

    def failed(self, error: Exception) -> None:
        """Handle a failure of the observation of a step."""
        ...


@dataclass
class _Step:
    """A step in progress.

    Attributes:
        nested: Number of inner steps of the same optimizer in progress. It may include some that raised.
        pass_since: Whether a forward or backward pass has begun since.
    """

    nested: int = 0
    pass_since: bool = False


_listeners: list[weakref.ref[StepListener]] = []
_steps_in_progress: MutableMapping[Optimizer, _Step] = WeakIdKeyDictionary()
_installed: list[Any] = []
_step_count = [0]


def listen(listener: StepListener) -> None:
    """Register a listener. Only a weak reference to it is kept."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before))
        _installed.append(register_optimizer_step_post_hook(_after))
    _listeners.append(weakref.ref(listener))


def forget(listener: StepListener) -> None:
    """Unregister a listener."""
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]


def pass_begins() -> None:
    """Note that a forward or backward pass of training begins: a later step is not a retry of one that raised before."""
    if _steps_in_progress:
        for step in list(_steps_in_progress.values()):
            step.pass_since = True


def _living() -> list[StepListener]:
    """Return the listeners. The list itself may change while they are notified: garbage collection may end one."""
    return [listener for reference in tuple(_listeners) if (listener := reference()) is not None]


def begun() -> int:
    """Return the number of optimizer steps that have begun since the hooks were installed."""
    return _step_count[0]


def _is_nested(optimizer: Optimizer, wrapper: FrameType) -> bool:
    """Return whether a step runs inside another step of the same optimizer.

    Args:
        optimizer: The optimizer.
        wrapper: Frame of PyTorch's wrapper of ``step``, which calls the hooks.
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
    """Return a wrapper of a program's closure that reports its first end in a step. It has the closure's name and attributes."""
    reported = False

    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal reported
        result = closure(*args, **kwargs)
        if not reported:
            reported = True
            for listener in _living():
                _notify(listener, functools.partial(listener.closure_done, optimizer))
        return result

    return call


def _notify(listener: StepListener, call: Callable[[], None]) -> None:
    """Notify one listener. Its fault does not keep others from being notified. `StopTraining` is no Exception."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
        listener.failed(error)


def _report(error: Exception) -> None:
    """Report a fault of this module to all listeners, which count it in their health."""
    for listener in _living():
        listener.failed(error)


def _before(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not observable():
        return None  # a compiled step is not observed: traced tensors have no memory
    try:
        return _begin(optimizer, args, kwargs, sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
    except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training; `StopTraining` is no Exception
        _report(error)
        return None


def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: FrameType
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    step = _steps_in_progress.get(optimizer)
    if step is not None and _is_nested(optimizer, wrapper):
        step.nested += 1
        return None
    _steps_in_progress[optimizer] = _Step()
    _step_count[0] += 1
    has_closure = _has_closure(_without_self(optimizer, args), kwargs)
    is_retry = step is not None and not step.pass_since
    for listener in _living():
        _notify(
            listener,
            functools.partial(listener.before_step, optimizer, has_closure=has_closure, is_retry=is_retry),
        )
    return _observed_closure(optimizer, args, kwargs) if has_closure else None


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not observable():
        return
    try:
        _end(optimizer, args, kwargs, sys._getframe(1))  # noqa: SLF001 - as above
    except Exception as error:  # noqa: BLE001 - as above
        _report(error)


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: FrameType) -> None:
    step = _steps_in_progress.get(optimizer)
    if step is None:
        return
    if step.nested and _is_nested(optimizer, wrapper):
        step.nested -= 1
        return
    del _steps_in_progress[optimizer]
    has_closure = _has_closure(_without_self(optimizer, args), kwargs)
    for listener in _living():
        _notify(listener, functools.partial(listener.after_step, optimizer, has_closure=has_closure))


def _observed_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with its closure replaced by a reporting wrapper."""
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
