"""Regular expressions of users: RE2 syntax, from the start of the text, in time linear in the text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import re2
import torch
from hypothesis import given
from hypothesis import strategies as st

from watchstep import CaptureConfig, Collection, Hook
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


def test_each_pattern_is_compiled_once_for_all_names_of_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[str] = []
    compile_pattern = re2.compile

    def counting(pattern: str, options: Any) -> Any:
        compiled.append(pattern)
        return compile_pattern(pattern, options)

    monkeypatch.setattr(re2, "compile", counting)
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(40)])
    collections = {f"c{number}": Collection(include=f"{number}[.]once[.]") for number in range(30)}
    with Hook(tmp_path, run="r", config=CaptureConfig(collections=collections, system=None)) as hook:
        hook.watch(model, torch.optim.Adam(model.parameters()))
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
    assert len(compiled) == len(set(compiled)) == len(collections)


def test_a_name_that_is_not_unicode_matches_as_far_as_it_is() -> None:
    assert matches_from_start("layer", "layer\udc80")
    assert not matches_from_start("layer$", "layer\udc80")


def test_a_long_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match="4097 characters"):
        Collection(include="a" * 4097)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("(", "missing"), ("a(?=b)", "perl operator"), (r"(a)\1", "escape sequence"), ("*", "no argument")],
)
def test_what_is_not_valid_is_reported(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_pattern(pattern)
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        Collection(include=pattern)


def test_a_collection_selects_by_it() -> None:
    chosen = Collection(include=r"(\w+\.?)+weight$", exclude="head")
    assert chosen.matches(TensorInfo("encoder.weight", (), "weight"))
    assert not chosen.matches(TensorInfo("head.weight", (), "weight"))
    assert not chosen.matches(TensorInfo(NAME, (), "weight"))
