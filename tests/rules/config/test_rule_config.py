from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.sdk.format.blocks import gradient, tensor
from watchstep_rules.builtin.gradients.exploding_gradient import ExplodingGradientParams
from watchstep_rules.config.rule_config import RuleConfig, StopAction, TensorScope, Timing, WebhookAction
from watchstep_rules.registry import RULES
from watchstep_rules.rule import Needs

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
    assert config.as_data()["for"] == {"steps": 3, "seconds": 0.0}
    assert config.as_data()["actions"] == [
        {"kind": "stop"},
        {"kind": "webhook", "url": "https://example.org/hook"},
    ]


def test_what_is_omitted_has_a_default() -> None:
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


def test_only_an_action_stops() -> None:
    assert RuleConfig.model_validate(WHOLE).stops
    assert not RuleConfig(rule="nan_or_inf").stops


def test_actions_may_be_written_long() -> None:
    actions = [{"kind": "stop"}, {"kind": "webhook", "url": "https://example.org/"}]
    config = RuleConfig.model_validate({"rule": "nan_or_inf", "actions": actions})
    assert [type(action) for action in config.actions] == [StopAction, WebhookAction]


def test_all_that_is_wrong_is_reported_at_once() -> None:
    wrong = {**WHOLE, "severity": "fatal", "params": {"growth": 0.5}, "for": {"steps": 0}}
    with pytest.raises(ValidationError) as caught:
        RuleConfig.model_validate(wrong)
    assert [error["loc"] for error in caught.value.errors()] == [
        ("params", "growth"),
        ("for", "steps"),
        ("severity",),
    ]


def test_how_long_findings_last_is_reported_by_steps_and_seconds() -> None:
    assert RuleConfig.model_validate(WHOLE).timing == Timing(3, 0, 3, 0)
    lasting = {**WHOLE, "for": {"steps": 3, "seconds": 60}, "keep_firing": {"seconds": 0.5}}
    assert RuleConfig.model_validate(lasting).timing == Timing(3, 60 * 10**9, 1, 5 * 10**8)
    assert RuleConfig.model_validate({**WHOLE, "for": {"seconds": 2}}).timing == Timing(
        1, 2 * 10**9, 1, 2 * 10**9
    )


def test_what_is_tried_dry_stops_nothing() -> None:
    assert not RuleConfig.model_validate({**WHOLE, "dry_run": True}).stops


def test_actions_name_addresses_and_receivers() -> None:
    actions = ["stop", {"webhook": "https://example.org/a"}, {"notify": "ml-oncall"}]
    config = RuleConfig.model_validate({**WHOLE, "actions": actions, "inhibits": ["overfit"]})
    assert (config.webhooks, config.receivers) == (("https://example.org/a",), ("ml-oncall",))
    assert RuleConfig.model_validate(config.as_data()) == config
    uninhibiting = config.without_inhibits()
    assert (uninhibiting.stops, uninhibiting.inhibits, uninhibiting.receivers) == (True, (), ("ml-oncall",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rule": "nan"}, "unknown rule 'nan'; use one of: "),
        (
            {"rule": "exploding_gradients"},
            "unknown rule 'exploding_gradients'; did you mean exploding_gradient?",
        ),
        ({"params": {"groth": 3}}, "groth"),
        ({"params": {"growth": "large"}}, "growth"),
        ({"params": {"growth": 0.5}}, "growth"),
        ({"for": {"steps": 0}}, "steps"),
        ({"for": {"minutes": 3}}, "minutes"),
        ({"severity": "fatal"}, "severity"),
        ({"actions": ["explode"]}, "actions"),
        ({"actions": [{"webhook": "not a url"}]}, "url"),
        ({"tensors": {"include": "("}}, "not a valid regular expression"),
        ({"tensors": {"layers": "x"}}, "layers"),
        ({"treshold": 3}, "treshold"),
        ({"name": "x" * 129}, "at most 128 characters"),
        ({"for": {"seconds": -1}}, "seconds"),
        ({"keep_firing": {"steps": 0}}, "keep_firing"),
        ({"labels": {"__name__": "x"}}, "labels"),
        ({"labels": {"team-a": "x"}}, "labels"),
        ({"labels": {"team": "x" * 257}}, "labels"),
        ({"labels": {f"l{number}": "x" for number in range(17)}}, "at most 16 items"),
        ({"actions": [{"notify": "not a name"}]}, "notify"),
        ({"message": "{tensor} {treshold}"}, "unknown field {treshold}; use one of: name, rule, "),
        ({"message": "{label.team}"}, "unknown field {label.team}"),
        ({"message": "{tensor.__class__}"}, "unknown field {tensor.__class__}"),
        ({"message": "{value:>1000000000}"}, "unknown field {value:>1000000000}"),
        ({"message": "{"}, "unpaired brace at character 1: write {{"),
        ({"message": "x" * 1001}, "at most 1000 characters"),
        ({"rule": "stalled_training", "params": {}, "inhibits": ["overfit"]}, "cannot inhibit"),
        ({"severity": "info", "actions": ["stop"]}, "severity info with stop: "),
        ({"severity": "info", "actions": [{"notify": "phone"}]}, "severity info with notify: "),
        (
            {"severity": "info", "actions": [{"webhook": "https://a.example/"}]},
            "severity info with webhook: ",
        ),
        (
            {"severity": "info", "actions": ["snapshot"], "inhibits": ["overfit"]},
            "severity info with inhibits: ",
        ),
    ],
)
def test_a_wrong_config_names_the_place(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        RuleConfig.model_validate({**WHOLE, **change})


def test_scope_is_by_collection_role_and_name() -> None:
    needs = Needs(collections=("gradients", "losses"), roles=("gradient", "loss"))
    info = gradient("layer.embed")
    assert TensorScope().selects(info, needs)
    assert TensorScope(include="layer", exclude="embed").selects(info, needs)
    assert TensorScope(collection="gradients").selects(info, needs)
    assert not TensorScope(collection="losses").selects(info, needs)
    assert not TensorScope(include="embed").selects(info, needs)
    assert not TensorScope(exclude=r"layer\.").selects(info, needs)
    assert not TensorScope().selects(tensor("w", "weights"), needs)
    assert not TensorScope(collection="weights").selects(tensor("w", "weights"), needs)
    assert TensorScope(collection="weights").selects(tensor("w", "weights"), Needs(collections=("losses",)))


def test_a_scope_narrows_what_findings_are_about_and_not_the_evidence() -> None:
    config = RuleConfig(rule="exploding_gradient", tensors=TensorScope(include="encoder"))
    needs = config.implementation.needed(config.parameters)
    configs = [
        info.name
        for info in (
            gradient("encoder.0"),
            gradient("decoder.0"),
            tensor("loss", "losses", shape=()),
            tensor("decoder.0.weight:update", "updates"),
            tensor("decoder.0.weight", "weights"),
        )
        if config.tensors.selects(info, needs)
    ]
    assert configs == ["encoder.0.weight:gradient", "loss", "decoder.0.weight:update"]
    only = TensorScope(collection="mine")
    assert only.selects(replace(gradient("a"), collections=("mine",)), needs)
    assert not only.selects(gradient("a"), needs)
    assert only.selects(tensor("loss", "losses", shape=()), needs)
