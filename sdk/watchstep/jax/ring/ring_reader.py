"""Reading of rings of steps: updates inside of a scan or loop, a dispatch or two after they were made."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable

import jax

from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.jax.ring.ring_snapshots import RingSnapshot, RingStep
from watchstep.jax.ring.row_cadence import RowCadence
from watchstep.jax.ring.step_ring import StepRing
from watchstep.jax.traced_updates import TracedUpdate, UpdateOutputs, shardings_of
from watchstep.updates.update_recorder import Update, UpdateRecorder

_MAX_PENDING = 2
"""Number of snapshots that are not read yet. At one more, the oldest is waited for: its dispatch is two dispatches ago."""


class RingReader:
    """Records the updates of one optimizer that its program makes inside of scans. Used on the training thread."""

    def __init__(self, session: Session, recorder: UpdateRecorder, key: Hashable = None) -> None:
        """Start without updates.

        Programs that an earlier recording of this process has traced are observed from the next dispatch on.

        Args:
            session: the recording.
            recorder: records the optimizer's updates.
            key: what identifies the optimizer's parameters in this process.
        """
        self._session = session
        self._recorder = recorder
        self._cadence = cadence = RowCadence.of(session, tensors.GRADIENTS)
        # Several processes choose the same updates, although they read at different times.
        every = cadence.first if jax.process_count() == 1 else cadence.every
        self._ring = StepRing.shared(key, self, every=every, row_slots=cadence.slots, note=_note_of(session))
        self._pending: deque[RingSnapshot] = deque()
        self._steps = 0
        """Updates that were recorded or missed: the number of the next one in the ring."""
        self._withholds = False

    def trace(self, update: TracedUpdate, outputs: UpdateOutputs) -> None:
        """Add the recording of an update to the program that is being traced. Never raises."""
        leaves, structure = jax.tree_util.tree_flatten(update.parameters)
        has_weights = structure == jax.tree_util.tree_structure(update.gradients)
        weights = leaves if has_weights and len(leaves) == len(outputs.gradients) else ()
        self._withholds = outputs.withheld is not None
        self._ring.record(
            outputs.gradients,
            weights,
            outputs.loss,
            emitted=outputs.emitted,
            skipped=outputs.skipped,
            shardings=shardings_of(outputs.layout),
        )

    def dispatched(self) -> bool:
        """Start to copy what a dispatch has recorded. Returns whether there is anything, which `take` returns later."""
        if jax.process_count() == 1:
            self._ring.every = self._cadence.after(self._steps)
        snapshot = self._ring.snapshot()
        if snapshot is not None:
            self._pending.append(snapshot)
        return snapshot is not None

    def wait(self) -> None:
        """Wait for the dispatch before the last one, so that a fault is found within two dispatches. Never raises: a failed dispatch is the program's."""
        if len(self._pending) >= _MAX_PENDING:
            self._pending[0].wait()

    def check(self) -> bool:
        """Make the ring usable by the next dispatch. Never raises, and does not wait.

        Returns:
            Whether it is usable. Otherwise programs that use it must not be dispatched.
        """
        return self._ring.check()

    def repair(self) -> bool:
        """Replace memory that a failed dispatch has deleted. Never raises; returns what `check` does."""
        return self._ring.repair()

    @property
    def is_due(self) -> bool:
        """Whether the oldest dispatch is read. Several processes read the same ones between two dispatches, so that a stop ends all of them at the same call."""
        if jax.process_count() > 1:
            return len(self._pending) >= _MAX_PENDING
        return self._pending[0].is_ready

    def take(self) -> list[RingStep]:
        """Return the updates of the oldest dispatch that was not read, in order, and forget it. Waits for it."""
        return self._read(self._pending.popleft())

    @property
    def is_complete(self) -> bool:
        """Whether the last `take` has returned all updates of its dispatch. Others arrive with the next one."""
        return self._ring.is_complete

    def take_rest(self) -> list[RingStep]:
        """Return the updates that no dispatch had copied, in order."""
        snapshot = self._ring.snapshot(with_rows=True)
        return [] if snapshot is None else self._read(snapshot)

    def release(self) -> None:
        """Leave the ring to a later recording."""
        self._ring.release()

    def _read(self, snapshot: RingSnapshot) -> list[RingStep]:
        missed = self._ring.missed_steps
        steps = self._ring.read(snapshot)
        if self._ring.missed_steps > missed:
            self._session.health.count("missed_steps", self._ring.missed_steps - missed)
        return steps

    def record(self, step: RingStep, loss_name: str) -> None:
        """Record an update.

        Args:
            step: the update.
            loss_name: name of its loss.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        skipped = step.number - self._steps
        self._steps = step.number + 1
        self._recorder.skip(skipped)
        self._recorder.record(
            Update(
                gradients=step.gradients,
                weights=step.weights,
                losses={} if step.loss is None else {loss_name: step.loss},
                is_skipped=step.is_skipped,
                # The step withholds each bad update that the optimizer does not leave out itself.
                is_withheld=self._withholds and step.has_bad_gradients and not step.is_skipped,
                is_bad=step.has_bad_gradients,
                places=step.places,
            )
        )


def _note_of(session: Session) -> Callable[[str], None]:
    """Return a function that states why updates are not observed. A ring may outlive the session, and does not keep it."""
    reference = weakref.ref(session)

    def note(reason: str) -> None:
        living = reference()
        if living is not None:
            warn_of_unobserved(living.health, reason)

    return note


def warn_of_unobserved(health: RecorderHealth, what: str) -> None:
    """State in health that updates are not observed, and log each reason once, because nothing of them stops the program."""
    health.warn("jax", f"{what}: nothing of it is recorded, and NaN in it stops nothing")
