"""Samples of steps survive encoding, and damaged or hostile bytes are rejected."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import BadNameError, ConfigError, FormatError, NotFoundError
from watchstep.format.layout import SamplesKey
from watchstep.format.samples.samples import (
    MAX_IDS,
    OBJECT_MAGIC,
    SampleBatch,
    SampleId,
    decode_batch,
    decode_object,
    encode_batch,
    encode_object,
    frame,
    intact_frames,
    plain_id,
)
from watchstep.format.samples.skip_list import KIND, SkipList, load_skip_list

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = st.one_of(
    st.integers(-(2**70), 2**70),
    TEXT,
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
)
INTS = st.lists(
    st.one_of(st.integers(0, 300), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32)), max_size=40
)
IDS: st.SearchStrategy[list[Any]] = st.one_of(
    INTS,
    st.builds(
        lambda first, count: list(range(first, first + count)), st.integers(-9, 2**62), st.integers(0, 300)
    ),
    st.lists(
        st.one_of(
            st.integers(),
            TEXT,
            st.lists(SCALARS, max_size=3).map(tuple),
            st.dictionaries(TEXT, SCALARS, max_size=3),
        ),
        max_size=10,
    ),
)
STEPS = st.integers(0, 2**53)


@given(IDS, STEPS, TEXT, st.integers(-1, 2**40), st.integers(0, 2**31))
def test_batches_are_the_same_after_encoding(
    ids: list[SampleId], step: int, source: str, epoch: int, left_out: int
) -> None:
    """Whatever the ids are, decoding returns the batch."""
    batch = SampleBatch(step, tuple(ids), source, epoch, epoch, left_out)
    assert decode_batch(encode_batch(batch), "batch") == batch
    assert list(decode_object(encode_object([(7, encode_batch(batch))]), "object")) == [batch]


@given(st.lists(st.binary(max_size=60), max_size=5), st.binary(max_size=30), st.integers(0, 200))
def test_intact_records_are_found_among_anything(payloads: list[bytes], noise: bytes, cut: int) -> None:
    """Records that are whole are found; one that is cut off is not, and stops nothing."""
    frames = [frame(number, payload) for number, payload in enumerate(payloads)]
    last = frame(99, b"x" * 100)[: 8 * (cut % 12)]
    aligned = noise + b"\0" * (-len(noise) % 8)
    found = list(intact_frames(b"".join([aligned, *frames, last, b"\0" * 64])))
    assert [record for record in found if record[0] != 99] == list(enumerate(payloads))
    assert 99 not in [number for number, _ in found]


@given(st.data(), IDS)
def test_damaged_objects_are_rejected_or_equal(data: st.DataObject, ids: list[SampleId]) -> None:
    """A changed byte never yields other samples."""
    batch = SampleBatch(3, tuple(ids))
    content = bytearray(encode_object([(1, encode_batch(batch))]))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    try:
        decoded = list(decode_object(bytes(content), "object"))
    except FormatError:
        return
    assert decoded == [batch]  # a byte of the padding


def test_hostile_records_take_no_memory() -> None:
    """Counts are checked before ids are made; ids that are none are rejected."""
    head = struct.pack("<qqqIHB", 1, 0, 0, 0, 0, 0)
    cases = [
        head + struct.pack("<qq", 0, 2**40),
        head[:-1] + b"\xff" + b"[" * 1000,
        head[:-1] + b"\xff" + b"[true]",
        head[:-1] + b"\xff" + json.dumps([0] * (MAX_IDS + 1)).encode(),
        head[:-1] + b"\x09abc",
        head[:-1] + b"\x04abc",
        head[:5],
    ]
    for payload in cases:
        with pytest.raises(FormatError, match="damaged"):
            list(decode_object(encode_object([(0, payload)]), "object"))
    with pytest.raises(FormatError, match="not an object"):
        list(decode_object(b"PK" + OBJECT_MAGIC, "object"))


def test_large_batches_are_shortened() -> None:
    """Ids beyond a record are counted."""
    batch = decode_batch(encode_batch(SampleBatch(1, tuple(range(0, 2 * MAX_IDS, 2)) + (1,) * 9)), "batch")
    assert (len(batch.ids), batch.left_out) == (MAX_IDS, 9)
    names = tuple(f"{number:0100d}" for number in range(1000))
    batch = decode_batch(encode_batch(SampleBatch(1, names), 8000), "batch")
    assert batch.ids == names[: len(batch.ids)]
    assert 0 < len(batch.ids) == 1000 - batch.left_out


def test_ids_of_other_libraries() -> None:
    """Ids become plain objects; what names no sample is rejected."""
    assert plain_id(np.int16(3)) == 3
    assert plain_id(Path("a/b.tar")) == "a/b.tar"
    assert plain_id(b"name") == "name"
    assert plain_id(["s.tar", np.int64(5)]) == ("s.tar", 5)
    assert plain_id({"file": Path("x"), "offset": np.uint8(1), "weight": 0.5}) == {
        "file": "x",
        "offset": 1,
        "weight": 0.5,
    }
    for value in (1.5, object(), None):
        with pytest.raises(TypeError):
            plain_id(value)


def test_the_first_ids_of_a_batch() -> None:
    """Ids beyond a limit count as left out, whatever their form."""
    for ids in (range(7, 300), (5, 1, 2**40, 3), ("a", 1, ("b", 2)), range(-4, 9, 3)):
        payload = encode_batch(SampleBatch(3, tuple(ids), left_out=2))
        for limit in (0, 2, 1000):
            expected = SampleBatch(3, tuple(ids[:limit]), left_out=2 + max(0, len(ids) - limit))
            assert decode_batch(payload, "batch", limit) == expected


@pytest.mark.ci
def test_a_skip_list_of_many_groups() -> None:
    """Time is linear in the number of groups of one dataset."""
    groups = [{"source": "Numbers", "ids": [number]} for number in range(150_000)]
    document = {"kind": KIND, "schema": 1, "run": "", "steps": [], "samples": groups}
    found = SkipList.decode(json.dumps(document).encode(), "skip list")
    assert found.samples == {"Numbers": tuple(range(150_000))}


def test_keys() -> None:
    """A key formats to the text that it was parsed from; other texts are no keys."""
    key = SamplesKey("a1", 3, 1700000000000000, 5, 90)
    assert key.path == "samples/a1/3/1700000000000000-5-90.samples"
    assert SamplesKey.parse(key.path) == key
    for path in (
        "samples/a1/3/1-9-5.samples",
        "samples/a1/03/1-1-5.samples",
        "samples/../3/1-1-5.samples",
        "x",
    ):
        with pytest.raises(FormatError, match="samples"):
            SamplesKey.parse(path)
    with pytest.raises(BadNameError):
        _ = SamplesKey("../x", 0, 0, 0, 0).path


def test_skip_lists(tmp_path: Path) -> None:
    """A skip list names each sample once, by dataset, and recognises ids of any library."""
    batches = [
        SampleBatch(4, (9, 2, 9), "Images"),
        SampleBatch(4, ("b.txt", "a.txt"), "Texts"),
        SampleBatch(5, (("s.tar", 7), {"file": "x", "offset": 1})),
    ]
    written = SkipList.of_batches("default/r", batches)
    file = tmp_path / "skip.json"
    file.write_bytes(written.encode())
    read = load_skip_list(file)
    assert read == written
    assert read.steps == (4, 5)
    assert read.samples["Images"] == (2, 9)
    assert len(read) == 6
    for sample in (2, np.int32(9), "a.txt", ["s.tar", 7], {"offset": np.int64(1), "file": Path("x")}):
        assert read.skips(sample)
    for sample in (3, "2", "c.txt", ("s.tar", 8), {"file": "x"}, 2.5, None):
        assert not read.skips(sample)
    only = load_skip_list(file, "Images")
    assert only.skips(2)
    assert not only.skips("a.txt")
    with pytest.raises(ConfigError, match="'Images', 'Texts'"):
        load_skip_list(file, "Videos")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"kind": "watchstep skip list"}', '{"kind": "watchstep skip list", "schema": 2}'],
)
def test_other_files_are_no_skip_lists(tmp_path: Path, content: str) -> None:
    """The message names the file."""
    file = tmp_path / "skip.json"
    file.write_text(content)
    with pytest.raises(FormatError, match=r"skip\.json"):
        load_skip_list(file)
    with pytest.raises(NotFoundError, match="missing"):
        load_skip_list(tmp_path / "missing.json")
