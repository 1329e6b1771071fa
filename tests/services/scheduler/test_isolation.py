"""What fails of a sweep with one project, run, group of alerts or list keeps no other from its turn."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError, ProgrammingError

from tests.services.driving import Driven, make_service
from tests.services.notify.test_notifying import rule, told_by
from tests.services.postgres import Postgres
from tests.services.recording import nan_from
from watchstep.errors import StoreError
from watchstep.store.store import Store
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.engine import DatabaseTimeouts, open_database
from watchstep_services.db.models import AlertGroup, Project, RunRow
from watchstep_services.db.schema import upgrade
from watchstep_services.notify import flush as flushing
from watchstep_services.retention import delete_rows
from watchstep_services.runs import discovery as discovering
from watchstep_services.runs.registration import discover_runs
from watchstep_services.scheduler import polling
from watchstep_services.scheduler import sweep as sweeping
from watchstep_services.scheduler.sweep import find_due, sweep
from watchstep_services.service.context import Service


def faults(of: str) -> float:
    return metrics.REGISTRY.get_sample_value("watchstep_sweep_faults_total", {"of": of}) or 0.0


def runs(driven: Driven) -> dict[str, RunRow]:
    with driven.service.database.read() as session:
        return {f"{row.project}/{row.run}": row for row in session.execute(select(RunRow)).scalars()}


def test_a_project_whose_store_does_not_answer_keeps_no_other_from_its_turn(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for project in ("a-bad", "b-good"):
        driven.recording(run="one", project=project).begin()
    of = type(driven.service.stores).of

    def refusing(stores: Any, place: Any) -> Store:
        if place.project == "a-bad":
            raise StoreError("store a-bad: does not answer", "look at it")
        return of(stores, place)

    before = faults("project")
    with monkeypatch.context() as patched:
        patched.setattr(type(driven.service.stores), "of", refusing)
        sweep(driven.service)
        discover_runs(driven.service)
    assert "b-good/one" in runs(driven)
    assert "a-bad/one" not in runs(driven)
    assert faults("project") > before
    assert len([line for line in caplog.messages if "runs of project a-bad cannot be listed" in line]) == 1
    with driven.service.database.write() as session:
        session.get_one(Project, "a-bad").placed.listed_ns = 0
    discover_runs(driven.service)
    assert "a-bad/one" in runs(driven)


def test_the_own_store_that_does_not_answer_keeps_no_project_from_its_turn(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.register("known")
    driven.recording(run="fresh").begin()

    def refusing(_stores: Any, url: str) -> Store:
        raise StoreError(f"store {url}: does not answer", "look at it")

    monkeypatch.setattr(type(driven.service.stores), "open", refusing)
    sweep(driven.service)
    assert "vision/fresh" in runs(driven)


@pytest.mark.parametrize("broken", ["flush_due", "due_actions", "due_backtests"])
def test_a_list_that_cannot_be_read_keeps_no_other_from_being_handed_out(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 7))

    def fails(_service: Service) -> Any:
        raise ProgrammingError("SELECT", {}, Exception("no such column"))

    before = faults("due")
    monkeypatch.setattr(sweeping, broken, fails)
    assert find_due(driven.service).runs == (run_id,)
    assert faults("due") == before + 1


def test_where_the_database_does_not_answer_the_sweep_fails(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: Any) -> Any:
        raise OperationalError("SELECT", {}, Exception("connection refused"))

    monkeypatch.setattr(type(driven_sqlite.service.database), "read", fails)
    with pytest.raises(OperationalError):
        sweep(driven_sqlite.service)


def two_groups(driven: Driven) -> tuple[Driven, list[int | None]]:
    """Two runs that alert, each in a group of its own that is due."""
    driven = told_by(driven, "https://chat.example.com/")
    for name in ("bad", "good"):
        recording = driven.recording(run=name).begin()
        run_id = driven.register(name, rules=[rule()])
        driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    with driven.service.database.read() as session:
        return driven, list(session.execute(select(AlertGroup.run_id).order_by(AlertGroup.id)).scalars())


def told(driven: Driven) -> set[str]:
    names = {run.id: run.run for run in runs(driven).values()}
    return {names[key] for key in names if driven.actions(key, "notify")}


@pytest.mark.parametrize("error", [KeyError("why"), ProgrammingError("SELECT", {}, Exception("NUL"))])
def test_a_group_that_cannot_be_looked_at_keeps_no_other_from_being_told(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    driven, (bad, _) = two_groups(driven)
    look = flushing._members_of

    def looking(session: Any, group: AlertGroup, now: int) -> Any:
        if group.run_id == bad:
            raise error
        return look(session, group, now)

    before = faults("group")
    with monkeypatch.context() as patched:
        patched.setattr(flushing, "_members_of", looking)
        find_due(driven.service)
        find_due(driven.service)
    assert told(driven) == {"good"}
    assert faults("group") == before + 1, "it is put off"
    assert type(error).__name__ in driven.run(bad or 0).health["notifications"]
    with driven.service.database.write() as session:
        session.execute(select(AlertGroup).filter_by(run_id=bad)).scalar_one().due_ns = 0
    find_due(driven.service)
    assert told(driven) == {"bad", "good"}
    assert "notifications" not in driven.run(bad or 0).health


def test_who_hangs_with_a_group_or_a_run_keeps_nobody_from_the_others(
    postgres: Postgres, folder_store: Store
) -> None:
    with postgres.new_database() as url:
        database = open_database(url, DatabaseTimeouts(lock=0.2))
        upgrade(database)
        driven, (bad, _) = two_groups(Driven(make_service(database, folder_store)))
        with database.write() as hanging:
            hanging.execute(select(AlertGroup.id).filter_by(run_id=bad).with_for_update()).one()
            find_due(driven.service)
            assert told(driven) == {"good"}
        find_due(driven.service)
        assert told(driven) == {"bad", "good"}

        driven.change(RunRow, poll_ns=0)
        taken = polling.claim_polls(driven.service)
        with database.write() as hanging:
            hanging.execute(select(RunRow.id).filter_by(id=bad).with_for_update()).one()
            for one in taken:
                polling.poll_run(driven.service, one)
        listed = {run.run: run.listed_ns > 0 for run in runs(driven).values()}
        assert listed == {"bad": False, "good": True}
        database.close()


def test_a_run_that_is_deleted_while_it_is_looked_at_keeps_no_other_from_its_turn(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stays = driven.register("gone"), driven.register("stays")
    discover = discovering.discover

    def deleting(service: Service, run_id: int) -> discovering.Listing:
        if run_id != gone:
            return discover(service, run_id)
        with service.database.write() as session:
            delete_rows(session, run_id)
        raise StoreError("run gone: no such folder", "it was deleted")

    monkeypatch.setattr(polling, "discover", deleting)
    sweep(driven.service)
    assert driven.run(stays).listed_ns


@pytest.mark.ci
def test_a_stores_trouble_is_over_when_it_answers(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    driven.recording().begin()
    run_id = driven.register()

    def refusing(_service: Service, _run_id: int) -> bool:
        raise StoreError("store: does not answer", "look at it")

    with monkeypatch.context() as patched:
        patched.setattr(polling, "discover", refusing)
        sweep(driven.service)
    assert driven.run(run_id).health["store"] == "store: does not answer"
    driven.change(RunRow, run_id, poll_ns=0)
    sweep(driven.service)
    assert "store" not in driven.run(run_id).health
