"""Events of rules that cannot be evaluated, or have nothing to judge."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

from tests.services.driving import Driven, make_service
from tests.services.recording import Recording
from watchstep.store.store import Store
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RuleConfigRow
from watchstep_services.runs import rule_health
from watchstep_services.runs.lifecycle import advance_run

MINE = RuleConfig.model_validate(
    {"rule": "non_finite_values", "name": "mine", "tensors": {"include": "nothing"}}
)


def told(driven: Driven, run_id: int) -> list[tuple[str, str]]:
    """(kind, rule config) of each event about a rule, in order."""
    return [
        (event["type"].removeprefix("io.watchstep.rule."), event["data"]["name"])
        for event in driven.events(run_id)
        if event["type"].startswith("io.watchstep.rule.")
    ]


def test_an_error_is_told_once_and_that_it_is_over(sqlite: Database, folder_store: Store) -> None:
    mine = RuleConfig(rule="non_finite_values", name="mine")
    driven = Driven(make_service(sqlite, folder_store, [mine]))
    recording = Recording(folder_store).begin()
    run_id = driven.register()

    def judged_with(data: dict[str, Any], seq: int) -> None:
        with sqlite.write() as session:
            session.execute(update(RuleConfigRow).values(data=data))
        driven.announce(run_id, recording.write(seq, 10 * seq, 10 * seq + 9))
        driven.restarted().settle(run_id)  # another version is another process

    judged_with(mine.as_data(), 0)
    for seq in (1, 2):
        judged_with({"rule": "of_another_version"}, seq)
    for seq in (3, 4):
        judged_with(mine.as_data(), seq)
    assert told(driven, run_id) == [("error", "mine"), ("ok", "mine")]
    (error,) = [event for event in driven.events(run_id) if event["type"] == "io.watchstep.rule.error"]
    assert "of_another_version" in error["data"]["problem"]


def test_no_data_is_told_of_chosen_rules_after_many_steps_once_a_run(
    sqlite: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_health, "NO_DATA_STEPS", 15)
    driven = Driven(make_service(sqlite, folder_store, [*DEFAULT_RULES, MINE]))
    run_id = driven.register()
    for attempt in ("a1", "a2"):
        recording = Recording(folder_store, attempt=attempt).begin()
        for seq in (0, 1, 2):
            driven.announce(run_id, recording.write(seq, 10 * seq, 10 * seq + 9))
            driven.settle(run_id)
            assert told(driven, run_id) == ([("no_data", "mine")] if seq or attempt == "a2" else [])


def test_no_data_is_told_at_the_end_of_a_short_run(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, [*DEFAULT_RULES, MINE]))
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 9))
    driven.settle(run_id)
    assert told(driven, run_id) == []
    recording.end("completed", 9)
    from watchstep_services.runs.discovery import discover

    discover(driven.service, run_id)
    driven.settle(run_id)
    for _ in range(2):
        assert advance_run(driven.service, run_id) == "completed"
    assert told(driven, run_id) == [("no_data", "mine")]
