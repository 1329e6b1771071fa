"""The life of an alert, its revisions by later rows, and how episodes end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.runs import Event, Outcome, Rows, Watermark, all_at_once, follow
from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format.block import Block, concatenate
from watchstep.format.tensors import TensorInfo
from watchstep_rules.backtest.backtest import _transition, _transition_from, backtest
from watchstep_rules.config.rule_config import RuleConfig, Timing
from watchstep_rules.engine.alert import AlertMemory, Phase, Transition, advance, coalesce
from watchstep_rules.engine.incident import RunName
from watchstep_rules.engine.inhibition import AlertUpdate, inhibit
from watchstep_rules.engine.streaks import JudgedRows
from watchstep_rules.rule import Finding, finding_at, likelihood

# The life of an alert


INFOS = [gradient(name, order=order) for order, name in enumerate("abc")]
History = list[dict[int, bool]]
"""For each step, whether each layer that was judged had a finding."""


def rows_and_findings(history: History, first: int = 0) -> tuple[JudgedRows, list[Finding]]:
    rows = [Row(first + step, INFOS[layer], [1.0]) for step, judged in enumerate(history) for layer in judged]
    bad = [hit for judged in history for hit in judged.values()]
    block = block_of(rows)
    return JudgedRows.of(block), [
        finding_at("test", block, row, value=1.0, threshold=0.0, message="bad")
        for row, hit in enumerate(bad)
        if hit
    ]


def followed(history: History, hold: int, cuts: tuple[int, ...] = ()) -> tuple[AlertMemory, list[Transition]]:
    memory, transitions = AlertMemory(), []
    for start, end in zip((0, *cuts), (*cuts, len(history)), strict=True):
        memory, more = advance(memory, of_duration(hold), *rows_and_findings(history[start:end], start))
        memory = AlertMemory.model_validate_json(memory.model_dump_json())
        transitions += more
    return memory, transitions


def of_duration(steps: int) -> Timing:
    return Timing(hold_steps=steps, keep_steps=steps)


def phases(text: str, hold: int) -> list[tuple[int, str]]:
    """Changes of an alert over one layer: ``!`` is a step with a finding, ``.`` one without."""
    _, transitions = followed([{0: mark == "!"} for mark in text], hold)
    return [(transition.step, transition.phase.value) for transition in transitions]


@pytest.mark.parametrize(
    ("text", "hold", "changes"),
    [
        ("....", 1, []),
        ("..!", 1, [(2, "firing")]),
        (".!.", 1, [(1, "firing"), (2, "resolved")]),
        (".!..!", 1, [(1, "firing"), (2, "resolved"), (4, "firing")]),
        ("!!", 3, [(0, "pending")]),
        ("!!.", 3, [(0, "pending"), (2, "inactive")]),
        ("!!!", 3, [(0, "pending"), (2, "firing")]),
        (
            "!.!.!.",
            2,
            [
                (0, "pending"),
                (1, "inactive"),
                (2, "pending"),
                (3, "inactive"),
                (4, "pending"),
                (5, "inactive"),
            ],
        ),
        ("!!..", 2, [(0, "pending"), (1, "firing"), (3, "resolved")]),
        ("!!.!.!.", 2, [(0, "pending"), (1, "firing")]),
        ("!!.!..", 2, [(0, "pending"), (1, "firing"), (5, "resolved")]),
        ("!!..!", 2, [(0, "pending"), (1, "firing"), (3, "resolved"), (4, "pending")]),
        ("!!..!.", 2, [(0, "pending"), (1, "firing"), (3, "resolved"), (4, "pending"), (5, "inactive")]),
        ("!!..!!", 2, [(0, "pending"), (1, "firing"), (3, "resolved"), (4, "pending"), (5, "firing")]),
    ],
)
def test_the_life_of_an_alert(text: str, hold: int, changes: list[tuple[int, str]]) -> None:
    assert phases(text, hold) == changes


def test_each_layer_counts_for_itself() -> None:
    assert followed([{0: True, 1: False}, {0: False, 1: True}], 2)[1][-1].phase is Phase.PENDING


def test_steps_that_do_not_judge_a_layer_count_for_nothing() -> None:
    _, transitions = followed(
        [{0: True}, {1: False}, {1: False}, {0: True}, {1: False}, {0: False}, {0: False}], 2
    )
    assert [(change.step, change.phase.value) for change in transitions] == [
        (0, "pending"),
        (3, "firing"),
        (6, "resolved"),
    ]


def test_an_alert_resolves_when_every_layer_that_fired_is_clean() -> None:
    memory, transitions = followed([{0: True, 1: False}, {0: False, 1: True}, {0: False, 1: False}], 1)
    assert [(change.step, change.phase.value) for change in transitions] == [(0, "firing"), (2, "resolved")]
    assert memory.clean_streaks == {}


def test_the_finding_is_that_of_the_likeliest_cause() -> None:
    memory, transitions = followed([{0: True, 2: True, 1: True}], 1)
    assert transitions[0].finding is not None
    assert transitions[0].finding.tensor == INFOS[2].name  # gradients flow backwards
    assert memory.finding == transitions[0].finding


def test_layers_with_long_names_are_told_apart_in_little_memory() -> None:
    beginning = "layer" * 100
    infos = [gradient(f"{beginning}{order}", order=order) for order in range(2)]
    block = block_of([Row(0, info, [1.0]) for info in infos])
    findings = [finding_at("test", block, row, value=1.0, threshold=0.0, message="bad") for row in range(2)]
    memory, _ = advance(AlertMemory(), of_duration(1), JudgedRows.of(block), findings)
    assert len(memory.finding_streaks) == 2
    assert max(map(len, memory.finding_streaks)) < len(beginning)
    later = block_of([Row(1, infos[0], [1.0]), Row(1, infos[1], [1.0])])
    memory, _ = advance(memory, of_duration(1), JudgedRows.of(later), [])
    assert len(memory.finding_streaks) == 0


def test_the_same_layer_on_two_workers_is_two_series() -> None:
    rows = [Row(step, INFOS[0], [1.0], worker=step % 2) for step in range(2)]
    block = block_of(rows)
    findings = [finding_at("test", block, row, value=1.0, threshold=0.0, message="bad") for row in range(2)]
    memory, _ = advance(AlertMemory(), of_duration(2), JudgedRows.of(block), findings)
    assert memory.phase is Phase.PENDING
    assert set(memory.finding_streaks) == {f"{INFOS[0].name}@0/train", f"{INFOS[0].name}@1/train"}


@dataclass
class Model:
    """The definition of an alert, step by step, with all judged steps of each layer."""

    hold: int
    phase: str = "inactive"
    judged: dict[int, list[bool]] = field(default_factory=dict)
    fired: set[int] = field(default_factory=set)

    def step(self, layers: dict[int, bool]) -> list[str]:
        before = self.phase
        for layer, hit in layers.items():
            self.judged.setdefault(layer, []).append(hit)
        ripe = {layer for layer in layers if self._ends_with(layer, hit=True)}
        self.fired |= ripe
        if self.phase == "firing":
            if all(self._ends_with(layer, hit=False) for layer in self.fired):
                self.phase, self.fired = "resolved", set()
                if any(marks[-1] for marks in self.judged.values()):
                    self.phase = "pending"
                    return ["resolved", "pending"]
        elif ripe:
            self.phase = "firing"
        elif any(marks[-1] for marks in self.judged.values()):
            self.phase = "pending"
        elif self.phase == "pending":
            self.phase = "inactive"
        return [self.phase] if self.phase != before else []

    def _ends_with(self, layer: int, *, hit: bool) -> bool:
        return self.judged[layer][-self.hold :] == [hit] * self.hold


histories = st.lists(st.dictionaries(st.integers(0, 2), st.booleans(), min_size=1), max_size=20)


@given(histories, st.integers(1, 3))
def test_phases_follow_their_definition(history: History, hold: int) -> None:
    model = Model(hold)
    changes: list[tuple[int, str]] = []
    for step, layers in enumerate(history):
        changes += [(step, phase) for phase in model.step(layers)]
    memory, transitions = followed(history, hold)
    assert [(change.step, change.phase.value) for change in transitions] == changes
    assert memory.phase.value == model.phase


@given(histories, st.integers(1, 3), st.data())
def test_the_split_into_steps_does_not_matter(history: History, hold: int, data: st.DataObject) -> None:
    cuts = tuple(sorted(data.draw(st.lists(st.integers(0, len(history)), max_size=4))))
    assert followed(history, hold, cuts) == followed(history, hold)


# Revisions


NAN = RuleConfig(rule="non_finite_values")
OUTPUT = tensor("0:output", "activations", role="output")
LOSS = tensor("loss", "losses", role="loss", shape=())
GRADIENT = gradient("0")


def rank_with(worker: int, steps: Sequence[int], *bad: tuple[int, TensorInfo]) -> Rows:
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


REDUCED = rank_with(0, range(8), (5, GRADIENT), (6, GRADIENT), (7, GRADIENT))
CULPRIT = rank_with(1, range(8), (5, OUTPUT), (5, LOSS), *((step, GRADIENT) for step in (5, 6, 7)))


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
    outcome = follow(NAN, [[REDUCED], [rank_with(1, range(8), (3, GRADIENT))]])
    assert named(outcome) == (3, 1, GRADIENT.name)
    assert [(change.step, change.since_step) for change in outcome.transitions] == [(5, 5), (3, 3)]


def test_later_steps_and_less_likely_causes_change_nothing() -> None:
    worse = rank_with(1, range(9), (5, GRADIENT), (6, OUTPUT), (7, LOSS), (8, OUTPUT))
    assert named(follow(NAN, [[REDUCED], [worse]])) == (5, 0, GRADIENT.name)


@pytest.mark.ci
@settings(max_examples=examples(60))
@given(
    st.lists(
        st.dictionaries(st.sampled_from([OUTPUT, LOSS, GRADIENT]), st.integers(3, 6)), min_size=3, max_size=3
    )
)
def test_the_order_in_which_ranks_come_does_not_matter(bad: list[dict[TensorInfo, int]]) -> None:
    def rows(worker: int) -> Rows:
        since = bad[worker].items()
        return rank_with(
            worker, range(9), *((step, info) for info, first in since for step in range(first, 9))
        )

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


# Ends of episodes


STEPS = 10
LAST = Watermark(STEPS - 1)


def rank(worker: int, bad: frozenset[int], steps: Sequence[int] = range(STEPS)) -> Rows:
    """Rows of a rank whose loss is NaN at some steps."""
    return Rows(
        block_of([Row(step, LOSS, [math.nan if step in bad else 1.0], worker=worker) for step in steps])
    )


def lasting(steps: int) -> RuleConfig:
    return RuleConfig.model_validate(
        {"rule": "non_finite_values", "for": {"steps": steps}, "keep_firing": {"steps": steps}}
    )


def episodes(outcome: Outcome) -> list[tuple[str, int]]:
    return [
        (change.phase.value, change.step)
        for change in outcome.transitions
        if change.phase in (Phase.FIRING, Phase.RESOLVED) and not change.revised
    ]


def alone(bad: frozenset[int], watermark: int = STEPS - 1) -> list[list[Event]]:
    """Rank 0, and a watermark that passes steps without the other ranks."""
    return [[rank(0, bad, range(watermark + 1)), Watermark(watermark)]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_episode_of_all_ranks_is_reported_once_though_one_of_them_lags(order: tuple[int, int]) -> None:
    first, second = (rank(worker, frozenset({4, 5})) for worker in order)
    expected = [("firing", 4), ("resolved", 6)]
    assert episodes(follow(NAN, [[first], [second, LAST]])) == expected
    assert episodes(follow(NAN, [[first, LAST], [second]])) == expected


def test_while_a_rank_can_still_come_the_episode_continues() -> None:
    outcome = follow(
        NAN,
        [
            [rank(0, frozenset({4}))],
            [rank(1, frozenset({4, 5, 6, 7})), LAST],
        ],
    )
    assert episodes(outcome) == [("firing", 4), ("resolved", 8)]


def test_a_rank_that_was_given_up_and_was_bad_for_longer_causes_no_notification() -> None:
    outcome = follow(NAN, [*alone(frozenset({4})), [rank(1, frozenset({4, 5, 6, 7}))]])
    assert episodes(outcome) == [("firing", 4), ("resolved", 5)]
    assert outcome.memory.alert.phase is Phase.RESOLVED


def test_what_is_bad_beyond_all_that_was_sealed_without_it_is_reported() -> None:
    back = rank(1, frozenset(range(4, 9)))
    outcome = follow(
        NAN,
        [
            *alone(frozenset({4}), watermark=6),
            [back],
            [rank(0, frozenset(), range(7, 10)), LAST],
        ],
    )
    assert episodes(outcome) == [("firing", 4), ("resolved", 5), ("firing", 7), ("resolved", 9)]
    parts = [rank(1, frozenset(range(4, 9)), range(step, step + 1)) for step in range(10)]
    rest: list[list[Event]] = [[rank(0, frozenset(), range(7, 10)), LAST]]
    assert episodes(
        follow(NAN, [*alone(frozenset({4}), watermark=6), *([part] for part in parts), *rest])
    ) == episodes(outcome)


def test_a_rank_that_stays_behind_and_bad_is_not_silenced_for_ever() -> None:
    evaluations = alone(frozenset({4}), watermark=6)
    for step in range(4, 9):  # the watermark passes each step of rank 1 before its row arrives
        evaluations.append([rank(0, frozenset(), range(step + 3, step + 4)), Watermark(step + 3)])
        evaluations.append([rank(1, frozenset(range(4, 9)), range(step, step + 1))])
    assert episodes(follow(NAN, evaluations)) == [("firing", 4), ("resolved", 5), ("firing", 8)]


def test_an_unreported_fault_is_reported_however_late() -> None:
    outcome = follow(NAN, [*alone(frozenset({2})), [rank(1, frozenset({6, 7}))]])
    assert episodes(outcome) == [("firing", 2), ("resolved", 3), ("firing", 6), ("resolved", 8)]


def test_a_segment_that_comes_after_later_ones_of_its_rank_ends_nothing() -> None:
    bad = frozenset({7, 8, 9})
    early, late = rank(0, bad, range(4)), rank(0, bad, range(4, 7))
    outcome = follow(NAN, [[early, rank(0, bad, range(7, 10)), LAST], [late]])
    assert episodes(outcome) == [("firing", 7)]
    assert outcome.memory.alert.phase is Phase.FIRING


def test_what_such_a_segment_holds_is_reported_once() -> None:
    def begun(bad: frozenset[int]) -> list[Event]:
        return [
            rank(0, bad, range(4)),
            rank(0, bad, range(7, 9)),
            Watermark(8),
        ]

    late: list[list[Event]] = [
        [rank(0, frozenset({5}), range(4, 7))],
        [rank(0, frozenset(), range(9, 10)), LAST],
    ]
    over = [("firing", 1), ("resolved", 2)]
    resumed = follow(NAN, [begun(frozenset({1})), *late])
    assert episodes(resumed) == [*over, ("firing", 5), ("resolved", 6)]
    joined = follow(NAN, [begun(frozenset({1, 8})), *late])
    assert episodes(joined) == [*over, ("firing", 8), ("resolved", 9)]
    assert [change.step for change in joined.transitions if change.revised] == [5]


def test_late_findings_make_nothing_pending_either() -> None:
    parts: list[list[Event]] = [
        [rank(0, frozenset({4, 5})), LAST],
        [rank(1, frozenset({4}), range(5))],
    ]
    assert [change.phase.value for change in follow(lasting(2), parts).transitions] == [
        "pending",
        "firing",
        "resolved",
    ]


bad_steps = st.frozensets(st.integers(0, STEPS - 1), max_size=6)


@settings(max_examples=examples(60))
@given(bad_steps, st.integers(1, 3))
def test_late_ranks_report_the_same_episodes_in_any_order(bad: frozenset[int], steps: int) -> None:
    """Ranks with equal findings, as of reduced gradients; the watermark passes the steps of each before the next arrives."""
    ranks = [rank(worker, bad) for worker in range(3)]
    expected = episodes(follow(lasting(steps), [[ranks[0], LAST]]))
    event(f"episodes: {len(expected)}")
    for order in permutations(ranks):
        assert (
            episodes(follow(lasting(steps), [[order[0], LAST], *([part] for part in order[1:])])) == expected
        )


@settings(max_examples=examples(60))
@given(st.lists(bad_steps, min_size=2, max_size=3), st.integers(1, 3), st.data())
def test_no_episode_begins_within_another(bad: list[frozenset[int]], steps: int, data: st.DataObject) -> None:
    """Ranks with different findings arrive in any order, each in its own order, and with any watermarks."""
    width = data.draw(st.integers(1, STEPS))
    turns = data.draw(st.permutations([worker for worker in range(len(bad)) for _ in range(0, STEPS, width)]))
    begun = dict.fromkeys(range(len(bad)), 0)
    evaluations: list[list[Event]] = []
    for worker in turns:
        first = begun[worker]
        begun[worker] = min(STEPS, first + width)
        watermarks = [Watermark(max(begun.values()) - 1)] if data.draw(st.booleans()) else []
        evaluations.append([rank(worker, bad[worker], range(first, begun[worker])), *watermarks])
    outcome = follow(lasting(steps), [*evaluations, [LAST]])
    over = -1
    for phase, step in episodes(outcome):
        if phase == "firing":
            assert step >= over
        else:
            over = max(over, step)
    event(f"episodes: {len(episodes(outcome)) // 2}")
