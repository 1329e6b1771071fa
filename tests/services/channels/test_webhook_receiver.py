from __future__ import annotations

import base64
import hashlib
import hmac
import json

import pytest
from pydantic import ValidationError

from tests.services.channels.http_server import HttpServer
from tests.services.channels.samples import NOW, sample
from tests.services.channels.sending import delivery_context, send
from watchstep.errors import ConfigError
from watchstep_services.channels.receiver_file import RECEIVER
from watchstep_services.channels.webhook import MOST_BYTES, new_secret, signature, signing_key
from watchstep_services.core.egress import EgressPolicy


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
