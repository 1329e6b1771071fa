"""How a run stands, by its small documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from tests.sdk.reading.stored import new_run
from watchstep import documents
from watchstep.control import ControlDocument, StopRequest
from watchstep.documents import AttemptDocument, EndDocument
from watchstep.layout import CONTROL_DOCUMENT
from watchstep.reading.catalogue import find_runs
from watchstep.store import Store

ASKED = ControlDocument().with_stop(StopRequest("a", 7, "a NaN"))


def begin(store: Store, attempt: str = "a", started_ns: int = 1, workers: int = 1) -> None:
    document = AttemptDocument(attempt, started_ns, world_size=workers)
    store.put(f"attempts/{attempt}.json", documents.encode(document))


def end(store: Store, states: Sequence[str], attempt: str = "a") -> None:
    """Write how workers ended: a state, and a reason behind a colon."""
    for worker, told_state in enumerate(states):
        state, _, reason = told_state.partition(": ")
        document = EndDocument(worker, cast("documents.EndState", state), 9, 100 - worker, 1, "w", reason)
        store.put(f"end/{attempt}/{worker}.json", documents.encode(document))


def told(folder: Path) -> str:
    (entry,) = find_runs(Store.open(folder))
    return entry.state


def test_a_run_without_an_attempt_is_only_created(tmp_path: Path) -> None:
    new_run(tmp_path)
    assert told(tmp_path) == "created"


@pytest.mark.parametrize(
    ("ends", "unasked", "asked"),
    [
        ([], "open", "stopping"),
        (["completed"], "open", "open"),
        (["completed", "completed"], "completed", "completed"),
        (["failed"], "failed", "failed"),
        (["failed: SIGTERM"], "failed", "stopped"),
        (["failed: SIGTERM; SystemExit: 7", "failed"], "failed", "stopped"),
        (["failed: ValueError: SIGTERM"], "failed", "failed"),
        (["stopped", "failed"], "stopped", "stopped"),
        (["failed", "completed"], "failed", "failed"),
    ],
)
def test_an_attempt_of_two_workers(tmp_path: Path, ends: list[str], unasked: str, asked: str) -> None:
    store = new_run(tmp_path)
    begin(store, workers=2)
    end(store, ends)
    assert told(tmp_path) == unasked
    store.put(CONTROL_DOCUMENT, ASKED.encode())
    assert told(tmp_path) == asked
    assert store.get(CONTROL_DOCUMENT) == ASKED.encode()


def test_the_newest_attempt_counts_and_its_own_stop(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    begin(store, "a", 1)
    end(store, ["failed"], "a")
    store.put(CONTROL_DOCUMENT, ASKED.encode())
    begin(store, "b", 2)
    assert told(tmp_path) == "open"
    end(store, ["failed"], "b")
    assert told(tmp_path) == "failed"


@pytest.mark.parametrize("key", ["attempts/a.json", "end/a/0.json", CONTROL_DOCUMENT])
def test_what_cannot_be_read_is_said(tmp_path: Path, key: str) -> None:
    store = new_run(tmp_path)
    begin(store)
    end(store, ["completed"])
    store.put(key, b"{")
    assert told(tmp_path) == "damaged"


def test_ends_of_a_claim_that_was_lost(tmp_path: Path) -> None:
    end(new_run(tmp_path), ["completed"])
    assert told(tmp_path) == "completed"
