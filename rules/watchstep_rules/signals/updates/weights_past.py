"""What `WeightNotUpdating` remembers: of each parameter its gradients and updates, and of the model what goes on in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.statistics import Floats, rms, zero_share
from watchstep_rules.signals.layers import is_weighted
from watchstep_rules.signals.losses.progress import LossProgress
from watchstep_rules.signals.rounding import short
from watchstep_rules.signals.updates.not_in_optimizer import OptimizedWeights

HALF = ("float16", "bfloat16")
FORGET = 0.9
DENSE = 8
_ABRUPT = 0.1  # of the usual update; a cosine to zero leaves less at its last records
_RAN_DOWN = 1000
_LEAST_RECORDS = 10
_LEAST_STEPS = 50
"""At a millionth a step weights have changed by a twenty-thousandth then. No sound program of the part ``tune`` raised an alarm by it."""
_GROWS = 2
"""By so much the first ten updates may be exceeded: momentum has built up by then; a warm-up, and a search for a rate, exceed it by more."""
_HIGH = 0.5  # of the first losses


class WeightHistory(NamedTuple):
    """What is kept of a parameter.

    Attributes:
        last: root mean square of the last gradient; negative before the first.
        largest: the largest so far.
        dense: whether at least half of the last gradient's elements were not zero.
        ratio: of the last update that was not none, over the weight; 0 before the first.
        usual: the largest such ratio, forgotten by a tenth at each.
        since_zero: gradients since the last that was zero everywhere, counted up to eight.
    """

    last: float = -1.0
    largest: float = 0.0
    dense: bool = False
    ratio: float = 0.0
    usual: float = 0.0
    since_zero: int = DENSE

    @property
    def stopped(self) -> bool:
        """Whether updates that end here end at once, and not as a learning rate that runs down to zero."""
        return self.ratio >= _ABRUPT * self.usual

    def is_alive(self, share: float) -> bool:
        """Whether its gradients are neither zero now and then nor a small share of what they were."""
        return self.since_zero >= DENSE and self.last > 0 and self.last >= share * self.largest

    @property
    def moved(self) -> bool:
        """Whether it has ever been updated."""
        return self.ratio > 0


class WeightPace(NamedTuple):
    """How fast weights are.

    Attributes:
        fastest: the largest ratio of any so far.
        down: records in a row in which the fastest had run down.
        since: the step of the first of these.
        early: the largest ratio of the first ten records.
        begun: the step of the first of these.
        records: how many there were, counted up to ten.
    """

    fastest: float = 0.0
    down: int = 0
    since: int = 0
    early: float = 0.0
    begun: int = 0
    records: int = 0

    def after(self, ran_down: float, step: int, ratio: float) -> WeightPace:
        """With a step whose fastest weight has such a ratio."""
        value = short(ratio)
        fastest = max(self.fastest, value)
        is_early = self.records < _LEAST_RECORDS
        early = max(self.early, value) if is_early else self.early
        begun = self.begun if self.records else step
        records = self.records + is_early
        if not ratio <= ran_down <= fastest / _RAN_DOWN:
            return WeightPace(fastest, early=early, begun=begun, records=records)
        return WeightPace(fastest, self.down + 1, self.since if self.down else step, early, begun, records)

    def has_run_down(self, step: int) -> bool:
        """Whether it did long before the end: a schedule's last steps are few beside those before."""
        return self.down >= _LEAST_RECORDS and 4 * (step - self.since) >= step

    def never_began(self, ran_down: float, step: int) -> bool:
        """Whether weights have been moving all the time, but never by an amount that counts; a rate that is warmed up grows."""
        is_slow = 0 < self.fastest <= min(ran_down, _GROWS * self.early)
        return is_slow and self.records >= _LEAST_RECORDS and step - self.begun >= _LEAST_STEPS


class Figures(NamedTuple):
    """Of each row: root mean square, that over the weight's (the former, where that is not known), share of zeros."""

    rms: Floats
    ratio: Floats
    zero: Floats

    @classmethod
    def of(cls, block: Block) -> Figures:
        """The figures of a block."""
        size = np.nan_to_num(rms(block.statistics), nan=0.0)
        ratio = block.probes.get("update_ratio", np.full(len(block), np.nan))
        return cls(size, np.where(np.isfinite(ratio), ratio, size), zero_share(block.statistics))


@dataclass
class Weights:
    """The state of `WeightNotUpdating` while a block is judged."""

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
        """Whether there is a loss, and none has come far."""
        return bool(self.losses) and not any(loss.converged(_HIGH) for loss in self.losses.values())

    def of(self, block: Block, row: int) -> WeightHistory:
        """Of a row's parameter."""
        return self.parameters.get(parameter_name(block, row), WeightHistory())

    def follow(self, block: Block, rows: NDArray[np.intp], figures: Figures) -> list[int]:
        """Take in a step's gradients, outputs and losses; gives the rows of its updates."""
        updates = []
        for row in map(int, rows):
            info = block.info(row)
            if block.statistics.finite[row] == 0:
                continue
            if info.role == "update":
                updates.append(row)
            elif info.role == "gradient":
                size, before = short(figures.rms[row]), self.of(block, row)
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
        """Take in a step's updates."""
        self.held = self.held.with_updates(block, updates) if updates else self.held
        for row in updates:
            ratio, before = short(figures.ratio[row]), self.of(block, row)
            if ratio > threshold:
                usual = max(ratio, short(FORGET * before.usual))
                self.parameters[parameter_name(block, row)] = before._replace(ratio=ratio, usual=usual)


def parameter_name(block: Block, row: int) -> str:
    """Of the parameter that a row of a gradient or an update speaks of: ``name@worker``."""
    return f"{block.info(row).name.rpartition(':')[0]}@{block.worker[row]}"
