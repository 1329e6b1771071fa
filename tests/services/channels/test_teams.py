"""Adaptive Cards for the webhook of a Teams workflow, by the elements that version 1.4 of the schema has."""

from __future__ import annotations

import json
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
from watchstep_services.channels.receiver_file import RECEIVER
from watchstep_services.channels.teams import MOST_BYTES, encode_card
from watchstep_services.channels.wording import Templates
from watchstep_services.core.egress import EgressPolicy
from watchstep_services.notify.flush import message_of

TEAMS = {"kind": "teams", "url": {"env": "WATCHSTEP_RECEIVER_TEAMS"}}
STRING = {"type": "string"}
OPEN = closed(
    "type",
    "url",
    type={"const": "Action.OpenUrl"},
    title=STRING,
    url={"type": "string", "pattern": "^https?://"},
)
COLOURS = ["Default", "Dark", "Light", "Accent", "Good", "Warning", "Attention"]
RUN = closed(
    "type",
    "text",
    type={"const": "TextRun"},
    text={"type": "string", "minLength": 1},
    weight={"enum": ["Lighter", "Default", "Bolder"]},
    size={"enum": ["Default", "Small", "Medium", "Large", "ExtraLarge"]},
    color={"enum": COLOURS},
    fontType={"enum": ["Default", "Monospace"]},
    isSubtle={"type": "boolean"},
    selectAction=OPEN,
)
TEXT = closed(
    "type",
    "inlines",
    type={"const": "RichTextBlock"},
    separator={"type": "boolean"},
    inlines={"type": "array", "minItems": 1, "items": RUN},
)
IMAGE = closed(
    "type",
    "url",
    type={"const": "Image"},
    url={"type": "string", "pattern": "^https://"},
    altText=STRING,
    size={"enum": ["Auto", "Stretch", "Small", "Medium", "Large"]},
    msteams={"type": "object"},
    selectAction=OPEN,
)
CARD = closed(
    "type",
    "version",
    "body",
    type={"const": "AdaptiveCard"},
    version={"const": "1.4"},
    fallbackText=STRING,
    msteams={"type": "object"},
    body={"type": "array", "items": {"oneOf": [TEXT, IMAGE]}},
    actions={"type": "array", "maxItems": 6, "items": OPEN},
    **{"$schema": {"const": "http://adaptivecards.io/schemas/adaptive-card.json"}},
)
ATTACHMENT = closed(
    "contentType",
    "content",
    contentType={"const": "application/vnd.microsoft.card.adaptive"},
    contentUrl={"type": "null"},
    content=CARD,
)
MESSAGE = closed(
    "type",
    "attachments",
    type={"const": "message"},
    attachments={"type": "array", "minItems": 1, "maxItems": 1, "items": ATTACHMENT},
)
"""Of https://adaptivecards.io/schemas/1.4.0/adaptive-card.json, the elements that a card of ours has; and the webhook's envelope."""


def cards(server: HttpServer) -> list[dict[str, Any]]:
    sent = [json.loads(body) for body in server.bodies]
    for message in sent:
        jsonschema.validate(message, MESSAGE)
    return [message["attachments"][0]["content"] for message in sent]


def lines(card: dict[str, Any]) -> list[str]:
    return [
        "".join(run["text"] for run in element["inlines"])
        for element in card["body"]
        if element["type"] == "RichTextBlock"
    ]


def test_a_card_says_what_where_why_and_leads_to_the_evidence(server: HttpServer) -> None:
    server.answers = [status(202), status(202)]
    notification = sample(message="[click](https://evil.example) <at>all</at>")
    assert send(TEAMS, delivery_context(url=server.url), notification, picture()).result == "done"
    assert send(TEAMS, delivery_context(url=server.url), sample("resolved", alerts=2)).result == "done"
    card, over = cards(server)
    said = lines(card)
    assert said[0] == "[FIRING] no-nans (critical) vision/run-1"
    assert "no-nans (critical) firing: bad from step 5" in said
    assert "[click](https://evil.example) <at>all</at>" in said  # text: a run has no Markdown
    assert "Where gradient/conv1.weight, of Conv2d conv1" in said
    assert "Try Lower the learning rate." in said
    assert notification.command in said
    assert [(action["title"], action["url"]) for action in card["actions"]] == [
        ("Open the alert", f"{RUN_PAGE}/alerts/f0"),
        ("Open the run", RUN_PAGE),
    ]
    (image,) = [element for element in card["body"] if element["type"] == "Image"]
    assert image["url"] == PICTURE_URL
    assert [action["title"] for action in over["actions"]] == ["Open the run"]
    colours = [entry["body"][0]["inlines"][0]["color"] for entry in (card, over)]
    assert colours == ["Attention", "Good"]


def test_without_a_public_url_a_card_has_no_link(server: HttpServer) -> None:
    insecure = picture(url=PICTURE_URL.replace("https", "http"))
    send(TEAMS, delivery_context(url=server.url), without_public_url(sample()))
    send(TEAMS, delivery_context(url=server.url), picture=insecure)
    unlinked, plain = cards(server)
    assert "actions" not in unlinked
    assert b"https://watch.example" not in server.bodies[0]
    assert not [element for element in plain["body"] if element["type"] == "Image"]


def test_a_card_in_the_receivers_own_words(server: HttpServer) -> None:
    own = {**TEAMS, "title": "{label.team}: {name}", "text": "{alerts}", "alert": "{message}\n**{step}**"}
    assert send(own, delivery_context(url=server.url), sample(alerts=2)).result == "done"
    (card,) = cards(server)
    assert lines(card)[:3] == ["vision: no-nans", "nan in gradients of conv1", "**5**"]


def test_neither_the_address_nor_what_teams_answers_is_shown(server: HttpServer) -> None:
    server.answers = [status(400, b"internal-secret"), status(429, retry_after="7")]
    refused = send(TEAMS, delivery_context(url=server.url))
    assert (refused.result, "answered 400" in refused.detail) == ("failed", True)
    assert not any(text in refused.detail for text in ("internal-secret", "secret-path"))
    assert send(TEAMS, delivery_context(url=server.url)).after_ns == NOW + 7_000_000_000
    assert send(TEAMS, delivery_context(EgressPolicy(), url=server.url)).result == "failed"
    for address in ("ftp://secret-place/", "https://secret.webhook.office.com/webhookb2/secret-place"):
        with pytest.raises(ConfigError) as raised:
            send(TEAMS, delivery_context(url=address))
        assert "secret-place" not in str(raised.value)


def test_an_address_of_a_retired_connector_is_refused_when_it_is_written() -> None:
    config = RECEIVER.validate_python({"name": "r", **TEAMS})
    for host in ("contoso.webhook.office.com", "outlook.office.com"):
        with pytest.raises(ConfigError, match="retired"):
            config.check_secret("url", f"https://{host}/webhookb2/x")
    for host in ("prod-1.westeurope.logic.azure.com:443", "x.a1.environment.api.powerplatform.com:443"):
        config.check_secret("url", f"https://{host}/workflows/1/triggers/manual/paths/invoke?sig=x")


@pytest.mark.ci
@settings(max_examples=25, deadline=None)
@given(st.text(max_size=30), st.integers(1, 60), st.booleans())
def test_a_card_fits_whatever_an_alert_contains(word: str, count: int, own: bool) -> None:
    notification = sample(alerts=count, message=(word or "\u00e4") * 300)
    templates = Templates(text="{alerts}\n" * 3) if own else Templates()
    body = encode_card(message_of(notification, templates, picture()))
    assert len(body) <= MOST_BYTES
    jsonschema.validate(json.loads(body), MESSAGE)
