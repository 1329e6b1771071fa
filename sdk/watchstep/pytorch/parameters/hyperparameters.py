"""What optimizers are set to: learning rate, momentum, betas and weight decay of every parameter group, where they change."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.record import Group, scalar_info
from watchstep.capture.session import Session
from watchstep.format import tensors
from watchstep.pytorch.kernel import TorchKernel

_MOST_GROUPS = 64
_AGAIN = 1000
"""Steps after which a value that has not changed is recorded again, for readers of a window of steps."""

_DEVICE_EVERY = 10
"""Steps between records of values in a device's memory: of these only the change is known, and a record is a launch."""

_KEYS: tuple[tuple[str, int | None, str], ...] = (
    ("lr", None, "learning_rate"),
    ("momentum", None, "momentum"),
    ("betas", 0, "beta1"),
    ("betas", 1, "beta2"),
    ("weight_decay", None, "weight_decay"),
)
"""Key in a parameter group, place within its value, name in the record."""


@dataclass
class _Series:
    """One hyperparameter of one group.

    Attributes:
        key, place: where it stands in the group.
        name: of the metric.
        last: the value as it was recorded.
        version: of a tensor: its identity and version at the last record.
    """

    key: str
    place: int | None
    name: str
    last: Any = None
    version: tuple[int, int] = (0, -1)

    def value(self, group: Mapping[str, Any]) -> Any:
        """As the group has it now; None where it has none."""
        value = group.get(self.key)
        if self.place is None or value is None:
            return value
        return value[self.place] if len(value) > self.place else None


@dataclass
class _Group:
    """One parameter group.

    Attributes:
        series: of the hyperparameters.
        seen: the objects that the group had when it was last looked at; None where one of them may change in place.
    """

    series: list[_Series]
    seen: tuple[Any, Any, Any, Any] | None = None

    def is_as_seen(self, group: Mapping[str, Any]) -> bool:
        """Whether it has the same objects as before, and none of them can change in place."""
        get, seen = group.get, self.seen
        if (
            seen is not None
            and get("lr") is seen[0]
            and get("momentum") is seen[1]
            and get("betas") is seen[2]
            and get("weight_decay") is seen[3]
        ):
            return True
        now = get("lr"), get("momentum"), get("betas"), get("weight_decay")
        self.seen = None if any(map(_may_change, now)) else now
        return False


@dataclass
class _Watched:
    """One optimizer.

    Attributes:
        prefix: of the metrics' names.
        groups: in their order.
        recorded: the step at which all were recorded.
        on_device: the step of the last record of values in a device's memory.
    """

    prefix: str
    groups: list[_Group] = field(default_factory=list)
    recorded: int = -_AGAIN
    on_device: int = -_DEVICE_EVERY


class Hyperparameters:
    """Records ``optimizer:learning_rate/0`` and the like when they change: the name, and the label of the parameter group.

    The label is what the group has as its ``name``, or else its number. Of a program's second optimizer, by first step, it is
    ``optimizer_2:learning_rate/0``. A row holds until the next one. Values in a device's memory are not read: that they may have changed
    is known by their version, and they are recorded at every tenth step at most.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self._recorder = session.recorder
        self._health = session.health
        self._prefix = f"{prefix}." if prefix else ""
        self._wanted = tensors.METRICS in session.config.chosen
        self._watched: MutableMapping[Optimizer, _Watched] = WeakIdKeyDictionary()
        self._optimizers = 0

    def before_update(self, optimizer: Optimizer) -> None:
        """Record what has changed since this optimizer's last update."""
        if not self._wanted:
            return
        watched = self._watched.get(optimizer)
        if watched is None:
            self._optimizers += 1
            number = f"_{self._optimizers}" if self._optimizers > 1 else ""
            watched = self._watched[optimizer] = _Watched(f"{self._prefix}optimizer{number}:")
        groups = optimizer.param_groups
        if len(watched.groups) != min(len(groups), _MOST_GROUPS):
            self._arrange(watched, groups)
        step = self._recorder.step
        again = step >= watched.recorded + _AGAIN
        if again:
            watched.recorded = step
        on_device: list[tuple[_Series, Tensor]] = []
        for previous, group in zip(watched.groups, groups, strict=False):
            if previous.is_as_seen(group) and not again:
                continue
            for series in previous.series:
                value = series.value(group)
                if isinstance(value, Tensor):
                    version = (id(value), value._version)  # noqa: SLF001 - has no public name
                    if version == series.version and not again:
                        continue
                    if value.device.type != "cpu":
                        on_device.append((series, value))
                        continue
                    series.version, value = version, value.item()
                if again or value != series.last:
                    self._record(series, value)
        if on_device and (again or step >= watched.on_device + _DEVICE_EVERY):
            watched.on_device = step
            self._record_on_device(on_device)

    def _arrange(self, watched: _Watched, groups: list[dict[str, Any]]) -> None:
        watched.groups = [
            _Group([_Series(key, place, f"{watched.prefix}{name}/{label}") for key, place, name in _KEYS])
            for label in _labels(groups[:_MOST_GROUPS])
        ]
        watched.recorded = -_AGAIN
        if len(groups) > _MOST_GROUPS:
            self._health.note(
                "hyperparameters",
                f"an optimizer has {len(groups)} parameter groups: the first {_MOST_GROUPS} are recorded",
            )

    def _record(self, series: _Series, value: Any) -> None:
        series.last = value
        if isinstance(value, int | float) or hasattr(value, "__float__"):
            number = float(value)
            if not math.isnan(number):  # is unlike itself: it would be recorded at each step
                self._recorder.scalar(series.name, number)

    def _record_on_device(self, changed: list[tuple[_Series, Tensor]]) -> None:
        by_device: dict[Any, list[tuple[_Series, Tensor]]] = {}
        for series, value in changed:
            if value.numel() == 1 and not value.is_meta:
                by_device.setdefault(value.device, []).append((series, value))
            series.version = (id(value), value._version)  # noqa: SLF001 - as above
        for members in by_device.values():
            group = Group.of(tuple(scalar_info(series.name) for series, _ in members))
            self._recorder.add(group, TorchKernel().measure([value.detach() for _, value in members]))


def _may_change(value: Any) -> bool:
    """Whether an object of a parameter group may have another value later."""
    return not (value is None or isinstance(value, float | int)) and not (
        isinstance(value, tuple) and all(isinstance(member, float | int) for member in value)
    )


def _labels(groups: list[dict[str, Any]]) -> list[str]:
    """One for each group: its name, where it has one that no other has and that is not taken for a loss's; or its number."""
    names = [group.get("name") for group in groups]
    return [
        name
        if isinstance(name, str) and name and names.count(name) == 1 and "loss" not in name.lower()
        else str(number)
        for number, name in enumerate(names)
    ]
