"""Backtests of recorded runs, and sweeps over parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.rules.custom.programs import HEAD, LOUD
from tests.rules.runs import LAST, all_at_once, in_steps, norms, segments
from watchstep.errors import NotFoundError, RuleError
from watchstep.format import documents, journal, layout, segment
from watchstep.format.block import Block, concatenate
from watchstep.format.documents import RunDocument
from watchstep.format.journal import JournalEvaluation, JournalPart, JournalSegment, RankRows
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.reading.compaction import compact
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.backtest import replay
from watchstep_rules.backtest.backtest import (
    Failed,
    JudgingOrder,
    Replayed,
    ReplayOutcome,
    Task,
    backtest,
    backtest_many,
    backtest_run,
    backtest_sets,
    judge_run,
    location_of,
)
from watchstep_rules.backtest.sweep import parse_sweep, variations
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.engine.judge import RuleHealth

# Backtests


BACKTEST_CONFIGS = (
    RuleConfig(rule="non_finite_values", params={"allow_infinity_in": []}),
    RuleConfig(rule="exploding_gradient", params={"growth": 1.5, "warmup": 3, "window": 3}),
    RuleConfig(rule="vanishing_gradient", params={"threshold": 10.0, "relative": 0.9}),
)
NODE = WriterId("a1", "node", "node-x")


def run_store(folder: Path) -> Store:
    store = Store.open(folder, create=True).child("vision/first/")
    store.create(layout.RUN_DOCUMENT, documents.encode(RunDocument("vision", "first", 1)))
    return store


def put(store: Store, writer: WriterId, seq: int, block: Block) -> SegmentKey:
    key = SegmentKey(writer, seq, int(block.step.min()), int(block.step.max()))
    store.put(key.path, segment.encode(block))
    return key


def recorded(store: Store, seed: int) -> None:
    """Two workers' segments."""
    for worker in (0, 1):
        for seq, block in enumerate(segments(Random(seed + worker), worker, frozenset())):
            put(store, WriterId("a1", "node", f"w{worker}"), seq, block)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rows", "megabytes"), [(1, 1024), (40, 1024), (500_000, 1024), (500_000, 0.1)])
def test_a_run_read_in_parts_has_the_findings_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, rows: int, megabytes: float
) -> None:
    monkeypatch.setattr(replay, "ROWS", rows)
    monkeypatch.setattr(replay, "MEGABYTES", megabytes)
    recorded(run_store(tmp_path), seed)
    run = open_run(tmp_path / "vision" / "first")
    (attempt,) = backtest_run(run, BACKTEST_CONFIGS).attempts
    result = backtest(run.rows("a1"), BACKTEST_CONFIGS)
    assert any(outcome.findings for outcome in result)
    assert attempt.outcomes == result
    assert attempt.order is JudgingOrder.STEPS
    assert attempt.notes == (replay.NO_JOURNAL,)


def test_sets_are_judged_by_themselves(tmp_path: Path) -> None:
    recorded(run_store(tmp_path), 1)
    location = tmp_path / "vision" / "first"
    loose = BACKTEST_CONFIGS[1].model_copy(update={"params": {"growth": 1e30}})
    first, second = backtest_sets(location, [BACKTEST_CONFIGS, [loose]])
    assert first == backtest_run(location, BACKTEST_CONFIGS)
    assert [outcome.findings for attempt in second.attempts for outcome in attempt.outcomes] == [[]]


def test_findings_beyond_the_first_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(run_store(tmp_path), 1)
    location = tmp_path / "vision" / "first"
    (whole,) = backtest_run(location, BACKTEST_CONFIGS[:1]).attempts
    monkeypatch.setattr("watchstep_rules.backtest.replay.FINDINGS_KEPT", 2)
    (cut,) = backtest_run(location, BACKTEST_CONFIGS[:1]).attempts
    everything, limited = whole.outcomes[0], cut.outcomes[0]
    assert limited.findings == everything.findings[:2]
    assert limited.found == everything.found == len(everything.findings) > 2


def ranks_of(block: Block) -> tuple[RankRows, ...]:
    found = []
    for rank in sorted({int(worker) for worker in block.worker}):
        steps = block.step[block.worker == rank]
        found.append(RankRows(rank, int(steps.min()), int(steps.max()), len(steps)))
    return tuple(found)


def ranks_of_one_writer(store: Store, *, with_ranks: bool = True) -> None:
    """Both ranks' rows in each segment of one writer, each at steps of its own; judged in two evaluations."""
    queues = [segments(Random(7 + worker), worker, frozenset()) for worker in (0, 1)]
    length = min(map(len, queues))
    blocks = [concatenate([queue.pop(0) for queue in queues]) for _ in range(length)]
    rest = [block for queue in queues for block in queue]
    blocks += [concatenate(rest)] if rest else []
    journaled = [
        JournalSegment(put(store, NODE, seq, block), ranks_of(block) if with_ranks else None)
        for seq, block in enumerate(blocks)
    ]
    evaluations = (
        JournalEvaluation(0, 5, 3, False, tuple(journaled[:1])),
        JournalEvaluation(1, 9, LAST, False, tuple(journaled[1:])),
    )
    store.create(layout.journal_part("a1", 0), journal.encode(JournalPart("a1", 0, evaluations)))


def replayed(folder: Path) -> tuple[JudgingOrder, tuple[str, ...], list[ReplayOutcome]]:
    (attempt,) = backtest_run(folder / "vision" / "first", BACKTEST_CONFIGS).attempts
    return attempt.order, attempt.notes, attempt.outcomes


@pytest.mark.parametrize("rows", [1, 500_000])
def test_ranks_that_one_writer_wrote_for_are_found_after_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(replay, "ROWS", rows)
    ranks_of_one_writer(run_store(tmp_path))
    before = replayed(tmp_path)
    assert before[:2] == (JudgingOrder.JOURNAL, ())
    compact(tmp_path / "vision" / "first", delete_after=0)
    assert replayed(tmp_path) == before


def test_without_ranks_in_the_journal_the_order_is_lost_with_the_segments(tmp_path: Path) -> None:
    ranks_of_one_writer(run_store(tmp_path), with_ranks=False)
    assert replayed(tmp_path)[0] is JudgingOrder.JOURNAL
    compact(tmp_path / "vision" / "first", delete_after=0)
    order, notes, _ = replayed(tmp_path)
    assert order is JudgingOrder.STEPS
    assert notes[0].endswith("is missing; rows are evaluated in the order of their steps")


def test_a_step_with_too_many_rows_is_refused_however_many_steps_the_run_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run_store(tmp_path)
    recorded(store, 1)
    (first, *_), (far, *_) = (segments(Random(seed), 2, frozenset()) for seed in (1, 2))
    put(store, WriterId("a1", "node", "far"), 0, replace(far, step=far.step + 2**40))
    put(store, WriterId("a1", "node", "dense"), 0, replace(first, step=first.step * 0))
    monkeypatch.setattr(replay, "MEGABYTES", 0.01)
    result = judge_run(str(tmp_path / "vision" / "first"), Task(BACKTEST_CONFIGS))
    assert isinstance(result, Failed)
    assert result.what == "the rows of step 0 take more than 0.01 MiB"


def test_a_journal_that_names_too_many_rows_at_once_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_of_one_writer(run_store(tmp_path))
    assert replayed(tmp_path)[0] is JudgingOrder.JOURNAL
    monkeypatch.setattr(replay, "_MOST_ROWS", 10)
    order, notes, _ = replayed(tmp_path)
    assert order is JudgingOrder.STEPS
    assert notes[0].startswith("an evaluation of the journal has more than 10 rows")


def test_rows_that_rules_look_back_to_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_of_one_writer(run_store(tmp_path))
    monkeypatch.setattr(replay, "MEGABYTES", 0.001)
    monkeypatch.setattr(replay, "_MEGABYTE", 1)
    result = judge_run(str(tmp_path / "vision" / "first"), Task(BACKTEST_CONFIGS))
    assert isinstance(result, Failed)


def test_a_run_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not found"):
        backtest_run(tmp_path / "vision" / "first", BACKTEST_CONFIGS)


# Sweeps


SWEEP_CONFIGS = (
    RuleConfig(rule="non_finite_values", inhibits=("vanishing_gradient",)),
    RuleConfig(rule="vanishing_gradient", hold=MinimumDuration(steps=5)),
    RuleConfig(rule="exploding_gradient", name="explosion", params={"window": 30}),
    RuleConfig(rule="oscillating_loss"),
)


def values(text: str) -> list[object]:
    return [setting.value for setting in parse_sweep(text, SWEEP_CONFIGS).settings]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("threshold=1e-9:1e-5:5", [1e-9, 1e-8, 1e-7, 1e-6, 1e-5]),
        ("vanishing_gradient.relative=0.001:0.003:3", [0.001, 0.002, 0.003]),
        ("threshold=1e-6,2e-6", [1e-7, 1e-6, 2e-6]),
        ("explosion.window=10:40:4", [10, 20, 30, 40]),
        ("explosion.window=29:31:9", [29, 30, 31]),
        ("explosion.growth=100:2:2", [2.0, 100.0]),
        ("non_finite_values.only_nan=true", [False, True]),
        ("vanishing_gradient.for=1,2", [1, 2, 5]),
    ],
)
def test_values_are_listed_or_spaced_and_include_the_current_value(text: str, found: list[object]) -> None:
    assert values(text) == found


def test_a_range_has_seven_values_and_marks_the_current_value() -> None:
    sweep = parse_sweep("threshold=1e-9:1e-3", SWEEP_CONFIGS)
    assert len(sweep.settings) == 7
    assert sweep.current == 1e-7
    assert str(sweep.settings[0]) == "vanishing_gradient.threshold=1e-09"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threshold", "no values"),
        ("=1", "no values"),
        ("nothing=1", "has a parameter 'nothing'"),
        ("other.threshold=1", "no rule config is named 'other'"),
        ("window=1,2", "explosion.window, oscillating_loss.window"),
        ("threshold=1e-9:x", "not a valid range"),
        ("threshold=1:2:3:4", "not a valid range"),
        ("threshold=1:2:1", "not a valid range"),
        ("threshold=1:inf", "not a valid range"),
        ("threshold=-1,1", "is not valid"),
        ("threshold=word", "is not valid"),
        ("vanishing_gradient.for=0", "is not valid"),
        ("vanishing_gradient.for=1:99999999999999999999:3", "is not valid"),
        ("vanishing_gradient.for=99999999999999999999", "not a valid value"),
        ("threshold=[", "not a valid value"),
        ("threshold=[1],{a}", "'[1]' is not a valid value"),
        ("threshold=2024-13-45", "not a valid value"),
        ("threshold=!!int abc", "not a valid value"),
        ("threshold=" + "9" * 5000, "is not valid"),
        ("threshold=1:" + "9" * 5000, "not a valid range"),
    ],
)
def test_what_cannot_be_swept_is_reported(text: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_sweep(text, SWEEP_CONFIGS)
    assert message in str(caught.value)


def test_the_parameters_of_a_python_rules_class_are_swept() -> None:
    configs = [
        RuleConfig(
            rule="python",
            name="loud",
            params={"source": LOUD, "class": "Loud", "params": {"threshold": 5.0}, "seconds": 7.0},
            hold=MinimumDuration(steps=2),
        ),
        RuleConfig(rule="vanishing_gradient"),
    ]
    for text, found in (
        ("loud.over=2,4", [2, 3, 4]),  # the class's default is 3
        ("over=1:5:3", [1, 3, 5]),
        ("loud.threshold=0.5", [0.5, 5.0]),
        ("loud.for=1", [1, 2]),
    ):
        assert [setting.value for setting in parse_sweep(text, configs).settings] == found
    with pytest.raises(RuleError, match="several rules have this parameter") as caught:
        parse_sweep("threshold=1,2", configs)
    assert "loud.threshold, vanishing_gradient.threshold" in caught.value.hint
    with pytest.raises(RuleError, match="no rule has a parameter 'share'") as caught:
        parse_sweep("loud.share=0.5", configs)
    assert caught.value.hint == "use one of for, over, threshold"
    with pytest.raises(RuleError, match=r"params\.over: Input should be a valid integer"):
        parse_sweep("loud.over=much", configs)
    sweeps = [parse_sweep("loud.over=2", configs), parse_sweep("loud.threshold=1", configs)]
    grid = variations(configs, sweeps)
    assert [variation.configs[0].params["params"] for variation in grid] == [
        {"threshold": threshold, "over": over} for over in (2, 3) for threshold in (1, 5.0)
    ]
    assert [variation.current for variation in grid] == [False, False, False, True]
    assert all(variation.configs[0].params["seconds"] == 7.0 for variation in grid)
    rows = in_steps(norms("first", [1.0, 3.0, 9.0, 9.0, 9.0]))
    by_threshold = variations(configs, [parse_sweep("loud.threshold=1,20", configs)])
    found_at = {
        variation.settings[0].value: bool(all_at_once(variation.configs[0], rows).findings)
        for variation in by_threshold
    }
    assert (found_at[1], found_at[20]) == (True, False)


def test_long_and_nested_parameters_of_a_class_are_not_swept() -> None:
    source = HEAD + (
        "class P(Params):\n    text: str = 'x' * 2000\n    names: tuple[str, ...] = ()\n    word: str = 'a'\n"
        "    large: int = 2**80\n    endless: float = float('inf')\n"
        "    model_config = {'allow_inf_nan': True}\n\n\n"
        "class Many(Rule[P, State]):\n    name = 'many'\n    summary = 'many'\n    merge = 'watermark'\n    needs = Needs(collections=())\n\n"
        "    def evaluate(self, params, state, context, block, now):\n        return state, []\n"
    )
    config = RuleConfig(rule="python", name="many", params={"source": source, "class": "Many"})
    assert [setting.value for setting in parse_sweep("many.word=b", [config]).settings] == ["b", "a"]
    with pytest.raises(RuleError, match="no rule has a parameter 'large'") as caught:
        parse_sweep("many.large=3", [config])
    assert caught.value.hint == "use one of for, word"


def test_several_sweeps_make_a_grid_of_what_is_needed() -> None:
    sweeps = [
        parse_sweep("threshold=1e-8,1e-6", SWEEP_CONFIGS),
        parse_sweep("explosion.growth=10", SWEEP_CONFIGS),
    ]
    grid = variations(SWEEP_CONFIGS, sweeps)
    assert len(grid) == 3 * 2
    assert [variation.current for variation in grid].count(True) == 1
    first = grid[0]
    assert [config.name for config in first.configs] == [
        "non_finite_values",
        "vanishing_gradient",
        "explosion",
    ]
    assert first.judged == {"vanishing_gradient", "explosion"}
    assert [config.params for config in first.configs] == [
        {},
        {"threshold": 1e-8},
        {"window": 30, "growth": 10},
    ]
    assert variations(SWEEP_CONFIGS, []) == []


def test_a_grid_is_bounded_and_sweeps_each_parameter_once() -> None:
    sweep = parse_sweep("threshold=1e-9:1e-3:100", SWEEP_CONFIGS)
    with pytest.raises(RuleError, match="combinations, over the limit of 200"):
        variations(SWEEP_CONFIGS, [sweep, parse_sweep("explosion.growth=2,3,4", SWEEP_CONFIGS)])
    with pytest.raises(RuleError, match="swept more than once"):
        variations(SWEEP_CONFIGS, [sweep, sweep])


@pytest.mark.ci
def test_sweeps_of_sql_and_python_rules_in_parallel_equal_those_in_one_process(tmp_path: Path) -> None:
    query = "SELECT tensor, abs_mean AS value FROM statistics WHERE abs_mean > 0.5"
    configs = (
        RuleConfig(rule="sql", name="query", params={"query": query, "window": 3}),
        RuleConfig(rule="python", name="loud", params={"source": LOUD, "class": "Loud"}),
    )
    locations = []
    for run in ("one", "three"):
        store = Store.open(tmp_path / run, create=True)
        store.create(layout.RUN_DOCUMENT, documents.encode(RunDocument("vision", run, 1)))
        recorded(store, len(run))
        locations.append(store.location)
    sweeps = [parse_sweep("query.window=2", configs), parse_sweep("loud.threshold=0.5", configs)]
    task = Task(configs, tuple(variations(configs, sweeps)))
    alone, parallel = (
        sorted(backtest_many(locations, task, jobs), key=location_of) for jobs in (1, len(locations))
    )
    assert parallel == alone
    outcomes = [
        rule
        for result in alone
        if isinstance(result, Replayed)
        for rule in result.outcome.attempts[0].outcomes
    ]
    assert [rule.health for rule in outcomes] == [RuleHealth.OK] * len(configs) * len(locations)
    assert all(rule.findings for rule in outcomes)
