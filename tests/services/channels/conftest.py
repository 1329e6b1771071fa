from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.channels.certificates import Certificate, make_certificate
from tests.services.channels.http_server import HttpServer, http_server


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def trusted(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> Certificate:
    """The certificate, which the service trusts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.path))
    return certificate
