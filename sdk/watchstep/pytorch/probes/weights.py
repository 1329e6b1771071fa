"""Probes of weights, gradients and updates.

How large an update is beside the weight that it changes.

    update_ratio = rms(after - before) / rms(before)

Healthy trainings of networks with normalised layers are said to lie near 1e-3 (Karpathy 2015, CS231n, "Ratio of
weights:updates").

The direction of a gradient against the one that was measured before.

    gradient_cosine = <g, h> / (|g| |h|)

Near 1 the loss falls steadily along one direction, near -1 the step size makes it jump from side to side.

Whether the units of a layer, which began alike, ever part.

Units are what a weight's first dimension counts: outputs of a linear layer, channels of a convolution. Units that begin
alike, where nothing tells them apart, get the same gradient and stay alike, but for rounding. Few weights begin so; all
are looked at once, and again only those whose units have not parted.

    unit_spread = max |w_i - w_0|, unit_movement = max |w_0 - w_0 of the first look|

How wide the middle nine tenths of a gradient are, in its first steps.

    percentile_range = 95th percentile - 5th percentile, interpolated between elements as `numpy.percentile` does

Of large gradients evenly spaced elements are taken, see `watchstep.pytorch.probes.staging`.

Tensors held against earlier records of themselves, element by element.

Tensors of up to 16,384 elements are compared whole, larger ones at so many evenly spaced places (fewer where there are many
tensors, see `watchstep.pytorch.probes.staging`): what is kept stays small beside the model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from watchstep.capture.config import PERCENTILE_RANGE, UNCHANGED, WEIGHT_CHANGE, ElementProbe, of_kind
from watchstep.format.statistics import Floats, StatisticsBatch
from watchstep.kernels.measurement import Measurement
from watchstep.pytorch.probes.staging import OnTheWay, elements_of_each, stacked, views, wide_float


@dataclass(frozen=True)
class UpdateRatio:
    """The column ``update_ratio``; NaN where the weight was all zero.

    Attributes:
        update: statistics of the updates.
        before: of the weights before them, over the same elements.
    """

    update: Measurement
    before: Measurement

    def collect(self) -> dict[str, Floats]:
        """The column."""
        weight = _rms(self.before.collect())
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(weight > 0, _rms(self.update.collect()) / weight, np.nan)
        return {"update_ratio": ratio}


def _rms(batch: StatisticsBatch) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(batch.square_sum / batch.finite))


@dataclass(frozen=True)
class _Cosines:
    products: OnTheWay

    def collect(self) -> dict[str, Floats]:
        both, new, old = self.products.numbers()
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = both / np.sqrt(new * old)
        return {"gradient_cosine": np.where(np.isfinite(cosine), np.clip(cosine, -1.0, 1.0), np.nan)}


class GradientCosine:
    """Keeps a sample of each gradient from one measurement to the next, in float32; 16 MB at most."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def look(self, owners: Sequence[object], gradients: Sequence[Tensor], size: int) -> _Cosines | None:
        """Compare gradients with those before.

        Args:
            owners: whose gradients they are, in the same order.
            gradients: dense.
            size: how many owners there are altogether.

        Returns:
            None where one of them is sparse.
        """
        if not owners or any(gradient.layout is not torch.strided for gradient in gradients):
            return None
        rows, columns = [], {}
        for owner, view in zip(owners, views(gradients, elements_of_each(size)), strict=True):
            now = view.to(torch.float32, copy=True)
            square = torch.dot(now, now)
            old = self._before.get(id(owner))
            same = old is not None and old[0].shape == now.shape and old[0].device == now.device
            none = torch.full_like(square, torch.nan)
            rows.append([torch.dot(now, old[0]), square, old[1]] if old and same else [none, none, none])
            columns[id(owner)] = (now, square)
        self._before.update(columns)
        return _Cosines(OnTheWay(stacked([figure for row in rows for figure in row]).reshape(-1, 3).T))

    def forget(self) -> None:
        """The parameters are others now."""
        self._before.clear()


_ELEMENTS = 64  # of each unit, at most
_PARTED = 0.1  # of the movement


@dataclass(frozen=True)
class _Spreads:
    """One value for each weight; NaN where its units are not followed."""

    weights: int
    places: list[int]
    owners: list[int]
    figures: OnTheWay
    parted: set[int]

    def collect(self) -> dict[str, Floats]:
        spread, movement = np.full(self.weights, np.nan), np.full(self.weights, np.nan)
        spread[self.places], movement[self.places] = self.figures.numbers()
        self.parted.update(
            owner
            for owner, place in zip(self.owners, self.places, strict=True)
            if not spread[place]
            <= _PARTED * movement[place]  # also at the first look: some are apart from the start
        )
        return {"unit_spread": spread, "unit_movement": movement}


class UnitSpread:
    """Follows weights for as long as all units of each are alike."""

    def __init__(self) -> None:
        self._parted: set[int] = set()
        self._first: dict[int, Tensor] = {}
        self._last: _Spreads | None = None

    @torch.no_grad()
    def look(self, weights: Sequence[Tensor]) -> _Spreads | None:
        """Look at weights.

        Args:
            weights: parameters; those with fewer than two dimensions, or two units, have no units to compare.

        Returns:
            None where none is followed.
        """
        # Here as well as in the writer's thread, so that what is followed does not depend on when that came to it.
        if self._last is not None and self._last.figures.is_here:
            self._last.collect()
        places, spreads, movements = [], [], []
        for place, weight in enumerate(weights):
            if id(weight) in self._parted:
                self._first.pop(id(weight), None)
                continue
            sample = _sample(weight)
            if sample is None:
                self._parted.add(id(weight))
                continue
            first = self._first.get(id(weight))
            if first is None or first.shape != sample[0].shape:
                first = self._first[id(weight)] = sample[0].clone()
            places.append(place)
            spreads.append((sample - sample[:1]).abs().amax())
            movements.append((sample[0] - first).abs().amax())
        if not places:
            return None
        owners = [id(weights[place]) for place in places]
        figures = stacked([*spreads, *movements]).reshape(2, -1)
        self._last = _Spreads(len(weights), places, owners, OnTheWay(figures), self._parted)
        return self._last

    def forget(self) -> None:
        """The parameters are others now."""
        self._parted, self._first, self._last = set(), {}, None


def _sample(weight: Tensor) -> Tensor | None:
    """Evenly spaced elements of each unit in float32, of shape (units, elements); None where there is nothing to compare."""
    if weight.dim() < 2 or weight.layout is not torch.strided or not weight.is_floating_point():
        return None
    local = weight.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    if local.shape[0] < 2 or local.numel() == 0:
        return None
    flat = local.flatten(1)
    return flat[:, :: -(-flat.shape[1] // _ELEMENTS)].float()


@dataclass(frozen=True)
class _Ranges:
    """One value for each gradient; NaN where its first steps are over."""

    columns: tuple[str, ...]
    is_early: list[list[bool]]
    ranges: OnTheWay

    def collect(self) -> dict[str, Floats]:
        values = self.ranges.numbers()
        return {
            name: np.where(early, values, np.nan)
            for name, early in zip(self.columns, self.is_early, strict=True)
        }


class PercentileRange:
    """Looks at gradients for so many steps from the first record of each."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._probes = of_kind(probes, PERCENTILE_RANGE)
        self._steps = [int(probe.arguments[0]) for probe in self._probes]
        self._first: dict[Hashable, int] = {}

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._probes)

    @torch.no_grad()
    def look(
        self, owners: Sequence[Hashable], gradients: Sequence[Tensor], among: int, step: int
    ) -> _Ranges | None:
        """Measure gradients that are in their first steps.

        Args:
            owners: whose they are, in the same order.
            gradients: strided.
            among: how many there are altogether.
            step: of the run.

        Returns:
            None where none is, or one has no dense elements.
        """
        if any(gradient.layout is not torch.strided or not gradient.numel() for gradient in gradients):
            return None
        ages = [step - self._first.setdefault(owner, step) for owner in owners]
        early = [[age < steps for age in ages] for steps in self._steps]
        if not any(map(any, early)):
            return None
        wide = [view.float() for view in views(gradients, elements_of_each(among))]
        ranges = [_range(view).to(wide[0].device, non_blocking=True) for view in wide]
        return _Ranges(tuple(probe.name for probe in self._probes), early, OnTheWay(torch.stack(ranges)))


def _range(elements: Tensor) -> Tensor:
    """By one sort, with places that are known on the host: nothing waits for a device. NaN where an element is."""
    ordered = elements.sort().values
    wide: Tensor = _percentile(ordered, 0.95) - _percentile(ordered, 0.05)
    return torch.where(ordered[-1].isnan(), torch.nan, wide)  # NaN sorts last


def _percentile(ordered: Tensor, share: float) -> Tensor:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    between: Tensor = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    return between


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
        self._depth = min(_MOST_KEPT, max([1, *self._steps]))

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
        most = elements_of_each(among * self._depth)
        rows = []
        for owner, view in zip(owners, views(weights, most), strict=True):
            now = view.to(wide_float(view.device), copy=True)
            history = self._earlier.setdefault(owner, deque(maxlen=self._depth))
            if history and (history[-1].sample.shape != now.shape or history[-1].step > step):
                history.clear()
            rows.append([self._ratio(probe, now, history, step) for probe in self._wanted])
            if not history or history[-1].step < step:
                history.append(_Earlier(step, now))
        return _Columns(tuple(probe.name for probe in self._wanted), _stacked(rows))

    def forget(self) -> None:
        """The weights are others now."""
        self._earlier.clear()

    def _ratio(self, probe: ElementProbe, now: Tensor, history: deque[_Earlier], step: int) -> Tensor:
        steps, epsilon = int(probe.arguments[0]), float(probe.arguments[1])
        earlier = [record for record in history if record.step < step]
        chosen = next(
            (record for record in earlier if steps and record.step >= step - steps),
            earlier[-1] if earlier and not steps else None,
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
