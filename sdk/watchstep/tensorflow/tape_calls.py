"""Observation of gradient tapes: what the outermost tape of a thread differentiates, with respect to what.

`install` changes methods of `tf.GradientTape`, once in a process. A gradient that is computed while another tape records is part of
that one's target, as a penalty on gradients is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

_MARK = "_watchstep_observed"


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


_observers: list[TapeObserver] = []


class _Thread(threading.local):
    """Tapes of this thread.

    Attributes:
        recording: ids of those that record.
        target: the last target of an outermost tape.
    """

    def __init__(self) -> None:
        self.recording: list[int] = []
        self.target: Any = None


_thread = _Thread()


def observe(observer: TapeObserver) -> None:
    """Pass gradients to an observer."""
    if observer not in _observers:
        _observers.append(observer)


def forget(observer: TapeObserver) -> None:
    """Pass no more gradients to an observer."""
    if observer in _observers:
        _observers.remove(observer)


def take_target() -> Any:
    """Return the last target of an outermost tape, once; None if there is none, or it was not a number."""
    target, _thread.target = _thread.target, None
    return target


@functools.cache
def install() -> None:
    """Observe all tapes of this process."""
    kind = tf.GradientTape
    if not hasattr(kind, _MARK):
        setattr(kind, _MARK, True)
        kind.__enter__ = _entering(kind.__enter__)
        kind.__exit__ = _leaving(kind.__exit__)
        kind.gradient = _differentiating(kind.gradient)


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


def _differentiating(gradient: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gradient)
    def observed_gradient(tape: Any, target: Any, sources: Any, *arguments: Any, **keywords: Any) -> Any:
        result = gradient(tape, target, sources, *arguments, **keywords)
        if not any(entered != id(tape) for entered in _thread.recording):
            made = _made(target, sources, result)
            if made is not None:
                _thread.target = made.target
                for observer in tuple(_observers):
                    observer.differentiated(made)
        return result

    return observed_gradient


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
