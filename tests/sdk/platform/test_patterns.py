"""Regular expressions of users: RE2 syntax, from the start of the text, in time linear in the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep import Collection
from watchstep.errors import ConfigError
from watchstep.format.tensors import TensorInfo
from watchstep.platform.patterns import check_pattern, matches_from_start

NAME = "encoder_layers_self_attention_output_dense" * 100


@given(
    st.sampled_from(["a", "a.*b", "(a|b)+c", "[^.]+[.]weight$", "", "^a", "layer[0-9]{1,2}", "b|a"]),
    st.text("ab.c0weightlyr", max_size=12),
)
def test_patterns_match_as_those_of_python(pattern: str, text: str) -> None:
    assert matches_from_start(pattern, text) == (re.match(pattern, text) is not None)


def test_a_pattern_that_takes_python_years_takes_no_time() -> None:
    assert not matches_from_start(r"(\w+\.?)+weight$", NAME)


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", "*"])
def test_what_is_not_valid_is_reported(pattern: str) -> None:
    with pytest.raises(ValueError, match="regular expression"):
        check_pattern(pattern)
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        Collection(include=pattern)


def test_a_collection_selects_by_it() -> None:
    chosen = Collection(include=r"(\w+\.?)+weight$", exclude="head")
    assert chosen.matches(TensorInfo("encoder.weight", (), "weight"))
    assert not chosen.matches(TensorInfo("head.weight", (), "weight"))
    assert not chosen.matches(TensorInfo(NAME, (), "weight"))
