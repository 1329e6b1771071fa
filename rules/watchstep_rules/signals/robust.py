"""Robust statistics: median, quantiles and spread, in which single outliers do not count; and rounding to four digits for state."""

from __future__ import annotations

import numpy as np

from watchstep.format.statistics import Floats

_NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""


def medians(windows: Floats) -> Floats:
    """The median of each row, as `numpy.median` gives it, for narrow windows some twenty times as fast; NaN where any is.

    Args:
        windows: shape (rows, width), width at least 1.
    """
    ordered = np.sort(windows, axis=1)  # in vector registers, where partitioning goes row by row
    width = ordered.shape[1]
    middle = ordered[:, width // 2]
    if width % 2 == 0:
        middle = (ordered[:, width // 2 - 1] + middle) / 2
    found: Floats = np.where(np.isnan(ordered[:, -1]), np.nan, middle)
    return found


def medians_of_known(windows: Floats) -> Floats:
    """The median of each row's values that are not NaN, as `numpy.nanmedian` gives it; NaN where there is none.

    Args:
        windows: shape (rows, width), width at least 1.
    """
    ordered = np.sort(windows, axis=1)  # NaN come last
    known, row = np.count_nonzero(~np.isnan(ordered), axis=1), np.arange(len(ordered))
    low, high = (
        ordered[row, np.maximum(known - 1, 0) // 2],
        ordered[row, np.minimum(known // 2, ordered.shape[1] - 1)],
    )
    found: Floats = np.where(known % 2 == 1, low, (low + high) / 2)
    return np.where(known == 0, np.nan, found)


def quantiles(windows: Floats, share: float) -> Floats:
    """A quantile of each row, between values by straight lines, as `numpy.quantile` gives it; NaN where any is.

    Args:
        windows: shape (rows, width), width at least 1.
        share: 0 … 1.
    """
    ordered = np.sort(windows, axis=1)
    place = share * (ordered.shape[1] - 1)
    below = int(place)
    low, high = ordered[:, below], ordered[:, min(below + 1, ordered.shape[1] - 1)]
    part = place - below
    with np.errstate(invalid="ignore", over="ignore"):
        apart = high - low
        found = high - apart * (1 - part) if part >= 0.5 else low + apart * part
    return np.where(np.isnan(ordered[:, -1]), np.nan, found)


def robust_spread(windows: Floats) -> Floats:
    """1.4826 times the median absolute deviation: the standard deviation, were values normal (Hampel 1974).

    Args:
        windows: shape (rows, width).
    """
    return _NORMAL * medians(np.abs(windows - medians(windows)[:, None]))


_POWERS = 10.0 ** np.arange(23)
"""Those that float64 holds exactly: dividing a whole number by one gives the float next to the decimal."""
_UNSURE = 1e-6


def short(value: float) -> float:
    """A number to four digits."""
    return float(f"{value:.4g}")


def four_digits(values: Floats) -> Floats:
    """Numbers to four digits, each exactly as `short` gives it.

    Args:
        values: float64 of shape (n,).
    """
    held = np.array(values, np.float64)
    places = np.flatnonzero(np.isfinite(held) & (held != 0))
    some = np.abs(held[places])
    exponent = np.floor(np.log10(some)).astype(np.int64)
    exponent[some < 1e-300] = 0  # by hand, below
    shift = 3 - exponent
    known = np.abs(shift) < len(_POWERS) - 1
    power = _POWERS[np.where(known, np.abs(shift), 0)]
    scaled = np.where(shift >= 0, some * power, some / power)
    whole = np.rint(scaled)
    rounded = np.where(shift >= 0, whole / power, whole * power)
    # The logarithm may be off by one at a power of ten, and a half may go either way: these by hand.
    sure = known & (scaled >= 1000) & (scaled < 9999) & (np.abs(scaled - np.floor(scaled) - 0.5) > _UNSURE)
    held[places] = np.copysign(rounded, held[places])
    for place in places[~sure].tolist():
        held[place] = short(float(values[place]))
    return held
