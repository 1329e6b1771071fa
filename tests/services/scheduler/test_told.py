"""From the bad step to those who are told, and that it is over: the whole service, with real servers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.services.channels.http_server import HttpServer, http_server, status
from tests.services.channels.smtp_server import SmtpServer, smtp_server
from tests.services.recording import Recording
from watchstep.store.store import Store
from watchstep_services.channels.webhook import new_secret
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

WAIT = 60.0


@pytest.fixture
def web() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture
def mail() -> Iterator[SmtpServer]:
    with smtp_server() as running:
        yield running


def nan_for_a_while(step: int, tensor: str) -> float:
    return math.nan if tensor == "loss" and 5 <= step <= 9 else 1.0


def test_mail_and_webhook_tell_that_it_fires_and_that_it_is_over(
    web: HttpServer, mail: SmtpServer, folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_RECEIVER_SECRET", new_secret())
    receivers: dict[str, Any] = {
        "receivers": [
            {"name": "hook", "kind": "webhook", "url": web.url, "secret": {"env": "WATCHSTEP_RECEIVER_SECRET"}},
            {
                "name": "mail", "kind": "email", "host": "127.0.0.1", "port": mail.port, "security": "none",
                "sender": "watch@ml.example", "to": ["a@ml.example"],
            },
        ],
        "route": {"receiver": "hook", "group_wait": 0, "group_interval": 0.1},
    }  # fmt: skip
    # The tree tells the webhook; the rule itself names whom else to tell.
    rules = {
        "rules": [
            {
                "rule": "non_finite_values",
                "name": "no-nans",
                "dry_run": False,
                "actions": [{"notify": "mail"}],
            }
        ]
    }
    (tmp_path / "receivers.yaml").write_text(yaml.safe_dump(receivers), encoding="utf-8")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    web.answers = [status(503), status(429, retry_after="0")]  # what fails is sent again
    mail.to_messages = ["451 later"]
    settings = load_settings(
        home=tmp_path / "home",
        store=str(tmp_path / "store"),
        rules_file=tmp_path / "rules.yaml",
        receivers_file=tmp_path / "receivers.yaml",
        sweep_seconds=0.05,
        listing_seconds=0.05,
        retry_seconds=0.01,
    )
    recording = Recording(folder_store).begin()
    recording.write(0, 0, 7, nan_for_a_while)
    with EmbeddedService(settings) as service:

        def events() -> list[dict[str, Any]]:
            return [json.loads(body) for body in list(web.bodies)[2:]]

        assert service.wait_until(lambda: bool(events()) and bool(mail.messages), WAIT)
        recording.write(1, 8, 40, nan_for_a_while)
        assert service.wait_until(lambda: len(events()) >= 2 and len(mail.messages) >= 2, WAIT)
    firing, resolved = events()
    assert len({json.loads(body)["id"] for body in web.bodies[:3]}) == 1
    assert [event["type"] for event in (firing, resolved)] == [
        "io.watchstep.notification.firing",
        "io.watchstep.notification.resolved",
    ]
    assert firing["data"]["group_key"] == resolved["data"]["group_key"]
    (alert,) = firing["data"]["alerts"]
    assert (alert["name"], alert["step"], alert["labels"]["run"]) == ("no-nans", 5, "run-1")
    assert all("webhook-signature" in headers for headers in web.headers)
    first, last = mail.messages
    assert (first["x-watchstep-status"], last["x-watchstep-status"]) == ("firing", "resolved")
    assert first["references"] == last["references"]
    assert first["message-id"] != last["message-id"]
