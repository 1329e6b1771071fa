"""The sweep: discovery of runs, and stores that hang."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from tests.sdk.store.faulty_s3 import FaultyS3
from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.recording import PROJECT, Recording, nan_from
from tests.services.scheduler.test_polling import set_run
from watchstep.errors import StoreError
from watchstep.store import cloud
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule_files import rule_file
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.models import RuleConfigRow, RunRow
from watchstep_services.runs import registration
from watchstep_services.runs.registration import discover_runs, register
from watchstep_services.scheduler.polling import poll_due_runs
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.service.context import Service
from watchstep_services.stores.bulkhead import Bulkhead
from watchstep_services.stores.confined_folder import ConfinedFolder
from watchstep_services.tenancy import create_project, register_store

BAD: list[dict[str, Any]] = [
    {"rule": "non_finite_values", "tensors": {"include": "a{99999999999}"}},
    {"rule": "non_finite_values", "tensors": {"include": "(" * 5000 + ")" * 5000}},
    {"rule": "non_finite_values", "name": "a\0b"},
    {"rule": "non_finite_values", "labels": {"team": "a\0b"}},
    {"rule": "non_finite_values", "message": "a\0b"},
    {"rule": "non_finite_values\0"},
    {"rule": "non_finite_values", "tensors": {"collection": "a\0b"}},
    {"rule": "non_finite_values", "for": {"steps": 10**20}},
    {"rule": "non_finite_values", "params": {"max_elements": 10**20}},
    {"rule": "sql", "params": {"query": "select tensor, '\0' from statistics"}},
    {"rule": "sql", "params": {"query": "select tensor, '\ud800' from statistics"}},
]
BUCKET = StoreRegistration("s3://bucket/runs")
OTHER = StoreRegistration("s3://other/runs")


def _found(driven: Driven) -> dict[str, RunRow]:
    """Runs by name, after one more sweep; a sweep that takes long leaves some for the next."""
    sweep(driven.service)
    with driven.service.database.read() as session:
        return {run.run: run for run in session.execute(select(RunRow)).scalars()}


@pytest.mark.parametrize("rule", BAD)
def test_a_run_with_rules_that_cannot_be_used_keeps_no_other_from_its_turn(
    driven: Driven, rule: dict[str, Any]
) -> None:
    driven.recording(run="bad").begin(rules=[rule])
    driven.recording(run="good").begin().write_all([3, 7], nan_from(5))
    eventually(lambda: {"bad", "good"} <= set(_found(driven)))
    runs = _found(driven)
    driven.discover(runs["good"].id)
    assert "rules" in runs["bad"].health["run_document"]
    assert driven.alerts(runs["good"].id)["non_finite_values"][:2] == ("firing", 5)


def test_a_run_that_cannot_be_read_keeps_no_other_from_its_turn(
    driven: Driven, folder_store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ConfinedFolder.get

    def get(store: ConfinedFolder, key: str, *, limit: int | None = None) -> bytes:
        if key == f"{PROJECT}/closed/run.json":
            raise StoreError("access denied", "check the folder's owner and mode")
        return read(store, key, limit=limit)

    for run in ("closed", "open"):
        Recording(folder_store, run=run).begin()
    monkeypatch.setattr(ConfinedFolder, "get", get)
    with caplog.at_level(logging.WARNING):
        sweep(driven.service)
        sweep(driven.service)
    assert driven.run(1).run == "open"
    assert len([record for record in caplog.records if "cannot be registered" in record.message]) == 1
    monkeypatch.undo()
    sweep(driven.service)
    assert driven.run(2).run == "closed"


def test_checks_of_sql_rules_keep_no_other_run_from_its_turn(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    query: dict[str, object] = {"rule": "sql", "params": {"query": "SELECT tensor FROM statistics"}}
    for number in range(3):
        driven_sqlite.recording(project="a-slow", run=f"run-{number}").begin(rules=[query])
    driven_sqlite.recording(project="a-slow", run="without").begin()
    driven_sqlite.recording(run="good").begin()
    release, check = threading.Event(), rule_file.check

    def checking(data: Any, source: str) -> tuple[RuleConfig, ...]:
        if data["rules"]:
            release.wait(60)
        return check(data, source)

    monkeypatch.setattr(rule_file, "check", checking)
    service = driven_sqlite.with_settings(store_wait_seconds=0.01).service
    for _ in range(2):
        sweep(service)
        assert not release.is_set()
        assert set(rules_of_runs(service)) == {"vision/good", "a-slow/without"}
    release.set()
    service.intake.submit("a-slow", lambda: None).result(60)  # it comes after what waits
    rules = rules_of_runs(service)
    assert all("sql" in rules[f"a-slow/run-{number}"] for number in range(3))


def rules_of_runs(service: Service) -> dict[str, set[str]]:
    """Rules of each run."""
    with service.database.read() as session:
        rows = session.execute(
            select(RunRow.project, RunRow.run, RuleConfigRow.rule).outerjoin(
                RuleConfigRow, RuleConfigRow.run_id == RunRow.id
            )
        ).all()
    found: dict[str, set[str]] = {}
    for project, run, rule in rows:
        found.setdefault(f"{project}/{run}", set()).add(rule)
    return found


def test_a_listing_takes_in_new_runs_for_a_limited_time(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        driven.recording(run=f"run-{number}").begin()
    monkeypatch.setattr(registration, "SLICE_SECONDS", 0.0)
    found = [discover_runs(driven.service) for _ in range(4)]
    assert [len(runs) for runs in found] == [1, 1, 1, 0]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A client's own timeouts are so long here that a sweep which waited for it would not come back."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(cloud, "_REQUEST_TIMEOUT", timedelta(seconds=600))
    with FaultyS3().serving() as server:
        server.fault = "stall"
        yield server


def refuse(hanging: FaultyS3) -> None:
    """From now on the server answers, and refuses everything."""
    hanging.fault = "denied"
    hanging.released.set()


def with_hanging_project(driven: Driven, server: FaultyS3) -> tuple[Driven, int]:
    """A service of which one project lies on that server, with a run."""
    quick = driven.with_settings(store_wait_seconds=0.1)
    with quick.service.database.write() as session:
        store = register_store(
            session,
            "hung",
            StoreRegistration("s3://bucket/runs", region="us-east-1", endpoint=server.endpoint),
        )
        create_project(session, "a-hung", store)
    return quick, register(quick.service, "a-hung", "run-1", (), "recorder")


def faults() -> float:
    return metrics.REGISTRY.get_sample_value("watchstep_sweep_faults_total", {"of": "store"}) or 0.0


def test_looks_at_other_projects_runs_do_not_wait_for_it(driven: Driven, hanging: FaultyS3) -> None:
    quick, hung = with_hanging_project(driven, hanging)
    good = quick.register()
    before = faults()
    poll_due_runs(quick.service, 1e9)
    assert hanging.met.wait(60)
    assert quick.run(good).listed_ns
    assert not quick.run(hung).listed_ns
    assert faults() == before + 1
    for run_id in (hung, good):
        set_run(quick, run_id, poll_ns=0, listed_ns=0)
    poll_due_runs(quick.service, 1e9)
    assert quick.run(good).listed_ns
    assert faults() == before + 1, "it is told once, and not waited for again"
    refuse(hanging)
    quick.service.bulkhead.close()
    assert "store" in quick.run(hung).health, "the look went on, and told its end"


def test_a_sweep_finds_and_hands_out_what_others_need(
    driven_sqlite: Driven, hanging: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    quick, hung = with_hanging_project(driven_sqlite, hanging)
    good = quick.register()
    set_run(quick, good, due_ns=1)
    assert sweep(quick.service).runs == (good,)
    assert quick.run(good).listed_ns
    assert hanging.met.wait(60)
    assert "other stores are used meanwhile" in caplog.text
    refuse(hanging)
    quick.service.bulkhead.close()
    set_run(quick, hung, poll_ns=0)
    poll_due_runs(quick.with_settings(store_wait_seconds=60.0).service, 1e9)
    quick.service.bulkhead.close()
    assert "store" in quick.run(hung).health


def test_work_is_awaited_and_its_errors_are_raised_where_it_was_asked_for() -> None:
    bulkhead = Bulkhead()

    def fails() -> None:
        raise StoreError("bucket: refused", "look at it")

    assert bulkhead.call(BUCKET, lambda: 7, 60, None) == 7
    with pytest.raises(StoreError):
        bulkhead.call(BUCKET, fails, 60, None)
    assert bulkhead.call(BUCKET, lambda: 8, 60, None) == 8


def test_a_store_is_asked_one_thing_at_a_time_and_waited_for_again_once_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bulkhead, release = Bulkhead(), threading.Event()

    def hangs() -> str:
        release.wait(120)
        raise StoreError("bucket: gone", "look at it")

    assert bulkhead.call(BUCKET, hangs, 0.05, "later") == "later"
    assert bulkhead.call(BUCKET, lambda: "asked", 60, "busy") == "busy"
    assert bulkhead.call(OTHER, lambda: "other", 60, "busy") == "other"
    release.set()
    bulkhead.close()
    assert "failed after its caller had left" in caplog.text
    done = threading.Event()
    bulkhead.call(BUCKET, done.set, 60, None)  # nobody need wait for this one, and it is quick
    bulkhead.close()
    assert done.is_set()
    assert bulkhead.call(BUCKET, lambda: "again", 60, "busy") == "again"


def test_urgent_work_waits_for_no_other_and_is_not_begun_where_much_of_it_hangs() -> None:
    bulkhead, release = Bulkhead(), threading.Event()
    assert bulkhead.call(BUCKET, lambda: release.wait(120), 0.05, "later") == "later"
    assert bulkhead.call_urgent(BUCKET, lambda: 7, 60) == 7
    for _ in range(8):
        with pytest.raises(StoreError, match="no answer for"):
            bulkhead.call_urgent(BUCKET, lambda: release.wait(120), 0.01)
    with pytest.raises(StoreError, match="not answered for a while"):
        bulkhead.call_urgent(BUCKET, lambda: 7, 60)
    assert bulkhead.call_urgent(OTHER, lambda: 7, 60) == 7
    release.set()
    bulkhead.close()
    assert bulkhead.call_urgent(BUCKET, lambda: 7, 60) == 7


def test_a_folder_is_asked_at_once() -> None:
    asked_in = Bulkhead().call(StoreRegistration("/tmp/runs"), threading.current_thread, 0.0, None)
    assert asked_in is threading.current_thread()
    assert Bulkhead().call_urgent(StoreRegistration("/tmp/runs"), threading.current_thread, 0.0) is asked_in
