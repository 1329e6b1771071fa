"""Runs with very many end documents: what a listing of them costs is bounded, and holds no transaction for long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, select

from tests.services.driving import Driven
from tests.services.recording import Recording
from watchstep.format import documents, layout
from watchstep.format.documents import EndDocument
from watchstep.format.layout import WriterId
from watchstep.store.store import Store
from watchstep_services.db.models import Attempt
from watchstep_services.evaluation.inbox import GapTimeout, ended_ranks, make_plan
from watchstep_services.runs import attempts, discovery


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


def test_the_ends_of_an_attempt_are_written_once(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin(world_size=200)
    run_id = driven.register()
    discovery.discover(driven.service, run_id)
    write_ends(recording.store, "a1", range(200))
    with transactions(driven) as seen:
        assert discovery.discover(driven.service, run_id).fresh
    assert sum(map(len, seen)) == 1
    assert ends_of(driven, "a1").keys() == {str(rank) for rank in range(200)}
    write_ends(recording.store, "a1", range(200, 201))
    discovery.discover(driven.service, run_id)
    assert len(ends_of(driven, "a1")) == 201


def test_the_ends_of_many_attempts_are_written_in_portions(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ROWS_AT_ONCE", 20)
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    names = [f"b{number}" for number in range(9)]
    for name in names:
        write_ends(recording.store, name, range(10))
    discovery.discover(driven.service, run_id)
    for name in names:
        write_ends(recording.store, name, range(10, 20))
    with transactions(driven) as seen:
        discovery.discover(driven.service, run_id)
    assert len([written for written in seen if written]) == 5
    assert {len(ends_of(driven, name)) for name in names} == {20}


def test_a_listing_reads_so_many_ends_and_the_next_reads_on(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_ENDS_AT_ONCE", 8)
    recording = Recording(folder_store).begin(world_size=20)
    run_id = driven.register()
    write_ends(recording.store, "a1", range(20))
    found = []
    while discovery.discover(driven.service, run_id).fresh:
        found.append(len(ends_of(driven, "a1")))
    assert found == [8, 16, 20]


def test_ranks_beyond_those_that_are_followed_are_named_and_not_recorded(
    driven: Driven, folder_store: Store
) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    most = attempts.MOST_RANKS
    write_ends(recording.store, "a1", range(most - 1, most + 1))
    discovery.discover(driven.service, run_id)
    assert ends_of(driven, "a1").keys() == {str(most - 1)}
    assert f"end/a1/{most}.json" in driven.run(run_id).health["documents"]


def test_reasons_of_very_many_ends_are_shortened(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin(world_size=100)
    run_id = driven.register()
    write_ends(recording.store, "a1", range(100), "x" * 5000)
    discovery.discover(driven.service, run_id)
    assert sorted({len(end["reason"]) for end in ends_of(driven, "a1").values()}) == [200, 2000]
    assert sum(len(end["reason"]) == 2000 for end in ends_of(driven, "a1").values()) == 64


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
