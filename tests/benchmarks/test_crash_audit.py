"""The crash benchmark sees what a process wrote, so that nothing seen is nothing written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.crash import audit
from tests.services.driving import Driven, make_service
from tests.services.postgres import running_postgres
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig, WebhookAction
from watchstep_services.db.engine import open_database
from watchstep_services.db.schema import upgrade


def test_what_an_evaluation_and_a_dispatch_write_is_seen_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGAPPNAME", "pid-7")
    with running_postgres() as server, server.new_database() as url:
        database = open_database(url)
        upgrade(database)
        audit.install(database.engine)
        nobody = WebhookAction(url="https://receiver.invalid/hook")
        rules = [RuleConfig(rule="non_finite_values", actions=(nobody,))]
        driven = Driven(make_service(database, Store.open(tmp_path / "store", create=True), rules))
        recording = Recording(driven.service.stores.open(driven.service.settings.store)).begin()
        run_id = driven.register()
        key = recording.write(0, 0, 7, nan_from(5))
        driven.announce(run_id, key)
        start = audit.clock(database.engine)

        driven.settle(run_id)
        (action,) = driven.actions(run_id)
        evaluated = Counter(audit.written_by(database.engine, {"pid": 7, "run_id": run_id}, start))
        assert evaluated.keys() >= {
            "UPDATE runs", "INSERT ticks", "UPDATE segments", "INSERT alerts", "INSERT alert_instances",
            "INSERT findings", "INSERT rule_states", "INSERT actions",
            "INSERT events io.watchstep.alert.firing",
        }  # fmt: skip
        assert evaluated["INSERT actions"] == 1

        driven.with_settings(max_tries=1).finish(action.id)
        of_action = audit.written_by(database.engine, {"pid": 7, "action_id": action.id}, start)
        assert {"INSERT actions", "UPDATE actions", "INSERT action_tries"} == set(of_action)
        assert Counter(audit.written_by(database.engine, {"pid": 7, "run_id": run_id}, start)) == evaluated
        assert audit.written_by(database.engine, {"pid": 8, "run_id": run_id}, start) == []
        database.close()
