"""How often programs write rows of statistics in device memory, where the host decides before it knows what a step costs."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep.capture.steps.session import Session

_EVERY = 100
_DENSE_EVERY = 10
_DENSE_STEPS = 100
_SLOTS = 4
_ALL_SLOTS = 64


@dataclass(frozen=True)
class RowCadence:
    """The cadence of the rows of a collection.

    Attributes:
        every: number of updates from one with rows to the next, after the first 100. Of those, at least every tenth has rows.
        is_fixed: whether the configuration states it: a fixed cadence, or no budget.
    """

    every: int
    is_fixed: bool

    @classmethod
    def of(cls, session: Session, collection: str) -> RowCadence:
        """Return the cadence of a collection."""
        chosen = session.config.chosen.get(collection)
        if chosen is not None and chosen.cadence is not None and chosen.cadence.every is not None:
            return cls(chosen.cadence.every, True)
        return cls(1, True) if session.schedule.budget is None else cls(_EVERY, False)

    @property
    def slots(self) -> int:
        """Row sets that device memory has room for, until the host reads them."""
        return _SLOTS if self.every > 1 else _ALL_SLOTS

    @property
    def first(self) -> int:
        """Number of updates from one with rows to the next among the first updates."""
        return min(self.every, _DENSE_EVERY)

    def after(self, updates: int) -> int:
        """Return the number of updates to the next with rows.

        Args:
            updates: number of updates so far.
        """
        return self.every if updates >= _DENSE_STEPS else self.first
