"""A run to look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.api.serving import serving
from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.client import Client
from watchstep_services.auth import create_token
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import advance_run


def judge(driven: Driven, run_id: int) -> None:
    """Find what is new on the store, and judge it."""
    discover(driven.service, run_id)
    advance_run(driven.service, run_id)
    driven.settle(run_id)
    advance_run(driven.service, run_id)


@pytest.fixture
def ended(driven_sqlite: Driven, folder_store: Any) -> Iterator[tuple[Driven, Recording, Client]]:
    """A run that is judged, behind a socket."""
    recording = Recording(folder_store).begin()
    run_id = driven_sqlite.register()
    recording.write_all([9, 19], nan_from(15))
    with serving(driven_sqlite.service) as url:
        client = Client(url, create_token(driven_sqlite.service.database, "operator"), PROJECT)
        judge(driven_sqlite, run_id)
        yield driven_sqlite, recording, client
