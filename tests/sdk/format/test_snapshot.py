from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import ConfigError, FormatError, NotFoundError, StoreError
from watchstep.format import snapshot
from watchstep.format.snapshot import (
    DTYPES,
    MAX_NAMES,
    PARTS,
    Described,
    Snapshot,
    TensorPart,
    aligned_order,
    header,
    missing_metadata,
    open_snapshot,
    parts_metadata,
)
from watchstep.store.store import Store

Header = dict[str, Any]
GOOD: Header = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
}


class NamedArray(NamedTuple):
    """A tensor and its bytes."""

    described: Described
    data: bytes


def encode(tensors: Sequence[NamedArray], metadata: Mapping[str, str]) -> bytes:
    """A snapshot's bytes, as the writer makes them."""
    ordered = [tensors[place] for place in aligned_order([tensor.described for tensor in tensors])]
    start = header([tensor.described for tensor in ordered], metadata)
    return b"".join([start, *(tensor.data for tensor in ordered)])


class MemoryStore(Store):
    """One object in memory, and a log of the requests for it."""

    def __init__(self, data: bytes) -> None:
        super().__init__("memory:", None)
        self.data = data
        self.requests: list[tuple[str, int]] = []

    def size(self, key: str) -> int:
        self.requests.append(("size", 0))
        return len(self.data)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests.append(("range", length))
        if start >= len(self.data):
            raise StoreError("out of range", "none")
        return self.data[start : start + length]


def named(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> NamedArray:
    return NamedArray(Described(name, dtype, shape), data)


def opened(data: bytes) -> Snapshot:
    return open_snapshot(MemoryStore(data), "snap")


def raw(header: Any, body: bytes = bytes(28)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def refused(data: bytes) -> str:
    with pytest.raises(FormatError, match=r"snapshot snap\b.*\n  hint: ") as caught:
        opened(data)
    return caught.value.what


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[NamedArray]:
    names = draw(
        st.lists(st.text(max_size=8).filter(lambda name: name != "__metadata__"), unique=True, max_size=5)
    )
    written = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        length = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
        written.append(named(name, dtype, shape, draw(st.binary(min_size=length, max_size=length))))
    return written


@given(tensor_lists(), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_what_was_encoded_is_read(tensors: list[NamedArray], metadata: dict[str, str]) -> None:
    data = encode(tensors, metadata)
    snapshot = opened(data)
    assert snapshot.metadata == metadata
    assert set(snapshot.tensors) == {tensor.described.name for tensor in tensors}
    for tensor in tensors:
        described = tensor.described
        read = snapshot.read(described.name)
        assert read.shape == described.shape
        assert read.dtype == DTYPES[described.dtype]
        assert read.tobytes() == bytes(tensor.data)
        assert snapshot.tensors[described.name].dtype == described.dtype


@given(tensor_lists())
def test_safetensors_reads_the_same(tensors: list[NamedArray]) -> None:
    read = dict(safetensors.deserialize(encode(tensors, {"step": "7"})))  # type: ignore[no-untyped-call]
    assert {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in read.items()
    } == {
        tensor.described.name: (tensor.described.dtype, tensor.described.shape, bytes(tensor.data))
        for tensor in tensors
    }


def test_what_safetensors_wrote_is_read() -> None:
    arrays = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.array(True),
        "z": np.zeros((0, 2), np.int64),
    }
    snapshot = opened(safetensors.numpy.save(arrays, {"by": "them"}))
    assert snapshot.metadata == {"by": "them"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(snapshot.read(name), array)


def test_every_tensor_is_aligned_to_its_elements() -> None:
    tensors = [
        named("a", "U8", (3,), b"abc"),
        named("b", "F64", (1,), bytes(8)),
        named("c", "BF16", (1,), bytes(2)),
    ]
    for stored in opened(encode(tensors, {})).tensors.values():
        assert stored.start % DTYPES[stored.dtype].itemsize == 0


def test_one_tensor_costs_a_size_and_two_ranged_reads() -> None:
    tensors = [named(f"layer{index}", "F32", (100_000,), bytes(400_000)) for index in range(3)]
    store = MemoryStore(encode(tensors, {}))
    open_snapshot(store, "snap").read("layer1")
    assert [kind for kind, _ in store.requests] == ["size", "range", "range"]
    assert sum(length for _, length in store.requests) < 500_000


def test_a_long_header_is_read_in_two_parts() -> None:
    tensors = [named(f"layer{index}" * 20, "U8", (1,), b"x") for index in range(2000)]
    snapshot = opened(encode(tensors, {}))
    assert len(snapshot.tensors) == 2000
    assert snapshot.read("layer7" * 20).tobytes() == b"x"


def test_a_snapshot_is_written_to_every_store(store: Store) -> None:
    store.put("snap", encode([named("w", "F16", (2,), np.array([1, -2], np.float16).tobytes())], {}))
    snapshot = open_snapshot(store, "snap")
    assert snapshot.read("w").tolist() == [1.0, -2.0]
    with pytest.raises(NotFoundError):
        open_snapshot(store, "nothing")


@pytest.mark.parametrize(
    ("dtype", "bits", "values"),
    [
        ("BF16", [0x3F80, 0xC040, 0x7F80, 0x0001], [1.0, -3.0, np.inf, 2.0**-133]),
        ("F8_E4M3", [0x38, 0xFE, 0x7F, 0x01], [1.0, -448.0, np.nan, 2.0**-9]),
        ("F8_E5M2", [0x3C, 0xFB, 0x7C, 0x01], [1.0, -57344.0, np.inf, 2.0**-16]),
        ("F8_E8M0", [0x7F, 0x00, 0xFF, 0xFE], [1.0, 2.0**-127, np.nan, 2.0**127]),
        ("U16", [0, 1, 2, 65535], [0, 1, 2, 65535]),
    ],
)
def test_narrow_floats_keep_their_bits_and_have_exact_values(
    dtype: str, bits: list[int], values: list[float]
) -> None:
    snapshot = opened(encode([named("x", dtype, (2, 2), np.array(bits, DTYPES[dtype]).tobytes())], {}))
    assert snapshot.read("x").ravel().tolist() == bits
    np.testing.assert_array_equal(snapshot.values("x"), np.array(values).reshape(2, 2))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("BF16", "bfloat16"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E8M0", "float8_e8m0fnu"),
    ],
)
def test_every_bit_pattern_has_the_value_that_torch_gives_it(dtype: str, name: str) -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(65536 if dtype == "BF16" else 256).astype(DTYPES[dtype])
    snapshot = opened(encode([named("x", dtype, bits.shape, bits.tobytes())], {}))
    wanted = torch.from_numpy(bits.copy()).view(getattr(torch, name)).float().numpy()
    np.testing.assert_array_equal(snapshot.values("x"), wanted)
    assert snapshot.values("x").dtype == np.float32


def test_a_single_narrow_float_is_an_array_too() -> None:
    snapshot = opened(encode([named("x", "BF16", (), b"\x80\x3f"), named("y", "F8_E4M3", (), b"\x38")], {}))
    assert snapshot.values("x").shape == snapshot.values("y").shape == ()
    assert snapshot.values("x") == snapshot.values("y") == 1


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([named("x", "F4", (2,), bytes(1))], "unknown dtype 'F4'"),
        ([named("x", "U8", (1,), b"a"), named("x", "F32", (0,), b"")], "'x' is a duplicate or reserved"),
        ([named("__metadata__", "U8", (1,), b"a")], "'__metadata__' is a duplicate or reserved"),
    ],
)
def test_what_cannot_be_written_is_reported(tensors: list[NamedArray], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        encode(tensors, {})


def test_a_missing_tensor_is_reported() -> None:
    snapshot = opened(raw(GOOD))
    assert list(snapshot.tensors) == ["a", "b"]
    with pytest.raises(NotFoundError, match="tensor 'c' is not in snapshot snap"):
        snapshot.read("c")


def test_a_tensor_that_the_writer_left_out_is_reported_with_the_reason() -> None:
    metadata = missing_metadata(["c", "d"])
    snapshot = opened(raw({**GOOD, "__metadata__": metadata}))
    assert (snapshot.missing, snapshot.missing_names) == (2, ("c", "d"))
    with pytest.raises(NotFoundError, match=r"left out 2 tensors.*\n  hint: raise Snapshots.memory_bytes"):
        snapshot.read("c")
    with pytest.raises(NotFoundError, match=r"see Snapshot\.tensors for the names"):
        snapshot.read("e")


def test_of_very_many_missing_tensors_the_number_is_reported() -> None:
    snapshot = opened(raw({**GOOD, "__metadata__": missing_metadata([f"layer{n}" for n in range(5000)])}))
    assert snapshot.missing == 5000
    assert len(snapshot.missing_names) == MAX_NAMES
    with pytest.raises(NotFoundError, match="left out 5000 tensors"):
        snapshot.read("layer4999")


def test_a_snapshot_that_is_deleted_after_it_was_opened_is_reported(folder_store: Store) -> None:
    folder_store.put("snap", raw(GOOD))
    snapshot = open_snapshot(folder_store, "snap")
    folder_store.delete("snap")
    for read in (lambda: snapshot.read("a"), lambda: open_snapshot(folder_store, "snap")):
        with pytest.raises(
            NotFoundError, match=r"snap does not exist, or no longer exists\n  hint: list the snapshots"
        ):
            read()


def test_an_object_that_shrinks_after_it_was_opened_is_reported() -> None:
    store = MemoryStore(raw(GOOD))
    snapshot = open_snapshot(store, "snap")
    store.data = store.data[:-2]
    with pytest.raises(FormatError, match="tensor 'b' ends after 2 of 4 bytes"):
        snapshot.read("b")


def changed(name: str, **entry: Any) -> Header:
    return {**GOOD, name: {**GOOD[name], **entry}}


LIES: list[tuple[Any, str]] = [
    (b"{", "invalid header"),
    (b"\xff", "invalid header"),
    (b"[]", "invalid header"),
    (b"null", "invalid header"),
    (b"[" * 50_000, "invalid header"),
    (b'{"a":' * 50_000, "invalid header"),
    (b'{"a": {}, "a": {}}', "duplicate tensor name"),
    ({**GOOD, "__metadata__": {"step": 3}}, "metadata"),
    ({**GOOD, "__metadata__": []}, "metadata"),
    ({**GOOD, "__metadata__": {"watchstep.missing": "many"}}, "invalid header"),
    ({**GOOD, "__metadata__": {"watchstep.missing_names": "[3]"}}, "not a list of names"),
    ({**GOOD, "__metadata__": {"watchstep.missing_names": "{"}}, "invalid header"),
    (
        {**GOOD, "__metadata__": {"watchstep.missing_names": json.dumps(["x"] * (MAX_NAMES + 1))}},
        "names 1001 missing tensors, writers name at most 1000",
    ),
    (
        {**GOOD, "__metadata__": {"watchstep.missing_names": json.dumps(["x"] * 1_000_000)}},
        "could take 62 MiB of memory, at most 48",
    ),
    ({"a": {"dtype": "BF16", "shape": [0, 2**61], "data_offsets": [0, 0]}}, "invalid shape"),
    ({"a": {"dtype": "F8_E4M3", "shape": [0, 2**62], "data_offsets": [0, 0]}}, "invalid shape"),
    ({"a": []}, "is not described"),
    ({"a": {"dtype": "F32", "shape": [7]}}, "is not described"),
    (changed("a", more=1), "is not described"),
    (changed("a", dtype="F12"), "unknown dtype 'F12'"),
    (changed("a", dtype=["F32"]), "invalid header"),
    (changed("a", dtype=None), "unknown dtype"),
    (changed("a", shape=[2, -3]), "not a list of whole numbers"),
    (changed("a", shape=[2, 3.0]), "not a list of whole numbers"),
    (changed("a", shape=[True, 6]), "not a list of whole numbers"),
    (changed("a", shape=6), "not a list of whole numbers"),
    (changed("a", shape=[2, 2]), "do not fit"),
    (changed("a", shape=[2**62, 2**62]), "invalid shape"),
    (changed("a", shape=[0, 2**62], data_offsets=[0, 0]), "invalid shape"),
    (changed("a", shape=[1] * 65), "invalid shape"),
    (changed("a", data_offsets=[0, 24, 28]), "do not fit"),
    (changed("a", data_offsets=[24, 0]), "do not fit"),
    (changed("a", data_offsets=[-24, 0]), "not a list of whole numbers"),
    (changed("a", data_offsets=[4, 28]), "overlap or have gaps"),
    (changed("b", data_offsets=[20, 24]), "overlap or have gaps"),
    (changed("b", data_offsets=[25, 29]), "overlap or have gaps"),
    (changed("b", shape=[5], data_offsets=[24, 29]), "end at byte"),
    ({"a": GOOD["a"]}, "end at byte"),
    ({}, "end at byte"),
]


@pytest.mark.parametrize(("header", "reason"), LIES)
def test_a_header_that_lies_is_refused(header: Any, reason: str) -> None:
    assert reason in refused(raw(header))


@pytest.mark.parametrize("data", [b"", bytes(7)])
def test_an_object_without_room_for_a_header_is_refused(data: bytes) -> None:
    assert "too short for a header" in refused(data)


@pytest.mark.parametrize("length", [29, 2**40, 2**64 - 1])
def test_a_header_longer_than_the_object_is_refused_before_it_is_read(length: int) -> None:
    store = MemoryStore(struct.pack("<Q", length) + bytes(28))
    with pytest.raises(FormatError, match=f"claims a header of {length} bytes in an object of 36"):
        open_snapshot(store, "snap")
    assert sum(size for _, size in store.requests) <= 36


def test_a_header_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_HEADER", 10)
    assert "at most 10 are read" in refused(raw(GOOD))


WHOLE = raw(GOOD)
damages: dict[str, Callable[[bytes, int], bytes]] = {
    "cut": lambda data, place: data[:place],
    "flip": lambda data, place: data[:place] + bytes([data[place] ^ 0x11]) + data[place + 1 :],
    "grow": lambda data, place: data + bytes(place + 1),
    "slide": lambda data, place: data[place:] + bytes(place),
}


@given(st.sampled_from(sorted(damages)), st.integers(0, len(WHOLE) - 1))
def test_damage_is_refused_or_leaves_tensors_that_can_be_read(kind: str, place: int) -> None:
    try:
        snapshot = opened(damages[kind](WHOLE, place))
    except FormatError:
        return
    for name, stored in snapshot.tensors.items():
        assert snapshot.read(name).nbytes == stored.length


@pytest.mark.parametrize(
    "part",
    [
        1,
        {"shape": [2, 3], "start": [0, 0]},
        {"shape": [2, 3], "start": [0], "shard": True},
        {"shape": [2, 3], "start": [0, 0], "shard": 1},
        {"shape": [2, -3], "start": [0, 0], "shard": True},
        {"shape": [2, 2], "start": [0, 0], "shard": True},
        {"shape": [4, 3], "start": [3, 0], "shard": False},
        {"shape": [2**40, 2**40], "start": [0, 0], "shard": True},
        {"shape": [2, 3, 1], "start": [0, 0, 0], "shard": True},
    ],
)
def test_an_invalid_part_is_refused(part: Any) -> None:
    metadata = {PARTS: json.dumps({"a": part})}
    assert "invalid header" in refused(raw({**GOOD, "__metadata__": metadata}))


def test_a_part_is_read_as_it_was_written() -> None:
    part = TensorPart((4, 3), (2, 0), is_shard=True)
    snapshot = opened(raw({**GOOD, "__metadata__": parts_metadata({"a": part, "of another object": part})}))
    assert snapshot.parts == {"a": part}


def test_some_bytes_of_a_tensor_are_read_with_one_range() -> None:
    store = MemoryStore(raw(GOOD, bytes(range(28))))
    snapshot = open_snapshot(store, "snap", len(store.data))
    assert snapshot.read_bytes("b", 1, 2) == bytes([25, 26])
    assert snapshot.read_bytes("b", 1, 0) == b""
    assert [kind for kind, _ in store.requests] == ["range", "range"]
    store.data = store.data[:-3]
    with pytest.raises(FormatError, match="'b' ends after 1 of 4 bytes"):
        snapshot.read_bytes("b", 0, 4)
    with pytest.raises(NotFoundError, match="'c' is not in"):
        snapshot.read_bytes("c", 0, 1)
