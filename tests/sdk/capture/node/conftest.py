"""Fixtures for the ranks of a node: a meeting place, and stores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sdk.capture.node.ranks import Written, rank_server
from tests.sdk.store.faulty_s3 import FaultyS3
from watchstep.format.layout import run_prefix


@dataclass
class Server:
    """A server, and what ranks need to know of it."""

    faulty: FaultyS3
    environment: dict[str, str]

    def written(self) -> Written:
        """Its segments."""
        prefix = f"/bucket/runs/{run_prefix('default', 'r')}"
        objects = {path.removeprefix(prefix): data for path, data in list(self.faulty.objects.items())}
        return Written({path: data for path, data in objects.items() if path.startswith("stats/")})


@pytest.fixture(autouse=True, scope="session")
def _rank_server() -> Iterator[None]:
    yield
    if rank_server.cache_info().currsize:
        rank_server().close()
        rank_server.cache_clear()


@pytest.fixture
def meeting_place() -> Iterator[Path]:
    """A temporary folder of the test's own, with a name that is short enough for the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="ws") as place:
        yield Path(place)


@pytest.fixture
def folder(tmp_path: Path, meeting_place: Path) -> dict[str, str]:
    """The environment of ranks that write to a local folder."""
    return {"WATCHSTEP_STORE": str(tmp_path / "store"), "TMPDIR": str(meeting_place)}


@pytest.fixture
def server(meeting_place: Path) -> Iterator[Server]:
    """A server that works until a fault is set."""
    with FaultyS3().serving() as faulty:
        environment = {
            "AWS_ENDPOINT_URL": faulty.endpoint,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "WATCHSTEP_STORE": "s3://bucket/runs",
            "TMPDIR": str(meeting_place),
        }
        yield Server(faulty, environment)
