"""Requests over TLS: certificates are verified, and those of authorities are not read for each connection."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.services.channels.certificates import Certificate, make_certificate
from watchstep.platform.transport import ServiceAddress, Transport, UnreachableError


class Handler(BaseHTTPRequestHandler):
    """Answers with an empty object, and closes the connection."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_arguments: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that refuses the certificate is expected."""


@contextmanager
def serving(certificate: Certificate) -> Iterator[Transport]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.socket = certificate.server_context().wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Transport(
            ServiceAddress.checked(f"https://127.0.0.1:{server.server_address[1]}", "t"), 10.0, tries=1
        )
        server.shutdown()
        thread.join()


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path)


def test_a_certificate_of_an_unknown_authority_is_refused(certificate: Certificate) -> None:
    with (
        serving(certificate) as transport,
        pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        transport.call("GET", "/")


def test_the_systems_authorities_are_read_once_for_many_connections(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.path))
    reads = []
    load = ssl.SSLContext.load_default_certs

    def counted(context: ssl.SSLContext, *arguments: Any) -> None:
        reads.append(context)
        load(context, *arguments)

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", counted)
    with serving(certificate) as transport:
        for _ in range(5):  # each has a connection of its own, because the server closes them
            assert transport.call("GET", "/") == {}
    assert len(reads) == 1


def test_certificates_of_authorities_that_change_are_read_again(
    certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    other = make_certificate(tmp_path / "other")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(other.path.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
    monkeypatch.setattr("watchstep.platform.transport._TLS_SECONDS", 0.0)
    with serving(certificate) as transport:
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            transport.call("GET", "/")
        authorities.write_bytes(certificate.path.read_bytes())
        assert transport.call("GET", "/") == {}
