"""Snapshots and bundles: when they are taken, what fits into memory, and that they are written whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from watchstep import Snapshots
from watchstep.capture.config import Bundles
from watchstep.capture.health import RecorderHealth
from watchstep.capture.tensors.bundle_plan import LATE, BundleOccasion, BundlePlan
from watchstep.capture.tensors.snapshots import (
    MAX_BY_REQUEST,
    Occasion,
    Reason,
    SnapshotMemory,
    SnapshotPlan,
    SnapshotRing,
    SnapshotWriter,
    TakenSnapshot,
    fitting,
)
from watchstep.errors import ConfigError, StoreError
from watchstep.format.snapshot import Described, open_snapshot
from watchstep.store.store import Store


def taken(plan: SnapshotPlan, steps: range, bad: Collection[int] = ()) -> dict[int, Occasion]:
    found = {}
    for step in steps:
        if step in bad:
            plan.bad(step)
        occasion = plan.due(step)
        if occasion is not None:
            found[step] = occasion
    return found


def test_the_gate_takes_the_first_of_a_run_of_bad_steps_and_two_at_most() -> None:
    bad = {3, 4, 5, 6, 10, 11, 20, 30}
    assert taken(SnapshotPlan(Snapshots()), range(40), bad) == dict.fromkeys([3, 10], Occasion("gate"))


def test_the_gate_can_be_left_out() -> None:
    plan = SnapshotPlan(Snapshots(at_gate=False))
    assert plan.bad(3)
    assert taken(plan, range(3, 8), {4, 7}) == {}


def test_a_step_is_taken_once_however_many_optimizers_update_it() -> None:
    plan = SnapshotPlan(Snapshots())
    plan.request_next()
    assert plan.due(0) == Occasion("program")
    plan.request_next()
    assert plan.due(0) is None
    assert plan.due(1) == Occasion("program")
    assert plan.due(2) is None


def test_a_request_is_answered_once_at_its_step_or_the_next() -> None:
    plan = SnapshotPlan(Snapshots())
    assert plan.request("a", 5)
    assert plan.request("b", 2)
    assert plan.request("c", 2)
    found = taken(plan, range(4))
    assert found == {2: Occasion("request", ("b", "c"))}
    assert not plan.request("a", 5)
    assert not plan.request("b", 6)
    assert plan.request("late", 1)
    assert taken(plan, range(4, 10)) == {
        4: Occasion("request", ("late",)),
        5: Occasion("request", ("a",)),
    }


def test_requests_beyond_a_limit_are_refused_and_counted_once() -> None:
    health = RecorderHealth()
    plan = SnapshotPlan(Snapshots(), health)
    assert all(plan.request(f"a{number}", number) for number in range(MAX_BY_REQUEST))
    assert not any(plan.request(f"b{number % 8}", number) for number in range(24))
    assert health.counted()["counts"] == {"refused_snapshots": 8}
    assert not plan.request("a0", 0)
    assert len(taken(plan, range(100))) == MAX_BY_REQUEST


def test_the_rarer_reason_counts_and_a_request_stays_answered() -> None:
    plan = SnapshotPlan(Snapshots())
    plan.request("a", 0)
    plan.request_next()
    plan.bad(0)
    assert taken(plan, range(3)) == {0: Occasion("gate", ("a",))}


def test_a_wrong_setting_is_reported() -> None:
    with pytest.raises(ConfigError, match="Snapshots\\(memory_bytes=-1"):
        Snapshots(memory_bytes=-1)


@given(st.lists(st.integers(0, 20)), st.integers(0, 60))
def test_what_fits_is_within_the_bound_and_nothing_that_fits_is_omitted(
    sizes: list[int], available: int
) -> None:
    chosen = fitting(sizes, available)
    left = available - sum(sizes[place] for place in chosen)
    assert chosen == sorted(set(chosen))
    assert left >= 0
    assert all(sizes[place] > left for place in set(range(len(sizes))) - set(chosen))


@given(st.lists(st.tuples(st.integers(1, 120), st.booleans()), max_size=20))
def test_memory_stays_within_its_bound_and_is_used_again(acts: list[tuple[int, bool]]) -> None:
    memory, taken_count = SnapshotMemory(200), 0
    buffers: list[NDArray[np.uint8]] = []
    plain = memory.allocate

    def counted(size: int) -> NDArray[np.uint8]:
        nonlocal taken_count
        taken_count += 1
        return plain(size)

    memory.allocate = counted
    for size, give in acts:
        if give and buffers:
            memory.release(buffers.pop())
        before, fits = taken_count, size <= memory.available
        buffer = memory.take(size)
        assert (buffer is not None) == fits
        if buffer is not None:
            assert len(buffer) >= size
            buffers.append(buffer)
            assert taken_count - before in {0, 1}
        assert sum(map(len, buffers)) + memory.available == 200
    for buffer in buffers:
        memory.release(buffer)
    if buffers:
        before = taken_count
        memory.take(len(buffers[-1]))
        assert taken_count == before


def test_memory_starts_at_a_page_and_a_large_buffer_is_not_spent_on_little() -> None:
    memory = SnapshotMemory(10_000)
    large = memory.take(8_000)
    assert large is not None
    assert large.ctypes.data % 4096 == 0
    memory.release(large)
    small = memory.take(1_000)
    assert small is not None
    assert len(small) == 1_000
    again = memory.take(8_000)
    assert again is large
    assert memory.take(1_001) is None
    memory.release(again)
    assert memory.take(1_001) is large  # there is no room for a new buffer


def test_a_ring_drops_the_oldest_and_never_the_newest() -> None:
    ring = SnapshotRing(10)
    assert [ring.add(name, 4) for name in "abcd"] == [[], [], ["a"], ["b"]]
    assert ring.add("large", 100) == ["c", "d"]
    ring.protect()
    assert ring.add("e", 9) == []
    assert ring.add("f", 9) == ["e"]


def test_a_ring_without_a_bound_keeps_all() -> None:
    ring = SnapshotRing(None)
    assert [ring.add(str(n), 1000) for n in range(5)] == [[]] * 5


def bundle_plan() -> BundlePlan:
    return BundlePlan(Bundles(), RecorderHealth())


def test_a_failing_step_is_bundled_also_if_it_is_incomplete() -> None:
    bundles = bundle_plan()
    bundles.bad(3)
    assert bundles.is_pending
    assert bundles.due(3, is_complete=False) == BundleOccasion("gate")
    assert not bundles.is_pending


def test_no_other_step_is_called_the_failing_one() -> None:
    bundles = bundle_plan()
    bundles.bad(3)
    assert bundles.due(4, is_complete=False) is None
    assert bundles.due(5, is_complete=True) == BundleOccasion("alert", (LATE,))
    assert not bundles.is_pending


def test_a_failing_step_without_an_update_does_not_use_up_the_two_of_the_gate() -> None:
    bundles = bundle_plan()
    taken = []
    for step in range(0, 60, 10):
        bundles.bad(step)
        taken.append(bundles.due(step + 1, is_complete=True))
    assert taken == [BundleOccasion("alert", (LATE,))] * 2 + [None] * 4
    for step in (100, 110, 120):
        bundles.bad(step)
        taken.append(bundles.due(step, is_complete=True))
    assert taken[-3:] == [BundleOccasion("gate"), BundleOccasion("gate"), None]


def test_a_late_result_of_a_device_does_not_claim_that_its_step_failed() -> None:
    bundles = bundle_plan()
    bundles.bad(7, is_late=True)
    assert bundles.due(7, is_complete=False) is None
    assert bundles.due(8, is_complete=True) == BundleOccasion("alert", (LATE,))
    bundles.bad(20)
    assert bundles.due(20, is_complete=True) == BundleOccasion("gate")


VALUES = 1000
PATIENCE = 30.0


class Written:
    """A writer of the objects of a collection, and its health."""

    def __init__(
        self, config: Snapshots | None = None, ring_bytes: int | None = None, store: Store | None = None
    ) -> None:
        self.health = RecorderHealth()
        self.writer = SnapshotWriter(config or Snapshots(), 3, self.health)
        self.writer.limit_ring("weights", ring_bytes)
        self.turn = threading.Event()
        if store is not None:
            self.writer.open(store, "attempt")

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


def test_a_program_that_ends_needs_no_new_thread(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(store=store)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr("threading._start_new_thread", refuse)
    monkeypatch.setattr("threading._start_joinable_thread", refuse, raising=False)
    written.offer(0)
    assert written.finish()["snapshots"] == 1


def test_without_a_thread_snapshots_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading._start_new_thread", refuse)
    monkeypatch.setattr("threading._start_joinable_thread", refuse, raising=False)
    available = written.writer.memory.available
    written.offer(0)
    assert written.finish(0.0)["dropped_snapshots"] == 1
    assert written.writer.memory.available == available


def test_the_ring_keeps_its_bound_on_the_store(store: Store) -> None:
    written = Written(ring_bytes=15_000, store=store)
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

    written = Written(Snapshots(memory_bytes=4 * VALUES), store=folder_store)
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
    written = Written(store=store)
    written.offer(0)
    written.offer(1)
    assert written.finish()["snapshots"] == 2
    assert steps_on(store) == [0, 1]


def test_a_store_that_stays_away_is_given_up_when_the_time_is_over(folder_store: Store) -> None:
    store = RefusingStore(folder_store, 10**9)
    written = Written(store=store)
    written.offer(0)
    assert store.refused.wait(PATIENCE)
    assert written.finish(0.0)["dropped_snapshots"] == 1
    assert steps_on(folder_store) == []
