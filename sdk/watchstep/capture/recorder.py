"""Steps: what belongs to which, when one is over, and whether to stop. Framework-neutral, on the training thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from watchstep.capture.bounded_queue import BoundedQueue, FinishedStep
from watchstep.capture.common_stop import CommonStop
from watchstep.capture.guarding import Guarding, request
from watchstep.capture.health import Health
from watchstep.capture.record import Condition, Group, Probe, Record
from watchstep.capture.system.alongside import Alongside, Sampled
from watchstep.control import StopRequest
from watchstep.kernels.interface import Measurement
from watchstep.kernels.ready import Ready
from watchstep.statistics import scalars
from watchstep.stopping import OnStop, SavesThenStops, StopTraining
from watchstep.tensors import LOSSES, METRICS, Mode, TensorInfo

_SHARE_OF_STEP = 0.75
"""Of the queue's room, for tensors of a step that is not over: it may never be, where nothing counts steps."""


@dataclass(frozen=True)
class _Awaited:
    """A number that is not known yet."""

    measurement: Measurement
    condition: Condition | None


class Recorder:
    """Collects what is measured during a step, and hands it over when the next one begins.

    A step is *finished* by the optimizer and *handed over* when something of the next begins, so that a loss that is
    logged after the update still belongs to it.
    """

    def __init__(
        self,
        worker: int,
        queue: BoundedQueue,
        health: Health,
        on_stop: OnStop,
        first_step: int = 0,
        system: Alongside | None = None,
    ) -> None:
        self.step = first_step
        self.worker = worker
        self.stopped: StopRequest | None = None
        self.heeded = False
        """Whether the program does something about it: it is stopped by `StopTraining` or its function, or has looked at it."""
        self.guarding: Guarding | None = None
        self._queue = queue
        self._health = health
        self._on_stop = on_stop
        self._system = system
        self.stops = CommonStop(worker, lambda: self.last_finished, takes_part=on_stop != "ignore")
        self._pending: list[Record] = []
        self._pending_bytes = 0
        self._scalars: dict[tuple[Mode, str], tuple[TensorInfo, float | _Awaited]] = {}
        self._finished = False
        self._nonfinite = False
        self._was_nonfinite = False
        self._group_of_scalars: dict[tuple[TensorInfo, ...], Group] = {}

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

    def wish(self) -> str | None:
        """Where ranks agree: why this one wants to stop, or nothing; None where no step comes any more. Raises nothing."""
        if self.guarding is None or (wish := self.guarding.wish()) is None:
            return None
        return wish if self.stopped is None else ""

    def stop(self, reason: str) -> NoReturn:
        """A guard asks for it, of this rank or another: whatever fails on the way, this raises `StopTraining`."""
        self.stopped, self.heeded = request(reason, self.step), True
        try:
            if self.guarding is not None and not self.guarding.ended:
                self.hand_over()
            sys.stderr.write(f"watchstep: the guard stops, at step {self.step}: {reason}\n")
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
    ) -> None:
        """Record statistics at the current step, if a condition holds that is known later."""
        if not group.tensors:
            return
        record = self._record(mode, group, measurement, probes, condition)
        self._nonfinite |= bool(measurement.nonfinite)
        if self._pending_bytes + record.bytes > _SHARE_OF_STEP * self._queue.room:
            self._health.count("dropped_rows", len(group.tensors))
            return
        self._append(record)

    def _append(self, record: Record) -> None:
        self._pending.append(record)
        self._pending_bytes += record.bytes

    def scalar(self, name: str, value: float, mode: Mode = "train", *, derived: bool = False) -> None:
        """Record a number; a later one of the same name and step replaces it, unless that is only derived."""
        held = self._scalars.get((mode, name))
        if derived and held is not None and not held[0].derived:
            return
        self._scalars[mode, name] = (scalar_info(name, derived=derived), float(value))

    def awaited_scalar(
        self,
        name: str,
        measurement: Measurement,
        mode: Mode = "train",
        *,
        derived: bool = False,
        condition: Condition | None = None,
    ) -> None:
        """Record a number that is still on its way from a device, as `scalar` does one at hand."""
        held = self._scalars.get((mode, name))
        if derived and held is not None and not held[0].derived:
            return
        self._scalars[mode, name] = (scalar_info(name, derived=derived), _Awaited(measurement, condition))

    def finish(self) -> None:
        """The update of the current step is done.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        self._finished = True
        if self._system is not None:
            self._system.times.finished()
        if self.stopped is None and (request := self.stops.due(self.step)) is not None:
            self.stopped = request
            self._obey(request)

    def ask_to_stop(self, request: StopRequest) -> None:
        """Let the first step at or after the request's be the last. Not on the training thread."""
        self.stops.hear(request)

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

    def _flush_scalars(self) -> None:
        for record in self._scalar_records():
            self._nonfinite |= bool(record.measurement.nonfinite)
            self._append(
                record
            )  # however full the step is: numbers are few, and a loss is what a run is read for
        self._scalars = {}

    def _scalar_records(self) -> list[Record]:
        """The numbers of the current step: those on their way each by itself, the others by mode."""
        by_mode: dict[Mode, list[tuple[TensorInfo, float]]] = {}
        found = []
        for (mode, _), (info, value) in self._scalars.items():
            if isinstance(value, _Awaited):
                group = Group.of((info,))
                found.append(self._record(mode, group, value.measurement, condition=value.condition))
            else:
                by_mode.setdefault(mode, []).append((info, value))
        for mode, entries in by_mode.items():
            infos = tuple(info for info, _ in entries)
            group = self._group_of_scalars.setdefault(infos, Group.of(infos))
            found.append(self._record(mode, group, Ready(scalars([value for _, value in entries]))))
        return found

    def _record(
        self,
        mode: Mode,
        group: Group,
        measurement: Measurement,
        probes: tuple[Probe, ...] = (),
        condition: Condition | None = None,
    ) -> Record:
        return Record(self.step, mode, self.worker, time.time_ns(), group, measurement, probes, condition)

    def _obey(self, request: StopRequest) -> None:
        if self._on_stop == "ignore":
            return
        self.heeded = True
        self.hand_over()
        sys.stderr.write(f"watchstep: asked to stop, after step {self.step}: {request.reason}\n")
        if self._on_stop == "raise":
            raise StopTraining(request, self.step)
        call: Callable[[StopRequest], None] = self._on_stop
        if not isinstance(call, SavesThenStops):
            call(request)
            return
        try:
            call(request)
        except Exception as error:  # noqa: BLE001 - what could not be saved must not keep a rank from stopping with the others
            self._health.fault("on_stop", error)
        raise StopTraining(request, self.step)


def _record_of(sampled: Sampled, step: int, worker: int) -> Record:
    return Record(
        step, "global", worker, sampled.time_ns, Group.of(sampled.tensors), Ready(sampled.statistics)
    )


def scalar_info(name: str, *, derived: bool = False) -> TensorInfo:
    """A loss, if its name says so, or else a metric."""
    loss = "loss" in name.lower()
    return TensorInfo(
        name, (LOSSES if loss else METRICS,), "loss" if loss else "metric", dtype="float64", derived=derived
    )
