"""What rule configs need recorders to capture."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.saved import away, registered
from watchstep.capture.config import CaptureConfig
from watchstep.format.capture_needs import CaptureNeed, needs_from_data
from watchstep_rules.config.attached import capture_needs
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.registry import RULES
from watchstep_rules.rule_files.presets import PRESETS


def test_the_default_rules_need_nothing() -> None:
    assert capture_needs(DEFAULT_RULES) == ()
    assert capture_needs([]) == ()


def test_a_tensor_rule_needs_full_tensors_of_its_scope() -> None:
    with registered():
        configs = [
            away(name="a", every=7, modes=["train", "eval"]),
            away(name="b", tensors={"collection": "weights"}, modes=[]),
        ]
        assert capture_needs(configs) == (
            CaptureNeed("a", ("activations",), (), 7, ("train", "eval")),
            CaptureNeed("b", ("weights",), (), 10, ()),
        )


@pytest.mark.parametrize(
    ("config", "need"),
    [
        (
            {"rule": "sagemaker_dead_relu"},
            CaptureNeed("sagemaker_dead_relu", ("activations",), ("function_calls", "inactive_units:1.0")),
        ),
        (
            {"rule": "nan_or_inf", "tensors": {"collection": "optimizer_state"}},
            CaptureNeed("nan_or_inf", ("optimizer_state",)),
        ),
        ({"rule": "all_zero", "tensors": {"collection": "gradients"}}, None),
        ({"rule": "replica_divergence"}, None),
    ],
    ids=str,
)
def test_probes_with_arguments_and_collections_that_are_off_by_default_are_needs(
    config: dict[str, Any], need: CaptureNeed | None
) -> None:
    needs = capture_needs([RuleConfig.model_validate(config)])
    if need is None:
        assert all(not each.every and not each.probes for each in needs)
        recorded = set(CaptureConfig().collections)
        assert all(not set(each.collections) <= recorded for each in needs)
    else:
        assert needs == (need,)


def test_a_rule_that_cannot_say_what_it_needs_needs_nothing() -> None:
    with registered():
        sound = away(name="a")
        unknown = away(name="b")
    assert capture_needs([unknown, RuleConfig(rule="loss_spike")]) == ()
    with registered():
        assert len(capture_needs([sound])) == 1


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_needs_of_every_rule_fit_into_a_control_document(name: str) -> None:
    needs = capture_needs([RuleConfig(rule=name)])
    assert needs_from_data([asdict(need) for need in needs]) == needs


def test_the_needs_of_the_presets_fit_into_a_control_document() -> None:
    for preset in PRESETS.values():
        needs = capture_needs(preset)
        assert needs_from_data([asdict(need) for need in needs]) == needs
        assert all(need.every == 0 for need in needs)  # no preset saves full tensors


words = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\t\0"), min_size=1, max_size=40)


@given(
    collection=st.none() | words,
    names=st.lists(words.filter(lambda word: "," not in word and word.strip()), max_size=100),
    elementwise=st.booleans(),
)
def test_any_config_that_is_valid_has_needs_that_fit(
    collection: str | None, names: list[str], elementwise: bool
) -> None:
    try:
        config = RuleConfig.model_validate(
            {
                "rule": "sagemaker_similar_across_runs",
                "tensors": {"collection": collection},
                "params": {
                    "other_trials": "good",
                    "collection_names": names or None,
                    "elementwise": elementwise,
                },
            }
        )
    except ValueError:
        return
    needs = capture_needs([config])
    assert needs_from_data([asdict(need) for need in needs]) == needs
