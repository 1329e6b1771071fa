"""Compiled functions whose updates leave them as extra outputs.

`install` replaces `jax.jit` by a function that compiles ``(outputs, extra outputs)``. A function without an update has no extra
outputs, and compiles to the same program. A call inside another trace is the program's own.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from watchstep.jax.stacked_layers import stacked_arguments
from watchstep.jax.traced_updates import (
    StepOutputs,
    UpdateLayout,
    UpdateOutputs,
    collecting,
    is_top_level,
    report,
)

_MARK = "_watchstep_records"


class StepObserver(Protocol):
    """Receives the updates of compiled functions, on the thread that calls them."""

    def about_to_dispatch(self, function: CompiledStep, arguments: Any) -> None:
        """A function with updates is about to be called, and may donate its arguments.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        ...

    def dispatched(self, function: CompiledStep, updates: StepOutputs, arguments: Any, result: Any) -> None:
        """A function with updates was called. Its outputs may still be computed, and its arguments donated. Never raises."""
        ...


_observers: list[StepObserver] = []


def observe(observer: StepObserver) -> None:
    """Pass updates to an observer."""
    _observers.append(observer)


def forget(observer: StepObserver) -> None:
    """Pass no more updates to an observer."""
    if observer in _observers:
        _observers.remove(observer)


class CompiledStep:
    """A compiled function of the program: called as the one of `jax.jit`, whose attributes it has.

    Attributes:
        layouts: layouts of the updates of its calls so far that are outputs.
        stacked: for each layout, which of its parameters are stacks of layers.
        has_updates: whether its trace contains an update.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        plain: Any,
        recording: Any,
        static_argnums: int | Sequence[int] = (),
    ) -> None:
        """Wrap a function.

        Args:
            function: the program's function.
            plain: its compiled form.
            recording: the compiled form that also returns extra outputs.
            static_argnums: positions of arguments that are constants.
        """
        functools.update_wrapper(self, function)
        self._plain = plain
        self._recording = recording
        self.static_argnums = static_argnums
        self.layouts: set[UpdateLayout] = set()
        self.stacked: dict[UpdateLayout, tuple[bool, ...]] = {}
        self.has_updates = False
        self._is_prepared = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function."""
        if not is_top_level():
            return self._plain(*arguments, **keywords)
        if not self._is_prepared:
            self._prepare(arguments, keywords)
        if self.has_updates:
            for observer in tuple(_observers):
                observer.about_to_dispatch(self, (arguments, keywords))
        result, updates = self._recording(*arguments, **keywords)
        if updates:
            self._take(updates, arguments, keywords)
            for observer in tuple(_observers):
                observer.dispatched(self, updates, (arguments, keywords), result)
        return result

    def _prepare(self, arguments: Any, keywords: Any) -> None:
        """Trace the function, as its first call does, and find its updates before the call donates its arguments."""
        self._is_prepared = True
        try:
            _, updates = self._recording.trace(*arguments, **keywords).out_info
        except Exception:  # noqa: BLE001 - the call raises it, or does not trace
            return
        if updates:
            self._take(updates, arguments, keywords)

    def _take(self, updates: StepOutputs, arguments: Any, keywords: Any) -> None:
        """Note the layouts of updates."""
        self.has_updates = True
        layouts = {update.layout for update in updates if isinstance(update, UpdateOutputs)}
        if layouts <= self.layouts:
            return
        try:
            stacked = stacked_arguments(self._recording, arguments, keywords)
        except Exception as error:  # noqa: BLE001 - never into the program
            report("stacked layers", error)
            stacked = frozenset()
        for layout in layouts - self.layouts:
            self.stacked[layout] = tuple(place is not None and place in stacked for place in layout.inputs)
        self.layouts |= layouts

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_plain":
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        return self

    def __reduce__(self) -> Any:
        return self._plain.__reduce__()

    def _cache_size(self) -> int:
        return int(self._recording._cache_size())  # noqa: SLF001 - the attribute that programs read

    def clear_cache(self) -> None:
        """Remove all compiled programs."""
        self._plain.clear_cache()
        self._recording.clear_cache()


_install_lock = threading.Lock()


def install() -> None:
    """Replace `jax.jit`. Called outside of traces; does nothing the second time."""
    with _install_lock:
        if hasattr(jax.jit, _MARK):
            return
        jax.jit = _recording_jit(jax.jit)


def _recording_jit(jit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(jit)
    def compile_step(*arguments: Any, **options: Any) -> Any:
        if not arguments:
            return functools.partial(compile_step, **options)
        plain = jit(*arguments, **options)
        try:
            (function,) = arguments
            static = options.get("static_argnums")
            return CompiledStep(
                function, plain, _recording_form(jit, function, options), () if static is None else static
            )
        except Exception as error:  # noqa: BLE001 - never into the program
            report("jit", error)
            return plain

    setattr(compile_step, _MARK, True)
    return compile_step


def _recording_form(jit: Callable[..., Any], function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Compile a function that returns its result and its extra outputs."""

    @functools.wraps(function)
    def step(*arguments: Any, **keywords: Any) -> tuple[Any, StepOutputs]:
        with collecting() as collector:
            result = function(*arguments, **keywords)
        try:
            return result, collector.outputs((arguments, keywords))
        except Exception as error:  # noqa: BLE001 - as above
            report("outputs", error)
            return result, ()

    if "out_shardings" in options:
        # None leaves the sharding of the extra outputs to the compiler.
        options = {**options, "out_shardings": (options["out_shardings"], None)}
    return jit(step, **options)
