"""The functions that are compiled instead of one of the program: one that also returns its updates, and one that is called inside of such.

JAX caches traces and compiled programs by the function. A program may compile the same function again and again, as in ``jax.jit(step)(state)`` in a loop,
so that the functions here are created once for each function of the program.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from watchstep.jax.activations.modules import ObservedStep
from watchstep.jax.traced_updates import StepOutputs, collecting, report

Function = Callable[..., Any]

_numbers = itertools.count(1)


class FunctionForms:
    """Functions that are compiled instead of one of the program.

    Attributes:
        number: number of the program's function in this process.
        observed: what is observed of its modules.
        recording: returns the result and the extra outputs.
        inner: returns the result. It is the program's function, but another one for the caches of JAX.
    """

    def __init__(self, function: Callable[[], Function], like: Function) -> None:
        """Create the functions.

        Args:
            function: returns the program's function.
            like: that function, whose name and signature they have. No reference to it remains.
        """
        self.number = next(_numbers)
        self.observed = ObservedStep()
        self._function = function
        self.recording = self._recording_like(like)

        def inner(*arguments: Any, **keywords: Any) -> Any:
            return function()(*arguments, **keywords)

        self.inner = _named_like(like, inner)

    @classmethod
    def of(cls, function: Function) -> FunctionForms:
        """Return those of a function or of another callable object, the same ones as long as it lives."""
        if isinstance(function, (types.MethodType, types.BuiltinFunctionType)):
            return cls(lambda: function, function)  # a bound method is another object each time
        key = id(function)  # callable objects may be equal without being the same, or not be hashable
        try:
            reference: weakref.ref[Function] = weakref.ref(function, functools.partial(_forget, _forms, key))
        except TypeError:
            return cls(lambda: function, function)
        with _lock:
            known = _forms.get(key)
            if known is not None and known[0]() is function:
                return known[1]
            forms = cls(lambda: _living(reference), function)
            _forms[key] = reference, forms
        return forms

    def renew(self) -> Function:
        """Replace ``recording`` by another function, which JAX traces anew, and return it."""
        self.recording = self._recording_like(self.recording)
        return self.recording

    def without_modules(self) -> Function:
        """Return another function that returns what ``recording`` does, and observes no modules."""
        observed = ObservedStep()
        observed.close()
        return self._recording_like(self.recording, observed)

    def _recording_like(self, like: Function, observed: ObservedStep | None = None) -> Function:
        observed, function = observed or self.observed, self._function

        def step(*arguments: Any, **keywords: Any) -> tuple[Any, StepOutputs]:
            with collecting() as collector, observed.tracing():
                result = function()(*arguments, **keywords)
            try:
                outputs = collector.outputs((arguments, keywords))
            except Exception as error:  # noqa: BLE001 - never into the program
                report("outputs", error)
                return result, ()
            return result, outputs

        return _named_like(like, step)


_forms: dict[int, tuple[weakref.ref[Function], FunctionForms]] = {}
"""The forms of each function, by its id."""

_lock = threading.Lock()


def _forget(
    forms: dict[int, tuple[weakref.ref[Function], FunctionForms]], key: int, reference: weakref.ref[Function]
) -> None:
    """Remove the forms of a function that has been deleted.

    Without the lock, because the thread that has it may collect garbage; and without globals, which are gone when the interpreter ends.
    """
    known = forms.get(key)
    if known is not None and known[0] is reference:
        del forms[key]


def _living(reference: weakref.ref[Function]) -> Function:
    function = reference()
    if function is None:  # a compiled form refers to it
        raise ReferenceError("the compiled function has been deleted")
    return function


def _named_like(like: Function, function: Function) -> Function:
    """Give a function the name and the signature of another, without a reference to it."""
    functools.update_wrapper(function, like, updated=())
    del function.__wrapped__  # type: ignore[attr-defined]
    with contextlib.suppress(TypeError, ValueError):
        function.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    return function
