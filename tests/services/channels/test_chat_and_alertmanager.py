from __future__ import annotations

import json
from datetime import datetime

import pytest

from tests.services.channels.http_server import HttpServer, status
from tests.services.channels.samples import NOW, PICTURE_URL, RUN_PAGE, picture, sample, without_public_url
from tests.services.channels.sending import delivery_context, send
from watchstep.errors import ConfigError

SLACK = {"kind": "slack", "url": {"env": "WATCHSTEP_RECEIVER_SLACK"}}


def test_a_message_says_what_where_why_and_leads_to_the_evidence(server: HttpServer) -> None:
    told = sample(alerts=12, message="<!channel> & <https://evil.example|here>")
    assert send(SLACK, delivery_context(url=server.url), told).result == "done"
    message = json.loads(server.bodies[0])
    (attachment,) = message["attachments"]
    header, *sections, more, context = attachment["blocks"]
    assert header["text"]["text"] == "[FIRING] no-nans (critical) vision/run-1, and 11 more"
    assert len(sections) == 10
    first = sections[0]["text"]["text"]
    for words in (
        f"*<{RUN_PAGE}/alerts/f0|no-nans>* (critical) firing at step 5",
        "&lt;!channel&gt; &amp; &lt;https://evil.example|here&gt;",
        "*What* 3 of 64 elements are NaN",
        "*Where* gradient/conv1.weight",
        "*Usually* The learning rate is too high.",
        "*Try* Lower the learning rate.",
    ):
        assert words in first
    assert more["text"]["text"] == "and 2 more"
    assert f"<{RUN_PAGE}|Open the run> · `{told.command}`" in context["elements"][0]["text"]
    assert f"*<{RUN_PAGE}/alerts/f1|no-nans>*" in sections[1]["text"]["text"]
    for block in attachment["blocks"][1:-1]:
        assert len(block["text"]["text"]) <= 3000
    send(SLACK, delivery_context(url=server.url), sample("resolved"))
    assert json.loads(server.bodies[1])["attachments"][0]["color"] != attachment["color"]


def test_without_a_public_url_a_message_has_no_link(server: HttpServer) -> None:
    send(SLACK, delivery_context(url=server.url), without_public_url(sample()))
    assert b"watch.example/" not in server.bodies[0]
    assert b"Open the" not in server.bodies[0]
    assert b"--service http://watch.example" in server.bodies[0]


def test_a_picture_is_an_attachment_of_its_own(server: HttpServer) -> None:
    assert send(SLACK, delivery_context(url=server.url), picture=picture()).result == "done"
    blocks, shown = json.loads(server.bodies[0])["attachments"]
    assert not any(block["type"] == "image" for block in blocks["blocks"])
    assert shown["image_url"] == PICTURE_URL
    assert shown["title_link"] == f"{RUN_PAGE}/alerts/f0"
    assert "signature" not in repr(picture())


def test_a_message_that_is_refused_with_its_picture_is_sent_without(server: HttpServer) -> None:
    server.answers = [status(400, b"invalid_attachments")]
    tried = send(SLACK, delivery_context(url=server.url), picture=picture())
    assert (tried.result, len(server.bodies)) == ("done", 2)
    assert len(json.loads(server.bodies[1])["attachments"]) == 1
    server.answers = [status(400), status(403)]
    assert send(SLACK, delivery_context(url=server.url), picture=picture()).result == "failed"
    server.answers = [status(503)]  # it is tried again, with the picture
    assert send(SLACK, delivery_context(url=server.url), picture=picture()).result == "error"
    assert len(server.bodies) == 5


def test_a_message_in_the_receivers_own_words(server: HttpServer) -> None:
    own = {**SLACK, "title": "{label.team}: {name}", "text": "{alerts}", "alert": "{message} <{step}>"}
    assert send(own, delivery_context(url=server.url), sample(alerts=2)).result == "done"
    message = json.loads(server.bodies[0])
    assert message["text"] == "vision: no-nans"
    text = message["attachments"][0]["blocks"][1]["text"]["text"]
    assert text == "nan in gradients of conv1 &lt;5&gt;\n\nnan in gradients of conv1 &lt;6&gt;"


def test_neither_what_slack_answers_nor_its_address_is_shown(server: HttpServer) -> None:
    server.answers = [status(403, b"invalid_token"), status(429, retry_after="7")]
    tried = send(SLACK, delivery_context(url=server.url))
    assert (tried.result, "answered 403" in tried.detail) == ("failed", True)
    assert not any(text in tried.detail for text in ("invalid_token", "secret-path"))
    assert send(SLACK, delivery_context(url=server.url)).after_ns == NOW + 7_000_000_000
    with pytest.raises(ConfigError) as raised:
        send(SLACK, delivery_context(url="ftp://secret-place/"))
    assert "secret-place" not in str(raised.value)


def test_alerts_of_an_alertmanager(server: HttpServer) -> None:
    url = server.url.removesuffix("/hook/secret-path")
    receiver = {"kind": "alertmanager", "url": url, "resend_seconds": 60}
    assert send(receiver, delivery_context(authorization="Basic eDp5"), sample(alerts=2)).result == "done"
    assert server.paths == ["/api/v2/alerts"]
    assert server.headers[0]["authorization"] == "Basic eDp5"
    first, second = json.loads(server.bodies[0])
    assert first["labels"] == {
        "alertname": "no-nans", "rule": "non_finite_values", "severity": "critical", "project": "vision", "run": "run-1",
        "name": "no-nans", "team": "vision", "attempt": "a1",
    }  # fmt: skip
    assert first["labels"] == second["labels"]
    assert "step" not in first["labels"]
    assert [alert["generatorURL"] for alert in (first, second)] == [
        f"{RUN_PAGE}/alerts/f0",
        f"{RUN_PAGE}/alerts/f1",
    ]
    assert "usually The learning rate is too high." in first["annotations"]["description"]
    starts, ends = (
        datetime.fromisoformat(first[key].replace("Z", "+00:00")) for key in ("startsAt", "endsAt")
    )
    assert starts.timestamp() == NOW // 10**9 - 1
    assert ends.timestamp() == NOW // 10**9 + 4 * 60
    send(receiver, delivery_context(), sample("resolved"))
    send(receiver, delivery_context(), without_public_url(sample()))
    assert "generatorURL" not in json.loads(server.bodies[2])[0]
    (over,) = json.loads(server.bodies[1])
    assert over["labels"] == first["labels"]
    assert datetime.fromisoformat(over["endsAt"].replace("Z", "+00:00")).timestamp() == NOW // 10**9
