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
from collections.abc import Callable, MutableMapping
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
        """Return those of a function, the same ones as long as it lives."""
        if not isinstance(function, (types.FunctionType, functools.partial)):
            return cls(
                lambda: function, function
            )  # others may be equal without being the same, or not be hashable
        reference: weakref.ref[Function] = weakref.ref(function)
        with _lock:
            forms = _forms.get(function)
            if forms is None:
                forms = _forms[function] = cls(lambda: _living(reference), function)
        return forms

    def renew(self) -> Function:
        """Replace ``recording`` by another function, which JAX traces anew, and return it."""
        self.recording = self._recording_like(self.recording)
        return self.recording

    def _recording_like(self, like: Function) -> Function:
        observed, function = self.observed, self._function

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


_forms: MutableMapping[Function, FunctionForms] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


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
