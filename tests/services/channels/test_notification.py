"""Notifications, and the words that all channels share."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.services.channels.samples import RUN_PAGE, sample, without_public_url
from watchstep.errors import FormatError
from watchstep_services.channels.notification import Notification, alert_labels
from watchstep_services.channels.receiver_file import RECEIVER
from watchstep_services.channels.wording import (
    ALERT_FIELDS,
    MOST_TEXT,
    MOST_TITLE,
    TEXT_FIELDS,
    Templates,
    render,
)


def test_it_goes_through_json() -> None:
    for status in ("firing", "resolved"):
        notification = sample(status)
        assert Notification.from_data(json.loads(json.dumps(notification.as_data()))) == notification


def test_something_else_is_a_fault_that_names_its_place() -> None:
    with pytest.raises(FormatError, match=r"alerts\.0\.step"):
        Notification.from_data(
            {**sample().as_data(), "alerts": [{**sample().as_data()["alerts"][0], "step": "x"}]}
        )


def test_a_rule_configs_labels_do_not_replace_an_alerts_own() -> None:
    own = {"project": "p", "run": "r", "name": "n", "rule": "non_finite_values", "severity": "critical"}
    assert alert_labels(own, {"severity": "info", "team": "vision"}) == {**own, "team": "vision"}


def test_what_is_told_by_default() -> None:
    title, text = render(sample(alerts=2), Templates())
    assert title == "[FIRING] no-nans (critical) vision/run-1, and 1 more"
    assert text.count("seen    3 of 64 elements are NaN") == 2
    shown = "watchstep runs alerts vision/run-1 --service http://watch.example"
    assert text.endswith(f"{shown}\n{RUN_PAGE}")
    _, text = render(sample(), Templates())
    assert text.endswith(f"{shown}\n{RUN_PAGE}/alerts/f0")
    _, text = render(without_public_url(sample()), Templates())
    assert text.endswith(shown)


def test_links_in_the_receivers_own_words() -> None:
    own = Templates("{alert_url}", "{url} {run_url} {alerts}", "{alert_url}")
    first, second = f"{RUN_PAGE}/alerts/f0", f"{RUN_PAGE}/alerts/f1"
    assert render(sample(alerts=2), own) == (first, f"{RUN_PAGE} {RUN_PAGE} {first}\n\n{second}")


def test_every_field_has_a_value() -> None:
    every = " ".join(f"{{{name}}}" for name in TEXT_FIELDS)
    one = " ".join(f"{{{name}}}" for name in ALERT_FIELDS)
    _, text = render(sample(), Templates(text=f"{every} {{label.team}} {{label.none}} {{{{x}}}}", alert=one))
    assert text.endswith("vision - {x}")
    assert (
        text.count(" - ") == 3
    )  # nobody has acknowledged it, in the text and in the alert, and there is no such label


@pytest.mark.parametrize(
    "template", ["{alerts.__class__}", "{0}", "{nobody}", "{", "{label.}", "{{}", "{name!r}"]
)
def test_a_template_reaches_no_further_than_its_fields(template: str) -> None:
    with pytest.raises(ValidationError):
        RECEIVER.validate_python({"name": "r", "kind": "webhook", "url": "https://h/", "text": template})


@given(st.text(max_size=200))
def test_words_are_bounded_and_have_no_control_characters(message: str) -> None:
    title, text = render(
        sample(alerts=3, message=message * 100), Templates(title="{message}" * 50, text="{alerts}" * 100)
    )
    assert len(title) <= MOST_TITLE
    assert len(text) <= MOST_TEXT
    assert "\n" not in title
    assert not any(ord(letter) < 32 and letter != "\n" for letter in title + text)
    (title + text).encode()


def test_many_alerts_are_counted() -> None:
    _, text = render(sample(alerts=1000), Templates(alert="{step}"))
    assert "and 950 more" in text
