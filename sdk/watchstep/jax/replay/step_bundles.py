"""Bundles of a recorded JAX program: the arguments of one call of its step, for ``watchstep replay``.

A requested bundle is written before the call, because the call may donate its arguments. That a step was bad is known at the next call. Its
arguments are then gathered:

- Arrays that it did not donate are referenced until the next call, up to `MAX_REFERENCED_BYTES`.
- Parameters and optimizer state that it donated are outputs of the call, if the gate policy has withheld the update
  (`watchstep.jax.replay.unchanged_outputs`). If the optimizer has left it out itself, the parameters are whose update is zero; others are lost, and so is
  the state, because it counts such updates. If it was made, because only the loss is bad, nothing is bundled.
- Other donated arrays, such as statistics of a batch normalization or a random key, are copied before the call, up to `_MAX_COPIED_BYTES`.

A larger array that is an output of the bad step, which the program passes to the next one, is named as lost. If another argument is lost, such as the
batch, nothing is bundled. Without a policy that withholds updates, the state of a bad step is gone.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from numpy.typing import NDArray

from watchstep.capture.identity import Identity
from watchstep.capture.steps.session import Session
from watchstep.capture.tensors.snapshots import StoredFile
from watchstep.format.layout import BundleKey
from watchstep.jax.compiled_steps import CompiledStep
from watchstep.jax.host_values import host_memory
from watchstep.jax.internals import jax_names
from watchstep.jax.replay.argument_trees import ArgumentTree, LostLeaf
from watchstep.jax.replay.unchanged_outputs import unchanged_outputs
from watchstep.jax.replay.value_health import contents, is_reference
from watchstep.jax.traced_updates import UpdateLayout
from watchstep.updates.update_recorder import Update

_log = logging.getLogger("watchstep")

MAX_REFERENCED_BYTES = 256 * 2**20
"""Size of the arguments of a call that are referenced until the next one."""

_MAX_COPIED_BYTES = 2**20
"""Size of the arguments that are copied before a call, because the call donates or changes them."""

_MAX_COPIED = 256
"""Number of these arguments."""

_MAX_HASHED_BYTES = 4 * 2**20
"""Size of the arrays in host memory of a call that are compared completely. The checksum takes some 0.2 ms for each MiB, 1 ms with an older zlib."""

_SAMPLED = 4096
"""Elements of a larger array that are compared, at least; they take about 0.1 ms."""

_MAX_PLANS = 8
"""Kinds of arguments of a step for which plans are kept, such as batches with and without a mask."""

_Kind = tuple[Any, tuple[type, ...]]

OVERWRITTEN = "the program has written to an array that it passed to the step"

_CHANGED = "the step donates it, and the program has no output of the step that is equal to it"

_MOVED = "the step donates it, and the optimizer may have changed it, because it left out only a part of the update"

_COUNTED = "it is not kept, and the optimizer has counted the update that it left out"


_NO_UPDATE = UpdateLayout((), (), (), (), (), (), has_loss=False)


@dataclass(frozen=True)
class _Plan:
    """What is kept of the arguments of a step's calls. It is made after a call, and used until the step has other arguments or is traced anew.

    Attributes:
        kind: structure of the arguments, and the type of each leaf: arrays of NumPy are not donated.
        layout: what is fixed about the update.
        parameters: places of parameters among the leaves of the arguments.
        states: places of optimizer state among them.
        copied: places of leaves that are copied before a call.
        lost: why a leaf is not kept, by its place.
        hashed: places of leaves in whose memory the program may write its next batch.
        tree: names of the arguments, without values.
        outputs: places of the outputs that are an argument if the update is withheld, by its place.
        kept_bytes: size of the leaves that are referenced.
    """

    kind: _Kind
    layout: UpdateLayout
    parameters: frozenset[int]
    states: frozenset[int]
    copied: tuple[int, ...]
    lost: dict[int, str]
    hashed: tuple[int, ...]
    tree: ArgumentTree
    outputs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    kept_bytes: int = 0

    @classmethod
    def of(cls, kind: Any, layout: UpdateLayout, leaves: Sequence[Any], tree: ArgumentTree) -> _Plan:
        """Return the plan after a call.

        Args:
            kind: as above.
            layout: as above.
            leaves: leaves of its arguments; donated ones are deleted.
            tree: as above.
        """
        parameters, states = updated_places(layout)
        withheld, size = parameters | states, 0
        donated = {place: leaf for place, leaf in enumerate(leaves) if _is_changed(leaf)}
        copied = _chosen({place: leaf for place, leaf in donated.items() if place not in withheld})
        reason = f"the step donates it, and copies are limited to {_MAX_COPIED_BYTES >> 20} MiB"
        lost = dict.fromkeys(donated.keys() - set(copied), reason)
        lost |= dict.fromkeys(donated.keys() & withheld, _CHANGED)
        for place in sorted(set(range(len(leaves))) - donated.keys(), key=withheld.__contains__):
            own = _size(leaves[place])
            if size + own <= MAX_REFERENCED_BYTES:
                size += own
            else:
                lost[place] = f"references to arguments are limited to {MAX_REFERENCED_BYTES >> 20} MiB"
        hashed = tuple(
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, np.ndarray)
            or (isinstance(leaf, jax.Array) and place not in withheld and place not in donated)
            if place not in lost
        )
        return cls(kind, layout, parameters, states, copied, lost, hashed, tree, kept_bytes=size)

    @functools.cached_property
    def kept(self) -> tuple[int, ...]:
        """Places of leaves that are referenced."""
        return tuple(place for place in range(len(self.kind[1])) if place not in self.lost)

    @property
    def largest_hashed(self) -> int:
        """Size of the largest array that is compared completely."""
        return _MAX_HASHED_BYTES // max(1, len(self.hashed))

    @functools.cached_property
    def references(self) -> frozenset[int]:
        """Places of references to arrays."""
        reference = jax_names.find("ref")
        kinds = enumerate(self.kind[1] if reference is not None else ())
        return frozenset(place for place, kind in kinds if issubclass(kind, reference))

    @property
    def loses_updated(self) -> bool:
        """Whether parameters or state are not kept, mostly because the step donates them."""
        return not self.lost.keys().isdisjoint(self.parameters | self.states)


@dataclass(frozen=True)
class BundledCall:
    """A call of a step whose arguments are kept.

    Attributes:
        function: the step.
        plan: what is kept of its arguments.
        leaves: leaves of its arguments as they were before it, by their places, as far as they are kept.
        checksums: of those which the program may write its next batch to.
        outputs: arrays that it has returned, by their ids.
        returned: the arrays among them that have the value of a leaf that is not kept, if the update is withheld, by its place.
        has_one_update: whether it makes one update, which is no part of a scan, so that it can be bundled.
        identities: places of its leaves by their ids, those that it has deleted included: what an earlier call refers to has no other id.
    """

    function: CompiledStep
    plan: _Plan
    leaves: dict[int, Any]
    checksums: dict[int, int]
    outputs: Mapping[int, weakref.ref[Any]]
    returned: Mapping[int, Sequence[weakref.ref[Any]]]
    has_one_update: bool = True
    identities: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_overwritten(self) -> bool:
        """Whether the program has written to an argument since the call."""
        return any(
            _checksum(leaf, self.plan.largest_hashed) != checksum
            for place, checksum in self.checksums.items()
            if not _is_deleted(leaf := self.leaves[place])
        )

    def is_output(self, leaf: Any) -> bool:
        """Return whether the call has returned an array."""
        return _is_among(leaf, self.outputs)

    def leaf(self, place: int, update: Update, unmoved: Container[int | None]) -> Any:
        """Return a leaf of the arguments; `LostLeaf` for one that is lost.

        Args:
            place: its place.
            update: the update of the call, which was not made.
            unmoved: places of parameters that are the same after it.
        """
        plan = self.plan
        if place in self.leaves:
            return self.leaves[place]
        if not update.is_withheld and place in plan.states:
            return LostLeaf(_COUNTED)
        if not update.is_withheld and place in plan.parameters and place not in unmoved:
            return LostLeaf(_MOVED)
        if update.is_withheld or place in plan.parameters:
            for reference in self.returned.get(place, ()):
                output = reference()
                if output is not None and not _is_deleted(output):
                    return output
        return LostLeaf(plan.lost[place])


class _Waiting(threading.local):
    """What is known of the call that a thread is about to make, and of its last one. A step may be called in several threads.

    Attributes:
        arguments: arguments of the call that is about to be made.
        flat: its arguments, their leaves and kind.
        copies: copies of leaves that it donates or changes, by their places.
        outputs: arrays that the last call has returned, by their ids. An id alone may be that of a later array.
        hashed: arrays of JAX of the last call with a checksum, by their ids, and what it is of.
    """

    def __init__(self) -> None:
        self.arguments: Any = None
        self.flat: tuple[Any, list[Any], _Kind] | None = None
        self.copies: dict[int, Any] = {}
        self.outputs: dict[int, weakref.ref[Any]] = {}
        self.hashed: dict[int, tuple[weakref.ref[Any], _Plan, int]] = {}


class StepBundles:
    """Writes the bundles of one hook. Used on the training thread."""

    def __init__(
        self, session: Session, identity: Identity, run_url: str, *, withholds: bool, keeps_all: bool = False
    ) -> None:
        """Start without calls.

        Args:
            session: the recording.
            identity: the run, attempt and worker.
            run_url: URL of the run, for the message.
            withholds: whether the step leaves out updates by non-finite gradients.
            keeps_all: whether the arguments of calls that cannot be bundled are kept, too, because a bad step is computed again.
        """
        self._session = session
        self._identity = identity
        self._run_url = run_url
        self._withholds = withholds and session.config.bundles is not None
        self.keeps_all = keeps_all and self._withholds
        self._waiting = _Waiting()
        self._plans: weakref.WeakKeyDictionary[CompiledStep, list[_Plan]] = weakref.WeakKeyDictionary()

    def about_to_call(self, arguments: Any) -> None:
        """Note the arguments of a call that is about to be made."""
        self._waiting.arguments = arguments if self._withholds else None

    def forget(self) -> None:
        """Refer to no arguments any more."""
        self._waiting = _Waiting()

    def keep_donated(self, function: CompiledStep) -> None:
        """Copy arguments of the call that is about to be made, which it donates or changes.

        Args:
            function: the step.
        """
        waiting = self._waiting
        waiting.copies, waiting.flat = {}, None
        if waiting.arguments is None:
            return
        leaves, kind = _flatten(waiting.arguments)
        waiting.flat = waiting.arguments, leaves, kind
        plan = self._plan_of(function, kind)
        if plan is not None:
            places = plan.copied
        else:  # the first call tells which are donated
            layouts = [update.layout for update in function.layouts_of(*waiting.arguments)]
            updated = frozenset[int]().union(*itertools.chain.from_iterable(map(updated_places, layouts)))
            others = set(range(len(leaves))) - updated
            places = _chosen({place: leaves[place] for place in sorted(others)})
        if places:
            copies = _copies()([leaves[place] for place in places])
            waiting.copies = dict(zip(places, copies, strict=True))

    def called(
        self, function: CompiledStep, layouts: Sequence[UpdateLayout], arguments: Any, outputs: Any
    ) -> BundledCall | None:
        """Note a call that was made. Returns what `write_bad` bundles; None if its arguments are not those of one update. Faults are counted.

        Args:
            function: the step.
            layouts: what is fixed about its updates.
            arguments: pytree of positional and keyword arguments. Donated ones are deleted.
            outputs: its result.
        """
        has_one_update = len(layouts) == 1 and not function.has_inner_updates
        layouts = [*layouts, *function.inner_layouts]
        if not self._withholds or not layouts or not (has_one_update or self.keeps_all):
            self._waiting.arguments, self._waiting.flat, self._waiting.copies = None, None, {}
            return None
        try:
            return replace(
                self._call(function, layouts[0], arguments, outputs), has_one_update=has_one_update
            )
        except Exception as error:  # noqa: BLE001 - the update is recorded without its arguments
            self._session.health.fault("bundle", error)
            return None

    def plain_called(self, function: CompiledStep, arguments: Any, outputs: Any) -> BundledCall:
        """Return what is kept of a call that made no update."""
        return replace(self._call(function, _NO_UPDATE, arguments, outputs), has_one_update=False)

    def _call(
        self, function: CompiledStep, layout: UpdateLayout, arguments: Any, outputs: Any
    ) -> BundledCall:
        waiting = self._waiting
        flat, copies = waiting.flat, waiting.copies
        waiting.arguments, waiting.flat, waiting.copies = None, None, {}
        if flat is not None and all(map(operator.is_, flat[0], arguments)):
            _, leaves, kind = flat
        else:
            leaves, kind = _flatten(arguments)
        plan = self._plan_of(function, kind)
        if plan is None or plan.layout is not layout:
            plans = self._plans.setdefault(function, [])
            plan = self._new_plan(function, kind, layout, arguments, leaves)
            plans[:] = [plan, *(other for other in plans if other.kind != kind)][:_MAX_PLANS]
        kept = {place: leaves[place] for place in plan.kept} | copies
        makes_update = layout is not _NO_UPDATE
        hashed = {
            place: kept[place]
            for place in plan.hashed
            if place not in copies and (makes_update or isinstance(kept[place], np.ndarray))
        }
        known = waiting.hashed
        checksums = self._checksums(plan, hashed)
        results = jax.tree_util.tree_leaves(outputs)
        references = {
            place: weakref.ref(leaf) for place, leaf in enumerate(results) if isinstance(leaf, jax.Array)
        }
        by_id = {id(results[place]): reference for place, reference in references.items()}
        if makes_update:
            waiting.outputs = by_id
        else:
            waiting.hashed = known
        returned = {
            place: [references[output] for output in plan.outputs.get(place, ()) if output in references]
            for place in plan.lost
        }
        identities = {id(leaf): place for place, leaf in enumerate(leaves)} if self.keeps_all else {}
        return BundledCall(function, plan, kept, checksums, by_id, returned, identities=identities)

    def _plan_of(self, function: CompiledStep, kind: _Kind) -> _Plan | None:
        return next((plan for plan in self._plans.get(function, ()) if plan.kind == kind), None)

    def _new_plan(
        self,
        function: CompiledStep,
        kind: _Kind,
        layout: UpdateLayout,
        arguments: Any,
        leaves: Sequence[Any],
    ) -> _Plan:
        positional, keywords = arguments
        tree = ArgumentTree.of(positional, keywords, function.static_argnums).with_leaves(
            (None,) * len(leaves)
        )
        plan = _Plan.of(kind, layout, leaves, tree)
        if plan.lost:
            try:
                found = unchanged_outputs(
                    function.recording_trace(positional, keywords), positional, keywords
                )
            except Exception as error:  # noqa: BLE001 - what is not determined is lost
                self._session.health.fault("bundle", error)
            else:
                plan = replace(plan, outputs=found)
        return plan

    def _checksums(self, plan: _Plan, leaves: Mapping[int, Any]) -> dict[int, int]:
        """Return a checksum of each array that the program may write its next batch to, by its place.

        Such memory is that of arrays of NumPy, and of arrays of JAX that share it. Those that a step has returned do not. Those that are the same ones
        as in the last call, such as weights that are not trained, have the checksum from there.
        """
        waiting, found = self._waiting, dict[int, int]()
        earlier, waiting.hashed = waiting.hashed, {}
        for place, leaf in leaves.items():
            is_array = isinstance(leaf, jax.Array)
            if is_array and _is_among(leaf, waiting.outputs):
                continue
            reference, last, checksum = earlier.get(id(leaf), (None, None, None))
            if reference is None or reference() is not leaf or last is not plan:
                checksum = _checksum(leaf, plan.largest_hashed)
            if checksum is not None:
                found[place] = checksum
                if is_array:
                    waiting.hashed[id(leaf)] = weakref.ref(leaf), plan, checksum
        return found

    def write_bad(self, call: BundledCall, unmoved: Any, step: int, update: Update) -> None:
        """Write the bundle of the step of an update with NaN or infinity, as far as its arguments are known. Faults are counted.

        Args:
            call: its call.
            unmoved: as in `UpdateOutputs`.
            step: the step.
            update: the update.
        """
        plan = call.plan
        values, carried = self.values_of(call, unmoved, update)
        obstacle = next(
            (
                value.reason
                for place, value in enumerate(values)
                if isinstance(value, LostLeaf) and place not in carried
            ),
            "",
        )
        if not (update.is_withheld or update.is_skipped) and plan.loses_updated:
            obstacle = "its gradients are finite, so that its update was made, and donated parameters or state are gone"
        if call.is_overwritten:
            obstacle = OVERWRITTEN
        if obstacle:
            self._session.health.note("bundles", f"step {step} is not bundled: {obstacle}")
            return
        function = call.function
        self._write(step, lambda: plan.tree.with_leaves(values, function.static_argnums), is_complete=False)

    def values_of(self, call: BundledCall, unmoved: Any, update: Update) -> tuple[list[Any], set[int]]:
        """Return the leaves of the arguments of a call, `LostLeaf` for those that are lost, and the places of those that the next call has from it.

        The arguments are those of `write_bad`.
        """
        plan = call.plan
        flags = () if unmoved is None else np.asarray(unmoved).tolist()
        same = {place for place, is_same in zip(plan.layout.inputs, flags, strict=False) if is_same}
        values = [call.leaf(place, update, same) for place in range(len(plan.kind[1]))]
        carried = set(plan.parameters | plan.states)
        for place, leaf in enumerate(jax.tree_util.tree_leaves(self._waiting.arguments)):
            if call.is_output(leaf) or is_reference(leaf):
                carried.add(place)
        return values, carried

    def later_values(self, call: BundledCall) -> dict[int, Any]:
        """Return the arrays that the program passes to the next call in the places of a call's arguments, if its last call has returned them."""
        leaves, kind = _flatten(self._waiting.arguments)
        outputs = self._waiting.outputs
        if kind[0] != call.plan.kind[0]:
            return {}
        return {place: leaf for place, leaf in enumerate(leaves) if _is_among(leaf, outputs)}

    def write_requested(self, step: int, function: CompiledStep, arguments: Any) -> None:
        """Write the bundle of a call that is about to be made, if one is requested. Faults are counted."""
        if self._session.bundles.is_pending:
            positional, keywords = arguments
            self._write(
                step, lambda: ArgumentTree.of(positional, keywords, function.static_argnums), is_complete=True
            )

    def _write(self, step: int, tree: Callable[[], ArgumentTree], *, is_complete: bool) -> None:
        """Write a bundle if one is due.

        Args:
            step: the step.
            tree: returns its arguments.
            is_complete: whether they are those of a call that is about to be made.
        """
        occasion = self._session.bundles.due(step, is_complete=is_complete)
        if occasion is None:
            return
        from watchstep.jax.replay.step_arguments import write_bundle

        since, identity, worker = self._session.schedule.now(), self._identity, self._identity.worker
        run = {
            "project": identity.project,
            "run": identity.run,
            "attempt": identity.attempt,
            "worker": worker,
        }
        try:
            with tempfile.TemporaryFile(prefix="watchstep-bundle-") as file:
                write_bundle(
                    file,
                    tree(),
                    step=step,
                    reason=occasion.reason,
                    run={**run, "world_size": identity.world_size},
                )
                file.flush()
                data = np.memmap(file, np.uint8, "r")
            self._session.snapshot_writer.offer(
                StoredFile(
                    lambda attempt: BundleKey(attempt, worker, step, occasion.reason).path, data, "bundles"
                )
            )
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._session.health.fault("bundle", error)
            self._session.health.count("dropped_bundles")
            return
        self._session.schedule.report_extra(since)
        if occasion.reason == "gate":
            _log.warning(
                "watchstep: step %d is not finite and is bundled: watchstep replay %s --program FILE.py",
                step,
                self._run_url,
            )


def _flatten(arguments: Any) -> tuple[list[Any], _Kind]:
    """Return the leaves of arguments, their structure, and the type of each leaf."""
    leaves, structure = jax.tree_util.tree_flatten(arguments)
    return leaves, (structure, tuple(map(type, leaves)))


def updated_places(layout: UpdateLayout) -> tuple[frozenset[int], frozenset[int]]:
    """Return the places of parameters and those of optimizer state among the leaves of a step's arguments."""
    parameters = frozenset(place for place in layout.inputs if place is not None)
    states = frozenset(place for place in layout.states if place is not None)
    return parameters, states - parameters


def _chosen(leaves: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the places of the leaves to copy: arrays and references, from the smallest one on, up to the limits.

    Arrays that are divided among processes are not stored.
    """
    arrays = {
        place: _size(leaf)
        for place, leaf in leaves.items()
        if is_reference(leaf) or (isinstance(leaf, jax.Array) and leaf.is_fully_addressable)
    }
    ordered = sorted(arrays, key=arrays.__getitem__)[:_MAX_COPIED]
    sums = itertools.accumulate(arrays[place] for place in ordered)
    return tuple(place for place, size in zip(ordered, sums, strict=True) if size <= _MAX_COPIED_BYTES)


@functools.cache
def _copies() -> Callable[[list[Any]], list[Any]]:
    """Return a function that copies arrays in one dispatch."""
    copies: Callable[[list[Any]], list[Any]] = jax.jit(
        lambda arrays: [jnp.copy(contents(array)) for array in arrays]
    )
    return copies


def _size(leaf: Any) -> int:
    if is_reference(leaf):
        return int(leaf.size) * int(leaf.dtype.itemsize)
    return int(getattr(leaf, "nbytes", 0))


def _is_changed(leaf: Any) -> bool:
    """Return whether a leaf does not have its value from before the call."""
    return is_reference(leaf) or _is_deleted(leaf)


def _checksum(leaf: Any, largest: int) -> int | None:
    """Return a checksum of an array in host memory; None of another one, or of one that is not computed yet.

    Args:
        leaf: the array.
        largest: size of the largest array all of whose elements are read; of a larger one some are.
    """
    parts = [leaf] if isinstance(leaf, np.ndarray) else host_memory(leaf)
    if parts is None:
        return None
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(_compared(part, largest).tobytes(), checksum)
    return checksum


def _is_among(leaf: Any, arrays: Mapping[int, weakref.ref[Any]]) -> bool:
    reference = arrays.get(id(leaf))
    return reference is not None and reference() is leaf


def _compared(array: NDArray[Any], largest: int) -> NDArray[Any]:
    if array.nbytes <= largest:
        return array
    stride = max(1, array.size // _SAMPLED)
    while math.gcd(stride, array.size) > 1:  # else all elements may be of one column
        stride -= 1
    return array.flat[::stride]


def _is_deleted(leaf: Any) -> bool:
    is_deleted = getattr(leaf, "is_deleted", None)
    return bool(is_deleted is not None and is_deleted())
