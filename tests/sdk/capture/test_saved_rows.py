"""Rows about objects with full tensors: one for each object, once it is on the store, at steps that never go back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sdk.capture.saved_rows import assert_one_for_each_object, marks_of
from tests.services.jobs import eventually
from watchstep import Bounds, Cadence, CaptureConfig, Collection, Hook, Run, open_run
from watchstep.errors import StoreError
from watchstep.reading.compaction import compact
from watchstep.store.store import Store

SAVED = Collection(None, tensors=Cadence())
DEADLINE = 60.0
QUICK = Bounds(flush_seconds=0.001)


def hook_saving(folder: Path, *collections: str, bounds: Bounds = QUICK) -> Hook:
    names = collections or ("custom", "mine", "other")
    config = CaptureConfig(
        collections={"losses": Collection(Cadence()), **dict.fromkeys(names, SAVED)},
        system=None,
        bounds=bounds,
    )
    return Hook(folder, run="r", config=config)


def record(hook: Hook, steps: int) -> None:
    for step in range(steps):
        values = np.full(3, step, np.float32)
        hook.record(a=values)
        hook.record({"b": values}, collection="mine")
        hook.record({"c": values}, collection="other", mode="eval")
        hook.log(loss=float(step))
        hook.step()


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Objects with full tensors are written only after it is set."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def waiting_store(monkeypatch: pytest.MonkeyPatch, held: threading.Event) -> threading.Event:
    """Set once an object with full tensors waits for `held`."""
    write, arrived = Store.create_in_parts, threading.Event()

    def waits(self: Store, key: str, size: int, parts: Any) -> bool:
        arrived.set()
        held.wait(DEADLINE)
        return write(self, key, size, parts)

    monkeypatch.setattr(Store, "create_in_parts", waits)
    return arrived


def closed(hook: Hook) -> Run:
    hook.close()
    assert hook.health["faults"] == {}
    return open_run(hook.run_url)


def test_each_object_has_a_row(tmp_path: Path) -> None:
    hook = hook_saving(tmp_path)
    record(hook, 50)
    run = closed(hook)
    assert len(run.snapshots()) == 150
    assert_one_for_each_object(run, tmp_path)
    assert run.steps()[:50] == list(range(50))


def test_objects_that_are_pending_at_the_end_belong_to_its_last_step(
    tmp_path: Path, held: threading.Event, waiting_store: threading.Event
) -> None:
    hook = hook_saving(tmp_path)
    record(hook, 8)
    for name in ("a", "b"):
        hook.record({name: np.ones(2)}, collection="mine")
    hook.log(loss=8.0)
    assert waiting_store.wait(DEADLINE)
    eventually(lambda: hook.health["counts"].get("rows", 0) == 8, DEADLINE)
    closing = threading.Thread(target=hook.close)
    closing.start()
    eventually(hook._ending._writer._closing.is_set, DEADLINE)
    assert open_run(hook.run_url).snapshots() == []
    held.set()
    closing.join(DEADLINE)
    run = closed(hook)
    assert_one_for_each_object(run, tmp_path)
    assert run.steps() == list(range(9))
    assert {mark.at for mark in marks_of(run)} == {8}


def test_after_the_last_step_was_written_the_rows_have_a_step_of_their_own(
    tmp_path: Path, held: threading.Event, waiting_store: threading.Event
) -> None:
    hook = hook_saving(tmp_path)
    record(hook, 5)
    assert waiting_store.wait(DEADLINE)
    eventually(lambda: hook.health["counts"].get("rows", 0) == 5, DEADLINE)
    held.set()
    run = closed(hook)
    assert_one_for_each_object(run, tmp_path)
    assert run.steps() == list(range(6))
    assert {mark.at for mark in marks_of(run)} <= {4, 5}
    (end,) = run.ends()
    assert end.last_step == 4


def test_a_refused_object_has_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Store.create_in_parts

    def refuses(self: Store, key: str, size: int, parts: Any) -> bool:
        if key.endswith("-mine.safetensors"):
            raise StoreError("store: full", "wait")
        return write(self, key, size, parts)

    monkeypatch.setattr(Store, "create_in_parts", refuses)
    hook = hook_saving(tmp_path, bounds=Bounds(close_seconds=1.0))
    record(hook, 3)
    hook.close()
    assert hook.health["counts"]["dropped_snapshots"] > 0
    run = open_run(hook.run_url)
    assert_one_for_each_object(run, tmp_path)
    assert "mine" not in {mark.collection for mark in marks_of(run)}
    assert run.steps() == [0, 1, 2]


def test_rows_appear_during_a_run_that_records_nothing_else(tmp_path: Path) -> None:
    collections = {"mine": SAVED}
    hook = Hook(tmp_path, run="r", config=CaptureConfig(collections=collections, system=None, bounds=QUICK))
    for step in range(3):
        hook.record({"a": np.full(2, step)}, collection="mine")
        hook.step()
        eventually(lambda: hook._session.snapshot_writer.settled, DEADLINE)
    hook.record({"a": np.ones(2)}, collection="mine")
    hook.step()

    eventually(lambda: marks_of(open_run(hook.run_url)), DEADLINE)
    run = closed(hook)
    assert_one_for_each_object(run, tmp_path)


def test_a_resumed_run_has_rows_at_its_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt, first in (("a1", 0), ("a2", 3)):
        monkeypatch.setenv("WATCHSTEP_ATTEMPT", attempt)
        config = CaptureConfig(collections={"losses": Cadence(), "custom": SAVED}, system=None)
        hook = Hook(tmp_path, run="r", config=config, first_step=first)
        for step in range(first, first + 5):
            hook.record(a=np.full(2, step))
            hook.log(loss=1.0)
            hook.step()
        run = closed(hook)
    assert run.attempts == ["a1", "a2"]
    assert {mark.step for mark in marks_of(run) if mark.at >= 3} == set(range(3, 8))
    assert all(mark.at >= mark.step for mark in marks_of(run))


def test_compaction_keeps_the_rows(tmp_path: Path) -> None:
    hook = hook_saving(tmp_path)
    record(hook, 20)
    run = closed(hook)
    marks, losses, steps = marks_of(run), run.losses().to_pylist(), run.steps()
    compact(hook.run_url.removeprefix("file://"), delete_after=0)
    compacted = open_run(hook.run_url)
    assert marks_of(compacted) == marks
    assert compacted.losses().to_pylist() == losses
    assert compacted.steps() == steps
    assert_one_for_each_object(compacted)
    for key in compacted.snapshots():
        snapshot = compacted.open_snapshot(key)
        (name,) = snapshot.tensors
        assert set(snapshot.read(name).tolist()) == {float(key.step)}
