from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import tensor
from watchstep.errors import RuleError
from watchstep_rules.config.rule_config import TensorScope
from watchstep_rules.rule import Needs
from watchstep_rules.rule_files import rule_file
from watchstep_rules.signals import tensor_selection

_LETTERS = st.sampled_from(["a", "b", "a.b", ".", ".*", "a+", "(a|b)", "[ab]", "b?", r"\.", "$"])


@given(st.lists(_LETTERS, max_size=6).map("".join), st.text("ab.", max_size=8))
def test_a_name_is_matched_from_its_start_as_elsewhere(pattern: str, name: str) -> None:
    try:
        expected = re.match(pattern, name) is not None
    except re.error:
        return
    assert tensor_selection.matches(pattern, name) == expected


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*.*.*.*.*.*.*.*.*.*)*X", "(a|a)*b", "(a?){300}a{300}b"])
def test_no_expression_takes_long(pattern: str) -> None:
    assert not TensorScope(include=pattern).selects(tensor("a" * 5000 + "c", "weights"), Needs(()))


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("a{99999999999}", "more than 1000 repetitions"),
        ("a{2,99999999999}", "more than 1000 repetitions"),
        ("(" * 5000 + ")" * 5000, "over the limit of 1000"),
        ("((((a{9}){9}){9}){9}){9}", "repetition"),
        ("(?=a)b", "combine 'include' and 'exclude'"),
        (r"(a)\1", "no lookarounds and backreferences"),
        (r"a\Z", r"write '\\z' for the end"),
        ("(", r"missing \)"),
        ("a\0", "control character"),
        (r"\pL" * 300, "too large"),
    ],
)
def test_what_cannot_be_used_states_what_can(
    pattern: str, hint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = {"rules": [{"rule": "nan_or_inf", "tensors": {"include": pattern}}]}
    with pytest.raises(RuleError, match=hint):
        rule_file.check(data, "mine")
    assert capfd.readouterr().err == ""
