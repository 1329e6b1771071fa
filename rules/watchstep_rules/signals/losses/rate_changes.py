"""Learning rates that jump or fall at once, as recorded: ``optimizer:learning_rate/0`` has a row wherever it changes."""

from __future__ import annotations

import re

import numpy as np
from pydantic import BaseModel, ConfigDict

from watchstep.format.block import Block
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.signals.tensor_selection import rows_where

_NAME = re.compile(r"(?:.*\.)?optimizer(?:_\d+)?:learning_rate/")
_WORDS = re.compile(
    r"; (?P<name>\S+:learning_rate/\S*) (?:fell|rose) from (?P<before>\S+) to (?P<after>\S+) at step (?P<step>\d+)$"
)
_ABRUPT = 3.0
_TRAIN = MODES.index("train")


class RateChange(BaseModel):
    """A learning rate that became at least three times as large, or a third, from one value to the next.

    Attributes:
        name: the metric; of several that changed at one step the one that changed most.
        step: of the first update with the new value.
        before: the value before.
        after: the new value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    step: int
    before: float
    after: float

    @property
    def words(self) -> str:
        """To follow a finding's message."""
        verb = "fell" if self.after < self.before else "rose"
        return f"; {self.name} {verb} from {self.before:.3g} to {self.after:.3g} at step {self.step}"

    @classmethod
    def said_in(cls, message: str) -> RateChange | None:
        """The change that a finding's message ends with; None where it names none."""
        found = _WORDS.search(message)
        if found is None:
            return None
        try:
            before, after = float(found["before"]), float(found["after"])
        except ValueError:
            return None
        return cls(name=found["name"], step=int(found["step"]), before=before, after=after)


class Rates(BaseModel):
    """The last value of each learning rate, and the last change that was abrupt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    last: dict[str, float] = {}
    change: RateChange | None = None


def follow(rates: Rates, block: Block) -> tuple[Rates, list[RateChange]]:
    """Follow the learning rates through a block of whole steps.

    Returns:
        What is to be kept, and the abrupt changes, by step: the one before the block first. Of several workers the lowest counts.
    """
    rows = np.flatnonzero(
        rows_where(block, _is_rate) & (block.mode == _TRAIN) & (block.statistics.finite > 0)
    )
    changes = [] if rates.change is None else [rates.change]
    if not len(rows):
        return rates, changes
    last = dict(rates.last)
    held = block.statistics
    lowest: dict[tuple[int, str], float] = {}
    for row in rows[np.lexsort((block.worker[rows], block.step[rows]))].tolist():
        lowest.setdefault((int(block.step[row]), block.info(row).name), float(held.mean[row]))
    for (step, name), value in sorted(lowest.items()):
        before = last.get(name, value)
        last[name] = value
        # A rate that rises from zero begins to warm up.
        if (
            min(before, value) < 0
            or before == 0
            or max(before, value) < _ABRUPT * min(before, value)
            or before == value
        ):
            continue
        change = RateChange(name=name, step=step, before=before, after=value)
        if changes and changes[-1].step == step:
            if _ratio(change) > _ratio(changes[-1]):
                changes[-1] = change
        else:
            changes.append(change)
    return Rates(last=last, change=changes[-1] if changes else None), changes


def last_before(changes: list[RateChange], step: int, within: int) -> RateChange | None:
    """The last change up to a step, if it lies at most so many steps before."""
    change = next((one for one in reversed(changes) if one.step <= step), None)
    return change if change is not None and step - change.step <= within else None


def _ratio(change: RateChange) -> float:
    low, high = sorted((change.before, change.after))
    return high / low if low > 0 else np.inf


def _is_rate(info: TensorInfo) -> bool:
    return info.role == "metric" and _NAME.match(info.name) is not None
