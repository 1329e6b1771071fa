"""Tolerances for comparing two runs or traces: relative differences that count as equal, by dtype.

Rounding differs where the order of a sum does: with another number of threads, another library or another device. So a tolerance is a number of
*unit roundoffs* u of the dtype, the largest relative error of one rounding to nearest: 2**-24 for float32 (IEEE 754), 2**-8 for bfloat16. The
default numbers are measured (docs/decisions/168-tolerances-are-multiples-of-the-unit-roundoff.md): with one thread and with two, figures of a
first step differ by up to 120 u. That would be half of the value for bfloat16, so narrow dtypes have fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.statistics import Floats

UNIT_ROUNDOFF: Mapping[str, float] = MappingProxyType(
    {
        "float64": 2.0**-53,
        "float32": 2.0**-24,
        "float16": 2.0**-11,
        "bfloat16": 2.0**-8,
        "float8_e4m3fn": 2.0**-4,
        "float8_e4m3fnuz": 2.0**-4,
        "float8_e5m2": 2.0**-3,
        "float8_e5m2fnuz": 2.0**-3,
        "complex64": 2.0**-24,
        "complex128": 2.0**-53,
    }
)
"""Half the distance from 1 to the next number of a dtype: 2**-p for a mantissa of p bits, with the hidden one."""

DEFAULT_UNITS: Mapping[str, int] = MappingProxyType(
    {
        "float64": 256,
        "float32": 256,
        "float16": 32,
        "bfloat16": 16,
        "float8_e4m3fn": 4,
        "float8_e4m3fnuz": 4,
        "float8_e5m2": 4,
        "float8_e5m2fnuz": 4,
        "complex64": 256,
        "complex128": 256,
    }
)
"""Number of unit roundoffs that count as equal by default."""


@dataclass(frozen=True)
class Tolerances:
    """Relative differences that count as equal.

    Attributes:
        by_dtype: dtype → tolerance. Other dtypes, such as integers, have the tolerance 0.
    """

    by_dtype: Mapping[str, float] = field(
        default_factory=lambda: {name: DEFAULT_UNITS[name] * unit for name, unit in UNIT_ROUNDOFF.items()}
    )

    @classmethod
    def uniform(cls, tolerance: float) -> Tolerances:
        """Return the same tolerance for all dtypes with fractions; 0 compares bits.

        Raises:
            ConfigError: the tolerance is negative or not a number.
        """
        return cls(dict.fromkeys(UNIT_ROUNDOFF, _checked(tolerance)))

    @classmethod
    def parse(cls, words: Sequence[str]) -> Tolerances:
        """Return the defaults, changed by words such as ``1e-5`` (all dtypes) and ``float32=1e-5``.

        Raises:
            ConfigError: a word is invalid.
        """
        tolerances = cls()
        for word in words:
            name, separator, number = word.rpartition("=")
            try:
                value = _checked(float(number))
            except ValueError:
                raise ConfigError(
                    f"tolerance {word!r} is not a number", "use e.g. 1e-5 or float32=1e-5"
                ) from None
            if not separator:
                tolerances = cls.uniform(value)
            elif name in UNIT_ROUNDOFF:
                tolerances = cls({**tolerances.by_dtype, name: value})
            else:
                raise ConfigError(
                    f"tolerance {word!r}: unknown dtype {name!r}", f"use one of {', '.join(UNIT_ROUNDOFF)}"
                )
        return tolerances

    @property
    def is_exact(self) -> bool:
        """Whether only equal bits are equal."""
        return not any(self.by_dtype.values())

    def of(self, dtype: str) -> float:
        """Return the tolerance of a dtype."""
        return self.by_dtype.get(dtype, 0.0)

    def largest(self, dtypes: Sequence[str]) -> float:
        """Return the largest tolerance of some dtypes; that of float64 without any."""
        return max(map(self.of, dtypes), default=self.of("float64"))


@dataclass(frozen=True)
class ElementDifference:
    """The element at which two arrays differ most.

    Attributes:
        index: of the element.
        a: its value in the first array; real and imaginary parts count as two elements.
        b: its value in the second array.
        relative: the difference divided by the scale; NaN if one of both is not finite.
        elements: number of elements that differ.
    """

    index: tuple[int, ...]
    a: float
    b: float
    relative: float
    elements: int


def differing_element(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> ElementDifference | None:
    """Compare arrays of the same shape, element by element.

    Elements differ if ``|a - b| > tolerance * scale``. The scale is the larger magnitude of both, and at least the root mean square of the finite
    elements, because an element close to zero by cancellation has no significant digits. NaN equals NaN.

    Args:
        a: of any real or complex dtype.
        b: of the same shape.
        tolerance: 0 compares values.
    """
    x, y = _real(a), _real(b)
    with np.errstate(all="ignore"):
        distance = np.abs(x - y)
        differs = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        scale = np.fmax(np.fmax(np.abs(x), np.abs(y)), np.fmax(_rms(x), _rms(y)))
        relative = distance / scale
        differs &= ~(np.isfinite(distance) & (distance <= tolerance * scale))
    places = np.flatnonzero(differs)
    if not len(places):
        return None
    flat = np.where(np.isfinite(relative.reshape(-1)[places]), relative.reshape(-1)[places], np.inf)
    place = int(places[np.argmax(flat)])
    index = tuple(int(number) for number in np.unravel_index(place, x.shape))
    return ElementDifference(index, float(x[index]), float(y[index]), float(relative[index]), len(places))


def _real(values: NDArray[Any]) -> Floats:
    if np.iscomplexobj(values):
        values = np.stack([values.real, values.imag], axis=-1)
    return np.asarray(values, np.float64)


def _rms(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(finite * finite))) if len(finite) else 0.0


def _checked(tolerance: float) -> float:
    if not tolerance >= 0:
        raise ConfigError(
            f"tolerance {tolerance} is negative or not a number", "use 0 for equal bits, or e.g. 1e-5"
        )
    return tolerance
