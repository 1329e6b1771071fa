"""Calls of the program's compiled functions: before and after each outermost call of a `tf.function`.

`install` changes the class of these functions. A call inside of another function's trace is part of that one.

A program that saves a function as a SavedModel gets a trace of it without the recorder's operations: TensorFlow refuses to save functions
that use variables of no saved object.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from watchstep.tensorflow.internals import graphs_of_trace, has_graphs, tensorflow_names

_MARK = "_watchstep_calls"
_VARIABLES = "_watchstep_variables"
_CLONE = "_watchstep_clone"


class CallObserver(Protocol):
    """Receives calls of functions, on the thread that makes them."""

    def traced_call(self, function: Any, enclosing: Sequence[Any]) -> None:
        """A function was called in the trace of others, perhaps by a trace of its own that existed. Never raises."""
        ...

    def before_call(self, function: Any) -> None:
        """A function is about to be called. Never raises."""
        ...

    def after_call(self, function: Any) -> None:
        """A function was called.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        ...

    def call_failed(self, function: Any) -> None:
        """A call of a function has raised, perhaps after updates. Never raises."""
        ...


_observers: list[CallObserver] = []


class _CurrentCall(threading.local):
    """Functions of this thread.

    Attributes:
        function: the outermost one that is being called.
        traced: the outermost one that is being traced without a call.
        calls: those that are being called or traced, outermost first.
        is_clean: whether it is being traced without operations of the recorder.
    """

    function: Any = None
    traced: Any = None
    is_clean = False

    def __init__(self) -> None:
        self.calls: list[Any] = []


_current = _CurrentCall()
_own: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Variables of the recorder, by the ids of their handles."""

_in_progress: dict[int, list[Any]] = {}
"""Functions that are being called from eager code and those that they call, by the id of the thread."""


def observe(observer: CallObserver) -> None:
    """Pass calls to an observer."""
    if observer not in _observers:
        _observers.append(observer)


def forget(observer: CallObserver) -> None:
    """Pass no more calls to an observer."""
    if observer in _observers:
        _observers.remove(observer)


def current_functions() -> tuple[Any, ...]:
    """Return the functions that this thread is tracing, outermost first; none outside of functions.

    The program may call each of them: an inner function keeps its trace. A thread that calls none from eager code may be one of a
    `tf.distribute.MirroredStrategy`, which traces the steps of its replicas in threads: the outer ones are then the functions that another
    thread is calling, if that is only one.
    """
    is_outermost = _current.function is not None or _current.traced is not None
    others = [] if is_outermost else list(_in_progress.values())
    return (*(others[0] if len(others) == 1 else ()), *_current.calls)


def traced_function() -> Any:
    """Return the outermost function that this thread traces without calling it, by ``get_concrete_function``; None outside of those."""
    return _current.traced


def is_clean() -> bool:
    """Return whether this thread traces a function that the program may save: nothing may be added to it."""
    return _current.is_clean


def add_own(variables: Sequence[Any]) -> None:
    """Add variables of the recorder that the graph that is being built writes. They exist as long as that graph, or one that encloses it."""
    _own.update({id(variable.handle): variable for variable in variables})
    for graph in graphs_of_trace():
        setattr(graph, _VARIABLES, [*getattr(graph, _VARIABLES, ()), *variables])


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
def install() -> bool:
    """Observe the calls of all functions of this process.

    Returns:
        Whether updates in functions can be recorded. Otherwise nothing is changed.
    """
    function = tf.function(lambda: None)
    kind = type(function)
    if not has_graphs(function):
        return False
    if not hasattr(kind, _MARK):
        setattr(kind, _MARK, True)
        kind.__call__ = _observed(kind.__call__)
        name = tensorflow_names.attribute("trace")  # the public method and SavedModel call it
        setattr(kind, name, _tracing(getattr(kind, name)))
    return True


def _observed(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def observed_call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        if _current.is_clean:
            return call(_clone_of(function), *arguments, **keywords)
        observers = tuple(_observers)
        if not tf.executing_eagerly():
            return _called_in_trace(observers, call, function, *arguments, **keywords)
        if not observers or _current.function is not None:
            return call(function, *arguments, **keywords)
        for observer in observers:
            observer.before_call(function)
        thread = threading.get_ident()
        _current.function = function
        _current.calls = _in_progress[thread] = [function]
        try:
            result = call(function, *arguments, **keywords)
        except Exception:
            for observer in observers:
                observer.call_failed(function)
            raise
        finally:
            _current.function = None
            _current.calls = []
            _in_progress.pop(thread, None)
        for observer in observers:
            observer.after_call(function)
        return result

    return observed_call


def _called_in_trace(
    observers: Sequence[CallObserver],
    call: Callable[..., Any],
    function: Any,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Call a function in the trace of others, which then make its updates, also where its own trace exists and is not made again."""
    enclosing = current_functions()
    _current.calls.append(function)
    try:
        return call(function, *arguments, **keywords)
    finally:
        _current.calls.pop()
        for observer in observers:
            observer.traced_call(function, enclosing)


def _tracing(trace: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(trace)
    def observed_trace(function: Any, *arguments: Any, **keywords: Any) -> Any:
        if _current.function is not None or _current.traced is not None or _current.is_clean:
            return trace(function, *arguments, **keywords)
        _current.traced = function
        _current.calls.append(function)
        try:
            concrete = trace(function, *arguments, **keywords)
        finally:
            _current.traced = None
            _current.calls.pop()
        captured = tensorflow_names.of(concrete, "captured")
        if captured is not None and not any(id(capture) in _own for capture in captured):
            return concrete
        _current.is_clean = True
        try:
            return trace(_clone_of(function), *arguments, **keywords)
        finally:
            _current.is_clean = False

    return observed_trace


def _clone_of(function: Any) -> Any:
    """Return a function of the same Python code, with traces of its own."""
    if not hasattr(function, _CLONE):
        setattr(
            function, _CLONE, tensorflow_names.of(function, "clone")(None)
        )  # TensorFlow itself copies functions by it
    return getattr(function, _CLONE)
