"""Full tensors of collections: which steps are saved, the first tensor of a step, limits, and what is left out as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from watchstep import Cadence, CaptureConfig, Collection, Snapshots, TensorLimits
from watchstep.capture.health import RecorderHealth
from watchstep.capture.needs import with_tensors
from watchstep.capture.schedule import Schedule
from watchstep.capture.tensors.collections import CHUNK_BYTES, DueTensor, TensorCapture
from watchstep.capture.tensors.snapshots import SnapshotWriter
from watchstep.errors import ConfigError
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.layout import SnapshotKey
from watchstep.format.snapshot import Snapshot, infos_of, open_snapshot
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.store.store import Store

DEADLINE = 30.0
EVERY = Collection(None, tensors=Cadence())


class Capturing:
    """A capture with a clock of its own, whose objects are written to a store."""

    def __init__(self, collections: Mapping[str, Collection], memory_bytes: int = 2**26) -> None:
        config = CaptureConfig(collections=dict(collections), snapshots=Snapshots(memory_bytes=memory_bytes))
        self.now = 0.0
        self.health = RecorderHealth()
        self.schedule = Schedule(config, self.health)
        self.writer = SnapshotWriter(config.snapshots, 0, self.health)
        self.capture = TensorCapture(config, self.schedule, self.writer, self.health, lambda: self.now)
        self._turn = threading.Event()

    def add(
        self,
        name: str,
        values: Any,
        step: int,
        collections: tuple[str, ...] = ("mine",),
        mode: Mode = "train",
    ) -> bool:
        """Add float32 values if they are due. Returns whether they were copied."""
        array = np.asarray(values, "<f4")
        collection = self.capture.due(collections, step, mode)
        if collection is None:
            return False
        due = DueTensor(TensorInfo(name, collections, "custom"), "F32", array.shape)
        return self.capture.add(collection, step, mode, due, copying(array))

    def settle(self) -> None:
        """Wait until everything handed over is written."""
        while not self.writer.settled:
            self._turn.wait(0.001)

    def finish(self, store: Store, seconds: float = DEADLINE) -> dict[tuple[int, str, str], Snapshot]:
        """Write what was handed over. Returns the objects by step, mode and collection."""
        self.writer.open(store, "a")
        self.writer.close(seconds)
        self.settle()
        self.writer.settle()
        keys = [SnapshotKey.parse(entry.key) for entry in store.entries("tensors/")]
        return {(key.step, key.mode, key.collection): open_snapshot(store, key.path) for key in keys}

    @property
    def dropped(self) -> int:
        """Number of tensors that were left out."""
        count: int = self.health.as_data()["counts"].get("dropped_tensors", 0)
        return count

    def note(self, collection: str = "mine") -> str:
        """What health says about a collection's tensors."""
        text: str = self.health.as_data()["notes"].get(f"tensors of {collection}", "")
        return text


def copying(array: NDArray[Any]) -> Callable[[NDArray[np.uint8]], None]:
    return lambda memory: np.copyto(memory, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def contents(snapshot: Snapshot) -> dict[str, list[float]]:
    return {name: snapshot.values(name).tolist() for name in snapshot.tensors}


def test_one_object_for_each_step_mode_and_collection(folder_store: Store) -> None:
    capturing = Capturing({"mine": EVERY, "other": Collection(None, tensors=Cadence(2))})
    for step in range(3):
        capturing.add("a", [step, 1], step)
        capturing.add("b", [step], step, ("other",))
        capturing.capture.hand_over()
    capturing.add("a", [9], 2, mode="eval")
    capturing.capture.hand_over()
    objects = capturing.finish(folder_store)
    assert {key: contents(snapshot) for key, snapshot in objects.items()} == {
        (0, "train", "mine"): {"a": [0, 1]},
        (1, "train", "mine"): {"a": [1, 1]},
        (2, "train", "mine"): {"a": [2, 1]},
        (0, "train", "other"): {"b": [0]},
        (2, "train", "other"): {"b": [2]},
        (2, "eval", "mine"): {"a": [9]},
    }
    snapshot = objects[0, "train", "mine"]
    assert snapshot.metadata["reason"] == "cadence"
    assert snapshot.metadata["collection"] == "mine"
    assert infos_of(snapshot)["a"].collections == ("mine",)


def test_single_steps_without_a_cadence(folder_store: Store) -> None:
    capturing = Capturing({"mine": Collection(None, tensors=Cadence(None, steps=(1, 4)))})
    for step in range(6):
        capturing.add("a", [step], step)
        capturing.capture.hand_over()
    assert [step for step, _, _ in sorted(capturing.finish(folder_store))] == [1, 4]


def test_tensors_that_are_saved_at_no_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="saved at no step"):
        Collection(tensors=Cadence(None))


@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.none() | st.integers(0, 20),
    st.sets(st.integers(0, 20), max_size=3),
    st.sets(st.sampled_from(["train", "eval"])),
)
def test_steps_of_a_cadence(
    every: int, start: int, stop: int | None, steps: set[int], modes: set[Mode]
) -> None:
    cadence = Cadence(every, start, stop, tuple(steps), tuple(modes))
    capture = Capturing({"mine": Collection(None, tensors=cadence)}).capture
    end = 10**6 if stop is None else stop
    expected = {step for step in range(20) if step in steps or step in range(start, end, every)}
    if modes and "train" not in modes:
        expected = set()
    assert {step for step in range(20) if capture.due(("mine",), step)} == expected


def test_in_other_modes_passes_are_counted(folder_store: Store) -> None:
    capturing = Capturing({"mine": Collection(None, tensors=Cadence(2, modes=("eval",)))})
    number = 0
    for step in (10, 20, 30):
        assert capturing.capture.due(("mine",), step) is None  # not in mode train
        for _ in range(3):
            capturing.schedule.forward("eval", step)
            capturing.add("a", [number], step, mode="eval")
            number += 1
        capturing.capture.hand_over()
    objects = capturing.finish(folder_store)
    # Passes 0, 2, 4, 6 and 8 are due; the first of each evaluation is saved.
    assert {key: contents(snapshot)["a"] for key, snapshot in objects.items()} == {
        (10, "eval", "mine"): [0],
        (20, "eval", "mine"): [4],
        (30, "eval", "mine"): [6],
    }


def test_in_a_mode_without_passes_steps_are_counted(folder_store: Store) -> None:
    capturing = Capturing({"mine": Collection(None, tensors=Cadence(10))})
    for step in range(25):
        capturing.add("a", [step], step, mode="global")
        capturing.capture.hand_over()
    assert [step for step, _, _ in sorted(capturing.finish(folder_store))] == [0, 10, 20]


def test_of_micro_batches_the_first_is_saved(folder_store: Store) -> None:
    capturing = Capturing({"mine": EVERY})
    assert capturing.add("a", [1], 0)
    assert not capturing.add("a", [2], 0)
    assert capturing.add("b", [3], 0)
    capturing.capture.hand_over()
    assert contents(capturing.finish(folder_store)[0, "train", "mine"]) == {"a": [1], "b": [3]}
    assert capturing.dropped == 0


def test_a_step_that_is_handed_over_again_keeps_its_first_object(folder_store: Store) -> None:
    capturing = Capturing({"mine": EVERY, "other": EVERY})
    capturing.add("a", [1], 0)
    assert capturing.capture.hand_over()
    assert not capturing.add("a", [2], 0)
    assert capturing.add("b", [3], 0, ("other",))
    assert capturing.capture.hand_over()
    assert not capturing.capture.hand_over()
    assert capturing.add("a", [4], 1)
    capturing.capture.hand_over()
    objects = capturing.finish(folder_store)
    assert contents(objects[0, "train", "mine"]) == {"a": [1]}
    assert contents(objects[0, "train", "other"]) == {"b": [3]}
    assert contents(objects[1, "train", "mine"]) == {"a": [4]}
    assert "dropped_snapshots" not in capturing.health.as_data()["counts"]


def test_a_tensor_in_two_due_collections_is_saved_once(folder_store: Store) -> None:
    capturing = Capturing({"mine": EVERY, "other": Collection(None, tensors=Cadence(2))})
    for step in range(2):
        capturing.add("a", [step], step, ("other", "mine"))
        capturing.add("a", [step], step, ("mine",))
        capturing.capture.hand_over()
    objects = capturing.finish(folder_store)
    assert set(objects) == {(0, "train", "other"), (1, "train", "mine")}


def number(capturing: Capturing, name: str, value: float, step: int = 0, **options: bool) -> None:
    info = TensorInfo(name, ("losses",), "loss", dtype="float64")
    capturing.capture.add_number(info, value, step, "train", **options)


def test_a_logged_loss_replaces_one_that_was_observed(folder_store: Store) -> None:
    capturing = Capturing({"losses": EVERY})
    number(capturing, "loss", 0.25, derived=True)
    number(capturing, "loss", 0.5, derived=True)  # of the second micro-batch
    number(capturing, "loss", 1.0)
    number(capturing, "loss", 2.0)
    number(capturing, "loss", 3.0, derived=True)
    number(capturing, "sum", 1.0, derived=True, replaces=True)
    number(capturing, "sum", 3.0, derived=True, replaces=True)
    capturing.capture.hand_over()
    objects = capturing.finish(folder_store)
    assert {name: objects[0, "train", "losses"].read(name).item() for name in ("loss", "sum")} == {
        "loss": 1.0,
        "sum": 3.0,
    }


def test_a_tensor_beyond_the_memory_is_left_out_as_a_whole(folder_store: Store) -> None:
    capturing = Capturing({"mine": EVERY}, memory_bytes=10_000)
    assert capturing.add("small", np.ones(100), 0)
    assert not capturing.add("large", np.ones(2_600), 0)
    assert not capturing.add("large", np.ones(1), 0)  # of the next micro-batch
    assert capturing.add("other", np.ones(1_000), 0)
    capturing.capture.hand_over()
    snapshot = capturing.finish(folder_store)[0, "train", "mine"]
    assert set(snapshot.tensors) == {"small", "other"}
    assert (snapshot.missing, snapshot.missing_names) == (1, ("large",))
    assert capturing.dropped == 1
    assert capturing.note() == "large did not fit into the memory for tensors"


@pytest.mark.parametrize("memory", [64, 1000, 4096, 5000, CHUNK_BYTES, 3 * CHUNK_BYTES])
def test_any_size_of_memory_is_used(folder_store: Store, memory: int) -> None:
    capturing = Capturing({"mine": EVERY}, memory_bytes=memory)
    for step in range(3):
        assert capturing.add("a", np.full(16, step), step)
        capturing.capture.hand_over()
        capturing.writer.open(folder_store, "a")
        capturing.settle()
    assert len(capturing.finish(folder_store)) == 3


@given(st.lists(st.lists(st.integers(0, 3_000_000), max_size=5), max_size=6), st.integers(0, 12_000_000))
def test_memory_never_exceeds_its_limit(steps: list[list[int]], limit: int) -> None:
    capturing = Capturing({"mine": EVERY, "other": EVERY}, memory_bytes=limit)
    taken: list[int] = []
    memory = capturing.writer.memory
    for step, sizes in enumerate(steps):
        for place, size in enumerate(sizes):
            collection = "mine" if place % 2 else "other"
            due = DueTensor(TensorInfo(f"t{place}", (collection,), "custom"), "U8", (size,))
            if capturing.capture.add(
                collection, step, "train", due, lambda memory: taken.append(len(memory))
            ):
                assert size == 0 or taken[-1] == size
        capturing.capture.hand_over()
        assert memory.available >= 0
        assert limit - memory.available >= sum(taken)
    assert sum(taken) <= limit
    capturing.writer.settle()


def test_steps_of_one_size_reuse_their_memory(folder_store: Store) -> None:
    capturing = Capturing({"mine": EVERY})
    capturing.writer.open(folder_store, "a")
    allocated: list[int] = []
    plain = capturing.writer.memory.allocate

    def allocate(size: int) -> NDArray[np.uint8]:
        allocated.append(size)
        return plain(size)

    capturing.writer.memory.allocate = allocate
    for step in range(12):
        for place in range(5):
            capturing.add(f"t{place}", np.full(300_000 + place, step), step)
        capturing.capture.hand_over()
        capturing.settle()
        if step == 1:
            allocated.clear()  # the first step does not know the size
    assert allocated == []
    assert len(capturing.finish(folder_store)) == 12


def test_bytes_of_an_hour(folder_store: Store) -> None:
    limits = TensorLimits(hour_bytes=1_000)
    capturing = Capturing({"mine": Collection(None, tensors=Cadence(), tensor_limits=limits), "other": EVERY})
    saved = []
    for step in range(80):
        capturing.now = 60.0 * step
        if capturing.add("a", np.ones(100), step):
            saved.append(step)
        assert capturing.add("b", np.ones(100), step, ("other",))
        capturing.capture.hand_over()
    # 400 bytes each: two fit into an hour, and the next two from the time that the first is an hour old.
    assert saved == [0, 1, 60, 61]
    objects = capturing.finish(folder_store)
    assert objects[2, "train", "mine"].missing_names == ("a",)
    assert capturing.note() == "a exceeded the bytes of an hour"
    assert capturing.dropped == 76


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 400)), max_size=40))
def test_no_hour_exceeds_its_bytes(steps: list[tuple[int, int]]) -> None:
    limit = 1_000
    collection = Collection(None, tensors=Cadence(), tensor_limits=TensorLimits(hour_bytes=limit))
    capturing = Capturing({"mine": collection})
    saved: list[tuple[float, int]] = []
    for step, (seconds, size) in enumerate(steps):
        capturing.now += seconds
        fits = size + sum(before for at, before in saved if at > capturing.now - 3610) <= limit
        due = DueTensor(TensorInfo("a", ("mine",), "custom"), "U8", (size,))
        added = capturing.capture.add("mine", step, "train", due, lambda memory: None)
        assert added or not fits
        if added:
            saved.append((capturing.now, size))
        within = [size for at, size in saved if at > capturing.now - 3600]
        assert sum(within) <= limit
        capturing.capture.hand_over()
    capturing.writer.settle()


def test_a_tensor_that_cannot_be_copied_is_left_out_and_its_bytes_do_not_count(folder_store: Store) -> None:
    limits = TensorLimits(hour_bytes=500)
    capturing = Capturing({"mine": Collection(None, tensors=Cadence(), tensor_limits=limits)})

    def fail(_: NDArray[np.uint8]) -> None:
        raise RuntimeError("gone")

    due = DueTensor(TensorInfo("bad", ("mine",), "custom"), "F32", (100,))
    assert not capturing.capture.add("mine", 0, "train", due, fail)
    assert capturing.add("good", np.ones(100), 0)
    capturing.capture.hand_over()
    snapshot = capturing.finish(folder_store)[0, "train", "mine"]
    assert set(snapshot.tensors) == {"good"}
    assert snapshot.missing_names == ("bad",)
    assert capturing.note() == "bad could not be copied (RuntimeError)"
    assert capturing.health.as_data()["faults"] == {}


def test_many_left_out_tensors_are_counted_and_the_first_are_named(folder_store: Store) -> None:
    capturing = Capturing({"mine": EVERY}, memory_bytes=0)
    for step in range(2):
        for place in range(20):
            capturing.add(f"t{place}", [1], step)
        capturing.capture.hand_over()
    assert capturing.dropped == 40
    assert capturing.note() == "t0, t1, t2, t3, t4, … did not fit into the memory for tensors"
    objects = capturing.finish(folder_store)
    assert objects[1, "train", "mine"].missing == 20
    assert objects[1, "train", "mine"].tensors == {}


def test_each_collection_has_a_ring_that_is_kept_after_something_went_wrong(folder_store: Store) -> None:
    ring = Collection(None, tensors=Cadence(), tensor_limits=TensorLimits(ring_bytes=1_500))
    capturing = Capturing({"mine": ring, "other": EVERY})
    capturing.writer.open(folder_store, "a")
    for step in range(12):
        capturing.add("a", np.ones(100), step)  # an object of some 700 bytes: two are in the ring
        capturing.add("b", np.ones(100), step, ("other",))
        if step == 6:
            capturing.writer.protect()
            capturing.capture.protect(step)
        capturing.capture.hand_over()
        capturing.settle()
    objects = capturing.finish(folder_store)
    assert {step for step, _, collection in objects if collection == "mine"} == {4, 5, 6, 10, 11}
    assert {step for step, _, collection in objects if collection == "other"} == set(range(12))


def test_collections_may_change_while_they_are_saved(folder_store: Store) -> None:
    """A control document arrives between the decision that a tensor is due and its copy."""
    configured = {"mine": Collection(), "other": EVERY}
    capturing = Capturing(configured)
    capture = capturing.capture
    assert capture.due(("mine",), 0) is None
    need = CaptureNeed("r", ("mine",), every=2)
    capture.configure(with_tensors(configured, [need]))
    capturing.add("a", [0], 0)
    collection = capture.due(("mine",), 0)
    assert collection is not None
    capture.configure(configured)
    assert capture.limits(collection) == TensorLimits()
    due = DueTensor(TensorInfo("b", ("mine",), "custom"), "F32", (1,))
    assert capture.add(collection, 0, "train", due, copying(np.ones(1, "<f4")))
    capture.hand_over()
    assert capture.due(("mine",), 2) is None
    capture.configure({})
    assert not capture.active
    capture.configure(with_tensors(configured, [need]))
    capturing.add("a", [2], 2)
    capture.hand_over()
    objects = capturing.finish(folder_store)
    assert {key: set(snapshot.tensors) for key, snapshot in objects.items()} == {
        (0, "train", "mine"): {"a", "b"},
        (2, "train", "mine"): {"a"},
    }


def test_configuring_on_another_thread_loses_no_tensor(folder_store: Store) -> None:
    configured = {"mine": EVERY, "other": Collection()}
    capturing = Capturing(configured)
    capturing.writer.open(folder_store, "a")
    stop = threading.Event()

    def change() -> None:
        needs = [CaptureNeed("r", ("other",), every=1)]
        while not stop.is_set():
            capturing.capture.configure(with_tensors(configured, needs))
            capturing.capture.configure(configured)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for step in range(200):
            assert capturing.add("a", [step], step)
            capturing.add("b", [step], step, ("other",))
            capturing.capture.hand_over()
    finally:
        stop.set()
        thread.join()
    objects = capturing.finish(folder_store)
    assert {step for step, _, collection in objects if collection == "mine"} == set(range(200))
    assert capturing.health.as_data()["faults"] == {}


modes = st.sets(st.sampled_from(["train", "eval", "predict"])).map(tuple)


@given(
    st.none() | st.builds(Cadence, st.integers(1, 6), steps=st.tuples(st.integers(0, 30)), modes=modes),
    st.lists(st.builds(CaptureNeed, st.just("r"), st.just(("mine",)), every=st.integers(0, 6), modes=modes)),
)
def test_needs_of_rules_are_added_to_what_the_program_saves(
    own: Cadence | None, needs: list[CaptureNeed]
) -> None:
    (combined,) = with_tensors({"mine": Collection(tensors=own)}, needs).values()
    requested = [Cadence(need.every, modes=need.modes) for need in needs if need.every]
    cadences = [*requested, *([own] if own is not None else [])]
    if not cadences:
        assert combined.tensors is None
        return
    assert combined.tensors is not None
    assert combined.tensors.every == min(cadence.every or 1 for cadence in cadences)
    for mode in ("train", "eval", "predict"):
        assert combined.tensors.applies_in(mode) == any(cadence.applies_in(mode) for cadence in cadences)
    assert own is None or set(own.steps) <= set(combined.tensors.steps)


@pytest.mark.ci
@pytest.mark.parametrize(("names", "written"), [(1, 1_000), (2_000, 10)])
def test_objects_that_wait_for_the_store_are_limited_in_number(
    folder_store: Store, names: int, written: int
) -> None:
    capturing = Capturing({"mine": EVERY})
    for step in range(written + 50):
        for place in range(names):
            capturing.add(f"t{place}", np.ones(0), step)
        capturing.capture.hand_over()
    objects = capturing.finish(folder_store)
    assert set(objects) == {(step, "train", "mine") for step in range(written)}
    assert capturing.health.as_data()["counts"]["dropped_snapshots"] == 50
    assert capturing.writer.memory.available == capturing.writer.memory.limit


class HangingStore(Store):
    """Answers no write until it is released."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.url, store._backend)
        self.called, self.released = threading.Event(), threading.Event()

    def create_in_parts(self, key: str, size: int, parts: Any) -> bool:
        self.called.set()
        self.released.wait(DEADLINE)
        return super().create_in_parts(key, size, parts)


def test_a_store_that_hangs_delays_nothing_and_memory_stays_within_its_limit(folder_store: Store) -> None:
    store = HangingStore(folder_store)
    limit = 1_000_000
    capturing = Capturing({"mine": EVERY}, memory_bytes=limit)
    capturing.writer.open(store, "a")
    copied = 0
    for step in range(300):
        if capturing.add("a", np.ones(25_000), step):
            copied += 1
        capturing.capture.hand_over()
        assert capturing.writer.memory.available >= 0
    assert store.called.wait(DEADLINE)
    assert copied * 100_000 <= limit
    assert capturing.dropped == 300 - copied
    store.released.set()
    capturing.settle()
    objects = capturing.finish(folder_store)
    assert sum("a" in snapshot.tensors for snapshot in objects.values()) == copied
    assert capturing.writer.memory.available == limit
