from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.runs import Event, Rows, Watermark, runs, splits
from watchstep.format.block import Block, concatenate
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import AlertMemory, Phase, Transition, coalesce
from watchstep_rules.engine.inhibition import MAX_FIRING_SPANS, AlertUpdate, cycles, inhibit, inhibitions
from watchstep_rules.engine.judge import RuleMemory, judge
from watchstep_rules.engine.rule_inputs import JudgingProgress

SOURCE = RuleConfig(rule="non_finite_values", inhibits=("target",))
TARGET = RuleConfig(rule="overfit", name="target")
Life = Sequence[tuple[int, int | None]]
"""Steps at which an alert fired, and was resolved."""


def changes(life: Life, until: int, after: int = -1) -> list[Transition]:
    """What an alert did at steps in (after, until]."""
    all_changes = [
        Transition(phase, step, None, first, 0)
        for first, last in life
        for phase, step in ((Phase.FIRING, first), (Phase.RESOLVED, last))
        if step is not None
    ]
    return [change for change in all_changes if after < change.step <= until]


def followed(
    lives: Sequence[tuple[RuleConfig, Life]], watermarks: Sequence[int], ahead: int = 0
) -> tuple[list[list[tuple[int, str, str]]], list[AlertMemory]]:
    """The changes of each rule config; a rule that waits for no watermark may be ahead."""
    memories = [AlertMemory() for _ in lives]
    notified: list[list[tuple[int, str, str]]] = [[] for _ in lives]
    for before, watermark in pairwise([-1, *watermarks]):
        updates = []
        for (config, life), memory in zip(lives, memories, strict=True):
            lead = ahead if config.implementation.merge == "per_worker" else 0
            after = before + lead if before >= 0 else -1
            updates.append(AlertUpdate(config, memory, changes(life, watermark + lead, after)))
        result = inhibit(updates, watermark)
        for place, update in enumerate(result):
            notified[place] += [
                (change.step, change.phase.value, change.inhibited_by) for change in update.transitions
            ]
        memories = [AlertMemory.model_validate_json(update.memory.model_dump_json()) for update in result]
        assert memories == [update.memory for update in result]
    return notified, memories


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ([], [(3, 7)], [(3, "firing", ""), (7, "resolved", "")]),
        ([(2, 9)], [(3, 7)], [(3, "firing", "non_finite_values"), (7, "resolved", "non_finite_values")]),
        ([(2, 5)], [(3, 7)], [(3, "firing", "non_finite_values"), (5, "firing", ""), (7, "resolved", "")]),
        ([(3, 7)], [(3, 7)], [(3, "firing", "non_finite_values"), (7, "resolved", "non_finite_values")]),
        ([(4, 9)], [(3, 7)], [(3, "firing", ""), (7, "resolved", "")]),
        ([(2, None)], [(3, None)], [(3, "firing", "non_finite_values")]),
        ([(2, 12)], [(3, None)], [(3, "firing", "non_finite_values"), (12, "firing", "")]),
        ([(2, 5), (5, 9)], [(3, None)], [(3, "firing", "non_finite_values"), (9, "firing", "")]),
        ([(2, 5), (8, 9)], [(3, None)], [(3, "firing", "non_finite_values"), (5, "firing", "")]),
        (
            [(2, 4)],
            [(3, 4), (5, 6)],
            [
                (3, "firing", "non_finite_values"),
                (4, "resolved", "non_finite_values"),
                (5, "firing", ""),
                (6, "resolved", ""),
            ],
        ),
    ],
)
@pytest.mark.parametrize("ahead", [0, 4])
def test_who_is_notified_of_what(source: Life, target: Life, expected: list[Any], ahead: int) -> None:
    for watermarks in ([20], list(range(21)), [4, 8, 20], [5, 6, 20]):
        notified, memories = followed([(SOURCE, source), (TARGET, target)], watermarks, ahead)
        assert notified[1] == expected
        assert notified[0] == [(change.step, change.phase.value, "") for change in changes(source, 20)]
        assert len(memories[0].firing_spans) <= 1


lives = st.lists(st.integers(0, 30), unique=True, max_size=8).map(
    lambda steps: list(zip(sorted(steps)[::2], [*sorted(steps)[1::2], None], strict=False))
)


@pytest.mark.ci
@settings(max_examples=examples(300))
@given(lives, lives, lives, st.data())
def test_the_time_of_watermarks_does_not_matter(
    first: Any, second: Any, third: Any, data: st.DataObject
) -> None:
    first_config = RuleConfig(rule="non_finite_values", inhibits=("target",))
    second_config = RuleConfig(rule="oscillating_loss", inhibits=("target", "non_finite_values"))
    everything = [(first_config, first), (second_config, second), (TARGET, third)]
    watermarks = sorted(data.draw(st.sets(st.integers(0, 30), max_size=6)) | {31})
    notified, memories = followed(everything, watermarks, data.draw(st.integers(0, 5)))
    at_once, expected_memories = followed(everything, [31])
    assert notified == at_once
    assert [memory.inhibition for memory in memories] == [memory.inhibition for memory in expected_memories]
    event(f"inhibited: {sum(bool(by) for _, _, by in notified[2])}")
    for step, phase, by in notified[2]:
        firing = any(a <= step and (b is None or step < b) for a, b in [*first, *second])
        if phase == "firing":
            assert bool(by) == firing


def config(rule: str, **more: Any) -> RuleConfig:
    return RuleConfig(rule=rule, **more)


@pytest.mark.parametrize(
    ("configs", "edges"),
    [
        ([config("non_finite_values", inhibits=("overfit",)), config("overfit")], [(0, 1)]),
        ([config("overfit"), config("non_finite_values", inhibits=("overfit",))], [(1, 0)]),
        ([config("non_finite_values", inhibits=("overfit",)), config("overfit", name="late")], [(0, 1)]),
        (
            [
                config("non_finite_values", inhibits=("late",)),
                config("overfit", name="late"),
                config("overfit"),
            ],
            [(0, 1)],
        ),
        ([config("non_finite_values", inhibits=("overfit",), dry_run=True), config("overfit")], []),
        ([config("overfit", inhibits=("non_finite_values",)), config("non_finite_values")], []),
        ([config("overfit", inhibits=("stalled_training",)), config("stalled_training")], []),
        ([config("overfit", inhibits=("overfit",))], []),
        ([config("overfit", inhibits=("overfit",)), config("overfit", name="b")], [(0, 1)]),
        (
            [config("overfit", inhibits=("dead_relu",)), config("dead_relu", inhibits=("overfit",))],
            [],
        ),
        (
            [
                config("overfit", inhibits=("dead_relu",)),
                config("dead_relu", inhibits=("slow_convergence",)),
                config("slow_convergence", inhibits=("overfit",)),
                config("oscillating_loss", inhibits=("overfit",)),
            ],
            [(3, 0)],
        ),
    ],
)
def test_which_config_inhibits_which(configs: list[RuleConfig], edges: list[tuple[int, int]]) -> None:
    assert inhibitions(configs) == edges


def test_a_removed_source_inhibits_nothing() -> None:
    updates = [
        AlertUpdate(SOURCE, AlertMemory(), changes([(2, None)], 5)),
        AlertUpdate(TARGET, AlertMemory(), changes([(3, None)], 5)),
    ]
    _, target = inhibit(updates, 5)
    (alone,) = inhibit([replace(target, transitions=[])], 6)
    assert [(change.phase, change.inhibited_by) for change in alone.transitions] == [(Phase.FIRING, "")]
    assert alone.memory.inhibition is None


def test_what_is_retained_of_a_source_is_bounded() -> None:
    flapping = [(step, step + 1) for step in range(0, 1000, 2)]
    source, _ = inhibit(
        [AlertUpdate(SOURCE, AlertMemory(), changes(flapping, 1000)), AlertUpdate(TARGET, AlertMemory(), [])],
        watermark=10,
    )
    assert len(source.memory.firing_spans) == MAX_FIRING_SPANS
    assert len(json.dumps(source.memory.model_dump(mode="json")["firing_spans"])) < 1000


CONFIGS = (
    RuleConfig(rule="non_finite_values", inhibits=("exploding_gradient", "loud")),
    RuleConfig(
        rule="exploding_gradient",
        params={"growth": 1.5, "window": 3, "warmup": 3},
        inhibits=("loud",),
    ),
    RuleConfig(rule="vanishing_gradient", name="loud", params={"threshold": 10.0, "relative": 0.9}),
)


def judged(evaluations: Sequence[Sequence[Event]]) -> tuple[list[list[Transition]], list[RuleMemory]]:
    """Three rules over a run, as a service judges them."""
    memories = [RuleMemory() for _ in CONFIGS]
    notified: list[list[Transition]] = [[] for _ in CONFIGS]
    history, before = Block.empty(), -1
    for events in evaluations:
        arrived = concatenate([event.block for event in events if isinstance(event, Rows)])
        now = max([before, *(event.step for event in events if isinstance(event, Watermark))])
        verdicts = [
            judge(config, memory, history, arrived, JudgingProgress(before, now, 7))
            for config, memory in zip(CONFIGS, memories, strict=True)
        ]
        updates = [
            AlertUpdate(config, verdict.memory.alert, verdict.transitions)
            for config, verdict in zip(CONFIGS, verdicts, strict=True)
        ]
        result = inhibit(updates, now)
        memories = [
            verdict.memory.model_copy(update={"alert": update.memory})
            for verdict, update in zip(verdicts, result, strict=True)
        ]
        for place, update in enumerate(result):
            notified[place] += update.transitions
        history, before = concatenate([history, arrived]), now
    notified_phases = (Phase.FIRING, Phase.RESOLVED)
    return [
        [change for change in coalesce(changes) if change.phase in notified_phases] for changes in notified
    ], memories


@pytest.mark.release
@settings(max_examples=examples(100), deadline=None)
@given(events=runs(), data=st.data())
def test_splitting_a_run_changes_no_notification(events: list[Event], data: st.DataObject) -> None:
    notified, memories = judged(data.draw(splits(events)))
    at_once, expected_memories = judged(data.draw(splits(events)))
    assert notified == at_once
    assert memories == expected_memories
    quiet = sum(bool(change.inhibited_by) for change in notified[2])
    event(
        f"inhibited: {min(quiet, 5)}, told: {min(5, sum(not change.inhibited_by for change in notified[2]))}"
    )


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_exactly_those_that_go_round_in_a_circle_are_omitted(pairs: list[tuple[int, int]]) -> None:
    configs = [
        config("overfit", name=f"r{place}", inhibits=tuple(f"r{b}" for a, b in pairs if a == place))
        for place in range(7)
    ]
    reached = {(a, b) for a, b in pairs if a != b}
    wanted = set(reached)
    for through in range(7):
        reached |= {(a, b) for a in range(7) for b in range(7) if {(a, through), (through, b)} <= reached}
    round_about = {(a, b) for a, b in reached if (b, a) in reached}
    assert set(inhibitions(configs)) == wanted - round_about
    assert {place for cycle in cycles(configs) for place in cycle} == {a for a, b in round_about if a != b}


def test_many_configs_that_inhibit_many_cost_little() -> None:
    names = [f"r{place}" for place in range(400)]
    chain = [
        config("overfit", name=name, inhibits=tuple(names[place + 1 : place + 90]))
        for place, name in enumerate(names)
    ]
    assert cycles(chain) == []
    assert len(inhibitions(chain)) > 30_000
