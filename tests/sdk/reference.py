"""The statistics row by its definition, in exact arithmetic: a slow, short reference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class ExactRow:
    """A row's figures; sums are exact fractions, extremes and the mean are None where there is none."""

    count: int
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    negative: int
    min: float | None
    max: float | None
    abs_min: float | None
    mean: Fraction | None
    m2: Fraction
    abs_sum: Fraction
    square_sum: Fraction
    histogram: dict[int, int]


def exact_row(values: Sequence[float]) -> ExactRow:
    """The row of a tensor with these elements."""
    finite = [value for value in values if math.isfinite(value)]
    exact = [Fraction(value) for value in finite]
    nonzero = [value for value in finite if value]
    mean = sum(exact, Fraction()) / len(exact) if exact else None
    return ExactRow(
        count=len(values),
        nan=sum(math.isnan(value) for value in values),
        pos_inf=sum(value == math.inf for value in values),
        neg_inf=sum(value == -math.inf for value in values),
        zero=len(finite) - len(nonzero),
        negative=sum(value < 0 for value in finite),
        min=min(finite, default=None),
        max=max(finite, default=None),
        abs_min=min(map(abs, nonzero), default=None),
        mean=mean,
        m2=sum(((value - mean) ** 2 for value in exact), Fraction()) if mean is not None else Fraction(),
        abs_sum=sum(map(abs, exact), Fraction()),
        square_sum=sum((value * value for value in exact), Fraction()),
        histogram=dict(sorted(Counter(map(_bin, nonzero)).items())),
    )


def _bin(value: float) -> int:
    """Found by comparing with powers of two, exactly."""
    size, exponent = Fraction(abs(value)), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    return 2 * exponent + (value < 0)
