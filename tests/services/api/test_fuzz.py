"""A short fuzz run over the whole API; ``python -m benchmarks.fuzz_api`` runs a long one."""

from __future__ import annotations

import pytest

from tests.services.api.fuzzing import fuzz, prepared
from tests.services.driving import Driven
from watchstep.store.store import Store
from watchstep_services.auth import create_token

pytestmark = pytest.mark.release

EXAMPLES = 1


def test_all_responses_conform_to_the_document(driven_sqlite: Driven, folder_store: Store) -> None:
    driven = driven_sqlite.with_settings(
        requests_per_minute=0, recordings_per_minute=0, failures_per_minute=0
    )
    app = prepared(driven, folder_store)
    tally = fuzz(app, create_token(driven.service.database, "admin"), EXAMPLES)
    assert tally.faults == []
    assert tally.requests >= tally.operations
    assert {200, 404, 422} <= tally.statuses.keys()
