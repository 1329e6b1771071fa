"""Full tensors: whole, in slices, merged from shards, in each framework, and what is reported where they are missing or damaged."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tests
from tests.laws import examples
from tests.processes import run_python
from tests.sdk.format.blocks import block_of
from tests.sdk.reading.saved import claim, save, save_shards
from tests.sdk.reading.stored import FIRST, SECOND, new_run, some_rows, write
from watchstep import Run, open_run
from watchstep.errors import ConfigError, FormatError, NotFoundError, StoreError
from watchstep.format import documents
from watchstep.format.layout import RUN_DOCUMENT, SnapshotKey
from watchstep.format.snapshot import TensorPart
from watchstep.reading.saved import saved_tensor
from watchstep.store.store import ObjectEntry, Store

WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)


def key(step: int = 0, worker: int = 0, mode: str = "train", collection: str = "weights") -> SnapshotKey:
    return SnapshotKey("a", worker, step, mode, collection)


class MemoryStore(Store):
    """Objects in memory, a count of the bytes that were read, and the lengths of the ranges."""

    def __init__(self) -> None:
        super().__init__("memory:", None)
        self.objects: dict[str, bytes] = {}
        self.ranges: list[int] = []
        self.lists = 0
        self.put(RUN_DOCUMENT, documents.encode(documents.RunDocument("default", "r", 1)))

    def put(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    def entries(self, prefix: str = "") -> Iterator[ObjectEntry]:
        self.lists += prefix == "tensors/"
        for key, data in list(self.objects.items()):
            if key.startswith(prefix):
                yield ObjectEntry(key, len(data))

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        if key not in self.objects:
            raise NotFoundError(f"{key} does not exist", "none")
        return self.objects[key]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self.get(key)[start : start + length]
        self.ranges.append(len(data))
        return data


def opened(store: Store) -> Run:
    return open_run(store)


@st.composite
def boxes(draw: st.DrawFn, workers: int) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """A shape, and disjoint boxes that make it up, one for each worker; some may be empty."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    cut: list[tuple[slice, ...]] = [tuple(slice(0, size) for size in shape)]
    while len(cut) < workers:
        box = cut.pop(draw(st.integers(0, len(cut) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        middle = draw(st.integers(box[axis].start, box[axis].stop))
        halves = slice(box[axis].start, middle), slice(middle, box[axis].stop)
        cut.extend((*box[:axis], half, *box[axis + 1 :]) for half in halves)
    return shape, draw(st.permutations(cut))


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    entries: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if size and draw(st.booleans()):
            entries.append(draw(st.integers(-size, size - 1)))
        else:
            entries.append(draw(st.slices(size)))
    if draw(st.booleans()):
        entries.insert(draw(st.integers(0, len(entries))), ...)
        if entries.index(...) < len(entries) - 1:
            entries = entries[: entries.index(...) + 1]
    return tuple(entries) if len(entries) != 1 or draw(st.booleans()) else entries[0]


@pytest.mark.ci
@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from(["<f4", "<i2", "?", "<c8"]), st.integers(1, 3))
def test_a_slice_equals_that_of_the_whole_array(data: st.DataObject, dtype: str, workers: int) -> None:
    shape, parts = data.draw(boxes(workers))
    whole = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    store = MemoryStore()
    save_shards(store, "w", whole, parts)
    tensor = opened(store).tensor("w").saved(0)
    assert (tensor.shape, len(tensor.workers), tensor.nbytes) == (
        shape,
        len(set(map(str, parts))),
        whole.nbytes,
    )
    # With small limits, a slice of a small tensor is read like that of a large one: in chunks, and without the gaps.
    chunk, gap = data.draw(st.sampled_from([(2**23, 2**16), (40, 8), (1, 1)]))
    with (
        mock.patch.object(saved_tensor, "_CHUNK", chunk),
        mock.patch.object(saved_tensor, "_GAP", gap),
    ):
        for _ in range(3):
            index = data.draw(indices(shape))
            assert_same(tensor[index], whole[index])
            assert_same(tensor.torch(index).numpy(), np.asarray(whole[index]))


def assert_same(read: Any, expected: Any) -> None:
    assert np.shape(read) == np.shape(expected)
    assert np.asarray(read).dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(read, expected)


def test_uneven_and_empty_shards_of_three_workers_are_merged(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    whole = np.arange(35, dtype=np.int64).reshape(7, 5)
    rows = [slice(0, 3), slice(3, 7), slice(7, 7)]
    save_shards(store, "w", whole, [(part, slice(0, 5)) for part in rows])
    tensor = open_run(tmp_path / "default" / "r").tensor("w")
    np.testing.assert_array_equal(tensor.value(0), whole)
    for worker, part in enumerate(rows):
        own = tensor.saved(0, worker=worker)
        np.testing.assert_array_equal(own.numpy(), whole[part])
        assert own.part == TensorPart((7, 5), (part.start, 0), is_shard=True)
        assert own.workers == [worker]
    assert tensor.saved(0).part is None
    assert tensor.shape(0) == (7, 5)
    assert tensor.shape(0, worker=1) == (4, 5)


def test_shards_over_two_dimensions_and_of_replicas_are_merged() -> None:
    store = MemoryStore()
    columns = [(slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 6))]
    save_shards(store, "w", WEIGHT, [*columns, *columns])
    tensor = opened(store).tensor("w").saved(0)
    np.testing.assert_array_equal(tensor.numpy(), WEIGHT)
    assert tensor.workers == [0, 1]


def test_a_slice_reads_only_the_shards_that_it_touches_and_only_their_bytes() -> None:
    store = MemoryStore()
    whole = np.random.default_rng(0).standard_normal((4000, 100)).astype(np.float32)
    save_shards(store, "w", whole, [(slice(n * 1000, n * 1000 + 1000), slice(0, 100)) for n in range(4)])
    tensor = opened(store).tensor("w").saved(0)
    store.ranges.clear()
    np.testing.assert_array_equal(tensor[1990:2010], whole[1990:2010])
    assert sorted(store.ranges) == [4000, 4000]
    store.ranges.clear()
    np.testing.assert_array_equal(tensor[3999], whole[3999])
    assert store.ranges == [400]
    store.ranges.clear()
    np.testing.assert_array_equal(tensor[::1000, 1:3], whole[::1000, 1:3])
    assert store.ranges == [8] * 4


def test_a_missing_shard_is_reported_with_its_worker_and_elements() -> None:
    store = MemoryStore()
    claim(store, "a", workers=4)
    save_shards(store, "w", WEIGHT, [(slice(0, 2), slice(0, 6)), (slice(2, 3), slice(0, 6))])
    tensor = opened(store).tensor("w")
    with pytest.raises(
        NotFoundError, match=r"elements \[3:4, 0:6\] of shape \(4, 6\).*workers 2, 3"
    ) as caught:
        tensor.value(0)
    assert "worker=" in caught.value.hint
    np.testing.assert_array_equal(tensor.value(0, worker=1), WEIGHT[2:3])
    store.put(key(worker=2).path, b"\xff" * 64)
    with pytest.raises(NotFoundError, match=r"0-train-weights\.safetensors claims a header"):
        tensor.value(0)


def test_shards_that_contradict_each_other_are_refused() -> None:
    for boxes, says in (
        ([(slice(0, 3), slice(0, 6)), (slice(2, 4), slice(0, 6))], "workers 0 and 1 overlap"),
        ([(slice(0, 2), slice(0, 6))], "different tensors"),
    ):
        store = MemoryStore()
        save_shards(store, "w", WEIGHT, boxes)
        if len(boxes) == 1:
            save(store, key(worker=1), {"w": WEIGHT})
        with pytest.raises(FormatError, match=says):
            opened(store).tensor("w").value(0)


def test_a_selected_part_is_returned_as_it_is() -> None:
    store = MemoryStore()
    part = TensorPart((32, 6), (8, 0), is_shard=False)
    for worker in (1, 0):
        save(store, key(worker=worker, collection="inputs"), {"x": WEIGHT + worker}, parts={"x": part})
    tensor = opened(store).tensor("x")
    np.testing.assert_array_equal(tensor.value(0), WEIGHT)
    assert (tensor.saved(0).part, tensor.shape(0), tensor.info.shape) == (part, (4, 6), (32, 6))
    np.testing.assert_array_equal(tensor.value(0, worker=1), WEIGHT + 1)


@pytest.mark.parametrize(
    ("name", "bits", "dtype"),
    [
        ("BF16", np.arange(0, 2**16, 7, dtype=np.uint16), torch.bfloat16),
        ("F8_E4M3", np.arange(256, dtype=np.uint8), torch.float8_e4m3fn),
        ("F8_E5M2", np.arange(256, dtype=np.uint8), torch.float8_e5m2),
        ("F8_E8M0", np.arange(256, dtype=np.uint8), torch.float8_e8m0fnu),
    ],
)
def test_narrow_floats_are_widened_for_numpy_and_kept_for_torch(
    name: str, bits: NDArray[Any], dtype: torch.dtype
) -> None:
    store = MemoryStore()
    save(store, key(), {"w": bits}, dtype=name)
    tensor = opened(store).tensor("w")
    kept, wide = tensor.value(0, framework="torch"), tensor.value(0)
    assert (kept.dtype, wide.dtype, tensor.info.dtype) == (
        dtype,
        np.float32,
        str(dtype).removeprefix("torch."),
    )
    np.testing.assert_array_equal(kept.to(torch.float32).numpy(), wide)
    np.testing.assert_array_equal(kept.view(torch.uint8).numpy(), bits.view(np.uint8))
    assert tensor.saved(0).dtype == name


def test_numpy_takes_a_saved_tensor_as_an_array() -> None:
    store = MemoryStore()
    save(store, key(), {"w": WEIGHT, "loss": np.array(2.5), "none": np.empty((0, 3), np.int8)})
    run = opened(store)
    tensor = run.tensor("w").saved(0)
    assert np.asarray(tensor).sum() == WEIGHT.sum()
    assert np.asarray(tensor, np.float64).dtype == np.float64
    assert (len(tensor), tensor.ndim, run.tensor("loss").value(0)) == (4, 2, 2.5)
    assert run.tensor("none").value(0).shape == (0, 3)
    assert run.tensor("none").value(0, framework="torch").shape == (0, 3)
    assert (
        run.tensor("loss").value(0, framework="torch").item(),
        run.tensor("loss").value(0, framework="torch").shape,
    ) == (2.5, ())
    whole = run.tensor("w").value(0, framework="torch")
    whole += 1  # writable, without a warning
    for wrong, error in (
        ((0, 0, 0), IndexError),
        (4, IndexError),
        ((..., ...), IndexError),
        (True, TypeError),
        ([0, 1], TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error):
            tensor[wrong]  # type: ignore[index]
    with pytest.raises(TypeError, match="no length"):
        len(run.tensor("loss").saved(0))


def test_jax_gets_the_stored_dtype_or_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    save(store, key(), {"w": np.arange(4, dtype=np.uint16)}, dtype="BF16")
    tensor = opened(store).tensor("w")
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setitem(sys.modules, "jax.numpy", None)
    with pytest.raises(ConfigError, match="jax cannot be imported") as caught:
        tensor.value(0, framework="jax")
    assert "pip install jax" in caught.value.hint
    with pytest.raises(ConfigError, match="unknown framework"):
        tensor.value(0, framework="mxnet")  # type: ignore[arg-type]
    jax, types = ModuleType("jax.numpy"), ModuleType("ml_dtypes")
    jax.asarray = lambda array: array  # type: ignore[attr-defined]
    types.bfloat16 = np.dtype("<i2")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax.numpy", jax)
    monkeypatch.setitem(sys.modules, "ml_dtypes", types)
    assert tensor.value(0, framework="jax").dtype == np.int16


def test_names_and_steps_come_from_saved_objects_too(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of(some_rows(range(12)))])
    save(store, key(2, collection="mine"), {"act:output": WEIGHT})
    save(store, key(4, collection="mine"), {"act:output": WEIGHT + 4})
    save(store, key(4, mode="eval", collection="gradients"), {FIRST.name: WEIGHT})
    run = open_run(tmp_path / "default" / "r")
    assert run.tensors() == ["loss", FIRST.name, SECOND.name, "act:output"]
    assert run.tensors("mine") == run.tensors(role="output") == ["act:output"]
    assert run.tensors(step=4) == ["loss", FIRST.name, SECOND.name, "act:output"]
    assert run.tensors(step=3) == ["loss", FIRST.name, SECOND.name]
    assert run.tensors(step=4, mode="eval") == run.tensors(mode="eval") == [FIRST.name]
    assert run.tensors(role="gradient", regex="sec") == [SECOND.name]
    assert run.collections["mine"] == ["act:output"]
    saved, measured = run.tensor("act:output"), run.tensor(FIRST.name)
    assert (saved.saved_steps(), saved.steps(), saved.info.module) == ([2, 4], [], "act")
    assert saved.statistics().num_rows == 0
    assert (measured.saved_steps("eval"), measured.saved_steps("train")) == ([4], [])
    assert measured.steps() == list(range(12))
    assert {step: array[0, 0] for step, array in saved.values().items()} == {2: 0, 4: 4}
    assert list(saved.values([4])) == [4]
    with pytest.raises(NotFoundError, match="'other' was not recorded"):
        run.tensor("other")
    with pytest.raises(NotFoundError, match="'act:output' was not recorded"):
        run.series("act:output", "mean")


def test_a_collections_object_counts_before_a_snapshot() -> None:
    store = MemoryStore()
    save(store, key(collection=""), {"w": WEIGHT, "v": WEIGHT})
    save(store, key(), {"w": WEIGHT + 1})
    run = opened(store)
    assert run.tensor("w").value(0)[0, 0] == 1
    assert run.tensor("w").saved(0, collection="").numpy()[0, 0] == 0
    assert run.tensor("v").saved(0).collection == ""
    with pytest.raises(NotFoundError, match="in collection 'losses'"):
        run.tensor("w").saved(0, collection="losses")


def test_the_newest_attempt_of_a_step_is_read(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of(some_rows(range(10)))], "a")
    write(store, [block_of(some_rows(range(6, 9), factor=2.0))], "b")
    for attempt, step in (("a", 4), ("a", 6), ("a", 9), ("b", 6)):
        value = np.array([ord(attempt)], np.int32)
        save(store, SnapshotKey(attempt, 0, step, "train", "weights"), {"w": value})
    tensor = open_run(tmp_path / "default" / "r").tensor("w")
    read = {step: chr(array[0]) for step, array in tensor.values().items()}
    older = tensor.saved(9, attempt="a")
    if read[6] == "a":  # the rows of both begin at the same time, so the order is that of the names
        pytest.fail("the newest attempt is not read")
    assert read == {4: "a", 6: "b"}
    assert (older.attempt, older.numpy()[0]) == ("a", ord("a"))
    with pytest.raises(NotFoundError, match="nothing was saved at this step"):
        tensor.value(9)


def test_attempts_without_statistics_are_ordered_by_their_start() -> None:
    store = MemoryStore()
    for attempt, started in (("z", 1), ("b", 2)):
        claim(store, attempt, started)
        for step in (2, 4) if attempt == "z" else (4,):
            key = SnapshotKey(attempt, 0, step, "train", "weights")
            save(store, key, {"w": np.array([ord(attempt)], np.int32)})
    assert {step: chr(a[0]) for step, a in opened(store).tensor("w").values().items()} == {2: "z", 4: "b"}


def test_the_listing_and_headers_are_read_once() -> None:
    store = MemoryStore()
    for step in range(5):
        save(store, key(step), {"w": WEIGHT + step})
    run = opened(store)
    tensor = run.tensor("w")
    assert tensor.saved_steps() == [0, 1, 2, 3, 4]
    headers = len(store.ranges)
    assert (store.lists, headers) == (1, 5)
    for step in range(5):
        assert tensor.value(step)[0, 0] == step
    assert (store.lists, len(store.ranges)) == (1, headers + 5)
    save(store, key(7), {"w": WEIGHT})
    assert tensor.value(7)[0, 0] == 0  # the listing is read again for a step that is not in it
    assert store.lists == 2
    del store.objects[key(1).path]
    run.refresh()
    assert tensor.saved_steps() == [0, 2, 3, 4, 7]


def test_objects_deleted_since_the_listing() -> None:
    store = MemoryStore()
    for step in range(3):
        save(store, key(step), {"w": WEIGHT + step})
    tensor = opened(store).tensor("w")
    saved = tensor.saved(1)
    assert tensor.saved_steps() == [0, 1, 2]
    del store.objects[key(1).path]
    with pytest.raises(NotFoundError, match="no longer exists") as caught:
        saved.numpy()
    assert "ring_bytes" in caught.value.hint
    assert sorted(tensor.values()) == [0, 2]


def test_damage_of_one_object_affects_no_other(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    good = {step: key(step) for step in range(6)}
    for place in good.values():
        save(store, place, {"w": WEIGHT})
    folder = tmp_path / "default" / "r"
    texts = {step: (folder / place.path).read_bytes() for step, place in good.items()}
    wrong_part = {"w": {"shape": [2, 2], "start": [0, 0], "shard": True}}
    broken = {
        1: texts[1][:-10],
        2: texts[2] + b"more",
        3: changed(texts[3], {"__metadata__": {"watchstep.parts": json.dumps(wrong_part)}}),
        4: changed(texts[4], {"__metadata__": {"watchstep.parts": '{"w": 1}'}}),
        5: b"",
    }
    for step, text in broken.items():
        (folder / good[step].path).write_bytes(text)
    (folder / "tensors" / "notes.txt").write_text("somebody else's")
    run = open_run(folder)
    tensor = run.tensor("w")
    assert tensor.saved_steps() == [0]
    np.testing.assert_array_equal(tensor.value(0), WEIGHT)
    assert run.damaged.keys() == {good[step].path for step in broken} | {"tensors/notes.txt"}
    for step in broken:
        with pytest.raises(FormatError, match=f"at step {step} .*{step}-train-weights") as caught:
            tensor.value(step)
        assert caught.value.hint
    assert [place.step for place in run.snapshots()] == list(range(6))


def changed(data: bytes, entries: dict[str, Any]) -> bytes:
    """An object with other entries in its header."""
    length = int.from_bytes(data[:8], "little")
    text = json.dumps({**json.loads(data[8 : 8 + length]), **entries}).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def test_an_object_that_was_truncated_after_it_was_opened(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    save(store, key(), {"w": WEIGHT})
    file = tmp_path / "default" / "r" / key().path
    tensor = open_run(tmp_path / "default" / "r").tensor("w").saved(0)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(FormatError, match="'w' ends after 76 of 96 bytes"):
        tensor.numpy()
    with pytest.raises((FormatError, StoreError)):
        tensor[3, 4:]
    np.testing.assert_array_equal(tensor[:3], WEIGHT[:3])


def test_what_is_not_there_is_named() -> None:
    store = MemoryStore()
    save(store, key(3), {"w": WEIGHT}, missing=["large"])
    save(store, key(5), {"w": WEIGHT, "large": WEIGHT})
    run = opened(store)
    for request, says in (
        (lambda: run.tensor("w").value(4), r"step 4 .*nothing was saved.*\n.*at steps 3, 5 in mode train;"),
        (
            lambda: run.tensor("w").value(3, mode="eval"),
            r"no full tensors were saved in this mode\n.*at steps 3, 5 in mode train;",
        ),
        (lambda: run.tensor("w").value(3, worker=9), r"worker 9 saved nothing.*\n.*workers 0"),
        (lambda: run.tensor("large").value(3), "exceeded a limit"),
        (lambda: run.tensor("w").shape(4), "nothing was saved"),
    ):
        with pytest.raises(NotFoundError, match=says) as caught:
            request()
        assert caught.value.hint


def test_an_error_names_the_modes_and_steps_of_the_tensor() -> None:
    store = MemoryStore()
    for step in range(0, 30, 10):
        save(store, key(step), {"other": WEIGHT})
    for step in range(9, 159, 10):
        save(store, key(step, mode="eval", collection="outputs"), {"model:output": WEIGHT})
    tensor = opened(store).tensor("model:output")
    in_eval = "it was saved at steps 9, 19, 29, 39, 49, 59, 69, 79, 89, 99, … in mode eval; see Tensor.saved_steps()"
    for request, what in (
        (lambda: tensor.value(14), "'model:output' at step 14 in mode train: nothing was saved at this step"),
        (lambda: tensor.value(10), "'model:output' at step 10 in mode train is in no object of this step"),
        (lambda: tensor.value(14, mode="eval"), "step 14 in mode eval: nothing was saved at this step"),
        (tensor.values, "tensor 'model:output' was saved at no step in mode train"),
        (lambda: tensor.values(mode="predict"), "was saved at no step in mode predict"),
    ):
        with pytest.raises(NotFoundError, match=what) as caught:
            request()
        assert caught.value.hint == in_eval
    assert len(tensor.values(mode="eval")) == 15
    save(store, key(10), {"other": WEIGHT, "model:output": WEIGHT})
    with pytest.raises(NotFoundError) as caught:
        opened(store).tensor("model:output").value(14)
    assert "at steps 10 in mode train and 9, 19" in caught.value.hint


def test_a_tensor_that_was_never_saved_has_no_values(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of(some_rows(range(3)))])
    with pytest.raises(NotFoundError, match=r"saved at no step in mode train\n.*Collection\(tensors="):
        open_run(tmp_path / "default" / "r").tensor(FIRST.name).values()


def test_arguments_of_other_kinds_are_refused_with_a_hint(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of(some_rows(range(3)))])
    save(store, key(2, collection="mine"), {"act:output": WEIGHT})
    run = open_run(tmp_path / "default" / "r")
    tensor = run.tensor("act:output")
    assert tensor.value(np.int64(2))[0, 0] == 0
    with pytest.raises(TypeError, match=r"saved.numpy\(\)\[\[0, 1\]\]"):
        tensor.saved(2)[[0, 1]]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"role 'weights'\n.*use one of weight, bias, "):
        run.tensors(role="weights")
    with pytest.raises(ConfigError, match=r"collection 'nope' .*\n.*use one of .*gradients, losses, mine$"):
        run.tensors("nope")
    assert run.tensors("updates") == run.tensors("system") == run.tensors(role="momentum") == []
    assert run.tensors("mine", step=1) == []
    steps: list[Callable[[Any], object]] = [
        tensor.value, tensor.saved, tensor.shape, run.step_state, run.has_passed_step,
        lambda step: run.tensors(step=step), lambda step: run.mode_step(step, "eval"),
    ]  # fmt: skip
    for request in steps:
        with pytest.raises(ConfigError, match="step '2' is not a whole number"):
            request("2")
    modes: list[Callable[[Any], object]] = [
        run.steps, lambda mode: run.steps(mode, incomplete=False), lambda mode: run.tensors(mode=mode),
        lambda mode: run.step_state(0, mode), lambda mode: run.has_passed_step(0, mode),
        lambda mode: run.mode_step(0, mode), lambda mode: run.global_step(0, mode),
        lambda mode: run.wait_for_steps([0], mode), lambda mode: run.at_step(["mean"], mode=mode),
        lambda mode: run.at_step(["mean"], 0, mode), lambda mode: run.series(FIRST.name, "mean", mode=mode),
        lambda mode: run.heatmap("gradients", "mean", mode=mode), lambda mode: run.histogram(FIRST.name, mode=mode),
        tensor.steps, tensor.statistics, tensor.saved_steps, lambda mode: tensor.values(mode=mode),
        lambda mode: tensor.value(2, mode=mode), lambda mode: tensor.shape(2, mode=mode),
    ]  # fmt: skip
    for request in modes:
        with pytest.raises(
            ConfigError, match=r"unknown mode 'evaluation'\n.*use one of train, eval, predict, global"
        ):
            request("evaluation")


_READ_SLICES = """
import resource, sys
import numpy as np
from watchstep import open_run
tensor = open_run(sys.argv[1]).tensor("w").saved(0)
assert tensor.nbytes == 4 * 2**30
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), -1))
assert tensor[123456, 7] == 0
assert tensor[-3:].shape == (3, 4096)
assert tensor[::50000, ::512].shape == (6, 8)
assert sum(float(tensor[first : first + 1000].sum()) for first in range(0, 5000, 1000)) == 0
"""


@pytest.mark.ci
@pytest.mark.timeout(120)
def test_a_tensor_of_four_gigabytes_is_read_in_slices_with_little_memory(tmp_path: Path) -> None:
    new_run(tmp_path)
    file = tmp_path / "default" / "r" / key().path
    file.parent.mkdir(parents=True)
    header = {"w": {"dtype": "F32", "shape": [2**18, 4096], "data_offsets": [0, 2**32]}}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with file.open("r+b") as sparse:
        sparse.truncate(8 + len(text) + 2**32)
    run_python("-c", _READ_SLICES, tmp_path / "default" / "r", 2 * 2**30, cwd=Path(tests.__file__).parents[1])
