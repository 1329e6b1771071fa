"""Probes of weights, gradients and updates.

Size of an update relative to the weight:

    update_ratio = rms(after - before) / rms(before)

For healthy training of networks with normalised layers it is reported to be near 1e-3 (Karpathy 2015, CS231n, "Ratio of
weights:updates").

Direction of a gradient g relative to the previously measured gradient h:

    gradient_cosine = <g, h> / (|g| |h|)

Near 1 the loss decreases steadily in one direction. Near -1 the step size makes it oscillate.

Symmetry of the units of a layer. Units are the first dimension of a weight: outputs of a linear layer, channels of a convolution.
Units that start equal, with nothing to distinguish them, get the same gradient and stay equal except for rounding. Few weights
start like this. All are checked once, and then only those with units that have not diverged:

    unit_spread = max |w_i - w_0|, unit_movement = max |w_0 - w_0 of the first check|

Width of the middle 90 % of a gradient in its first steps:

    percentile_range = 95th percentile - 5th percentile, interpolated between elements like `numpy.percentile`

Comparison of tensors with their earlier records, element by element.

Tensors of up to 16,384 elements are used completely, larger ones at this number of evenly spaced elements (fewer if there are many
tensors, see `watchstep.pytorch.probes.staging`), so that the kept samples are small compared with the model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from watchstep.capture.config import PERCENTILE_RANGE, UNCHANGED, WEIGHT_CHANGE, ElementProbe, of_kind
from watchstep.format.statistics import Floats, StatisticsBatch
from watchstep.kernels.measurement import Measurement
from watchstep.pytorch.probes.staging import (
    ElementSamples,
    HostCopy,
    elements_of_each,
    stacked,
    views,
    wide_float,
)


@dataclass(frozen=True)
class UpdateRatio:
    """The column ``update_ratio``; NaN for a weight of zeros.

    Attributes:
        update: Statistics of the updates.
        before: Statistics of the weights before the updates, over the same elements.
    """

    update: Measurement
    before: Measurement

    def collect(self) -> dict[str, Floats]:
        """Return the column."""
        weight = _rms(self.before.collect())
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(weight > 0, _rms(self.update.collect()) / weight, np.nan)
        return {"update_ratio": ratio}


def _rms(batch: StatisticsBatch) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(batch.square_sum / batch.finite))


@dataclass(frozen=True)
class _Cosines:
    products: HostCopy
    is_comparable: NDArray[np.bool_]

    def collect(self) -> dict[str, Floats]:
        both, new, old = self.products.numbers()
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = both / np.sqrt(new * old)
        is_known = self.is_comparable & np.isfinite(cosine)
        return {"gradient_cosine": np.where(is_known, np.clip(cosine, -1.0, 1.0), np.nan)}


class GradientCosine:
    """Keeps a float32 sample of each gradient until the next measurement; at most 16 MB."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def measure(self, owners: Sequence[object], gradients: Sequence[Tensor], size: int) -> _Cosines | None:
        """Compare gradients with their previous measurements.

        Args:
            owners: Parameters of the gradients, in the same order.
            gradients: Dense gradients.
            size: Total number of parameters.

        Returns:
            None if one of the gradients is sparse.
        """
        if not owners or any(gradient.layout is not torch.strided for gradient in gradients):
            return None
        is_whole = len(owners) >= len(self._before)
        figures, is_comparable = [], []
        for owner, now in zip(
            owners, ElementSamples.of(views(gradients, elements_of_each(size))).each(), strict=True
        ):
            square = torch.dot(now, now)
            old, old_square = self._before.get(id(owner), (now, square))
            is_comparable.append(old is not now and old.shape == now.shape and old.device == now.device)
            figures += [torch.dot(now, old) if is_comparable[-1] else square, square, old_square]
            # A part of a measurement must not keep all of its memory.
            self._before[id(owner)] = (now if is_whole else now.clone(), square)
        return _Cosines(HostCopy(stacked(figures).reshape(-1, 3).T), np.array(is_comparable))

    def forget(self) -> None:
        """Forget all samples, because the parameters have been replaced."""
        self._before.clear()


_ELEMENTS = 64  # maximum number of elements of each unit
_DIVERGED_SHARE = 0.1  # share of the movement above which units have diverged


@dataclass(frozen=True)
class _Spreads:
    """One value per weight; NaN if its units are not tracked."""

    weights: int
    places: list[int]
    owners: list[int]
    figures: HostCopy
    diverged: set[int]

    def collect(self) -> dict[str, Floats]:
        spread, movement = np.full(self.weights, np.nan), np.full(self.weights, np.nan)
        spread[self.places], movement[self.places] = self.figures.numbers()
        self.diverged.update(
            owner
            for owner, place in zip(self.owners, self.places, strict=True)
            if not spread[place]
            <= _DIVERGED_SHARE
            * movement[place]  # also at the first check, because some differ from the start
        )
        return {"unit_spread": spread, "unit_movement": movement}


class UnitSpread:
    """Tracks weights while all units of a weight are equal."""

    def __init__(self) -> None:
        self._diverged: set[int] = set()
        self._first: dict[int, Tensor] = {}
        self._last: _Spreads | None = None

    @torch.no_grad()
    def measure(self, weights: Sequence[Tensor]) -> _Spreads | None:
        """Compare the units of weights.

        Args:
            weights: Parameters. Those with fewer than two dimensions or two units are not tracked.

        Returns:
            None if no weight is tracked.
        """
        # Collected here and in the writer's thread, so that the tracked weights do not depend on the writer's timing.
        if self._last is not None and self._last.figures.is_complete:
            self._last.collect()
        places, spreads, movements = [], [], []
        for place, weight in enumerate(weights):
            if id(weight) in self._diverged:
                self._first.pop(id(weight), None)
                continue
            sample = _sample(weight)
            if sample is None:
                self._diverged.add(id(weight))
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
        self._last = _Spreads(len(weights), places, owners, HostCopy(figures), self._diverged)
        return self._last

    def forget(self) -> None:
        """Forget all samples, because the parameters have been replaced."""
        self._diverged, self._first, self._last = set(), {}, None


def _sample(weight: Tensor) -> Tensor | None:
    """Return evenly spaced elements of each unit as float32 of shape (units, elements); None if there is nothing to compare."""
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
    """One value per gradient; NaN after its first steps."""

    columns: tuple[str, ...]
    is_early: list[list[bool]]
    ranges: HostCopy

    def collect(self) -> dict[str, Floats]:
        values = self.ranges.numbers()
        return {
            name: np.where(early, values, np.nan)
            for name, early in zip(self.columns, self.is_early, strict=True)
        }


class PercentileRange:
    """Measures gradients for a number of steps from the first record of each."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._probes = of_kind(probes, PERCENTILE_RANGE)
        self._steps = [int(probe.arguments[0]) for probe in self._probes]
        self._first: dict[Hashable, int] = {}

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._probes)

    @torch.no_grad()
    def measure(
        self, owners: Sequence[Hashable], gradients: Sequence[Tensor], among: int, step: int
    ) -> _Ranges | None:
        """Measure gradients that are in their first steps.

        Args:
            owners: Parameters of the gradients, in the same order.
            gradients: Strided gradients.
            among: Total number of parameters.
            step: Step of the run.

        Returns:
            None if no gradient is in its first steps, or one has no dense elements.
        """
        if any(gradient.layout is not torch.strided or not gradient.numel() for gradient in gradients):
            return None
        ages = [step - self._first.setdefault(owner, step) for owner in owners]
        early = [[age < steps for age in ages] for steps in self._steps]
        if not any(map(any, early)):
            return None
        wide = [view.float() for view in views(gradients, elements_of_each(among))]
        ranges = [_range(view).to(wide[0].device, non_blocking=True) for view in wide]
        return _Ranges(tuple(probe.name for probe in self._probes), early, HostCopy(torch.stack(ranges)))


def _range(elements: Tensor) -> Tensor:
    """Return the range by one sort, with indices that are known on the host, so that nothing waits for a device. NaN if an element is NaN."""
    ordered = elements.sort().values
    wide: Tensor = _percentile(ordered, 0.95) - _percentile(ordered, 0.05)
    return torch.where(ordered[-1].isnan(), torch.nan, wide)  # NaN sorts last


def _percentile(ordered: Tensor, share: float) -> Tensor:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    between: Tensor = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    return between


_MAX_RECORDS = 64
"""Maximum number of earlier records of a weight. If STEPS spans more of them, the oldest kept record is used."""


@dataclass(frozen=True)
class _Columns:
    """One column per probe, one value per tensor."""

    names: tuple[str, ...]
    figures: HostCopy

    def collect(self) -> dict[str, Floats]:
        return dict(zip(self.names, self.figures.numbers(), strict=True))


class Unchanged:
    """Keeps the last record of each tensor, and reports whether the next one is close to it."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._probes = of_kind(probes, UNCHANGED)
        self._before: dict[Hashable, Tensor] = {}

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._probes)

    @torch.no_grad()
    def measure(self, owners: Sequence[Hashable], tensors: Sequence[Tensor], among: int) -> _Columns | None:
        """Compare tensors with their last record. A first record, or one of another shape, counts as a change.

        Args:
            owners: Keys of the tensors, in the same order.
            tensors: Strided real tensors.
            among: Total number of tensors.

        Returns:
            None if one of them has no dense elements.
        """
        if not tensors or any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        most = elements_of_each(among)
        rows = []
        for owner, view in zip(owners, views(tensors, most), strict=True):
            now = view.clone()
            before = self._before.get(owner)
            is_comparable = before is not None and before.shape == now.shape and before.device == now.device
            rows.append(
                [
                    _is_close(now, before, probe) if is_comparable and before is not None else _zero(now)
                    for probe in self._probes
                ]
            )
            self._before[owner] = now
        return _Columns(tuple(probe.name for probe in self._probes), _stacked(rows))

    def forget(self) -> None:
        """Forget all records, because the tensors have been replaced."""
        self._before.clear()


class _Earlier(NamedTuple):
    """An earlier record of a weight."""

    step: int
    sample: Tensor


@dataclass
class WeightChange:
    """Keeps earlier records of weights, and measures their relative change since then."""

    probes: Sequence[str]
    _earlier: dict[Hashable, deque[_Earlier]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._change_probes = of_kind(self.probes, WEIGHT_CHANGE)
        self._steps = [int(probe.arguments[0]) for probe in self._change_probes]
        self._depth = min(_MAX_RECORDS, max([1, *self._steps]))

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._change_probes)

    @torch.no_grad()
    def measure(
        self, owners: Sequence[Hashable], weights: Sequence[Tensor], among: int, step: int
    ) -> _Columns | None:
        """Return the change of each weight since its earlier record; -1 without one.

        Args:
            owners: Keys of the weights, in the same order.
            weights: Strided weights.
            among: Total number of weights. The more records of each are kept, the smaller are the samples of large weights.
            step: Step of the run.

        Returns:
            None if one of them has no dense elements.
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
            rows.append([self._ratio(probe, now, history, step) for probe in self._change_probes])
            if not history or history[-1].step < step:
                history.append(_Earlier(step, now))
        return _Columns(tuple(probe.name for probe in self._change_probes), _stacked(rows))

    def forget(self) -> None:
        """Forget all records, because the weights have been replaced."""
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
    """Return 1 if the tensors are close by the definition of `numpy.allclose`, else 0."""
    rtol, atol, equal_nan = float(probe.arguments[0]), float(probe.arguments[1]), bool(probe.arguments[2])
    wide = wide_float(now.device)
    new, old = now.to(wide), before.to(wide)
    return torch.isclose(new, old, rtol=rtol, atol=atol, equal_nan=equal_nan).all().to(wide)


def _zero(now: Tensor) -> Tensor:
    return torch.zeros((), dtype=wide_float(now.device), device=now.device)


def _stacked(rows: list[list[Tensor]]) -> HostCopy:
    """Stack values by tensor and probe as a matrix of shape (probes, tensors) on one device."""
    return HostCopy(stacked([figure for row in rows for figure in row]).reshape(len(rows), -1).T)
