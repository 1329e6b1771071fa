"""Series written short: ``1e-3x100 1e-9x20 _ NaN``. After Prometheus' unit tests of rules, with counts that count.

| written | means |
|---|---|
| ``3`` | 3, once |
| ``3x4`` | 3 3 3 3 |
| ``1+2x4`` | 1 3 5 7 |
| ``7-2x3`` | 7 5 3 |
| ``1*10x3`` | 1 10 100 |
| ``_``, ``_x5`` | nothing recorded, once or five times |
| ``NaN``, ``Inf``, ``-Inf`` | what is no number; with a count as well |

A count is how many values there are, not how many follow the first, as in Prometheus.
"""

from __future__ import annotations

import re

MOST_VALUES = 1_000_000

_NUMBER = r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[nN]a[nN]|[iI]nf)"
_WORD = re.compile(
    rf"(?:(?P<missing>_)|(?P<first>{_NUMBER})(?:(?P<sign>[+*-])(?P<change>{_NUMBER}))?)(?:x(?P<count>\d+))?"
)


def values_of(text: str) -> list[float | None]:
    """The values of a series, None where nothing was recorded.

    Raises:
        ValueError: a word is none of the notation, or there are more than `MOST_VALUES`.
    """
    values: list[float | None] = []
    for word in text.split():
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(f"{word[:80]!r} is no value: write 3, 3x4, 1+2x4, 7-2x3, 1*10x3, _, NaN or Inf")
        count = int(found["count"] or 1)
        if found["sign"] and not found["count"]:
            raise ValueError(
                f"{word[:80]!r} says how values change, but not how many there are: {word[:60]}x10"
            )
        if len(values) + count > MOST_VALUES:
            raise ValueError(f"over {MOST_VALUES} values")
        values.extend([None] * count if found["missing"] else _written(found, count))
    return values


def _written(found: re.Match[str], count: int) -> list[float]:
    first = float(found["first"])
    if not found["sign"]:
        return [first] * count
    change = float(found["change"])
    if found["sign"] == "*":
        return [_product(first, change, place) for place in range(count)]
    step = -change if found["sign"] == "-" else change
    return [first + place * step for place in range(count)]


def _product(first: float, factor: float, times: int) -> float:
    try:
        return first * factor**times
    except OverflowError:
        return float("inf") if first > 0 else float("-inf")
