"""Observation of gradient tapes: what the outermost tape of a thread differentiates, with respect to what.

`install` changes methods of `tf.GradientTape`, once in a process. A gradient that is computed while another tape records is part of
that one's target, as a penalty on gradients is. Rows of a Jacobian, and gradients of single examples in `tf.vectorized_map`, are no updates.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from watchstep.stopping import StopTraining
from watchstep.tensorflow.internals import graphs_of_trace, has_tapes

_MARK = "_watchstep_observed"
_MAX_TARGETS = 16


@dataclass(frozen=True)
class TapeGradients:
    """The result of one call of ``gradient``.

    Attributes:
        target: what was differentiated: a tensor of shape (); None if it is not one.
        variables: the sources, all of them variables.
        gradients: the gradient of each; None for one that does not exist.
    """

    target: Any
    variables: Sequence[Any]
    gradients: Sequence[Any]


class TapeObserver(Protocol):
    """Receives the gradients of tapes, on the thread that computes or traces them."""

    def differentiated(self, result: TapeGradients) -> None:
        """A tape has computed gradients of variables.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        ...

    def report(self, where: str, error: Exception) -> None:
        """Count a fault of the recorder."""
        ...


_observers: list[TapeObserver] = []


@dataclass(frozen=True)
class _Target:
    """What an outermost tape has differentiated.

    Attributes:
        variables: ids of the sources.
        target: tensor of shape ().
    """

    variables: frozenset[int]
    target: Any


class _Thread(threading.local):
    """Tapes of this thread.

    Attributes:
        recording: ids of those that record.
        targets: targets of outermost tapes that no update has taken.
        parts: number of calls in progress whose gradients are only parts of a result.
    """

    def __init__(self) -> None:
        self.recording: list[int] = []
        self.parts = 0
        self.targets: list[_Target] = []


_thread = _Thread()


def observe(observer: TapeObserver) -> None:
    """Pass gradients to an observer."""
    if observer not in _observers:
        _observers.append(observer)


def forget(observer: TapeObserver) -> None:
    """Pass no more gradients to an observer."""
    if observer in _observers:
        _observers.remove(observer)


def is_recording() -> bool:
    """Return whether a tape of this thread records."""
    return bool(_thread.recording)


def take_targets(variables: Sequence[Any]) -> list[Any]:
    """Return, once, what outermost tapes of this thread have differentiated with respect to variables, in the graph that is being built.

    Args:
        variables: variables of TensorFlow or of Keras. Sources of another tape may be a part of them.
    """
    wanted = _identities(variables)
    matching = [entry for entry in _thread.targets if entry.variables & wanted]
    _thread.targets = [entry for entry in _thread.targets if not entry.variables & wanted]
    return list({id(entry.target): entry.target for entry in matching if belongs_here(entry.target)}.values())


def belongs_here(tensor: Any) -> bool:
    """Return whether a tensor is an eager one in eager code, or belongs to the graph that is being built or to one that encloses it."""
    own = getattr(tensor, "graph", None)
    if tf.executing_eagerly():
        return own is None
    return any(graph is own for graph in graphs_of_trace())


def _add_target(made: TapeGradients) -> None:
    """Add a target, and drop those of other graphs, which no update can use any more."""
    usable = [entry for entry in _thread.targets if belongs_here(entry.target)][1 - _MAX_TARGETS :]
    if made.target is not None:
        usable.append(_Target(_identities(made.variables), made.target))
    _thread.targets = usable


def _identities(variables: Sequence[Any]) -> frozenset[int]:
    """Return the ids of TensorFlow's variables, also for those of Keras that contain them."""
    return frozenset(
        id(variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable))
        for variable in variables
    )


@functools.cache
def install() -> None:
    """Observe all tapes of this process."""
    kind = tf.GradientTape
    if not hasattr(kind, _MARK) and has_tapes():
        setattr(kind, _MARK, True)
        kind.__enter__ = _entering(kind.__enter__)
        kind.__exit__ = _leaving(kind.__exit__)
        kind.gradient = _differentiating(kind.gradient)
        kind.jacobian = _ignoring(kind.jacobian)
        kind.batch_jacobian = _ignoring(kind.batch_jacobian)
        tf.vectorized_map = _ignoring(tf.vectorized_map)


def _entering(enter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enter)
    def observed_enter(tape: Any) -> Any:
        result = enter(tape)
        _thread.recording.append(id(tape))
        return result

    return observed_enter


def _leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def observed_exit(tape: Any, *error: Any) -> Any:
        if id(tape) in _thread.recording:
            _thread.recording.remove(id(tape))
        return leave(tape, *error)

    return observed_exit


def _ignoring(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def ignoring(*arguments: Any, **keywords: Any) -> Any:
        _thread.parts += 1
        try:
            return method(*arguments, **keywords)
        finally:
            _thread.parts -= 1

    return ignoring


def _differentiating(gradient: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gradient)
    def observed_gradient(tape: Any, target: Any, sources: Any, *arguments: Any, **keywords: Any) -> Any:
        result = gradient(tape, target, sources, *arguments, **keywords)
        if not _thread.parts and not any(entered != id(tape) for entered in _thread.recording):
            made = _made(target, sources, result)
            if made is not None:
                _pass_on(made)
        return result

    return observed_gradient


def _pass_on(made: TapeGradients) -> None:
    """Pass gradients to the observers. Their faults never reach the program; a stop does."""
    try:
        _add_target(made)
        for observer in tuple(_observers):
            observer.differentiated(made)
    except StopTraining:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        for observer in tuple(_observers):
            observer.report("tensorflow", error)


def _made(target: Any, sources: Any, result: Any) -> TapeGradients | None:
    """Describe gradients of variables; None for others, and for nothing that can be described."""
    try:
        variables = tf.nest.flatten(sources)
        if not variables or not all(_is_variable(variable) for variable in variables):
            return None
        targets = tf.nest.flatten(target)
        is_number = len(targets) == 1 and getattr(targets[0], "shape", None) is not None
        number = targets[0] if is_number and targets[0].shape.rank == 0 else None
        return TapeGradients(number, variables, tf.nest.flatten(result, expand_composites=False))
    except Exception:  # noqa: BLE001 - the recorder's faults never reach training
        return None


def _is_variable(source: Any) -> bool:
    """Return whether a source is a variable of TensorFlow or of Keras that is trained."""
    is_variable = isinstance(source, tf.Variable) or isinstance(getattr(source, "value", None), tf.Variable)
    return is_variable and bool(getattr(source, "trainable", True))
