"""Steps: what belongs to which, when one is over, and whether to stop. Framework-neutral, on the training thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from watchstep.capture.bounded_queue import BoundedQueue, FinishedStep
from watchstep.capture.health import Health
from watchstep.capture.record import Condition, Group, Probe, Record
from watchstep.control import StopRequest
from watchstep.kernels.interface import Measurement
from watchstep.kernels.ready import Ready
from watchstep.statistics import scalars
from watchstep.stopping import OnStop, StopTraining
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
        self, worker: int, queue: BoundedQueue, health: Health, on_stop: OnStop, first_step: int = 0
    ) -> None:
        self.step = first_step
        self.worker = worker
        self.stopped: StopRequest | None = None
        self._queue = queue
        self._health = health
        self._on_stop = on_stop
        self._stop_request: StopRequest | None = None
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
        """Something of a training step happens: if the last one is finished, this is the next."""
        if self._finished:
            self.hand_over()
            self.step += 1
            self._finished = False

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
        record = Record(self.step, mode, self.worker, time.time_ns(), group, measurement, probes, condition)
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
        request = self._stop_request
        if request is not None and self.step >= request.step and self.stopped is None:
            self.stopped = request
            self._obey(request)

    def ask_to_stop(self, request: StopRequest) -> None:
        """Let the first step at or after the request's be the last. Called from the writer's thread."""
        self._stop_request = request

    def hand_over(self) -> None:
        """Give what was recorded of the current step to the writer; drop and count it where the queue is full."""
        self._flush_scalars()
        if not self._pending:
            return
        item = FinishedStep(self.step, tuple(self._pending))
        self._pending, self._pending_bytes = [], 0
        urgent = self._nonfinite and not self._was_nonfinite
        self._was_nonfinite, self._nonfinite = self._nonfinite, False
        if not self._queue.offer(item, urgent=urgent):
            self._health.count("dropped_rows", item.rows)
            self._health.count("dropped_steps")

    def _flush_scalars(self) -> None:
        by_mode: dict[Mode, list[tuple[TensorInfo, float]]] = {}
        for (mode, _), (info, value) in self._scalars.items():
            if isinstance(value, _Awaited):
                self.add(Group.of((info,)), value.measurement, mode, condition=value.condition)
            else:
                by_mode.setdefault(mode, []).append((info, value))
        self._scalars = {}
        for mode, entries in by_mode.items():
            infos = tuple(info for info, _ in entries)
            group = self._group_of_scalars.setdefault(infos, Group.of(infos))
            measured = Ready(scalars([value for _, value in entries]))
            self._nonfinite |= bool(measured.nonfinite)
            self._append(Record(self.step, mode, self.worker, time.time_ns(), group, measurement=measured))

    def _obey(self, request: StopRequest) -> None:
        if self._on_stop == "ignore":
            return
        self.hand_over()
        sys.stderr.write(f"watchstep: asked to stop, after step {self.step}: {request.reason}\n")
        if self._on_stop == "raise":
            raise StopTraining(request, self.step)
        call: Callable[[StopRequest], None] = self._on_stop
        call(request)


def scalar_info(name: str, *, derived: bool = False) -> TensorInfo:
    """A loss, if its name says so, or else a metric."""
    loss = "loss" in name.lower()
    return TensorInfo(
        name, (LOSSES if loss else METRICS,), "loss" if loss else "metric", dtype="float64", derived=derived
    )
