"""Events for PagerDuty, as its own description of the Events API v2 has them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.channels.http_server import HttpServer, status
from tests.services.channels.samples import (
    NOW,
    PICTURE_URL,
    RUN_PAGE,
    closed,
    picture,
    sample,
    without_public_url,
)
from tests.services.channels.sending import delivery_context, send
from watchstep.errors import ConfigError
from watchstep_services.channels.pagerduty import MOST_BYTES, PagerDutyReceiver, encode_event
from watchstep_services.channels.receiver_file import RECEIVER
from watchstep_services.channels.wording import Templates
from watchstep_services.core.egress import EgressPolicy
from watchstep_services.notify.flush import message_of

KEY = "e93facc04764012d7bfb002500d5d1a6"
LINK = {"type": "string", "pattern": "^https?://"}
TEXT = {"type": "string"}
EVENT = closed(
    "routing_key",
    "event_action",
    "dedup_key",
    "payload",
    routing_key={"type": "string", "minLength": 32, "maxLength": 32},
    event_action={"enum": ["trigger", "acknowledge", "resolve"]},
    dedup_key={"type": "string", "minLength": 1, "maxLength": 255},
    client=TEXT,
    client_url=LINK,
    payload=closed(
        "summary",
        "severity",
        "source",
        summary={"type": "string", "minLength": 1, "maxLength": 1024},
        timestamp={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$"},
        severity={"enum": ["critical", "warning", "error", "info"]},
        source={"type": "string", "minLength": 1},
        component=TEXT,
        group=TEXT,
        custom_details={"type": "object"},
        **{"class": TEXT},
    ),
    links={"type": "array", "items": closed("href", href=LINK, text=TEXT)},
    images={
        "type": "array",
        "items": closed("src", src={"type": "string", "pattern": "^https://"}, href=LINK, alt=TEXT),
    },
)
"""https://github.com/PagerDuty/api-schema: reference/events-v2/openapiv3.json, and the limits of the developer documentation."""


def receiver(server: HttpServer, **more: Any) -> dict[str, Any]:
    return {"kind": "pagerduty", "routing_key": {"env": "WATCHSTEP_RECEIVER_PD"}, "url": server.url, **more}


def events(server: HttpServer) -> list[dict[str, Any]]:
    sent = [json.loads(body) for body in server.bodies]
    for event in sent:
        jsonschema.validate(event, EVENT)
    return sent


def test_an_alert_is_triggered_acknowledged_and_resolved_by_one_key(server: HttpServer) -> None:
    server.answers = [status(202)] * 4
    firing = sample(alerts=2)
    half = replace(firing, alerts=(replace(firing.alerts[0], acknowledged_by="ann"), firing.alerts[1]))
    both = replace(firing, alerts=tuple(replace(alert, acknowledged_by="ann") for alert in firing.alerts))
    for notification in (firing, half, both, sample("resolved")):
        assert send(receiver(server), delivery_context(routing_key=KEY), notification).result == "done"
    sent = events(server)
    assert [event["event_action"] for event in sent] == ["trigger", "trigger", "acknowledge", "resolve"]
    assert {event["dedup_key"] for event in sent} == {"vision/g-1"}
    assert {event["routing_key"] for event in sent} == {KEY}
    first = sent[0]
    assert first["payload"]["severity"] == "critical"
    assert first["payload"]["summary"] == "[FIRING] no-nans (critical) vision/run-1, and 1 more"
    assert (first["payload"]["source"], first["payload"]["class"]) == ("vision/run-1", "non_finite_values")
    assert first["client_url"] == RUN_PAGE
    assert [link["href"] for link in first["links"]] == [
        f"{RUN_PAGE}/alerts/f0", f"{RUN_PAGE}/alerts/f1", RUN_PAGE,
    ]  # fmt: skip
    detail = first["payload"]["custom_details"]["alerts"][0]
    assert detail["where"] == "gradient/conv1.weight, of Conv2d conv1"
    assert detail["what_to_try"] == ["Lower the learning rate."]
    assert server.headers[0]["content-type"] == "application/json"


def test_the_severity_is_that_of_the_worst_alert_that_fires(server: HttpServer) -> None:
    notification = sample(alerts=3)
    severities = ("info", "warning", "critical")
    alerts = tuple(
        replace(alert, severity=name) for alert, name in zip(notification.alerts, severities, strict=True)
    )
    over = replace(alerts[2], phase="resolved")
    send(receiver(server), delivery_context(routing_key=KEY), replace(notification, alerts=alerts))
    send(
        receiver(server), delivery_context(routing_key=KEY), replace(notification, alerts=(*alerts[:2], over))
    )
    assert [event["payload"]["severity"] for event in events(server)] == ["critical", "warning"]


def test_pictures_need_https_and_links_a_public_url(server: HttpServer) -> None:
    given = delivery_context(routing_key=KEY)
    send(receiver(server), given, picture=picture())
    send(receiver(server), given, picture=picture(url=PICTURE_URL.replace("https", "http")))
    send(receiver(server), given, without_public_url(sample()))
    shown, plain, unlinked = events(server)
    assert [image["src"] for image in shown["images"]] == [PICTURE_URL]
    assert "images" not in plain
    assert not {"links", "client_url", "images"} & set(unlinked)


def test_neither_the_key_nor_what_pagerduty_answers_is_shown(server: HttpServer) -> None:
    server.answers = [status(400, b"invalid event " + KEY.encode()), status(429, retry_after="9")]
    refused = send(receiver(server), delivery_context(routing_key=KEY))
    assert (refused.result, "answered 400" in refused.detail, KEY in refused.detail) == (
        "failed",
        True,
        False,
    )
    busy = send(receiver(server), delivery_context(routing_key=KEY))
    assert (busy.result, busy.after_ns) == ("error", NOW + 9 * 10**9)
    with pytest.raises(ConfigError) as raised:
        send(receiver(server), delivery_context(routing_key=KEY[:-1]))
    assert KEY[:-1] not in str(raised.value)
    config = RECEIVER.validate_python({"name": "pd", "kind": "pagerduty", "routing_key": KEY})
    assert KEY not in repr(config)
    assert config.as_data()["routing_key"] == {"set": True}


def test_the_address_is_that_of_pagerduty_or_of_its_eu_region_and_is_checked(server: HttpServer) -> None:
    config = RECEIVER.validate_python({"name": "pd", "kind": "pagerduty", "routing_key": KEY})
    assert config.hosts == ("events.pagerduty.com",)
    eu = RECEIVER.validate_python(
        {
            "name": "pd",
            "kind": "pagerduty",
            "routing_key": KEY,
            "url": "https://events.eu.pagerduty.com/v2/enqueue",
        }
    )
    # A stored key is not sent to another address: `directory.put_receiver` compares the destinations.
    assert config.destination != eu.destination
    refused = send(receiver(server), delivery_context(EgressPolicy(), routing_key=KEY))
    assert (refused.result, server.bodies) == ("failed", [])


def test_a_text_of_the_receivers_own(server: HttpServer) -> None:
    send(receiver(server, text="{name} at {step}"), delivery_context(routing_key=KEY))
    (event,) = events(server)
    assert event["payload"]["custom_details"]["text"] == "no-nans at 5"


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=40), st.integers(1, 400))
def test_an_event_fits_whatever_an_alert_contains(word: str, count: int) -> None:
    notification = sample(alerts=count, message=(word or "\u00e4") * 1000)
    body = encode_event(message_of(notification, Templates()), KEY)
    assert len(body) <= MOST_BYTES
    event = json.loads(body)
    jsonschema.validate(event, EVENT)
    details = event["payload"]["custom_details"]
    assert len(details["alerts"]) + details.get("alerts_left_out", 0) == count


def test_its_kind_is_notified_of_acknowledgements() -> None:
    assert PagerDutyReceiver.acknowledges
