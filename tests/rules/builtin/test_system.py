"""Rules over the process and its machine, each by runs that it is for and runs that it is not for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.builtin.losses import in_pieces
from tests.rules.builtin.system_rows import SAMPLES, Course, system_run
from tests.rules.runs import all_at_once, found_by, in_steps, norms
from watchstep.format.block import Block
from watchstep.format.system_figures import (
    CPUS,
    DATA_WAIT,
    DATA_WORKERS,
    INITIALIZATION_SECONDS,
    MEMORY_PRIVATE,
    NODE_CPU,
    NODE_IO_STALL,
    NODE_IOWAIT,
    STEP_SECONDS,
)
from watchstep_rules.builtin.system.stalled_training import (
    StalledTraining,
    StalledTrainingParams,
    StalledTrainingState,
)
from watchstep_rules.config.defaults import OFF_BY_DEFAULT
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.registry import RULES
from watchstep_rules.rule import Finding

# Rules over the process and its machine, each by runs that it is for and runs that it is not for.


GPU, GPU_MEMORY, OTHER = "system/gpu_0", "system/gpu_0_memory", "system/gpu_1"
GIB = 2.0**30
Figures = Mapping[str, Course | float]


def noise(seed: int, middle: float, apart: float, samples: int = SAMPLES) -> Course:
    """Samples about a middle, the same for the same row."""
    return lambda row: [
        max(0.0, random.Random(1000 * seed + row).gauss(middle, apart)) for _ in range(samples)
    ]


def halves(first: float, second: float) -> list[float]:
    return [first] * (SAMPLES // 2) + [second] * (SAMPLES - SAMPLES // 2)


def one_worker(figures: Figures, rows: int = 150) -> Block:
    return system_run(figures, rows=rows)


def long_steps(row: int) -> list[float]:
    """A hundred steps of a tenth of a second; in each third row three of four seconds."""
    return [0.1 + 0.001 * (n % 7) for n in range(100)] + ([4.0, 4.0, 4.0] if row % 3 == 0 else [])


def checkpoints(row: int) -> list[float]:
    """One of a second in each third row."""
    return [0.1 + 0.001 * (n % 7) for n in range(100)] + ([1.0] if row % 3 == 0 else [])


FAULTY: dict[str, dict[str, Block]] = {
    "low_gpu_utilization": {
        "hardly used": one_worker({GPU: noise(1, 0.4, 0.05)}),
        "idle": one_worker({GPU: 0.0}),
        "in bursts": one_worker({GPU: lambda row: halves(0.95, 0.02)}),
    },
    "batch_size": {"all little": one_worker({GPU: 0.3, GPU_MEMORY: 0.2, NODE_CPU: noise(2, 0.3, 0.05)})},
    "cpu_bottleneck": {
        "busy processors": one_worker({GPU: 0.05, NODE_CPU: 0.97}),
        "most of the time": one_worker({GPU: lambda row: 0.05 if row % 4 else 0.9, NODE_CPU: 0.97}),
        "from some time on": one_worker({GPU: lambda row: 0.9 if row < 50 else 0.0, NODE_CPU: 0.97}),
    },
    "io_bottleneck": {
        "tasks wait": one_worker({GPU: 0.05, NODE_IO_STALL: 0.8, NODE_IOWAIT: 0.02}),
        "an old kernel": one_worker({GPU: 0.05, NODE_IOWAIT: 0.6}),
    },
    "gpu_memory_increase": {"grows": one_worker({GPU_MEMORY: lambda row: 0.3 + 0.003 * row})},
    "memory_growth": {
        "grows": system_run({MEMORY_PRIVATE: lambda row: GIB * (2 + 0.01 * row)}, rows=260),
        "grows with peaks": system_run(
            {MEMORY_PRIVATE: lambda row: GIB * (2 + 0.01 * row + (3 if row % 9 == 0 else 0))}, rows=260
        ),
    },
    "load_balance": {
        "a GPU has less": one_worker({GPU: 0.9, OTHER: 0.2}),
        "a worker's GPU has less": system_run({GPU: 0.9}, {OTHER: 0.9}, {"system/gpu_2": 0.1}, rows=150),
        "a rank is slow": system_run({STEP_SECONDS: 0.1}, {STEP_SECONDS: 0.1}, {STEP_SECONDS: 0.4}, rows=150),
    },
    "step_outlier": {"long ones, often": one_worker({STEP_SECONDS: long_steps})},
    "initialization_time": {
        "half an hour": one_worker({INITIALIZATION_SECONDS: lambda row: [] if row else [1800.0]})
    },
    "data_loader": {
        "waits": one_worker({DATA_WAIT: 0.6, CPUS: 8}),
        "waits, and GPUs as well": one_worker({DATA_WAIT: 0.6, CPUS: 8, GPU: 0.2, DATA_WORKERS: 2}),
        "too many workers": one_worker({DATA_WAIT: 0.01, CPUS: 4, DATA_WORKERS: 16}),
    },
}

HEALTHY: dict[str, dict[str, Block]] = {
    "low_gpu_utilization": {
        "used": one_worker({GPU: noise(3, 0.93, 0.03)}),
        "pauses now and then": one_worker({GPU: lambda row: 0.0 if row % 60 == 0 else 0.9}),
        "not to be told": one_worker(
            {GPU: lambda row: [0.55] * 18 + [0.75] * 2}
        ),  # p95 lies in a power of two
        "too few samples": one_worker({GPU: 0.1}, rows=40),
    },
    "batch_size": {
        "memory is full": one_worker({GPU: 0.3, GPU_MEMORY: 0.9, NODE_CPU: 0.3}),
        "GPU is busy": one_worker({GPU: 0.95, GPU_MEMORY: 0.2, NODE_CPU: 0.3}),
        "CPUs are busy": one_worker({GPU: 0.3, GPU_MEMORY: 0.2, NODE_CPU: 0.95}),
        "no GPU": one_worker({NODE_CPU: 0.3}),
    },
    "cpu_bottleneck": {
        "busy both": one_worker({GPU: 0.9, NODE_CPU: 0.97}),
        "idle both": one_worker({GPU: 0.0, NODE_CPU: 0.1}),
        "not at once": one_worker(
            {GPU: lambda row: halves(0.0, 0.9), NODE_CPU: lambda row: halves(0.1, 0.97)}
        ),
        "no GPU": one_worker({NODE_CPU: 1.0}),
        "a slow start": one_worker({GPU: lambda row: 0.0 if row < 30 else 0.9, NODE_CPU: 0.97}),
    },
    "io_bottleneck": {
        "disks are busy, and nobody waits": one_worker({GPU: 0.9, NODE_IO_STALL: 0.9}),
        "no GPU": one_worker({NODE_IO_STALL: 1.0}),
        "nothing waits": one_worker({GPU: 0.0, NODE_IO_STALL: 0.05, NODE_IOWAIT: 0.9}),
    },
    "gpu_memory_increase": {
        "constant": one_worker({GPU_MEMORY: 0.8}),
        "one step": one_worker({GPU_MEMORY: lambda row: 0.3 if row < 70 else 0.8}),
        "an allocator that fills": one_worker({GPU_MEMORY: lambda row: 0.8 - 0.5 * 0.9**row}),
        "slowly": one_worker({GPU_MEMORY: lambda row: 0.3 + 0.0002 * row}),
    },
    "memory_growth": {
        "constant": system_run({MEMORY_PRIVATE: noise(4, 3 * GIB, GIB / 50)}, rows=260),
        "a plateau is reached": system_run({MEMORY_PRIVATE: lambda row: GIB * (4 - 3 * 0.96**row)}, rows=260),
        "one allocation": system_run({MEMORY_PRIVATE: lambda row: GIB * (2 + (row > 150))}, rows=260),
        "epochs": system_run({MEMORY_PRIVATE: lambda row: GIB * (2 + 0.02 * (row % 40))}, rows=260),
        "a small program": system_run({MEMORY_PRIVATE: lambda row: 2.0**20 * (60 + 0.2 * row)}, rows=260),
        "while it begins": system_run(
            {MEMORY_PRIVATE: lambda row: GIB * (1 + 0.02 * min(row, 90))}, rows=260
        ),
    },
    "load_balance": {
        "even": one_worker({GPU: noise(5, 0.9, 0.05), OTHER: noise(6, 0.8, 0.05)}),
        "either side of a power of two": one_worker({GPU: 0.45, OTHER: 0.55}),
        "one GPU": one_worker({GPU: 0.1}),
        "one rank": one_worker({STEP_SECONDS: 0.1}),
        "ranks in step": system_run({STEP_SECONDS: 0.1}, {STEP_SECONDS: 0.11}, rows=150),
    },
    "step_outlier": {
        "even": one_worker({STEP_SECONDS: noise(7, 0.1, 0.01, 100)}),
        "checkpoints": one_worker({STEP_SECONDS: checkpoints}),
        "a compilation": one_worker({STEP_SECONDS: lambda row: [60.0] if row == 0 else [0.1] * 100}),
        "long steps": one_worker({STEP_SECONDS: noise(8, 8.0, 1.0, 1)}),
        "batches of any length": one_worker({STEP_SECONDS: noise(9, 0.1, 0.06, 100)}),
    },
    "initialization_time": {
        "a minute": one_worker({INITIALIZATION_SECONDS: lambda row: [] if row else [60.0]})
    },
    "data_loader": {
        "does not wait": one_worker({DATA_WAIT: noise(10, 0.02, 0.01), CPUS: 8, DATA_WORKERS: 8}),
        "few workers, and no wait": one_worker({DATA_WAIT: 0.02, CPUS: 64, DATA_WORKERS: 1}),
        "waits for a GPU": one_worker({DATA_WAIT: 0.8, CPUS: 8, GPU: 0.95}),
        "now and then": one_worker({DATA_WAIT: lambda row: 0.9 if row % 20 == 0 else 0.05, CPUS: 8}),
        "only begins": one_worker({DATA_WAIT: 0.9, CPUS: 8}, rows=20),
    },
}

BAD = [(rule, name) for rule, runs in FAULTY.items() for name in runs]
GOOD = [(rule, name) for rule, runs in HEALTHY.items() for name in runs]


def found(rule: str, block: Block, **params: Any) -> list[int]:
    return found_by(rule)(block, **params)


def test_all_of_them_are_tried_and_off_by_default() -> None:
    over_the_system = {name for name, rule in RULES.items() if rule.needs.collections == ("system",)}
    own = {
        name for name in over_the_system if not name.startswith("sagemaker_")
    }  # Amazon's have tests of their own
    assert set(FAULTY) == set(HEALTHY) == own
    assert over_the_system <= OFF_BY_DEFAULT.keys()
    for name in own:
        assert RULES[name].usual_causes
        assert RULES[name].what_to_try


@pytest.mark.parametrize(("rule", "name"), BAD)
def test_what_a_rule_is_for_is_found(rule: str, name: str) -> None:
    outcome = all_at_once(RuleConfig(rule=rule), FAULTY[rule][name])
    assert outcome.findings
    for finding in outcome.findings:
        assert finding.mode == "global"
        assert finding.tensor in finding.message


@pytest.mark.parametrize(("rule", "name"), GOOD)
def test_other_figures_are_ignored(rule: str, name: str) -> None:
    assert found(rule, HEALTHY[rule][name]) == []


@settings(max_examples=examples(60), deadline=None)
@given(which=st.sampled_from(BAD), cuts=st.lists(st.integers(1, 1490), max_size=8, unique=True))
def test_a_run_in_pieces_is_judged_as_the_whole(which: tuple[str, str], cuts: list[int]) -> None:
    rule, name = which
    config, block = RuleConfig(rule=rule), FAULTY[rule][name]
    whole = in_pieces(config, block, [])
    assert whole.findings
    assert in_pieces(config, block, cuts) == whole


def test_the_worker_that_is_apart_is_named() -> None:
    config = RuleConfig(rule="load_balance")
    assert {f.worker for f in all_at_once(config, FAULTY["load_balance"]["a rank is slow"]).findings} == {2}
    tensors = {f.tensor for f in all_at_once(config, FAULTY["load_balance"]["a GPU has less"]).findings}
    assert tensors == {OTHER}


def test_a_wait_is_reported_with_who_loads() -> None:
    def message(name: str) -> str:
        return all_at_once(RuleConfig(rule="data_loader"), FAULTY["data_loader"][name]).findings[0].message

    assert message("waits").endswith("it has no data loading process")
    assert message("waits, and GPUs as well").endswith(
        "2 processes load data on 8 CPUs, which could hold more"
    )
    assert message("too many workers") == "system/data_workers: 16 processes load data on 4 CPUs"


THRESHOLDS = [
    ("low_gpu_utilization", "hardly used", {"threshold_p95": 20.0}),
    ("low_gpu_utilization", "in bursts", {"threshold_p5": 1.0}),
    ("batch_size", "all little", {"gpu_memory_threshold_p95": 10.0}),
    ("cpu_bottleneck", "busy processors", {"gpu_threshold": 1.0}),
    ("cpu_bottleneck", "busy processors", {"patience": 4000}),
    ("io_bottleneck", "tasks wait", {"io_threshold": 90.0}),
    ("gpu_memory_increase", "grows", {"increase": 40.0}),
    ("memory_growth", "grows", {"growth": 0.9}),
    ("memory_growth", "grows", {"least_mib": 4096.0}),
    ("load_balance", "a GPU has less", {"threshold": 0.9}),
    ("step_outlier", "long ones, often", {"n_outliers": 1000}),
    ("step_outlier", "long ones, often", {"lost": 90.0}),
    ("step_outlier", "long ones, often", {"stddev": 10000.0}),
    ("initialization_time", "half an hour", {"threshold": 40.0}),
    ("data_loader", "waits", {"data_wait": 90.0}),
    ("data_loader", "too many workers", {"max_threshold": 500.0}),
]


@pytest.mark.parametrize(("rule", "name", "params"), THRESHOLDS)
def test_thresholds_are_the_users_to_set(rule: str, name: str, params: dict[str, float]) -> None:
    assert found(rule, FAULTY[rule][name], **params) == []


def test_samples_that_are_no_numbers_are_inconclusive() -> None:
    nan = float("nan")
    names = (GPU, GPU_MEMORY, NODE_CPU, NODE_IO_STALL, MEMORY_PRIVATE, STEP_SECONDS, DATA_WAIT, CPUS)
    block = one_worker(dict.fromkeys([*names, INITIALIZATION_SECONDS], nan))
    assert [found(rule, block) for rule in FAULTY] == [[]] * len(FAULTY)


RULE = StalledTraining()
PARAMS = StalledTrainingParams()
SECOND = 1_000_000_000
START = 10 * SECOND
Tick = tuple[float, int]
"""Seconds since the start, and how many rows came."""


def rows_of_tick(count: int, first: int = 0) -> Block:
    return in_steps(norms("a", [1.0] * count, first=first)) if count else Block.empty()


def followed(
    ticks: Sequence[Tick], params: StalledTrainingParams = PARAMS, *, parts: int = 1
) -> tuple[StalledTrainingState, list[tuple[int, Finding]]]:
    """The state after ticks, and the findings with their seconds; each tick's rows in so many parts."""
    state, reported, step = StalledTrainingState(), [], 0
    for second, count in ticks:
        now = START + round(second * SECOND)
        block = rows_of_tick(count, step)
        step += count
        cuts = [round(len(block) * part / parts) for part in range(parts + 1)]
        for start, end in pairwise(cuts) if count else [(0, 0)]:
            part = block.where((block.step >= step - count + start) & (block.step < step - count + end))
            if count and not len(part):
                continue
            state, findings = RULE.evaluate(params, state, Block.empty(), part, now)
            reported += [(round(second), finding) for finding in findings]
    return state, reported


def watched(until: float, *, since: float = 0, every: float = 300) -> list[Tick]:
    """Ticks without rows."""
    return [(since + every * place, 0) for place in range(1, round((until - since) / every) + 1)]


def times(ticks: Sequence[Tick], params: StalledTrainingParams = PARAMS) -> list[int]:
    return [second for second, _ in followed(ticks, params)[1]]


def test_a_training_that_stalls_is_reported_and_one_that_continues_is_not() -> None:
    begun: list[Tick] = [(0, 3), (60, 3)]
    _, reported = followed([*begun, *watched(1860, since=60)])
    assert [(second, finding.step, finding.tensor) for second, finding in reported] == [(1860, 5, "")]
    assert reported[0][1].message == (
        "nothing was recorded for 1800 s, since step 5, 1800 s tolerated; the longest earlier pause took 60 s"
    )
    assert times([*begun, *[(60.0 * minute, 1) for minute in range(2, 200)]]) == []
    assert times([*begun, *watched(1560, since=60), (1700, 1), *watched(3400, since=1700)]) == []


def test_a_silence_is_reported_as_long_as_it_lasts() -> None:
    begun: list[Tick] = [(0, 1), (10, 1)]
    assert times([*begun, *watched(2410, since=10)]) == [1810, 2110, 2410]
    assert times([*begun, *watched(1810, since=10), (1900, 1), (2000, 0)]) == [1810]


def test_a_pause_that_the_run_came_back_from_is_no_stall_again() -> None:
    hour = 3600.0
    first: list[Tick] = [(0, 1), (10, 1), *watched(3310, since=10), (hour, 1)]
    assert times(first) == list(range(1810, 3600, 300))
    again = watched(2 * hour, since=hour)
    assert times([*first, *again]) == times(first)
    assert times([*first, *watched(hour + 7300, since=hour)])[-1] > hour + 7000


def test_time_without_evaluations_is_not_a_stall() -> None:
    slept: list[Tick] = [(0, 1), (10, 1), (90_000, 0), (90_300, 0)]
    assert times(slept) == []
    assert followed(slept)[0].silent_ns == (600 + 300) * SECOND


def test_an_old_run_is_judged_only_after_a_fresh_row() -> None:
    late = 10_000.0
    assert times([(late, 3), *watched(late + 9000, since=late)]) == []
    state, _ = followed([(late, 3)])
    assert not state.live
    assert RULE.due_ns(PARAMS, state) is None


def test_an_attempt_that_wrote_nothing_is_silent_since_it_was_first_seen() -> None:
    _, reported = followed([(5, 0), *watched(1805, since=5)])
    assert [(second, finding.step) for second, finding in reported] == [(1805, -1)]
    assert "since the attempt began" in reported[0][1].message


def test_ticks_are_requested_often_enough_and_not_for_ever() -> None:
    assert RULE.due_ns(PARAMS, StalledTrainingState()) == 300 * SECOND  # long ago: at once
    state, second = followed([(0, 1)])[0], 0.0
    ticks: list[Tick] = [(0, 1)]
    while (due := RULE.due_ns(PARAMS, state)) is not None:
        second = (due - START) / SECOND
        ticks.append((second, 0))
        state, _ = followed(ticks)
    assert second == 4 * 1800
    assert times(ticks)[0] == 1800
    assert len(ticks) == 1 + 4 * 6
    nearly = followed([(0, 1), *watched(1500), (1790, 0)])[0]
    assert RULE.due_ns(PARAMS, nearly) == START + 1800 * SECOND


@pytest.mark.parametrize("seconds", [30.0, 7200.0])
def test_the_threshold_is_in_seconds(seconds: float) -> None:
    params = StalledTrainingParams(threshold=seconds)
    ticks = watched(3 * seconds, every=seconds / 6)
    assert times([(0, 1), *ticks], params)[0] == round(seconds)


@given(
    st.lists(st.tuples(st.sampled_from([1, 200, 700, 5000]), st.integers(0, 3)), max_size=12),
    st.integers(1, 3),
)
def test_splitting_the_rows_of_a_tick_changes_no_finding(gaps: list[tuple[int, int]], parts: int) -> None:
    ticks, second = [], 0
    for gap, count in gaps:
        second += gap
        ticks.append((float(second), count))
    assert followed(ticks, parts=parts) == followed(ticks)
