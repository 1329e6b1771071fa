"""An alert whose cause another rank shows later: told rightly where it is known in time, and corrected where it is not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from tests.services.channels.http_server import HttpServer
from tests.services.driving import Driven, make_service
from tests.services.recording import Recording
from watchstep.format.layout import SegmentKey
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import coalesce
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.cli.serve import ConsoleOutput
from watchstep_services.db.engine import Database
from watchstep_services.db.models import AlertInstanceRow, AlertRow
from watchstep_services.notify.flush import flush_due

RULE = RuleConfig.model_validate(
    {
        "rule": "non_finite_values",
        "severity": "critical",
        "actions": ["stop", {"webhook": "https://chat.example.com/hook"}],
    }
)


def reduced(step: int, name: str) -> float:
    """What a rank records whose own data were fine: the gradients that all ranks share are NaN."""
    return math.nan if step >= 5 and name != "loss" else 1.0


def culprit(step: int, name: str) -> float:
    """What the rank records whose loss was NaN."""
    return math.nan if step >= 5 else 1.0


@pytest.fixture
def driven(sqlite: Database, folder_store: Store, receiver: HttpServer) -> Driven:
    asked = {
        "receivers": [{"name": "ops", "kind": "webhook", "url": receiver.url}],
        "route": {"receiver": "ops", "group_wait": 0, "group_interval": 0, "repeat_interval": 3600},
    }
    service = make_service(sqlite, folder_store, [RULE])
    return Driven(replace(service, receiver_file=ReceiverFile.model_validate(asked)))


def begin(driven: Driven) -> tuple[Recording, int]:
    return driven.recording().begin(world_size=2), driven.register()


def one_after_the_other(driven: Driven) -> tuple[Recording, int]:
    """Each rank is judged before the next one's rows come."""
    recording, run_id = begin(driven)
    for worker, value in enumerate((reduced, culprit)):
        driven.judge(run_id, recording.write(0, 0, 7, value, worker))
    return recording, run_id


def alerts_events(driven: Driven, run_id: int) -> list[dict[str, Any]]:
    return [event for event in driven.events(run_id) if event["type"].startswith("io.watchstep.alert.")]


def standing(driven: Driven) -> AlertInstanceRow:
    return driven.one(select(AlertInstanceRow))


def about(data: dict[str, Any]) -> tuple[int, int, str]:
    return data["finding"]["step"], data["finding"]["worker"], data["finding"]["tensor"]


LOSS_OF_RANK_1 = (5, 1, "loss")


@pytest.mark.parametrize("first", [0, 1])
def test_what_comes_in_one_evaluation_is_one_event_that_names_the_cause(driven: Driven, first: int) -> None:
    recording, run_id = begin(driven)
    keys: dict[int, SegmentKey] = {
        worker: recording.write(0, 0, 7, value, worker) for worker, value in enumerate((reduced, culprit))
    }
    driven.announce(run_id, keys[first])
    driven.judge(run_id, keys[1 - first])
    (event,) = alerts_events(driven, run_id)
    assert (event["type"], about(event["data"])) == ("io.watchstep.alert.firing", LOSS_OF_RANK_1)
    assert (event["data"]["step"], event["data"]["explanation"]["where"]) == (
        5,
        "loss: a loss; worker 1, mode train",
    )
    (stop,) = driven.actions(run_id, "stop")
    assert "elements of loss" in stop.payload["reason"]
    assert about({"finding": driven.alerts(run_id)["non_finite_values"][2]}) == LOSS_OF_RANK_1


def test_what_comes_later_corrects_it_and_pages_and_stops_nobody_again(
    driven: Driven, sqlite: Database
) -> None:
    recording, run_id = begin(driven)
    teller = ConsoleOutput(sqlite)
    driven.judge(run_id, recording.write(0, 0, 7, reduced))
    assert len(flush_due(driven.service)) == 1
    before = driven.one(select(AlertRow))
    teller.new_lines()
    actions = [action.id for action in driven.actions(run_id)]
    assert len(actions) == 3  # a stop, a webhook, a notification
    driven.judge(run_id, recording.write(0, 0, 7, culprit, 1))

    firing, revised = alerts_events(driven, run_id)
    assert firing["type"] == "io.watchstep.alert.firing"
    assert about(firing["data"]) == (5, 0, "second.weight:gradient")
    assert (revised["type"], about(revised["data"])) == ("io.watchstep.alert.revised", LOSS_OF_RANK_1)
    data = revised["data"]
    assert (data["phase"], data["step"], data["episode"], data["silenced_by"]) == ("firing", 5, 1, None)
    assert set(firing["data"]) == set(data)
    assert data["evidence"]

    row = driven.one(select(AlertRow))
    assert (row.phase, row.since_step, row.fired_ns) == (before.phase, before.since_step, before.fired_ns)
    assert row.finding == data["finding"]
    assert row.details is not None
    assert row.details == {name: data[name] for name in row.details}
    held = standing(driven)
    assert (held.episode, held.step, held.fired_ns) == (1, 5, before.fired_ns)
    assert (held.finding, held.message, held.explanation) == (
        data["finding"],
        data["message"],
        data["explanation"],
    )

    assert flush_due(driven.service) == []
    assert [action.id for action in driven.actions(run_id)] == actions
    (stop,) = driven.actions(run_id, "stop")
    assert "gradient" in stop.payload["reason"]  # what was known when it was asked for
    lines = teller.new_lines()
    assert lines[0] == (
        "watchstep: vision/run-1: non_finite_values (critical) firing: bad from step 5; later rows show a likelier cause"
    )
    assert lines[2] == "  where   loss: a loss; worker 1, mode train"


def test_a_notification_that_was_not_sent_yet_names_the_cause(driven: Driven, receiver: HttpServer) -> None:
    one_after_the_other(driven)
    (action,) = flush_due(driven.service)
    assert driven.finish(action).state == "done"
    (notified,) = receiver.events
    assert "elements of loss" in str(notified["data"]["alerts"][0])


def test_a_dry_run_is_revised_as_a_record(sqlite: Database, folder_store: Store) -> None:
    dry = RULE.model_copy(update={"dry_run": True})
    driven = Driven(make_service(sqlite, folder_store, [dry]))
    _, run_id = one_after_the_other(driven)
    assert driven.event_types(run_id)[1:] == ["alert.firing", "stop.would_have", "alert.revised"]
    assert driven.actions(run_id) == []


@pytest.mark.ci
def test_a_backtest_names_what_was_named_in_the_end(driven: Driven) -> None:
    recording, _ = one_after_the_other(driven)
    (attempt,) = backtest_run(open_run(recording.store), [RULE]).attempts
    (fired,) = attempt.outcomes[0].fired
    assert fired.finding is not None
    assert coalesce(attempt.outcomes[0].transitions) == [fired]
    assert fired.finding.model_dump(mode="json") == standing(driven).finding
