from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep_rules.config import rule_config
from watchstep_rules.config.rule_config import FIELDS, MOST_FILLED, check, fill

VALUES = {name: name.upper() for name in FIELDS} | {"label.team": "vision"}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("", ""),
        ("{tensor} at {step}", "TENSOR at STEP"),
        ("{{tensor}} {label.team}", "{tensor} vision"),
        ("{{{run}}}", "{RUN}"),
        ("100 % of $HOME %s", "100 % of $HOME %s"),
    ],
)
def test_fields_are_filled_in(text: str, filled: str) -> None:
    check(text, {"team": "vision"})
    assert fill(text, VALUES) == filled


def test_what_is_filled_in_is_not_looked_at_again() -> None:
    assert fill("{message}", {"message": "{run} {{"}) == "{run} {{"


def test_a_value_that_is_missing_is_a_dash_and_a_long_message_is_cut() -> None:
    assert fill("{run}", {}) == "-"
    assert len(fill("{message}", {"message": "x" * 10 * MOST_FILLED})) == MOST_FILLED


@given(st.text(alphabet="{}[].!:_a1") | st.text())
def test_any_text_is_refused_or_filled(text: str) -> None:
    try:
        check(text, {})
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
        assert fill(text, VALUES).count("{") <= text.count("{")
    assert not refused or "field" in refused or "brace" in refused


def test_every_field_is_described() -> None:
    assert all(rule_config.FIELDS.values())
