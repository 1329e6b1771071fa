"""Observation of modules of Flax NNX, Flax linen and Equinox, and of activation functions that they call, while a step is traced.

Classes and functions are changed only while the recording form of a step is traced, and only if activations are recorded: nothing is wrapped otherwise, and nothing at
run time. A module is observed if it calls no other module. Its name is its path from the outermost module, as that of its weights.

Outputs are those of the function that the program differentiates. Under ``vmap`` the output of all examples is one tensor. Each problem is reported
as not observed, and the module's own call goes on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from watchstep.jax import traced_updates
from watchstep.jax.activations.activation_ring import Output, activation_ring
from watchstep.jax.internals import (
    callers,
    is_batched,
    is_differentiated,
    is_part_of_function,
    is_vmap_function,
    jax_names,
    obstacle_of_activations,
)
from watchstep.jax.names import path_words
from watchstep.jax.traced_updates import report
from watchstep.jax.update_parts import trace_state

_MAX_ROOT_FRAMES = 40
"""Maximum number of callers that are searched for the outermost module."""

_FUNCTIONS = {
    "relu": "ReLU",
    "relu6": "ReLU6",
    "sigmoid": "Sigmoid",
    "hard_sigmoid": "Hardsigmoid",
    "hard_tanh": "Hardtanh",
    "soft_sign": "Softsign",
}
"""Activation functions of `jax.nn`, and the kind that rules know."""

_NAMESPACES = (
    "jax.nn",
    "jax.numpy",
    "flax.linen",
    "flax.linen.activation",
    "flax.nnx",
    "flax.nnx.nn.activations",
)
"""Modules of Python in which these functions are replaced."""


@dataclass
class _Frame:
    """A call of a module that is in progress.

    Attributes:
        module: the module.
        path: its path; empty for the outermost module.
        kind: its class.
        channel_last: as in `Output`.
        paths: path of each module below the outermost one, by its id.
        has_children: whether it has called another module.
        calls: numbers of calls of functions, and of modules without a path.
        recorded: ids of outputs of functions that are recorded.
    """

    module: Any
    path: str
    kind: type
    channel_last: bool
    paths: dict[int, str]
    has_children: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    recorded: list[Any] = field(default_factory=list)


class _Roots:
    """Names of the outermost modules of a process: the first one has none, others have a number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._orders: dict[str, int] = {}

    def prefix(self, kind: type, rank: int) -> str:
        """Return the prefix of an outermost module.

        Args:
            kind: its class.
            rank: its rank among those of its trace.
        """
        key = f"{kind.__module__}.{kind.__qualname__}", rank
        number = self._numbers.setdefault(key, len(self._numbers))
        return f"model_{number + 1}" if number else ""

    def order(self, name: str) -> int:
        """Return the rank of an output in the order of computation."""
        return self._orders.setdefault(name, len(self._orders))


class _Thread(threading.local):
    """The trace that is observed in this thread."""

    def __init__(self) -> None:
        self.trace: _ModuleTrace | None = None


_thread = _Thread()


class _Activations:
    """Whether activations are recorded in this process.

    Attributes:
        is_chosen: whether they are.
        roots: names of outermost modules.
    """

    def __init__(self) -> None:
        self.is_chosen = False
        self.roots = _Roots()


_activations = _Activations()


def observe_modules(is_chosen: bool) -> None:
    """Choose whether modules are observed in steps that are traced from now on."""
    if is_chosen and not _activations.is_chosen:
        _activations.roots = _Roots()
    _activations.is_chosen = is_chosen


def observes_modules() -> bool:
    """Return whether modules are observed in steps that are traced now."""
    return _activations.is_chosen


class ObservedStep:
    """What is observed of the modules of one compiled step.

    Attributes:
        is_open: whether modules are observed in the next trace of its recording form.
        has_rows: whether a trace of it writes rows.
        is_unproven: whether no call has succeeded since the last trace that writes rows.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.has_rows = False
        self.is_unproven = False

    def close(self) -> None:
        """Observe no modules in later traces."""
        self.is_open = self.has_rows = self.is_unproven = False

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Enclose a trace of the recording form."""
        if not (self.is_open and _activations.is_chosen):
            yield
            return
        trace, before = _ModuleTrace(), _thread.trace
        with ExitStack() as stack:
            try:
                stack.enter_context(_patches.applied())
            except Exception as error:  # noqa: BLE001 - never into the program
                report("modules", error)
            _thread.trace = trace
            try:
                yield
            finally:
                _thread.trace = before
                if trace.has_rows:
                    self.has_rows = self.is_unproven = True
            self._count_call(trace)

    def _count_call(self, trace: _ModuleTrace) -> None:
        """Let the program that is being traced count its call, if it writes rows."""
        try:
            if trace.has_rows:
                activation_ring.count_call()
        except Exception as error:  # noqa: BLE001 - as above
            report("activations", error)


class _ModuleTrace:
    """A trace of a recording form.

    Attributes:
        frames: calls of modules in progress.
        has_rows: whether a row is written.
    """

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.has_rows = False
        self._roots: list[tuple[Any, list[Any]]] = []

    def enter(self, module: Any, find: _Finder, path: str | None = None) -> _Frame | None:
        """Begin a call of a module; None if it is one in progress, whose method calls that of its base class.

        Args:
            module: the module.
            find: finds the modules below another one.
            path: its path, if the module knows it.
        """
        parent = self.frames[-1] if self.frames else None
        if parent is not None and parent.module is module:
            return None
        paths: dict[int, str] = {}
        if path is None:
            path, paths = self._path(module, find, parent)
        if parent is not None:
            parent.has_children = True
        frame = _Frame(module, path, type(module), find.channel_last, paths)
        self.frames.append(frame)
        return frame

    def leave(self, frame: _Frame) -> None:
        """End a call of a module."""
        if frame in self.frames:
            del self.frames[self.frames.index(frame) :]

    def _path(self, module: Any, find: _Finder, parent: _Frame | None) -> tuple[str, dict[int, str]]:
        if parent is not None:
            path = parent.paths.get(id(module))
            if path is None:  # another object than before, as `equinox.filter_vmap` makes
                kind = type(module).__name__
                words = (parent.path, f"{kind}_{parent.calls[kind]}")
                parent.calls[kind] += 1
                path = ".".join(word for word in words if word)
            return path, parent.paths
        root, below = find.root(module)
        prefix = _activations.roots.prefix(type(root), self._rank(root))
        paths = {
            key: f"{prefix}.{path}" if prefix and path else prefix or path for key, path in below.items()
        }
        return paths.get(id(module), prefix), paths

    def _rank(self, root: Any) -> int:
        """Return which of the outermost modules of one class in the current trace this is."""
        here = trace_state()
        same = next((roots for state, roots in self._roots if state == here), None)
        if same is None:
            same = []
            self._roots.append((here, same))
        alike = [other for other in same if type(other) is type(root)]
        for rank, other in enumerate(alike):
            if other is root:
                return rank
        same.append(root)
        return len(alike)

    def output(self, frame: _Frame, result: Any) -> None:
        """Record the output of a module that has called no other module."""
        if frame.has_children:
            return
        arrays = [leaf for leaf in jax.tree_util.tree_leaves(result) if _is_real(leaf)]
        if len(arrays) == 1 and any(array is arrays[0] for array in frame.recorded):
            return  # the output of an activation function, which has a row
        for place, array in enumerate(arrays):
            suffix = f"_{place}" if len(arrays) > 1 else ""
            self._record(frame, f"output{suffix}", frame.kind.__name__, array)

    def function(self, kind: str, result: Any) -> None:
        """Record the output of an activation function that a module has called."""
        if not self.frames or not _is_real(result):
            return
        frame = self.frames[-1]
        number = frame.calls[kind]
        frame.calls[kind] += 1
        frame.recorded.append(result)
        self._record(frame, f"{kind.lower()}_{number}", kind, result)

    def _record(self, frame: _Frame, role: str, kind: str, array: Any) -> None:
        name = f"{frame.path or 'model'}:{role}"
        output = Output(
            name,
            frame.path,
            kind,
            (kind, *(base.__name__ for base in frame.kind.__mro__)),
            _activations.roots.order(name),
            frame.channel_last,
        )
        self._write(output, lax.stop_gradient(array))

    def _write(self, output: Output, array: Any) -> None:
        if not is_differentiated():
            return
        if is_batched(array):
            self._write_batch(output, array)
            return
        obstacle = obstacle_of_activations()
        if obstacle is None and _is_of_inner_batch():
            obstacle = "a transformation inside of vmap"
        if obstacle is not None:
            _note(f"an activation inside of {obstacle} is not observed")
            return
        try:
            activation_ring.write(output, array)
        except ValueError as reason:
            _note(str(reason))
            return
        self.has_rows = True

    def _write_batch(self, output: Output, array: Any) -> None:
        """Write a row of the outputs of all examples of a ``vmap``, by a function whose rule for batches has all of them."""

        def observe(_: Any) -> Any:
            return jnp.zeros(())

        def observe_all(_size: int, _batched: Any, batch: Any) -> Any:
            try:
                self._write(output, batch)
            except Exception as error:  # noqa: BLE001 - never into the program
                report("activations", error)
            return jnp.zeros(()), False

        function = jax.custom_batching.custom_vmap(observe)
        function.def_vmap(observe_all)
        function(array)


def _note(reason: str) -> None:
    for listener in tuple(traced_updates.activations_not_observed):
        listener(reason)


def _is_real(value: Any) -> bool:
    return isinstance(value, jax.Array) and bool(jnp.issubdtype(value.dtype, jnp.floating))


def _is_of_inner_batch() -> bool:
    """Return whether a ``vmap`` traces the current code, although its values have no batch dimension here."""
    batches = 0
    for key, frame in callers():
        if frame.f_code.co_name == "observe_all" and frame.f_globals is globals():
            batches -= 1  # called with all examples of one ``vmap``
        else:
            batches += is_vmap_function(key, frame)
    return batches > 0


class _Finder:
    """Finds the modules below one of a library.

    Attributes:
        channel_last: whether the library's images have their channels in the last dimension.
    """

    channel_last = True

    def __init__(self, base: type) -> None:
        self._base = base

    def below(self, module: Any) -> dict[int, str]:
        """Return the path of each module in another one, itself included, by its id."""
        raise NotImplementedError

    def root(self, module: Any) -> tuple[Any, dict[int, str]]:
        """Return the outermost module that a caller has and that contains a module, and the paths in it.

        A program may call parts of its model: ``model.actor(x)``.
        """
        root, paths = module, self.below(module)
        searched: set[int] = {id(module)}
        for key, frame in islice(callers(), 2, 2 + _MAX_ROOT_FRAMES):
            if key == "differentiation":
                break
            for value in tuple(frame.f_locals.values()):
                if isinstance(value, self._base) and id(value) not in searched:
                    searched.add(id(value))
                    below = self.below(value)
                    if id(module) in below and len(below) > len(paths):
                        root, paths = value, below
        return root, paths


class _NnxFinder(_Finder):
    """Modules of Flax NNX."""

    def below(self, module: Any) -> dict[int, str]:
        parts = jax_names.find("nnx_modules")
        paths: dict[int, str] = {}
        for path, part in () if parts is None else parts(module):
            paths.setdefault(id(part), ".".join(map(str, path)))
        return {**paths, id(module): ""}


class _EquinoxFinder(_Finder):
    """Modules of Equinox, whose images have their channels first."""

    channel_last = False

    def below(self, module: Any) -> dict[int, str]:
        paths: dict[int, str] = {id(module): ""}
        pending = [(module, "")]
        while pending:
            owner, prefix = pending.pop()
            parts, _ = jax.tree_util.tree_flatten_with_path(
                owner, is_leaf=lambda part, owner=owner: part is not owner and isinstance(part, self._base)
            )
            for path, part in parts:
                if isinstance(part, self._base) and id(part) not in paths:
                    words = (prefix, *path_words(path))
                    paths[id(part)] = ".".join(word for word in words if word)
                    pending.append((part, paths[id(part)]))
        return paths


class _LinenFinder(_Finder):
    """Modules of Flax linen, which know their paths."""


def _called(original: Any, find: _Finder) -> Callable[..., Any]:
    """Return a method that observes the calls of another one."""

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        method = original.__get__(self, type(self))
        return _observed(self, find, None, lambda: method(*arguments, **keywords))

    return call


def _observed(module: Any, find: _Finder, path: str | None, call: Callable[[], Any]) -> Any:
    trace = _thread.trace
    if trace is None:
        return call()
    frame = None
    try:
        frame = trace.enter(module, find, path)
    except Exception as error:  # noqa: BLE001 - never into the program
        report("activations", error)
    if frame is None:
        return call()
    try:
        result = call()
        try:
            trace.output(frame, result)
        except Exception as error:  # noqa: BLE001 - as above
            report("activations", error)
        return result
    finally:
        trace.leave(frame)


def _linen_interceptor(find: _Finder) -> Callable[..., Any]:
    def intercept(method: Any, arguments: Any, keywords: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return method(*arguments, **keywords)
        path = ".".join(map(str, context.module.path))
        return _observed(context.module, find, path, lambda: method(*arguments, **keywords))

    return intercept


class _ModulePatches:
    """Changes classes of modules and activation functions while some thread traces a recording form."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._traces = 0
        self._changes: list[tuple[Any, str, Any]] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Enclose a trace."""
        with ExitStack() as stack:
            with self._lock:
                self._traces += 1
                stack.callback(self._leave)
                if self._traces == 1:
                    self._apply()
            linen = sys.modules.get("flax.linen")
            intercept = None if linen is None else jax_names.find("linen_calls")
            if linen is not None and intercept is not None:
                stack.enter_context(intercept(_linen_interceptor(_LinenFinder(linen.Module))))
            yield

    def _leave(self) -> None:
        with self._lock:
            self._traces -= 1
            if not self._traces:
                while self._changes:
                    owner, name, value = self._changes.pop()
                    _assign(owner, name, value)

    def _change(self, owner: Any, name: str, value: Any) -> None:
        self._changes.append((owner, name, vars(owner)[name]))
        _assign(owner, name, value)

    def _apply(self) -> None:
        for library, finder, own in (
            ("flax.nnx", _NnxFinder, ("flax.nnx.nn", "flax.nnx.helpers")),
            ("equinox", _EquinoxFinder, ("equinox.nn",)),
        ):
            package = sys.modules.get(library)
            base = getattr(package, "Module", None)
            if base is not None and (library != "flax.nnx" or jax_names.has("nnx_modules")):
                self._change_classes(base, finder(base), library.partition(".")[0], own)
        if jax_names.has("function_parts", "derivative_parts"):
            self._change_functions()

    def _change_classes(self, base: type, find: _Finder, library: str, own: tuple[str, ...]) -> None:
        for kind in _subclasses(base):
            original = vars(kind).get("__call__")
            is_module = not f"{kind.__module__}.".startswith(f"{library}.") or kind.__module__.startswith(own)
            is_method = callable(original) and hasattr(original, "__get__")
            if is_module and is_method and not getattr(original, "__isabstractmethod__", False):
                self._change(kind, "__call__", _called(original, find))

    def _change_functions(self) -> None:
        # A function by `jax.custom_jvp` is observed wherever the program has a reference to it.
        kinds = {
            id(function): kind for function, kind in _functions() if isinstance(function, jax.custom_jvp)
        }
        call_function = vars(jax.custom_jvp)["__call__"]

        @functools.wraps(call_function)
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            result = call_function(self, *arguments, **keywords)
            kind = kinds.get(id(self))
            if kind is not None:
                _note_function(kind, result, sys._getframe(1))  # noqa: SLF001 - as above
            return result

        self._change(jax.custom_jvp, "__call__", call)
        for function, kind in _functions():
            if id(function) in kinds:
                continue
            replacement = _observing_function(function, kind)
            for name in _NAMESPACES:
                namespace = sys.modules.get(name)
                for attribute in (function.__name__,) if namespace is not None else ():
                    if vars(namespace).get(attribute) is function:
                        self._change(namespace, attribute, replacement)


def _functions() -> list[tuple[Any, str]]:
    functions = [(getattr(jax.nn, name, None), kind) for name, kind in _FUNCTIONS.items()]
    return [(function, kind) for function, kind in (*functions, (jnp.tanh, "Tanh")) if function is not None]


def _observing_function(function: Any, kind: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        _note_function(kind, result, sys._getframe(1))  # noqa: SLF001 - as above
        return result

    return call


def _note_function(kind: str, result: Any, caller: FrameType) -> None:
    trace = _thread.trace
    if trace is None or is_part_of_function(caller):
        return
    try:
        trace.function(kind, result)
    except Exception as error:  # noqa: BLE001 - never into the program
        report("activations", error)


def _assign(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, of a class past its metaclass."""
    if isinstance(owner, type):
        type.__setattr__(owner, name, value)
    else:
        setattr(owner, name, value)


def _subclasses(base: type) -> list[type]:
    found: dict[type, None] = {}
    pending = [base]
    while pending:
        kind = pending.pop()
        subclasses: list[type] = type.__subclasses__(kind)
        for sub in subclasses:
            if sub not in found:
                found[sub] = None
                pending.append(sub)
    return list(found)


_patches = _ModulePatches()
