"""Bundles of a recorded JAX program: the arguments of one call of its step, for ``watchstep replay``.

A requested bundle is written before the call, because the call may donate its arguments. That a step was bad is known at the next call. Its
arguments are then gathered:

- Arrays that it did not donate are referenced until the next call, up to `_MAX_REFERENCED_BYTES`.
- Parameters and optimizer state that it donated are those of the next call, if the gate policy has withheld the update. If the optimizer has left
  it out itself, the parameters are, and the state is lost, because it counts such updates. If it was made, because only the loss is bad, nothing is
  bundled.
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
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from watchstep.jax.replay.argument_trees import ArgumentTree, LostLeaf
from watchstep.jax.replay.value_health import contents, is_reference
from watchstep.jax.traced_updates import UpdateLayout
from watchstep.updates.update_recorder import Update

_log = logging.getLogger("watchstep")

_MAX_REFERENCED_BYTES = 256 * 2**20
"""Size of the arguments of a call that are referenced until the next one."""

_MAX_COPIED_BYTES = 2**20
"""Size of the arguments that are copied before a call, because the call donates or changes them."""

_MAX_COPIED = 256
"""Number of these arguments."""

_MAX_HASHED_BYTES = 4 * 2**20
"""Size of the arrays of NumPy of a call that are compared completely. The checksum takes some 0.2 ms for each MiB, 1 ms with an older zlib."""

_SAMPLED = 4096
"""Elements of a larger array that are compared, at least; they take about 0.1 ms."""

_MAX_PLANS = 8
"""Kinds of arguments of a step for which plans are kept, such as batches with and without a mask."""

_Kind = tuple[Any, tuple[type, ...]]

_COUNTED = "it is not kept, and the optimizer has counted the update that it left out"


@dataclass(frozen=True)
class _Plan:
    """What is kept of the arguments of a step's calls. It is made after a call, and used until the step has other arguments or is traced anew.

    Attributes:
        kind: structure of the arguments, and the type of each leaf: arrays of NumPy are not donated.
        layouts: what is fixed about the updates.
        parameters: places of parameters among the leaves of the arguments.
        states: places of optimizer state among them.
        copied: places of leaves that are copied before a call.
        lost: why a leaf is not kept, by its place.
    """

    kind: _Kind
    layouts: tuple[UpdateLayout, ...]
    parameters: frozenset[int]
    states: frozenset[int]
    copied: tuple[int, ...]
    lost: dict[int, str]

    @classmethod
    def of(cls, kind: Any, layouts: tuple[UpdateLayout, ...], leaves: Sequence[Any]) -> _Plan:
        """Return the plan after a call.

        Args:
            kind: as above.
            layouts: what is fixed about its updates.
            leaves: leaves of its arguments; donated ones are deleted.
        """
        parameters, states = _updated(layouts)
        withheld, size = parameters | states, 0
        donated = {place: leaf for place, leaf in enumerate(leaves) if _is_changed(leaf)}
        copied = _chosen({place: leaf for place, leaf in donated.items() if place not in withheld})
        reason = f"the step donates it, and copies are limited to {_MAX_COPIED_BYTES >> 20} MiB"
        lost = dict.fromkeys(donated.keys() - set(copied), reason)
        for place in sorted(set(range(len(leaves))) - donated.keys(), key=withheld.__contains__):
            own = _size(leaves[place])
            if size + own <= _MAX_REFERENCED_BYTES:
                size += own
            else:
                lost[place] = f"references to arguments are limited to {_MAX_REFERENCED_BYTES >> 20} MiB"
        return cls(kind, layouts, parameters, states, copied, lost)

    @functools.cached_property
    def kept(self) -> tuple[int, ...]:
        """Places of leaves that are referenced."""
        return tuple(place for place in range(len(self.kind[1])) if place not in self.lost)

    @property
    def loses_updated(self) -> bool:
        """Whether parameters or state are not kept, mostly because the step donates them."""
        return not self.lost.keys().isdisjoint(self.parameters | self.states)


@dataclass(frozen=True)
class _Call:
    """A call of a step.

    Attributes:
        function: the step.
        plan: what is kept of its arguments.
        leaves: leaves of its arguments as they were before it, by their places, as far as they are kept.
        checksums: of each array of NumPy among them, which the program may write its next batch to.
    """

    function: CompiledStep
    plan: _Plan
    leaves: dict[int, Any]
    checksums: dict[int, int]

    @property
    def is_overwritten(self) -> bool:
        """Whether the program has written to an argument since the call."""
        return _checksums(self.leaves) != self.checksums

    def leaf(self, place: int, now: Any, *, is_withheld: bool) -> Any:
        """Return a leaf of the arguments; `LostLeaf` for one that is lost.

        Args:
            place: its place.
            now: the leaf that the call has returned in its place.
            is_withheld: whether the gate policy has withheld its update; else the optimizer has left it out.
        """
        plan = self.plan
        if place in self.leaves:
            return self.leaves[place]
        if place in plan.parameters or (is_withheld and place in plan.states):
            return now
        return LostLeaf(_COUNTED if place in plan.states else plan.lost[place])


class StepBundles:
    """Writes the bundles of one hook. Used on the training thread."""

    def __init__(self, session: Session, identity: Identity, run_url: str, *, withholds: bool) -> None:
        """Start without calls.

        Args:
            session: the recording.
            identity: the run, attempt and worker.
            run_url: URL of the run, for the message.
            withholds: whether the step leaves out updates by non-finite gradients.
        """
        self._session = session
        self._identity = identity
        self._run_url = run_url
        self._withholds = withholds and session.config.bundles is not None
        self._last_outputs: dict[int, weakref.ref[Any]] = {}  # an id alone may be that of a later array
        self._last_call: _Call | None = None
        self._arguments: Any = None
        self._plans: weakref.WeakKeyDictionary[CompiledStep, list[_Plan]] = weakref.WeakKeyDictionary()
        self._flat: tuple[Any, list[Any], _Kind] | None = (
            None  # arguments of the call that is about to be made
        )
        self._copies: dict[int, Any] = {}

    @property
    def can_bundle_bad_steps(self) -> bool:
        """Whether the arguments of a bad step can be found at the next call."""
        return self._withholds

    def about_to_call(self, arguments: Any) -> None:
        """Note the arguments of a call that is about to be made."""
        self._arguments = arguments if self._withholds else None

    def forget(self) -> None:
        """Refer to no arguments any more."""
        self._last_call, self._arguments, self._copies, self._flat = None, None, {}, None

    def keep_donated(self, function: CompiledStep) -> None:
        """Copy arguments of the call that is about to be made, which it donates or changes. The last call is not needed any more.

        Args:
            function: the step.
        """
        self._last_call, self._copies, self._flat = None, {}, None
        if self._arguments is None:
            return
        leaves, kind = _flatten(self._arguments)
        self._flat = self._arguments, leaves, kind
        plan = self._plan_of(function, kind)
        if plan is not None:
            places = plan.copied
        else:  # the first call tells which are donated
            parameters, states = _updated([update.layout for update in function.layouts_of(*self._arguments)])
            others = set(range(len(leaves))) - parameters - states
            places = _chosen({place: leaves[place] for place in sorted(others)})
        if places:
            copies = _copies()([leaves[place] for place in places])
            self._copies = dict(zip(places, copies, strict=True))

    def called(
        self, function: CompiledStep, layouts: tuple[UpdateLayout, ...], arguments: Any, outputs: Any
    ) -> None:
        """Note a call that was made.

        Args:
            function: the step.
            layouts: what is fixed about its updates.
            arguments: pytree of positional and keyword arguments. Donated ones are deleted.
            outputs: its result.
        """
        if not self._withholds:
            return
        flat, self._flat = self._flat, None
        if flat is not None and all(map(operator.is_, flat[0], arguments)):
            _, leaves, kind = flat
        else:
            leaves, kind = _flatten(arguments)
        plan = self._plan_of(function, kind)
        if plan is None or plan.layouts != layouts:
            plans = self._plans.setdefault(function, [])
            plan = _Plan.of(kind, layouts, leaves)
            plans[:] = [plan, *(other for other in plans if other.kind != kind)][:_MAX_PLANS]
        kept = {place: leaves[place] for place in plan.kept} | self._copies
        self._last_call = _Call(function, plan, kept, _checksums(kept))
        arrays = (leaf for leaf in jax.tree_util.tree_leaves(outputs) if isinstance(leaf, jax.Array))
        self._last_outputs = {id(array): weakref.ref(array) for array in arrays}
        self._arguments, self._copies = None, {}

    def _plan_of(self, function: CompiledStep, kind: _Kind) -> _Plan | None:
        return next((plan for plan in self._plans.get(function, ()) if plan.kind == kind), None)

    def _is_last_output(self, leaf: Any) -> bool:
        output = self._last_outputs.get(id(leaf))
        return output is not None and output() is leaf

    def write_bad(self, step: int, update: Update) -> None:
        """Write the bundle of the step of an update with NaN or infinity, if its arguments are known. Faults are counted."""
        call, arguments = self._last_call, self._arguments
        if call is None or arguments is None:
            return
        leaves, (structure, _) = _flatten(arguments)
        if structure != call.plan.kind[0]:
            return
        carried = {
            place for place, leaf in enumerate(leaves) if self._is_last_output(leaf) or is_reference(leaf)
        }
        obstacle = next((reason for place, reason in call.plan.lost.items() if place not in carried), "")
        if not (update.is_withheld or update.is_skipped) and call.plan.loses_updated:
            obstacle = "its gradients are finite, so that its update was made, and donated parameters or state are gone"
        if call.is_overwritten:
            obstacle = "the program has written to an array that it passed to the step"
        if obstacle:
            self._session.health.note("bundles", f"step {step} is not bundled: {obstacle}")
            return
        is_withheld = update.is_withheld
        values = [call.leaf(place, leaf, is_withheld=is_withheld) for place, leaf in enumerate(leaves)]
        self._write(step, arguments, call.function, values)

    def write_requested(self, step: int, function: CompiledStep, arguments: Any) -> None:
        """Write the bundle of a call that is about to be made, if one is requested. Faults are counted."""
        if self._session.bundles.is_pending:
            self._write(step, arguments, function)

    def _write(
        self, step: int, arguments: Any, function: CompiledStep, values: Sequence[Any] | None = None
    ) -> None:
        """Write a bundle if one is due.

        Args:
            step: the step.
            arguments: pytree of its arguments, or of those of the next call.
            function: the step's function.
            values: the leaves of its arguments; None for those of `arguments`, of a call that is about to be made.
        """
        occasion = self._session.bundles.due(step, is_complete=values is None)
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
                positional, keywords = arguments
                tree = ArgumentTree.of(positional, keywords, function.static_argnums)
                if values is not None:
                    tree = tree.with_leaves(values, function.static_argnums)
                write_bundle(
                    file,
                    tree,
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


def _updated(layouts: Iterable[UpdateLayout]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the places of parameters and those of optimizer state among the leaves of a step's arguments."""
    parameters = frozenset(place for layout in layouts for place in layout.inputs if place is not None)
    states = frozenset(place for layout in layouts for place in layout.states if place is not None)
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


def _checksums(leaves: Mapping[int, Any]) -> dict[int, int]:
    """Return a checksum of each array of NumPy: of all elements if the arrays are small enough together, else of some of each larger one."""
    arrays = {place: leaf for place, leaf in leaves.items() if isinstance(leaf, np.ndarray)}
    largest = _MAX_HASHED_BYTES // max(1, len(arrays))
    return {place: zlib.crc32(_compared(array, largest).tobytes()) for place, array in arrays.items()}


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
