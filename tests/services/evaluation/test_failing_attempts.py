"""An attempt that cannot be judged, or whose objects cannot be read, keeps no other attempt from its turn."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select, text

from tests.rules.custom.programs import LOUD, python
from tests.services.driving import Driven, make_service
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.errors import StoreError
from watchstep.format import documents, layout
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_rules.custom.sandbox import pool
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Project, RuleStateRow
from watchstep_services.evaluation import evaluate as evaluating
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.registration import register
from watchstep_services.service.judging import judge_all

BAD_STEP = 100
"""Rows from this step on make the first attempt's evaluation fail."""


class JudgingError(Exception):
    """A fault of the service."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Judging raises at any row from the bad step on."""

    def judge(configs: Any, before: Any, arrived: Any, *others: Any) -> Any:
        if len(arrived) and int(arrived.step.max()) >= BAD_STEP:
            raise JudgingError("secret")
        return judge_all(configs, before, arrived, *others)

    monkeypatch.setattr(evaluating, "judge_all", judge)
    return monkeypatch


def evaluate_patiently(driven: Driven, run_id: int, times: int = 6) -> list[Exception]:
    """Evaluate as a worker does that is asked again and again; what was raised."""
    errors: list[Exception] = []
    for _ in range(times):
        try:
            driven.evaluate(run_id)
        except (JudgingError, StoreError) as error:
            errors.append(error)
    return errors


def test_a_later_attempt_is_judged_while_an_earlier_one_fails(
    driven: Driven, folder_store: Store, failing: pytest.MonkeyPatch
) -> None:
    first = Recording(folder_store, attempt="a1").begin()
    second = Recording(folder_store, attempt="a2").begin(started_ns=2)
    run_id = driven.register()
    driven.announce(run_id, first.write(0, BAD_STEP, BAD_STEP + 3))
    driven.announce(run_id, *(second.write(seq, 4 * seq, 4 * seq + 3, nan_from(5)) for seq in range(2)))
    errors = evaluate_patiently(driven, run_id)
    assert errors
    assert driven.alerts(run_id)["non_finite_values"][:2] == ("firing", 5)
    health = driven.run(run_id).health
    assert "JudgingError" in health["failed_attempts"]["a1"]
    assert "secret" not in str(health)
    assert driven.run(run_id).lease_until_ns == 0

    driven.announce(run_id, second.write(2, 8, 11))
    assert driven.evaluate(run_id).outcome == "committed"  # it comes before the attempt that fails

    failing.undo()
    driven.settle(run_id)
    assert set(driven.segments(run_id).values()) == {"read"}
    assert driven.run(run_id).health == {}


def test_a_failing_attempt_is_tried_again_after_a_pause_and_others_at_once(
    driven: Driven, folder_store: Store, failing: pytest.MonkeyPatch
) -> None:
    del failing
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, BAD_STEP, BAD_STEP + 3))

    def due_in_seconds() -> float:
        with driven.service.database.read() as session:
            now = read_clock(session)
        due = driven.run(run_id).due_ns
        assert due is not None
        return (due - now) / 1e9

    with pytest.raises(JudgingError):
        driven.evaluate(run_id)
    assert due_in_seconds() <= 0
    with pytest.raises(JudgingError):
        driven.evaluate(run_id)
    assert due_in_seconds() > 1


@pytest.mark.parametrize("attempt", ["a1", "a2"])
def test_a_segment_that_the_store_cannot_give_holds_up_its_writer_alone(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch, attempt: str
) -> None:
    first = Recording(folder_store, attempt="a1").begin(world_size=2)
    other = Recording(folder_store, attempt=attempt).begin(world_size=2)
    run_id = driven.register()
    bad = first.write(0, 0, 3)
    refuse(monkeypatch, driven, bad)
    driven.announce(run_id, bad)
    driven.announce(run_id, first.write(1, 4, 7), other.write(0, 0, 7, nan_from(5), worker=1))
    evaluate_patiently(driven, run_id)
    assert driven.segments(run_id) == {("w0", 0): "announced", ("w0", 1): "announced", ("w1", 0): "read"}
    assert driven.alerts(run_id)["non_finite_values"][:2] == ("firing", 5)
    health = driven.run(run_id).health
    assert "refused" in str(health)
    assert driven.run(run_id).due_ns is not None

    monkeypatch.undo()
    driven.settle(run_id)
    assert set(driven.segments(run_id).values()) == {"read"}
    assert driven.run(run_id).health == {}


def refuse(monkeypatch: pytest.MonkeyPatch, driven: Driven, bad: SegmentKey) -> None:
    """Have the run's store refuse to give one object."""
    kind = type(driven.service.stores.of_run(place_of(driven), "run-1"))
    get = kind.get

    def refused(store: Any, key: str, *, limit: int | None = None) -> bytes:
        if key == bad.path:
            raise StoreError(f"object {key}: refused", "allow it")
        return bytes(get(store, key, limit=limit))

    monkeypatch.setattr(kind, "get", refused)


def place_of(driven: Driven) -> Any:
    """Where the project of the runs is."""
    with driven.service.database.read() as session:
        return session.get_one(Project, PROJECT).place


def test_a_commit_that_fails_lets_the_run_go(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 3))
    with driven.service.database.write() as session:
        session.execute(text("ALTER TABLE ticks RENAME TO gone"))
    with pytest.raises(Exception, match="ticks"):
        driven.evaluate(run_id)
    assert driven.run(run_id).lease_until_ns == 0
    with driven.service.database.write() as session:
        session.execute(text("ALTER TABLE gone RENAME TO ticks"))
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read"}


def test_a_document_that_is_too_large_is_damaged_and_holds_up_nothing(
    driven: Driven, folder_store: Store
) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    large = b" " * (documents.MAX_BYTES + 1)
    for key in (layout.attempt_document("a2"), layout.end_document("a1", 0)):
        recording.store.put(key, large)
    recording.write(0, 0, 3, nan_from(2))
    discover(driven.service, run_id)
    driven.settle(run_id)
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"
    assert set(driven.run(run_id).health["documents"]) == {
        layout.attempt_document("a2"), layout.end_document("a1", 0)
    }  # fmt: skip


def test_a_rule_that_ends_its_process_is_tried_for_another_project_at_once(
    sqlite: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_now", lambda: 1000.0)
    source = LOUD.replace("        together =", "        os._exit(7)\n        together =", 1)
    driven = Driven(make_service(sqlite, folder_store, (python(source, "Loud"),)))
    for project in ("first", "second"):
        segment = Recording(folder_store, project=project).begin().write(0, 0, 9)
        run_id = register(driven.service, project, "run-1", (), "recorder")
        driven.announce(run_id, segment)
        driven.evaluate(run_id)
    with sqlite.read() as session:
        memories: list[Any] = list(
            session.execute(select(RuleStateRow.state).order_by(RuleStateRow.config_id)).scalars()
        )
    assert len(memories) == 2
    for memory in memories:
        assert "its process ended with 7" in memory
        assert "started again in" not in memory
