"""Each server runs once for all tests; the environment of a test leads to those that it asks for."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.stores.servers import SERVERS, Azurite, FakeGcs, Seaweed, StoreServer, provider_variables


def _server(kind: type[StoreServer]) -> Callable[[pytest.TempPathFactory], Iterator[StoreServer]]:
    def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
        server = kind(tmp_path_factory.mktemp(kind.scheme))
        with server.running():
            yield server

    return run


_s3_server = pytest.fixture(scope="session", name="_real_s3")(_server(Seaweed))
_az_server = pytest.fixture(scope="session", name="_real_az")(_server(Azurite))
_gs_server = pytest.fixture(scope="session", name="_real_gs")(_server(FakeGcs))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the caller leads to a provider, and none is looked for on a cloud's machine."""
    for name in provider_variables():
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def lead_to(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], StoreServer]:
    """A function that returns the running server of a scheme (s3, az or gs), and leads the environment to it."""

    def lead(scheme: str) -> StoreServer:
        server: StoreServer = request.getfixturevalue(f"_real_{scheme}")
        for name, value in server.variables().items():
            monkeypatch.setenv(name, value)
        return server

    return lead


@pytest.fixture(params=sorted(SERVERS), scope="session")
def scheme(request: pytest.FixtureRequest) -> str:
    """Each provider in turn: all tests of one, then those of the next."""
    return str(request.param)


@pytest.fixture
def server(scheme: str, lead_to: Callable[[str], StoreServer]) -> StoreServer:
    """The server of a provider, to which the environment leads."""
    return lead_to(scheme)


@pytest.fixture
def url(server: StoreServer) -> str:
    """URL of an empty store on the server."""
    return server.url(f"{uuid.uuid4().hex}/some prefix")
