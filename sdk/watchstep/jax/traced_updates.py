"""Updates and losses that a program computes while its step is traced, and the extra outputs by which they leave the step.

The program's optimizer calls `note_update` and its gradient function `note_loss` at trace time. A `TraceCollector` keeps those of the
trace that it was created in. Those of an inner trace, such as the body of a scan, cannot leave it as outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from watchstep.jax.names import Path

_MAX_UPDATES = 8
_MAX_HYPERPARAMETERS = 16


@dataclass(frozen=True)
class UpdateLayout:
    """What is fixed about one update of a traced step. Two layouts are equal if they are the same object.

    Attributes:
        paths: key path of each parameter.
        shapes: shape of each.
        dtypes: dtype of each, by NumPy's name.
        inputs: for each parameter, its index among the leaves of the step's arguments; None if it is not one of them.
        hyperparameters: names of the hyperparameters.
        has_loss: whether a loss was found.
    """

    paths: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    inputs: tuple[int | None, ...]
    hyperparameters: tuple[str, ...]
    has_loss: bool

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True)
class UpdateOutputs:
    """The extra outputs of one update: a pytree node whose structure contains its layout.

    Attributes:
        layout: what is fixed about the update.
        gradients: gradient of each parameter.
        loss: the loss, of shape (); None if none was found.
        hyperparameters: value of each hyperparameter, of shape ().
        emitted: whether the optimizer made an update, bool of shape (); None if it makes one at each call.
        skipped: whether the optimizer left the update out, bool of shape (); None if it never does.
        withheld: whether the update was left out as the gate policy requests, bool of shape (); None without such a policy.
    """

    layout: UpdateLayout
    gradients: tuple[Any, ...]
    loss: Any
    hyperparameters: tuple[Any, ...]
    emitted: Any
    skipped: Any
    withheld: Any


def _flatten(outputs: UpdateOutputs) -> tuple[tuple[Any, ...], UpdateLayout]:
    return (
        outputs.gradients,
        outputs.loss,
        outputs.hyperparameters,
        outputs.emitted,
        outputs.skipped,
        outputs.withheld,
    ), outputs.layout


jax.tree_util.register_pytree_node(
    UpdateOutputs, _flatten, lambda layout, children: UpdateOutputs(layout, *children)
)


class InnerUpdates:
    """Marks the outputs of a step with updates of an inner trace, which a ring in device memory records. A pytree node without leaves."""


jax.tree_util.register_pytree_node(InnerUpdates, lambda _: ((), None), lambda _, __: InnerUpdates())

StepOutputs = tuple[UpdateOutputs | InnerUpdates, ...]
"""The extra outputs of a step."""


@dataclass(frozen=True)
class TracedUpdate:
    """One call of an optimizer.

    Attributes:
        gradients: the pytree of gradients.
        parameters: the pytree of parameters; None if the program did not pass it.
        hyperparameters: numbers by name.
        emitted, skipped, withheld: as in `UpdateOutputs`.
    """

    gradients: Any
    parameters: Any
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    emitted: Any = None
    skipped: Any = None
    withheld: Any = None


class TraceCollector:
    """Keeps the updates and losses of one trace."""

    def __init__(self) -> None:
        self._trace = trace_state()
        self._updates: list[tuple[TracedUpdate, Any]] = []
        self._loss: Any = None
        self._has_inner = False

    @property
    def is_current(self) -> bool:
        """Whether code runs in the trace that this object was created in."""
        return bool(trace_state() == self._trace)

    def note_loss(self, loss: Any) -> None:
        """Keep a loss for the next update."""
        self._loss = loss

    def divide_loss(self, scale: Any) -> None:
        """Divide the loss for the next update by a number."""
        if self._loss is not None:
            self._loss = self._loss / scale

    def note_update(self, update: TracedUpdate) -> bool:
        """Keep an update. Returns False for one more than the limit."""
        if len(self._updates) >= _MAX_UPDATES:
            return False
        self._updates.append((update, self._loss))
        self._loss = None
        return True

    def note_inner(self) -> None:
        """Note an update of an inner trace."""
        self._has_inner = True

    def outputs(self, arguments: Any) -> StepOutputs:
        """Return the extra outputs of the step.

        Args:
            arguments: pytree of the arguments of the traced function.
        """
        inner: StepOutputs = (InnerUpdates(),) if self._has_inner else ()
        if not self._updates:
            return inner
        places = {id(leaf): place for place, leaf in enumerate(jax.tree_util.tree_leaves(arguments))}
        return (*inner, *(outputs_of(update, loss, places) for update, loss in self._updates))


def outputs_of(update: TracedUpdate, loss: Any, places: Mapping[int, int]) -> UpdateOutputs:
    """Return the extra outputs of an update.

    Args:
        update: the update.
        loss: the loss before it, of shape (); None if none was found.
        places: indices of the leaves of the step's arguments, by the leaf's id.
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(update.gradients)
    leaves = [(path, jnp.asarray(leaf)) for path, leaf in with_paths]
    chosen = [place for place, (_, leaf) in enumerate(leaves) if leaf.dtype != jax.dtypes.float0]
    parameters = _parameters(update.parameters, structure, len(leaves))
    hyperparameters = list(update.hyperparameters.items())[:_MAX_HYPERPARAMETERS]
    layout = UpdateLayout(
        paths=tuple(leaves[place][0] for place in chosen),
        shapes=tuple(tuple(leaves[place][1].shape) for place in chosen),
        dtypes=tuple(leaves[place][1].dtype.name for place in chosen),
        inputs=tuple(places.get(id(parameters[place])) for place in chosen),
        hyperparameters=tuple(name for name, _ in hyperparameters),
        has_loss=loss is not None,
    )
    return UpdateOutputs(
        layout,
        tuple(leaves[place][1] for place in chosen),
        loss,
        tuple(value for _, value in hyperparameters),
        update.emitted,
        update.skipped,
        update.withheld,
    )


def _parameters(parameters: Any, structure: Any, count: int) -> Sequence[Any]:
    """Return the leaf of each parameter; None for each if they have another structure than the gradients."""
    leaves, own = jax.tree_util.tree_flatten(parameters)
    return leaves if own == structure else [None] * count


class _Stack(threading.local):
    """The collectors of the traces in progress in this thread, and the depth of calls of optimizers."""

    def __init__(self) -> None:
        self.collectors: list[TraceCollector] = []
        self.depth = 0


_stack = _Stack()

Inner = Callable[[TracedUpdate, Any], None]
"""Receives an update of an inner trace, and the loss before it."""

observers_of_inner: list[Inner] = []
"""Called for updates that no collector can return: at trace time, or outside of all traces at each update. They raise nothing at trace time."""

faults: list[Callable[[str, Exception], None]] = []
"""Called with the recorder's own failures at trace time, which never reach the program."""


def report(where: str, error: Exception) -> None:
    """Report a failure of the recorder."""
    for listener in faults:
        listener(where, error)


def trace_state() -> Any:
    """Return an object that is equal for code in the same trace."""
    return get_opaque_trace_state()


_top_level = trace_state()


def is_top_level() -> bool:
    """Return whether the current code is outside of all traces. This module is imported outside of them."""
    return bool(trace_state() == _top_level)


@contextmanager
def collecting() -> Iterator[TraceCollector]:
    """Collect the updates of the current trace."""
    collector = TraceCollector()
    _stack.collectors.append(collector)
    try:
        yield collector
    finally:
        _stack.collectors.remove(collector)


@contextmanager
def optimizer_call() -> Iterator[bool]:
    """Enclose a call of an optimizer. Yields whether it is the outermost one: optimizers call others."""
    _stack.depth += 1
    try:
        yield _stack.depth == 1
    finally:
        _stack.depth -= 1


def note_loss(loss: Any) -> None:
    """Note a loss that the program differentiates."""
    collector = _stack.collectors[-1] if _stack.collectors else None
    if collector is not None and collector.is_current and not _device.measures:
        collector.note_loss(loss)
    else:
        _inner.loss, _inner.trace = loss, trace_state()


class _Device:
    """What steps do themselves.

    Attributes:
        measures: they measure their updates, instead of returning gradients.
        withholds: they leave out updates by gradients with NaN or infinity.
    """

    measures = False
    withholds = False


_device = _Device()


def withhold_nonfinite(is_chosen: bool) -> None:
    """Choose whether steps that are traced from now on leave out updates by gradients with NaN or infinity."""
    _device.withholds = is_chosen


def withholds_nonfinite() -> bool:
    """Return whether steps that are traced now leave out such updates."""
    return _device.withholds


def measure_on_device(is_chosen: bool) -> None:
    """Choose whether steps that are traced from now on measure their updates themselves, instead of returning gradients."""
    _device.measures = is_chosen


def divide_loss(scale: Any) -> None:
    """Divide the loss that was noted last by the scale that the program has multiplied it by."""
    collector = _stack.collectors[-1] if _stack.collectors else None
    if collector is not None and collector.is_current:
        collector.divide_loss(scale)
    elif _inner.loss is not None:
        _inner.loss = _inner.loss / scale


class _InnerLoss(threading.local):
    """The last loss of a trace without a collector, and that trace: an update of another one has nothing to do with it."""

    loss: Any = None
    trace: Any = None


_inner = _InnerLoss()


def note_update(update: TracedUpdate) -> None:
    """Note an update."""
    collector = _stack.collectors[-1] if _stack.collectors else None
    if collector is not None and collector.is_current and not _device.measures:
        collector.note_update(update)
        return
    loss = _inner.loss if _inner.trace == trace_state() else None
    _inner.loss = _inner.trace = None
    if collector is not None:
        collector.note_inner()
    for observer in tuple(observers_of_inner):
        observer(update, loss)
