"""A claim and an inbox have the same content on both databases, which read them by different statements."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.store.store import Store
from watchstep_services.db.models import Attempt, Project, RunRow, Segment
from watchstep_services.evaluation.inbox import FAILED_ATTEMPTS, open_inbox
from watchstep_services.runs.claim import Claim, claim, claim_longest_due
from watchstep_services.runs.discovery import key_of
from watchstep_services.tenancy import find_project, move_project

LEASE_NS = 10**12


@pytest.fixture
def run_id(driven: Driven, folder_store: Store) -> int:
    """A run with two attempts, one segment that was read in each, and segments that were not."""
    run_id = driven.register()
    recordings = [Recording(folder_store, attempt=attempt).begin() for attempt in ("a1", "a2")]
    for recording in recordings:
        driven.announce(run_id, recording.write(0, 0, 3, nan_from(2)))
        driven.settle(run_id)
    for recording in recordings:
        driven.announce(run_id, recording.write(1, 4, 7), recording.write(2, 8, 11))
    return run_id


@pytest.mark.parametrize(("way", "moves_runs"), [("by_id", False), ("by_id", True), ("longest_due", False)])
def test_a_claim_has_the_run_and_the_location_of_its_registration(
    driven: Driven, run_id: int, way: str, moves_runs: bool
) -> None:
    database = driven.service.database
    with database.write() as session:
        project = find_project(session, PROJECT)
        move_project(session, project, project.placed.store, "team/vision", moves_runs=moves_runs)
    before = driven.run(run_id)
    claimed = (
        claim(database, run_id, LEASE_NS)
        if way == "by_id"
        else claim_longest_due(database, run_id, "w1", LEASE_NS)
    )
    assert claimed is not None
    with database.read() as session:
        place = session.get_one(RunRow, run_id).place
        assert session.get_one(Project, PROJECT).place.prefix == "team/vision"
    assert place.prefix == ("team/vision" if moves_runs else "")
    assert claimed == Claim(
        run_id, PROJECT, before.run, place, before.epoch + 1, before.cursor, before.journal, before.ticks,
        claimed.now_ns, before.hints, before.state, before.state_attempt, before.attempt,
    )  # fmt: skip
    assert claim(database, run_id, LEASE_NS) is None


def test_an_inbox_has_unread_segments_and_attempts(driven: Driven, run_id: int) -> None:
    database = driven.service.database
    inbox = open_inbox(database, run_id)
    with database.read() as session:
        waiting = session.execute(select(Segment).filter_by(run_id=run_id, state="announced")).scalars().all()
        attempts = session.execute(select(Attempt).filter_by(run_id=run_id)).scalars().all()
    assert len(waiting) == 4
    found = {(entry.row_id, entry.key, entry.found_ns, entry.traceparent) for entry in inbox.entries}
    assert found == {(row.id, key_of(row), row.found_ns, row.traceparent) for row in waiting}
    assert {name: columns(row) for name, row in inbox.attempts.items()} == {
        row.attempt: columns(row) for row in attempts
    }
    assert not inbox.calm, "an alert fires"
    assert inbox.failing == frozenset()


def test_an_inbox_of_an_empty_run_is_calm_until_an_evaluation_fails(driven: Driven) -> None:
    run_id = driven.register()
    inbox = open_inbox(driven.service.database, run_id)
    assert (inbox.entries, inbox.attempts, inbox.calm, inbox.failing) == ([], {}, True, frozenset())
    with driven.service.database.write() as session:
        session.get_one(RunRow, run_id).health = {FAILED_ATTEMPTS: {"a1": "the store refused"}}
    inbox = open_inbox(driven.service.database, run_id)
    assert (inbox.calm, inbox.failing) == (False, frozenset({"a1"}))


def columns(row: Attempt) -> dict[str, Any]:
    return {column.key: getattr(row, column.key) for column in Attempt.__table__.columns}
