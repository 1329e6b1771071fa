"""The evaluation of a rule config, its inputs and its limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.runs import (
    Event,
    Rows,
    Watermark,
    all_at_once,
    follow,
    in_steps,
    norms,
    runs,
    splits,
    steps_of,
)
from tests.sdk.format.blocks import Row, block_of, gradient, rows_of, tensor
from watchstep.format.block import Block, concatenate
from watchstep.format.tensors import Placement
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.builtin.gradients.exploding_gradient import ExplodingGradient
from watchstep_rules.config.rule_config import RuleConfig, TensorScope
from watchstep_rules.engine.alert import Phase
from watchstep_rules.engine.judge import JudgingLimits, RuleHealth, RuleMemory, judge, judge_set
from watchstep_rules.engine.rule_inputs import JudgingProgress, RuleInputs
from watchstep_rules.engine.series_limit import MOST_SERIES, limited
from watchstep_rules.registry import RULES
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import merge_shards

# Evaluation


NON_FINITE = RuleConfig(rule="non_finite_values")
GRADIENT = gradient("a")


class CountState(State):
    """How many rows were seen."""

    rows: int = 0


class Sizes(Rule[Params, CountState]):
    """Has a finding for every row, with its number of elements and of earlier rows; fails on NaN."""

    name = "sizes"
    summary = "for tests"
    needs = Needs(collections=("gradients",))
    merge = "watermark"

    def lookback(self, params: Params) -> int:
        return 2

    def evaluate(
        self, params: Params, state: CountState, context: Block, block: Block, now: int
    ) -> tuple[CountState, list[Finding]]:
        if block.statistics.nan.any():
            raise ZeroDivisionError("no such norm")
        return CountState(rows=state.rows + len(block)), [
            finding_at(
                self.name,
                block,
                row,
                value=float(block.statistics.count[row]),
                threshold=float(len(context)),
                message="",
            )
            for row in range(len(block))
        ]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> RuleConfig:
    monkeypatch.setitem(RULES, "sizes", Sizes())
    return RuleConfig(rule="sizes")


def rows(steps: list[int], worker: int = 0, **more: Any) -> Rows:
    return Rows(block_of([Row(step, GRADIENT, [1.0], worker=worker, **more) for step in steps]))


def test_a_rule_without_rows_has_no_data() -> None:
    outcome = follow(NON_FINITE, [[], [Watermark(3)]])
    assert outcome.memory == RuleMemory()
    assert outcome.memory.health is RuleHealth.NO_DATA
    outcome = follow(NON_FINITE, [[Rows(block_of([Row(0, tensor("x", "system"), [math.nan])]))]])
    assert outcome.memory.health is RuleHealth.NO_DATA


def test_a_rule_that_raises_reports_it_and_keeps_its_alert(sizes: RuleConfig) -> None:
    bad = Rows(block_of([Row(2, GRADIENT, [math.nan])]))
    outcome = follow(sizes, [[rows([0, 1]), Watermark(1)], [bad, Watermark(2)]])
    assert outcome.memory.health is RuleHealth.ERROR
    assert outcome.memory.problem == "ZeroDivisionError: no such norm"
    assert outcome.memory.alert.phase is Phase.FIRING
    assert (outcome.memory.evaluated_rows, outcome.memory.state) == (2, {"rows": 2})
    again = follow(sizes, [[rows([3]), Watermark(3)]], outcome.memory)
    assert (again.memory.health, again.memory.problem) == (RuleHealth.OK, "")
    assert again.memory.evaluated_rows == 3


def test_per_worker_rules_judge_at_once_and_sealed_ones_wait(sizes: RuleConfig) -> None:
    assert steps_of(
        follow(NON_FINITE, [[Rows(block_of([Row(7, GRADIENT, [math.nan])]))]]), GRADIENT.name
    ) == [7]
    outcome = follow(sizes, [[rows([0, 1, 2])], [Watermark(1)], [Watermark(1)], [Watermark(2)]])
    assert steps_of(outcome, GRADIENT.name) == [0, 1, 2]
    assert outcome.memory.evaluated_rows == 3


def test_evaluated_steps_are_counted_once_for_any_blocks() -> None:
    blocks = [rows([0, 1]), rows([1, 2, 2]), rows([1]), rows([5])]
    memory = follow(NON_FINITE, [[block] for block in blocks]).memory
    assert (memory.evaluated_rows, memory.evaluated_steps, memory.last_step) == (7, 4, 5)


def test_rules_that_wait_judge_nothing_without_a_watermark(sizes: RuleConfig) -> None:
    assert follow(sizes, [[rows([0, 1, 2])]]).findings == []


def test_each_row_is_judged_once_with_the_rows_before_it_as_context(sizes: RuleConfig) -> None:
    outcome = follow(
        sizes,
        [
            [rows([0]), Watermark(0)],
            [rows([1]), Watermark(1)],
            [rows([2]), Watermark(2)],
            [rows([3]), Watermark(3)],
        ],
    )
    assert [(finding.step, finding.threshold) for finding in outcome.findings] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 2),
    ]


def test_late_rows_are_context_to_rules_that_wait_for_seals(sizes: RuleConfig) -> None:
    outcome = follow(sizes, [[rows([0, 1]), Watermark(1)], [rows([1], worker=1), rows([2]), Watermark(2)]])
    assert [(finding.step, finding.worker, finding.threshold) for finding in outcome.findings] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 3),
    ]


def test_late_rows_are_judged_by_rules_that_take_each_worker_by_itself() -> None:
    late = Rows(block_of([Row(1, GRADIENT, [math.nan], worker=1)]))
    assert steps_of(follow(NON_FINITE, [[rows([0, 1]), Watermark(1)], [late]]), GRADIENT.name) == [1]


def test_shards_are_merged_when_their_step_is_sealed(sizes: RuleConfig) -> None:
    parts = [rows([0], worker=worker, place=Placement(worker, 2)) for worker in (1, 0)]
    splits: tuple[Sequence[Sequence[Event]], ...] = (
        [[*parts, Watermark(0)]],
        [[parts[0]], [parts[1]], [Watermark(0)]],
    )
    for split in splits:
        (finding,) = follow(sizes, split).findings
        assert (finding.worker, finding.value) == (0, 2.0)


def test_a_shard_that_never_came_leaves_the_others(sizes: RuleConfig) -> None:
    (finding,) = follow(sizes, [[rows([0], worker=1, place=Placement(1, 2)), Watermark(0)]]).findings
    assert (finding.worker, finding.value) == (0, 1.0)


@pytest.mark.parametrize("damage", [{"version": 0}, {"state": {"rows": "many"}}, {"state": {"other": 1}}])
def test_state_of_another_version_is_rebuilt_from_the_context(
    sizes: RuleConfig, damage: dict[str, Any]
) -> None:
    without_history = all_at_once(sizes, block_of([Row(step, GRADIENT, [1.0]) for step in range(5)]))
    assert without_history.memory.state == {"rows": 5}
    history = block_of([Row(step, GRADIENT, [1.0]) for step in (3, 4)])
    memory = without_history.memory.model_copy(update=damage)
    verdict = judge(sizes, memory, history, rows([5]).block, JudgingProgress(4, 5, 0))
    assert verdict.memory.state == {"rows": 3}
    assert verdict.memory.version == Sizes.version
    assert [finding.step for finding in verdict.findings] == [5]


def test_a_rebuilt_rule_knows_its_past_without_a_new_warm_up() -> None:
    config = RuleConfig(rule="exploding_gradient")
    history = in_steps(norms("a", [1.0] * 20))
    memory = RuleMemory(version=ExplodingGradient.version + 1, state={"series": {}})
    arrived = in_steps(norms("a", [150.0], first=20))
    verdict = judge(config, memory, history, arrived, JudgingProgress(19, 20, 0))
    assert [finding.step for finding in verdict.findings] == [20]


def test_only_tensors_in_scope_are_judged(sizes: RuleConfig) -> None:
    config = sizes.model_copy(update={"tensors": TensorScope(exclude="b")})
    outcome = all_at_once(config, in_steps(norms("a", [1.0] * 2), norms("b", [1.0] * 2)))
    assert {finding.tensor for finding in outcome.findings} == {"a.weight:gradient"}


def test_a_long_problem_is_cut(sizes: RuleConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("x" * 10_000)

    monkeypatch.setattr(Sizes, "evaluate", fail)
    assert len(all_at_once(sizes, rows([0]).block).memory.problem) == 500


class Elsewhere(Sizes):
    """Has a finding at a step that the column of steps does not contain."""

    name = "elsewhere"

    def evaluate(
        self, params: Params, state: CountState, context: Block, block: Block, now: int
    ) -> tuple[CountState, list[Finding]]:
        state, findings = super().evaluate(params, state, context, block, now)
        return state, [finding.model_copy(update={"step": 10**30}) for finding in findings]


class Lost(Sizes):
    """Its lookback raises."""

    name = "lost"

    def lookback(self, params: Params) -> int:
        raise ZeroDivisionError("no such reach")


class Needy(Sizes):
    """Its needs raise."""

    name = "needy"

    def needed(self, params: Params) -> Needs:
        raise ZeroDivisionError("no such needs")


class AnyState(State):
    """Anything."""

    value: Any = None


class Hoarder(Rule[Params, AnyState]):
    """Remembers what cannot be written down."""

    name = "hoarder"
    summary = "for tests"
    needs = Needs(collections=("gradients",))
    merge = "watermark"

    def evaluate(
        self, params: Params, state: AnyState, context: Block, block: Block, now: int
    ) -> tuple[AnyState, list[Finding]]:
        return AnyState(value=object()), []


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (Elsewhere(), "OverflowError: "),
        (Lost(), "ZeroDivisionError: no such reach"),
        (Needy(), "ZeroDivisionError: no such needs"),
        (Hoarder(), "PydanticSerializationError: "),
    ],
)
def test_whatever_fails_of_a_rule_config_is_its_own_health(
    sizes: RuleConfig, monkeypatch: pytest.MonkeyPatch, rule: Any, problem: str
) -> None:
    monkeypatch.setitem(RULES, rule.name, rule)
    (bad, good) = backtest(in_steps(norms("a", [1.0, 3.0])), [RuleConfig(rule=rule.name), sizes])
    assert (bad.health, good.health) == (RuleHealth.ERROR, RuleHealth.OK)
    assert bad.problem.startswith(problem)
    assert good.found == 2


def test_no_time_is_too_long_for_a_streak() -> None:
    longest = {"steps": 10**9, "seconds": 30 * 86400}
    config = RuleConfig.model_validate({"rule": "non_finite_values", "for": longest, "keep_firing": longest})
    outcome = all_at_once(config, in_steps(norms("a", [1.0, math.nan, math.nan])))
    assert outcome.memory.health is RuleHealth.OK
    assert len(outcome.findings) == 2


def test_memory_reads_back_from_json_with_infinite_values() -> None:
    outcome = all_at_once(
        RuleConfig(rule="exploding_gradient"), in_steps(norms("a", [1.0, 1e5, math.inf, math.nan]))
    )
    text = outcome.memory.model_dump_json()
    assert "Infinity" not in text.replace('"Infinity"', "")
    assert "NaN" not in text.replace('"NaN"', "")
    assert RuleMemory.model_validate_json(text) == outcome.memory


class Before(Rule[Params, State]):
    """Has a finding for every row, with the number of elements of the three earlier rows of its series."""

    name = "before"
    summary = "for tests"
    needs = Needs(collections=())
    merge = "watermark"

    def lookback(self, params: Params) -> int:
        return 3

    def evaluate(
        self, params: Params, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        rows = concatenate([context, block])
        series = [
            (rows.info(row).name, int(rows.worker[row]), int(rows.mode[row])) for row in range(len(rows))
        ]
        findings = []
        for row in range(len(context), len(rows)):
            earlier = [place for place in range(row) if series[place] == series[row]][-3:]
            seen = float(rows.statistics.count[earlier].sum())
            findings.append(finding_at(self.name, rows, row, value=seen, threshold=0, message=series[row][0]))
        return state, findings


@pytest.mark.release
@settings(max_examples=examples(100))
@given(events=runs(), data=st.data())
def test_a_rule_looks_back_on_the_same_rows_however_a_run_is_split(
    events: list[Event], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(RULES, "before", Before())
        config = RuleConfig(rule="before")
        outcome = follow(config, data.draw(splits(events)))
        assert (
            outcome
            == follow(config, data.draw(splits(events)))
            == follow(config, [[event] for event in events])
        )
        assert outcome.memory.health is not RuleHealth.ERROR


def test_evidence_alone_is_no_data() -> None:
    config = RuleConfig(rule="exploding_gradient", tensors=TensorScope(include="no such layer"))
    block = block_of([Row(0, gradient("a"), [1.0]), Row(0, tensor("loss", "losses", shape=()), [1.0])])
    memory = all_at_once(config, block).memory
    assert (memory.health, memory.evaluated_rows) == (RuleHealth.NO_DATA, 0)
    memory = all_at_once(RuleConfig(rule="exploding_gradient"), block).memory
    assert (memory.health, memory.evaluated_rows) == (RuleHealth.OK, 1)


# Limits of an evaluation


NAN = float("nan")
CONFIGS = [RuleConfig(rule="non_finite_values"), RuleConfig(rule="nan_or_inf")]


def inputs(step: int, value: float = NAN) -> RuleInputs:
    rows = block_of([Row(step, gradient(f"layer{index}", order=index), [value]) for index in range(5)])
    return RuleInputs(Block.empty(), rows, JudgingProgress(-1, step, 0))


def test_findings_beyond_the_limit_are_counted() -> None:
    verdicts = judge_set([(config, RuleMemory()) for config in CONFIGS], inputs(3), JudgingLimits(findings=2))
    assert [(len(verdict.findings), verdict.finding_count) for verdict in verdicts] == [(2, 5), (2, 5)]
    unlimited = judge_set([(config, RuleMemory()) for config in CONFIGS], inputs(3))
    assert [verdict.memory for verdict in verdicts] == [verdict.memory for verdict in unlimited]


def test_rules_after_the_time_limit_keep_their_state_with_an_error() -> None:
    fired = judge_set([(config, RuleMemory()) for config in CONFIGS], inputs(3))
    memories = [verdict.memory for verdict in fired]
    late = judge_set(list(zip(CONFIGS, memories, strict=True)), inputs(4, 1.0), JudgingLimits(seconds=-1.0))
    for verdict, memory in zip(late, memories, strict=True):
        assert verdict.memory.health is RuleHealth.ERROR
        assert "took more than" in verdict.memory.problem
        assert verdict.memory.alert == memory.alert
        assert not verdict.transitions


def test_an_exception_of_the_check_ends_the_evaluation() -> None:
    def ending() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge_set([(CONFIGS[0], RuleMemory())], inputs(3), JudgingLimits(check_running=ending))


def test_time_in_which_the_process_was_suspended_leaves_out_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = itertools.count(0.0, 3600.0)
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    verdicts = judge_set(
        [(config, RuleMemory()) for config in CONFIGS], inputs(3), JudgingLimits(seconds=30.0)
    )
    assert all(verdict.memory.health is not RuleHealth.ERROR for verdict in verdicts)


# Inputs


GRADIENTS = RuleConfig(rule="exploding_gradient", params={"window": 2})
LOSSES = RuleConfig(rule="loss_spike", params={"window": 5}, tensors=TensorScope(exclude="val"))


def in_scope(config: RuleConfig, block: Block) -> Block:
    needs = config.implementation.needed(config.parameters)
    return block.where(
        block.mask_of_tensors([config.tensors.selects(info, needs) for info in block.catalogue])
    )


def of_roles(block: Block, roles: tuple[str, ...], others: bool) -> Block:
    """Rows of tensors with some roles, all where there are none; or the others."""
    return block.where(
        block.mask_of_tensors([(not roles or info.role in roles) != others for info in block.catalogue])
    )


@pytest.mark.ci
@given(runs(), st.integers(-1, 24), st.integers(0, 8))
def test_rows_that_rules_share_are_those_that_each_would_take_alone(
    events: list[Event], before: int, further: int
) -> None:
    parts = [event.block for event in events if isinstance(event, Rows)]
    half = len(parts) // 2
    history, arrived = concatenate(parts[:half]), concatenate(parts[half:])
    shared = RuleInputs(history, arrived, JudgingProgress(before, before + further, 0))
    for config in (GRADIENTS, LOSSES, GRADIENTS):
        pool = in_scope(config, concatenate([history, arrived]))
        due = (pool.step > before) & (pool.step <= before + further)
        reach = config.implementation.lookback(config.parameters)
        assert rows_of(shared.block(config)) == rows_of(merge_shards(pool.where(due)))
        context, earlier = shared.context(config), merge_shards(pool.where(pool.step <= before))
        roles = ("gradient",) if config is GRADIENTS else ()
        for evidence in (False, True):
            depth = 1 if config is GRADIENTS and evidence else reach
            assert rows_of(of_roles(context, roles, evidence)) == rows_of(
                of_roles(earlier, roles, evidence).tail(depth)
            )
    assert rows_of(shared.block(NON_FINITE)) == rows_of(in_scope(NON_FINITE, arrived))
    assert len(shared.context(NON_FINITE)) == 0


# The limit of series


LAYERS = 100
WORKERS = MOST_SERIES // LAYERS + 50
CONFIG = RuleConfig.model_validate({"rule": "nan_or_inf"})


def all_workers(step: int, value: float) -> Block:
    """One row of each layer on each worker."""
    infos = [gradient(f"layer{index:03d}", order=index) for index in range(LAYERS)]
    return block_of([Row(step, info, [value], worker=worker) for worker in range(WORKERS) for info in infos])


@pytest.mark.ci
def test_an_alert_about_more_series_than_the_limit_fires_for_the_first_cause_and_resolves() -> None:
    bad = all_workers(3, NAN)
    verdict = judge(CONFIG, RuleMemory(), Block.empty(), bad, JudgingProgress(-1, 3, 0))
    assert len(verdict.findings) == LAYERS * WORKERS
    assert [change.phase for change in verdict.transitions] == [Phase.FIRING]
    finding = verdict.transitions[-1].finding
    assert finding is not None
    assert (finding.step, finding.worker) == (3, 0)
    state = verdict.memory.model_dump_json()
    assert len(state) < 400 * MOST_SERIES

    healthy = all_workers(4, 1.0)
    after = judge(CONFIG, verdict.memory, bad, healthy, JudgingProgress(3, 4, 0))
    assert [change.phase for change in after.transitions] == [Phase.RESOLVED]


def test_followed_series_keep_their_findings() -> None:
    bad = block_of([Row(3, gradient(f"layer{index}", order=index), [NAN]) for index in range(10)])
    findings = judge(CONFIG, RuleMemory(), Block.empty(), bad, JudgingProgress(-1, 3, 0)).findings
    followed = {"layer9.weight:gradient@0/train", "other.weight:gradient@0/train"}
    chosen = limited(findings, followed, most=4)
    assert [finding.tensor for finding in chosen] == [
        "layer0.weight:gradient",
        "layer1.weight:gradient",
        "layer9.weight:gradient",
    ]
    assert limited(findings, followed, most=12) is findings
