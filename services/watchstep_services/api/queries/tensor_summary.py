"""The figures of one tensor's summary."""

from __future__ import annotations

import math
from collections.abc import Callable

from pydantic import BaseModel, Field

from watchstep.format.statistics import DERIVED, StatisticsBatch

_WHOLE = ("count", "nan", "pos_inf", "neg_inf", "zero", "negative")
_REAL = ("min", "max", "mean", "abs_min")
_DERIVED = ("std", "l2", "abs_max", "rms", "zero_share")


class FiguresOutput(BaseModel):
    """Figures of all elements; those from min on are of the finite ones, and null where there is none."""

    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    negative: int
    min: float | None
    max: float | None
    mean: float | None
    abs_min: float | None = Field(description="The smallest magnitude but zero.")
    std: float | None
    l2: float | None
    abs_max: float | None
    rms: float | None
    zero_share: float | None


def _real(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _whole(name: str) -> Callable[[StatisticsBatch], float | None]:
    return lambda batch: int(getattr(batch, name)[0])


def _recorded(name: str) -> Callable[[StatisticsBatch], float | None]:
    return lambda batch: _real(float(getattr(batch, name)[0]))


def _derived(name: str) -> Callable[[StatisticsBatch], float | None]:
    return lambda batch: _real(float(DERIVED[name](batch)[0]))


FIGURES: dict[str, Callable[[StatisticsBatch], float | None]] = {
    **{name: _whole(name) for name in _WHOLE},
    **{name: _recorded(name) for name in _REAL},
    **{name: _derived(name) for name in _DERIVED},
}
"""Name → figure of a batch of one row."""
