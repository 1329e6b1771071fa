"""Scalars of the current step: all recorded values of a loss, the last value of a metric, and losses that leave their range.

A loss that is recorded several times in a step, for micro-batches or batches of an evaluation, becomes one row with
their statistics: ``mean`` is the mean by batch, ``count`` the number of batches; NaN and infinite batches stay in the
counts. When a loss leaves the range that it had, the steps that follow are measured completely.

An update ends an evaluation. Where a step has an evaluation before its update and another after it, the later one is
recorded and the earlier one is counted in health: their weights differ, and a mean of both would describe neither.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from watchstep.capture.health import RecorderHealth
from watchstep.capture.record import Condition, Group
from watchstep.format.statistics import StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import LOSSES, METRICS, Mode, TensorInfo
from watchstep.kernels.measurement import Completed, Measurement, Rescaled

_WINDOW = 64
_FEWEST = 16
_EVERY = 16
"""Losses between two looks at the range; a single loss is compared with one number."""

_DEVIATIONS = 8.0
_RISE = 0.25
_NORMAL = 1.4826
_MOST_SERIES = 32


class LossRange:
    """The range of the last losses of one name: median and median absolute deviation, which do not notice single outliers (Hampel 1974)."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_WINDOW)
        self._until_look = _FEWEST
        self._level = 0.0
        self._unit = 1.0
        self._limit = math.inf

    def excess(self, loss: float) -> float:
        """How far a loss is above the range, in units of the least distance that counts: 1 or more, or 0 within the range.

        The unit is the largest of eight robust standard deviations and a quarter of the level. What is NaN or infinite is no loss of a
        range: the gate sees it.
        """
        if not math.isfinite(loss):
            return 0.0
        excess = (loss - self._level) / self._unit if loss > self._limit else 0.0
        self._last.append(loss)
        self._until_look -= 1
        if not self._until_look:
            self._look()
        return excess

    def _look(self) -> None:
        self._until_look = _EVERY
        middle = len(self._last) // 2
        self._level = sorted(self._last)[middle]
        spread = _NORMAL * sorted(abs(loss - self._level) for loss in self._last)[middle]
        self._unit = max(_DEVIATIONS * spread, _RISE * abs(self._level))
        self._limit = self._level + self._unit if self._unit > 0 else math.inf


class LossOnsets:
    """Asks for bursts of measuring where a training loss leaves its range. On the training thread."""

    def __init__(self, burst: Callable[[float], bool]) -> None:
        """Begin with no losses.

        Args:
            burst: called with the excess of a loss above its range; whether measuring begins because of it.
        """
        self._burst = burst
        self._ranges: dict[tuple[str, bool], LossRange] = {}

    def seen(self, name: str, loss: float, *, derived: bool) -> bool:
        """A training loss; whether everything is measured from now on because of it.

        Args:
            name: of the loss.
            loss: its value.
            derived: it was found at ``backward()``. What the program logs by the same name has a range of its own.
        """
        held = self._ranges.get((name, derived))
        if held is None:
            if len(self._ranges) >= _MOST_SERIES:
                return False
            held = self._ranges[name, derived] = LossRange()
        excess = held.excess(loss)
        return excess > 0 and self._burst(excess)


_MOST_VALUES = 1024
"""Numbers of one name that are kept one by one, in host memory; more are merged."""

_MOST_ON_DEVICE = 256
"""The same on a device, where they are measured together."""

_EVALUATIONS: frozenset[Mode] = frozenset({"eval", "predict"})


class DeviceScalar(Protocol):
    """A number in a device's memory, which is not waited for."""

    def measure(self) -> Measurement:
        """Start to measure it."""
        ...

    def copy(self) -> DeviceScalar:
        """The number as it is now, in memory that the program does not write to."""
        ...

    def measure_all(self, scalars: Sequence[Any]) -> Measurement:
        """Start to measure several as one tensor of so many elements; they are of the same kind as this one."""
        ...


@dataclass
class _Scalar:
    """One name in one mode.

    Attributes:
        info: describes it.
        values: those in host memory that are not merged.
        merged: the statistics of earlier ones, one row.
        measured: those on their way from a device.
        unmeasured: those in a device's memory.
    """

    info: TensorInfo
    values: list[float] = field(default_factory=list)
    merged: StatisticsBatch | None = None
    measured: list[tuple[Measurement, Condition | None]] = field(default_factory=list)
    unmeasured: list[DeviceScalar] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(value)
        if len(self.values) >= _MOST_VALUES:
            self.merged, self.values = self.statistics(), []

    def add_on_device(self, value: DeviceScalar) -> None:
        if not self.measured:
            self.measured.append((value.measure(), None))
            return
        self.unmeasured.append(value.copy())
        if len(self.unmeasured) >= _MOST_ON_DEVICE:
            self.measure_rest()

    def measure_rest(self) -> None:
        if self.unmeasured:
            self.measured.append((self.unmeasured[0].measure_all(self.unmeasured), None))
            self.unmeasured = []

    def statistics(self) -> StatisticsBatch:
        """Of those in host memory, one row."""
        rows = scalars(self.values)
        if self.merged is not None:
            rows = StatisticsBatch.concatenate([self.merged, rows])
        return rows if len(rows) == 1 else merge_rows(rows, np.zeros(len(rows), np.intp), 1)


class ScalarValues:
    """What was recorded of losses and metrics in the step under way. On the training thread."""

    def __init__(self, health: RecorderHealth) -> None:
        self.onsets: LossOnsets | None = None
        """Is told of each training loss in host memory."""
        self._health = health
        self._scalars: dict[tuple[Mode, str], _Scalar] = {}
        self._before_update: set[tuple[Mode, str]] = set()
        self._groups: dict[tuple[TensorInfo, ...], Group] = {}
        self._functions: dict[tuple[Mode, str], str] = {}

    def add(self, mode: Mode, name: str, value: float, *, derived: bool, replaces: bool) -> None:
        """Record a number.

        Args:
            mode: of the row.
            name: of the row.
            value: the number.
            derived: it was not logged by the program; what the program logs under this name takes its place.
            replaces: it takes the place of what was recorded under this name, also of a loss.
        """
        scalar = self._scalar(mode, name, derived=derived, replaces=replaces)
        if scalar is not None:
            scalar.add(value)
            if self.onsets is not None and mode == "train" and scalar.info.role == "loss":
                self.onsets.seen(name, value, derived=derived)

    def add_on_device(
        self, mode: Mode, name: str, value: DeviceScalar, *, derived: bool, replaces: bool
    ) -> None:
        """Record a number in a device's memory, as `add` does one at hand."""
        scalar = self._scalar(mode, name, derived=derived, replaces=replaces)
        if scalar is not None:
            scalar.add_on_device(value)

    def add_measured(
        self, mode: Mode, name: str, measurement: Measurement, condition: Condition | None, *, derived: bool
    ) -> None:
        """Record a number that is being measured, if a condition holds that is known later; it replaces earlier ones."""
        scalar = self._scalar(mode, name, derived=derived, replaces=True)
        if scalar is not None:
            scalar.measured.append((measurement, condition))

    def note_function(self, mode: Mode, name: str, function: str) -> None:
        """Name the function that computes a loss. The first word counts: a series has one description."""
        self._functions.setdefault((mode, name), function)

    def undivide(self, mode: Mode, name: str, divisor: float) -> None:
        """Multiply what is derived of a name so far by a number; what the program logs is its own."""
        scalar = self._scalars.get((mode, name))
        if scalar is not None and scalar.info.derived and scalar.merged is None:
            scalar.measure_rest()
            scalar.values = [value * divisor for value in scalar.values]
            scalar.measured = [
                (Rescaled(measurement, lambda: 1 / divisor), condition)
                for measurement, condition in scalar.measured
            ]

    def update_done(self) -> None:
        """The weights are others now: evaluations so far are over."""
        if self._scalars:
            self._before_update = {key for key in self._scalars if key[0] in _EVALUATIONS}

    def clear(self) -> None:
        """Another step begins."""
        if self._scalars:
            self._scalars = {}
            self._before_update.clear()

    def rows(self) -> Iterator[tuple[Mode, Group, Measurement, Condition | None]]:
        """The rows of the step so far: those in host memory by mode, the others each by itself."""
        by_mode: dict[Mode, list[_Scalar]] = {}
        for (mode, _), scalar in self._scalars.items():
            scalar.measure_rest()
            for measurement, condition in scalar.measured:
                yield mode, Group.of((scalar.info,)), measurement, condition
            if scalar.values or scalar.merged is not None:
                by_mode.setdefault(mode, []).append(scalar)
        for mode, members in by_mode.items():
            infos = tuple(scalar.info for scalar in members)
            group = self._groups.setdefault(infos, Group.of(infos))
            if all(len(scalar.values) == 1 and scalar.merged is None for scalar in members):
                statistics = scalars([scalar.values[0] for scalar in members])
            else:
                statistics = StatisticsBatch.concatenate([scalar.statistics() for scalar in members])
            yield mode, group, Completed(statistics), None

    def _scalar(self, mode: Mode, name: str, *, derived: bool, replaces: bool) -> _Scalar | None:
        """Where to put a number; None where the program has logged this name itself."""
        key = mode, name
        scalar = self._scalars.get(key)
        if scalar is not None:
            if derived and not scalar.info.derived:
                return None
            if key in self._before_update:
                self._before_update.discard(key)
                self._health.count("replaced_evaluations")
                replaces = True
            if not replaces and derived == scalar.info.derived and scalar.info.role == "loss":
                return scalar
        function = self._functions.setdefault(key, "")
        scalar = self._scalars[key] = _Scalar(scalar_info(name, derived=derived, function=function))
        return scalar


@functools.lru_cache(maxsize=4096)
def scalar_info(name: str, *, derived: bool = False, function: str = "") -> TensorInfo:
    """A loss, if its name says so, or else a metric."""
    loss = "loss" in name.lower()
    return TensorInfo(
        name,
        (LOSSES if loss else METRICS,),
        "loss" if loss else "metric",
        module_type=function if loss else "",
        dtype="float64",
        derived=derived,
    )
