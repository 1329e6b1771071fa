"""Calls of the program's compiled functions: before and after each outermost call of a `tf.function`.

`install` changes the class of these functions. A call inside of another function's trace is part of that one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

_MARK = "_watchstep_calls"


class CallObserver(Protocol):
    """Receives calls of functions, on the thread that makes them."""

    def before_call(self, function: Any) -> None:
        """A function is about to be called. Never raises."""
        ...

    def after_call(self, function: Any) -> None:
        """A function was called.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        ...


_observers: list[CallObserver] = []


class _CurrentCall(threading.local):
    function: Any = None


_current = _CurrentCall()


def observe(observer: CallObserver) -> None:
    """Pass calls to an observer."""
    if observer not in _observers:
        _observers.append(observer)


def forget(observer: CallObserver) -> None:
    """Pass no more calls to an observer."""
    if observer in _observers:
        _observers.remove(observer)


def current_function() -> Any:
    """Return the outermost function that this thread is calling; None outside of functions."""
    return _current.function


class FunctionSet:
    """Functions that are known to make updates, weakly referenced."""

    def __init__(self) -> None:
        self._functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, function: Any) -> None:
        """Add a function."""
        self._functions[id(function)] = function

    def __contains__(self, function: Any) -> bool:
        return self._functions.get(id(function)) is function


@functools.cache
def install() -> None:
    """Observe the calls of all functions of this process."""
    kind = type(tf.function(lambda: None))
    if not hasattr(kind, _MARK):
        setattr(kind, _MARK, True)
        kind.__call__ = _observed(kind.__call__)


def _observed(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def observed_call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        if not _observers or _current.function is not None or not tf.executing_eagerly():
            return call(function, *arguments, **keywords)
        observers = tuple(_observers)
        for observer in observers:
            observer.before_call(function)
        _current.function = function
        try:
            result = call(function, *arguments, **keywords)
        finally:
            _current.function = None
        for observer in observers:
            observer.after_call(function)
        return result

    return observed_call
