"""Channels that post JSON: webhooks, Slack, Alertmanager, and what they have in common."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import socket
from datetime import datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest
from pydantic import ValidationError

from tests.services.channels.certificates import NAME, Certificate
from tests.services.channels.http_server import (
    HttpServer,
    drip,
    endless,
    http_server,
    reset,
    stall,
    status,
)
from tests.services.channels.samples import NOW, PICTURE_URL, RUN_PAGE, picture, sample, without_public_url
from tests.services.channels.sending import LOOPBACK, delivery_context, send
from watchstep.errors import ConfigError
from watchstep_services.channels.delivery import LONGEST_PAUSE, DeliveryContext, try_post
from watchstep_services.channels.receiver_file import RECEIVER
from watchstep_services.channels.webhook import MOST_BYTES, new_secret, signature, signing_key
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import AddressRefusedError, EgressPolicy, parse_address

SLACK = {"kind": "slack", "url": {"env": "WATCHSTEP_RECEIVER_SLACK"}}


def banner(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"SSH-2.0-internal-secret\r\n")
    handler.close_connection = True


SECOND = 1_000_000_000


def posted(url: str, way: DeliveryContext | None = None) -> AttemptResult:
    return try_post(way or delivery_context(), parse_address(url), {"Content-Type": "text/plain"}, b"hello")


@pytest.mark.parametrize(
    ("code", "result"),
    [(200, "done"), (204, "done"), (400, "failed"), (401, "failed"), (404, "failed"), (410, "failed"), (408, "error"),
     (425, "error"), (429, "error"), (500, "error"), (503, "error")],
)  # fmt: skip
def test_which_answers_are_final(server: HttpServer, code: int, result: str) -> None:
    server.answers = [status(code)]
    tried = posted(server.url)
    assert tried.result == result
    assert f"127.0.0.1: answered {code}" in tried.detail
    assert "secret-path" not in tried.detail
    assert server.bodies == [b"hello"]


def test_a_receiver_says_when_it_wants_the_next_try(server: HttpServer) -> None:
    in_time = formatdate((NOW // SECOND) + 120, usegmt=True)
    for written, pause in [("30", 30), (in_time, 120), ("999999999999", LONGEST_PAUSE), ("soon", None)]:
        server.answers = [status(429, retry_after=written)]
        tried = posted(server.url)
        assert (tried.result, tried.after_ns) == (
            "error",
            0 if pause is None else NOW + round(pause) * SECOND,
        )


@pytest.mark.parametrize("code", [200, 302, 400, 500])
def test_nothing_of_an_answers_body_is_shown(server: HttpServer, code: int) -> None:
    server.answers = [status(code, b"internal-secret", x_secret="internal-secret")]
    assert "internal-secret" not in posted(server.url).detail


def test_what_is_no_http_is_not_shown(server: HttpServer) -> None:
    """An SSH or database server shows its version in the first line."""
    server.answers = [banner]
    tried = posted(server.url)
    assert tried == AttemptResult("error", "127.0.0.1: the response is not HTTP")


def test_redirects_are_not_followed(server: HttpServer) -> None:
    with http_server() as other:
        server.answers = [status(302, location=other.url)]
        assert posted(server.url).result == "failed"
        assert other.bodies == []


def test_a_connection_that_is_cut_is_tried_again(server: HttpServer) -> None:
    server.answers = [reset]
    assert posted(server.url).result == "error"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    tried = posted(f"http://127.0.0.1:{port}/")
    assert (tried.result, "ConnectError" in tried.detail) == ("error", True)


def test_a_body_without_end_is_left(server: HttpServer) -> None:
    server.answers = [endless]
    assert posted(server.url).result == "done"


@pytest.mark.parametrize("slow", [stall, drip], ids=["silent", "byte by byte"])
def test_a_slow_server_is_cut_off(server: HttpServer, slow: object) -> None:
    assert callable(slow)
    server.answers = [slow(server)]
    tried = posted(server.url, delivery_context(seconds=0.5))
    assert (tried.result, tried.detail) == ("error", "127.0.0.1: no answer within 0.5 s")


def test_a_resolver_that_hangs_is_not_waited_for(server: HttpServer) -> None:
    def hangs(_host: str, _port: int) -> list[str]:
        server.released.wait(60)
        return ["127.0.0.1"]

    way = delivery_context(EgressPolicy(LOOPBACK.networks, resolve=hangs), seconds=0.2)
    tried = posted(f"http://{NAME}:{server.port}/", way)
    assert tried.result == "error"
    server.released.set()


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(server: HttpServer) -> None:
    """A name that leads elsewhere when it is asked again gains nothing: it is asked once."""
    asked: list[str] = []

    def rebinding(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    tried = posted(
        f"http://{NAME}:{server.port}/a?b=c",
        delivery_context(EgressPolicy(LOOPBACK.networks, resolve=rebinding)),
    )
    assert (tried.result, asked) == ("done", [NAME])
    assert (server.headers[0]["host"], server.paths) == (f"{NAME}:{server.port}", ["/a?b=c"])


def test_a_name_with_one_bad_address_among_good_ones_is_refused(server: HttpServer) -> None:
    mixed = EgressPolicy(LOOPBACK.networks, resolve=lambda *_: ["127.0.0.1", "10.0.0.1"])
    with pytest.raises(AddressRefusedError, match=r"host hooks\.example: an address of it is not public"):
        posted(f"http://{NAME}:{server.port}/", delivery_context(mixed))
    assert server.bodies == []


def test_the_next_address_is_tried_where_one_does_not_answer(server: HttpServer) -> None:
    two = EgressPolicy(LOOPBACK.networks, resolve=lambda *_: ["127.0.0.9", "127.0.0.1"])
    assert posted(f"http://{NAME}:{server.port}/", delivery_context(two)).result == "done"


def test_tls_asks_for_the_name_and_not_for_the_address(trusted: Certificate) -> None:
    here = EgressPolicy((ipaddress.ip_network("127.0.0.1/32"),), resolve=lambda *_: ["127.0.0.1"])
    with http_server(trusted.server_context()) as secure:
        assert posted(f"https://{NAME}:{secure.port}/", delivery_context(here)).result == "done"
        wrong = posted(f"https://other.example:{secure.port}/", delivery_context(here))
        assert (wrong.result, "certificate verify failed" in wrong.detail) == ("error", True)
        assert len(secure.bodies) == 1


def test_a_certificate_that_nobody_knows_is_refused(certificate: Certificate) -> None:
    with http_server(certificate.server_context()) as secure:
        tried = posted(secure.url)
        assert (tried.result, secure.bodies) == ("error", [])


def test_no_proxy_of_the_environment_is_used(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    assert posted(server.url).result == "done"


def verified(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """As a receiver checks it by the words of Standard Webhooks."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = b".".join([headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body])
    expected = "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return expected in headers["webhook-signature"].split(" ")


def test_the_example_of_the_standard() -> None:
    key = signing_key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    assert (
        signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
        == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


def test_an_event_is_signed_with_both_secrets_while_one_replaces_the_other(server: HttpServer) -> None:
    old, new = new_secret(), new_secret()
    tried = send({"kind": "webhook", "url": server.url}, delivery_context(secret=new, previous_secret=old))
    assert tried.result == "done"
    (headers,), (body,) = server.headers, server.bodies
    assert verified(old, headers, body)
    assert verified(new, headers, body)
    assert not verified(new_secret(), headers, body)
    assert headers["webhook-timestamp"] == str(NOW // 1_000_000_000)
    event = json.loads(body)
    assert headers["content-type"] == "application/cloudevents+json"
    assert headers["webhook-id"] == event["id"] == sample().id
    assert (event["specversion"], event["type"]) == ("1.0", "io.watchstep.notification.firing")
    assert event["data"]["alerts"] == sample().as_data()["alerts"]
    assert event["data"]["title"].startswith("[FIRING] no-nans (critical) vision/run-1")


def test_without_secrets_it_is_not_signed_and_a_header_may_authorize(server: HttpServer) -> None:
    assert (
        send({"kind": "webhook", "url": server.url}, delivery_context(authorization="Bearer t")).result
        == "done"
    )
    assert "webhook-signature" not in server.headers[0]
    assert server.headers[0]["authorization"] == "Bearer t"


def test_what_is_sent_has_a_bound(server: HttpServer) -> None:
    large = sample(alerts=3000)
    assert send({"kind": "webhook", "url": server.url}, delivery_context(), large).result == "done"
    (body,) = server.bodies
    assert len(body) <= MOST_BYTES
    data = json.loads(body)["data"]
    assert len(data["alerts"]) + data["left_out"] == 3000


def test_an_address_that_is_not_public_is_given_up(server: HttpServer) -> None:
    tried = send({"kind": "webhook", "url": server.url}, delivery_context(EgressPolicy()))
    assert (tried.result, server.bodies) == ("failed", [])
    assert "not public" in tried.detail


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_AAAA", "whsec_%%%", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]
)
def test_a_secret_that_cannot_sign_is_not_repeated(secret: str) -> None:
    with pytest.raises(ConfigError) as raised:
        signing_key(secret)
    assert not secret or secret == "whsec_" or secret not in str(raised.value)


def test_a_header_cannot_be_smuggled_in(server: HttpServer) -> None:
    with pytest.raises(ConfigError) as raised:
        send({"kind": "webhook", "url": server.url}, delivery_context(authorization="a\r\nX-Evil: 1"))
    assert "X-Evil" not in str(raised.value)
    assert server.bodies == []


def test_what_is_wrong_with_a_receiver_does_not_repeat_its_secret() -> None:
    written = {
        "kind": "webhook",
        "name": "r",
        "url": "https://u:hunter2@host/",
        "secret": {"value": 7, "x": "hunter2"},
    }
    with pytest.raises(ValidationError) as raised:
        RECEIVER.validate_python(written)
    assert "hunter2" not in str(raised.value)
    given = RECEIVER.validate_python(
        {"kind": "webhook", "name": "r", "url": "https://host/", "secret": "hunter2"}
    )
    assert "hunter2" not in repr(given)
    assert given.as_data()["secret"] == {"set": True}


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
        f"*<{RUN_PAGE}/alerts/f0|no-nans>* (critical) firing: bad from step 5",
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
