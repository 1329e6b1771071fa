"""Fair turns: neither huge runs nor slow rules keep others from theirs."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from sqlalchemy import select

from tests.rules.custom.test_sql_rule import ENDLESS
from tests.services.driving import Driven, make_service
from tests.services.recording import nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.core.failpoints import listening
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.clock import now_ns
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Project, RunRow
from watchstep_services.db.records import hint, put_segments
from watchstep_services.runs.claim import AHEAD_NS, Claim, claim_due, claim_longest_due
from watchstep_services.runs.registration import register
from watchstep_services.runs.stops import request_stop
from watchstep_services.scheduler import queue
from watchstep_services.scheduler.queue import WorkQueue
from watchstep_services.scheduler.work import evaluate_longest_due
from watchstep_services.service import rule_time
from watchstep_services.service.context import NullNotifier
from watchstep_services.service.rule_time import (
    FREE_SECONDS,
    LONGEST_NS,
    USUAL_LONGEST_NS,
    EvaluationThreads,
    RunBatchSize,
    UsualTime,
    charge,
    charge_usual,
)

SEGMENTS, SLICE = 60, 6
LEASE_NS = nanoseconds(60.0)


@dataclass
class Line(NullNotifier):
    """Messages as the broker keeps them: first come, first served."""

    waiting: deque[int] = field(default_factory=deque)

    def run_changed(self, run_id: int, cached_by: str = "") -> None:
        self.waiting.append(run_id)


class Single(RunBatchSize):
    """Batches of one run."""

    runs = 1


def small(driven: Driven, number: int) -> int:
    recording = driven.recording(run=f"small-{number}").begin()
    run_id = driven.register(recording.run)
    driven.announce(run_id, recording.write(0, 0, 0))
    return run_id


def huge(driven: Driven) -> int:
    recording = driven.recording(run="huge").begin()
    recording.write_all(range(SEGMENTS))
    run_id = driven.register("huge")
    driven.announce(run_id, *recording.written["w0"])
    return run_id


def test_a_huge_run_delays_others_by_one_slice(driven_sqlite: Driven) -> None:
    line = Line()
    driven = Driven(
        replace(driven_sqlite.with_settings(max_segments=SLICE).service, notifier=line),
    )
    much = huge(driven)
    line.run_changed(much)
    turns: list[int] = []
    came: dict[int, int] = {}
    for number in range(4 * SEGMENTS // SLICE):
        if number % 3 == 0 and number < SEGMENTS // SLICE:  # others come at any time
            run_id = small(driven, number)
            line.run_changed(run_id)
            came[run_id] = len(turns)
        if not line.waiting:
            break
        turns.append(line.waiting.popleft())
        evaluate_longest_due(driven.service, turns[-1])
    assert driven.run(much).last_step == SEGMENTS - 1
    assert turns.count(much) == SEGMENTS // SLICE
    for run_id, before in came.items():
        assert turns[before : turns.index(run_id)].count(much) <= 1


def test_a_hint_while_a_run_is_held_is_told_to_its_holder(driven: Driven) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 3))
    later = recording.write(1, 4, 7)

    class Announces(NullNotifier):
        """Somebody announces while the rules are judging, and the message finds the run held."""

    judged = driven.service.histories

    class Late(type(judged)):  # type: ignore[misc]
        def get(self, *asked: object) -> object:
            with driven.service.database.write() as session:
                put_segments(session, run_id, [later], 1)
                hint(session, run_id, requested=True)
            return super().get(*asked)

    meanwhile = Driven(replace(driven.service, histories=Late(), notifier=Announces()))
    assert meanwhile.evaluate(run_id).more
    assert not driven.evaluate(run_id).more
    assert driven.run(run_id).last_step == 7


def test_a_run_that_is_due_keeps_its_place(driven: Driven) -> None:
    run_id = driven.register()
    driven.change(RunRow, run_id, due_ns=5)
    with driven.service.database.write() as session:
        hint(session, run_id, requested=True)
    assert (driven.run(run_id).due_ns, driven.run(run_id).requested_ns) == (5, 0)


def due_since(driven: Driven, project: str, run: str, seconds: float) -> int:
    """A run that has been due for so long."""
    run_id = register(driven.service, project, run, (), "operator")
    with driven.service.database.write() as session:
        now = session.execute(select(now_ns())).scalar_one()
        session.get_one(RunRow, run_id).due_ns = now - int(seconds * NANOSECONDS)
    return run_id


def deferred_for(driven: Driven, project: str) -> int:
    """Nanoseconds; negative where the project is not deferred."""
    with driven.service.database.read() as session:
        until, now = session.execute(
            select(Project.deferred_until_ns, now_ns()).filter_by(name=project)
        ).one()
        return int(until - now)


def taken(driven: Driven, asked: int) -> int | None:
    claim = claim_longest_due(driven.service.database, asked, "mine", LEASE_NS)
    return None if claim is None else claim.run_id


def test_runs_of_a_project_with_slow_rules_come_later(driven: Driven) -> None:
    slow = [due_since(driven, "vision", f"slow-{number}", 50 - number) for number in range(3)]
    quick = due_since(driven, "other", "quick", 1)
    assert taken(driven, quick) == slow[0]
    charge(driven.service.database, "vision", 10.0)
    assert [taken(driven, slow[0]) for _ in range(3)] == [quick, slow[1], slow[2]]


def test_what_rules_usually_take_defers_nothing_and_no_project_is_deferred_for_ever(driven: Driven) -> None:
    due_since(driven, "vision", "run", 1)
    charge(driven.service.database, "vision", FREE_SECONDS)

    assert deferred_for(driven, "vision") < 0
    for _ in range(100):
        charge(driven.service.database, "vision", 10.0)
    assert LONGEST_NS - 60 * NANOSECONDS < deferred_for(driven, "vision") <= LONGEST_NS


@pytest.mark.ci
def test_an_evaluation_with_a_slow_rule_ends_and_defers_its_project(
    database: Database, folder_store: Store
) -> None:
    query = f"{ENDLESS} AND {id(database)} > 0"  # one that ended its process lately would not even be started
    rules = (
        RuleConfig(rule="sql", name="slow", params={"query": query, "seconds": 60.0, "window": 100}),
        RuleConfig(rule="non_finite_values"),
    )
    driven = Driven(make_service(database, folder_store, rules, rule_seconds=FREE_SECONDS + 0.5))
    _, run_id = driven.record(nan_from(5), last=9)
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"
    with database.read() as session:
        until, now = session.execute(select(Project.deferred_until_ns, now_ns())).one()
    assert until > now


def test_an_evaluation_that_takes_long_for_other_reasons_defers_its_project(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = due_since(driven, "vision", "slow", 10), due_since(driven, "other", "quick", 1)
    clock = iter([0.0, 1.0, 10.0, 16.0])  # an evaluation of one second, and one of six
    monkeypatch.setattr(rule_time, "_now", lambda: next(clock))
    with rule_time.charged(driven.service.database, "vision", 10.0, driven.service.usual_time):
        pass
    assert taken(driven, quick) == slow
    again = due_since(driven, "vision", "again", 10)
    with rule_time.charged(driven.service.database, "vision", 10.0, driven.service.usual_time):
        pass
    assert [taken(driven, again) for _ in range(2)] == [quick, again]


def test_many_short_evaluations_of_a_project_defer_it(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [due_since(driven, "vision", f"many-{number}", 3 - number / 10) for number in range(2)]
    quick = due_since(driven, "other", "quick", 1)
    clock = iter(number / 10 for number in range(1000))
    monkeypatch.setattr(rule_time, "_now", lambda: next(clock))
    for _ in range(50):  # each takes a tenth of a second
        with rule_time.charged(driven.service.database, "vision", 10.0, driven.service.usual_time):
            pass
    assert [taken(driven, many[0]) for _ in range(3)] == [quick, *many]


def test_a_backlog_older_than_the_longest_deferral_comes_after_the_runs_of_others(driven: Driven) -> None:
    old = [due_since(driven, "vision", f"old-{number}", 3600 - number) for number in range(2)]
    quick = due_since(driven, "other", "quick", 1)
    for _ in range(10):
        charge_usual(driven.service.database, "vision", 10.0)
    assert [taken(driven, old[0]) for _ in range(3)] == [quick, *old]


def test_a_project_whose_runs_are_all_urgent_does_not_delay_others(driven: Driven) -> None:
    urgent = due_since(driven, "vision", "urgent", 1)
    quick = due_since(driven, "other", "quick", 1)
    with driven.service.database.write() as session:
        session.get_one(RunRow, urgent).urgent_ns = session.execute(select(now_ns())).scalar_one()
    (first,) = claim_due(driven.service.database, urgent, "mine", LEASE_NS, 1)
    assert (first.run_id, first.is_urgent) == (urgent, True)
    with driven.service.database.write() as session:
        session.get_one(RunRow, urgent).lease_until_ns = 0
    for _ in range(16):
        with rule_time.charged(
            driven.service.database, "vision", 10.0, driven.service.usual_time, is_urgent=first.is_urgent
        ):
            pass
    assert [taken(driven, urgent) for _ in range(2)] == [quick, urgent]


def test_usual_evaluations_are_charged_by_the_second_and_by_project() -> None:
    usual = UsualTime()
    assert [usual.add("a", 0.4), usual.add("b", 0.9), usual.add("a", 0.4)] == [0.0, 0.0, 0.0]
    assert usual.add("a", 0.4) == pytest.approx(1.2)
    assert [usual.add("a", 0.9), usual.add("b", 0.5)] == [0.0, pytest.approx(1.4)]


def test_usual_evaluations_defer_less_than_an_urgent_run_is_ahead(driven: Driven) -> None:
    due_since(driven, "vision", "run", 1)

    for _ in range(30):
        charge_usual(driven.service.database, "vision", 10.0)
    assert USUAL_LONGEST_NS - 60 * NANOSECONDS < deferred_for(driven, "vision") <= USUAL_LONGEST_NS < AHEAD_NS
    charge(driven.service.database, "vision", 20.0)
    charge_usual(driven.service.database, "vision", 10.0)
    assert deferred_for(driven, "vision") > USUAL_LONGEST_NS + 60 * NANOSECONDS  # which shortens no deferral


def test_runs_of_excepted_projects_are_not_claimed(driven: Driven) -> None:
    due_since(driven, "vision", "first", 50)
    quick = due_since(driven, "other", "quick", 1)
    claims = claim_due(driven.service.database, 0, "mine", LEASE_NS, 8, ["vision", "speech"])
    assert [claim.run_id for claim in claims] == [quick]


def test_evaluations_of_one_project_leave_a_thread_to_the_others(driven_sqlite: Driven) -> None:
    work = WorkQueue(2)
    service = replace(
        driven_sqlite.service, notifier=work, evaluation_threads=EvaluationThreads(1), batch_size=Single()
    )
    driven = Driven(service)
    slow, following = (due_since(driven, "vision", name, 50.0) for name in ("slow", "following"))
    quick = due_since(driven, "other", "quick", 1.0)
    begun, release = threading.Event(), threading.Event()
    requested: list[object] = []
    claimed: list[int] = []

    def judge_slowly(point: str, subject: object) -> None:
        if point == "evaluate.claiming":
            requested.append(subject)
        if point == "evaluate.claimed" and isinstance(subject, Claim):
            claimed.append(subject.run_id)
            if subject.run_id == slow:
                begun.set()
                release.wait(60.0)

    work.start(service)
    try:
        with listening(judge_slowly):
            work.run_changed(slow)
            assert begun.wait(30.0)
            work.run_changed(following)  # evaluates the run of the other project instead
            assert work.wait_until(lambda: quick in claimed, 30.0)
            work.run_changed(following)  # evaluates nothing
            assert work.wait_until(lambda: requested.count(following) == 2, 30.0)
            work.run_changed(quick)
            assert work.wait_until(lambda: quick in requested, 30.0)
            assert claimed == [slow, quick]
            release.set()
            assert work.wait_until(lambda: following in claimed, 30.0)  # without another message
    finally:
        release.set()
        work.close()


def test_a_stop_does_not_wait_for_evaluations(driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    driven_sqlite.recording().begin(on_stop="ignore").write(0, 0, 7)
    run_id = driven_sqlite.register()
    driven_sqlite.discover(run_id)
    with driven_sqlite.service.database.write() as session:
        stop = request_stop(session, driven_sqlite.service.base_url, run_id, "a1", ("", "enough"))
    assert stop is not None
    release, begun = threading.Event(), threading.Event()

    def endless(_service: object, _run_id: int) -> None:
        begun.set()
        release.wait()

    monkeypatch.setitem(queue._WORK, "run", endless)  # an evaluation that judges slow rules
    work = WorkQueue(1)
    work.start(driven_sqlite.service)
    try:
        work.run_changed(run_id)
        assert begun.wait(30.0)
        work.action_due(stop)
        assert work.wait_until(lambda: driven_sqlite.actions(run_id)[0].tries > 0, 30.0)
    finally:
        release.set()
        work.close()
