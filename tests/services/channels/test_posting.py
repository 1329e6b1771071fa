from __future__ import annotations

import ipaddress
import socket
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest

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
from tests.services.channels.samples import NOW
from tests.services.channels.sending import LOOPBACK, delivery_context
from watchstep_services.channels.delivery import LONGEST_PAUSE, DeliveryContext, try_post
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import AddressRefusedError, EgressPolicy, parse_address


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
