"""Findings, by themselves and in columns."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from tests.rules.runs import segments
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block, concatenate
from watchstep_rules.builtin.gradients.nan_or_inf import NanOrInf
from watchstep_rules.builtin.gradients.non_finite_values import NonFiniteValues, NonFiniteValuesParams
from watchstep_rules.config.rule_config import Timing
from watchstep_rules.engine import alert
from watchstep_rules.engine.alert import AlertMemory, Watermarks, advance
from watchstep_rules.engine.streaks import JudgedRows
from watchstep_rules.registry import RULES
from watchstep_rules.rule import (
    Finding,
    FindingRows,
    Hits,
    cause_rank,
    finding_at,
    finding_of_run,
    likelihood,
)


def test_a_finding_states_the_place_of_its_row() -> None:
    block = block_of([Row(3, gradient("conv", order=4), [1.0], mode="eval", worker=2)])
    finding = finding_at("rule", block, 0, value=1.0, threshold=0.5, message="large")
    assert finding == Finding(
        rule="rule", step=3, mode="eval", worker=2, tensor="conv.weight:gradient", module="conv",
        module_type="Linear", role="gradient", value=1.0, threshold=0.5, message="large",
        time_ns=3_000_002, cause_rank=(3, -4),
    )  # fmt: skip


def test_causes_come_in_the_order_in_which_data_flows() -> None:
    flow = [
        tensor("first.weight", "weights", order=1),
        tensor("second.bias", "biases", order=2),
        tensor("first.output", "activations", order=1),
        tensor("second.output", "activations", order=2),
        tensor("loss", "losses"),
        gradient("second", order=2),
        gradient("first", order=1),
        tensor("accuracy", "metrics"),
    ]
    ranks = [cause_rank(info) for info in flow]
    assert ranks == sorted(ranks)


def test_values_that_are_not_finite_read_back() -> None:
    block = block_of([Row(0, gradient("a"), [1.0])])
    for value in (math.inf, -math.inf):
        finding = finding_at("rule", block, 0, value=value, threshold=0.0, message="")
        assert Finding.model_validate_json(finding.model_dump_json()) == finding


def test_a_finding_about_the_run_names_no_tensor() -> None:
    finding = finding_of_run("rule", 7, 9, value=1900.0, threshold=1800.0, message="nothing for 1900 s")
    assert (finding.tensor, finding.step, finding.time_ns, finding.mode) == ("", 7, 9, "global")
    block = block_of([Row(7, gradient("conv", order=4), [1.0])])
    assert finding.cause_rank > finding_at("rule", block, 0, value=0, threshold=0, message="").cause_rank


# Findings in columns equal a list of the same findings, and few of them are built.


NAN = math.nan
OF_NUMBERS = ("nan_or_inf", "non_finite_values")


@pytest.mark.ci
@pytest.mark.parametrize("name", OF_NUMBERS)
@pytest.mark.parametrize("timing", [Timing(), Timing(hold_steps=2, keep_steps=3)])
def test_an_alert_over_columns_is_that_over_a_list(
    name: str, timing: Timing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert, "PART_ROWS", 64)  # long blocks are taken in parts
    rule = RULES[name]
    number = 0
    for seed in range(25):
        random = Random(seed)
        memories = AlertMemory(), AlertMemory()
        state, context = rule.state_type(), Block.empty()
        parts = [part for worker in (0, 1) for part in segments(random, worker, frozenset())]
        for watermark, block in enumerate([*parts, concatenate(parts)]):
            state, findings = rule.evaluate(rule.params_type(), state, context, block, 0)
            assert isinstance(findings, FindingRows)
            watermarks = Watermarks(watermark - 1, watermark)
            columnar, transitions = advance(
                memories[0], timing, JudgedRows.of(block), findings, watermarks=watermarks
            )
            listed, other_transitions = advance(
                memories[1], timing, JudgedRows.of(block), list(findings), watermarks=watermarks
            )
            assert (columnar, transitions) == (listed, other_transitions)
            memories = columnar, listed
            assert [findings.likelihood(place) for place in range(len(findings))] == list(
                map(likelihood, findings)
            )
            number += len(findings)
    assert number > 100


def test_an_alert_builds_the_findings_that_it_names() -> None:
    block = block_of(
        [Row(step, tensor(f"loss{place}", "losses"), [NAN]) for step in range(100) for place in range(30)]
    )
    built: list[int] = []

    def words(row: int, value: float, threshold: float) -> str:
        built.append(row)
        return f"{value} and {threshold} in {row}"

    columns = Hits(np.arange(3000), np.ones(3000), np.zeros(3000))
    findings = FindingRows("r", block, columns, words)
    memory, transitions = advance(AlertMemory(), Timing(hold_steps=2), JudgedRows.of(block), findings)
    assert [change.step for change in transitions] == [0, 1]
    assert len(memory.finding_streaks) == 30
    assert len(built) <= 2


def test_columns_behave_as_a_sequence() -> None:
    rows = [Row(step, tensor("loss", "losses"), [NAN, 1.0]) for step in range(4)]
    rule = NonFiniteValues()
    _, found = rule.evaluate(NonFiniteValuesParams(), rule.state_type(), Block.empty(), block_of(rows), 0)
    assert found == list(found)
    assert list(found) == found
    assert found[1:3] == [found[1], found[2]]
    assert found[-1].step == 3
    assert found != found[:3]
    assert found != "loss"
    assert found[4:] == []
    with pytest.raises(IndexError):
        found[4]
    assert repr(found) == "FindingRows('non_finite_values', 4 findings)"
    none = NanOrInf().evaluate(
        NanOrInf().params_type(), NanOrInf().state_type(), Block.empty(), block_of(rows), 0
    )[1]
    assert none == []
    assert not none
