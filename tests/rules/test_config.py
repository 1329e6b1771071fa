from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from tests.sdk.blocks import gradient, tensor
from watchstep_rules.config import RuleConfig, StopAction, TensorScope, WebhookAction
from watchstep_rules.contract import Needs
from watchstep_rules.exploding_gradient import ExplodingGradientParams
from watchstep_rules.registry import RULES

WHOLE: dict[str, Any] = {
    "rule": "exploding_gradient",
    "name": "wild",
    "params": {"growth": 50},
    "tensors": {"collection": "gradients", "include": "layer", "exclude": ".*embed"},
    "for": {"steps": 3},
    "severity": "critical",
    "actions": ["stop", {"webhook": "https://example.org/hook"}],
}


def test_a_config_is_data_that_reads_back() -> None:
    config = RuleConfig.model_validate(WHOLE)
    assert RuleConfig.model_validate(config.as_data()) == config
    assert config.as_data()["for"] == {"steps": 3}
    assert config.as_data()["actions"] == [
        {"kind": "stop"},
        {"kind": "webhook", "url": "https://example.org/hook"},
    ]


def test_what_is_left_out_has_a_default() -> None:
    config = RuleConfig(rule="nan_or_inf")
    assert (config.name, config.severity, config.hold.steps, config.actions) == (
        "nan_or_inf",
        "warning",
        1,
        (),
    )
    assert config.implementation is RULES["nan_or_inf"]


def test_parameters_are_checked_and_filled_in() -> None:
    config = RuleConfig.model_validate(WHOLE)
    assert config.parameters == ExplodingGradientParams(growth=50)


def test_a_recorder_cannot_stop() -> None:
    config = RuleConfig.model_validate(WHOLE)
    assert config.stops
    assert not config.without_stop().stops
    assert len(config.without_stop().actions) == 1
    assert not RuleConfig(rule="nan_or_inf").stops


def test_actions_may_be_written_long() -> None:
    actions = [{"kind": "stop"}, {"kind": "webhook", "url": "https://example.org/"}]
    config = RuleConfig.model_validate({"rule": "nan_or_inf", "actions": actions})
    assert [type(action) for action in config.actions] == [StopAction, WebhookAction]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rule": "nan"}, "unknown rule 'nan'; use one of: class_imbalance, "),
        ({"params": {"groth": 3}}, "groth"),
        ({"params": {"growth": "large"}}, "growth"),
        ({"params": {"growth": 0.5}}, "growth"),
        ({"for": {"steps": 0}}, "steps"),
        ({"for": {"minutes": 3}}, "minutes"),
        ({"severity": "fatal"}, "severity"),
        ({"actions": ["explode"]}, "actions"),
        ({"actions": [{"webhook": "not a url"}]}, "url"),
        ({"tensors": {"include": "("}}, "not a regular expression"),
        ({"tensors": {"layers": "x"}}, "layers"),
        ({"treshold": 3}, "treshold"),
    ],
)
def test_a_wrong_config_names_the_place(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        RuleConfig.model_validate({**WHOLE, **change})


def test_scope_is_by_collection_role_and_name() -> None:
    needs = Needs(collections=("gradients", "losses"), roles=("gradient", "loss"))
    info = gradient("layer.embed")
    assert TensorScope().holds(info, needs)
    assert TensorScope(include="layer", exclude="embed").holds(info, needs)
    assert TensorScope(collection="gradients").holds(info, needs)
    assert not TensorScope(collection="losses").holds(info, needs)
    assert not TensorScope(include="embed").holds(info, needs)
    assert not TensorScope(exclude=r"layer\.").holds(info, needs)
    assert not TensorScope().holds(tensor("w", "weights"), needs)
    assert not TensorScope(collection="weights").holds(tensor("w", "weights"), needs)
    assert TensorScope(collection="weights").holds(tensor("w", "weights"), Needs(collections=("losses",)))
