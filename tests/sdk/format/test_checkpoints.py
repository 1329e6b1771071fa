"""Checkpoints that a program reports as saved: registered on the store, found again, excluded from rotation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.jobs import eventually
from watchstep import Hook
from watchstep.capture import checkpoint_notes
from watchstep.capture.checkpoint_notes import CheckpointNotes
from watchstep.capture.health import RecorderHealth
from watchstep.errors import FormatError, StoreError
from watchstep.format.documents import Checkpoint, find_checkpoints, last_good
from watchstep.format.layout import CHECKPOINTS
from watchstep.store.store import Store

SECOND = 1_000_000_000


def saved(step: int, attempt: str = "a1", at: int | None = None, worker: int = 0) -> Checkpoint:
    return Checkpoint(f"/checkpoints/{attempt}-{step}.pt", step, attempt, worker, step if at is None else at)


def put(store: Store, *checkpoints: Checkpoint) -> None:
    for checkpoint in checkpoints:
        store.put(checkpoint.key, checkpoint.encode())


def test_a_hook_notes_what_the_program_saved(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r", project="p")
    for step in range(5):
        hook.log(loss=1.0)
        hook.step()
        if step % 2 == 0:
            hook.checkpoint_saved(tmp_path / f"step-{step}.pt")
    hook.checkpoint_saved("s3://elsewhere/last.pt", step=4)
    assert hook.protected_checkpoints() >= {str(tmp_path / "step-2.pt"), "s3://elsewhere/last.pt"}
    hook.close()
    found = find_checkpoints(Store.open(tmp_path).child("p/r/"))
    assert [(checkpoint.path, checkpoint.step) for checkpoint in found] == [
        (str(tmp_path / f"step-{step}.pt"), step) for step in (0, 2, 4)
    ]  # a step has one note of each worker: the first
    assert hook.health["faults"] == {}


def test_the_last_good_one_was_saved_before_the_bad_step(folder_store: Store) -> None:
    assert last_good(folder_store) is None
    put(folder_store, saved(10), saved(20), saved(30), saved(20, "a2", at=99))
    assert last_good(folder_store) == saved(30)
    assert last_good(folder_store, 30) == saved(20, "a2", at=99)
    assert last_good(folder_store, 11) == saved(10)
    assert last_good(folder_store, 10) is None
    folder_store.put(f"{CHECKPOINTS}a1/25-0.json", b"no json")
    folder_store.put(f"{CHECKPOINTS}a1/strange", b"")
    assert last_good(folder_store, 21) == saved(20, "a2", at=99)
    assert len(find_checkpoints(folder_store)) == 4


@pytest.mark.parametrize("data", [b"", b"[]", b'{"path": "x", "step": -1}', b"[" * 100_000])
def test_what_is_no_note_is_reported(data: bytes) -> None:
    with pytest.raises(FormatError):
        Checkpoint.decode(data, "k")


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40), st.integers(0, 120), st.data())
def test_the_last_good_checkpoint_is_protected_until_it_can_have_been_judged(
    gaps: list[int], late: int, data: st.DataObject
) -> None:
    """Whenever a step turns bad, and for as long as judging it may take, the newest checkpoint before it is protected."""
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    bad_at = data.draw(st.integers(times[0], times[-1] + 1000))
    good = max(time for time in times if time <= bad_at)
    now = bad_at + late
    notes = CheckpointNotes(_no_store, RecorderHealth())
    notes._saved = [saved(index, at=time * SECOND) for index, time in enumerate(times) if time <= now]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now * SECOND)
        protected = notes.protected()
    assert {
        checkpoint.path for checkpoint in notes._saved if checkpoint.saved_ns == good * SECOND
    } & protected


def test_a_store_that_does_not_answer_is_tried_again(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_notes, "_FIRST_PAUSE", 0.001)
    health, tries = RecorderHealth(), []

    def opened() -> Store:
        tries.append(1)
        if len(tries) < 3:
            raise StoreError("store: away", "wait")
        return folder_store

    notes = CheckpointNotes(opened, health)
    notes.add(saved(1))
    eventually(lambda: len(tries) >= 3, 60.0)
    notes.close()
    notes.join(lambda: False)
    assert find_checkpoints(folder_store) == [saved(1)]
    assert "away" in str(health.as_data()["faults"])


def _no_store() -> Any:
    raise NotImplementedError
