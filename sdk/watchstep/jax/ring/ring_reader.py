"""Reading of rings of steps: updates inside of a scan or loop, a dispatch or two after they were made."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable

import jax

from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.jax.ring.ring_snapshots import RingSnapshot, RingStep
from watchstep.jax.ring.row_cadence import RowCadence
from watchstep.jax.ring.step_ring import StepRing
from watchstep.jax.traced_updates import TracedUpdate, UpdateOutputs, shardings_of
from watchstep.stopping import StopTraining
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
        skipped = outputs.withheld if self._withholds else outputs.skipped
        self._ring.record(
            outputs.gradients,
            weights,
            outputs.loss,
            emitted=outputs.emitted,
            skipped=skipped,
            shardings=shardings_of(outputs.layout),
        )

    @property
    def is_waiting(self) -> bool:
        """Whether a dispatch has not been read yet."""
        return bool(self._pending)

    def dispatched(self) -> None:
        """Start to copy what a dispatch has recorded."""
        if jax.process_count() == 1:
            self._ring.every = self._cadence.after(self._steps)
        snapshot = self._ring.snapshot()
        if snapshot is not None:
            self._pending.append(snapshot)

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

    def read(self, about_to_record: Callable[[], str], *, at_end: bool = False) -> None:
        """Record the updates that have arrived.

        Args:
            about_to_record: called before the updates of a dispatch, if it has made any. Returns the name of their losses.
            at_end: wait for all of them, and leave the ring to a later recording.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        while self._pending and (at_end or self._is_due):
            self._record(self._pending.popleft(), about_to_record)
        if not at_end:
            return
        try:
            if (snapshot := self._ring.snapshot(with_rows=True)) is not None:
                self._record(snapshot, about_to_record)
        finally:
            self._ring.release()

    @property
    def _is_due(self) -> bool:
        """Whether the oldest dispatch is read. Several processes read the same ones between two dispatches, so that a stop ends all of them at the same call."""
        if jax.process_count() > 1:
            return len(self._pending) >= _MAX_PENDING
        return self._pending[0].is_ready

    def _record(self, snapshot: RingSnapshot, about_to_record: Callable[[], str]) -> None:
        missed = self._ring.missed_steps
        steps = self._ring.read(snapshot)
        if self._ring.missed_steps > missed:
            self._session.health.count("missed_steps", self._ring.missed_steps - missed)
        if not steps:
            return
        loss_name = about_to_record()
        stop: StopTraining | None = None
        for step in steps:
            try:
                self._record_step(step, loss_name)
            except StopTraining as error:
                stop = stop or error  # the program has made this update and the later ones
                self._recorder.end_step()
        if stop is not None:
            raise stop

    def _record_step(self, step: RingStep, loss_name: str) -> None:
        skipped = step.number - self._steps
        self._steps = step.number + 1
        self._recorder.skip(skipped)
        self._recorder.record(
            Update(
                gradients=step.gradients,
                weights=step.weights,
                losses={} if step.loss is None else {loss_name: step.loss},
                is_skipped=step.is_skipped and not self._withholds,
                is_withheld=step.is_skipped and self._withholds,
                is_bad=step.is_bad,
                places=step.places,
            )
        )


def _note_of(session: Session) -> Callable[[str], None]:
    """Return a function that notes a reason in the session's health. A ring may outlive the session, and does not keep it."""
    reference = weakref.ref(session)

    def note(reason: str) -> None:
        living = reference()
        if living is not None:
            living.health.note("jax", reason)

    return note
