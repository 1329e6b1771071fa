"""Whether two records of a tensor may be close element by element, as far as their statistics say.

Elements within ``atol + rtol * |old|`` of each other keep these figures within bounds; so figures outside of them rule closeness
out, and figures within them do not prove it.

- ``x - atol - rtol * |x|`` and ``x + atol + rtol * |x|`` grow with x where ``rtol < 1``, so the least and the largest element
  move by no more than their own tolerance.
- The mean moves by at most the mean tolerance, ``atol + rtol * mean |old|``; so does the mean magnitude.
- The root mean square moves by at most that of the tolerances, ``atol + rtol * rms(old)``, by the triangle inequality.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Derivation, Floats, abs_mean, rms
from watchstep_rules.signals.series import Column

_COUNTS = ("count", "nan", "pos_inf", "neg_inf")
_RECORDED = (*_COUNTS, "min", "max", "mean")


def _derived(figure: Derivation) -> Column:
    return lambda block: figure(block.statistics)


COLUMNS: Mapping[str, Column] = {
    **{name: attrgetter(f"statistics.{name}") for name in _RECORDED},
    "abs_mean": _derived(abs_mean),
    "rms": _derived(rms),
}
"""The figures that are compared."""

Figures = Callable[[str], Floats]
"""Each of `COLUMNS` by its name, float64 of shape (n,); NaN where there is no record."""


def may_be_close(new: Figures, old: Figures, rtol: float, atol: float) -> NDArray[np.bool_]:
    """Whether no figure rules closeness out, bool of shape (n,).

    Args:
        new: of the later records.
        old: of the earlier ones.
        rtol: share of the earlier element.
        atol: whatever the element.
    """
    close = np.ones(len(new("count")), np.bool_)
    for name in _COUNTS:
        close &= new(name) == old(name)
    scales = {"min": "min", "max": "max", "mean": "abs_mean", "abs_mean": "abs_mean", "rms": "rms"}
    for name, scale in scales.items():
        close &= is_within(new(name), old(name), old(scale), rtol, atol)
    return close


def is_within(new: Floats, old: Floats, scale: Floats, rtol: float, atol: float) -> NDArray[np.bool_]:
    """Whether figures moved by ``atol + rtol * |scale|`` at most, or are NaN in both records; bool of shape (n,)."""
    with np.errstate(invalid="ignore"):
        close: NDArray[np.bool_] = np.abs(new - old) <= atol + rtol * np.abs(scale)
    return close | (np.isnan(new) & np.isnan(old))
