"""What a service said live is what a backtest of the run says afterwards: findings, transitions, memories."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from tests.laws import examples
from tests.rules.runs import elements, figures
from tests.sdk.format.blocks import Row, block_of
from tests.services import driving
from tests.services.driving import Driven, make_service
from tests.services.recording import LAYERS, LOSS, PROJECT, Recording, nan_from
from watchstep.errors import FormatError, StoreError
from watchstep.format import journal, layout, segment
from watchstep.format.block import Block
from watchstep.format.layout import SegmentKey
from watchstep.reading.compaction import compact
from watchstep.reading.run import open_run
from watchstep.reading.run_documents import read_journal
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import BacktestOutcome, JudgingOrder, backtest, backtest_run
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.engine.alert import Transition
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.evaluation import commit as committing
from watchstep_services.evaluation import evaluate as evaluating
from watchstep_services.evaluation.journal import unwritten, write_journal
from watchstep_services.runs import claim as claiming
from watchstep_services.runs import discovery as discovering
from watchstep_services.runs.discovery import discover
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.service.judging import Judged
from watchstep_services.stores.confined_folder import ConfinedFolder

SECOND = 1_000_000_000
RULES = (
    RuleConfig(rule="non_finite_values", severity="critical", inhibits=("exploding_gradient",)),
    RuleConfig(rule="exploding_gradient", params={"growth": 1.5, "warmup": 3, "window": 3}),
    RuleConfig(
        rule="vanishing_gradient", params={"threshold": 10.0, "relative": 0.9}, hold=MinimumDuration(steps=2)
    ),
    RuleConfig(rule="oscillating_loss", params={"window": 6}),
    RuleConfig(rule="stalled_training", params={"threshold": 60.0}),
)
STEPS = 16
Said = dict[tuple[str, str], tuple[list[dict[str, Any]], list[Transition]]]
"""(attempt, rule config) → findings and transitions."""


@dataclass
class Live:
    """A service that judges a run, and all that it said."""

    driven: Driven
    run_id: int
    said: Said = field(default_factory=dict)
    now_ns: int = 1_000 * SECOND

    def evaluate(self, seconds: float) -> None:
        """Evaluate as often as there is something at once, some time later."""
        self.now_ns += round(seconds * SECOND)
        self.driven.settle(self.run_id)

    def heard(self, attempt: str, judged: Sequence[Judged]) -> None:
        """Take down what was said in an evaluation that was committed."""
        for one in judged:
            findings, transitions = self.said.setdefault((attempt, one.row.name), ([], []))
            findings += [json.loads(finding.model_dump_json()) for finding in one.findings]
            transitions += one.transitions

    def write_journal(self) -> None:
        """As a sweep does for a run that is over."""
        self.driven.change(RunRow, self.run_id, state="completed")
        for due in unwritten(self.driven.service):
            write_journal(self.driven.service, due)


@pytest.fixture
def live_service(
    tmp_path: Path, sqlite_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], tuple[Live, Recording]]:
    """Makes services on stores of their own, by number; their clocks are the test's."""
    commit = committing.commit
    current: list[Live] = []

    def told(service: Any, held: Any, outcome: Any) -> Any:
        actions = commit(service, held, outcome)
        if actions is not None:
            current[-1].heard(outcome.collected.attempt, outcome.judged)
        return actions

    monkeypatch.setattr(evaluating, "commit", told)
    monkeypatch.setattr(claiming, "clock_of", lambda _row: current[-1].now_ns)
    for module in (discovering, driving):
        monkeypatch.setattr(module, "read_clock", lambda _session: current[-1].now_ns)

    def make(number: int) -> tuple[Live, Recording]:
        store = Store.open(tmp_path / f"store-{number}", create=True)
        recording = Recording(store).begin(world_size=2)
        service = make_service(
            sqlite_factory(number),
            store,
            RULES,
            allowed_lateness_seconds=30.0,
            gap_seconds=1e9,
            max_segments=3,
        )
        driven = Driven(service)
        live = Live(driven, driven.register())
        current.append(live)
        discover(service, live.run_id)
        return live, recording

    return make


def outcome_as_said(outcome: BacktestOutcome) -> Said:
    return {
        (attempt.attempt, one.config.name): (
            [json.loads(finding.model_dump_json()) for finding in one.findings],
            one.transitions,
        )
        for attempt in outcome.attempts
        for one in attempt.outcomes
    }


def with_words(said: Said) -> Said:
    """Only of rule configs that said something."""
    return {key: held for key, held in said.items() if held[0] or held[1]}


def worker_rows(random: Random, worker: int, first: int, taken_ns: int) -> Block:
    rows = [
        Row(step, info, elements(random), worker=worker, probes=figures(random))
        for step in range(first, STEPS)
        if random.random() < 0.9
        for info in (LOSS, *LAYERS)
        if random.random() < 0.9
    ]
    block = block_of(rows or [Row(first, LOSS, [1.0], worker=worker)])
    return Block(**{**vars(block), "time_ns": block.time_ns + taken_ns})


def put_segments(
    recording: Recording, random: Random, worker: int, first: int, taken_ns: int
) -> list[SegmentKey]:
    """One worker's segments, each of whole steps, on the store."""
    block = worker_rows(random, worker, first, taken_ns)
    steps = sorted({int(step) for step in block.step})
    cuts = sorted({0, len(steps), *random.choices(range(len(steps)), k=3)})
    keys = []
    for seq, (start, end) in enumerate(pairwise(cuts)):
        part = block.where(np.isin(block.step, steps[start:end]))
        key = recording.key(seq, steps[start], steps[end - 1], worker)
        recording.store.put(key.path, segment.encode(part))
        recording.written.setdefault(key.writer.writer, []).append(key)
        keys.append(key)
    return keys


def drive(live: Live, recording: Recording, random: Random, first: int = 0) -> None:
    """Segments of two workers come in any order that keeps each worker's, after any pauses; one may die."""
    queues = [put_segments(recording, random, worker, first, live.now_ns) for worker in (0, 1)]
    if random.random() < 0.3:
        for _ in range(random.randint(0, len(queues[1]))):  # what it wrote last never came
            recording.store.delete(queues[1].pop().path)
    while any(queues):
        for queue in random.sample(queues, 2):
            live.driven.announce(live.run_id, *[queue.pop(0) for _ in range(random.randint(0, len(queue)))])
        if random.random() < 0.3:
            live.driven = live.driven.restarted()
        live.evaluate(random.choice([0.1, 5, 40]))
    for _ in range(random.randint(0, 3)):
        live.evaluate(random.choice([5, 40, 100]))


NUMBERS = iter(range(10_000))


@pytest.mark.ci
@settings(
    max_examples=examples(10),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a seed does not shrink
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), attempts=st.integers(1, 2))
def test_a_backtest_says_what_was_said_live(
    live_service: Callable[[int], tuple[Live, Recording]], seed: int, attempts: int
) -> None:
    random = Random(seed)
    live, recording = live_service(next(NUMBERS))
    drive(live, recording, random)
    if attempts == 2:
        second = Recording(recording.root, attempt="a2").begin(world_size=2, started_ns=2)
        discover(live.driven.service, live.run_id)
        drive(live, second, random, first=random.randint(0, STEPS - 1))
    live.write_journal()

    outcome = backtest_run(f"{recording.root.location}/{PROJECT}/run-1", RULES)

    said = with_words(outcome_as_said(outcome))
    event(f"alerts: {sum(bool(held[1]) for held in said.values())}, findings: {bool(said)}")
    assert said == with_words(live.said)
    assert {attempt.order for attempt in outcome.attempts} <= {JudgingOrder.JOURNAL}
    assert {note for attempt in outcome.attempts for note in attempt.notes} == set()
    compact(outcome.location, delete_after=0)
    again = backtest_run(outcome.location, RULES)
    assert not list(recording.store.entries(layout.SEGMENTS))
    assert {attempt.order for attempt in again.attempts} <= {JudgingOrder.JOURNAL}
    assert with_words(outcome_as_said(again)) == said


def late_worker(live: Live, recording: Recording) -> None:
    """Rank 1 falls silent, is waited for until the deadline, and comes back with rows of sealed steps."""
    recording.write(0, 0, 9, nan_from(4), taken_ns=live.now_ns)
    first = recording.write(0, 0, 2, worker=1, taken_ns=live.now_ns)
    discover(live.driven.service, live.run_id)
    live.evaluate(0)
    live.evaluate(40)
    recording.write(1, 3, 9, nan_from(6), worker=1, taken_ns=live.now_ns)
    discover(live.driven.service, live.run_id)
    live.evaluate(1)
    assert live.driven.watermarks(live.run_id) == [(2, "passed"), (9, "deadline")]
    assert first.writer.writer == "w1"


LiveService = Callable[[int], tuple[Live, Recording]]


def location(recording: Recording) -> str:
    return f"{recording.root.location}/{PROJECT}/run-1"


@pytest.mark.ci
def test_rows_that_came_after_their_seal_are_replayed_after_it(live_service: LiveService) -> None:
    live, recording = live_service(0)
    late_worker(live, recording)
    live.write_journal()
    outcome = backtest_run(location(recording), RULES)
    assert with_words(outcome_as_said(outcome)) == with_words(live.said)
    said = {one.config.name: one for one in outcome.attempts[0].outcomes}["non_finite_values"].findings
    assert [(finding.worker, finding.step) for finding in said][-1] == (1, 9)


def test_without_a_journal_rows_are_taken_by_their_steps(live_service: LiveService) -> None:
    live, recording = live_service(0)
    late_worker(live, recording)
    (attempt,) = backtest_run(location(recording), RULES).attempts
    assert attempt.order is JudgingOrder.STEPS
    assert "the attempt has no journal of a service" in attempt.notes[0]
    assert attempt.outcomes == backtest(open_run(location(recording)).rows("a1"), RULES)
    assert attempt.rows == len(open_run(location(recording)).rows("a1"))


def test_a_damaged_journal_is_told(live_service: LiveService) -> None:
    live, recording = live_service(0)
    late_worker(live, recording)
    live.write_journal()
    recording.store.put(layout.journal_part("a1", 0), b"{}")
    (attempt,) = backtest_run(location(recording), RULES).attempts
    assert attempt.order is JudgingOrder.STEPS
    assert "journal/a1/0000000000.json is not a part of a journal" in attempt.notes[0]


def test_rows_that_no_service_judged_come_last(live_service: LiveService) -> None:
    live, recording = live_service(0)
    late_worker(live, recording)
    live.write_journal()
    recording.write(1, 10, 12, nan_from(0), taken_ns=live.now_ns)
    (attempt,) = backtest_run(location(recording), RULES).attempts
    assert attempt.order is JudgingOrder.JOURNAL
    assert attempt.notes == (
        "9 rows after the end of the journal, which the service did not evaluate, are evaluated in the order of their steps",
    )
    assert attempt.outcomes[0].findings[-1].step == 12


def test_rows_that_are_gone_lose_the_order(live_service: LiveService) -> None:
    live, recording = live_service(0)
    late_worker(live, recording)
    live.write_journal()
    gone = recording.written["w0"][0].path
    recording.store.delete(gone)
    (attempt,) = backtest_run(location(recording), RULES).attempts
    assert attempt.order is JudgingOrder.STEPS
    assert attempt.notes == (
        f"segment {gone} is missing, and only 0 of its 30 rows of rank 0 were found; rows are evaluated in the order of their steps",
    )


def test_an_attempt_that_wrote_nothing_has_its_silence_replayed(live_service: LiveService) -> None:
    live, recording = live_service(0)
    live.evaluate(0)
    for _ in range(8):
        live.evaluate(10)
    assert [t.phase.value for _, changes in live.said.values() for t in changes] == ["firing"]
    live.write_journal()
    outcome = backtest_run(location(recording), RULES)
    assert with_words(outcome_as_said(outcome)) == with_words(live.said)


def test_a_long_journal_has_parts_and_each_is_written_once(
    live_service: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_EVALUATIONS", 2)
    live, recording = live_service(0)
    service = live.driven.service
    late_worker(live, recording)
    (due,) = unwritten(service)  # while the run goes on: it was judged three times
    assert write_journal(service, due) == 2
    assert unwritten(service) == []
    with service.database.write() as session:  # as if the process had died before it noted them
        session.execute(update(Attempt).values(journal_parts=0, journaled=0))
    live.write_journal()
    keys = [entry.key for entry in recording.store.entries(layout.JOURNALS)]
    assert sorted(keys) == [layout.journal_part("a1", number) for number in (0, 1)]
    assert [held.tick for held in read_journal(recording.store, "a1")] == [0, 1, 2]


def test_something_else_in_the_place_of_a_part_is_told_once(live_service: LiveService) -> None:
    live, recording = live_service(0)
    late_worker(live, recording)
    recording.store.put(layout.journal_part("a1", 0), b"?")
    with pytest.raises(FormatError, match="not a part"):
        live.write_journal()
    assert unwritten(live.driven.service) == []


def test_a_sweep_writes_the_journal_of_a_run_that_has_ended(live_service: LiveService) -> None:
    live, recording = live_service(0)
    late_worker(live, recording)
    for worker in (0, 1):
        recording.end(last_step=9, worker=worker)
    sweep(live.driven.service)
    sweep(live.driven.service)
    assert [held.tick for held in read_journal(recording.store, "a1")] == [0, 1, 2]


def test_a_store_that_refuses_is_asked_again_later(
    live_service: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, recording = live_service(0)
    late_worker(live, recording)
    service = live.driven.service

    def refused(*_: object) -> bool:
        raise StoreError("store: access denied", "allow it")

    with monkeypatch.context() as patched:
        patched.setattr(ConfinedFolder, "create", refused)
        with pytest.raises(StoreError, match="access denied"):
            live.write_journal()
    assert unwritten(service) == []
    with service.database.write() as session:  # ten minutes later
        session.execute(update(Attempt).values(journal_due_ns=1))
    live.write_journal()
    assert [held.tick for held in read_journal(recording.store, "a1")] == [0, 1, 2]
