"""The short notation of series."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep_rules.testing.file import values_of


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        ("3", [3]),
        ("-3.5e-2", [-0.035]),
        (".5 2.", [0.5, 2.0]),
        ("3x4", [3, 3, 3, 3]),
        ("1+2x4", [1, 3, 5, 7]),
        ("7-2x3", [7, 5, 3]),
        ("-1-2x3", [-1, -3, -5]),
        ("1+-2x3", [1, -1, -3]),
        ("1e-3+1e-3x3", [0.001, 0.002, 0.003]),
        ("1*10x4", [1, 10, 100, 1000]),
        ("8*0.5x3", [8, 4, 2]),
        ("1e300*1e300x3", [1e300, math.inf, math.inf]),
        ("-1e300*1e300x3", [-1e300, -math.inf, -math.inf]),
        ("1 _ 2", [1, None, 2]),
        ("_x3 1x0", [None] * 3),
        ("Inf -Inf +Infx2", [math.inf, -math.inf, math.inf, math.inf]),
        ("1e-3x2\n  1e-9x1", [0.001, 0.001, 1e-9]),
    ],
)
def test_what_is_written_short(text: str, values: list[float | None]) -> None:
    assert values_of(text) == pytest.approx(values, abs=0)


def test_invalid_numbers_are_refused() -> None:
    assert all(math.isnan(value) for value in values_of("NaN nanx2") if value is not None)


@pytest.mark.parametrize(
    "text", ["x3", "3x", "3x-1", "1+2", "a", "1__", "_+1x2", "1,2", "1*x3", "0x10y", "1x2000000"]
)
def test_invalid_notation_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a valid value|has no number of values|values"):
        values_of(text)


@given(st.floats(-1e6, 1e6), st.integers(0, 50))
def test_a_value_and_a_count(value: float, count: int) -> None:
    assert values_of(f"{value!r}x{count}") == [value] * count
