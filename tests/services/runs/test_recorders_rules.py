from __future__ import annotations

from typing import Any

import pytest

from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording
from watchstep.errors import RuleError
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.runs.registration import discover_runs, register

QUERY = "SELECT tensor FROM statistics WHERE nan > 0"


def sql(name: str, **params: Any) -> RuleConfig:
    return RuleConfig(rule="sql", name=name, params={"query": QUERY, **params})


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([sql("slow", seconds=60)], "seconds = 60"),
        ([sql("large", memory_mb=4096)], "memory_mb = 4096"),
        ([sql(f"q{number}") for number in range(4)], "4 SQL rules; a recorder may request 3"),
        (
            [RuleConfig(rule="overfit", name=f"r{n}") for n in range(101)],
            "101 rules; a recorder may request 100",
        ),
    ],
)
def test_a_recorder_may_not_ask_for_what_occupies_the_workers(
    driven_sqlite: Driven, asked: list[RuleConfig], says: str
) -> None:
    with pytest.raises(RuleError, match=says):
        register(driven_sqlite.service, PROJECT, "run-1", tuple(asked), "recorder")
    assert register(driven_sqlite.service, PROJECT, "run-1", tuple(asked), "operator") == 1


def test_a_run_found_with_such_rules_is_judged_without_them(
    driven_sqlite: Driven, folder_store: Store
) -> None:
    Recording(folder_store).begin(rules=[sql("slow", seconds=60).as_data()])
    [run_id] = discover_runs(driven_sqlite.service)
    assert "seconds = 60" in driven_sqlite.run(run_id).health["run_document"]
    driven_sqlite.register()
    assert register(driven_sqlite.service, PROJECT, "run-1", (sql("quick"),), "recorder") == run_id
