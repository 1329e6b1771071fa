"""Hyperparameters of optimizers: learning rate, momentum, betas and weight decay of every parameter group, when they change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from watchstep.capture.steps.metric_names import HAS_STATE
from watchstep.capture.steps.record import Group, scalar_info
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.pytorch import internals
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.optimizer_map import OptimizerMap

_MAX_GROUPS = 64
_REPEAT_INTERVAL = 1000
"""Number of steps after which an unchanged value is recorded again, for readers of a window of steps."""

_DEVICE_INTERVAL = 10
"""Number of steps between records of values in device memory: only their change is known, and each record launches a kernel."""

_STATE_UPDATES = 2
"""Number of first updates before which it is recorded whether an optimizer has state: without it before the second one, it keeps none."""

_KEYS: tuple[tuple[str, int | None, str], ...] = (
    ("lr", None, "learning_rate"),
    ("momentum", None, "momentum"),
    ("betas", 0, "beta1"),
    ("betas", 1, "beta2"),
    ("weight_decay", None, "weight_decay"),
)
"""Key in a parameter group, index within its value, name in the record."""


@dataclass
class _Series:
    """One hyperparameter of one group.

    Attributes:
        key, place: Key in the group, and index within its value.
        name: Name of the metric.
        last: Last recorded value.
        version: Id and version of a tensor at the last record.
    """

    key: str
    place: int | None
    name: str
    last: Any = None
    version: tuple[int, int] = (0, -1)

    def value(self, group: Mapping[str, Any]) -> Any:
        """Return the group's current value; None if it has none."""
        value = group.get(self.key)
        if self.place is None or value is None:
            return value
        return value[self.place] if len(value) > self.place else None


@dataclass
class _Group:
    """One parameter group.

    Attributes:
        series: Series of its hyperparameters.
        values: Values of the group at the last check; None if one of them may change in place.
    """

    series: list[_Series]
    values: tuple[Any, Any, Any, Any] | None = None

    def is_unchanged(self, group: Mapping[str, Any]) -> bool:
        """Return whether the group has the same values as before, and none of them can change in place."""
        get, previous = group.get, self.values
        if (
            previous is not None
            and get("lr") is previous[0]
            and get("momentum") is previous[1]
            and get("betas") is previous[2]
            and get("weight_decay") is previous[3]
        ):
            return True
        now = get("lr"), get("momentum"), get("betas"), get("weight_decay")
        self.values = None if any(map(_may_change, now)) else now
        return False


@dataclass
class _Watched:
    """One optimizer.

    Attributes:
        prefix: Prefix of the names of its metrics.
        groups: Parameter groups in their order.
        recorded: Step at which all values were last recorded.
        on_device: Step at which values in device memory were last recorded.
        updates: Updates at which it was recorded whether the optimizer has state.
    """

    prefix: str
    groups: list[_Group] = field(default_factory=list)
    recorded: int = -_REPEAT_INTERVAL
    on_device: int = -_DEVICE_INTERVAL
    updates: int = 0


class Hyperparameters:
    """Records hyperparameters when they change, e.g. as ``optimizer:learning_rate/0``: the name and the label of the parameter group.

    The label is the group's ``name``, or else its index. The second optimizer, in the order of first steps, is
    ``optimizer_2:learning_rate/0``. A value is valid until the next row. Values in device memory are not read: their version shows
    that they may have changed, and they are recorded at most every tenth step. ``optimizer:has_state`` is recorded at the first two updates.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self._recorder = session.recorder
        self._health = session.health
        self._prefix = f"{prefix}." if prefix else ""
        self._enabled = tensors.METRICS in session.config.chosen
        self._watched: OptimizerMap[_Watched] = OptimizerMap()
        self._optimizers = 0

    def before_update(self, optimizer: Optimizer) -> None:
        """Record hyperparameters that have changed since this optimizer's last update."""
        if not self._enabled:
            return
        watched = self._watched.get(optimizer)
        if watched is None:
            self._optimizers += 1
            number = f"_{self._optimizers}" if self._optimizers > 1 else ""
            watched = self._watched[optimizer] = _Watched(f"{self._prefix}optimizer{number}:")
        if watched.updates < _STATE_UPDATES:
            watched.updates += 1
            self._recorder.scalar(f"{watched.prefix}{HAS_STATE}", float(_has_state(optimizer)))
        groups = optimizer.param_groups
        if len(watched.groups) != min(len(groups), _MAX_GROUPS):
            self._set_groups(watched, groups)
        step = self._recorder.step
        is_repeat = step >= watched.recorded + _REPEAT_INTERVAL
        if is_repeat:
            watched.recorded = step
        on_device: list[tuple[_Series, Tensor]] = []
        for previous, group in zip(watched.groups, groups, strict=False):
            if previous.is_unchanged(group) and not is_repeat:
                continue
            for series in previous.series:
                value = series.value(group)
                if isinstance(value, Tensor):
                    version = (id(value), internals.version(value))
                    if version == series.version and not is_repeat:
                        continue
                    if value.device.type != "cpu":
                        on_device.append((series, value))
                        continue
                    series.version, value = version, value.item()
                if is_repeat or value != series.last:
                    self._record(series, value)
        if on_device and (is_repeat or step >= watched.on_device + _DEVICE_INTERVAL):
            watched.on_device = step
            self._record_on_device(on_device)

    def _set_groups(self, watched: _Watched, groups: list[dict[str, Any]]) -> None:
        watched.groups = [
            _Group([_Series(key, place, f"{watched.prefix}{name}/{label}") for key, place, name in _KEYS])
            for label in _labels(groups[:_MAX_GROUPS])
        ]
        watched.recorded = -_REPEAT_INTERVAL
        if len(groups) > _MAX_GROUPS:
            self._health.note(
                "hyperparameters",
                f"an optimizer has {len(groups)} parameter groups: the first {_MAX_GROUPS} are recorded",
            )

    def _record(self, series: _Series, value: Any) -> None:
        series.last = value
        if isinstance(value, int | float) or hasattr(value, "__float__"):
            number = float(value)
            if not math.isnan(number):  # NaN differs from itself, so it would be recorded at each step
                self._recorder.scalar(series.name, number)

    def _record_on_device(self, changed: list[tuple[_Series, Tensor]]) -> None:
        by_device: dict[Any, list[tuple[_Series, Tensor]]] = {}
        for series, value in changed:
            if value.numel() == 1 and not value.is_meta:
                by_device.setdefault(value.device, []).append((series, value))
            series.version = (id(value), internals.version(value))
        for members in by_device.values():
            group = Group.of(tuple(scalar_info(series.name) for series, _ in members))
            self._recorder.add(group, TorchKernel().measure([value.detach() for _, value in members]))


def _has_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has state of any parameter. Entries may be empty, because looking one up creates it."""
    return any(isinstance(entry, Mapping) and len(entry) > 0 for entry in optimizer.state.values())


def _may_change(value: Any) -> bool:
    """Return whether a value of a parameter group may change in place."""
    return not (value is None or isinstance(value, float | int)) and not (
        isinstance(value, tuple) and all(isinstance(member, float | int) for member in value)
    )


def _labels(groups: list[dict[str, Any]]) -> list[str]:
    """Return a label for each group: its name if it is unique and does not look like the name of a loss, else its index."""
    names = [group.get("name") for group in groups]
    return [
        name
        if isinstance(name, str) and name and names.count(name) == 1 and "loss" not in name.lower()
        else str(number)
        for number, name in enumerate(names)
    ]
