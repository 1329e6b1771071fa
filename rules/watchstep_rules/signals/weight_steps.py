"""The history that `WeightNotUpdating` needs: gradients and updates of each parameter, and the steps at which updates may be missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.statistics import Floats, rms, zero_share
from watchstep.format.tensors import TensorInfo
from watchstep_rules.signals.loss_progress import LossProgress
from watchstep_rules.signals.robust import round_significant, round_value
from watchstep_rules.signals.series import step_numbers
from watchstep_rules.signals.tensor_selection import (
    CatalogueCache,
    has_role,
    is_normalization,
    is_weighted,
    rows_where,
    tensors_where,
)
from watchstep_rules.signals.update_evidence import OptimizedWeights

HALF = ("float16", "bfloat16")
FORGET = 0.9
DENSE = 8
_ABRUPT = 0.1  # of the usual update; a cosine to zero leaves less at its last records
_RAN_DOWN = 1000
_LEAST_RECORDS = 10
_LEAST_STEPS = 50
"""At a ratio of 1e-6 per step, weights have changed by 1/20,000 by then. No healthy program of the ``tune`` split raised an alarm."""
_GROWS = 2
"""Factor by which later updates may exceed the first ten, because momentum builds up. A warm-up or a rate search exceeds it by more."""
_HIGH = 0.5  # of the first losses


class WeightHistory(NamedTuple):
    """State of a parameter.

    Attributes:
        last: rms of the last gradient; negative before the first.
        largest: largest rms of a gradient so far.
        dense: whether at least half of the last gradient's elements were nonzero.
        ratio: ratio of the last effective update to the weight; 0 before the first.
        usual: largest such ratio, decayed by a tenth at each update.
        since_zero: number of gradients since the last all-zero gradient, up to eight.
    """

    last: float = -1.0
    largest: float = 0.0
    dense: bool = False
    ratio: float = 0.0
    usual: float = 0.0
    since_zero: int = DENSE

    @property
    def stopped(self) -> bool:
        """Whether updates that end here end abruptly, not like a learning rate that decays to zero."""
        return self.ratio >= _ABRUPT * self.usual

    def is_alive(self, share: float) -> bool:
        """Whether its gradients are neither occasionally zero nor a small share of their maximum."""
        return self.since_zero >= DENSE and self.last > 0 and self.last >= share * self.largest

    @property
    def moved(self) -> bool:
        """Whether it has ever been updated."""
        return self.ratio > 0


class WeightPace(NamedTuple):
    """How fast the weights change.

    Attributes:
        fastest: largest ratio of any weight so far.
        down: number of consecutive records in which the fastest weight had run down.
        since: step of the first of these records.
        early: largest ratio in the first ten records.
        begun: step of the first record.
        records: number of records, up to ten.
        peaked: step of the largest ratio so far.
    """

    fastest: float = 0.0
    down: int = 0
    since: int = 0
    early: float = 0.0
    begun: int = 0
    records: int = 0
    peaked: int = 0

    def after(self, ran_down: float, step: int, ratio: float) -> WeightPace:
        """Add a step, given the ratio of its fastest weight."""
        value = round_value(ratio)
        fastest = max(self.fastest, value)
        peaked = step if value > self.fastest else self.peaked
        is_early = self.records < _LEAST_RECORDS
        early = max(self.early, value) if is_early else self.early
        begun = self.begun if self.records else step
        records = self.records + is_early
        if not ratio <= ran_down <= fastest / _RAN_DOWN:
            return WeightPace(fastest, early=early, begun=begun, records=records, peaked=peaked)
        since = self.since if self.down else step
        return WeightPace(fastest, self.down + 1, since, early, begun, records, peaked)

    def has_run_down(self, step: int) -> bool:
        """Whether updates ran down long before this step. The last steps of a schedule are few compared with the earlier ones."""
        return self.down >= _LEAST_RECORDS and 4 * (step - self.since) >= step

    def is_past_warm_up(self, step: int) -> bool:
        """Whether there are enough records, and updates have not become larger for long, so that weights which have not moved yet will not."""
        is_long = self.records >= _LEAST_RECORDS and step - self.begun >= _LEAST_STEPS
        return is_long and 2 * (step - self.peaked) >= step - self.begun

    def never_began(self, ran_down: float, step: int) -> bool:
        """Whether weights always moved, but never by a significant amount. The ratio of a warm-up grows."""
        is_slow = 0 < self.fastest <= min(ran_down, _GROWS * self.early)
        return is_slow and self.records >= _LEAST_RECORDS and step - self.begun >= _LEAST_STEPS


class Figures(NamedTuple):
    """Statistics of each row: rms, ratio of the rms to that of the weight (the rms itself if unknown), share of zeros."""

    rms: Floats
    ratio: Floats
    zero: Floats

    @classmethod
    def of(cls, block: Block) -> Figures:
        """Compute the statistics of a block."""
        size = np.nan_to_num(rms(block.statistics), nan=0.0)
        ratio = block.probes.get("update_ratio", np.full(len(block), np.nan))
        return cls(size, np.where(np.isfinite(ratio), ratio, size), zero_share(block.statistics))


@dataclass
class Weights:
    """State of `WeightNotUpdating` during the evaluation of a block."""

    parameters: dict[str, WeightHistory]
    computed: dict[str, int]
    nothing_lost: dict[str, bool]
    still: int
    pace: WeightPace
    losses: dict[str, LossProgress]
    held: OptimizedWeights

    def __post_init__(self) -> None:
        self.parameters, self.computed = dict(self.parameters), dict(self.computed)
        self.nothing_lost, self.losses = dict(self.nothing_lost), dict(self.losses)

    @property
    def loss_is_high(self) -> bool:
        """Whether there is a loss, and no loss has converged."""
        return bool(self.losses) and not any(loss.converged(_HIGH) for loss in self.losses.values())

    def of(self, block: Block, row: int) -> WeightHistory:
        """Return the state of a row's parameter."""
        return self.parameters.get(parameter_name(block, row), WeightHistory())

    def follow(self, block: Block, rows: NDArray[np.intp], figures: Figures) -> list[int]:
        """Add a step's gradients, outputs and losses; return the rows of its updates."""
        updates = []
        for row in map(int, rows):
            info = block.info(row)
            if block.statistics.finite[row] == 0:
                continue
            if info.role == "update":
                updates.append(row)
            elif info.role == "gradient":
                size, before = round_value(figures.rms[row]), self.of(block, row)
                self.parameters[parameter_name(block, row)] = before._replace(
                    last=size,
                    largest=max(size, before.largest),
                    dense=bool(figures.zero[row] <= 0.5),
                    since_zero=min(DENSE, before.since_zero + 1) if size > 0 else 0,
                )
            elif info.role == "loss":
                name = f"{info.name}@{block.worker[row]}"
                value = float(block.statistics.mean[row])
                self.nothing_lost[name] = value == 0
                self.losses[name] = self.losses.get(name, LossProgress()).after(value)
            elif is_weighted(info):
                self.computed[info.module] = info.order
        return updates

    def move(self, block: Block, figures: Figures, updates: list[int], threshold: float) -> None:
        """Add a step's updates."""
        self.held = self.held.with_updates(block, updates) if updates else self.held
        for row in updates:
            ratio, before = round_value(figures.ratio[row]), self.of(block, row)
            if ratio > threshold:
                usual = max(ratio, round_value(FORGET * before.usual))
                self.parameters[parameter_name(block, row)] = before._replace(ratio=ratio, usual=usual)


def parameter_name(block: Block, row: int) -> str:
    """Return the parameter of a gradient or update row, as ``name@worker``."""
    return f"{block.info(row).name.rpartition(':')[0]}@{block.worker[row]}"


Flags = NDArray[np.bool_]
Rows = NDArray[np.intp]


class UpdateThresholds(Protocol):
    """The thresholds of the rule, from its parameters."""

    @property
    def threshold(self) -> float:
        """Ratio up to which an update counts as missing."""

    @property
    def rounded(self) -> float:
        """Share of zeros at or above which an update may be lost to rounding."""

    @property
    def ran_down(self) -> float:
        """Ratio of the fastest weight up to which the learning rate may have run down."""


class Stretch(NamedTuple):
    """Rows of whole steps, ``first`` … ``end - 1``: one step to evaluate, or several calm steps.

    Attributes:
        first: first row.
        end: row after the last.
        is_calm: whether the steps need no evaluation.
        pace: pace after the steps.
    """

    first: int
    end: int
    is_calm: bool
    pace: WeightPace


@dataclass(frozen=True)
class StepsOfWeights:
    """n rows in train mode, by step.

    Attributes:
        block: the rows.
        figures: statistics of each row.
        limits: thresholds of the rule.
        numbers: index of each row's step, from 0.
        names: names of the parameters, ``name@worker``.
        parameter: index into ``names`` of each gradient or update row; -1 for other rows.
        gradients, updates: rows with a finite element.
    """

    block: Block
    figures: Figures
    limits: UpdateThresholds
    numbers: Rows
    names: list[str]
    parameter: Rows
    gradients: Rows
    updates: Rows

    @classmethod
    def of(cls, block: Block, figures: Figures, limits: UpdateThresholds) -> StepsOfWeights:
        """Prepare the steps of a block."""
        is_gradient, is_update = (
            rows_where(block, has_role, role) & (block.statistics.finite > 0)
            for role in ("gradient", "update")
        )
        names, parameter = _parameters(block, is_gradient | is_update)
        return cls(
            block,
            figures,
            limits,
            step_numbers(block),
            names,
            parameter,
            np.flatnonzero(is_gradient),
            np.flatnonzero(is_update),
        )

    def stretches(self, past: Weights) -> Iterator[Stretch]:
        """Yield all rows in stretches. Take in each stretch before requesting the next."""
        if not len(self.block):
            return
        pace = past.pace
        starts = np.flatnonzero(np.diff(self.numbers, prepend=-1))
        ends = [*starts[1:].tolist(), len(self.block)]
        steps = self.block.step[starts].tolist()
        suspicious = self._suspicious(past).tolist()
        fastest = self._fastest().tolist()
        calm_start: int | None = None
        for number, (first, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
            before = pace
            if fastest[number] >= 0:
                pace = pace.after(self.limits.ran_down, steps[number], fastest[number])
            too_slow = pace.has_run_down(steps[number]) or pace.never_began(
                self.limits.ran_down, steps[number]
            )
            if not suspicious[number] and not too_slow:
                calm_start = first if calm_start is None else calm_start
                continue
            if calm_start is not None:
                yield Stretch(calm_start, first, is_calm=True, pace=before)
                calm_start = None
            yield Stretch(first, end, is_calm=False, pace=pace)
        if calm_start is not None:
            yield Stretch(calm_start, len(self.block), is_calm=True, pace=pace)

    def take_in(self, past: Weights, stretch: Stretch) -> None:
        """Add calm steps, with the same result as following each step separately."""
        block, statistics = self.block, self.block.statistics
        updates = _between(self.updates, stretch)
        if len(updates):
            past.still, past.pace = 0, stretch.pace
            past.held = self._optimized(past.held, updates)
        self._take_in_gradients(past, _between(self.gradients, stretch))
        self._take_in_updates(past, updates)
        rows = np.arange(stretch.first, stretch.end)
        rows = rows[statistics.finite[stretch.first : stretch.end] > 0]
        is_loss = tensors_where(block.catalogue, has_role, "loss")[block.tensor[rows]]
        for row in rows[is_loss].tolist():
            name, value = f"{block.info(row).name}@{block.worker[row]}", float(statistics.mean[row])
            past.nothing_lost[name] = value == 0
            past.losses[name] = past.losses.get(name, _UNSEEN).after(value)
        computes = tensors_where(block.catalogue, _is_computed)
        seen = block.tensor[rows[computes[block.tensor[rows]]]]
        found, first = np.unique(seen, return_index=True)
        for tensor in found[np.argsort(first)].tolist():
            past.computed[block.catalogue[tensor].module] = block.catalogue[tensor].order

    def _relevant_updates(self) -> Rows:
        """Return updates of matrices, or all updates of a step without a matrix."""
        wide = tensors_where(self.block.catalogue, _is_wide)
        is_wide = wide[self.block.tensor[self.updates]]
        some = self._by_step(self.updates[is_wide])
        return self.updates[is_wide | ~some[self.numbers[self.updates]]]

    def _fastest(self) -> Floats:
        """Return the largest ratio of each step's updates; negative without updates."""
        fastest = np.full(int(self.numbers[-1]) + 1, -1.0)
        updates = self._relevant_updates()
        np.maximum.at(fastest, self.numbers[updates], self.figures.ratio[updates])
        return fastest

    def _suspicious(self, past: Weights) -> Flags:
        """Return the steps that need separate evaluation: all that may have findings, and some without."""
        infos, tensor = self.block.catalogue, self.block.tensor
        updates = self._relevant_updates()
        missing = self.figures.ratio[updates] <= self.limits.threshold
        half = tensors_where(infos, _is_half)[tensor[updates]]
        lost = half & (self.figures.zero[updates] >= self.limits.rounded)
        vector = ~tensors_where(infos, _is_wide)[tensor[updates]]
        gain = tensors_where(infos, is_half_gain)[tensor[self.updates]]
        unmoved = self.updates[gain & (self.figures.zero[self.updates] >= self.limits.rounded)]
        first = np.full(len(self.names), len(self.block), np.int64)
        np.minimum.at(first, self.parameter[self.gradients], self.numbers[self.gradients])
        has_gradient = [past.parameters.get(name, _NEW).last >= 0 for name in self.names]
        first[np.array(has_gradient, np.bool_)] = -1
        starved = first[self.parameter[updates]] > self.numbers[updates]
        suspicious = self._by_step(updates[missing | lost | vector | starved]) | self._by_step(unmoved)
        if "changed" in self.block.probes:
            not_in_optimizer = rows_where(self.block, has_role, "not_in_optimizer")
            suspicious |= self._by_step(np.flatnonzero(not_in_optimizer))
        return suspicious

    def _by_step(self, rows: Rows) -> Flags:
        flags = np.zeros(int(self.numbers[-1]) + 1 if len(self.numbers) else 0, np.bool_)
        flags[self.numbers[rows]] = True
        return flags

    def _optimized(self, before: OptimizedWeights, updates: Rows) -> OptimizedWeights:
        infos = self.block.catalogue
        size = _sizes.get(infos, "", lambda: np.array([math.prod(info.shape) for info in infos], np.int64))
        key = self.numbers[updates].astype(np.int64) * len(infos) + self.block.tensor[updates]
        present = np.zeros(int(key.max()) + 1 - (base := int(key.min())), np.bool_)
        present[key - base] = True  # counts a tensor once for all workers
        step, tensor = np.divmod(np.flatnonzero(present) + base, len(infos))
        elements = np.zeros(int(step[-1] - step[0]) + 1, np.int64)
        np.add.at(elements, step - step[0], size[tensor])
        updated = [
            info
            for info, occurs in zip(infos, np.bincount(tensor, minlength=len(infos)), strict=True)
            if occurs
        ]
        module_orders = [info.order for info in updated if is_weighted(info) and len(info.shape) > 1]
        first_order = min([*module_orders, *([before.first] if before.first >= 0 else [])], default=-1)
        return OptimizedWeights(max(before.elements, int(elements.max())), first_order)

    def _take_in_gradients(self, past: Weights, rows: Rows) -> None:
        if not len(rows):
            return
        rows = rows[np.argsort(self.parameter[rows], kind="stable")]
        parameter, size = self.parameter[rows], self.figures.rms[rows]
        starts = np.flatnonzero(np.diff(parameter, prepend=-1))
        ends = np.append(starts[1:], len(rows)) - 1
        last_zero = np.maximum.reduceat(np.where(size == 0, np.arange(len(rows)), -1), starts)
        columns = zip(
            parameter[starts].tolist(),
            (ends - starts + 1).tolist(),
            (ends - last_zero).tolist(),
            (last_zero >= starts).tolist(),
            size[ends].tolist(),
            np.maximum.reduceat(size, starts).tolist(),
            (self.figures.zero[rows[ends]] <= 0.5).tolist(),
            strict=True,
        )
        for index, count, since, some_zero, last, largest, dense in columns:
            before = past.parameters.get(self.names[index], _NEW)
            past.parameters[self.names[index]] = before._replace(
                last=round_value(last),
                largest=max(round_value(largest), before.largest),
                dense=dense,
                since_zero=min(DENSE, since if some_zero else before.since_zero + count),
            )

    def _take_in_updates(self, past: Weights, rows: Rows) -> None:
        """Add the first update of every parameter, then the second, and so on, because the decay depends on the order."""
        ratio = round_significant(self.figures.ratio[rows])
        rows, ratio = rows[ratio > self.limits.threshold], ratio[ratio > self.limits.threshold]
        parameter = self.parameter[rows]
        usual = np.array([past.parameters.get(name, _NEW).usual for name in self.names])
        last = np.full(len(self.names), np.nan)
        for positions in _by_occurrence(parameter):
            parameters = parameter[positions]
            usual[parameters] = np.maximum(ratio[positions], round_significant(FORGET * usual[parameters]))
            last[parameters] = ratio[positions]
        for index in np.flatnonzero(~np.isnan(last)).tolist():
            before = past.parameters.get(self.names[index], _NEW)
            past.parameters[self.names[index]] = before._replace(
                ratio=float(last[index]), usual=float(usual[index])
            )


_sizes: CatalogueCache[NDArray[np.int64]] = CatalogueCache()
_NEW, _UNSEEN = WeightHistory(), LossProgress()


def _is_wide(info: TensorInfo) -> bool:
    return len(info.shape) > 1


def _is_half(info: TensorInfo) -> bool:
    return info.dtype in HALF


def is_half_gain(info: TensorInfo) -> bool:
    """Whether a tensor is of a vector of a normalization layer, in half precision: its gain, or its bias."""
    return _is_half(info) and len(info.shape) == 1 and is_normalization(info)


def _is_computed(info: TensorInfo) -> bool:
    return info.role not in ("update", "gradient", "loss") and is_weighted(info)


def _parameters(block: Block, chosen: Flags) -> tuple[list[str], Rows]:
    """Return the names of the parameters of chosen rows, and the index of each row's parameter."""
    owners = {}
    for tensor in np.unique(block.tensor[chosen]).tolist():
        owners[tensor] = block.catalogue[tensor].name.rpartition(":")[0]
    index_of = {name: number for number, name in enumerate(sorted(set(owners.values())))}
    of_tensor = np.zeros(len(block.catalogue), np.int64)
    for tensor, name in owners.items():
        of_tensor[tensor] = index_of[name]
    workers, worker = np.unique(block.worker, return_inverse=True)
    parameter = np.where(chosen, of_tensor[block.tensor] * len(workers) + worker, -1)
    return [
        f"{name}@{worker_number}" for name in index_of for worker_number in workers.tolist()
    ], parameter.astype(np.intp)


def _between(rows: Rows, stretch: Stretch) -> Rows:
    return rows[np.searchsorted(rows, stretch.first) : np.searchsorted(rows, stretch.end)]


def _by_occurrence(numbers: Rows) -> list[Rows]:
    """Return the positions of the first occurrence of each number, then of the second, and so on."""
    if not len(numbers):
        return []
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    lengths = np.diff([*starts, len(ordered)])
    occurrence = np.arange(len(ordered)) - np.repeat(starts, lengths)
    by_occurrence = np.argsort(occurrence, kind="stable")
    return np.split(order[by_occurrence], np.flatnonzero(np.diff(occurrence[by_occurrence])) + 1)
