"""Fixtures of the services' tests, and a real HTTP server that receives what they send."""

from collections.abc import Iterator

import pytest

from tests.service_fixtures import (  # noqa: F401 - fixtures
    _no_settings_from_outside,
    database,
    driven,
    driven_sqlite,
    empty_database,
    postgres,
    postgres_tables,
    sqlite,
    sqlite_factory,
    sqlite_tables,
)
from tests.services.channels.http_server import HttpServer, http_server


@pytest.fixture
def receiver() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running
