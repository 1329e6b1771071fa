"""Bundles of a recorded JAX program: the arguments of one call of its step, for ``watchstep replay``.

A requested bundle is written before the call, because the call may donate its arguments. That a step was bad is known at the next call. If the
gate policy has withheld its update, the program passes the state of the bad step again, and what it passed newly in the bad step, such as the
batch, was not donated: together they are the arguments of the bad step. Without a policy that withholds updates, the state of a bad step is gone.
"""

from __future__ import annotations

import logging
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from watchstep.capture.identity import Identity
from watchstep.capture.steps.session import Session
from watchstep.capture.tensors.snapshots import StoredFile
from watchstep.format.layout import BundleKey
from watchstep.jax.compiled_steps import CompiledStep

_log = logging.getLogger("watchstep")

_MAX_NEW_BYTES = 256 * 2**20
"""Size of the new arguments of a call that are referenced until the next one."""

_SAMPLED = 256
"""Elements of an array that are compared, at least; twice as many at most."""


@dataclass(frozen=True)
class _Call:
    """A call of a step.

    Attributes:
        function: the step.
        structure: structure of its arguments.
        new: leaves of its arguments that are no outputs of its call before, by their indices.
        samples: of each array of NumPy among them, which the program may write its next batch to, some elements.
    """

    function: CompiledStep
    structure: Any
    new: dict[int, Any]
    samples: dict[int, bytes]

    @property
    def is_overwritten(self) -> bool:
        """Whether the program has written to an argument since the call."""
        return any(_sample(self.new[place]) != sample for place, sample in self.samples.items())


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

    @property
    def can_bundle_bad_steps(self) -> bool:
        """Whether the arguments of a bad step can be found at the next call."""
        return self._withholds

    def about_to_call(self, arguments: Any) -> None:
        """Note the arguments of a call that is about to be made."""
        self._arguments = arguments if self._withholds else None

    def called(self, function: CompiledStep, arguments: Any, outputs: Any) -> None:
        """Note a call that was made.

        Args:
            function: the step.
            arguments: pytree of positional and keyword arguments. Donated ones are deleted.
            outputs: its result.
        """
        if not self._withholds:
            return
        leaves, structure = jax.tree_util.tree_flatten(arguments)
        new = {place: leaf for place, leaf in enumerate(leaves) if not self._is_last_output(leaf)}
        size = sum(int(getattr(leaf, "nbytes", 0)) for leaf in new.values())
        is_kept = size <= _MAX_NEW_BYTES and not any(map(_is_deleted, new.values()))
        samples = {place: _sample(leaf) for place, leaf in new.items() if isinstance(leaf, np.ndarray)}
        self._last_call = _Call(function, structure, new, samples) if is_kept else None
        arrays = (leaf for leaf in jax.tree_util.tree_leaves(outputs) if isinstance(leaf, jax.Array))
        self._last_outputs = {id(array): weakref.ref(array) for array in arrays}
        self._arguments = None

    def _is_last_output(self, leaf: Any) -> bool:
        output = self._last_outputs.get(id(leaf))
        return output is not None and output() is leaf

    def write_bad(self, step: int) -> None:
        """Write the bundle of the step whose update was withheld, if its arguments are known. Faults are counted."""
        call, arguments = self._last_call, self._arguments
        if call is None or arguments is None:
            return
        leaves, structure = jax.tree_util.tree_flatten(arguments)
        if structure != call.structure:
            return
        if call.is_overwritten:
            self._session.health.note(
                "bundles",
                f"step {step} is not bundled: the program has written to an array that it passed to the step",
            )
            return
        values = [call.new.get(place, leaf) for place, leaf in enumerate(leaves)]
        self._write(step, jax.tree_util.tree_unflatten(structure, values), call.function, is_complete=False)

    def write_requested(self, step: int, function: CompiledStep, arguments: Any) -> None:
        """Write the bundle of a call that is about to be made, if one is requested. Faults are counted."""
        if self._session.bundles.is_pending:
            self._write(step, arguments, function, is_complete=True)

    def _write(self, step: int, arguments: Any, function: CompiledStep, *, is_complete: bool) -> None:
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
                positional, keywords = arguments
                write_bundle(
                    file,
                    positional,
                    keywords,
                    step=step,
                    static_argnums=function.static_argnums,
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


def _sample(array: Any) -> bytes:
    return bytes(array.flat[:: max(1, array.size // _SAMPLED)].tobytes())


def _is_deleted(leaf: Any) -> bool:
    is_deleted = getattr(leaf, "is_deleted", None)
    return bool(is_deleted is not None and is_deleted())
