"""An alert names the likeliest cause among all received findings, whichever rank's rows arrive first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.rules.runs import Outcome, Rows, all_at_once, follow
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block, concatenate
from watchstep.format.tensors import TensorInfo
from watchstep_rules.backtest.backtest import _transition, _transition_from, backtest
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition, coalesce
from watchstep_rules.engine.incident import RunName
from watchstep_rules.engine.inhibition import AlertUpdate, inhibit
from watchstep_rules.rule import Finding, finding_at, likelihood

NAN = RuleConfig(rule="non_finite_values")
OUTPUT = tensor("0:output", "activations", role="output")
LOSS = tensor("loss", "losses", role="loss", shape=())
GRADIENT = gradient("0")


def rank(worker: int, steps: Sequence[int], *bad: tuple[int, TensorInfo]) -> Rows:
    """A rank's rows of three tensors, NaN at the given positions."""
    return Rows(
        block_of(
            [
                Row(step, info, [math.nan if (step, info) in bad else 1.0], worker=worker)
                for step in steps
                for info in (OUTPUT, LOSS, GRADIENT)
            ]
        )
    )


REDUCED = rank(0, range(8), (5, GRADIENT), (6, GRADIENT), (7, GRADIENT))
CULPRIT = rank(1, range(8), (5, OUTPUT), (5, LOSS), *((step, GRADIENT) for step in (5, 6, 7)))


def named(outcome: Outcome) -> tuple[int, int, str]:
    """Step, rank and tensor that the alert names in the end."""
    finding = outcome.memory.alert.finding
    assert finding is not None
    return finding.step, finding.worker, finding.tensor


@pytest.mark.parametrize("order", [[REDUCED, CULPRIT], [CULPRIT, REDUCED]], ids=["later", "first"])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_rank_whose_own_data_were_bad_is_named(order: list[Rows], at_once: bool) -> None:
    outcome = follow(NAN, [order] if at_once else [[rows] for rows in order])
    assert named(outcome) == (5, 1, OUTPUT.name)
    (fired,) = coalesce(outcome.transitions)
    assert (fired.phase, fired.step, fired.revised, fired.finding) == (
        Phase.FIRING,
        5,
        False,
        outcome.memory.alert.finding,
    )
    assert [change.revised for change in outcome.transitions] == (
        [False, True] if order[0] is REDUCED and not at_once else [False]
    )


def test_an_alert_fires_at_once_and_is_revised_by_later_rows() -> None:
    first = follow(NAN, [[REDUCED]])
    assert [(change.step, change.revised) for change in first.transitions] == [(5, False)]
    assert named(first) == (5, 0, GRADIENT.name)
    (revised,) = follow(NAN, [[], [CULPRIT]], first.memory).transitions
    assert (revised.phase, revised.step, revised.revised) == (Phase.FIRING, 5, True)
    assert coalesce([revised]) == [revised]


def test_an_earlier_step_of_a_rank_that_lags_is_the_likelier_cause() -> None:
    outcome = follow(NAN, [[REDUCED], [rank(1, range(8), (3, GRADIENT))]])
    assert named(outcome) == (3, 1, GRADIENT.name)
    assert [(change.step, change.since_step) for change in outcome.transitions] == [(5, 5), (3, 3)]


def test_later_steps_and_less_likely_causes_change_nothing() -> None:
    worse = rank(1, range(9), (5, GRADIENT), (6, OUTPUT), (7, LOSS), (8, OUTPUT))
    assert named(follow(NAN, [[REDUCED], [worse]])) == (5, 0, GRADIENT.name)


@settings(max_examples=60)
@given(
    st.lists(
        st.dictionaries(st.sampled_from([OUTPUT, LOSS, GRADIENT]), st.integers(3, 6)), min_size=3, max_size=3
    )
)
def test_the_order_in_which_ranks_come_does_not_matter(bad: list[dict[TensorInfo, int]]) -> None:
    def rows(worker: int) -> Rows:
        since = bad[worker].items()
        return rank(worker, range(9), *((step, info) for info, first in since for step in range(first, 9)))

    ranks = [rows(worker) for worker in range(3)]
    named_findings = {
        repr(follow(NAN, [[rows_of_rank] for rows_of_rank in order]).memory.alert.finding)
        for order in permutations(ranks)
    }
    assert len(named_findings) == 1
    everything = [finding for rows_of_rank in ranks for finding in follow(NAN, [[rows_of_rank]]).findings]
    event(f"bad: {bool(everything)}")
    if everything:
        assert named_findings == {repr(min(everything, key=likelihood))}


def test_a_backtest_and_its_report_have_the_likeliest_finding() -> None:
    (outcome,) = backtest(all_rows(), [NAN])
    (fired,) = outcome.fired
    assert fired.finding is not None
    assert (fired.step, fired.finding.worker, fired.finding.tensor) == (5, 1, OUTPUT.name)
    later = follow(NAN, [[REDUCED], [CULPRIT]]).transitions
    assert [change.revised for change in later] == [False, True]
    for change in [*outcome.transitions, *later]:
        assert _transition_from(_transition(NAN, change, RunName("p", "r", "a"))) == change


def all_rows() -> Block:
    return concatenate([REDUCED.block, CULPRIT.block])


def found(worker: int) -> Finding:
    return finding_at("test", all_rows(), 8 * 3 * worker, value=1.0, threshold=0.0, message="bad")


def test_revisions_neither_lengthen_nor_end_what_a_rule_keeps_quiet() -> None:
    def change(step: int, worker: int, *, revised: bool = False) -> Transition:
        return Transition(Phase.FIRING, step, found(worker), step, 0, revised=revised)

    source = RuleConfig(rule="non_finite_values", inhibits=("target",))
    target = RuleConfig(rule="overfit", name="target")
    memory = all_at_once(NAN, REDUCED.block).memory.alert
    updates = inhibit(
        [
            AlertUpdate(source, memory, [change(3, 1), change(3, 0, revised=True)]),
            AlertUpdate(target, memory, [change(4, 1), change(4, 0, revised=True)]),
        ],
        9,
    )
    assert len(updates[0].memory.firing_spans) == 1
    assert [update.inhibited_by for update in updates[1].transitions] == [
        "non_finite_values",
        "non_finite_values",
    ]
    assert coalesce(updates[1].transitions) == [
        Transition(Phase.FIRING, 4, found(0), 4, 0, inhibited_by="non_finite_values")
    ]
