"""Inconclusive rows neither resolve an alert nor prevent one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.runs import Rows, Watermark, all_at_once, follow
from tests.rules.trainings.cases import CASES
from tests.rules.trainings.test_trainings import recorded
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase
from watchstep_rules.registry import RULES
from watchstep_rules.rule import Finding

LAYER, LOSS = gradient("layer"), tensor("loss", "losses", shape=())
OUTPUT = tensor("layer:output", "activations")
EMPTY_STEPS = 300


@pytest.mark.parametrize("name", sorted(RULES))
def test_no_rule_concludes_from_a_row_without_elements(name: str) -> None:
    rule = RULES[name]
    block = block_of([Row(step, info, []) for step, info in enumerate((LAYER, LOSS, OUTPUT))])
    assert not rule.conclusive(rule.params_type.model_construct(), block).any()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rule", "case"),
    [
        ("dead_relu", "units_that_begin_dead"),
        ("saturated_activation", "tanh_of_raw_pixels"),
        ("vanishing_gradient", "units_that_begin_dead"),
    ],
)
def test_rows_without_elements_resolve_no_alert_of_a_layer(rule: str, case: str, tmp_path: Path) -> None:
    config = next(config for config in DEFAULT_RULES if config.rule == rule)
    block = recorded(CASES[case], tmp_path)
    outcome = all_at_once(config, block)
    assert outcome.memory.alert.phase is Phase.FIRING
    more = follow(
        config, [[Rows(block), Watermark(int(block.step.max()))], *emptied(block, outcome.findings)]
    )
    assert more.memory.alert.phase is Phase.FIRING


def emptied(block: Block, findings: list[Finding]) -> list[list[Rows | Watermark]]:
    """Evaluations of later steps with rows of the series of the findings that have no elements and no probes."""
    last = int(block.step.max())
    infos = {info.name: info for info in block.catalogue}
    series = dict.fromkeys((found.tensor, found.mode, found.worker) for found in findings)
    evaluations: list[list[Rows | Watermark]] = []
    for step in range(last + 1, last + EMPTY_STEPS):
        rows = [Row(step, infos[name], [], mode, worker) for name, mode, worker in series]
        evaluations.append([Rows(block_of(rows)), Watermark(step)])
    return evaluations


def of_steps(kinds: str) -> Block:
    """A series, a character a step: x has a NaN among its elements, . has not, - has no elements."""
    values = {"x": [np.nan, 1.0], ".": [1.0, 1.0], "-": []}
    return block_of([Row(step, LAYER, values[kind]) for step, kind in enumerate(kinds)])


CONFIG = RuleConfig.model_validate(
    {
        "rule": "non_finite_values",
        "params": {"whole_steps": False},
        "for": {"steps": 3},
        "keep_firing": {"steps": 2},
    }
)


@pytest.mark.parametrize(
    ("kinds", "phases"),
    [
        ("xx--x", [Phase.PENDING, Phase.FIRING]),  # an inconclusive row does not end a streak of findings
        ("xx-", [Phase.PENDING]),  # nor does it make it longer
        ("xxx-----", [Phase.PENDING, Phase.FIRING]),  # it resolves nothing
        ("xxx.-----", [Phase.PENDING, Phase.FIRING]),  # and does not complete what would
        ("xxx.-.", [Phase.PENDING, Phase.FIRING, Phase.RESOLVED]),  # nor end it
    ],
)
def test_inconclusive_rows_count_for_nothing(kinds: str, phases: list[Phase]) -> None:
    outcome = all_at_once(CONFIG, of_steps(kinds))
    assert [change.phase for change in outcome.transitions] == phases


@settings(max_examples=examples(60))
@given(st.text("x-", min_size=1, max_size=40))
def test_a_series_that_is_faulty_wherever_it_is_conclusive_never_resolves(kinds: str) -> None:
    outcome = all_at_once(CONFIG, of_steps("xxx" + kinds))
    assert outcome.memory.alert.phase is Phase.FIRING


@settings(max_examples=examples(60))
@given(st.text("x.-", max_size=40))
def test_a_series_that_becomes_sound_resolves(kinds: str) -> None:
    outcome = all_at_once(CONFIG, of_steps("xxx" + kinds + ".-."))
    assert outcome.notified[-1].phase is Phase.RESOLVED
    assert outcome.memory.alert.phase in (Phase.RESOLVED, Phase.INACTIVE)


@settings(max_examples=examples(60))
@given(st.text("x.-", min_size=1, max_size=40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_inconclusive_rows_are_as_if_they_had_not_come(kinds: str, absent: list[bool]) -> None:
    block = of_steps(kinds)
    present = [kind != "-" or not absent[step] for step, kind in enumerate(kinds)]
    some = block.where(np.array(present))
    assert all_at_once(CONFIG, some).transitions == all_at_once(CONFIG, block).transitions


@pytest.mark.parametrize(
    ("rule", "infos"), [("loss_spike", (LOSS,)), ("exploding_gradient", (LAYER,)), ("dead_relu", (OUTPUT,))]
)
def test_all_nan_rows_are_no_evidence_about_finite_values(rule: str, infos: tuple[object, ...]) -> None:
    block = block_of([Row(0, info, [np.nan, np.nan]) for info in (LAYER, LOSS, OUTPUT) if info in infos])
    assert not RULES[rule].conclusive(RULES[rule].params_type.model_construct(), block).any()
