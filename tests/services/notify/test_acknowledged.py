"""PagerDuty hears that a person has acknowledged what it was notified of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.services.channels.http_server import HttpServer, http_server
from tests.services.driving import Driven
from tests.services.notify.alerting import with_receiver
from tests.services.recording import Recording, damage_from, healthy
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.db.models import AlertInstanceRow
from watchstep_services.notify.acknowledged import notify_acknowledged
from watchstep_services.notify.flush import flush_due
from watchstep_services.notify.silences import acknowledge

KEY = "e93facc04764012d7bfb002500d5d1a6"


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def acknowledge_alert(driven: Driven, name: str) -> list[int]:
    with driven.service.database.write() as session:
        row = session.execute(select(AlertInstanceRow).filter_by(name=name)).scalar_one()
        acknowledge(session, driven.service.base_url, row, "ann", "")
        return notify_acknowledged(driven.service, session, row)


def rules() -> list[RuleConfig]:
    return [
        RuleConfig.model_validate({"rule": "non_finite_values", "name": name, "severity": severity})
        for name, severity in (("first", "critical"), ("second", "warning"))
    ]


def test_a_group_is_acknowledged_with_its_last_alert(
    driven: Driven, folder_store: Store, server: HttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_RECEIVER_PD", KEY)
    receiver: dict[str, Any] = {
        "kind": "pagerduty", "routing_key": {"env": "WATCHSTEP_RECEIVER_PD"}, "url": server.url,
    }  # fmt: skip
    driven = with_receiver(driven.with_settings(home=tmp_path, allowed_addresses="loopback"), receiver)
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=rules())
    driven.announce(run_id, recording.write(0, 0, 7, damage_from(5)))
    driven.settle(run_id)
    assert acknowledge_alert(driven, "second") == []  # before it was notified
    for action in flush_due(driven.service):
        driven.finish(action)
    assert acknowledge_alert(driven, "second") == []  # the other still fires
    (action,) = acknowledge_alert(driven, "first")
    assert driven.finish(action).state == "done"
    driven.announce(run_id, recording.write(1, 8, 20, healthy))
    driven.settle(run_id)
    for action in flush_due(driven.service):
        driven.finish(action)
    events = [json.loads(body) for body in server.bodies]
    assert [event["event_action"] for event in events] == ["trigger", "acknowledge", "resolve"]
    assert len({event["dedup_key"] for event in events}) == 1
    ids = {event["payload"]["custom_details"]["notification"] for event in events}
    assert len(ids) == 3


def test_other_receivers_are_not_notified_of_acknowledgements(
    driven_sqlite: Driven, folder_store: Store
) -> None:
    driven = with_receiver(driven_sqlite, {"kind": "webhook", "url": "https://hooks.example/a"})
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=rules()[:1])
    driven.announce(run_id, recording.write(0, 0, 7, damage_from(5)))
    driven.settle(run_id)
    flush_due(driven.service)
    assert acknowledge_alert(driven, "first") == []
