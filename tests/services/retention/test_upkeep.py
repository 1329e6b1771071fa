"""Retention: policies, and what the upkeep deletes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select, update

from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.notify.test_notifying import rule, told_by
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep import open_run
from watchstep.errors import StoreError
from watchstep.format import documents, journal
from watchstep.format.documents import AttemptDocument
from watchstep.reading.compaction import compact
from watchstep.reading.run_documents import read_journal
from watchstep.store.store import Store
from watchstep_services import retention as upkeeping
from watchstep_services.db.models import (
    ActionRow,
    AlertGroup,
    Base,
    EventRow,
    Project,
    ProjectStore,
    RetentionPolicy,
    RunRow,
    TickRow,
    Upkeep,
    WatermarkRow,
)
from watchstep_services.db.records import add_action
from watchstep_services.evaluation.journal import unwritten, write_journal
from watchstep_services.retention import (
    IDLE_NS,
    RetentionTimes,
    UpkeepProgress,
    UpkeepThreads,
    delete_rows,
    next_step,
    purge_groups,
    upkeep,
)
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import discover_runs
from watchstep_services.scheduler import work
from watchstep_services.scheduler.sweep import find_due
from watchstep_services.service.context import Service
from watchstep_services.stores.confined_folder import ConfinedFolder

spans = st.none() | st.integers(0, 1000)
policies = st.builds(RetentionTimes, st.none() | st.integers(1, 1000), spans, spans, spans)
_MARKS = {
    "summarize": "summarized_ns",
    "compact": "compacted_ns",
    "delete_originals": "originals_gone_ns",
    "delete_tensors": "tensors_gone_ns",
}


def lived(policy: RetentionTimes, kept: UpkeepProgress) -> list[tuple[str, int]]:
    """Each step when it is due, until nothing is."""
    done: list[tuple[str, int]] = []
    while (due := next_step(policy, kept)) is not None:
        done.append(due)
        if due[0] == "delete_run":
            return done
        kept = replace(kept, **{_MARKS[due[0]]: due[1]})  # type: ignore[arg-type]
    return done


@given(policies, st.integers(0, 1000))
def test_each_step_is_done_once_in_order_of_time(policy: RetentionTimes, ended: int) -> None:
    done = lived(policy, UpkeepProgress(ended))
    names = [name for name, _ in done]
    assert len(names) == len(set(names))
    assert [at for _, at in done] == sorted(at for _, at in done)
    steps = dict(done)
    if policy.runs is not None:
        assert done[-1] == ("delete_run", ended + policy.runs)
    else:
        assert steps.get("delete_tensors") == (None if policy.tensors is None else ended + policy.tensors)
        assert ("compact" in steps) == (policy.compact_after is not None)
        assert ("delete_originals" in steps) == (
            policy.compact_after is not None and policy.originals is not None
        )


@given(policies, st.integers(0, 1000), st.booleans())
def test_a_run_that_is_held_loses_nothing(policy: RetentionTimes, ended: int, deleting: bool) -> None:
    names = {name for name, _ in lived(policy, UpkeepProgress(ended, on_hold=True, deleting=deleting))}
    assert names <= {"summarize", "compact", "delete_originals"}


@given(policies, st.integers(0, 1000))
def test_a_deletion_that_began_is_ended(policy: RetentionTimes, ended: int) -> None:
    assert next_step(policy, UpkeepProgress(ended, deleting=True)) == ("delete_run", ended)


def policy(driven: Driven, **seconds: int) -> None:
    with driven.service.database.write() as session:
        session.add(RetentionPolicy(project=PROJECT, changed_by="admin", changed_ns=1, **seconds))


def ended(driven: Driven, store: Store, run: str = "run-1") -> tuple[int, Recording]:
    """A run with an alert, its stop and full tensors, which has ended."""
    recording = Recording(store, run).begin()
    run_id = driven.register(run)
    driven.announce(run_id, recording.write(0, 0, 9), recording.write(1, 10, 19, nan_from(15)))
    recording.store.put("tensors/a1/0/00000015-train.safetensors", b"full tensors")
    recording.store.put("bundles/a1/0/15-gate.safetensors", b"a batch")
    recording.end("completed", 19)
    discover(driven.service, run_id)
    work.evaluate_longest_due(driven.service, run_id)
    driven.settle(run_id)
    for action in driven.actions(run_id):
        driven.finish(action.id)
    assert advance_run(driven.service, run_id) in {"completed", "stopped"}
    return run_id, recording


def rows(driven: Driven) -> dict[str, int]:
    with driven.service.database.read() as session:
        counts = {
            table.name: session.execute(select(func.count()).select_from(table)).scalar_one()
            for table in Base.metadata.sorted_tables
        }
    return {name: count for name, count in counts.items() if count}


def _upkeep_of(run_id: int, **more: Any) -> Upkeep:
    return Upkeep(
        run_id=run_id, ended_ns=0, next_ns=0, lease_until_ns=0, claims=0, tries=0, problem="", **more
    )


def begins_anew(store: Store) -> Recording:
    """A second attempt, which nobody has announced."""
    again = Recording(store, attempt="a2")
    again.store.put("attempts/a2.json", documents.encode(AttemptDocument("a2", 2, 1, "raise")))
    return again


def kept(driven: Driven, run_id: int) -> Upkeep:
    return driven.get(Upkeep, run_id)


def test_a_run_is_compacted_and_reads_the_same(driven: Driven, folder_store: Store) -> None:
    run_id, recording = ended(driven, folder_store)
    policy(driven, compact_after_s=0, originals_s=0)
    before = open_run(recording.store.location).tensor("loss").statistics()
    assert upkeep(driven.with_settings(compact_after_seconds=0.0).service) == 1
    with driven.service.database.write() as session:
        session.get_one(RetentionPolicy, PROJECT).compact_after_s = None
        session.get_one(Upkeep, run_id).next_ns = 0
    soon = driven.with_settings(compact_after_seconds=1e-9)
    assert upkeep(soon.service) == 2
    assert not list(recording.store.entries("stats/"))
    after = open_run(recording.store.location).tensor("loss").statistics()
    assert after.to_pylist() == before.to_pylist()
    done = kept(driven, run_id)
    assert done.compacted_ns is not None
    assert done.originals_gone_ns is not None
    assert upkeep(soon.service) == 0


@pytest.mark.ci
def test_by_default_nothing_is_deleted(driven_sqlite: Driven, folder_store: Store) -> None:
    _, recording = ended(driven_sqlite, folder_store)
    before = {entry.key for entry in recording.store.entries()}
    assert upkeep(driven_sqlite.with_settings(compact_after_seconds=1e-9).service) == 2
    assert {entry.key for entry in recording.store.entries()} >= before


@pytest.mark.ci
def test_full_tensors_go_and_the_rest_stays(driven_sqlite: Driven, folder_store: Store) -> None:
    run_id, recording = ended(driven_sqlite, folder_store)
    policy(driven_sqlite, keep_tensors_s=0)
    assert upkeep(driven_sqlite.service) == 2
    assert not list(recording.store.entries("tensors/"))
    assert not list(recording.store.entries("bundles/"))
    assert list(recording.store.entries("stats/"))
    assert kept(driven_sqlite, run_id).tensors_gone_ns is not None


def test_a_run_goes_whole_and_is_not_found_again(driven: Driven, folder_store: Store) -> None:
    other = Recording(folder_store, "other").begin()
    driven.register("other")
    before = rows(driven)
    policy(driven, keep_runs_s=0)
    ended(driven, folder_store)
    assert rows(driven) != before
    assert upkeep(driven.service) == 1
    left = rows(driven)
    del left["retention_policies"]
    assert left.pop("stop_audit") > 0  # who allowed the stop is known for longer than the run
    assert left == before
    assert discover_runs(driven.service) == []
    assert not list(folder_store.entries(f"{PROJECT}/run-1/"))
    assert not Path(folder_store.location, PROJECT, "run-1").exists()
    assert list(other.store.entries())
    Recording(folder_store).begin()  # another run of that name
    assert len(discover_runs(driven.service)) == 1


@pytest.mark.ci
def test_what_a_held_run_has_stays(driven_sqlite: Driven, folder_store: Store) -> None:
    run_id, recording = ended(driven_sqlite, folder_store)
    policy(driven_sqlite, keep_runs_s=0, keep_tensors_s=0)
    with driven_sqlite.service.database.write() as session:
        session.add(_upkeep_of(run_id, on_hold=True, hold_by="operator", hold_reason="paper"))
    assert upkeep(driven_sqlite.service) == 1
    assert list(recording.store.entries("tensors/"))
    driven_sqlite.change(Upkeep, run_id, on_hold=False, next_ns=0)
    upkeep(driven_sqlite.service)
    assert not list(recording.store.entries())


@pytest.mark.ci
def test_a_deletion_that_the_store_refused_is_ended_later(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, recording = ended(driven, folder_store)
    policy(driven, keep_runs_s=0)
    delete, calls = ConfinedFolder.delete, 0

    def refuse_the_third(store: ConfinedFolder, key: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise StoreError(f"{key}: refused", "try again")
        delete(store, key)

    monkeypatch.setattr(ConfinedFolder, "delete", refuse_the_third)
    assert upkeep(driven.service) == 1
    row = kept(driven, run_id)
    assert (row.tries, row.deleting) == (1, True)
    assert row.problem.endswith("refused")
    assert recording.store.get("run.json")  # still a run
    with driven.service.database.write() as session:
        session.get_one(Upkeep, run_id).next_ns = 0
        session.get_one(RetentionPolicy, PROJECT).keep_runs_s = None  # changed meanwhile
    assert upkeep(driven.service) == 1
    assert not list(recording.store.entries())
    with driven.service.database.read() as session:
        assert session.get(RunRow, run_id) is None
        assert session.execute(select(EventRow)).first() is None
        assert session.execute(select(Project)).first() is not None


def test_a_run_that_begins_anew_is_not_deleted(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, recording = ended(driven, folder_store)
    with driven.service.database.write() as session:
        session.add(_upkeep_of(run_id, deleting=True))
        session.get_one(RunRow, run_id).state = "running"
    assert upkeep(driven.service) == 0
    assert not kept(driven, run_id).deleting
    with driven.service.database.write() as session:
        session.get_one(RunRow, run_id).state = "lost"
        row = session.get_one(Upkeep, run_id)
        row.deleting, row.next_ns = True, 0
        row.ended_ns = session.get_one(RunRow, run_id).ended_ns or 0
    place = upkeeping._store

    def running_again(service: Service, claim: upkeeping.UpkeepClaim) -> Store:
        with service.database.write() as session:
            session.get_one(RunRow, run_id).state = "running"
        return place(service, claim)

    monkeypatch.setattr(upkeeping, "_store", running_again)  # after it was claimed
    assert upkeep(driven.service) == 1
    assert recording.store.get("run.json")
    assert (kept(driven, run_id).deleting, kept(driven, run_id).lease_until_ns) == (False, 0)


def test_a_run_is_not_deleted_before_its_stop_has_ended(driven: Driven, folder_store: Store) -> None:
    run_id, recording = ended(driven, folder_store)
    policy(driven, keep_runs_s=0)
    with driven.service.database.write() as session:
        stop = session.execute(select(ActionRow).filter_by(run_id=run_id, kind="stop")).scalar_one()
        stop.state = "pending"
    assert upkeep(driven.service) == 0
    assert recording.store.get("run.json")


def test_an_attempt_that_comes_after_the_end_has_all_done_anew(driven: Driven, folder_store: Store) -> None:
    soon = driven.with_settings(compact_after_seconds=1e-9, originals_seconds=1e6)
    run_id, _ = ended(driven, folder_store)
    assert upkeep(soon.service) == 2
    with driven.service.database.write() as session:
        run = session.get_one(RunRow, run_id)
        run.state, run.ended_ns = "running", None
        session.get_one(Upkeep, run_id).next_ns = 0
    assert upkeep(soon.service) == 0
    with driven.service.database.write() as session:
        run = session.get_one(RunRow, run_id)
        run.state, run.ended_ns = "completed", 12345
    assert upkeep(soon.service) == 2


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_compaction_waits_for_what_is_not_judged(
    driven_sqlite: Driven, folder_store: Store, *, is_announced: bool
) -> None:
    soon = driven_sqlite.with_settings(compact_after_seconds=1e-9)
    run_id, recording = ended(driven_sqlite, folder_store)
    key = recording.write(2, 20, 29)
    if is_announced:
        driven_sqlite.announce(run_id, key)
    assert upkeep(soon.service) == 1
    assert "wait to be evaluated" in kept(driven_sqlite, run_id).problem


def numbers(driven: Driven, table: type[TickRow | WatermarkRow], run_id: int) -> list[int]:
    return driven.all(select(table.tick).filter_by(run_id=run_id).order_by(table.tick))


class KilledError(BaseException):
    """The process is gone."""


def test_upkeep_that_ends_its_process_is_put_off(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _ = ended(driven_sqlite, folder_store)
    policy(driven_sqlite, compact_after_s=0, originals_s=0)
    soon = driven_sqlite.with_settings(compact_after_seconds=1e-9)

    def killed(*_args: object, **_options: object) -> None:
        raise KilledError

    driven_sqlite.change(RetentionPolicy, PROJECT, compact_after_s=None)
    with monkeypatch.context() as patch:
        patch.setattr(upkeeping, "compact", killed)
        with pytest.raises(KilledError):
            upkeep(soon.service)
    # its lease is over
    driven_sqlite.change(Upkeep, run_id, lease_until_ns=1)
    assert upkeep(soon.service) == 0
    left = kept(driven_sqlite, run_id)
    assert left.tries == 1
    assert "killed or crashed" in left.problem
    driven_sqlite.change(Upkeep, run_id, next_ns=0)
    assert upkeep(soon.service) == 2
    assert kept(driven_sqlite, run_id).problem == ""


def test_ticks_and_seals_go_when_the_journal_has_them(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_EVALUATIONS", 4)
    recording, run_id = driven.begin()
    for seq in range(10):
        driven.judge(run_id, recording.write(seq, seq, seq))
    (due,) = unwritten(driven.service)
    assert write_journal(driven.service, due) == 3
    ticks, seals = numbers(driven, TickRow, run_id), numbers(driven, WatermarkRow, run_id)
    last = driven.run(run_id).ticks - 1
    assert ticks == [last], "the next part begins where it ended"
    assert len(seals) <= 2
    driven.judge(run_id, recording.write(10, 10, 10, nan_from(10)))
    assert write_journal(driven.service, due) == 1
    parts = list(read_journal(recording.store, "a1"))
    assert [evaluation.tick for evaluation in parts] == list(range(last + 2))
    assert [evaluation.watermark for evaluation in parts] == sorted(
        evaluation.watermark for evaluation in parts
    )
    assert [len(evaluation.segments) for evaluation in parts] == [1] * (last + 2)


def told_of(driven: Driven, run: str) -> int:
    """A run that alerts into the group that all runs share; how many messages that has made in all."""
    recording = driven.recording(run).begin()
    run_id = driven.register(run, rules=[rule()])
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    find_due(driven.service)
    return driven.one(select(func.count()).select_from(ActionRow).filter_by(kind="notify"))


def test_a_group_over_runs_goes_when_it_is_empty_and_one_that_comes_back_tells(driven: Driven) -> None:
    driven = told_by(driven, "https://chat.example.com/", group_by=["severity"], group_interval=60)
    assert told_of(driven, "first") == 1
    group = driven.one(select(AlertGroup))
    assert (group.run_id, group.generation) == (None, 1)
    purge_groups(driven.service)
    with driven.service.database.write() as session:
        delete_rows(session, 1)
        # The message that was sent stays: another run's alert stood beside, say.
        session.execute(update(AlertGroup).values(due_ns=None, open=False))
        assert session.execute(select(AlertGroup.id)).scalar_one() == group.id, "it is not empty for long"
        session.execute(update(AlertGroup).values(notified_ns=AlertGroup.notified_ns - 2 * IDLE_NS))
    kept_key = f"notify:{group.id}:1"
    stays = driven.register("stays")
    with driven.service.database.write() as session:
        add_action(session, stays, "notify", kept_key, {"event_id": "e", "at_ns": 1, "payload": {}})
    purge_groups(driven.service)
    assert told_of(driven, "second") == 2
    again = driven.one(select(AlertGroup))
    assert again.id > group.id


def test_a_run_number_never_comes_twice(driven: Driven) -> None:
    first = driven.register("first")
    with driven.service.database.write() as session:
        delete_rows(session, first)
    assert driven.register("second") > first


def test_a_run_that_begins_anew_unannounced_is_judged_and_not_deleted(
    driven: Driven, folder_store: Store
) -> None:
    run_id, _ = ended(driven, folder_store)
    policy(driven, keep_runs_s=0, keep_tensors_s=0)
    again = begins_anew(folder_store)
    again.write(0, 0, 9, nan_from(5))
    upkeep(driven.service)
    assert "since it ended" in kept(driven, run_id).problem
    driven.settle(run_id)
    driven.change(Upkeep, run_id, next_ns=0)
    upkeep(driven.service)
    assert driven.run(run_id).state == "running"
    assert list(again.store.entries("stats/"))
    assert list(again.store.entries("tensors/"))


def test_a_run_whose_attempt_has_only_begun_is_not_deleted(
    driven_sqlite: Driven, folder_store: Store
) -> None:
    run_id, _ = ended(driven_sqlite, folder_store)
    policy(driven_sqlite, keep_runs_s=0)
    again = begins_anew(folder_store)
    upkeep(driven_sqlite.service)
    driven_sqlite.change(Upkeep, run_id, next_ns=0)
    upkeep(driven_sqlite.service)
    assert list(again.store.entries("attempts/"))


def test_a_segment_that_comes_while_originals_are_deleted_stays_and_is_judged(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, recording = ended(driven_sqlite, folder_store)
    policy(driven_sqlite, originals_s=0)

    def meanwhile(*arguments: Any, **named: Any) -> Any:
        if "delete_after" in named:
            begins_anew(folder_store).write(0, 0, 9, nan_from(5))
        return compact(*arguments, **named)

    monkeypatch.setattr(upkeeping, "compact", meanwhile)
    upkeep(driven_sqlite.with_settings(compact_after_seconds=1e-9).service)
    assert {entry.key.split("/")[1] for entry in recording.store.entries("stats/")} == {"a2"}
    driven_sqlite.discover(run_id)
    assert {attempt for _, attempt, _ in driven_sqlite.findings()} == {"a1", "a2"}


def move(driven: Driven, run_id: int, project: str) -> None:
    """Give a run to another project, which lies at the same place."""
    with driven.service.database.write() as session:
        store = session.get_one(Project, PROJECT).placed.store_id
        placed = ProjectStore(project=project, store_id=store)
        session.add(Project(name=project, placed=placed))
        session.flush()
        row = session.get_one(RunRow, run_id)
        row.project, row.project_store_id = project, placed.id


@pytest.mark.ci
def test_a_step_that_hangs_holds_up_its_own_project_alone(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, hangs, done = threading.Event(), threading.Event(), []
    for run in ("run-1", "run-2"):
        ended(driven, folder_store, run)
    other, _ = ended(driven, folder_store, "run-3")
    move(driven, other, "other")

    def compact(store: Store) -> None:
        if PROJECT in store.location:
            begun.set()
            assert hangs.wait(60)
        done.append(store.location.rpartition("/")[2])

    def is_done() -> bool:
        threads.start()  # each thread does one step and ends
        return begun.is_set() and done == ["run-3"]

    monkeypatch.setattr(upkeeping, "compact", compact)
    threads = UpkeepThreads(driven.with_settings(compact_after_seconds=1e-9).service, 1)
    try:
        eventually(is_done)
    finally:
        hangs.set()
        threads.close()
    threads.start()
    assert done == ["run-3", "run-1"]
