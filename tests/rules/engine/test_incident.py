"""Incidents of several alerts, and explanations of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.engine.test_late_rows import Rank, arrivals, calm, judged, lasting, some_ranks
from tests.rules.runs import Outcome
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep_rules.config.rule_config import FIELDS, RuleConfig
from watchstep_rules.engine.alert import Phase, Transition, coalesce
from watchstep_rules.engine.incident import (
    Explanation,
    Onset,
    RunName,
    cause_of,
    event_message,
    explain,
    incident_id,
    incidents_of,
    onset_changes,
    sentence,
    summarize,
    unaffected_before,
)
from watchstep_rules.registry import RULES
from watchstep_rules.rule import Finding, finding_at, finding_of_run

# Incidents


def onset(
    rule: str,
    step: int,
    *,
    config: int | None = None,
    role: str = "",
    order: int = 0,
    severity: str = "warning",
    tensor: str | None = None,
    upstream: tuple[str, ...] = (),
) -> Onset:
    finding = Finding(
        rule=rule,
        step=step,
        mode="train",
        worker=0,
        tensor=f"{rule}:tensor" if tensor is None else tensor,
        module="",
        module_type="",
        role=role,
        value=1.0,
        threshold=0.5,
        message=f"what {rule} found at step {step}",
        time_ns=0,
        cause_rank=(0, order),
        upstream=upstream,
    )
    return Onset(
        config=sum(rule.encode()) if config is None else config,
        name=rule,
        rule=rule,
        severity=severity,
        step=step,
        finding=finding,
        check=f"check {rule}",
    )


LEARNING_RATE = (
    onset("nan_or_inf", 206, config=1, severity="critical"),
    onset("non_finite_values", 205, config=2),
    onset("loss_spike", 201, config=3),
    onset("lost_progress", 201, config=4),
    onset("exploding_gradient", 201, config=5),
    onset("hyperparameter_jump", 200, config=6),
)


def test_what_follows_from_a_learning_rate_is_one_incident_whose_cause_it_is() -> None:
    (incident,) = incidents_of(LEARNING_RATE)
    summary = summarize("abc", incident, {"replica_divergence": 1206, "nan_or_inf": 1206})
    assert summary.cause == "hyperparameter_jump"
    assert summary.message == "what hyperparameter_jump found at step 200"
    assert summary.check_first == "check hyperparameter_jump"
    assert (summary.first_step, summary.last_step) == (200, 206)
    assert summary.alerts[:2] == ("hyperparameter_jump", "exploding_gradient")
    assert summary.not_fired == ("replica_divergence (1,206 steps)",)


def test_a_rule_that_did_not_fire_is_named_with_its_steps_and_nothing_is_said_about_the_data() -> None:
    (incident,) = incidents_of(LEARNING_RATE[:-1])
    summary = summarize("abc", incident, {"hyperparameter_jump": 1, "exploding_gradient": 9})
    assert summary.cause == "exploding_gradient"
    assert summary.not_fired == ("hyperparameter_jump (1 step)",)
    assert summary.as_lines()[-1] == "  quiet   evaluated, did not fire: hyperparameter_jump (1 step)"


def test_a_jump_after_the_first_onset_is_no_cause_of_it() -> None:
    (incident,) = incidents_of([onset("loss_spike", 200), onset("hyperparameter_jump", 203)])
    assert cause_of(incident).rule == "loss_spike"


@pytest.mark.parametrize("first", ["exploding_gradient", "loss_spike", "custom_rule_of_the_run"])
@pytest.mark.parametrize(
    "later",
    [
        onset("nan_or_inf", 206),
        onset("non_finite_values", 202, role="input"),
        onset("dead_relu", 205),
        onset("input_image_mean", 202),
    ],
)
def test_the_earliest_onset_is_the_cause_however_far_upstream_a_later_one_is(
    first: str, later: Onset
) -> None:
    (incident,) = incidents_of([later, onset(first, 201, tensor="" if first.startswith("custom") else None)])
    summary = summarize("abc", incident, {})
    assert (summary.cause, summary.alerts) == (first, (first, later.rule))


@pytest.mark.parametrize(("step", "cause"), [(43, "absent_from_optimizer"), (44, "weight_not_updating")])
def test_a_lasting_setting_that_is_detected_soon_after_the_first_onset_is_the_cause(
    step: int, cause: str
) -> None:
    (incident,) = incidents_of([onset("weight_not_updating", 33), onset("absent_from_optimizer", step)])
    assert cause_of(incident).rule == cause


def test_at_one_step_a_cause_comes_before_its_consequences() -> None:
    rules = [
        "hyperparameter_jump",
        "token_ratio",
        "dead_relu",
        "exploding_gradient",
        "loss_spike",
        "nan_or_inf",
    ]
    (incident,) = incidents_of([onset(rule, 5) for rule in reversed(rules)])
    assert summarize("abc", incident, {}).alerts == tuple(rules)
    (incident,) = incidents_of(
        [onset("nan_or_inf", 5, upstream=("model:input",)), onset("exploding_gradient", 5)]
    )
    assert cause_of(incident).rule == "nan_or_inf"


def test_nan_in_an_input_comes_before_what_it_does_to_gradients_and_layers_before_later_ones() -> None:
    (incident,) = incidents_of(
        [
            onset("non_finite_values", 5, role="input"),
            onset("exploding_gradient", 5, config=1, order=1),
            onset("exploding_gradient", 5, config=2, order=0),
        ]
    )
    assert cause_of(incident).rule == "non_finite_values"
    assert cause_of(incident[-2:]).finding.cause_rank == (0, 0)


def test_what_begins_far_away_is_another_incident_and_an_alert_that_flaps_does_not_extend_one() -> None:
    assert [len(incident) for incident in incidents_of([onset("loss_spike", 0), onset("dead_relu", 51)])] == [
        1,
        1,
    ]
    assert [len(incident) for incident in incidents_of([onset("loss_spike", 0), onset("dead_relu", 50)])] == [
        2
    ]
    flaps = [onset("loss_spike", step) for step in range(0, 200, 20)]
    assert [incident[0].step for incident in incidents_of(flaps)] == [0, 60, 120, 180]


onsets = st.lists(
    st.builds(
        lambda config, step: onset(f"rule{config}", step, config=config),
        st.integers(0, 4),
        st.integers(0, 400),
    ),
    max_size=20,
    unique_by=lambda onset: (onset.config, onset.step),
)


@given(onsets, st.data())
def test_the_order_of_added_and_removed_onsets_does_not_change_incidents(
    final: list[Onset], data: st.DataObject
) -> None:
    taken_back = [item for item in data.draw(onsets) if item not in final]
    order = data.draw(st.permutations([*final, *taken_back]))
    there: list[tuple[Onset, ...]] = []
    for added, removed in [*(([item], []) for item in order), *(([], [item]) for item in taken_back)]:
        there = changed(there, added, removed)
    assert there == incidents_of(final)


def changed(
    before: Sequence[tuple[Onset, ...]], added: Sequence[Onset], removed: Sequence[Onset]
) -> list[tuple[Onset, ...]]:
    """Only incidents near a change are made anew."""
    bound = unaffected_before(min(item.step for item in (*added, *removed)))
    near = [incident for incident in before if incident[-1].step >= bound]
    remaining = [item for incident in near for item in incident if item not in removed]
    return [
        *(incident for incident in before if incident[-1].step < bound),
        *incidents_of([*remaining, *added]),
    ]


def steps_of_onsets(outcome: Outcome) -> list[int]:
    return sorted(onset_changes(coalesce(outcome.transitions), None).added)


@pytest.mark.ci
@settings(max_examples=examples(16))
@given(some_ranks, st.integers(1, 3), st.integers(1, 3), st.data())
def test_in_whichever_order_and_cuts_rows_come_alerts_have_the_same_onsets(
    ranks: list[Rank], hold: int, keep: int, data: st.DataObject
) -> None:
    config = lasting(hold, keep)
    outcome = judged(config, ranks, data.draw(arrivals(len(ranks))))
    assert steps_of_onsets(outcome) == steps_of_onsets(calm(config, ranks))


def test_the_id_is_of_the_attempt_and_the_first_onset() -> None:
    assert incident_id("vision", "night", "a1", 5) == incident_id("vision", "night", "a1", 5)
    assert (
        len({incident_id("vision", "night", attempt, step) for attempt in ("a1", "a2") for step in (5, 6)})
        == 4
    )


# Explanations


RUN = RunName("vision", "night", "a1")
LONGEST = 180


def found(step: int = 54, **more: Any) -> Finding:
    block = block_of([Row(step, gradient("encoder.1"), [1.0])])
    values = {"value": 1234567.0, "threshold": 150.0, "message": "norm is 1.23e+06, over 150", **more}
    return finding_at("exploding_gradient", block, 0, **values)


def firing(finding: Finding, since: int = 50) -> Transition:
    return Transition(Phase.FIRING, finding.step, finding, since, 0)


def config(**more: Any) -> RuleConfig:
    return RuleConfig.model_validate({"rule": "exploding_gradient", **more})


def test_an_explanation_states_what_where_against_what_and_since_when() -> None:
    explanation = explain(config(**{"for": {"steps": 5, "seconds": 3}}), firing(found()))
    assert explanation == Explanation(
        title="exploding_gradient (warning) firing: bad from step 50",
        since_step=50,
        seen="at step 54: norm is 1.23e+06, over 150",
        where="encoder.1.weight:gradient: gradient of module encoder.1 (Linear); worker 0, mode train",
        against="1,234,567, threshold 150",
        since="step 50, up to step 54 when it had lasted for 5 judged steps in a row and 3 s",
        usual_causes=RULES["exploding_gradient"].usual_causes,
        what_to_try=RULES["exploding_gradient"].what_to_try,
    )
    assert json.loads(explanation.model_dump_json())["seen"] == explanation.seen


def test_the_text_has_a_line_for_each() -> None:
    explanation = explain(config(name="wild", severity="critical"), firing(found(), since=54))
    lines = explanation.as_text().splitlines()
    assert lines[0] == "wild, of rule exploding_gradient (critical) firing: bad from step 54"
    assert lines[4] == "  since   step 54, the first finding"
    assert lines[5].startswith("  usually ")
    assert sum(line.startswith("  try ") for line in lines) == 1
    assert len(lines) == 5 + len(explanation.usual_causes) + len(explanation.what_to_try)


def test_a_finding_about_the_run_is_somewhere_too() -> None:
    finding = finding_of_run(
        "stalled_training", 7, 0, value=1900, threshold=1800, message="no step for 1900 s"
    )
    explanation = explain(RuleConfig(rule="stalled_training"), firing(finding, since=7))
    assert explanation.where == "the run as a whole"
    template = RuleConfig(rule="stalled_training", message="{tensor}: {message}")
    assert event_message(template, firing(finding, since=7), RUN) == "the run: no step for 1900 s"


def test_a_tensor_without_a_module_states_what_it_is() -> None:
    block = block_of([Row(3, tensor("loss", "losses", role="loss", shape=()), [1.0])])
    finding = finding_at("overfit", block, 0, value=1.0, threshold=0.5, message="…")
    assert explain(RuleConfig(rule="overfit"), firing(finding)).where == "loss: a loss; worker 0, mode train"


def test_an_event_has_the_message_of_the_config() -> None:
    assert event_message(config(), firing(found()), RUN) == "at step 54: norm is 1.23e+06, over 150"
    text = "{label.team} {project}/{run} {{{step}}} {value} > {threshold}"
    own = config(labels={"team": "vision"}, message=text)
    assert event_message(own, firing(found()), RUN) == "vision vision/night {54} 1,234,567 > 150"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("the model is compiled", "The model is compiled."),
        ("The model is compiled.", "The model is compiled."),
        ("model.eval() was called", "model.eval() was called."),
        ("num_workers is 0", "num_workers is 0."),
    ],
)
def test_the_text_of_a_rule_becomes_a_sentence(words: str, expected: str) -> None:
    assert sentence(words) == expected


def test_every_field_of_a_template_is_filled() -> None:
    everything = config(message=" ".join(f"{name}=[{{{name}}}]" for name in FIELDS))
    message = event_message(everything, firing(found()), RUN)
    assert "[-]" not in message
    assert "[]" not in message


REPORTS = {
    "sagemaker_create_xgboost_report",
    "sagemaker_overall_framework_metrics",
    "sagemaker_overall_system_usage",
}
"""They never fire: nothing causes it."""


@pytest.mark.parametrize("name", sorted(RULES.keys() - REPORTS))
def test_every_rule_states_what_usually_causes_it_and_what_to_try(name: str) -> None:
    rule = RULES[name]
    for sentences in (rule.usual_causes, rule.what_to_try):
        assert 2 <= len(sentences) <= 6
        assert len(set(sentences)) == len(sentences)
        for words in sentences:
            assert 10 < len(words) <= LONGEST
            assert words == words.strip()
            assert "\n" not in words
