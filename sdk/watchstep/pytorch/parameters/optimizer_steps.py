"""Steps of optimizers: one pair of global hooks per process, which notify listeners.

If the class of an optimizer inherits ``step`` from another optimizer, PyTorch's hooks fire once for each class; only the
outermost pair counts. A step that raises fires no second hook. Whether the next step is nested in it is determined from the call
stack, so that a retry counts as a separate step.

Deciders are listeners that may prevent an update. They are asked between the last hook before a step and the update itself::

    hooks before the step   listeners: before_step   hooks of the program
    body of the step        deciders: prevents?      update, unless it is prevented
    hooks after the step    hooks of the program     listeners: after_step

If a closure computes the gradients, they are asked when it ends for the first time, and a prevented step ends there.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from watchstep.capture.steps.own_work import own_work
from watchstep.pytorch import internals
from watchstep.pytorch.observable import observable
from watchstep.pytorch.optimizer_map import OptimizerMap
from watchstep.pytorch.parameters import step_bodies


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


class UpdateDecider(StepListener, Protocol):
    """A listener that may prevent updates."""

    def prevents(self, optimizer: Optimizer, *, is_possible: bool) -> bool:
        """Return whether the update that an optimizer is about to make is prevented. May raise `StopTraining`.

        Args:
            optimizer: The optimizer. Its gradients are final.
            is_possible: Whether the update can be prevented; otherwise the result has no effect.
        """
        ...


@dataclass
class _Step:
    """A step in progress.

    Attributes:
        has_closure: Whether a closure computes the gradients.
        nested: Number of inner steps of the same optimizer in progress. It may include some that raised.
        pass_since: Whether a forward or backward pass has begun since.
        is_undecided: Whether the deciders have not been asked yet.
        is_gated: Whether the update can be prevented.
        in_body: Whether the body runs that a closure may end.
    """

    has_closure: bool = False
    nested: int = 0
    pass_since: bool = False
    is_undecided: bool = False
    is_gated: bool = False
    in_body: bool = False


class _PreventedStep(BaseException):
    """Ends the body of a step after its closure. Raised and caught within the step; no Exception, so that no optimizer handles it."""

    def __init__(self, step: _Step, result: Any) -> None:
        super().__init__()
        self.step = step
        self.result = result


_listeners: list[weakref.ref[StepListener]] = []
_deciders: list[weakref.ref[UpdateDecider]] = []
_steps_in_progress: OptimizerMap[_Step] = OptimizerMap()
_installed: list[Any] = []
_step_count = [0]


def listen(listener: StepListener) -> None:
    """Register a listener. Only a weak reference to it is kept."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before))
        _installed.append(register_optimizer_step_post_hook(_after))
    _listeners.append(weakref.ref(listener))


def decide(decider: UpdateDecider) -> None:
    """Register a decider, which is a listener too. Only a weak reference to it is kept."""
    listen(decider)
    _deciders.append(weakref.ref(decider))


def forget(listener: StepListener) -> None:
    """Unregister a listener or decider. Without deciders the steps of optimizers are PyTorch's own again."""
    _listeners[:] = [reference for reference in _listeners if reference() not in {None, listener}]
    if _deciders:
        _deciders[:] = [reference for reference in _deciders if reference() not in {None, listener}]
        if not _deciders:
            step_bodies.remove_gates()


def pass_begins() -> None:
    """Note that a forward or backward pass of training begins: a later step is not a retry of one that raised before."""
    if _steps_in_progress:
        for step in _steps_in_progress.values():
            step.pass_since = True


def _living() -> list[StepListener]:
    """Return the listeners. The list itself may change while they are notified: garbage collection may end one."""
    return [listener for reference in tuple(_listeners) if (listener := reference()) is not None]


def begun() -> int:
    """Return the number of optimizer steps that have begun since the hooks were installed."""
    return _step_count[0]


def _is_nested(optimizer: Optimizer, wrapper: FrameType) -> bool | None:
    """Return whether a step runs inside another step of the same optimizer; None if unknown.

    Args:
        optimizer: The optimizer.
        wrapper: Frame of PyTorch's wrapper of ``step``, which calls the hooks.
    """
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code:
            steps = internals.steps(frame, optimizer)
            if steps is not False:
                return steps
        frame = frame.f_back
    return False


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return callable(kwargs.get("closure")) or any(callable(argument) for argument in args)


def _reporting_closure(optimizer: Optimizer, step: _Step, closure: Callable[..., Any]) -> Callable[..., Any]:
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
        if step.is_undecided and step.in_body is step.is_gated:  # a hook may have called it before the body
            step.is_undecided = False
            if _is_prevented(optimizer, is_possible=step.in_body) and step.in_body:
                raise _PreventedStep(step, result)
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
    own_work.enter()
    try:
        return _begin(optimizer, args, kwargs, sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
    except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training; `StopTraining` is no Exception
        _report(error)
        return None
    finally:
        own_work.leave()


def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: FrameType
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    step = _steps_in_progress.get(optimizer)
    if step is not None:
        is_nested = _is_nested(optimizer, wrapper)
        if is_nested or (is_nested is None and not step.pass_since):
            step.nested += 1
            return None
    is_retry = step is not None and not step.pass_since
    has_closure = _has_closure(_without_self(optimizer, args), kwargs)
    step = _steps_in_progress[optimizer] = _Step(has_closure)
    _step_count[0] += 1
    for listener in _living():
        _notify(
            listener,
            functools.partial(listener.before_step, optimizer, has_closure=has_closure, is_retry=is_retry),
        )
    if _deciders:
        step.is_undecided = True
        step.is_gated = step_bodies.gate(optimizer, wrapper, _run_body)
        if not (step.is_gated or has_closure):
            step.is_undecided = False
            _is_prevented(optimizer, is_possible=False)
    return _observed_closure(optimizer, step, args, kwargs) if has_closure else None


def _run_body(body: step_bodies.Body, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the body of a step, unless its update is prevented: then return what its closure returned."""
    optimizer = args[0] if args else None
    step = _steps_in_progress.get(optimizer) if isinstance(optimizer, Optimizer) and observable() else None
    if optimizer is None or step is None or not step.is_undecided or step.in_body:
        return body(*args, **kwargs)
    if not step.has_closure:
        step.is_undecided = False
        return None if _is_prevented(optimizer, is_possible=True) else body(*args, **kwargs)
    step.in_body = True
    try:
        return body(*args, **kwargs)
    except _PreventedStep as prevented:
        if prevented.step is not step:
            raise
        return prevented.result
    finally:
        step.in_body = False


def _is_prevented(optimizer: Optimizer, *, is_possible: bool) -> bool:
    """Return whether one of the deciders prevents an update. All are asked, because ranks vote on it."""
    is_prevented = False
    for reference in tuple(_deciders):  # it may change meanwhile
        decider = reference()
        if decider is None:
            continue
        try:
            is_prevented |= decider.prevents(optimizer, is_possible=is_possible)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            decider.failed(error)
    return is_prevented


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not observable():
        return
    own_work.enter()
    try:
        _end(optimizer, args, kwargs, sys._getframe(1))  # noqa: SLF001 - as above
    except Exception as error:  # noqa: BLE001 - as above
        _report(error)
    finally:
        own_work.leave()


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: FrameType) -> None:
    step = _steps_in_progress.get(optimizer)
    if step is None:
        return
    if step.nested and _is_nested(optimizer, wrapper) is not False:
        step.nested -= 1
        return
    _steps_in_progress.pop(optimizer)
    has_closure = _has_closure(_without_self(optimizer, args), kwargs)
    for listener in _living():
        _notify(listener, functools.partial(listener.after_step, optimizer, has_closure=has_closure))


def _observed_closure(
    optimizer: Optimizer, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with its closure replaced by a reporting wrapper."""
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": _reporting_closure(optimizer, step, closure)}
    arguments = list(args)
    for place, argument in enumerate(arguments):
        if argument is not optimizer and callable(argument):
            arguments[place] = _reporting_closure(optimizer, step, argument)
            break
    return tuple(arguments), kwargs


def _without_self(optimizer: Optimizer, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1:] if args and args[0] is optimizer else args
