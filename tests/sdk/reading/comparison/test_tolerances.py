"""Tolerances by dtype, and the comparison of single elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from watchstep.errors import ConfigError
from watchstep.reading.comparison.tolerances import (
    DEFAULT_UNITS,
    UNIT_ROUNDOFF,
    Tolerances,
    differing_element,
)


def test_the_defaults_are_multiples_of_the_unit_roundoff() -> None:
    assert Tolerances().of("float32") == 256 * 2.0**-24
    assert Tolerances().of("bfloat16") == 16 * 2.0**-8
    assert Tolerances().of("int64") == 0
    assert DEFAULT_UNITS.keys() == UNIT_ROUNDOFF.keys()
    assert all(Tolerances().of(name) <= 0.5 for name in UNIT_ROUNDOFF)
    for name in ("float16", "float32", "float64"):
        assert UNIT_ROUNDOFF[name] == np.finfo(name).eps / 2


def test_words_change_one_dtype_or_all() -> None:
    chosen = Tolerances.parse(["float32=1e-3", "bfloat16=0"])
    assert (chosen.of("float32"), chosen.of("bfloat16")) == (1e-3, 0)
    assert chosen.of("float64") == Tolerances().of("float64")
    assert Tolerances.parse(["1e-3"]) == Tolerances.uniform(1e-3)
    assert Tolerances.parse(["0"]).is_exact
    assert not Tolerances().is_exact
    assert Tolerances().largest(["float32", "bfloat16", "int8"]) == Tolerances().of("bfloat16")


@pytest.mark.parametrize("word", ["x", "float32=", "float99=1", "-1", "nan", "float32=-0.1"])
def test_an_invalid_word(word: str) -> None:
    with pytest.raises(ConfigError, match="tolerance"):
        Tolerances.parse([word])


def test_the_element_that_differs_most_is_named() -> None:
    a = np.ones((2, 3), np.float32)
    b = a.copy()
    b[1, 2], b[0, 1] = 1.5, 1.1
    found = differing_element(a, b, 1e-3)
    assert found is not None
    assert (found.index, found.a, found.b, found.elements) == ((1, 2), 1.0, 1.5, 2)
    assert differing_element(a, b, 0.5) is None


def test_an_element_that_cancels_is_compared_with_the_others() -> None:
    a, b = np.array([1.0, 1e-9]), np.array([1.0, 2e-9])
    assert differing_element(a, b, 1e-6) is None
    assert differing_element(a, b, 0.0) is not None


def test_nan_infinity_and_complex_numbers() -> None:
    a = np.array([math.nan, math.inf, 1.0])
    assert differing_element(a, a, 0.0) is None
    found = differing_element(a, np.array([math.nan, -math.inf, 1.0]), 1.0)
    assert found is not None
    assert found.index == (1,)
    found = differing_element(np.array([1 + 2j]), np.array([1 + 3j]), 0.0)
    assert found is not None
    assert (found.index, found.a, found.b) == ((0, 1), 2.0, 3.0)


_ARRAYS = arrays.arrays(np.float32, 5, elements=st.floats(width=32))


@given(_ARRAYS, _ARRAYS, st.floats(0, 1))
def test_a_comparison_is_symmetric_and_a_larger_tolerance_finds_less(
    a: np.ndarray[tuple[int], np.dtype[np.float32]],
    b: np.ndarray[tuple[int], np.dtype[np.float32]],
    tolerance: float,
) -> None:
    found, mirrored = differing_element(a, b, tolerance), differing_element(b, a, tolerance)
    assert (found is None) == (mirrored is None)
    assert differing_element(a, a, tolerance) is None
    if found is not None:
        exact = differing_element(a, b, 0.0)
        assert exact is not None
        assert exact.elements >= found.elements
