"""Compressed tensors come back bit for bit, and nothing that a header claims about them is believed."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.test_snapshot import opened, raw
from watchstep.errors import FormatError
from watchstep.format import snapshot_compression
from watchstep.format.snapshot import DTYPES, Described, header
from watchstep.format.snapshot_compression import BLOCK, METADATA, Packed, compress_in_place, to_metadata

SMALL_BLOCK = 48
"""Divisible by every element's size; makes many blocks of small tensors."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_compression, "BLOCK", SMALL_BLOCK)


def compressed(tensors: list[tuple[Described, bytes]]) -> bytes:
    """A snapshot of tensors, compressed where they lie, as the writer does."""
    memory = np.frombuffer(b"".join(data for _, data in tensors), np.uint8).copy()
    written: list[Described] = []
    packed = {}
    start = place = 0
    for tensor, data in tensors:
        blocks = compress_in_place(memory, start, len(data), tensor.itemsize, place)
        if blocks is not None:
            packed[tensor.name] = Packed(tensor.dtype, tensor.shape, blocks)
        written.append(tensor if blocks is None else Described(tensor.name, "U8", (sum(blocks),)))
        start += len(data)
        place += written[-1].length
    return header(written, to_metadata(packed)) + bytes(memory[:place])


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[tuple[Described, bytes]]:
    """Tensors of every dtype, some of which compress well, some in part and some not at all."""
    made = []
    for place in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        size = math.prod(shape) * DTYPES[dtype].itemsize
        noise = np.random.default_rng(draw(st.integers(0, 9))).bytes(size)
        plain = draw(st.integers(0, size))
        made.append((Described(f"t{place}", dtype, shape), bytes(plain) + noise[plain:]))
    return made


@pytest.mark.usefixtures("small_blocks")
@given(tensor_lists())
def test_every_dtype_and_size_comes_back(tensors: list[tuple[Described, bytes]]) -> None:
    data = compressed(tensors)
    held = opened(data)
    assert set(held.tensors) == {tensor.name for tensor, _ in tensors}
    for tensor, raw_bytes in tensors:
        read = held.read(tensor.name)
        assert (read.dtype, read.shape) == (DTYPES[tensor.dtype], tensor.shape)
        assert held.tensors[tensor.name].dtype == tensor.dtype
        assert read.tobytes() == raw_bytes
        assert not read.flags.writeable
    safetensors.deserialize(data)  # type: ignore[no-untyped-call]


def weights(count: int) -> bytes:
    return (np.random.default_rng(0).standard_normal(count) * 0.02).astype(np.float32).tobytes()


def test_large_tensors_of_many_blocks_come_back_smaller() -> None:
    count = BLOCK // 2 + 1001
    bits = (np.frombuffer(weights(count), np.uint32) >> 16).astype(np.uint16).tobytes()
    data = compressed([(Described("w", "BF16", (count,)), bits)])
    assert len(data) < 0.9 * len(bits)
    held = opened(data)
    assert held.tensors["w"].packed is not None
    assert held.read("w").tobytes() == bits
    assert held.values("w").dtype == np.float32


def test_what_does_not_get_smaller_stays_as_it_is() -> None:
    noise = np.random.default_rng(0).bytes(4096)
    held = opened(compressed([(Described("a", "U8", (4096,)), noise), (Described("b", "F32", (0,)), b"")]))
    assert held.tensors["a"].packed is held.tensors["b"].packed is None
    assert held.read("a").tobytes() == noise
    assert METADATA not in held.metadata


GOOD_BODY = compressed([(Described("a", "F32", (1000,)), bytes(4000))])
GOOD = json.loads(
    json.loads(GOOD_BODY[8 : 8 + int.from_bytes(GOOD_BODY[:8], "little")])["__metadata__"][METADATA]
)
BYTES = GOOD["a"]["blocks"][0]


def lying(body: bytes | None = None, stored: dict[str, Any] | None = None, **entry: Any) -> bytes:
    """The good snapshot with another body, another entry of safetensors, or other claims of the compression."""
    told = {"a": {**GOOD["a"], **entry}}
    length = len(body) if body is not None else BYTES
    described = {"dtype": "U8", "shape": [length], "data_offsets": [0, length], **(stored or {})}
    start = {"__metadata__": {METADATA: json.dumps(told)}, "a": described}
    return raw(start, GOOD_BODY[-BYTES:] if body is None else body)


def test_the_example_of_the_lies_is_good_without_them() -> None:
    assert not opened(lying()).read("a").any()


@pytest.mark.parametrize(
    "data",
    [
        lying(codec="gzip"),
        lying(codec=None),
        lying(block=BLOCK - 1),
        lying(dtype="F12"),
        lying(dtype=["F32"]),
        lying(shape=[-1]),
        lying(shape=[1000.0]),
        lying(shape="1000"),
        lying(shape=[1] * 65),
        lying(shape=[2**62, 2**62]),
        lying(shape=[0, 2**62], blocks=[]),
        lying(shape=[2**31]),
        lying(shape=[BLOCK]),
        lying(shape=[0]),
        lying(shape=[1]),
        lying(blocks=[]),
        lying(blocks=[BYTES, 0]),
        lying(blocks=[0]),
        lying(blocks=[BYTES + 1]),
        lying(blocks=[4001]),
        lying(blocks=[True]),
        lying(blocks=None),
        lying(stored={"shape": [1, BYTES]}),
        lying(stored={"dtype": "I8"}),
        raw({"__metadata__": {METADATA: '{"b": ' + json.dumps(GOOD["a"]) + "}"}}, b""),
        raw({"__metadata__": {METADATA: "[]"}}, b""),
        raw({"__metadata__": {METADATA: "{"}}, b""),
        raw({"__metadata__": {METADATA: '{"a": 3}'}}, b""),
        raw({"__metadata__": {METADATA: "[" * 50_000}}, b""),
    ],
)
def test_a_description_that_lies_is_refused_when_it_is_opened(data: bytes) -> None:
    with pytest.raises(FormatError, match="header is not valid"):
        opened(data)


@pytest.mark.parametrize("shape", [[999], [1001], [4000], [2**20]])
def test_a_block_of_another_size_than_claimed_is_refused(shape: list[int]) -> None:
    held = opened(lying(shape=shape))
    with pytest.raises(FormatError, match="tensor 'a' does not decompress"):
        held.read("a")


@given(st.binary(min_size=1, max_size=200))
def test_bytes_that_are_not_compressed_are_refused(body: bytes) -> None:
    held = opened(lying(body, blocks=[len(body)]))
    with pytest.raises(FormatError, match="does not decompress"):
        held.read("a")


@given(st.integers(0, BYTES - 1), st.integers(1, 255))
def test_damage_is_refused_or_has_the_claimed_size(place: int, change: int) -> None:
    body = bytearray(GOOD_BODY[-BYTES:])
    body[place] ^= change
    try:
        assert opened(lying(bytes(body))).read("a").shape == (1000,)
    except FormatError:
        return
