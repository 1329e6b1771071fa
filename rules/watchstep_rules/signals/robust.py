"""Robust statistics (median, quantiles, spread), which single outliers do not change, and rounding to four digits for rule states."""

from __future__ import annotations

import numpy as np

from watchstep.format.statistics import Floats

_NORMAL = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


def medians(windows: Floats) -> Floats:
    """The median of each row, equal to `numpy.median` and about 20 times faster for narrow windows; NaN if any value is NaN.

    Args:
        windows: shape (rows, width), width at least 1.
    """
    ordered = np.sort(windows, axis=1)  # vectorized, whereas partitioning works row by row
    width = ordered.shape[1]
    middle = ordered[:, width // 2]
    if width % 2 == 0:
        middle = (ordered[:, width // 2 - 1] + middle) / 2
    median: Floats = np.where(np.isnan(ordered[:, -1]), np.nan, middle)
    return median


def nanmedians(windows: Floats) -> Floats:
    """The median of the values in each row that are not NaN, equal to `numpy.nanmedian`; NaN if there are none.

    Args:
        windows: shape (rows, width), width at least 1.
    """
    ordered = np.sort(windows, axis=1)  # NaN is last
    count, row = np.count_nonzero(~np.isnan(ordered), axis=1), np.arange(len(ordered))
    low, high = (
        ordered[row, np.maximum(count - 1, 0) // 2],
        ordered[row, np.minimum(count // 2, ordered.shape[1] - 1)],
    )
    median: Floats = np.where(count % 2 == 1, low, (low + high) / 2)
    return np.where(count == 0, np.nan, median)


def quantiles(windows: Floats, share: float) -> Floats:
    """A quantile of each row with linear interpolation, equal to `numpy.quantile`; NaN if any value is NaN.

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
        quantile = high - apart * (1 - part) if part >= 0.5 else low + apart * part
    return np.where(np.isnan(ordered[:, -1]), np.nan, quantile)


def robust_spread(windows: Floats) -> Floats:
    """1.4826 times the median absolute deviation, which equals the standard deviation for normal values (Hampel 1974).

    Args:
        windows: shape (rows, width).
    """
    return _NORMAL * medians(np.abs(windows - medians(windows)[:, None]))


_POWERS = 10.0 ** np.arange(23)
"""Powers of ten that float64 represents exactly: an integer divided by one of them is the float nearest to the decimal."""
_UNSURE = 1e-6


def round_value(value: float) -> float:
    """A number rounded to four significant digits."""
    return float(f"{value:.4g}")


def round_significant(values: Floats) -> Floats:
    """Numbers rounded to four significant digits, each exactly equal to `round_value`.

    Args:
        values: float64 of shape (n,).
    """
    result = np.array(values, np.float64)
    places = np.flatnonzero(np.isfinite(result) & (result != 0))
    magnitude = np.abs(result[places])
    exponent = np.floor(np.log10(magnitude)).astype(np.int64)
    exponent[magnitude < 1e-300] = 0  # rounded one by one below
    shift = 3 - exponent
    is_exact = np.abs(shift) < len(_POWERS) - 1
    power = _POWERS[np.where(is_exact, np.abs(shift), 0)]
    scaled = np.where(shift >= 0, magnitude * power, magnitude / power)
    whole = np.rint(scaled)
    rounded = np.where(shift >= 0, whole / power, whole * power)
    # The logarithm may be off by one at a power of ten, and a half may be rounded either way: these are rounded one by one.
    is_sure = (
        is_exact & (scaled >= 1000) & (scaled < 9999) & (np.abs(scaled - np.floor(scaled) - 0.5) > _UNSURE)
    )
    result[places] = np.copysign(rounded, result[places])
    for place in places[~is_sure].tolist():
        result[place] = round_value(float(values[place]))
    return result
