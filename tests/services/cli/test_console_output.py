from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import update

from tests.services.channels.http_server import http_server, status
from tests.services.driving import Driven, make_service
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.cli.serve import ConsoleOutput
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ActionRow, RuleConfigRow
from watchstep_services.dispatch.dispatch import dispatch


def faulty_values(step: int, name: str) -> float:
    if name == "loss" and 41 <= step <= 44:
        return math.nan
    return 1e6 if 42 <= step <= 47 and name.startswith("second") else 1.0


def test_each_event_is_printed_once(sqlite: Database, folder_store: Store) -> None:
    rules = [
        {
            "rule": "non_finite_values",
            "inhibits": ["exploding_gradient"],
            "message": "bad\n{tensor}",
            "dry_run": False,
        },
        {"rule": "exploding_gradient", "actions": ["stop"]},
    ]
    driven = Driven(make_service(sqlite, folder_store, [RuleConfig.model_validate(rule) for rule in rules]))
    recording, run_id = driven.begin()
    output = ConsoleOutput(sqlite)
    assert output.new_lines() == []
    driven.judge(run_id, recording.write(0, 0, 43, faulty_values))
    lines = output.new_lines()
    assert lines[0] == "watchstep: vision/run-1: non_finite_values (warning) firing: bad from step 41"
    assert lines[1] == "  message bad\nloss"  # made printable where it is shown
    assert lines[-1] == (
        "watchstep: vision/run-1: exploding_gradient (warning) firing: bad from step 42; inhibited by non_finite_values"
    )
    assert output.new_lines() == []
    driven.judge(run_id, recording.write(1, 44, 60, faulty_values))
    heads = [line for line in output.new_lines() if line.startswith("watchstep")]
    assert "watchstep: vision/run-1: non_finite_values (warning) resolved at step 45" in heads
    firing = next(line for line in heads if "exploding_gradient (warning) firing: bad from step " in line)
    bad_from = int(firing.rpartition(" ")[2])
    assert bad_from <= 44  # the alert fires at step 45, after findings at three steps
    reason = f"stop requested: rule exploding_gradient: bad from step {bad_from}: norm of"
    assert any(reason in line for line in heads)
    assert ConsoleOutput(sqlite).new_lines() == []


def test_a_failed_rule_is_reported_and_its_recovery(sqlite: Database, folder_store: Store) -> None:
    mine = RuleConfig(rule="overfit", name="mine")
    driven = Driven(make_service(sqlite, folder_store, [mine, RuleConfig(rule="non_finite_values")]))
    recording, run_id = driven.begin()
    output = ConsoleOutput(sqlite)

    def lines_with(data: dict[str, Any], seq: int) -> list[str]:
        with sqlite.write() as session:
            session.execute(update(RuleConfigRow).filter_by(name="mine").values(data=data))
        driven.announce(run_id, recording.write(seq, 10 * seq, 10 * seq + 9))
        driven.restarted().settle(run_id)  # another version is another process
        return output.new_lines()

    assert lines_with(mine.as_data(), 0) == []
    (line,) = lines_with({"rule": "of_another_version"}, 1)
    assert line.startswith("watchstep: vision/run-1: rule mine cannot be evaluated: ")
    assert "of_another_version" in line
    assert lines_with({"rule": "of_another_version"}, 2) == []
    assert ConsoleOutput(sqlite).new_lines() == [line]
    assert lines_with(mine.as_data(), 3) == ["watchstep: vision/run-1: rule mine is evaluated again"]
    assert lines_with(mine.as_data(), 4) == []


@pytest.mark.ci
def test_a_failing_webhook_is_reported_after_three_tries_and_when_given_up(
    sqlite: Database, folder_store: Store
) -> None:
    with http_server() as receiver:
        receiver.answers = [status(500)] * 3 + [status(404)]
        rule = {"rule": "non_finite_values", "actions": [{"webhook": f"{receiver.url}/secret"}]}
        driven = Driven(make_service(sqlite, folder_store, [RuleConfig.model_validate(rule)]))
        _, run_id = driven.record(faulty_values, last=43)
        output = ConsoleOutput(sqlite)
        (action,) = driven.actions(run_id)
        said = []
        for _ in range(4):
            with sqlite.write() as session:
                session.get_one(ActionRow, action.id).next_ns = 0
            dispatch(driven.service, action.id)
            said.append(output.new_lines())
    head = "watchstep: vision/run-1: webhook to 127.0.0.1 failed, "
    assert said == [
        [],
        [],
        [f"{head}3 tries, it is tried again: answered 500"],
        [f"{head}4 tries, given up: answered 404; the receiver refused the event, so it is not sent again"],
    ]
