"""While workers are behind, rules that stop nothing wait, and those that may stop do not."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from tests.sdk.blocks import Row, block_of, gradient
from tests.services.driving import Driven, make_service
from tests.services.recording import Recording, exploding_from, nan_from
from watchstep.store import Store
from watchstep_rules.config import RuleConfig, StopAction
from watchstep_services import points
from watchstep_services.database.clock import read_clock
from watchstep_services.database.engine import Database
from watchstep_services.database.models import Memory, RuleConfigRow, Run, Segment
from watchstep_services.evaluator import waiting
from watchstep_services.evaluator.discover import discover
from watchstep_services.evaluator.evaluate import Evaluation
from watchstep_services.evaluator.postponing import BEHIND_NS
from watchstep_services.scheduler.work import evaluate_run
from watchstep_services.settings import nanoseconds

HOUR = 3600.0


@pytest.fixture
def run(driven: Driven, folder_store: Store) -> Late:
    return Late.begun(driven.with_settings(postpone_seconds=HOUR), folder_store)


class Late:
    """A run that goes on, whose worker keeps up or is behind as one says."""

    def __init__(self, driven: Driven, recording: Recording, run_id: int) -> None:
        self.driven, self.recording, self.run_id = driven, recording, run_id
        self.seq = 0

    @classmethod
    def begun(cls, driven: Driven, store: Store, run: str = "run-1") -> Late:
        recording = Recording(store, run=run).begin()
        late = cls(driven, recording, driven.register(run))
        while late.row.state != "running":
            late.write()
            late.evaluate()
        return late

    @property
    def row(self) -> Run:
        return self.driven.run(self.run_id)

    @property
    def states(self) -> list[str]:
        return [state for _, state in sorted(self.driven.segments(self.run_id).items())]

    def write(self, *ill: Any) -> None:
        first = 4 * self.seq
        self.driven.announce(self.run_id, self.recording.write(self.seq, first, first + 3, *ill))
        self.seq += 1

    def evaluate(self, *, behind: bool = False) -> Evaluation:
        """One evaluation, by a worker that comes as late as that says that it is behind, or in no time."""
        with self.driven.service.database.write() as session:
            row = session.get_one(Run, self.run_id)
            row.due_ns = read_clock(session) - (2 * BEHIND_NS if behind else -BEHIND_NS)
        return evaluate_run(self.driven.service, self.run_id)


def test_rules_that_stop_nothing_wait_while_workers_are_behind(run: Late) -> None:
    before = run.row.cursor, run.driven.memories()
    for _ in range(3):
        run.write(exploding_from(0))
        assert run.evaluate(behind=True).outcome == "postponed"
    assert (run.row.cursor, run.driven.memories()) == before
    assert run.states[-3:] == ["announced"] * 3
    assert run.row.lease_until_ns == 0
    due = run.row.due_ns
    with run.driven.service.database.read() as session:
        waiting = select(func.min(Segment.found_ns)).filter_by(state="announced")
        assert due == session.execute(waiting).scalar_one() + nanoseconds(HOUR)

    assert run.evaluate().outcome == "committed"
    assert set(run.states) == {"read"}
    assert "exploding_gradient" in run.driven.alerts(run.run_id)


def test_a_rule_that_may_stop_has_its_say_at_once(run: Late) -> None:
    run.write()
    assert run.evaluate(behind=True).outcome == "postponed"
    run.write(nan_from(0))
    assert run.evaluate(behind=True).outcome == "committed"
    assert "stop.requested" in run.driven.event_types(run.run_id)
    assert set(run.states) == {"read"}


def test_what_was_looked_at_is_not_read_again(run: Late) -> None:
    run.write(exploding_from(0))
    assert run.evaluate(behind=True).outcome == "postponed"
    gone = run.recording.written["w0"][-1]
    run.recording.store.delete(gone.path)
    run.write(exploding_from(0))
    assert run.evaluate().outcome == "committed"
    assert set(run.states) == {"read"}


def test_another_worker_reads_for_itself(run: Late) -> None:
    run.write(exploding_from(0))
    assert run.evaluate(behind=True).outcome == "postponed"
    run.driven = run.driven.restarted()
    assert run.evaluate().outcome == "committed"
    assert "exploding_gradient" in run.driven.alerts(run.run_id)


@pytest.mark.parametrize("point", ["evaluate.postponed", "evaluate.let_go"])
def test_a_worker_that_dies_as_it_postpones_takes_nothing_with_it(run: Late, point: str) -> None:
    def die(name: str, _subject: object) -> None:
        if name == point:
            raise SystemExit

    run.write(nan_from(4 * run.seq + 4))
    with points.listening(die), pytest.raises(SystemExit):
        run.evaluate(behind=True)
    run.driven = run.driven.restarted()
    with run.driven.service.database.write() as session:
        session.get_one(Run, run.run_id).lease_until_ns = 0
    run.write(nan_from(0))
    assert run.evaluate(behind=True).outcome == "committed"
    assert "stop.requested" in run.driven.event_types(run.run_id)


@pytest.mark.parametrize("changed", [{"postpone_seconds": 0.0}, {"postpone_seconds": 1e-6}])
def test_none_waits_for_longer_than_it_may(run: Late, changed: dict[str, float]) -> None:
    run.driven = run.driven.with_settings(**changed)
    run.write()
    assert run.evaluate(behind=True).outcome == "committed"


def test_all_judge_what_ends(run: Late) -> None:
    run.write()
    run.recording.end(last_step=4 * run.seq - 1)
    discover(run.driven.service, run.run_id)
    assert run.evaluate(behind=True).outcome == "committed"


def test_a_rule_that_is_only_tried_does_not_press(driven: Driven, folder_store: Store) -> None:
    tried = RuleConfig(rule="nan_or_inf", actions=(StopAction(),), dry_run=True)
    service = make_service(driven.service.database, folder_store, [tried], postpone_seconds=HOUR)
    run = Late.begun(Driven(service), folder_store)
    run.write(nan_from(0))
    assert run.evaluate(behind=True).outcome == "postponed"


Turn = tuple[bool, bool]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=7),
    bad=st.integers(0, 40),
    explodes=st.integers(0, 40),
)
def test_whoever_waits_the_result_is_the_same(
    sqlite: Database, folder_store: Store, turns: list[Turn], bad: int, explodes: int
) -> None:
    """Turns are (two segments come, the worker is behind); a bad step asks for a stop in the evaluation that sees it."""

    def value(step: int, tensor: str) -> float:
        return nan_from(bad)(step, tensor) if step >= bad else exploding_from(explodes)(step, tensor)

    ends = []
    for postponed in (HOUR, 0.0):
        driven = Driven(make_service(sqlite, folder_store, postpone_seconds=postponed))
        run = Late.begun(driven, folder_store, f"run-{uuid.uuid4()}")
        for twice, behind in turns:
            for _ in range(1 + twice):
                run.write(value)
            run.evaluate(behind=behind)
            assert ("stop.requested" in driven.event_types(run.run_id)) == (4 * run.seq > bad)
        run.evaluate()
        alerts = {rule: held[:2] for rule, held in driven.alerts(run.run_id).items()}
        ends.append((run.row.cursor, run.states, alerts, remembered(sqlite, run.run_id)))
    assert ends[0] == ends[1]


def remembered(database: Database, run_id: int) -> list[str]:
    chosen = select(Memory.memory).join(RuleConfigRow, RuleConfigRow.id == Memory.config_id)
    with database.read() as session:
        return list(session.execute(chosen.filter_by(run_id=run_id).order_by(RuleConfigRow.name)).scalars())


def test_rows_that_wait_are_bounded_and_those_of_runs_that_went_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("watchstep_services.evaluator.waiting.time.monotonic", lambda: clock[0])
    rows = waiting.WaitingRows(rows=10)
    six = {"a": waiting.Read(1, block_of([Row(step, gradient("first"), [1.0]) for step in range(6)]))}
    assert rows.keep(1, six.items())
    assert rows.keep(1, six.items())  # instead of those
    assert not rows.keep(2, six.items())
    assert (rows.of(1), rows.of(2)) == (six, {})
    clock[0] = 61.0
    assert rows.keep(2, six.items())
    assert rows.of(1) == {}
    rows.drop(2)
    assert rows.keep(3, six.items())
