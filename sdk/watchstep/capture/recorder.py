"""The recorder: groups measurements into steps and detects stops. Framework-neutral, on the training thread.

With a guard in the training process, the rows of each step are shown to it at once and it may stop the training. The
training thread then waits for what is measured, which synchronizes a device at each measured step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from watchstep.capture.health import RecorderHealth
from watchstep.capture.record import (
    BoundedQueue,
    Condition,
    DeviceScalar,
    FinishedStep,
    Group,
    LossOnsets,
    Probe,
    Record,
    ScalarValues,
    join,
)
from watchstep.capture.stop import CommonStop
from watchstep.capture.system.sampler import Alongside, Sampled
from watchstep.format.block import Block
from watchstep.format.control import StopRequest
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Mode
from watchstep.kernels.measurement import Completed, Measurement
from watchstep.platform.terminal_text import printable
from watchstep.stopping import AwaitsCheckpoint, OnStop, SavesThenStops, StopTraining


class StepGuard(Protocol):
    """Judges steps as they come; on the training thread."""

    def before_update(self, rows: Block) -> str:
        """What was measured of a step so far, whose update comes next: why the training shall stop here, or nothing."""
        ...

    def after_step(self, step: int, rows: Block) -> str:
        """All rows of a step that is over: why the training shall stop, or nothing."""
        ...

    def end(self) -> str:
        """No step comes any more; there is nothing left to stop."""
        ...

    def as_data(self) -> dict[str, Any]:
        """What it has found, and what it cost, for the hook's health."""
        ...


@dataclass(frozen=True)
class _Figures:
    """Probes that are at hand."""

    columns: dict[str, Floats]

    def collect(self) -> dict[str, Floats]:
        return self.columns


class Guarding:
    """Shows a guard what a recorder has, and keeps what it asked for."""

    def __init__(self, guard: StepGuard, health: RecorderHealth, *, agrees: bool = False) -> None:
        """Begin.

        Args:
            guard: judges.
            health: is told of faults; they never reach the training.
            agrees: whether it may only wish to stop, and all ranks decide together before each update.
        """
        self._guard = guard
        self._health = health
        self._agrees = agrees
        self._reason = ""
        self.ended = False
        self.seconds = 0.0

    def before_update(self, records: list[Record]) -> str:
        """Why the training shall stop before the update that comes next, or nothing; where ranks agree that is a `wish`.

        Args:
            records: of the step so far, as `at_hand` gives them.
        """
        self._reason = self._reason or self._asked(lambda: self._guard.before_update(join(records)))
        return self.stop()

    def after_step(self, step: int, records: list[Record]) -> None:
        """A step is over; what the guard wants is told by `stop`, or by `requested` where ranks agree."""
        reason = self._asked(lambda: self._guard.after_step(step, join(records)))
        self._reason = self._reason or reason

    def stop(self) -> str:
        """Why the training shall stop now, or nothing; nothing where ranks agree."""
        return "" if self._agrees else self._reason

    def requested(self) -> str | None:
        """Why this rank wants all to stop, or nothing; None once no step comes any more."""
        return None if self.ended else self._reason

    def end(self) -> None:
        """No step comes any more."""
        self.ended = True
        self._asked(self._guard.end)

    def as_data(self) -> dict[str, Any]:
        """For the hook's health."""
        return {**self._guard.as_data(), "seconds": round(self.seconds, 6)}

    def at_hand(self, records: list[Record]) -> list[Record]:
        """The same records, of which nothing is on its way any more; without those whose condition does not hold.

        Where that fails they are as they were.
        """
        since = time.perf_counter()
        try:
            return [
                record if _is_at_hand(record) else _waited_for(record)
                for record in records
                if record.condition is None or record.condition.holds()
            ]
        except Exception as error:  # noqa: BLE001 - what cannot be had now is the writer's to tell
            self._health.fault("guard", error)
            return records
        finally:
            self.seconds += time.perf_counter() - since

    def _asked(self, ask: Callable[[], str]) -> str:
        since = time.perf_counter()
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - a guard's own faults stop nothing
            self._health.fault("guard", error)
            return ""
        finally:
            self.seconds += time.perf_counter() - since


def request(reason: str, step: int) -> StopRequest:
    """What a stop by a guard is told as."""
    return StopRequest(attempt="", step=step, reason=reason)


def _waited_for(record: Record) -> Record:
    return replace(
        record,
        measurement=Completed(record.measurement.collect()),
        probes=tuple(_Figures(probe.collect()) for probe in record.probes),
        condition=None,
    )


def _is_at_hand(record: Record) -> bool:
    is_complete = isinstance(record.measurement, Completed) and record.condition is None
    return is_complete and all(isinstance(probe, _Figures) for probe in record.probes)


_SHARE_OF_STEP = 0.5
"""Of the queue's room, for tensors of a step that is not over: it may never be, where nothing counts steps."""


class Recorder:
    """Collects what is measured during a step, and hands it over when the next one begins.

    A step is *finished* by the optimizer and *handed over* when something of the next begins, so that a loss that is
    logged after the update still belongs to it.
    """

    def __init__(
        self,
        worker: int,
        queue: BoundedQueue,
        health: RecorderHealth,
        on_stop: OnStop,
        first_step: int = 0,
        system: Alongside | None = None,
    ) -> None:
        self.step = first_step
        self.worker = worker
        self.stopped: StopRequest | None = None
        self.acknowledged = False
        """Whether the program ends because of it: by `StopTraining`, its function, or itself where it said that it would."""
        self.guarding: Guarding | None = None
        self._checkpoint_deadline: float | None = None
        self._has_new_checkpoint = False
        self.update = 0
        """The number of the update that is being measured for; 0 while none is."""
        self.logged_nan = False
        """Whether the program has logged a training loss that is NaN before an update; whoever looks clears it."""
        self.logged_losses = 0
        """Training losses that the program has logged so far."""
        self._updates = 0
        self._queue = queue
        self._health = health
        self._on_stop = on_stop
        self.launched_unverified = False
        """Whether 'watchstep run' started the program without knowing whether the run was stopped for good."""
        self._system = system
        self.stops = CommonStop(worker, lambda: self.last_finished, takes_part=on_stop != "ignore")
        self._pending: list[Record] = []
        self._pending_bytes = 0
        self._scalars = ScalarValues(health)
        self._finished = False
        self._nonfinite = False
        self._was_nonfinite = False

    def watch_onsets(self, onsets: LossOnsets) -> None:
        """Let training losses be looked at for onsets as they are recorded."""
        self._scalars.onsets = onsets

    @property
    def last_finished(self) -> int:
        """The last step whose update is done; -1 before the first."""
        return self.step if self._finished else self.step - 1

    @property
    def finished(self) -> bool:
        """Whether the update of the current step is done, and nothing of the next has begun."""
        return self._finished

    def begin(self) -> None:
        """Something of a training step happens: if the last one is finished, this is the next.

        Raises:
            StopTraining: a guard asks for it, now that it knows all of the last step.
        """
        if self._finished:
            self.hand_over()
            if self.guarding is not None and self.stopped is None and (reason := self.guarding.stop()):
                self.stop(reason)
            self.step += 1
            self._finished = False

    def about_to_update(self) -> None:
        """The update of the current step comes next. Without a guard that is nothing.

        Raises:
            StopTraining: the guard asks for it; nothing has been updated yet.
        """
        if self.guarding is None or self.stopped is not None:
            return
        self._pending = self.guarding.at_hand(self._pending)
        logged = self.guarding.at_hand(self._scalar_records())
        if reason := self.guarding.before_update([*self._pending, *logged]):
            self.stop(reason)

    def requested(self) -> str | None:
        """Where ranks agree: why this one wants to stop, or nothing; None where no step comes any more. Raises nothing."""
        if self.guarding is None or (request := self.guarding.requested()) is None:
            return None
        return request if self.stopped is None else ""

    def stop(self, reason: str) -> NoReturn:
        """A guard asks for it, of this rank or another: whatever fails on the way, this raises `StopTraining`."""
        self.stopped, self.acknowledged = request(reason, self.step), True
        try:
            if self.guarding is not None and not self.guarding.ended:
                self.hand_over()
            sys.stderr.write(f"watchstep: the guard stops, at step {self.step}: {printable(reason)}\n")
        except Exception as error:  # noqa: BLE001 - other ranks may stop at this very place
            self._health.fault("stop", error)
        raise StopTraining(self.stopped, self.step)

    def add(
        self,
        group: Group,
        measurement: Measurement,
        mode: Mode = "train",
        probes: tuple[Probe, ...] = (),
        condition: Condition | None = None,
        time_ns: int | None = None,
    ) -> None:
        """Record statistics at the current step.

        Args:
            group: the tensors.
            measurement: their statistics.
            mode: of the rows.
            probes: figures besides.
            condition: the rows are recorded if it holds, which is known later; always where it is left out.
            time_ns: when the tensors were computed, nanoseconds since the epoch; now where it is left out.
        """
        if not group.tensors:
            return
        record = self._record(mode, group, measurement, probes, condition, time_ns)
        self._nonfinite |= bool(measurement.nonfinite)
        if self._pending_bytes + record.bytes > _SHARE_OF_STEP * self._queue.room:
            self._health.count("dropped_rows", len(group.tensors))
            return
        self._append(record)

    def begin_update(self) -> None:
        """What is recorded until `update` is set to 0 is measured for an update of its own."""
        self._updates += 1
        self.update = self._updates

    def withdraw(self, update: int) -> None:
        """Leave out what was measured for an update that was not made."""
        left = [record for record in self._pending if record.update != update]
        self._pending_bytes -= sum(record.bytes for record in self._pending if record.update == update)
        self._pending = left

    def _append(self, record: Record) -> None:
        self._pending.append(record)
        self._pending_bytes += record.bytes

    def scalar(
        self, name: str, value: float, mode: Mode = "train", *, derived: bool = False, replaces: bool = False
    ) -> None:
        """Record a number. Several losses of one name, step and mode are one row; of a metric the last is recorded.

        Args:
            name: of the row.
            value: the number.
            mode: of the row.
            derived: it was not logged by the program; what the program logs under this name takes its place.
            replaces: it takes the place of what was recorded under this name, also of a loss.
        """
        number = float(value)
        if mode == "train" and not derived and "loss" in name.lower():
            self.logged_losses += 1
            if math.isnan(number) and not self._finished:
                self.logged_nan = True
        self._scalars.add(mode, name, number, derived=derived, replaces=replaces)

    def note_function(self, name: str, mode: Mode, function: str) -> None:
        """Name the function that computes a loss; the one named first for a name and mode is recorded.

        Args:
            name: of the loss.
            mode: of the loss.
            function: as `TensorInfo.module_type` has it; empty where it is not known.
        """
        self._scalars.note_function(mode, name, function)

    def undivide(self, name: str, divisor: float) -> None:
        """The losses of this name that were found in this step so far are each a part of their divisor: record them whole."""
        self._scalars.undivide("train", name, divisor)

    def device_scalar(
        self,
        name: str,
        value: DeviceScalar,
        mode: Mode = "train",
        *,
        derived: bool = False,
        replaces: bool = False,
    ) -> None:
        """Record a number in a device's memory, as `scalar` does one at hand."""
        if mode == "train" and not derived and "loss" in name.lower():
            self.logged_losses += 1
        self._scalars.add_on_device(mode, name, value, derived=derived, replaces=replaces)

    def awaited_scalar(
        self,
        name: str,
        measurement: Measurement,
        mode: Mode = "train",
        *,
        derived: bool = False,
        condition: Condition | None = None,
    ) -> None:
        """Record a number that is being measured; it takes the place of earlier ones."""
        self._scalars.add_measured(mode, name, measurement, condition, derived=derived)

    def finish(self) -> None:
        """The update of the current step is done.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        self._finished = True
        self._scalars.update_done()
        if self._system is not None:
            self._system.times.finished()
        if self.stopped is None and (request := self.stops.due(self.step)) is not None:
            self.stopped = request
            self._obey(request)
        elif self._checkpoint_deadline is not None:
            self._stop_once_saved(self._checkpoint_deadline)

    def checkpoint_saved(self) -> None:
        """The program has saved a checkpoint. Any thread; it counts for a stop that the program has come to."""
        self._has_new_checkpoint = self.stopped is not None

    def ask_to_stop(self, request: StopRequest, *, refused: bool = False) -> None:
        """Let the first step at or after the request's be the last. Not on the training thread.

        Args:
            request: what is asked.
            refused: the attempt should not have started. Where its launch could not see that, it ends as it would not have begun,
                also if stops are ignored.
        """
        if refused and self.launched_unverified and self._on_stop == "ignore":
            self._on_stop = "raise"
        self.stops.receive(request)

    def hand_over(self) -> None:
        """Give what was recorded of the current step to the writer; drop and count it where the queue is full."""
        self._flush_scalars()
        if self._system is not None and (sampled := self._system.rows.take()) is not None:
            self._append(_record_of(sampled, self.step, self.worker))
        if not self._pending:
            return
        if self.guarding is not None:
            self._pending = self.guarding.at_hand(self._pending)
            self.guarding.after_step(self.step, self._pending)
        item = FinishedStep(self.step, tuple(self._pending))
        self._pending, self._pending_bytes = [], 0
        urgent = self._nonfinite and not self._was_nonfinite
        self._was_nonfinite, self._nonfinite = self._nonfinite, False
        if not self._queue.offer(item, urgent=urgent):
            self._health.count("dropped_rows", item.rows)
            self._health.count("dropped_steps")

    def hand_over_unfinished(self) -> None:
        """Give what was recorded so far of a step that may never end.

        Raises:
            StopTraining: a guard asks for it.
        """
        self.hand_over()
        if self.guarding is not None and self.stopped is None and (reason := self.guarding.stop()):
            self.stop(reason)

    def _flush_scalars(self) -> None:
        for record in self._scalar_records():
            self._nonfinite |= bool(record.measurement.nonfinite)
            self._append(
                record
            )  # however full the step is: numbers are few, and a loss is what a run is read for
        self._scalars.clear()

    def _scalar_records(self) -> list[Record]:
        """The numbers of the current step so far."""
        return [
            self._record(mode, group, measurement, condition=condition)
            for mode, group, measurement, condition in self._scalars.rows()
        ]

    def _record(
        self,
        mode: Mode,
        group: Group,
        measurement: Measurement,
        probes: tuple[Probe, ...] = (),
        condition: Condition | None = None,
        time_ns: int | None = None,
    ) -> Record:
        at = time.time_ns() if time_ns is None else time_ns
        return Record(self.step, mode, self.worker, at, group, measurement, probes, condition, self.update)

    def _obey(self, request: StopRequest) -> None:
        if self._on_stop == "ignore":
            return
        self.acknowledged = True
        self.hand_over()
        sys.stderr.write(f"watchstep: asked to stop, after step {self.step}: {printable(request.reason)}\n")
        if self._on_stop == "check":
            return
        if self._on_stop == "raise":
            raise StopTraining(request, self.step)
        call: Callable[[StopRequest], None] = self._on_stop
        if isinstance(call, AwaitsCheckpoint):
            self._checkpoint_deadline = time.monotonic() + call.seconds
            self.acknowledged = False  # a program that trains to its end meanwhile is not stopped
            return
        if not isinstance(call, SavesThenStops):
            call(request)
            return
        try:
            call(request)
            if not self._has_new_checkpoint:
                self._health.note("on_stop", "the function named no checkpoint by Hook.checkpoint_saved")
        except Exception as error:  # noqa: BLE001 - what could not be saved must not keep a rank from stopping with the others
            self._health.fault("on_stop", error)
            self._log_unsaved(request, f"{type(error).__name__}: {error}")
        raise StopTraining(request, self.step)

    def _stop_once_saved(self, deadline: float) -> None:
        """End the training where a checkpoint was saved since it came to its stop, or where that has taken too long."""
        request = self.stopped
        assert request is not None
        if not self._has_new_checkpoint:
            if time.monotonic() < deadline:
                return
            self._log_unsaved(request, "none in time")
        self.acknowledged = True
        self.hand_over()
        raise StopTraining(request, self.step)

    def _log_unsaved(self, request: StopRequest, why: str) -> None:
        """Say, here and in how the run ended, that it stops without a new checkpoint."""
        unsaved = f"no checkpoint was saved after the stop was requested ({why})"
        self.stopped = replace(request, reason=f"{request.reason}; {unsaved}")
        self._health.note("on_stop", unsaved)
        sys.stderr.write(f"watchstep: {printable(unsaved)}\n")


def _record_of(sampled: Sampled, step: int, worker: int) -> Record:
    return Record(
        step, "global", worker, sampled.time_ns, Group.of(sampled.tensors), Completed(sampled.statistics)
    )
