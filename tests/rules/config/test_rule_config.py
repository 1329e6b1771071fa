"""Rule configs, their defaults, their message templates and their patterns of names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.sdk.format.blocks import gradient, tensor
from watchstep.errors import RuleError
from watchstep_rules.builtin.gradients.exploding_gradient import ExplodingGradientParams
from watchstep_rules.config import rule_config
from watchstep_rules.config.defaults import DEFAULT_RULES, OFF_BY_DEFAULT
from watchstep_rules.config.rule_config import (
    FIELDS,
    MOST_FILLED,
    RuleConfig,
    StopAction,
    TensorScope,
    Timing,
    WebhookAction,
    check,
    fill,
)
from watchstep_rules.registry import RULES
from watchstep_rules.rule import Needs
from watchstep_rules.rule_files import rule_file
from watchstep_rules.signals import tensor_selection

# Configs


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


# Defaults


def test_the_defaults_are_a_rule_file() -> None:
    assert (
        rule_file.check({"rules": [config.as_data() for config in DEFAULT_RULES]}, "defaults")
        == DEFAULT_RULES
    )


def test_every_rule_is_on_by_default_once_or_off() -> None:
    on = [config.rule for config in DEFAULT_RULES]
    assert sorted([*on, *OFF_BY_DEFAULT]) == sorted(RULES)


def test_only_what_does_not_return_stops_a_job() -> None:
    assert [config.rule for config in DEFAULT_RULES if config.stops] == ["nan_or_inf"]


WAIT_BY_THEMSELVES = {
    "dead_relu",
    "saturated_activation",
    "class_imbalance",
    "symmetric_units",
    "representation_collapse",
    "frozen_batch_norm",
    "running_statistics_frozen",
    "starved_expert",
    "hyperparameter_jump",
    "absent_from_optimizer",
    "loss_spike",
    "gradients_cease",
    "invalid_objective",
    "validation_loss_jump",
}
"""They fire after several records, or when chance is ruled out."""
ONCE = {"poor_initialization"}
EXACT = {
    "skipped_updates",
    "replica_divergence",
    "scaler_skips",
    "missing_zero_grad",
    "recompute_mismatch",
    "optimizer_not_stepping",
    "resume_mismatch",
    "training_hangs",
    "training_stopped",
}
"""They compare bits, or count what the program reports."""


def test_one_fault_of_a_layer_or_loss_is_one_alert() -> None:
    lasting = {config.rule: config.timing.keep_steps for config in DEFAULT_RULES}
    assert {name for name, steps in lasting.items() if steps == 100} == {
        "invalid_objective",
        "loss_not_decreasing",
        "slow_convergence",
        "oscillating_loss",
        "loss_spike",
        "lost_progress",
        "resume_mismatch",
    }
    assert {name for name, steps in lasting.items() if steps == 10} == {
        "vanishing_gradient",
        "dead_relu",
        "saturated_activation",
        "weight_not_updating",
        "unlike_earlier_runs",
        "hyperparameter_jump",
        "gradients_cease",
        "starved_expert",
        "representation_collapse",
    }


def test_rules_that_judge_by_size_wait_for_a_second_look() -> None:
    at_once = {config.rule for config in DEFAULT_RULES if config.hold.steps == 1 and not config.stops}
    assert at_once <= WAIT_BY_THEMSELVES | ONCE | EXACT


# Templates of messages


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


# Patterns of names


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
