from __future__ import annotations

import json

import pytest

from tests.services.channels.samples import sample
from watchstep.errors import FormatError
from watchstep_services.channels.notification import Notification, alert_labels


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
