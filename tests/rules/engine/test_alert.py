from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.blocks import Row, block_of, gradient
from watchstep_rules.config.rule_config import Timing
from watchstep_rules.engine.alert import AlertMemory, Phase, Transition, advance
from watchstep_rules.engine.streaks import JudgedRows
from watchstep_rules.rule import Finding, finding_at

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
        memory, more = advance(memory, lasting(hold), *rows_and_findings(history[start:end], start))
        memory = AlertMemory.model_validate_json(memory.model_dump_json())
        transitions += more
    return memory, transitions


def lasting(steps: int) -> Timing:
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


def test_the_same_layer_on_two_workers_is_two_series() -> None:
    rows = [Row(step, INFOS[0], [1.0], worker=step % 2) for step in range(2)]
    block = block_of(rows)
    findings = [finding_at("test", block, row, value=1.0, threshold=0.0, message="bad") for row in range(2)]
    memory, _ = advance(AlertMemory(), lasting(2), JudgedRows.of(block), findings)
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
