"""Numbers to four digits: what is kept of a tensor is little."""

from __future__ import annotations

import numpy as np

from watchstep.format.statistics import Floats

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
