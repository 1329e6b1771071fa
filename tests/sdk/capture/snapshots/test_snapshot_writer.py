"""Snapshots are written whole or not at all, a failing store delays nothing, and a ring stays within its limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from watchstep import Snapshots
from watchstep.capture.health import RecorderHealth
from watchstep.capture.tensors.snapshots import Occasion, Reason, SnapshotWriter, TakenSnapshot
from watchstep.errors import StoreError
from watchstep.format.snapshot import Described, open_snapshot
from watchstep.store.store import Store

VALUES = 1000
PATIENCE = 30.0


class Written:
    """A writer of the objects of a collection, and its health."""

    def __init__(self, config: Snapshots | None = None, ring_bytes: int | None = None) -> None:
        self.health = RecorderHealth()
        self.writer = SnapshotWriter(config or Snapshots(), 3, self.health)
        self.writer.limit_ring("weights", ring_bytes)
        self.turn = threading.Event()

    def offer(
        self,
        step: int,
        reason: Reason = "cadence",
        ready: Callable[[], None] = lambda: None,
        collection: str = "weights",
    ) -> None:
        memory = self.writer.memory.take(4 * VALUES)
        assert memory is not None
        data = memory[: 4 * VALUES]
        data.view(np.float32)[:] = step
        tensors = (Described("w", "F32", (VALUES,)),)
        self.writer.offer(
            TakenSnapshot(
                step,
                "train",
                Occasion(reason),
                "before the update",
                tensors,
                (data,),
                (memory,),
                ready=ready,
                collection=collection if reason == "cadence" else "",
                is_rotated=reason == "cadence",
            )
        )

    def finish(self, seconds: float = PATIENCE) -> dict[str, int]:
        """Wait until everything is written, or the time is over."""
        self.writer.close(seconds)
        while not self.writer.settled:
            self.turn.wait(0.01)
        self.writer.settle()
        counts: dict[str, int] = self.health.as_data()["counts"]
        return counts


def steps_on(store: Store) -> list[int]:
    return sorted(
        int(entry.key.rsplit("/", 1)[1].split("-")[0]) for entry in store.entries("tensors/attempt/3/")
    )


def test_what_was_copied_is_read(store: Store) -> None:
    written = Written()
    for step in range(4):
        written.offer(step)
    written.offer(4, "program")
    written.writer.open(store, "attempt")
    assert written.finish()["snapshots"] == 5
    for step in range(4):
        snapshot = open_snapshot(store, f"tensors/attempt/3/{step}-train-weights.safetensors")
        assert set(snapshot.read("w")) == {float(step)}
        assert snapshot.metadata["reason"] == "cadence"
        assert snapshot.metadata["collection"] == "weights"
    snapshot = open_snapshot(store, "tensors/attempt/3/4-train.safetensors")
    assert (snapshot.metadata["reason"], snapshot.metadata["parameters"]) == ("program", "before the update")


def test_the_ring_keeps_its_bound_on_the_store(store: Store) -> None:
    written = Written(ring_bytes=15_000)
    written.writer.open(store, "attempt")
    for step in range(8):
        written.offer(step)
    assert written.finish()["rotated_snapshots"] == 5
    assert steps_on(store) == [5, 6, 7]


def test_snapshots_in_the_ring_are_retained_after_a_failure(store: Store) -> None:
    written = Written(ring_bytes=10_000)
    for step in range(3):
        written.offer(step)
    written.offer(3, "gate")
    written.writer.protect()
    for step in range(4, 8):
        written.offer(step)
    written.writer.open(store, "attempt")
    assert written.finish()["rotated_snapshots"] == 2
    assert steps_on(store) == [0, 1, 2, 3, 6, 7]


def test_each_collection_has_its_own_ring(store: Store) -> None:
    written = Written(ring_bytes=10_000)
    written.writer.limit_ring("biases", None)
    written.writer.open(store, "attempt")
    for step in range(6):
        written.offer(step)
        written.offer(step, collection="biases")
    assert written.finish()["rotated_snapshots"] == 4
    assert steps_on(store) == [0, 1, 2, 3, 4, 4, 5, 5]


def test_only_objects_on_the_store_are_reported_as_saved(folder_store: Store) -> None:
    written = Written()
    written.offer(0)
    assert not written.writer.has_saved
    written.writer.open(folder_store, "attempt")
    written.offer(1, "program")
    assert written.finish()["snapshots"] == 2
    saved = written.writer.take_saved()
    # The snapshot of the program has no row: it belongs to no collection.
    assert [(key.step, key.mode, key.worker, key.collection) for key in saved] == [(0, "train", 3, "weights")]
    assert not written.writer.has_saved
    again = Written()
    again.writer.open(folder_store, "attempt")
    again.offer(0)  # exists, from an earlier process
    again.finish()
    assert again.writer.take_saved() == []


def test_a_step_that_an_earlier_process_wrote_stays(store: Store) -> None:
    for _ in range(2):
        written = Written()
        written.writer.open(store, "attempt")
        written.offer(0)
        counts = written.finish()
    assert counts["dropped_snapshots"] == 1
    assert steps_on(store) == [0]


def test_nothing_is_written_before_the_attempt_is_claimed() -> None:
    written = Written()
    written.offer(0)
    written.offer(1)
    assert not written.writer.settled
    assert written.finish(0.0)["dropped_snapshots"] == 2


def test_a_copy_that_fails_is_counted_and_its_memory_used_again(folder_store: Store) -> None:
    def fail() -> None:
        raise RuntimeError("device lost")

    written = Written(Snapshots(memory_bytes=4 * VALUES))
    written.writer.open(folder_store, "attempt")
    written.offer(0, ready=fail)
    counts = written.finish()
    assert counts["dropped_snapshots"] == 1
    assert "device lost" in written.health.as_data()["faults"]["snapshot"]
    assert written.writer.memory.available == 4 * VALUES


class RefusingStore(Store):
    """Refuses so many times, and counts the refusals."""

    def __init__(self, store: Store, times: int) -> None:
        super().__init__(store.url, store._backend)
        self.left = times
        self.refused = threading.Event()

    def create_in_parts(self, key: str, size: int, parts: Any) -> bool:
        if self.left:
            self.left -= 1
            self.refused.set()
            raise StoreError("store: down", "wait")
        return super().create_in_parts(key, size, parts)


def test_a_store_that_returns(folder_store: Store) -> None:
    store = RefusingStore(folder_store, 2)
    written = Written()
    written.writer.open(store, "attempt")
    written.offer(0)
    written.offer(1)
    assert written.finish()["snapshots"] == 2
    assert steps_on(store) == [0, 1]


def test_a_store_that_stays_away_is_given_up_when_the_time_is_over(folder_store: Store) -> None:
    store = RefusingStore(folder_store, 10**9)
    written = Written()
    written.writer.open(store, "attempt")
    written.offer(0)
    assert store.refused.wait(PATIENCE)
    assert written.finish(0.0)["dropped_snapshots"] == 1
    assert steps_on(folder_store) == []
