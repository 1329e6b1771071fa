"""Tensors held against earlier records of themselves, element by element.

Tensors of up to 16,384 elements are compared whole, larger ones at so many evenly spaced places (fewer where there are many
tensors, see `watchstep.pytorch.probes.staging`): what is kept stays small beside the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from watchstep.capture.config import UNCHANGED, WEIGHT_CHANGE, ElementProbe, of_kind
from watchstep.format.statistics import Floats
from watchstep.pytorch.probes.staging import OnTheWay, elements_of_each, stacked, views, wide_float

_MOST_KEPT = 64
"""Earlier records of a weight; where STEPS spans more of them the oldest that is kept counts."""


@dataclass(frozen=True)
class _Columns:
    """One column for each probe, one value for each tensor."""

    names: tuple[str, ...]
    figures: OnTheWay

    def collect(self) -> dict[str, Floats]:
        return dict(zip(self.names, self.figures.numbers(), strict=True))


class Unchanged:
    """Keeps the last record of each tensor, and says whether the next one is close to it."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._probes = of_kind(probes, UNCHANGED)
        self._before: dict[Hashable, Tensor] = {}

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._probes)

    @torch.no_grad()
    def look(self, owners: Sequence[Hashable], tensors: Sequence[Tensor], among: int) -> _Columns | None:
        """Compare tensors with their last record. A first record, or one of another shape, is a change.

        Args:
            owners: whose they are, in the same order.
            tensors: strided, real.
            among: how many tensors there are altogether.

        Returns:
            None where one of them has no dense elements.
        """
        if not tensors or any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        most = elements_of_each(among)
        rows = []
        for owner, view in zip(owners, views(tensors, most), strict=True):
            now = view.clone()
            before = self._before.get(owner)
            same = before is not None and before.shape == now.shape and before.device == now.device
            rows.append(
                [
                    _is_close(now, before, probe) if same and before is not None else _none(now)
                    for probe in self._probes
                ]
            )
            self._before[owner] = now
        return _Columns(tuple(probe.name for probe in self._probes), _stacked(rows))

    def forget(self) -> None:
        """The tensors are others now."""
        self._before.clear()


class _Earlier(NamedTuple):
    """A record of a weight."""

    step: int
    sample: Tensor


@dataclass
class WeightChange:
    """Keeps earlier records of weights, and says by what share they have changed since."""

    probes: Sequence[str]
    _earlier: dict[Hashable, deque[_Earlier]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wanted = of_kind(self.probes, WEIGHT_CHANGE)
        self._steps = [int(probe.arguments[0]) for probe in self._wanted]
        self._kept = min(_MOST_KEPT, max([1, *self._steps]))

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._wanted)

    @torch.no_grad()
    def look(
        self, owners: Sequence[Hashable], weights: Sequence[Tensor], among: int, step: int
    ) -> _Columns | None:
        """The change of each weight since its earlier record; -1 where there is none.

        Args:
            owners: whose they are, in the same order.
            weights: strided.
            among: how many there are altogether; with more records of each less of a large one is kept.
            step: of the run.

        Returns:
            None where one of them has no dense elements.
        """
        if not weights or any(weight.layout is not torch.strided for weight in weights):
            return None
        most = elements_of_each(among * self._kept)
        rows = []
        for owner, view in zip(owners, views(weights, most), strict=True):
            now = view.to(wide_float(view.device), copy=True)
            kept = self._earlier.setdefault(owner, deque(maxlen=self._kept))
            if kept and (kept[-1].sample.shape != now.shape or kept[-1].step > step):
                kept.clear()
            rows.append([self._ratio(probe, now, kept, step) for probe in self._wanted])
            if not kept or kept[-1].step < step:
                kept.append(_Earlier(step, now))
        return _Columns(tuple(probe.name for probe in self._wanted), _stacked(rows))

    def forget(self) -> None:
        """The weights are others now."""
        self._earlier.clear()

    def _ratio(self, probe: ElementProbe, now: Tensor, kept: deque[_Earlier], step: int) -> Tensor:
        steps, epsilon = int(probe.arguments[0]), float(probe.arguments[1])
        known = [one for one in kept if one.step < step]
        chosen = next(
            (one for one in known if steps and one.step >= step - steps),
            known[-1] if known and not steps else None,
        )
        if chosen is None:
            return torch.full((), -1.0, dtype=now.dtype, device=now.device)
        before = chosen.sample.to(now.device)
        ratio: Tensor = torch.linalg.vector_norm(now - before) / (torch.linalg.vector_norm(before) + epsilon)
        return ratio


def _is_close(now: Tensor, before: Tensor, probe: ElementProbe) -> Tensor:
    """1 where `numpy.allclose` would say so, else 0."""
    rtol, atol, equal_nan = float(probe.arguments[0]), float(probe.arguments[1]), bool(probe.arguments[2])
    wide = wide_float(now.device)
    new, old = now.to(wide), before.to(wide)
    return torch.isclose(new, old, rtol=rtol, atol=atol, equal_nan=equal_nan).all().to(wide)


def _none(now: Tensor) -> Tensor:
    return torch.zeros((), dtype=wide_float(now.device), device=now.device)


def _stacked(rows: list[list[Tensor]]) -> OnTheWay:
    """Figures by tensor and probe as a matrix of shape (probes, tensors) on one device."""
    return OnTheWay(stacked([figure for row in rows for figure in row]).reshape(len(rows), -1).T)
