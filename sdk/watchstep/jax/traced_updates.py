"""Updates and losses that a program computes while its step is traced, and the extra outputs by which they leave the step.

The program's optimizer calls `note_update` and its gradient function `note_loss` at trace time. A `TraceCollector` keeps those of the
trace that it was created in. Those of an inner trace, such as the body of a scan, cannot leave it as outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from watchstep.jax.internals import jax_names, surroundings
from watchstep.jax.names import Path
from watchstep.jax.sharding.argument_shardings import ArgumentShardings
from watchstep.jax.step_settings import StepSettings, effective_settings
from watchstep.jax.update_parts import Call, elements_of, is_input, is_top_level, trace_state

_MAX_UPDATES = 64
_MAX_HYPERPARAMETERS = 16


@dataclass(frozen=True)
class UpdateLayout:
    """What is fixed about one update of a traced step. Two layouts are equal if they are the same object.

    Attributes:
        paths: key path of each parameter.
        shapes: shape of each.
        dtypes: dtype of each, by NumPy's name.
        inputs: for each parameter, its index among the leaves of the step's arguments; None if it is not one of them.
        states: the same of each array of the optimizer's state.
        hyperparameters: names of the hyperparameters.
        has_loss: whether a loss was found.
        rank: which of the parameter sets of equal structure in an inner trace the update is of.
    """

    paths: tuple[Path, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    inputs: tuple[int | None, ...]
    states: tuple[int | None, ...]
    hyperparameters: tuple[str, ...]
    has_loss: bool
    rank: int = 0

    @property
    def structure(self) -> tuple[Any, ...]:
        """What distinguishes the parameters of one optimizer from those of others with another structure."""
        return self.paths, self.shapes, self.dtypes

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
        unmoved: of an update that the optimizer left out, whether the update of each parameter is zero, bool of shape (parameters,); None if that
            is unknown. Parts of an optimizer decide each for its parameters.
    """

    layout: UpdateLayout
    gradients: tuple[Any, ...]
    loss: Any
    hyperparameters: tuple[Any, ...]
    emitted: Any
    skipped: Any
    withheld: Any
    unmoved: Any


def _flatten(outputs: UpdateOutputs) -> tuple[tuple[Any, ...], UpdateLayout]:
    return (
        outputs.gradients,
        outputs.loss,
        outputs.hyperparameters,
        outputs.emitted,
        outputs.skipped,
        outputs.withheld,
        outputs.unmoved,
    ), outputs.layout


jax.tree_util.register_pytree_node(
    UpdateOutputs, _flatten, lambda layout, children: UpdateOutputs(layout, *children)
)


@dataclass(frozen=True)
class InnerUpdates:
    """Marks the outputs of a step with updates of an inner trace, which rings in device memory record. A pytree node without leaves.

    Attributes:
        layouts: what is fixed about each of these updates.
    """

    layouts: tuple[UpdateLayout, ...]


jax.tree_util.register_pytree_node(
    InnerUpdates, lambda inner: ((), inner.layouts), lambda layouts, _: InnerUpdates(layouts)
)

StepOutputs = tuple[UpdateOutputs | InnerUpdates, ...]
"""The extra outputs of a step."""


@dataclass(frozen=True)
class TracedUpdate:
    """One call of an optimizer, or several of which each transforms what the one before has returned.

    Attributes:
        gradients: the pytree of gradients.
        parameters: the pytree of parameters; None if the program did not pass it.
        hyperparameters: numbers by name.
        emitted, skipped, withheld: as in `UpdateOutputs`.
        unmoved: as there, of all leaves of the gradients.
        passed: the gradients that the program passed, if ``gradients`` are accumulated ones.
        returned: the last call.
        state: the optimizer's state before it; of several calls, that of each.
        rank: as in `UpdateLayout`.
    """

    gradients: Any
    parameters: Any
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    emitted: Any = None
    skipped: Any = None
    withheld: Any = None
    unmoved: Any = None
    passed: Any = None
    returned: Call | None = None
    state: Any = None
    rank: int = 0

    def continued_by(self, later: TracedUpdate) -> TracedUpdate:
        """Return the update that a further call makes of this one."""
        accumulates = later.emitted is not None
        return replace(
            self,
            gradients=later.gradients if accumulates else self.gradients,
            parameters=later.parameters if self.parameters is None else self.parameters,
            hyperparameters={**later.hyperparameters, **self.hyperparameters},
            emitted=later.emitted if accumulates else self.emitted,
            skipped=self.skipped if later.skipped is None else later.skipped,
            withheld=self.withheld if later.withheld is None else later.withheld,
            unmoved=later.unmoved,  # it may change what the optimizer before it left out
            returned=later.returned,
            state=(self.state, later.state),
        )

    @property
    def gradients_of_program(self) -> Any:
        """The gradients that the program passed."""
        return self.gradients if self.passed is None else self.passed


@dataclass(frozen=True, eq=False)
class _Loss:
    """A loss that was differentiated.

    Attributes:
        value: the loss.
        trace: the trace.
        gradients: ids of the leaves of its gradients.
        elements: number of elements of its gradients.
        leaves: these leaves, so that their ids stay theirs while the trace goes on; empty outside of traces, where they would take memory.
    """

    value: Any
    trace: Any
    gradients: frozenset[int]
    elements: int
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any, gradients: Any) -> _Loss:
        """Return the loss that the program has differentiated in the current trace."""
        leaves = tuple(jax.tree_util.tree_leaves(gradients))
        return cls(value, trace_state(), frozenset(map(id, leaves)), elements_of(leaves), leaves)


def _loss_of(losses: Sequence[_Loss], gradients: Any) -> _Loss | None:
    """Return the loss of some gradients; None if it is unknown.

    Programs transform gradients before an update. Then a loss is theirs if it is the only one with gradients of as many elements.
    """
    leaves = jax.tree_util.tree_leaves(gradients)
    ids = frozenset(map(id, leaves))
    found = next((loss for loss in losses if loss.gradients & ids), None)
    if found is not None:
        return found
    elements = elements_of(leaves)
    alike = [loss for loss in losses if loss.elements == elements]
    return alike[0] if len(alike) == 1 else None


@dataclass(frozen=True, eq=False)
class _InnerOwner:
    """A parameter set with updates in an inner trace.

    Attributes:
        trace: the trace.
        structure: what it has in common with others.
        leaves: its parameters or states, which are inputs of the trace.
    """

    trace: Any
    structure: Any
    leaves: Sequence[Any]


class TraceCollector:
    """Keeps the updates and losses of one trace of a recording form, and of the traces inside it."""

    def __init__(self) -> None:
        self._trace = trace_state()
        self._updates: list[tuple[TracedUpdate, Any]] = []
        self._losses: list[_Loss] = []
        self._inner: list[UpdateLayout] = []
        self._inner_owners: list[_InnerOwner] = []

    @property
    def is_current(self) -> bool:
        """Whether code runs in the trace that this object was created in."""
        return bool(trace_state() == self._trace)

    def note_loss(self, loss: Any, gradients: Any) -> None:
        """Keep a loss for the update by its gradients."""
        self._losses.append(_Loss.of(loss, gradients))

    def divide_loss(self, scale: Any) -> None:
        """Divide the newest loss by a number."""
        if self._losses:
            self._losses[-1] = replace(self._losses[-1], value=self._losses[-1].value / scale)

    def take_loss(self, gradients: Any) -> Any:
        """Return the loss of some gradients, which no other update has; None if it is unknown."""
        here = trace_state()
        found = _loss_of([loss for loss in self._losses if loss.trace == here], gradients)
        if found is not None:
            self._losses.remove(found)
            return found.value
        # The branches of a conditional get the gradients of the program around it, each the same ones.
        ids = frozenset(map(id, jax.tree_util.tree_leaves(gradients)))
        return next((loss.value for loss in self._losses if loss.gradients & ids), None)

    def note_update(self, update: TracedUpdate) -> bool:
        """Keep an update of this trace. Returns False for one more than the limit."""
        if len(self._updates) >= _MAX_UPDATES:
            return False
        self._updates.append((update, self.take_loss(update.gradients_of_program)))
        return True

    def continue_update(self, earlier: Call, later: TracedUpdate) -> None:
        """Complete an update of this trace by a further call."""
        for place, (update, loss) in enumerate(self._updates):
            if update.returned is earlier:
                self._updates[place] = update.continued_by(later), loss

    def note_inner(self, update: TracedUpdate) -> TracedUpdate:
        """Note an update of an inner trace. Returns it with its rank."""
        layout = outputs_of(update, None, {}).layout
        rank = self._rank_of_inner(update, layout)
        self._inner.append(replace(layout, rank=rank))
        return replace(update, rank=rank)

    def _rank_of_inner(self, update: TracedUpdate, layout: UpdateLayout) -> int:
        """Return which of the parameter sets of equal structure in the trace in progress an update is of.

        A set is known by its parameters among the inputs of the trace; if the program did not pass them, by the optimizer's state. An update with neither is of the
        set that was updated last: the program makes several in one iteration.
        """
        here, structure = trace_state(), layout.structure
        alike = [one for one in self._inner_owners if one.trace == here and one.structure == structure]
        trees = [jax.tree_util.tree_leaves(tree) for tree in (update.parameters, update.state)]
        leaves = next((leaves for leaves in trees if leaves and all(map(is_input, leaves))), None)
        if leaves is None:
            return max(0, len(alike) - 1)
        for rank, owner in enumerate(alike):
            if list(map(id, owner.leaves)) == list(map(id, leaves)):
                return rank
        self._inner_owners.append(_InnerOwner(here, structure, leaves))
        return len(alike)

    def outputs(self, arguments: Any) -> StepOutputs:
        """Return the extra outputs of the step, in the order of the updates.

        Args:
            arguments: pytree of the arguments of the traced function.
        """
        inner: StepOutputs = (InnerUpdates(tuple(self._inner)),) if self._inner else ()
        if not self._updates:
            return inner
        places = {id(leaf): place for place, leaf in enumerate(jax.tree_util.tree_leaves(arguments))}
        return (*inner, *(outputs_of(update, loss, places) for update, loss in self._updates))


def ranks_of(layouts: Sequence[UpdateLayout]) -> list[int]:
    """Return which of the parameter sets of equal structure each update of a call is of.

    A set is known by its parameters among the arguments of the call; if the program did not pass them to the optimizer, by the optimizer's state.
    An update with neither is of the set that was updated last: the program makes several in one call.
    """
    sets: dict[Any, list[Any]] = {}
    ranks: list[int] = []
    for layout in layouts:
        owners = sets.setdefault(layout.structure, [])
        owner = layout.inputs if None not in layout.inputs else layout.states
        if not owner or None in owner:
            ranks.append(max(0, len(owners) - 1))
            continue
        if owner not in owners:
            owners.append(owner)
        ranks.append(owners.index(owner))
    return ranks


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
    numbers = [(name, value) for name, value in update.hyperparameters.items() if _is_number(value)]
    hyperparameters = numbers[:_MAX_HYPERPARAMETERS]
    loss = loss if loss is None or _is_number(loss) else None
    layout = UpdateLayout(
        paths=tuple(leaves[place][0] for place in chosen),
        shapes=tuple(tuple(leaves[place][1].shape) for place in chosen),
        dtypes=tuple(leaves[place][1].dtype.name for place in chosen),
        inputs=tuple(places.get(id(parameters[place])) for place in chosen),
        states=tuple(places.get(id(leaf)) for leaf in jax.tree_util.tree_leaves(update.state)),
        hyperparameters=tuple(name for name, _ in hyperparameters),
        has_loss=loss is not None,
        rank=update.rank,
    )
    return UpdateOutputs(
        layout,
        tuple(leaves[place][1] for place in chosen),
        loss,
        tuple(value for _, value in hyperparameters),
        update.emitted,
        update.skipped,
        update.withheld,
        _chosen(update.unmoved, chosen, len(leaves)),
    )


def _chosen(unmoved: Any, chosen: Sequence[int], count: int) -> Any:
    """Return the elements of some of the leaves; None if the array is not of these leaves."""
    if unmoved is None or len(unmoved) != count:
        return None
    return unmoved if len(chosen) == count else unmoved[np.array(chosen, int)]


def _is_number(value: Any) -> bool:
    """Return whether a value is one real number. Optimizers also have keys of random numbers as hyperparameters."""
    dtype = (
        jax.dtypes.result_type(value)
        if isinstance(value, (bool, int, float))
        else getattr(value, "dtype", None)
    )
    if dtype is None or jnp.size(value) != 1:
        return False
    return (
        jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    ) or dtype == jnp.bool_


def _parameters(parameters: Any, structure: Any, count: int) -> Sequence[Any]:
    """Return the leaf of each parameter; None for each if they have another structure than the gradients."""
    leaves, own = jax.tree_util.tree_flatten(parameters)
    return leaves if own == structure else [None] * count


class _Stack(threading.local):
    """The collectors of the traces in progress in this thread, the depth of calls of optimizers, and the newest loss outside of traces."""

    def __init__(self) -> None:
        self.collectors: list[TraceCollector] = []
        self.depth = 0
        self.eager_loss: _Loss | None = None
        self.probe: TraceProbe | None = None


_stack = _Stack()

Inner = Callable[[TracedUpdate, Any], None]
"""Receives an update of an inner trace, and its loss."""

observers_of_inner: list[Inner] = []
"""Called for updates that no collector can return: at trace time, or outside of all traces at each update. They raise nothing at trace time."""

not_observed: list[Callable[[str], None]] = []
"""Called at trace time with updates that are not observed, and why."""

activations_not_observed: list[Callable[[str], None]] = []
"""The same of activations."""

faults: list[Callable[[str, Exception], None]] = []
"""Called with the recorder's own failures at trace time, which never reach the program."""


def report(where: str, error: Exception) -> None:
    """Report a failure of the recorder."""
    for listener in faults:
        listener(where, error)


@dataclass(frozen=True)
class RecordingForm:
    """What the trace of a recording form depends on besides the program. Part of the keys of JAX's caches.

    Attributes:
        number: number of the function: what one traces, such as the body of a scan, has Refs that another's transformations may not admit.
        settings: what steps do themselves.
        shardings: how the arguments of the call are distributed; None if the trace does not depend on it.
        is_probe: whether the trace records nothing (`probing`), so that no other may use what JAX caches of it.
    """

    number: int = 0
    settings: StepSettings = field(default_factory=StepSettings)
    shardings: ArgumentShardings | None = None
    is_probe: bool = False


_make_context = jax_names.find("user_context")
_recording_form = None if _make_context is None else _make_context(default_value=None)
"""The recording form that is being traced, or None: what is traced in one, such as the body of a scan, is never used in a trace of the
program's own."""


def recording_form(form: RecordingForm) -> AbstractContextManager[Any]:
    """Enclose traces and calls of a recording form."""
    return nullcontext() if _recording_form is None else _recording_form(form)


def _form_in_progress() -> RecordingForm | None:
    form: RecordingForm | None = (
        None if _recording_form is None else jax_names.of(_recording_form, "user_context_value")
    )
    return form


def unrecorded_form() -> AbstractContextManager[Any]:
    """Enclose traces that record nothing: those of `probing`, and of functions in which it has found no update."""
    return recording_form(replace(_form_in_progress() or RecordingForm(), is_probe=True))


def shardings_of(layout: UpdateLayout) -> tuple[NamedSharding, ...] | None:
    """Return how the parameters of an update of the trace in progress are distributed; None if that is unknown, or they are on one device."""
    form = _form_in_progress()
    return None if form is None or form.shardings is None else form.shardings.of_parameters(layout.shapes)


@contextmanager
def collecting() -> Iterator[TraceCollector]:
    """Collect the updates of the current trace."""
    collector = TraceCollector()
    _stack.collectors.append(collector)
    try:
        yield collector
    finally:
        _stack.collectors.remove(collector)


class TraceProbe:
    """Whether an update was traced.

    Attributes:
        found_update: whether one was.
    """

    found_update = False


@contextmanager
def probing() -> Iterator[TraceProbe]:
    """Trace without recording, and find whether there is an update."""
    probe, before = TraceProbe(), _stack.probe
    _stack.probe = probe
    try:
        yield probe
    finally:
        _stack.probe = before


def is_probing() -> bool:
    """Return whether a trace in this thread is one of `probing`."""
    return _stack.probe is not None


def note_update_of_inner() -> None:
    """Note for the probe in progress that a function which is called in its trace contains an update. JAX may have traced it before."""
    if _stack.probe is not None:
        _stack.probe.found_update = True


def is_collecting() -> bool:
    """Return whether a recording form is being traced in this thread."""
    return bool(_stack.collectors) and _stack.probe is None


@contextmanager
def optimizer_call() -> Iterator[bool]:
    """Enclose a call of an optimizer. Yields whether it is the outermost one: optimizers call others."""
    _stack.depth += 1
    try:
        yield _stack.depth == 1
    finally:
        _stack.depth -= 1


def is_optimizing() -> bool:
    """Return whether an optimizer is being called in this thread."""
    return _stack.depth > 0


def is_observed() -> bool:
    """Return whether an update here is recorded: in a trace of a recording form, or outside of traces."""
    return bool(observers_of_inner) and (bool(_stack.collectors) or is_top_level())


def is_read() -> bool:
    """Return whether the host learns what becomes of an update here: it may leave out only those."""
    if not is_observed():
        return False
    if not _stack.collectors or (_stack.collectors[-1].is_current and not _measures_on_device()):
        return True
    return surroundings()[0] is None


def note_not_observed() -> None:
    """Report an update in a trace of the program's own, which has no extra outputs."""
    if not jax_names.has("trace_state"):
        return  # health has it
    for listener in tuple(not_observed):
        listener(
            "an update under pmap, in an export, in a step compiled ahead of time, or in a scan or loop outside of jax.jit is not observed"
        )


def note_loss(loss: Any, gradients: Any) -> None:
    """Note a loss that the program has differentiated, and its gradients."""
    if _stack.probe is not None:
        return
    if _stack.collectors:
        _stack.collectors[-1].note_loss(loss, gradients)
    elif is_top_level():
        _stack.eager_loss = replace(_Loss.of(loss, gradients), gradients=frozenset(), leaves=())


def withholds_nonfinite() -> bool:
    """Return whether steps that are traced now leave out updates by gradients with NaN or infinity."""
    return _settings().withholds


def _measures_on_device() -> bool:
    # Asked for at the first update: the question starts JAX's backend, which a program configures before.
    measures = _settings().measures
    return jax.default_backend() != "cpu" if measures is None else measures


def _settings() -> StepSettings:
    """Return the settings of the trace in progress, or of eager programs."""
    form = _form_in_progress()
    return effective_settings() if form is None else form.settings


def divide_loss(scale: Any) -> None:
    """Divide the loss that was noted last by the scale that the program has multiplied it by."""
    if _stack.collectors:
        _stack.collectors[-1].divide_loss(scale)
    elif _stack.eager_loss is not None:
        _stack.eager_loss = replace(_stack.eager_loss, value=_stack.eager_loss.value / scale)


def note_update(update: TracedUpdate, earlier: Call | None = None) -> None:
    """Note an update. One in a trace that is not of a recording form, such as an export, leaves no mark there.

    Args:
        update: the update.
        earlier: the call of an optimizer that it continues, which was noted.
    """
    if _stack.probe is not None:
        _stack.probe.found_update = True
        return
    collector = _stack.collectors[-1] if _stack.collectors else None
    if earlier is not None:
        if collector is not None and collector.is_current:
            collector.continue_update(earlier, update)
        return
    loss: Any = None
    if collector is None:
        if not is_top_level():
            note_not_observed()
            return
        eager, _stack.eager_loss = _stack.eager_loss, None
        found = None if eager is None else _loss_of([eager], update.gradients_of_program)
        loss = None if found is None else found.value
    elif collector.is_current and not _measures_on_device():
        if not collector.note_update(update):
            for listener in tuple(not_observed):
                listener(f"updates of a step after its first {_MAX_UPDATES} are not observed")
        return
    else:
        loss = collector.take_loss(update.gradients_of_program)
        update = collector.note_inner(update)
        if (form := _form_in_progress()) is not None and form.is_probe:
            return
    for observer in tuple(observers_of_inner):
        observer(update, loss)
