from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep_rules.config.rule_config import FIELDS, RuleConfig
from watchstep_rules.engine.alert import Phase, Transition
from watchstep_rules.engine.incident import Explanation, RunName, event_message, explain, sentence
from watchstep_rules.registry import RULES
from watchstep_rules.rule import Finding, finding_at, finding_of_run

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
        title="exploding_gradient (warning) firing at step 54",
        seen="norm is 1.23e+06, over 150",
        where="encoder.1.weight:gradient: gradient of module encoder.1 (Linear); worker 0, mode train",
        against="1.235e+06, threshold 150",
        since="step 50, up to step 54 when it had lasted for 5 judged steps in a row and 3 s",
        usual_causes=RULES["exploding_gradient"].usual_causes,
        what_to_try=RULES["exploding_gradient"].what_to_try,
    )
    assert json.loads(explanation.model_dump_json())["seen"] == explanation.seen


def test_the_text_has_a_line_for_each() -> None:
    explanation = explain(config(name="wild", severity="critical"), firing(found(), since=54))
    lines = explanation.as_text().splitlines()
    assert lines[0] == "wild, of rule exploding_gradient (critical) firing at step 54"
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
    assert event_message(config(), firing(found()), RUN) == "norm is 1.23e+06, over 150"
    text = "{label.team} {project}/{run} {{{step}}} {value} > {threshold}"
    own = config(labels={"team": "vision"}, message=text)
    assert event_message(own, firing(found()), RUN) == "vision vision/night {54} 1.235e+06 > 150"


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
