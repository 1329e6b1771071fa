"""The recorder: groups measurements into steps and detects stops. Independent of frameworks, on the training thread.

A guard in the training process receives the rows of each step at once and may stop the training. The
training thread then waits for the measurements, which synchronizes a device at each measured step.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from watchstep.capture.health import RecorderHealth
from watchstep.capture.samples.capture import SampleCapture
from watchstep.capture.steps.metric_names import STOPPED
from watchstep.capture.steps.recent import RecentSteps
from watchstep.capture.steps.record import (
    BoundedQueue,
    Condition,
    DeviceScalar,
    FinishedStep,
    Group,
    LossOnsets,
    Probe,
    Record,
    ScalarsOfStep,
    ScalarValues,
    join,
    report_info,
    scalar_info,
)
from watchstep.capture.stop import BarrierStop
from watchstep.capture.system.sampler import Alongside, Sampled
from watchstep.capture.tensors.collections import TensorCapture
from watchstep.format.block import Block
from watchstep.format.control import StopRequest
from watchstep.format.statistics import Floats, scalars
from watchstep.format.tensors import Mode
from watchstep.kernels.measurement import Completed, Measurement
from watchstep.platform.program_errors import call_program
from watchstep.platform.terminal_text import printable
from watchstep.stopping import AwaitsCheckpoint, OnStop, SavesThenStops, StopTraining

_MAX_URGENT_SERIES = 8
"""Series of non-finite steps that are written at once, each as an object of its own."""

_MAX_REASON = 1500
"""Characters of the reason of a stop in the name of its row."""

_URGENT_INTERVAL = 60.0
"""Seconds in which at most one later series is written at once: a training may survive any number of them."""


class StepGuard(Protocol):
    """Evaluates steps as they arrive, on the training thread."""

    def before_update(self, rows: Block) -> str:
        """Evaluate the rows of a step before its update. Returns a reason to stop, or an empty string."""
        ...

    def after_step(self, step: int, rows: Block) -> str:
        """Evaluate all rows of a finished step. Returns a reason to stop, or an empty string."""
        ...

    def end(self) -> str:
        """No further step follows. Returns an empty string."""
        ...

    def as_data(self) -> dict[str, Any]:
        """Its findings and its cost, for the hook's health."""
        ...


class StepTracing(Protocol):
    """Traces the operations of chosen steps, on the training thread."""

    def finished(self, step: int) -> None:
        """A step is finished, and the next one begins. Never raises."""
        ...


@dataclass(frozen=True)
class _Figures:
    """Probes with known values."""

    columns: dict[str, Floats]

    def collect(self) -> dict[str, Floats]:
        return self.columns


class Guarding:
    """Passes a recorder's records to a guard, and keeps its stop request."""

    def __init__(self, guard: StepGuard, health: RecorderHealth, *, agrees: bool = False) -> None:
        """Start guarding.

        Args:
            guard: the guard.
            health: counts its faults, which never reach the training.
            agrees: the guard may only request a stop, and all ranks decide together before each update.
        """
        self._guard = guard
        self._health = health
        self._agrees = agrees
        self._reason = ""
        self.ended = False
        self.seconds = 0.0

    def before_update(self, records: list[Record]) -> str:
        """Return the reason to stop before the next update, or an empty string. If ranks agree, the reason is only in `requested`.

        Args:
            records: records of the step so far, as `completed` returns them.
        """
        self._reason = self._reason or self._call(lambda: self._guard.before_update(join(records)))
        return self.stop()

    def after_step(self, step: int, records: list[Record]) -> None:
        """Evaluate a finished step. The result is in `stop`, or in `requested` if ranks agree."""
        reason = self._call(lambda: self._guard.after_step(step, join(records)))
        self._reason = self._reason or reason

    def stop(self) -> str:
        """Return the reason to stop now, or an empty string; always empty if ranks agree."""
        return "" if self._agrees else self._reason

    def requested(self) -> str | None:
        """Return this rank's reason to stop all ranks, or an empty string; None once no further step follows."""
        return None if self.ended else self._reason

    def end(self) -> None:
        """Mark that no further step follows."""
        self.ended = True
        self._call(self._guard.end)

    def as_data(self) -> dict[str, Any]:
        """The guard's data for the hook's health."""
        return {**self._guard.as_data(), "seconds": round(self.seconds, 6)}

    def completed(self, records: list[Record]) -> list[Record]:
        """Wait for records on their way from a device. Records with an unmet condition are removed.

        After an error the records are returned unchanged.
        """
        since = time.perf_counter()
        try:
            return [
                record if _is_completed(record) else _wait_for(record)
                for record in records
                if record.condition is None or record.condition.is_met()
            ]
        except Exception as error:  # noqa: BLE001 - the writer reports what fails here
            self._health.fault("guard", error)
            return records
        finally:
            self.seconds += time.perf_counter() - since

    def _call(self, function: Callable[[], str]) -> str:
        since = time.perf_counter()
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - faults of a guard never stop the training
            self._health.fault("guard", error)
            return ""
        finally:
            self.seconds += time.perf_counter() - since


def request(reason: str, step: int) -> StopRequest:
    """Return the stop request of a guard."""
    return StopRequest(attempt="", step=step, reason=reason)


def _wait_for(record: Record) -> Record:
    return replace(
        record,
        measurement=Completed(record.measurement.collect()),
        probes=tuple(_Figures(probe.collect()) for probe in record.probes),
        condition=None,
    )


def _is_completed(record: Record) -> bool:
    is_complete = isinstance(record.measurement, Completed) and record.condition is None
    return is_complete and all(isinstance(probe, _Figures) for probe in record.probes)


_SHARE_OF_STEP = 0.5
"""Share of the queue's room for tensors of an unfinished step, which may never end if nothing counts steps."""


class Recorder:
    """Collects measurements during a step, and hands them over when the next one begins.

    A step is *finished* by the optimizer and *handed over* when the next step begins, so that a loss that is
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
        """Whether the program ends because of the stop: by `StopTraining`, by its function, or by itself with ``on_stop="check"``."""
        self.guarding: Guarding | None = None
        self._checkpoint_deadline: float | None = None
        self._has_new_checkpoint = False
        self.update = 0
        """Number of the update that is being measured; 0 outside of updates."""
        self.logged_nan = False
        """Whether the program has logged a NaN training loss before an update; cleared by the reader."""
        self.logged_losses = 0
        """Number of training losses that the program has logged."""
        self.full_tensors: TensorCapture | None = None
        """Saves full tensors of collections."""
        self.samples: SampleCapture | None = None
        """Records which samples a step was trained on."""
        self.search_mirrors: Callable[[], bool] | None = None
        """Searches for active runs to mirror into, until it returns True. Called after each step; never raises."""
        self.tracing: StepTracing | None = None
        """Traces the operations of chosen steps."""
        self.recent: RecentSteps | None = None
        """Steps whose rows are written only if a failure or a stop asks for them."""
        self.is_recalling = False
        """Whether the rows of recent steps are written with those of the current step. Set on any thread."""
        self.last_recorded: int | None = None
        """The step after which nothing is recorded, because it is computed again; None without one."""
        self.thread = 0
        """Id of the thread that ended the last step; 0 before the first one."""
        self._updates = 0
        self._queue = queue
        self._health = health
        self._on_stop = on_stop
        self.launched_unverified = False
        """Whether 'watchstep run' started the program without knowing whether the run was stopped for good."""
        self.updates = 0
        """Number of updates of all optimizers that adapters of frameworks have recorded."""
        self._system = system
        self.stops = BarrierStop(worker, lambda: self.last_finished, takes_part=on_stop != "ignore")
        self._pending: list[Record] = []
        self._pending_bytes = 0
        self._kept: list[Record] = []
        self._scalars = ScalarValues(health)
        self._finished = False
        self._nonfinite = False
        self._was_nonfinite = False
        self._urgent_series, self._urgent_at = 0, 0.0

    def watch_onsets(self, onsets: LossOnsets) -> None:
        """Check training losses for onsets as they are recorded."""
        self._scalars.onsets = onsets

    @property
    def last_finished(self) -> int:
        """The last step with a completed update; -1 before the first."""
        return self.step if self._finished else self.step - 1

    @property
    def finished(self) -> bool:
        """Whether the update of the current step is done, and the next has not begun."""
        return self._finished

    def begin(self) -> None:
        """Mark activity of a training step: if the last one is finished, the next one begins.

        Raises:
            StopTraining: a guard requests it, after evaluating the last step.
        """
        if self._finished:
            self.hand_over()
            if self.guarding is not None and self.stopped is None and (reason := self.guarding.stop()):
                self.stop(reason)
            self.step += 1
            self._finished = False

    def about_to_update(self) -> None:
        """Evaluate the guard before the update of the current step. Does nothing without a guard.

        Raises:
            StopTraining: the guard requests it; nothing has been updated yet.
        """
        if self.guarding is None or self.stopped is not None:
            return
        self._pending = self.guarding.completed(self._pending)
        logged = self.guarding.completed(self._scalar_records())
        if reason := self.guarding.before_update([*self._pending, *logged]):
            self.stop(reason)

    def requested(self) -> str | None:
        """Return this rank's reason to stop for the agreement of ranks, or an empty string; None once no step follows. Never raises."""
        if self.guarding is None or (request := self.guarding.requested()) is None:
            return None
        return request if self.stopped is None else ""

    def stop(self, reason: str, source: str = "guard", step: int | None = None) -> NoReturn:
        """Stop by a guard or the gate policy, of this rank or another. Always raises `StopTraining`, whatever fails on the way.

        Args:
            reason: one sentence for users.
            source: what stops, for the message.
            step: the step that is the reason; by default the current one.
        """
        step = self.step if step is None else step
        self.stopped, self.acknowledged = request(reason, step), True
        self.is_recalling = True
        try:
            if self.guarding is None or not self.guarding.ended:
                self.hand_over()
            self._report_stop(f"the {source} stopped the training at step {step}: {reason}", step)
            sys.stderr.write(f"watchstep: stopped by the {source} at step {step}: {printable(reason)}\n")
        except Exception as error:  # noqa: BLE001 - other ranks may stop at the same point
            self._health.contain("stop", error)
        raise StopTraining(self.stopped, step)

    def end_early(self, reason: str) -> None:
        """Record a stop of a program that ends by itself before the training could be stopped, in whose last steps no update was made.

        Args:
            reason: one sentence for users.
        """
        step = self.step if self.last_recorded is None else self.last_recorded
        self.stopped, self.acknowledged = (
            request(f"the gradients of step {step} are not finite; {reason}", step),
            True,
        )
        self._report_stop(f"the gate policy stopped the training: {self.stopped.reason}", step)
        sys.stderr.write(f"watchstep: {printable(self.stopped.reason)}\n")

    def _report_stop(self, sentence: str, step: int) -> None:
        """Record a stop as a row of a step that was handed over, so that rules see it."""
        info = report_info(STOPPED, sentence[:_MAX_REASON])
        record = Record(
            step, "train", self.worker, time.time_ns(), Group.of((info,)), Completed(scalars([1.0]))
        )
        self._queue.offer(FinishedStep(step, (record,)), urgent=True)

    def add(
        self,
        group: Group,
        measurement: Measurement,
        mode: Mode = "train",
        probes: tuple[Probe, ...] = (),
        condition: Condition | None = None,
        time_ns: int | tuple[int, ...] | None = None,
    ) -> None:
        """Record statistics at the current step.

        Args:
            group: the tensors.
            measurement: their statistics.
            mode: mode of the rows.
            probes: additional figures.
            condition: the rows are recorded only if it is met; by default always.
            time_ns: when the tensors were computed, in nanoseconds since the epoch: one time, or that of each tensor; by default now.
        """
        if not group.tensors:
            return
        record = self._record(mode, group, measurement, probes, condition, time_ns)
        self._nonfinite |= bool(measurement.nonfinite)
        if self._pending_bytes + record.bytes > _SHARE_OF_STEP * self._queue.room:
            self._health.count("dropped_rows", len(group.tensors))
            return
        self._append(record)

    def keep(self, group: Group, measurement: Measurement, condition: Condition | None = None) -> None:
        """Keep statistics of the current step in mode train in `recent`."""
        self._kept.append(self._record("train", group, measurement, condition=condition))

    def begin_update(self) -> None:
        """Start an update: what is recorded until `update` is set to 0 belongs to it."""
        self._updates += 1
        self.update = self._updates

    def withdraw(self, update: int) -> None:
        """Remove measurements of an update that was not made."""
        remaining = [record for record in self._pending if record.update != update]
        self._pending_bytes -= sum(record.bytes for record in self._pending if record.update == update)
        self._pending = remaining
        self._kept = [record for record in self._kept if record.update != update]

    def _append(self, record: Record) -> None:
        self._pending.append(record)
        self._pending_bytes += record.bytes

    def scalar(
        self,
        name: str,
        value: float,
        mode: Mode = "train",
        *,
        derived: bool = False,
        replaces: bool = False,
        weight: int = 1,
    ) -> None:
        """Record a number. Several losses of one name, step and mode become one row; for a metric the last value is recorded.

        Args:
            name: name of the row.
            value: the number.
            mode: mode of the row.
            derived: the program did not log it itself; a value that the program logs under this name replaces it.
            replaces: it replaces earlier values of this name, also for a loss.
            weight: number of examples that a loss is the mean of, as a weight in the mean of the row.
        """
        number = float(value)
        if mode == "train" and not derived and "loss" in name.lower():
            self.logged_losses += 1
            if math.isnan(number) and not self._finished:
                self.logged_nan = True
        self.save_number(name, number, mode, derived=derived, replaces=replaces)
        self._scalars.add(mode, name, number, derived=derived, replaces=replaces, weight=weight)

    def save_number(self, name: str, number: float, mode: Mode, *, derived: bool, replaces: bool) -> None:
        """Save a number in full, if its collection is due. The arguments are those of `scalar`."""
        if self.full_tensors is not None and self.full_tensors.active:
            info = scalar_info(name)
            replaces = replaces or info.role == "metric"
            self.full_tensors.add_number(info, number, self.step, mode, derived=derived, replaces=replaces)

    def note_function(self, name: str, mode: Mode, function: str) -> None:
        """Set the name of the function that computes a loss; the first one for a name and mode is recorded.

        Args:
            name: name of the loss.
            mode: mode of the loss.
            function: as in `TensorInfo.module_type`; empty if unknown.
        """
        self._scalars.note_function(mode, name, function)

    def undivide(self, name: str, divisor: float) -> None:
        """Undo the program's division of losses: multiply the losses of this name detected in this step by their divisor."""
        self._scalars.undivide("train", name, divisor)

    def device_scalar(
        self,
        name: str,
        value: DeviceScalar,
        mode: Mode = "train",
        *,
        derived: bool = False,
        replaces: bool = False,
        weight: int = 1,
    ) -> None:
        """Record a number in device memory, like `scalar`."""
        if mode == "train" and not derived and "loss" in name.lower():
            self.logged_losses += 1
        self._scalars.add_on_device(mode, name, value, derived=derived, replaces=replaces, weight=weight)

    def awaited_scalar(
        self,
        name: str,
        measurement: Measurement,
        mode: Mode = "train",
        *,
        derived: bool = False,
        condition: Condition | None = None,
    ) -> None:
        """Record a number that is being measured. It replaces earlier values."""
        self._scalars.add_measured(mode, name, measurement, condition, derived=derived)

    def take_derived(self) -> ScalarsOfStep:
        """Remove and return the losses that were found in the current step: they are of the next training, whose recording adopts them."""
        return self._scalars.take_derived()

    def adopt_derived(self, losses: ScalarsOfStep) -> None:
        """Add losses that an earlier recording returned by `take_derived`."""
        self._scalars.adopt(losses)

    def finish(self) -> None:
        """Mark the update of the current step as done.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        if self.samples is not None:
            self.samples.finished(self.step)
        self._finished = True
        self.thread = threading.get_ident()
        if self.tracing is not None:
            self.tracing.finished(self.step)
        self._scalars.update_done()
        if self._system is not None:
            self._system.times.finished()
        if self.stopped is None and (request := self.stops.due(self.step)) is not None:
            self.stopped = request
            self._apply_control(request)
        elif self._checkpoint_deadline is not None:
            self._stop_once_saved(self._checkpoint_deadline)

    def checkpoint_saved(self) -> None:
        """Report a saved checkpoint, from any thread. It counts for a stop that has taken effect."""
        self._has_new_checkpoint = self.stopped is not None

    def request_stop(self, request: StopRequest, *, refused: bool = False) -> None:
        """Request that the first step at or after the request's is the last. Not called on the training thread.

        Args:
            request: the stop request.
            refused: the attempt should not have started. If its launch could not verify that, the training ends
                even if stops are ignored.
        """
        if refused and self.launched_unverified and self._on_stop == "ignore":
            self._on_stop = "raise"
        self.stops.receive(request)

    def hand_over(self) -> None:
        """Pass the records of the current step to the writer; drop and count them if the queue is full."""
        if self.search_mirrors is not None and self.search_mirrors():
            self.search_mirrors = None
        has_tensors = self.full_tensors is not None and self.full_tensors.hand_over()
        self._flush_scalars()
        if self.last_recorded is not None and self.step > self.last_recorded:
            self._pending, self._pending_bytes, self._kept = [], 0, []
            self._write_recent(is_due=self.is_recalling)
            return
        if self._system is not None and (sampled := self._system.rows.take()) is not None:
            self._append(_record_of(sampled, self.step, self.worker))
        kept, self._kept = self._kept, []
        if self.recent is not None and (kept := _only_rows(kept, self._pending)):
            self.recent.add(FinishedStep(self.step, tuple(kept)))
        if not self._pending and not has_tensors:  # rows about saved objects are added to steps
            self._write_recent(is_due=self.is_recalling)
            return
        if self.guarding is not None and self._pending:
            self._pending = self.guarding.completed(self._pending)
            self.guarding.after_step(self.step, self._pending)
        item = FinishedStep(self.step, tuple(self._pending))
        self._pending, self._pending_bytes = [], 0
        begins = self._nonfinite and not self._was_nonfinite
        self._was_nonfinite, self._nonfinite = self._nonfinite, False
        is_urgent = begins and self._is_urgent()
        self._write_recent(is_due=is_urgent or self.is_recalling)
        if not self._queue.offer(item, urgent=is_urgent):
            self._health.count("dropped_rows", item.rows)
            self._health.count("dropped_steps")

    def _write_recent(self, *, is_due: bool) -> None:
        if is_due and self.recent is not None:
            self.is_recalling = False
            self.recent.write(self.step)

    def _is_urgent(self) -> bool:
        """Return whether a series of non-finite steps is written at once: the first ones, and later one in `_URGENT_INTERVAL`."""
        now = time.monotonic()
        if self._urgent_series >= _MAX_URGENT_SERIES and now < self._urgent_at + _URGENT_INTERVAL:
            return False
        self._urgent_series += 1
        self._urgent_at = now
        return True

    def hand_over_unfinished(self) -> None:
        """Pass the records so far of a step that may never end.

        Raises:
            StopTraining: a guard requests it.
        """
        self.hand_over()
        if self.guarding is not None and self.stopped is None and (reason := self.guarding.stop()):
            self.stop(reason)

    def _flush_scalars(self) -> None:
        for record in self._scalar_records():
            self._nonfinite |= bool(record.measurement.nonfinite)
            self._append(record)  # regardless of the step's size: numbers are few, and losses are essential
        self._scalars.clear()

    def _scalar_records(self) -> list[Record]:
        """Return the numbers of the current step so far."""
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
        time_ns: int | tuple[int, ...] | None = None,
    ) -> Record:
        timestamp = time.time_ns() if time_ns is None else time_ns
        return Record(
            self.step, mode, self.worker, timestamp, group, measurement, probes, condition, self.update
        )

    def _apply_control(self, request: StopRequest) -> None:
        if self._on_stop == "ignore":
            return
        self.acknowledged = self.is_recalling = True
        self.hand_over()
        sys.stderr.write(f"watchstep: stop requested, after step {self.step}: {printable(request.reason)}\n")
        if self._on_stop == "check":
            return
        if self._on_stop == "raise":
            raise StopTraining(request, self.step)
        call: Callable[[StopRequest], None] = self._on_stop
        if isinstance(call, AwaitsCheckpoint):
            self._checkpoint_deadline = time.monotonic() + call.seconds
            self.acknowledged = False  # a program that completes meanwhile was not stopped
            return
        if not isinstance(call, SavesThenStops):
            call_program(call, request)
            return
        try:
            call(request)
            if not self._has_new_checkpoint:
                self._health.note(
                    "on_stop", "the function did not report a checkpoint with Hook.checkpoint_saved"
                )
        except Exception as error:  # noqa: BLE001 - a failed save must not keep a rank from stopping with the others
            self._health.contain("on_stop", error)
            self._log_unsaved(request, f"{type(error).__name__}: {error}")
        raise StopTraining(request, self.step)

    def _stop_once_saved(self, deadline: float) -> None:
        """End the training if a checkpoint was saved since the stop took effect, or after the time limit."""
        request = self.stopped
        assert request is not None
        if not self._has_new_checkpoint:
            if time.monotonic() < deadline:
                return
            self._log_unsaved(request, "time limit exceeded")
        self.acknowledged = True
        self.hand_over()
        raise StopTraining(request, self.step)

    def _log_unsaved(self, request: StopRequest, cause: str) -> None:
        """Report, here and in the run's end, that it stops without a new checkpoint."""
        unsaved = f"no checkpoint was saved after the stop was requested ({cause})"
        self.stopped = replace(request, reason=f"{request.reason}; {unsaved}")
        self._health.note("on_stop", unsaved)
        sys.stderr.write(f"watchstep: {printable(unsaved)}\n")


def _only_rows(kept: list[Record], pending: list[Record]) -> list[Record]:
    """Return kept records without those of tensors that have another row of the step: one of a later update that was measured completely."""
    if not kept or not any(record.update for record in pending):
        return kept
    measured = {id(info) for record in pending if record.update for info in record.group.tensors}
    return [record for record in kept if measured.isdisjoint(map(id, record.group.tensors))]


def _record_of(sample: Sampled, step: int, worker: int) -> Record:
    return Record(
        step, "global", worker, sample.time_ns, Group.of(sample.tensors), Completed(sample.statistics)
    )
