from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.services.driving import Driven, make_service
from tests.services.recording import Recording
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Attempt, RuleStateRow, RunRow, TickRow
from watchstep_services.runs import claim as claiming
from watchstep_services.runs.discovery import discover
from watchstep_services.scheduler.sweep import find_due

SECOND = 1_000_000_000
STALLED = RuleConfig(rule="stalled_training", params={"threshold": 60.0})


@pytest.fixture
def watch(database: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A service whose ticks are the test's."""
    driven = Driven(
        make_service(database, folder_store, (STALLED,), allowed_lateness_seconds=1e9, silent_seconds=1e9)
    )
    watch = Watch(driven)
    with database.read() as session:
        watch.start_ns = read_clock(session)
    monkeypatch.setattr(claiming, "clock_of", lambda _row: watch.now_ns)
    return watch


class Watch:
    """Evaluates at seconds since the start."""

    def __init__(self, driven: Driven) -> None:
        self.driven = driven
        self.start_ns = 0
        self.now_ns = 0

    def at(self, second: float, run_id: int) -> str:
        """One evaluation at that tick; its outcome."""
        self.now_ns = self.start_ns + round(second * SECOND)
        return self.driven.evaluate(run_id).outcome

    def until(self, second: float, run_id: int) -> list[int]:
        """Evaluate whenever the run is due; at which seconds that was."""
        seen: list[int] = []
        while True:
            due = self.driven.run(run_id).due_ns
            if due is None or due > self.start_ns + second * SECOND:
                return seen
            seen.append(round((due - self.start_ns) / SECOND))
            self.at((due - self.start_ns) / SECOND, run_id)

    def ticks(self, run_id: int) -> list[tuple[int, bool]]:
        """(second, ended) of each tick."""
        with self.driven.service.database.read() as session:
            rows = session.execute(select(TickRow).filter_by(run_id=run_id).order_by(TickRow.tick)).scalars()
            return [(round((row.at_ns - self.start_ns) / SECOND), row.ended) for row in rows]

    def phase(self, run_id: int) -> str:
        """Of the alert."""
        alert = self.driven.alerts(run_id).get(STALLED.name)
        return alert[0] if alert else ""


def fresh(recording: Recording, watch: Watch, seq: int, first: int, last: int) -> None:
    """A segment whose rows were taken just now."""
    recording.write(seq, first, last, taken_ns=watch.start_ns)


def begun(watch: Watch, folder_store: Store, **documents: Any) -> tuple[Recording, int]:
    """A run that has written three steps, judged at second 0."""
    recording = Recording(folder_store).begin(**documents)
    fresh(recording, watch, 0, 0, 2)
    run_id = watch.driven.register()
    discover(watch.driven.service, run_id)
    assert watch.at(0, run_id) == "committed"
    return recording, run_id


@pytest.mark.ci
def test_a_silent_run_is_woken_and_its_alert_fires_once(watch: Watch, folder_store: Store) -> None:
    _, run_id = begun(watch, folder_store)
    assert watch.until(55, run_id) == [10, 20, 30, 40, 50]
    assert watch.phase(run_id) == ""
    assert watch.until(95, run_id) == [60, 70, 80, 90]
    assert watch.driven.event_types(run_id).count("alert.firing") == 1
    (alert,) = watch.driven.alerts(run_id).values()
    finding = alert[2]
    assert finding is not None
    assert (alert[0], finding["step"], finding["value"], finding["tensor"]) == ("firing", 2, 60.0, "")
    assert [second for second, _ in watch.ticks(run_id)] == [0, *range(10, 100, 10)]
    assert watch.until(1e6, run_id)[-1] == 240
    assert watch.driven.run(run_id).due_ns is None


def test_rows_end_the_silence(watch: Watch, folder_store: Store) -> None:
    recording, run_id = begun(watch, folder_store)
    watch.until(65, run_id)
    assert watch.phase(run_id) == "firing"
    fresh(recording, watch, 1, 3, 4)
    discover(watch.driven.service, run_id)
    watch.at(70, run_id)
    assert watch.phase(run_id) == "resolved"


def test_an_announcement_that_was_lost_is_no_silence(watch: Watch, folder_store: Store) -> None:
    recording, run_id = begun(watch, folder_store)
    watch.until(55, run_id)
    fresh(recording, watch, 1, 3, 4)
    assert watch.until(60, run_id)[0] == 60
    assert watch.phase(run_id) == ""
    assert watch.driven.run(run_id).last_step == 4


def ended(session: Any, run_id: int) -> None:
    said = {"0": {**DOCUMENT, "segments": 1}}
    session.execute(update(Attempt).where(Attempt.run_id == run_id).values(ends=said))


def newer(session: Any, run_id: int) -> None:
    session.execute(update(RunRow).where(RunRow.id == run_id).values(attempt="a2"))


def stopped(session: Any, run_id: int) -> None:
    session.execute(update(RunRow).where(RunRow.id == run_id).values(state="stopped"))


DOCUMENT = {"state": "completed", "last_step": 2, "writer": "w0", "reason": "", "ended_ns": 1, "found_ns": 1}


@pytest.mark.ci
@pytest.mark.parametrize("over", [ended, newer, stopped])
def test_an_attempt_that_is_over_is_never_silent(
    watch: Watch, folder_store: Store, over: Callable[[Any, int], None]
) -> None:
    _, run_id = begun(watch, folder_store)
    watch.until(55, run_id)
    with watch.driven.service.database.write() as session:
        over(session, run_id)
    assert watch.until(1e6, run_id) == [60]
    assert watch.phase(run_id) == ""
    assert len(watch.ticks(run_id)) == 6


def test_a_seal_after_the_end_judges_no_silence(watch: Watch, folder_store: Store) -> None:
    recording = Recording(folder_store).begin(world_size=2)
    recording.write(0, 0, 5, taken_ns=watch.start_ns)
    recording.write(0, 0, 2, worker=1, taken_ns=watch.start_ns)
    run_id = watch.driven.register()
    discover(watch.driven.service, run_id)
    watch.at(0, run_id)
    watch.until(55, run_id)
    recording.end(worker=0)
    recording.end(worker=1)
    discover(watch.driven.service, run_id)
    assert watch.at(100, run_id) == "committed"
    assert watch.driven.watermarks(run_id) == [(2, "passed"), (5, "passed")]
    assert watch.ticks(run_id)[-1] == (100, True)
    assert watch.phase(run_id) == ""


def test_an_attempt_that_wrote_nothing_is_silent_unless_its_run_is_lost(
    watch: Watch, folder_store: Store
) -> None:
    Recording(folder_store).begin()
    run_id = watch.driven.register()
    discover(watch.driven.service, run_id)
    assert watch.at(0, run_id) == "committed"
    watch.until(55, run_id)
    watch.driven.change(RunRow, state="lost")
    assert watch.until(1e6, run_id) == [60]
    watch.driven.change(RunRow, state="created", due_ns=watch.now_ns)
    watch.until(130, run_id)
    assert watch.phase(run_id) == "firing"


def test_a_run_without_such_a_rule_sleeps(database: Database, folder_store: Store) -> None:
    driven = Driven(make_service(database, folder_store))
    recording = Recording(folder_store).begin()
    recording.write(0, 0, 2)
    run_id = driven.register()
    driven.discover(run_id)
    assert driven.run(run_id).due_ns is None
    assert find_due(driven.service).runs == ()


def test_two_that_wake_the_same_run_judge_it_once(watch: Watch, folder_store: Store) -> None:
    _, run_id = begun(watch, folder_store)
    watch.until(55, run_id)
    assert watch.at(60, run_id) == "committed"
    assert watch.at(60, run_id) == "idle"
    assert watch.driven.restarted().evaluate(run_id).outcome == "idle"
    assert watch.driven.one(select(RuleStateRow.findings)) == 1
