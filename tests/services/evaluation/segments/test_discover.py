"""Discovery of segments and ends in the store."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, select

from tests.services.driving import Driven
from tests.services.recording import nan_from
from watchstep.format import documents, layout
from watchstep.format.documents import EndDocument
from watchstep.format.layout import WriterId
from watchstep.store.store import ObjectEntry, Store
from watchstep_services.core.failpoints import listening
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.evaluation.inbox import GapTimeout, ended_ranks, make_plan
from watchstep_services.runs import attempts, discovery
from watchstep_services.runs.discovery import UNLISTED, Listing, discover
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import register
from watchstep_services.scheduler import polling
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.service.context import Service
from watchstep_services.service.listings import ListingTimes
from watchstep_services.stores.confined_folder import ConfinedFolder

WAIT = 60.0


def write_ends(store: Store, attempt: str, ranks: range, reason: str = "") -> None:
    for rank in ranks:
        end = EndDocument(rank, "completed", 5, 1, 0, "w0", reason, {"dropped": 0})
        store.create(layout.end_document(attempt, rank), documents.encode(end))


def ends_of(driven: Driven, attempt: str) -> dict[str, Any]:
    with driven.service.database.read() as session:
        ends: dict[str, Any] = session.execute(select(Attempt.ends).filter_by(attempt=attempt)).scalar_one()
        return ends


@contextmanager
def transactions(driven: Driven) -> Iterator[list[list[str]]]:
    """Statements that write attempts, by the transaction that they are part of."""
    seen: list[list[str]] = [[]]
    engine = driven.service.database.engine

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.startswith("UPDATE attempt"):
            seen[-1].append(statement)

    def committed(_connection: Any) -> None:
        seen.append([])

    event.listen(engine, "before_cursor_execute", note)
    event.listen(engine, "commit", committed)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)
        event.remove(engine, "commit", committed)


def test_the_ends_of_an_attempt_are_written_once(driven: Driven) -> None:
    recording, run_id = driven.begin(world_size=200)
    discover(driven.service, run_id)
    write_ends(recording.store, "a1", range(200))
    with transactions(driven) as seen:
        assert discover(driven.service, run_id).fresh
    assert sum(map(len, seen)) == 1
    assert ends_of(driven, "a1").keys() == {str(rank) for rank in range(200)}
    write_ends(recording.store, "a1", range(200, 201))
    discover(driven.service, run_id)
    assert len(ends_of(driven, "a1")) == 201


def test_the_ends_of_many_attempts_are_written_in_portions(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ROWS_AT_ONCE", 20)
    recording, run_id = driven.begin()
    names = [f"b{number}" for number in range(9)]
    for name in names:
        write_ends(recording.store, name, range(10))
    discover(driven.service, run_id)
    for name in names:
        write_ends(recording.store, name, range(10, 20))
    with transactions(driven) as seen:
        discover(driven.service, run_id)
    assert len([written for written in seen if written]) == 5
    assert {len(ends_of(driven, name)) for name in names} == {20}


def test_a_listing_reads_so_many_ends_and_the_next_reads_on(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ENDS_AT_ONCE", 8)
    recording, run_id = driven.begin(world_size=20)
    write_ends(recording.store, "a1", range(20))
    found = []
    while discover(driven.service, run_id).fresh:
        found.append(len(ends_of(driven, "a1")))
    assert found == [8, 16, 20]


def test_a_listing_adds_some_attempts_and_a_run_has_so_many(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ATTEMPTS_AT_ONCE", 3)
    monkeypatch.setattr(discovery, "MOST_ATTEMPTS", 7)
    run_id = driven.register()
    for number in range(10):
        recording = driven.recording(attempt=f"b{number}")
        recording.begin(started_ns=number)
        write_ends(recording.store, f"b{number}", range(1))

    def names() -> set[str]:
        with driven.service.database.read() as session:
            found = session.execute(select(Attempt).filter_by(run_id=run_id)).scalars()
            return {row.attempt for row in found if row.world_size and row.ends}

    for expected in (3, 6, 7, 7):
        discover(driven.service, run_id)
        assert len(names()) == expected
    left = {f"b{number}" for number in range(10)} - names()
    problems = driven.run(run_id).health["documents"]
    assert {problems[f"attempts/{attempt}.json"] for attempt in left} == {
        f"attempts/{attempt}.json: left out; 7 attempts of a run are supported" for attempt in left
    }
    driven.judge(run_id, driven.recording(attempt=min(left)).write(0, 0, 7, nan_from(4)))
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"


def test_ranks_beyond_those_that_are_followed_are_named_and_not_recorded(driven_sqlite: Driven) -> None:
    recording, run_id = driven_sqlite.begin()
    most = attempts.MOST_RANKS
    write_ends(recording.store, "a1", range(most - 1, most + 1))
    discover(driven_sqlite.service, run_id)
    assert ends_of(driven_sqlite, "a1").keys() == {str(most - 1)}
    assert f"end/a1/{most}.json" in driven_sqlite.run(run_id).health["documents"]


def test_reasons_of_very_many_ends_are_shortened(driven_sqlite: Driven) -> None:
    recording, run_id = driven_sqlite.begin(world_size=100)
    write_ends(recording.store, "a1", range(100), "x" * 5000)
    discover(driven_sqlite.service, run_id)
    assert sorted({len(end["reason"]) for end in ends_of(driven_sqlite, "a1").values()}) == [200, 2000]
    assert sum(len(end["reason"]) == 2000 for end in ends_of(driven_sqlite, "a1").values()) == 64


class Walked(dict[WriterId, int]):
    """A cursor that counts how often all of it is looked through."""

    walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()

    def __iter__(self) -> Iterator[WriterId]:
        self.walks += 1
        return super().__iter__()


def test_ended_ranks_are_found_without_a_look_at_all_writers_for_each() -> None:
    cursor = Walked({WriterId("a1", "node", f"w{rank}"): 1 for rank in range(50)})
    ends = {str(rank): {"writer": f"w{rank}", "segments": 1 + rank % 2, "found_ns": 1} for rank in range(50)}
    assert ended_ranks(cursor, "a1", ends, 0) == frozenset(range(0, 50, 2))
    assert cursor.walks == 1
    plan = make_plan(dict(cursor), [], {"a1": ends}, GapTimeout(0, 10, listed=True))
    assert [gap.writer.writer for gap in plan.waiting] == [f"w{rank}" for rank in range(1, 50, 2)]


def evaluate_during_listing(
    driven: Driven, run_id: int, listed: Callable[[], None], judged: Callable[[], None]
) -> str:
    """Evaluate between the listing of a sweep and what it records, and let that record before the commit.

    Args:
        driven: the service.
        run_id: of the run.
        listed: done once the store is listed.
        judged: done before the sweep records what it saw.

    Returns:
        The evaluation's outcome.
    """
    sweep: list[threading.Thread] = []
    is_listed, may_record = threading.Event(), threading.Event()

    def listen(point: str, _subject: object) -> None:
        if point == "discover.listed" and threading.current_thread() in sweep:
            is_listed.set()
            assert may_record.wait(WAIT)
        if point == "evaluate.judged" and not may_record.is_set():
            judged()
            may_record.set()
            sweep[0].join(WAIT)

    sweep.append(threading.Thread(target=discover, args=(driven.service, run_id)))
    with listening(listen):
        sweep[0].start()
        assert is_listed.wait(WAIT)
        listed()
        outcome = driven.evaluate(run_id).outcome
        may_record.set()
        sweep[0].join(WAIT)
    return outcome


def nothing() -> None:
    """Nothing happens meanwhile."""


@pytest.mark.parametrize("announced", ["before the listing", "after it"])
@pytest.mark.parametrize("lease", ["holds", "is over"])
def test_a_slow_listing_forgets_no_segment_that_is_being_evaluated(
    driven: Driven, announced: str, lease: str
) -> None:
    driven = driven.with_settings(gap_seconds=0.0)  # as if the listing took longer than the gap time
    recording, run_id = driven.begin()
    discover(driven.service, run_id)
    key = recording.key(0, 0, 7)
    if announced == "before the listing":
        driven.announce(run_id, key)

    def write() -> None:
        recording.write(0, 0, 7, nan_from(5))
        if announced == "after it":
            driven.announce(run_id, key)

    def end_lease() -> None:
        driven.change(RunRow, run_id, lease_until_ns=1)

    outcome = evaluate_during_listing(driven, run_id, write, end_lease if lease == "is over" else nothing)
    assert outcome == ("fenced" if (announced, lease) == ("before the listing", "is over") else "committed")
    for _ in range(2):
        driven.discover(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read"}
    assert [finding["step"] for _, _, finding in driven.findings()] == [5, 6, 7]
    assert driven.run(run_id).ticks == 1


@pytest.fixture
def small_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_SEGMENTS_AT_ONCE", 10)
    monkeypatch.setattr(discovery, "MOST_WAITING", 15)
    monkeypatch.setattr(discovery, "_LEAST_SEGMENTS", 2)


@pytest.mark.usefixtures("small_listings")
def test_a_listing_takes_in_some_segments_and_the_next_ones_the_rest(driven: Driven) -> None:
    recording = driven.recording().begin(world_size=2)
    for seq in range(12):
        for worker in range(2):
            recording.write(seq, seq, seq, worker=worker)
    run_id = driven.register()
    assert discover(driven.service, run_id) == Listing(fresh=True, complete=False)
    assert sorted(driven.segments(run_id)) == [(f"w{worker}", seq) for worker in range(2) for seq in range(5)]
    assert driven.run(run_id).health[UNLISTED] == 14
    # Of the room for 15, 10 are taken, and more come in only as those are read.
    discover(driven.service, run_id)
    assert len(driven.segments(run_id)) == 15
    discover(driven.service, run_id)
    assert len(driven.segments(run_id)) == 17
    for _ in range(3):
        driven.settle(run_id)
        listing = discover(driven.service, run_id)
    assert listing == Listing(fresh=False, complete=True)
    assert UNLISTED not in driven.run(run_id).health
    assert set(driven.segments(run_id).values()) == {"read"}
    assert len(driven.segments(run_id)) == 24


@pytest.mark.parametrize("name", ["{:010d}-{}-{}.arrow", "not a segment {}{}{}"])
def test_the_memory_of_a_listing_does_not_grow_with_the_objects(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    driven = driven_sqlite
    recording, run_id = driven.begin()
    discover(driven.service, run_id)
    entries = ConfinedFolder.entries

    def many(store: ConfinedFolder, prefix: str = "") -> Iterator[ObjectEntry]:
        if prefix != layout.SEGMENTS:
            yield from entries(store, prefix)
            return
        for seq in range(20_000):
            yield ObjectEntry(recording.writer().prefix + name.format(seq, seq, seq), 1)

    monkeypatch.setattr(ConfinedFolder, "entries", many)
    monkeypatch.setattr(discovery, "_SEGMENTS_AT_ONCE", 200)
    tracemalloc.start()
    try:
        discover(driven.service, run_id)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000
    health = driven.run(run_id).health
    assert health.get(UNLISTED) == 19_800 or len(health["documents"]) == 20


@pytest.mark.usefixtures("small_listings")
def test_what_a_listing_left_out_is_neither_missing_nor_the_end(driven: Driven) -> None:
    hasty = driven.with_settings(gap_seconds=1e-9)
    recording = driven.recording().begin()
    for seq in range(30):
        recording.write(seq, seq, seq)
    recording.end("completed", 29)
    run_id = hasty.register()
    # A recorder whose service is slow announces its newest segment alone.
    hasty.announce(run_id, recording.key(29, 29, 29))
    unfinished = 0
    while advance_run(hasty.service, run_id) != "completed":
        unfinished += UNLISTED in hasty.run(run_id).health
        assert "missing" not in hasty.segments(run_id).values()
        hasty.evaluate(run_id)
        discover(hasty.service, run_id)
    assert unfinished
    assert set(hasty.segments(run_id).values()) == {"read"}
    assert len(hasty.segments(run_id)) == 30


@pytest.mark.usefixtures("small_listings")
def test_a_sweep_goes_on_while_a_projects_folder_takes_long_to_list(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "_LOCAL_SECONDS", 0.01)
    slow, quick = (
        driven_sqlite.register("slow"),
        register(driven_sqlite.service, "audio", "quick", (), "recorder"),
    )
    more = [driven_sqlite.register(f"more-{number}") for number in range(3)]
    found, answers, listed = discover, threading.Event(), threading.Event()

    def hanging(service: Service, run_id: int) -> Listing:
        if run_id in (slow, *more):
            assert answers.wait(60)
        listing = found(service, run_id)
        if run_id == quick:
            listed.set()
        return listing

    monkeypatch.setattr(polling, "discover", hanging)
    try:
        sweep(driven_sqlite.service)
        assert listed.wait(60)
        assert driven_sqlite.run(more[-1]).listed_ns == 0
    finally:
        answers.set()
        driven_sqlite.service.look_threads.shutdown()


def test_a_long_listing_puts_the_next_one_off() -> None:
    times = ListingTimes(most=2)
    times.put(1, 0.1)
    times.put(2, 3.0)
    assert (times.pause_ns(1), times.pause_ns(2), times.pause_ns(3)) == (0, 60_000_000_000, 0)
    times.put(3, 1e9)
    assert times.pause_ns(3) == 600_000_000_000
    times.put(4, 0.1)
    assert times.pause_ns(2) == 0  # forgotten
