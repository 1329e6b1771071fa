"""Runs that are evaluated together: equal to evaluations one by one, and independent of each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import select, update

from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres
from tests.services.recording import Recording, healthy, nan_from
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_services.core.failpoints import listening
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.engine import open_database
from watchstep_services.db.lease import RUN_LEASE
from watchstep_services.db.models import RuleConfigRow, RunRow
from watchstep_services.db.schema import upgrade
from watchstep_services.evaluation import batch as batches
from watchstep_services.evaluation import fetch_ahead as fetching
from watchstep_services.evaluation.batch import RunBatch, evaluate_due
from watchstep_services.evaluation.collect import ReadAhead
from watchstep_services.evaluation.evaluate import Evaluation
from watchstep_services.evaluation.inbox import open_inboxes
from watchstep_services.runs.claim import Claim, claim_due
from watchstep_services.service.rule_time import BATCH_SECONDS, MOST_RUNS, RunBatchSize

LEASE_NS = nanoseconds(60.0)


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine gives nothing back."""
    monkeypatch.setattr(batches, "RELINQUISH_SECONDS", 600.0)
    monkeypatch.setattr(RunBatchSize, "runs", MOST_RUNS)


def _nothing(_run_id: int, _result: Evaluation) -> None:
    """Follow up on nothing."""


def _run(driven: Driven, name: str) -> tuple[int, Recording]:
    """A run with one evaluated segment, so that later evaluations have no news."""
    recording = driven.recording(run=name).begin()
    run_id = driven.register(name)
    driven.judge(run_id, recording.write(0, 0, 3, healthy))
    return run_id, recording


def _several(driven: Driven, number: int) -> list[tuple[int, Recording, SegmentKey]]:
    """Runs that have just been announced, in this order."""
    runs = [_run(driven, f"run-{place}") for place in range(number)]
    written = [(run_id, recording, recording.write(1, 4, 7, healthy)) for run_id, recording in runs]
    for run_id, _, key in written:
        driven.announce(run_id, key)
    return written


@contextmanager
def _at(*calls: tuple[str, int, Callable[[], None]]) -> Iterator[None]:
    """Call functions when the evaluation of a run reaches a failpoint: each (failpoint, run id, function)."""

    def listener(name: str, subject: object) -> None:
        for point, run_id, work in calls:
            if name == point and isinstance(subject, Claim) and subject.run_id == run_id:
                work()

    with listening(listener):
        yield


@pytest.mark.ci
def test_a_batch_writes_what_single_evaluations_write(driven: Driven) -> None:
    runs = _several(driven, 4)
    alone = runs.pop()[0]
    with driven.service.database.write() as session:
        session.execute(update(RunRow).where(RunRow.id == alone).values(due_ns=None))
    results: dict[int, Evaluation] = {}
    assert evaluate_due(driven.service, results.__setitem__).runs == 3
    assert {run_id: result.outcome for run_id, result in results.items()} == {
        run_id: "committed" for run_id, _, _ in runs
    }
    driven.evaluate(alone)
    expected = driven.run(alone)
    for run_id, _, _ in runs:
        row = driven.run(run_id)
        assert (row.cursor, row.journal, row.ticks, row.last_step, row.due_ns, row.lease_until_ns) == (
            expected.cursor, expected.journal, expected.ticks, expected.last_step, expected.due_ns, 0,
        )  # fmt: skip
        assert driven.segments(run_id) == driven.segments(alone)
        assert driven.watermarks(run_id) == driven.watermarks(alone)
    states: dict[str, set[str]] = {}
    with driven.service.database.read() as session:
        names = dict(session.execute(select(RuleConfigRow.id, RuleConfigRow.name)).all())
    for config_id, _, state, findings in driven.memories():
        states.setdefault(names[config_id], set()).add(f"{findings} {state}")
    assert all(len(of_rule) == 1 for of_rule in states.values())
    # The cached state is current: the next evaluation continues from it.
    for run_id, recording, _ in runs:
        driven.announce(run_id, recording.write(2, 8, 11, nan_from(9)))
    assert evaluate_due(driven.restarted().service, _nothing).runs == 3
    assert all(driven.alerts(run_id)["non_finite_values"][:2] == ("firing", 9) for run_id, _, _ in runs)
    assert evaluate_due(driven.service, _nothing).runs == 0


def test_a_run_lost_to_another_worker_undoes_no_other(driven: Driven) -> None:
    (first, _, _), (lost, _, _), (last, _, _) = _several(driven, 3)
    before = driven.run(lost)

    def take() -> None:
        with driven.service.database.write() as session:
            RUN_LEASE.revoke(session, lost)

    results: dict[int, Evaluation] = {}
    with _at(("evaluate.judged", lost, take)):
        evaluate_due(driven.service, results.__setitem__)
    assert [results[run_id].outcome for run_id in (first, lost, last)] == ["committed", "fenced", "committed"]
    assert driven.run(lost).cursor == before.cursor
    assert driven.segments(lost)["w0", 1] == "announced"
    assert driven.segments(last)["w0", 1] == "read"
    driven.settle(lost)
    assert driven.run(lost).last_step == 7


def test_a_run_with_a_failing_store_undoes_no_other(driven: Driven) -> None:
    (first, _, _), (bad, _, _), (last, _, _) = _several(driven, 3)

    def fail() -> None:
        raise RuntimeError("a fault of this run")

    results: dict[int, Evaluation] = {}
    with _at(("evaluate.read", bad, fail)):
        assert evaluate_due(driven.service, results.__setitem__).runs == 3
    assert sorted(results) == sorted([first, last])
    assert "RuntimeError" in driven.run(bad).health["evaluation"]
    assert driven.run(bad).lease_until_ns == 0
    assert driven.run(last).last_step == 7


def test_an_alert_is_followed_up_before_the_next_run_is_judged(driven: Driven) -> None:
    (bad, recording), (other, second) = (_run(driven, name) for name in ("bad", "other"))
    driven.announce(bad, recording.write(1, 4, 7, nan_from(5)))
    driven.announce(other, second.write(1, 4, 7, healthy))
    order: list[str] = []

    def follow_up(run_id: int, result: Evaluation) -> None:
        order.append(f"{run_id} {len(result.actions)}")

    with _at(("evaluate.claimed", other, lambda: order.append("next"))):
        evaluate_due(driven.service, follow_up)
    assert order == [f"{bad} 1", "next", f"{other} 0"]


def test_a_slow_run_keeps_no_other_claimed(driven: Driven) -> None:
    (first, _, _), (slow, _, _), (waiting, _, _) = _several(driven, 3)
    claims = claim_due(driven.service.database, 0, "", LEASE_NS, MOST_RUNS)
    results: dict[int, Evaluation] = {}
    batch = RunBatch(driven.service, claims, results.__setitem__)
    seen: list[tuple[int, int]] = []

    def relinquish() -> None:
        thread = threading.Thread(target=batch.renew)
        thread.start()
        thread.join()
        seen.append((driven.run(first).last_step, driven.run(waiting).lease_until_ns))

    with _at(("evaluate.judged", slow, relinquish)):
        batch.evaluate()
    assert seen == [(7, 0)]  # committed; given back
    assert {run_id: result.outcome for run_id, result in results.items()} == {
        first: "committed", slow: "committed",
    }  # fmt: skip
    again = claim_due(driven.service.database, 0, "", LEASE_NS, MOST_RUNS)
    assert [(claim.run_id, claim.unfinished) for claim in again] == [(waiting, 0)]


def test_a_run_that_may_end_the_process_is_last_and_alone_of_its_kind(driven: Driven) -> None:
    runs = [run_id for run_id, _, _ in _several(driven, 4)]
    with driven.service.database.write() as session:
        for run_id in runs[:2]:
            row = session.get_one(RunRow, run_id)
            row.unfinished_claims, row.due_ns = 2, (row.due_ns or 0) - nanoseconds(9.0)
    claims = claim_due(driven.service.database, 0, "", LEASE_NS, MOST_RUNS)
    assert [claim.run_id for claim in claims] == [runs[2], runs[3], runs[0]]
    assert [claim.is_troubled for claim in claims] == [False, False, True]


@pytest.mark.ci
def test_a_locked_row_delays_only_its_own_run(postgres: Postgres, folder_store: Store) -> None:
    with postgres.new_database() as url:
        database = open_database(url)
        upgrade(database)
        driven = Driven(make_service(database, folder_store))
        (locked, _, _), (other, _, _) = _several(driven, 2)
        holder = database.engine.connect()
        committed: list[int] = []

        def lock() -> None:
            holder.execute(select(RunRow.id).where(RunRow.id == locked).with_for_update())

        def unlock() -> None:
            committed.append(driven.run(other).last_step)
            holder.rollback()

        with _at(("evaluate.judged", other, lock), ("evaluate.committed", other, unlock)):
            evaluate_due(driven.service, _nothing)
        holder.close()
        assert committed == [7]
        assert driven.run(locked).last_step == 7
        database.close()


def test_segments_are_fetched_before_their_evaluation(driven: Driven) -> None:
    runs = _several(driven, 2)
    claims = claim_due(driven.service.database, 0, "", LEASE_NS, MOST_RUNS)
    inboxes = open_inboxes(driven.service.database, [claim.run_id for claim in claims])
    ahead = {run_id: ReadAhead(inbox) for run_id, inbox in inboxes.items()}
    fetching.fetch_ahead(driven.service, claims, ahead)
    assert {run_id: list(of_run.objects) for run_id, of_run in ahead.items()} == {
        run_id: [key.path] for run_id, _, key in runs
    }


def test_no_more_bytes_are_fetched_than_a_batch_may_have(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    _several(driven_sqlite, 2)
    monkeypatch.setattr(fetching, "MOST_BYTES", 0)
    claims = claim_due(driven_sqlite.service.database, 0, "", LEASE_NS, MOST_RUNS)
    inboxes = open_inboxes(driven_sqlite.service.database, [claim.run_id for claim in claims])
    ahead = {run_id: ReadAhead(inbox) for run_id, inbox in inboxes.items()}
    fetching.fetch_ahead(driven_sqlite.service, claims, ahead)
    assert not any(of_run.objects for of_run in ahead.values())


def test_a_batch_has_as_many_runs_as_take_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    size = RunBatchSize()
    assert size.runs == MOST_RUNS
    for _ in range(50):
        size.note(2, 2 * BATCH_SECONDS / 4)
    assert size.runs == 4
    for _ in range(50):
        size.note(4, 4 * 30.0)
    assert size.runs == 1
    for _ in range(100):
        size.note(1, 0.001)
    assert size.runs == MOST_RUNS
