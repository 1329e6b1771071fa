from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.laws import examples
from tests.services.channels.certificates import Certificate
from tests.services.channels.samples import RUN_PAGE, picture, sample, without_public_url
from tests.services.channels.sending import LOOPBACK, delivery_context, send
from tests.services.channels.smtp_server import PASSWORD, USER, SmtpServer, smtp_server
from watchstep_services.channels.mail import EmailReceiver, render_email
from watchstep_services.channels.receiver_file import RECEIVER
from watchstep_services.core.egress import EgressPolicy
from watchstep_services.notify.flush import message_of

PLAIN = {
    "kind": "email",
    "host": "127.0.0.1",
    "sender": "watch@ml.example",
    "to": ["a@ml.example"],
    "security": "none",
}
LOGIN = {**PLAIN, "security": "starttls", "username": USER, "password": {"env": "WATCHSTEP_RECEIVER_SMTP"}}


def to(server: SmtpServer, config: dict[str, Any] = PLAIN, **more: Any) -> dict[str, Any]:
    return {**config, "port": server.port, **more}


def test_a_message_is_text_and_html_and_keeps_its_id() -> None:
    with smtp_server() as server:
        two = ["a@ml.example", "b@ml.example"]
        for told in (sample(), sample(), sample("resolved")):
            assert send(to(server, to=two), delivery_context(), told).result == "done"
    first, again, resolved = server.messages
    assert server.recipients == [two, two, two]
    assert first["subject"] == "[FIRING] no-nans (critical) vision/run-1"
    assert (first["from"], first["to"]) == ("watch@ml.example", "a@ml.example, b@ml.example")
    assert first["message-id"] == again["message-id"] == "<n-0001@ml.example>"
    assert first["references"] == resolved["references"] == "<g-1.group@ml.example>"
    assert first["auto-submitted"] == "auto-generated"
    text, page = first.get_body(("plain",)), first.get_body(("html",))
    assert text is not None
    assert page is not None
    assert "where   gradient/conv1.weight, of Conv2d conv1" in text.get_content()
    assert f'<a href="{RUN_PAGE}/alerts/f0">Open the alert</a>' in page.get_content()
    assert first.get_content_type() == "multipart/alternative"
    assert resolved["x-watchstep-status"] == "resolved"


def test_a_picture_stands_in_the_html_and_is_no_attachment_of_the_message() -> None:
    shown = picture(inline=True)
    with smtp_server() as server:
        assert send(to(server), delivery_context(), picture=shown).result == "done"
        assert send(to(server), delivery_context(), without_public_url(sample()), shown).result == "done"
        assert send(to(server), delivery_context(), picture=picture()).result == "done"
    mail, unlinked, without = server.messages
    text, related = mail.iter_parts()
    assert (text.get_content_type(), related.get_content_type()) == ("text/plain", "multipart/related")
    page, image = related.iter_parts()
    assert page.get_content_type() == "text/html"
    assert image.get_content_type() == "image/png"
    assert image.get_content() == shown.png
    assert image.get_content_disposition() == "inline"
    assert f'src="cid:{image["content-id"].strip("<>")}"' in page.get_content()
    assert shown.text in page.get_content()
    body = unlinked.get_body(("html",))
    assert body is not None
    assert "<a " not in body.get_content()
    assert "cid:" in body.get_content()
    assert without.get_content_type() == "multipart/alternative"


def test_starttls_and_login(trusted: Certificate) -> None:
    with smtp_server(trusted) as server:
        assert send(to(server, LOGIN, host="localhost"), delivery_context(password=PASSWORD)).result == "done"
        assert server.encrypted == [True]
        wrong = send(to(server, LOGIN), delivery_context(password="other"))
        assert (wrong.result, "535" in wrong.detail, "other" in wrong.detail) == ("failed", True, False)


def test_tls_from_the_start(trusted: Certificate) -> None:
    with smtp_server(trusted, at_once=True) as server:
        assert send(to(server, security="tls"), delivery_context()).result == "done"
        assert server.encrypted == [True]


def test_a_server_that_cannot_show_who_it_is_gets_nothing(certificate: Certificate) -> None:
    with smtp_server(certificate) as server:
        tried = send(to(server, LOGIN), delivery_context(password=PASSWORD))
        assert (tried.result, "certificate verify failed" in tried.detail) == ("error", True)
    with smtp_server() as server:
        tried = send(to(server, LOGIN), delivery_context(password=PASSWORD))
        assert (tried.result, "STARTTLS" in tried.detail) == ("failed", True)


@pytest.mark.parametrize(
    ("answer", "result", "shown"),
    [
        ("451 later", "error", "answered 451"),
        ("552 5.3.4 too large", "failed", "answered 552 5.3.4"),
        ("421 4.7 internal-secret", "error", "answered 421"),
        ("550 1.2.3.4 internal-secret", "failed", "answered 550"),
    ],
)
def test_which_answers_are_final_and_only_their_codes_are_shown(answer: str, result: str, shown: str) -> None:
    with smtp_server() as server:
        server.to_messages = [answer]
        tried = send(to(server), delivery_context())
        assert (tried.result, tried.detail.partition(";")[0]) == (result, f"127.0.0.1: {shown}")
        assert send(to(server), delivery_context()).result == "done"


def test_recipients_that_are_not_taken() -> None:
    two = ["a@ml.example", "b@ml.example"]
    with smtp_server() as server:
        server.to_recipients = {"b@ml.example": "550 unknown"}
        tried = send(to(server, to=two), delivery_context())
        assert (tried.result, "b@ml.example: answered 550" in tried.detail) == ("done", True)
        assert server.recipients == [["a@ml.example"]]
        server.to_recipients = {"b@ml.example": "450 greylisted"}
        assert send(to(server, to=two), delivery_context()).result == "error"
        server.to_recipients = dict.fromkeys(two, "550 unknown")
        assert send(to(server, to=two), delivery_context()).result == "failed"


def test_servers_that_do_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = {**PLAIN, "port": silent.getsockname()[1]}
        tried = send(config, delivery_context(seconds=0.3))
        assert (tried.result, tried.detail) == ("error", "127.0.0.1: no answer within 0.3 s")
    assert send(config, delivery_context()).result == "error"


def test_a_server_that_talks_without_end_is_cut_off() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    while not over.wait(0.001):
                        connection.sendall(b"220-still here\r\n")
                except OSError:
                    pass

        thread = threading.Thread(target=talk)
        thread.start()
        tried = send({**PLAIN, "port": listener.getsockname()[1]}, delivery_context(seconds=0.3))
        over.set()
        thread.join()
    assert (tried.result, tried.detail) == ("error", "127.0.0.1: no answer within 0.3 s")


def test_a_server_that_is_not_public_is_not_connected_to() -> None:
    with smtp_server() as server:
        assert send(to(server), delivery_context(EgressPolicy())).result == "failed"
        named = EgressPolicy(LOOPBACK.networks, resolve=lambda *_: ["127.0.0.1"])
        assert send(to(server, host="mail.example"), delivery_context(named)).result == "done"


@pytest.mark.parametrize(
    "change",
    [
        {"to": ["a@ml.example\r\nBcc: b@evil.example"]}, {"to": []}, {"to": ["a"]}, {"to": ["a b@c"]}, {"to": ["a@b,c@d"]},
        {"sender": "x\n@y"}, {"host": "a b"}, {"host": "2130706433"}, {"port": 0}, {"username": "u"},
        {"username": "u", "password": "p"},
    ],
)  # fmt: skip
def test_what_cannot_be_written(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RECEIVER.validate_python({"name": "r", **PLAIN, **change})


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(60))
@given(st.text(max_size=60), st.text(min_size=1, max_size=60))
def test_no_word_of_an_alert_becomes_a_header(words: str, number: str) -> None:
    receiver = RECEIVER.validate_python(
        {"name": "r", **PLAIN, "title": "{message} {name}", "text": "{message}"}
    )
    assert isinstance(receiver, EmailReceiver)
    told = sample(message=words + "\r\nBcc: evil@evil.example\r\n\r\nbody")
    told = replace(told, id=number, group_key=words or "g")
    made = render_email(receiver, message_of(told, receiver.templates))
    content = made.as_bytes()
    head = content.partition(b"\r\n\r\n")[0]
    assert "bcc" not in {line.partition(b":")[0].lower().decode() for line in head.split(b"\r\n")}
    assert made["to"] == "a@ml.example"
    assert len(made.get_all("message-id", [])) == 1
