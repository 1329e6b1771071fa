"""The service that launches of these tests start beside their store: one for all of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.jobs import eventually

ENDING_SECONDS = 120.0


@pytest.fixture(scope="session")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a ``store``, beside which the first launch starts a service."""
    held = tmp_path_factory.mktemp("launching")
    yield held
    end_service_of(held / "store")


def end_service_of(store: Path) -> None:
    """End the service that a launch started beside a store, if one did."""
    note = store / ".watchstep" / "service.json"
    if note.exists():
        os.kill(json.loads(note.read_text())["process"]["pid"], signal.SIGTERM)
        eventually(lambda: not note.exists(), ENDING_SECONDS)
