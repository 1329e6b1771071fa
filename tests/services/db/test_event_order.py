"""Events can be followed by their numbers: nothing comes late, whatever order transactions end in."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import delete, select, update

from tests.services.driving import Driven
from watchstep_services.core.events import make_event
from watchstep_services.db.engine import Database
from watchstep_services.db.models import EventRow, RunRow
from watchstep_services.db.records import add_event
from watchstep_services.runs.registration import register

WAIT = 60.0


def publish(database: Database, run_id: int, project: str = "vision") -> None:
    with database.write() as session:
        add_event(
            session, run_id, make_event("io.watchstep.run.started", "http://s", (project, "r"), 1, {}), 1
        )


def numbers(database: Database) -> list[int]:
    with database.read() as session:
        return list(session.execute(select(EventRow.number).order_by(EventRow.number)).scalars())


def test_a_number_is_never_given_again(driven: Driven) -> None:
    database = driven.service.database
    run_id = driven.register()
    publish(database, run_id)
    publish(database, run_id)
    last = numbers(database)[-1]
    with database.write() as session:
        session.execute(delete(EventRow))
    publish(database, run_id)
    assert numbers(database)[0] > last


def test_who_follows_misses_nothing_of_writers_that_cross(driven: Driven) -> None:
    database = driven.service.database
    runs = [driven.register(f"run-{n}") for n in range(4)]
    writers = [threading.Thread(target=_many, args=(database, run_id)) for run_id in runs]
    seen: list[int] = []

    def follow() -> None:
        last = 0
        while len(seen) < 40:
            with database.read() as session:
                new = session.execute(
                    select(EventRow.number).where(EventRow.number > last).order_by(EventRow.number)
                )
                numbers = list(new.scalars())
            seen.extend(numbers)
            last = max([last, *numbers])

    follower = threading.Thread(target=follow, daemon=True)
    for thread in (follower, *writers):
        thread.start()
    for thread in writers:
        thread.join(WAIT)
    follower.join(WAIT)
    assert seen == numbers(database)
    assert len(seen) == 40


def _many(database: Database, run_id: int) -> None:
    for _ in range(10):
        with database.write() as session:
            event = make_event("io.watchstep.run.started", "http://s", ("vision", "r"), 1, {})
            add_event(session, run_id, event, 1)
            # What a transaction does after it has said what it will publish.
            session.execute(update(RunRow).where(RunRow.id == run_id).values(hints=RunRow.hints + 1))


def test_a_transaction_that_is_open_holds_up_no_other_of_another_project(driven: Driven) -> None:
    database = driven.service.database
    if database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer")
    ours = driven.register()
    theirs = register(driven.service, "language", "r", (), "recorder")
    written, go = threading.Event(), threading.Event()

    def slow() -> None:
        from watchstep_services.db.engine import write_events

        with database.write() as session:
            add_event(
                session, ours, make_event("io.watchstep.run.started", "http://s", ("vision", "r"), 1, {}), 1
            )
            write_events(session)
            written.set()
            assert go.wait(WAIT)

    thread = threading.Thread(target=slow)
    thread.start()
    assert written.wait(WAIT)
    publish(database, theirs, "language")
    assert len(numbers(database)) == 1
    go.set()
    thread.join(WAIT)
    assert len(numbers(database)) == 2
