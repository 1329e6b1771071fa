from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import flatbuffers
import lz4.frame
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.processes import run_python, traced_memory
from tests.sdk.format.messages import COLUMNS, ROWS, A, B, Slots, batch, compressed, schema_metadata
from watchstep.errors import FormatError
from watchstep.format import ipc, segment
from watchstep.format.block import from_codes, from_numbers, from_words, to_numbers
from watchstep.format.segment_checks import whole

# Messages of Arrow IPC: hostile headers and bodies are refused, in bounded memory, and other writers' layouts are read.


MEMORY = 4 * 1024 * 1024
LARGE = (0, 1, 2, 3, 7, 8, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 8, 2**32 - 4, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip


def read(data: bytes, columns: Sequence[ipc.Column] = COLUMNS) -> list[Any]:
    """The values of a batch."""
    start, end = ipc.message_end(data, 0)
    found = ipc.read_batch(data, start, end, columns)
    return [ipc.column_values(data, found, place, column) for place, column in enumerate(columns)]


def refused(data: bytes, reason: str | None = None) -> None:
    with traced_memory(MEMORY), pytest.raises((ValueError, RuntimeError), match=reason):
        read(data)


# Messages


def test_what_is_written_is_read() -> None:
    data = ipc.batch_message([A, B], [(b"key", b"value")])
    assert [values.tolist() for values in read(data)] == [A.tolist(), B.tolist()]
    start, end = ipc.message_end(data, 0)
    found = ipc.read_batch(data, start, end, COLUMNS)
    assert (found.rows, found.metadata, found.end) == (ROWS, {b"key": b"value"}, len(data))
    schema = ipc.schema_message(COLUMNS, ((b"k", b"v"), (b"", b"")))
    assert ipc.read_schema(schema[8:]) == ipc.Schema(COLUMNS, {b"k": b"v", b"": b""})


def test_batches_without_rows_or_columns_are_read() -> None:
    assert [len(values) for values in read(ipc.batch_message([A[:0], B[:0]]))] == [0, 0]
    assert read(ipc.batch_message([]), ()) == []
    assert ipc.read_schema(ipc.schema_message((), ())[8:]) == ipc.Schema((), {})


def test_the_messages_of_the_tests_are_read() -> None:
    assert [values.tolist() for values in read(batch())] == [A.tolist(), B.tolist()]
    raw = [A.tobytes(), B.tobytes()]
    assert [values.tolist() for values in read(batch(raw, codec=None))] == [A.tolist(), B.tolist()]
    unpacked = [b"\xff" * 8 + piece for piece in raw]
    assert [values.tolist() for values in read(batch(unpacked))] == [A.tolist(), B.tolist()]


def test_pyarrow_reads_the_messages_of_the_tests() -> None:
    for first in (compressed(A), b"\xff" * 8 + A.tobytes()):
        # pyarrow requires places that are multiples of eight.
        start = len(first) + -len(first) % 8
        places = [(0, len(first)), (start, len(compressed(B)))]
        data = batch([first.ljust(start, b"\0"), compressed(B).ljust(48, b"\0")], places=places)
        stream = ipc.schema_message(COLUMNS, ()) + data + ipc.END_OF_STREAM
        assert pa.ipc.open_stream(stream).read_all().to_pydict() == {"a": A.tolist(), "b": B.tolist()}
        assert [values.tolist() for values in read(data)] == [A.tolist(), B.tolist()]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff" + struct.pack("<i", length) + bytes(64)
        for length in (0, -8, 7, 9, 2**31 - 1, -(2**31), 64 * 1024 * 1024 + 8)
    ]
    + [bytes(64), b"\x20\x00\x00\x00" + bytes(64)],
)
def test_other_bytes_than_a_message_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no message of an Arrow stream"):
        ipc.message_end(data, 0)


@pytest.mark.parametrize("length", range(0, 72, 8))
def test_a_message_that_is_cut_short_states_how_many_bytes_it_takes(length: int) -> None:
    data = struct.pack("<Ii", 0xFFFFFFFF, 64) + bytes(64)
    with pytest.raises(ipc.TruncatedError) as caught:
        ipc.message_end(data[:length], 0)
    assert caught.value.required == (8 if length < 8 else 72)


# Batches


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": 3}, "another version"),
        ({"version": 5}, "another version"),
        ({"kind": 1}, "of another kind"),
        ({"codec": 1}, "another compression"),
        ({"codec": -1}, "another compression"),
        ({"method": 1}, "another compression"),
        ({"codec": None}, "has .* bytes for 16 rows"),
        ({"rows": -1}, "not those of its columns"),
        ({"rows": -(2**63)}, "not those of its columns"),
        ({"body": -1}, "not those of its columns"),
        ({"body": 10}, "lies outside of its body"),
        ({"nodes": []}, "not those of its columns"),
        ({"nodes": [(ROWS, 0)] * 3}, "not those of its columns"),
        ({"nodes": [(ROWS, 0), (ROWS + 1, 0)]}, "another number of rows"),
        ({"nodes": [(ROWS, 0), (-1, 0)]}, "another number of rows"),
        ({"nodes": [(ROWS, 1), (ROWS, 0)]}, "has nulls"),
        ({"nodes": [(ROWS, -1), (ROWS, 0)]}, "has nulls"),
        ({"nodes": [(ROWS, 0)] * 300}, "256 are read"),
        ({"places": [(0, 10)] * 300}, "256 are read|512 are read"),
        ({"rows": 2**40}, "claims 128 bytes"),
        ({"rows": 2**62}, "claims 128 bytes"),
    ],
)
def test_a_header_with_lies_is_refused(changed: dict[str, Any], reason: str) -> None:
    refused(batch(**changed), reason)


LENGTHS = len(compressed(A)), len(compressed(B))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ((0, LENGTHS[0]), (LENGTHS[0], LENGTHS[1] + 1), "outside of its body"),
        ((0, LENGTHS[0]), (LENGTHS[0] + 1, LENGTHS[1]), "outside of its body"),
        ((-8, LENGTHS[0]), (LENGTHS[0], LENGTHS[1]), "outside of its body"),
        ((0, -8), (LENGTHS[0], LENGTHS[1]), "outside of its body"),
        ((0, LENGTHS[0]), (2**62, LENGTHS[1]), "outside of its body"),
        ((0, LENGTHS[0]), (2**63 - 1, 2**63 - 1), "outside of its body"),
        ((0, LENGTHS[0]), (-(2**63), -(2**63)), "outside of its body"),
        ((0, LENGTHS[0]), (LENGTHS[0], 2**63 - 1), "outside of its body"),
        ((0, LENGTHS[0]), (0, LENGTHS[0]), "lies over another"),
        ((0, LENGTHS[0]), (LENGTHS[0] - 1, LENGTHS[1]), "lies over another"),
        ((LENGTHS[0] - 1, LENGTHS[1]), (0, LENGTHS[0]), "lies over another"),
        ((0, LENGTHS[0]), (8, 16), "lies over another"),
        ((0, 0), (LENGTHS[0], LENGTHS[1]), "has no length"),
        ((0, 7), (LENGTHS[0], LENGTHS[1]), "has no length"),
        ((0, 8), (LENGTHS[0], LENGTHS[1]), "not a complete LZ4 frame"),
        ((0, LENGTHS[0] - 1), (LENGTHS[0], LENGTHS[1]), "not a complete LZ4 frame"),
        ((1, LENGTHS[0] - 1), (LENGTHS[0], LENGTHS[1]), "claims"),
        ((LENGTHS[0], LENGTHS[1]), (0, LENGTHS[0]), "claims 32 bytes for 16 rows, not 128"),
    ],
)
def test_buffers_at_places_that_cannot_be_are_refused(
    first: tuple[int, int], second: tuple[int, int], reason: str
) -> None:
    refused(batch(places=[first, second]), reason)


def test_places_of_buffers_for_nulls_are_not_used() -> None:
    data = bytearray(batch())
    place = data.index(struct.pack("<q", LENGTHS[0])) - 24  # before the place of the first values
    data[place : place + 16] = struct.pack("<qq", 2**62, -1)
    assert [values.tolist() for values in read(bytes(data))] == [A.tolist(), B.tolist()]


def with_length(length: int) -> bytes:
    return length.to_bytes(8, "little", signed=True) + compressed(A)[8:]


@pytest.mark.parametrize("length", [0, 1, 127, 129, 2**31, 2**62, -2, -(2**63)])
def test_a_claimed_length_that_is_not_that_of_the_rows_is_refused(length: int) -> None:
    refused(batch([with_length(length), compressed(B)]), "claims .* bytes for 16 rows, not 128")


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        lz4.frame.compress(b""),
        lz4.frame.compress(bytes(127)),
        lz4.frame.compress(bytes(129)),
        lz4.frame.compress(bytes(100_000_000)),
        lz4.frame.compress(bytes(100_000_000), store_size=False, block_checksum=True),
        lz4.frame.compress(bytes(128)) + b"x",
        lz4.frame.compress(bytes(128)) + lz4.frame.compress(bytes(128)),
        lz4.frame.compress(bytes(64)) + lz4.frame.compress(bytes(64)),
        lz4.frame.compress(bytes(128))[:-4],
        lz4.frame.compress(bytes(128))[:-5],
        lz4.frame.compress(bytes(128), content_checksum=True)[:-1] + b"x",
        struct.pack("<II", 0x184D2A50, 16) + bytes(16),  # a frame that decoders skip
        struct.pack("<II", 0x184D2A50, 2**32 - 1),
        b"\x04\x22\x4d\x18" + bytes(60),
        bytes(128),
    ],
)
def test_other_bytes_than_a_frame_of_the_claimed_length_are_refused(frame: bytes) -> None:
    refused(batch([(128).to_bytes(8, "little") + frame, compressed(B)]))


@pytest.mark.parametrize(
    "options",
    [
        {"store_size": False},
        {"content_checksum": True},
        {"block_linked": False},
        {"block_checksum": True, "block_size": lz4.frame.BLOCKSIZE_MAX4MB},
        {"compression_level": 12},
        {"compression_level": -5},
    ],
)
@pytest.mark.parametrize("rows", [1, 1000, 100_000])
def test_frames_of_other_writers_are_read(options: dict[str, Any], rows: int) -> None:
    values = np.random.default_rng(rows).integers(0, 9, rows)
    frame = lz4.frame.compress(values.tobytes(), **options)
    piece = values.nbytes.to_bytes(8, "little") + frame
    (found,) = read(batch([piece], rows=rows), COLUMNS[:1])
    assert np.array_equal(found, values)


@pytest.mark.parametrize("shift", range(8))
def test_uncompressed_values_are_aligned_wherever_they_lie(shift: int) -> None:
    raw = bytes(shift) + A.tobytes()
    (values,) = read(batch([raw], places=[(shift, len(raw) - shift)], codec=None), COLUMNS[:1])
    assert values.flags.aligned
    assert np.array_equal(values, A)


@pytest.mark.parametrize("raw", [b"", A.tobytes()[:-1], A.tobytes() + b"x"])
def test_uncompressed_values_of_another_length_are_refused(raw: bytes) -> None:
    refused(batch([b"\xff" * 8 + raw, compressed(B)]), "bytes for 16 rows, not 128")
    refused(batch([raw, B.tobytes()], codec=None), "bytes for 16 rows, not 128")


@pytest.mark.parametrize("end", range(1, 80))
def test_a_body_that_is_cut_short_is_refused(end: int) -> None:
    with pytest.raises(ValueError, match="is cut short"):
        read(batch()[:-end] if end <= sum(LENGTHS) else b"")


def test_values_of_the_largest_batch_take_no_more_than_they_have_to() -> None:
    rows = 1_000_000
    piece = compressed(np.zeros(rows, np.int64))
    data = batch([piece], rows=rows)
    with traced_memory(2 * 8 * rows + MEMORY):
        (values,) = read(data, COLUMNS[:1])
    assert len(values) == rows


# Schemas


def test_the_schemas_of_the_tests_are_read() -> None:
    schema = ipc.read_schema(schema_metadata([{}, {}]))
    assert schema.columns == (ipc.Column("c0", np.dtype(np.int64)), ipc.Column("c1", np.dtype(np.int64)))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"endianness": 1}, "big-endian"),
        ({"version": 3}, "another version"),
        ({"kind": 3}, "of another kind"),
        ({"kind": 2}, "of another kind"),
        ({"fields": [{}] * 257}, "has 257 entries; 256 are read"),
        ({"fields": [{2: ("Uint8", 1)}]}, "not of a type of segments"),
        ({"fields": [{2: ("Uint8", 255)}]}, "not of a type of segments"),
        ({"fields": [{2: ("Uint8", 3)}]}, "not of a type of segments"),
        ({"fields": [{3: ("Uint8", 3)}]}, "damaged|cut short"),
        ({"fields": [{0: ("Int32", 2**31 - 1)}]}, "cut short|too long"),
    ],
)
def test_a_schema_with_lies_is_refused(changed: dict[str, Any], reason: str) -> None:
    with traced_memory(MEMORY), pytest.raises(ValueError, match=reason):
        ipc.read_schema(schema_metadata(**changed))


def test_pairs_that_share_one_text_take_no_more_than_the_header() -> None:
    size = 1_000_000

    def pairs(builder: flatbuffers.Builder) -> list[Slots]:
        text = builder.CreateString(b"v" * size)
        keys = [builder.CreateString(f"k{number}") for number in range(16)]
        return [{0: ("offset", key), 1: ("offset", text)} for key in keys]

    metadata = schema_metadata(pairs=pairs)
    assert len(metadata) < 2 * size
    with traced_memory(3 * size), pytest.raises(ValueError, match="is too long"):
        ipc.read_schema(metadata)


def test_very_many_pairs_and_very_long_keys_are_refused() -> None:
    def pairs(builder: flatbuffers.Builder) -> list[Slots]:
        return [{0: ("offset", builder.CreateString(f"k{number}"))} for number in range(17)]

    with pytest.raises(ValueError, match="17 entries; 16 are read"):
        ipc.read_schema(schema_metadata(pairs=pairs))
    with pytest.raises(ValueError, match="4097 bytes is too long"):
        ipc.read_schema(
            schema_metadata(pairs=lambda builder: [{0: ("offset", builder.CreateString("k" * 4097))}])
        )


def test_tables_with_very_many_slots_are_refused_before_memory_is_taken() -> None:
    metadata = schema_metadata([{30_000: ("Uint8", 7)}] * 256)
    assert len(metadata) < 100_000  # the tables share their slots
    with traced_memory(MEMORY), pytest.raises(ValueError, match="a header is damaged"):
        ipc.read_schema(metadata)


def test_tables_that_lie_in_themselves_are_refused() -> None:
    """Offsets only point forwards, except those to the slots of a table: a table may be its own slots, or its header."""
    for offset in range(0, 64, 4):
        for place in range(0, 64, 4):
            data = bytearray(schema_metadata())
            data[place : place + 4] = struct.pack("<i", offset)
            harmless(bytes(data))


# All of them


def harmless(metadata: bytes) -> None:
    """Read as a schema and as a batch, in bounded memory and with no other error."""
    for parse in (
        lambda: ipc.read_schema(metadata),
        lambda: ipc.read_batch(metadata, 0, len(metadata), COLUMNS),
    ):
        with suppress(ValueError):
            parse()


HEADERS = [
    schema_metadata([{}, {}], lambda builder: [{0: ("offset", builder.CreateString("k"))}]),
    ipc.schema_message(COLUMNS, ((b"k", b"v"),))[8:],
    batch()[8:-sum(LENGTHS)],
    ipc.batch_message([A, B], [(b"k", b"v")])[8 : ipc.message_end(ipc.batch_message([A, B], [(b"k", b"v")]), 0)[1]],
]  # fmt: skip


@pytest.mark.ci
@settings(max_examples=examples(600))
@given(st.data())
def test_overwritten_headers_raise_no_other_error(data: st.DataObject) -> None:
    header = bytearray(data.draw(st.sampled_from(HEADERS)))
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        place = data.draw(st.integers(0, len(header) - width))
        value = data.draw(st.sampled_from(LARGE) | st.integers(0, len(header))) & (256**width - 1)
        header[place : place + width] = value.to_bytes(width, "little")
    harmless(bytes(header))


@given(st.binary(max_size=300))
def test_any_bytes_raise_no_other_error(metadata: bytes) -> None:
    harmless(metadata)
    harmless(struct.pack("<I", 4) + metadata)


@pytest.mark.ci
@settings(max_examples=examples(300))
@given(st.data())
def test_overwritten_segments_raise_no_other_error_in_bounded_memory(data: st.DataObject) -> None:
    columns = [ipc.Column(f"probe.{name}", np.dtype(np.float64)) for name in "ab"]
    values = [np.zeros(ROWS), np.ones(ROWS)]
    whole_data = bytearray(
        ipc.schema_message(tuple(columns), ((b"watchstep", b'{"schema": 3}'),))
        + ipc.batch_message(values, [(b"watchstep.segment", b"00000000{}")])
        + ipc.END_OF_STREAM
    )
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        place = data.draw(st.integers(0, len(whole_data) - width))
        value = data.draw(st.sampled_from(LARGE)) & (256**width - 1)
        whole_data[place : place + width] = value.to_bytes(width, "little")
    with traced_memory(MEMORY), pytest.raises(FormatError):
        segment.decode(bytes(whole_data), "s")


def test_errors_of_lz4_are_reported_as_damage() -> None:
    data = bytearray(ipc.batch_message([A, B]))
    data[data.index(b"\x04\x22\x4d\x18") + 12] ^= 255
    with pytest.raises(FormatError, match=r"run/seg is not a complete segment \(LZ4"), whole("run/seg"):
        read(bytes(data))


# Arrays


DTYPES = [np.int8, np.int16, np.int32, np.int64, np.float64]


@given(st.lists(st.integers(-128, 127)), st.sampled_from(DTYPES), st.integers(0, 5))
def test_numbers_survive_a_round_trip(values: list[int], dtype: Any, skipped: int) -> None:
    numbers = np.array(values, dtype)
    array = from_numbers(numbers)
    assert array.equals(pa.array(numbers))
    array.validate(full=True)
    found = to_numbers(pa.chunked_array([array.slice(skipped), array], array.type))
    assert found.dtype == dtype
    assert found.tolist() == [*values[skipped:], *values]


@given(st.lists(st.floats()), st.integers(0, 9))
def test_nan_is_null_and_survives_a_round_trip(values: list[float], skipped: int) -> None:
    array = from_numbers(np.array(values, np.float64), nan_is_null=True)
    array.validate(full=True)
    assert array.equals(pa.array(np.array(values, np.float64), from_pandas=True))
    np.testing.assert_array_equal(to_numbers(array.slice(skipped)), values[skipped:])


@given(st.lists(st.text(st.characters(codec="utf-8"))), st.data())
def test_words_are_arrows(words: list[str], data: st.DataObject) -> None:
    assert from_words(words).equals(pa.array(words, pa.string()))
    codes = data.draw(st.lists(st.integers(0, len(words) - 1))) if words else []
    assert from_codes(np.array(codes, np.int8), words).to_pylist() == [words[code] for code in codes]


def test_what_lies_apart_in_memory_is_copied() -> None:
    assert to_numbers(from_numbers(np.arange(10)[::3])).tolist() == [0, 3, 6, 9]
    assert to_numbers(from_numbers(np.broadcast_to(np.int32(7), 3))).tolist() == [7, 7, 7]


def test_what_no_segment_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 integers are null"):
        to_numbers(pa.array([1, None]))
    with pytest.raises(TypeError, match="timestamp"):
        to_numbers(pa.array([], pa.timestamp("s")))


_SEGMENT = """
import sys
from typing import Any
import numpy as np
from watchstep.format.block import Block, Places
from watchstep.format.statistics import Histograms
from watchstep.format.segment import decode, encode
from watchstep.format.statistics import StatisticsBatch
from watchstep.format.tensors import TensorInfo
zero = np.zeros(1, np.int32)
block = Block(
    step=zero.astype(np.int64), mode=zero.astype(np.int8), worker=zero, time_ns=zero.astype(np.int64), tensor=zero,
    catalogue=(TensorInfo("a", ("weights",), "weight", "", "", 0, (1,)),),
    places=Places(zero, zero + 1, zero, zero.astype(np.int8)),
    statistics=StatisticsBatch.from_matrices(np.zeros((1, 6), np.int64), np.ones((1, 7)), Histograms.empty(1)),
)
assert len(decode(encode(block), "s")) == 1
assert "pandas" not in sys.modules and "pyarrow.compute" not in sys.modules, "imported"
"""


def test_a_segment_needs_no_pandas() -> None:
    pytest.importorskip("pandas")
    run_python("-c", _SEGMENT)
