"""Runs that are found on the store: one that cannot be used keeps no other from being seen and judged."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule_files import rule_file
from watchstep_services.db.models import RuleConfigRow, RunRow
from watchstep_services.runs import registration
from watchstep_services.runs.registration import discover_runs
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.service.context import Service

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


def _found(driven: Driven) -> dict[str, RunRow]:
    """Runs by name, after one more sweep; a sweep that takes long leaves some for the next."""
    sweep(driven.service)
    with driven.service.database.read() as session:
        return {run.run: run for run in session.execute(select(RunRow)).scalars()}


@pytest.mark.parametrize("rule", BAD)
def test_a_run_with_rules_that_cannot_be_used_keeps_no_other_from_its_turn(
    driven: Driven, folder_store: Store, rule: dict[str, Any]
) -> None:
    Recording(folder_store, run="bad").begin(rules=[rule])
    Recording(folder_store, run="good").begin().write_all([3, 7], nan_from(5))
    eventually(lambda: {"bad", "good"} <= set(_found(driven)))
    runs = _found(driven)
    driven.settle(runs["good"].id)
    assert "rules" in runs["bad"].health["run_document"]
    assert driven.alerts(runs["good"].id)["non_finite_values"][:2] == ("firing", 5)


def test_a_run_that_cannot_be_read_keeps_no_other_from_its_turn(
    driven: Driven, folder_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    document = Path(folder_store.location) / PROJECT / "closed" / "run.json"
    document.parent.mkdir(parents=True)
    document.symlink_to(document)
    Recording(folder_store, run="open").begin()
    with caplog.at_level(logging.WARNING):
        sweep(driven.service)
        sweep(driven.service)
    assert driven.run(1).run == "open"
    assert len([record for record in caplog.records if "cannot be registered" in record.message]) == 1
    document.unlink()
    Recording(folder_store, run="closed").begin()
    sweep(driven.service)
    assert driven.run(2).run == "closed"


def test_checks_of_sql_rules_keep_no_other_run_from_its_turn(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    query: dict[str, object] = {"rule": "sql", "params": {"query": "SELECT tensor FROM statistics"}}
    for number in range(3):
        Recording(folder_store, project="a-slow", run=f"run-{number}").begin(rules=[query])
    Recording(folder_store, project="a-slow", run="without").begin()
    Recording(folder_store, run="good").begin()
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
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        Recording(folder_store, run=f"run-{number}").begin()
    monkeypatch.setattr(registration, "SLICE_SECONDS", 0.0)
    found = [discover_runs(driven.service) for _ in range(4)]
    assert [len(runs) for runs in found] == [1, 1, 1, 0]
