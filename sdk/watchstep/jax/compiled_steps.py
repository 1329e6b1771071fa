"""Compiled functions whose updates leave them as extra outputs.

`install` replaces `jax.jit` by a function that compiles ``(outputs, extra outputs)``. A function without an update has no extra
outputs, and compiles to the same program. A call inside another trace is the program's own.
"""

from __future__ import annotations

import copy
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from watchstep.jax.activations.activation_ring import activation_ring
from watchstep.jax.activations.modules import ObservedStep, observes_modules
from watchstep.jax.function_forms import FunctionForms
from watchstep.jax.inner_calls import StaticArguments, call_inline
from watchstep.jax.internals import jax_names
from watchstep.jax.ring.step_ring import check_rings
from watchstep.jax.sharding.argument_shardings import argument_shardings
from watchstep.jax.stacked_layers import stacked_arguments
from watchstep.jax.step_settings import StepSettings, effective_settings
from watchstep.jax.traced_updates import (
    InnerUpdates,
    RecordingForm,
    StepOutputs,
    UpdateLayout,
    UpdateOutputs,
    activations_not_observed,
    is_collecting,
    is_probing,
    not_observed,
    note_update_of_inner,
    probing,
    recording_form,
    report,
    unrecorded_form,
)
from watchstep.jax.update_parts import is_top_level
from watchstep.platform.program_errors import is_of_program
from watchstep.stopping import StopTraining

_MARK = "_watchstep_records"
_MAX_DESCRIPTIONS = 8
"""Kinds of arguments of a function whose updates are kept, such as batches with and without a mask."""


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

    def dispatch_failed(self, function: CompiledStep) -> None:
        """A call of a function with updates inside of it raised. Never raises."""
        ...


_observers: list[StepObserver] = []


def observe(observer: StepObserver) -> None:
    """Pass updates to an observer."""
    _observers.append(observer)


def forget(observer: StepObserver) -> None:
    """Pass no more updates to an observer."""
    if observer in _observers:
        _observers.remove(observer)


plain_calls: list[Callable[[CompiledStep, Any, Any], None]] = []
"""Called with the function, the arguments and the result of each call that makes no update. They raise nothing."""


stopping: list[Callable[[Any], None]] = []
"""Called with the positional arguments of a call that is not made, because an observer stops the program before it. They raise nothing."""


dispatching = threading.RLock()
"""Excludes other threads while a function with updates inside of it is called, or what it has recorded is read: both replace the same memory."""


class CompiledStep:
    """A compiled function of the program: called as the one of `jax.jit`, whose attributes it has.

    Attributes:
        has_updates: whether a trace of it contains an update.
        inner_layouts: layouts of its updates that rings record.
        static_argnums: positions of arguments that are constants.
        observed: what is observed of its modules.
    """

    def __init__(
        self,
        plain: Any,
        forms: FunctionForms,
        jit: Callable[..., Any],
        options: Mapping[str, Any],
    ) -> None:
        """Wrap a function.

        Args:
            plain: its compiled form.
            forms: the functions that are compiled instead of it.
            jit: compiles them.
            options: the options that the program compiles it with.
        """
        functools.update_wrapper(self, plain)
        self.__wrapped__ = plain.__wrapped__  # the program's function, as that of JAX
        self._plain = plain
        self._forms = forms
        self._compiled = functools.partial(_compiled_recording, jit, dict(options))
        self._recording = self._compiled(forms.recording)
        self._inner = jit(forms.inner, **options)
        self._static = StaticArguments.of(self.__wrapped__, options)
        static = options.get("static_argnums")
        self.static_argnums: int | Sequence[int] = () if static is None else static
        self.has_updates = False
        self.inner_layouts: list[UpdateLayout] = []
        self._form: RecordingForm | None = None
        self._quiet_form: RecordingForm | None = (
            None  # of a function that has neither updates nor rows of modules
        )
        self._is_disabled = False
        self._contains_update: dict[Hashable, bool] = {}
        self._called_updates: list[tuple[Any, list[CalledUpdate]]] = []

    @property
    def observed(self) -> ObservedStep:
        """What is observed of the modules of the function."""
        return self._forms.observed

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function."""
        if not is_top_level():
            return self._called_inside(arguments, keywords)
        form = self._quiet_form
        if form is not None and form.settings is effective_settings() and not _is_being_debugged():
            with recording_form(form):
                result, updates = self._recording(*arguments, **keywords)
            if updates:
                return self._passed_on(updates, arguments, keywords, result)
            return self._noted(arguments, keywords, result) if plain_calls else result
        if self._is_disabled or _is_being_debugged():
            return self._plain(*arguments, **keywords)
        try:
            form = self._form_of(arguments, keywords)
        except Exception as fault:  # noqa: BLE001 - never into the program
            report("jax", fault)
            self.disable()
            return self._plain(*arguments, **keywords)
        if self._form is None or form.settings is not self._form.settings:
            self._form = form
            error = self._prepare(arguments, keywords)
            if error is not None:
                return self._called_unobserved(error, arguments, keywords)
        self._form = form
        if not self.has_updates:
            with recording_form(form):
                result = self._called(arguments, keywords)
            if not (self.has_updates or self._is_disabled or self.observed.is_open):
                self._quiet_form = form
            return (
                self._noted(arguments, keywords, result) if plain_calls and not self.has_updates else result
            )
        try:
            for observer in tuple(_observers):
                observer.about_to_dispatch(self, (arguments, keywords))
        except StopTraining:
            for listener in tuple(stopping):
                listener(arguments)
            raise
        if self._is_disabled:
            return self._plain(*arguments, **keywords)
        with recording_form(form):
            return self._called(arguments, keywords)

    def _form_of(self, arguments: Any, keywords: Any) -> RecordingForm:
        """Return what the trace for a call depends on."""
        settings, last = effective_settings(), self._form
        shardings = None if last is None else last.shardings
        if last is None or self.has_inner_updates:
            # Rings measure where the parameters are. Any other trace does not depend on it, and stays the one of the first call.
            shardings = argument_shardings((arguments, keywords), shardings)
        if last is not None and last.settings is settings and last.shardings is shardings:
            return last
        return RecordingForm(self._forms.number, settings, shardings)

    def _prepare(self, arguments: Any, keywords: Any) -> Exception | None:
        """Find the updates of the function. Its modules are observed if it has one, and JAX can transform what they write.

        Returns:
            The error of the trace, which may be the program's own; None if there is none.
        """
        self.has_updates, self.inner_layouts, self._called_updates = False, [], []
        try:
            self._trace(arguments, keywords)
            if not self.has_updates and self.observed.is_open:
                is_traced_again = self.observed.has_rows
                self.observed.close()
                if is_traced_again:
                    self._recording = self._compiled(self._forms.renew())
                    self._trace(arguments, keywords)
        except Exception as error:
            if is_of_program(error):
                raise
            return error  # the call without a recording raises it, if it is that of the step
        return None

    def _called_unobserved(self, error: Exception, arguments: Any, keywords: Any) -> Any:
        """Call the program's own form after the recording form could not be traced. If it raises, the error was the program's."""
        self._form = None
        result = self._plain(*arguments, **keywords)
        self.disable()
        reason = (str(error).splitlines() or [""])[0][:200]
        for listener in tuple(not_observed):
            listener(f"a step is not observed: {type(error).__name__}: {reason}")
        return result

    def disable(self) -> None:
        """Call only the program's own form from now on."""
        self._is_disabled, self._quiet_form = True, None

    @property
    def has_inner_updates(self) -> bool:
        """Whether a trace of it contains an update that a ring records."""
        return bool(self.inner_layouts)

    def _called_inside(self, arguments: Any, keywords: Any) -> Any:
        """Call the function inside of a trace.

        JAX traces a compiled function once, for all places that call it. One with an update is called as it was written instead, so that
        a ring that records it in a scan is not part of it in a ``vmap``.
        """
        if is_probing():
            if self._updates_inside(arguments, keywords):
                note_update_of_inner()
            return self._called_as_inner(arguments, keywords)
        if not is_collecting():
            return self._plain(*arguments, **keywords)
        if self._updates_inside(arguments, keywords):
            return call_inline(self.__wrapped__, self._static, arguments, keywords)
        return self._called_as_inner(arguments, keywords)

    def _called_as_inner(self, arguments: Any, keywords: Any) -> Any:
        with unrecorded_form():
            return self._inner(*arguments, **keywords)

    def _updates_inside(self, arguments: Any, keywords: Any) -> bool:
        """Return whether the function contains an update. Found at the first call with its constants; the trace is that of the call."""
        try:
            constants = self._static.values(arguments, keywords)
            if constants not in self._contains_update:
                with probing() as probe, unrecorded_form():
                    self._inner.trace(*arguments, **keywords)
                self._contains_update[constants] = probe.found_update
        except Exception as error:
            if is_of_program(error):
                raise
            return False  # the call raises it
        return self._contains_update[constants]

    def _called(self, arguments: Any, keywords: Any) -> Any:
        """Call the recording form, and pass its updates on."""
        if not self.has_inner_updates:
            result, updates = self._called_with_modules(arguments, keywords)
        elif not _rings_are_of_this_thread():
            return self._plain(*arguments, **keywords)
        else:
            with dispatching:
                # Programs may still write to rings of recordings that have ended.
                if not check_rings():
                    self.disable()
                    return self._plain(*arguments, **keywords)
                try:
                    result, updates = self._called_with_modules(arguments, keywords)
                except BaseException:
                    check_rings()
                    for observer in tuple(_observers):
                        observer.dispatch_failed(self)
                    raise
        return self._passed_on(updates, arguments, keywords, result) if updates else result

    def _noted(self, arguments: Any, keywords: Any, result: Any) -> Any:
        """Note a call without an update, and return its result."""
        for listener in tuple(plain_calls):
            listener(self, (arguments, keywords), result)
        return result

    def _passed_on(self, updates: StepOutputs, arguments: Any, keywords: Any, result: Any) -> Any:
        """Pass the updates of a call on, and return its result."""
        self._note(updates)
        for observer in tuple(_observers):
            observer.dispatched(self, updates, (arguments, keywords), result)
        return result

    def _called_with_modules(self, arguments: Any, keywords: Any) -> Any:
        """Call the recording form. If its modules write rows that JAX cannot transform, they are not observed any more."""
        if not self.observed.is_open or not (observes_modules() or self.observed.has_rows):
            return self._recording(*arguments, **keywords)
        with dispatching:
            if self.observed.has_rows and not activation_ring.check():
                self._unobserve("their memory cannot be used")
                return self._recording(*arguments, **keywords)
            try:
                called = self._recording(*arguments, **keywords)
            except Exception as error:
                activation_ring.check()
                is_programs = not self.observed.is_unproven or is_of_program(error)
                if is_programs or _has_deleted((arguments, keywords)):
                    raise
                self._unobserve(f"{type(error).__name__}: {error}")
            else:
                self.observed.is_unproven = False
                return called
        return self._recording(*arguments, **keywords)

    def _unobserve(self, reason: str) -> None:
        """Observe the modules no more."""
        self._called_updates = []
        for listener in tuple(activations_not_observed):
            listener(f"activations of a step are not observed: {reason.splitlines()[0][:200]}")
        self.observed.close()
        self._recording = self._compiled(self._forms.renew())

    def layouts_of(self, arguments: Any, keywords: Any) -> list[CalledUpdate]:
        """Return the updates that a call with these arguments makes, in their order. It is traced as the call does, once.

        Args:
            arguments: positional arguments of the call.
            keywords: its keyword arguments.
        """
        try:
            call = self._form, _description((arguments, keywords))
            for described, known in self._called_updates:
                if described == call:
                    return known
            updates, traced = self._trace(arguments, keywords)
        except Exception as error:
            if is_of_program(error):
                raise
            return []  # the call raises it, or does not trace
        layouts = [update.layout for update in updates if isinstance(update, UpdateOutputs)]
        stacked = self._stacked(layouts, traced, arguments, keywords) if layouts else {}
        called = [CalledUpdate(layout, stacked[layout]) for layout in layouts]
        self._called_updates = [(call, called), *self._called_updates][:_MAX_DESCRIPTIONS]
        return called

    def recording_trace(self, arguments: Any, keywords: Any) -> Any:
        """Return the trace of the recording form for a call, whose arguments may have been donated."""
        return self._trace(arguments, keywords)[1]

    def traced_again(self, arguments: Any, keywords: Any) -> Any:
        """Return a new trace of the function for a call, whose updates are made whatever they are. Nothing of it is recorded.

        Its results are ``(result, extra outputs)``.
        """
        form = RecordingForm(-self._forms.number, StepSettings(measures=False), is_probe=True)
        with recording_form(form):
            return self._compiled(self._forms.without_modules()).trace(*arguments, **keywords)

    def called_again(self, arguments: Any, keywords: Any) -> Any:
        """Return what another call of the compiled function returns, extra outputs included, of which nothing is recorded; None if it would be.

        Arguments that the function donates are deleted.
        """
        if self.has_inner_updates or self.observed.has_rows or self._form is None:
            return None
        with recording_form(self._form):
            return self._recording(*arguments, **keywords)

    def _trace(self, arguments: Any, keywords: Any) -> tuple[StepOutputs, Any]:
        """Trace the recording form, once for each kind of arguments. Returns its updates and the trace."""
        try:
            with recording_form(self._form or RecordingForm(self._forms.number)):
                traced = self._recording.trace(*arguments, **keywords)
        except Exception as error:
            if not self.observed.has_rows or is_of_program(error):
                raise
            self._unobserve(f"{type(error).__name__}: {error}")
            return self._trace(arguments, keywords)
        _, updates = traced.out_info
        self._note(updates)
        return updates, traced

    def _stacked(
        self, layouts: list[UpdateLayout], traced: Any, arguments: Any, keywords: Any
    ) -> dict[UpdateLayout, tuple[bool, ...]]:
        """Return which parameters of each layout are stacks of layers. Found once for each trace."""
        if all(layout in _stacks for layout in layouts):
            return {layout: _stacks[layout] for layout in layouts}
        try:
            stacked = stacked_arguments(traced, arguments, keywords)
        except Exception as error:  # noqa: BLE001 - never into the program
            report("stacked layers", error)
            stacked = frozenset()
        for layout in layouts:
            _stacks[layout] = tuple(place is not None and place in stacked for place in layout.inputs)
        return {layout: _stacks[layout] for layout in layouts}

    def _note(self, updates: StepOutputs) -> None:
        if updates:
            self.has_updates, self._quiet_form = True, None
        for update in updates:
            if isinstance(update, InnerUpdates):
                self.inner_layouts += [
                    layout for layout in update.layouts if layout not in self.inner_layouts
                ]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_plain":
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __copy__(self) -> CompiledStep:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        return self

    def __reduce__(self) -> Any:
        # A callable that is read where Watchstep is not installed. The compiled function is pickled as JAX defines it.
        return copy.copy, (self._plain,)

    def __repr__(self) -> str:
        return repr(self._plain)

    def _cache_size(self) -> int:
        size = jax_names.of(self._recording, "cache_size")
        return 0 if size is None else int(size())

    def clear_cache(self) -> None:
        """Remove all compiled programs."""
        self._called_updates = []
        self._plain.clear_cache()
        self._recording.clear_cache()


_stacks: MutableMapping[UpdateLayout, tuple[bool, ...]] = weakref.WeakKeyDictionary()
"""Which parameters of a layout are stacks of layers."""


@dataclass(frozen=True)
class CalledUpdate:
    """An update that a call makes.

    Attributes:
        layout: what is fixed about it.
        stacked: which of its parameters are stacks of layers.
    """

    layout: UpdateLayout
    stacked: tuple[bool, ...]


def stacked_of(layout: UpdateLayout) -> tuple[bool, ...] | None:
    """Return which parameters of a layout are stacks of layers; None if that is unknown."""
    return _stacks.get(layout)


class _RingThread:
    """The thread whose calls rings record. Those of other threads are the program's own: several threads would replace the same memory."""

    thread: threading.Thread | None = None


def _rings_are_of_this_thread() -> bool:
    here = threading.current_thread()
    with dispatching:
        if _RingThread.thread is None or not _RingThread.thread.is_alive():
            _RingThread.thread = here
        return _RingThread.thread is here


_DEBUGGING = ("debug_nans", "debug_infs", "check_tracer_leaks")


def _is_being_debugged() -> bool:
    """Return whether JAX checks the outputs of compiled functions, which extra outputs must not change, or looks for references to traces."""
    try:
        return any(_debugging_options()(jax.config))
    except AttributeError:
        return any(jax_names.of(jax.config, key, default=True) for key in _DEBUGGING)


@functools.cache
def _debugging_options() -> Callable[[Any], tuple[bool, ...]]:
    """Return a function that reads the options at once: they are asked for at each call of a compiled function."""
    return operator.attrgetter(*map(jax_names.attribute, _DEBUGGING))


def _has_deleted(arguments: Any) -> bool:
    """Return whether a call has donated some of its arguments."""
    leaves = jax.tree_util.tree_leaves(arguments)
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)


def _description(arguments: Any) -> tuple[Any, list[Any]]:
    """Return what the trace of a call depends on, of its arguments: their structure, shapes and dtypes, and constants."""
    leaves, structure = jax.tree_util.tree_flatten(arguments)
    return structure, [
        (leaf.shape, leaf.dtype) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf for leaf in leaves
    ]


_install_lock = threading.Lock()


def install() -> None:
    """Replace `jax.jit`. Called outside of traces; does nothing the second time."""
    with _install_lock:
        if hasattr(jax.jit, _MARK):
            return
        jax.jit = _recording_jit(jax.jit)


def plain_jit() -> Callable[..., Any]:
    """Return the `jax.jit` that records nothing."""
    plain: Callable[..., Any] = jax.jit.__wrapped__ if hasattr(jax.jit, _MARK) else jax.jit
    return plain


def _recording_jit(jit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(jit)
    def compile_step(*arguments: Any, **options: Any) -> Any:
        if not arguments:
            return functools.partial(compile_step, **options)
        plain = jit(*arguments, **options)
        try:
            (function,) = arguments
            return CompiledStep(plain, FunctionForms.of(function), jit, options)
        except Exception as error:  # noqa: BLE001 - never into the program
            report("jit", error)
            return plain

    setattr(compile_step, _MARK, True)
    return compile_step


def _compiled_recording(
    jit: Callable[..., Any], options: dict[str, Any], function: Callable[..., Any]
) -> Any:
    if "out_shardings" in options:
        # None leaves the sharding of the extra outputs to the compiler.
        options = {**options, "out_shardings": (options["out_shardings"], None)}
    return jit(function, **options)
