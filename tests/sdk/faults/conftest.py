"""Fixtures for fault tests: a server with faults, and the environment that points recorders to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sdk.store.faulty_s3 import FaultyS3


@pytest.fixture
def mute_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A server that does not listen yet: connections are refused."""
    with FaultyS3().serving(listening=False) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "WATCHSTEP_STORE": "s3://bucket/runs",
            "WATCHSTEP_RUN": "r",
        }.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def server(mute_server: FaultyS3) -> FaultyS3:
    """A server that answers until a fault is set."""
    mute_server.listen()
    return mute_server
