from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.sdk.format.blocks import BLOCK, rows_of
from tests.sdk.format.parquet_files import (
    TABLE,
    WHOLE,
    decode,
    encode,
    opened,
    read_claims,
    refused,
    with_column,
    written,
)
from watchstep.errors import FormatError
from watchstep.format.parquet.table import to_table
from watchstep.format.segment_checks import MAX_ROWS

# Segments as Parquet: what was written is read, and hostile files are refused before memory is allocated.


MEMORY = 64 * 1024 * 1024


@pytest.fixture
def memory() -> Iterator[pa.MemoryPool]:
    """Arrow's memory, counted from here on."""
    usual = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(counted)
    yield counted
    pa.set_memory_pool(usual)


@pytest.mark.parametrize("name", ["step.x", "histogram_bins.list.item", "tensor.list.element"])
def test_a_column_that_is_read_along_with_one_of_a_segment_is_refused(name: str) -> None:
    assert "not one of a segment's" in refused(written(TABLE.append_column(name, TABLE.column("mean"))))


def test_histograms_with_other_names_of_elements_are_refused() -> None:
    sink = pa.BufferOutputStream()
    place = TABLE.schema.get_field_index("histogram_bins")
    bins = TABLE.column(place).cast(pa.list_(pa.field("item", pa.int16())))
    pq.write_table(TABLE.set_column(place, "histogram_bins", bins), sink, use_compliant_nested_type=False)
    assert "column histogram_bins.list.item is not one" in refused(bytes(sink.getvalue()))


def test_tables_without_rows_are_read() -> None:
    parquet = opened(written(TABLE.slice(0, 0)))
    assert (parquet.rows, parquet.first, parquet.last, parquet.constant) == (0, 0, -1, {})
    block = decode(written(TABLE.slice(0, 0)))
    assert (len(block), block.catalogue) == (0, BLOCK.catalogue)


def test_other_programs_read_a_segment_as_a_table() -> None:
    assert TABLE.num_rows == len(BLOCK)
    assert TABLE.column("tensor").to_pylist()[:2] == ["loss", "loss"]
    assert TABLE.column("probe.dead").to_pylist()[0] == 0.5
    assert to_table(BLOCK).select(["step", "mean"]).equals(TABLE.select(["step", "mean"]))


def test_many_row_groups_and_plain_words_read_the_same() -> None:
    sink = pa.BufferOutputStream()
    words = TABLE.schema.get_field_index("tensor")
    plain = TABLE.set_column(words, "tensor", TABLE.column("tensor").cast(pa.string()))
    pq.write_table(plain, sink, row_group_size=7, use_dictionary=False, data_page_version="2.0")
    assert rows_of(decode(bytes(sink.getvalue()))) == rows_of(BLOCK)


def test_columns_of_later_versions_are_omitted() -> None:
    data = written(TABLE.append_column("later", pa.array(["x"] * len(BLOCK))))
    assert rows_of(decode(data)) == rows_of(BLOCK)


@pytest.mark.ci
@settings(max_examples=examples(400))
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bits_are_refused_or_harmless(flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, mask in flips:
        data[place] ^= mask
    check_harmless(bytes(data))


@pytest.mark.ci
@settings(max_examples=examples(400))
@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bits_in_the_footer_are_refused_or_harmless(flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, mask in flips:
        data[-1 - place] ^= mask
    check_harmless(bytes(data))


@given(st.binary(max_size=200))
@example(b"")
@example(b"PAR1PAR1")
@example(b"PAR1" + bytes(4) + b"\xff\xff\xff\xff" + b"PAR1")
def test_other_bytes_are_refused(data: bytes) -> None:
    refused(data)
    refused(b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1")


def check_harmless(data: bytes) -> None:
    """No other error for any damage; decoded figures are figures that a tensor can have."""
    try:
        block = decode(data)
    except FormatError:
        return
    assert (block.statistics.finite >= 0).all()
    assert len(rows_of(block)) <= MAX_ROWS


@pytest.mark.parametrize("name", TABLE.column_names)
def test_a_column_that_is_missing_of_another_type_or_null_is_refused(name: str) -> None:
    if not name.startswith("probe."):
        refused(written(TABLE.drop_columns([name])))
    refused(with_column(name, [{"a": 1}] * len(BLOCK)))
    if not pa.types.is_floating(TABLE.schema.field(name).type) and not name.startswith("histogram"):
        refused(with_column(name, [None] * len(BLOCK), TABLE.schema.field(name).type))


@pytest.mark.parametrize("name", ["mode", "tensor", "stage"])
def test_an_unknown_word_is_refused(name: str) -> None:
    assert "'nobody'" in refused(with_column(name, ["nobody"] * len(BLOCK)))


@pytest.mark.parametrize(
    ("bins", "counts", "reason"),
    [
        ([0, 0], [1, 1], "ascending"),
        ([2, 1], [1, 1], "ascending"),
        ([2048], [1], "histogram_bins"),
        ([-2149], [1], "histogram_bins"),
        ([0], [0], "histogram_counts"),
        ([0], [-1], "histogram_counts"),
        ([0, 1], [1], "do not match"),
        ([None], [1], "is not a complete segment"),
    ],
)
def test_a_histogram_that_cannot_be_is_refused(bins: list[int], counts: list[int], reason: str) -> None:
    rows = [[0, 1]] * (len(BLOCK) - 1)
    place = TABLE.schema.get_field_index("histogram_bins")
    table = TABLE.set_column(place, "histogram_bins", pa.array([*rows, bins], pa.list_(pa.int16())))
    ones = [[1, 1]] * (len(BLOCK) - 1)
    other = pa.array([*ones, counts], pa.list_(pa.int64()))
    assert reason in refused(written(table.set_column(place + 1, "histogram_counts", other)))


def test_a_footer_with_very_much_metadata_or_very_many_columns_is_refused() -> None:
    pairs = {f"k{number}": "" for number in range(100)}
    assert "entries of metadata" in refused(written(TABLE, **pairs))
    assert "its metadata take" in refused(
        written(TABLE, watchstep=json.dumps({"schema": 1, "x": "y" * 9000}))
    )
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, TABLE.schema) as writer:
        for _ in range(2048 // len(TABLE.schema.names) + 1):
            writer.write_table(TABLE)
    assert "columns in its row groups" in refused(bytes(sink.getvalue()))


def refused_within(memory: pa.MemoryPool, data: bytes) -> str:
    """Refused, with less than `MEMORY` taken from then on."""
    counted = pa.proxy_memory_pool(memory)
    pa.set_memory_pool(counted)
    reason = refused(data)
    assert counted.max_memory() < MEMORY
    return reason


@pytest.mark.ci
def test_a_file_of_very_many_rows_is_refused_before_memory_is_taken(memory: pa.MemoryPool) -> None:
    repeated = TABLE.take([0] * 1000)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, repeated.schema, compression="zstd") as writer:
        for _ in range(MAX_ROWS // 1000 + 1):
            writer.write_table(repeated, row_group_size=1000)
    refused_within(memory, bytes(sink.getvalue()))


@pytest.mark.ci
def test_lists_that_unpack_to_very_much_are_refused_before_memory_is_taken(memory: pa.MemoryPool) -> None:
    values = pa.array(np.zeros(40_000_000, np.int16))
    offsets = pa.array([*([0] * len(BLOCK)), len(values)], pa.int32())
    data = with_column("histogram_bins", pa.ListArray.from_arrays(offsets, values))
    assert len(data) < 100_000
    assert "histogram_bins claims 40000" in refused_within(memory, data)


def test_the_pages_of_the_largest_segment_are_read() -> None:
    rows = np.arange(MAX_ROWS)
    block = BLOCK.take(np.zeros(len(rows), np.int64))
    block = replace(block, step=rows, time_ns=7919 * rows)
    assert read_claims(encode(block)).rows == MAX_ROWS


SMALL_TABLE = pa.table({"a": [1, 2, 3], "words": ["x", "y", "x"], "list": [[1], [], [2, 3]]})


def written_by_pyarrow(**options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(SMALL_TABLE, sink, **options)
    return sink.getvalue()


SMALL_FILE = written_by_pyarrow()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("rows", [1, 3])
def test_claims_are_those_that_pyarrow_reads(version: str, compression: str, rows: int) -> None:
    data = written_by_pyarrow(data_page_version=version, compression=compression, row_group_size=rows)
    claims, meta = read_claims(data), pq.ParquetFile(pa.BufferReader(data)).metadata
    columns = [
        meta.row_group(group).column(place)
        for group in range(meta.num_row_groups)
        for place in range(meta.num_columns)
    ]
    assert claims.rows == 3
    assert [claim.path for claim in claims.columns] == [column.path_in_schema for column in columns]
    assert [claim.values for claim in claims.columns] == [column.num_values for column in columns]
    for claim, column in zip(claims.columns, columns, strict=True):
        assert 0 < claim.pages <= column.total_uncompressed_size


@given(st.integers(0, len(SMALL_FILE) - 1), st.integers(1, 255))
def test_a_damaged_file_is_read_or_refused(place: int, mask: int) -> None:
    data = bytearray(SMALL_FILE)
    data[place] ^= mask
    try:
        read_claims(bytes(data))
    except ValueError:
        return


def footer_of(content: bytes) -> bytes:
    return b"PAR1" + content + len(content).to_bytes(4, "little") + b"PAR1"


# Thrift's compact protocol: a field is (distance << 4 | type); 5 is i32, 6 i64, 8 binary, 9 list, 12 struct.
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short"),
        (b"\x36\x80", "cut short"),
        (b"\x36" + b"\x80" * 10, "number that is too long"),
        (b"\x68\x7f", "cut short"),
        (b"\x6f\x00", "unknown type"),
        (b"\x69\xf0\xff\xff\xff\x7f", "too large"),
        (b"\x69\x20\x00\x00", "unknown type"),
        (b"\x6c" * 100, "too deep"),
        (b"\x69" + b"\x19" * 100, "too deep"),
        (b"\x36\x06\x00", "field 4 is missing"),
        (b"\x36\x00\x19\x0c\x00", None),
        (b"\x36\x06\x19\x0c\x00", "rows of its row groups are not"),
        (b"\x36\x06\x19\x1c\x36\x08\x00\x00", "rows of its row groups are not"),
        (b"\x36\x06\x19\x2c\x36\x08\x00\x36\x01\x00\x00", "rows of its row groups are not"),
        (b"\x36\x06\x19\x1c\x00\x00", "field 3 is missing"),
        (b"\x36\x06\x19\x1c\x36\x06\x00\x00", "field 1 is missing"),
        (b"\x36\x06\x19\x1c\x19\x1c\x3c\x00\x00\x26\x06\x00\x00", "field 3 is missing"),
        (
            b"\x05\x06\x06\x05\x08\x09\x0c\x11\x02\x17" + bytes(8) + b"\x13\x05\x00",
            "field 3 .* type 5 and not 6",
        ),
        (b"\x36\x06\x06\x06\x06\x00", "field 3 twice"),
        (b"\x06\x84\x80\x08\x06\x00", "field 65538"),
        (b"\x06\x03\x06\x00", "field -2"),
        (b"\x06\x00\x06\x00", "field 0"),
        (b"\x15" + b"\xff" * 5 + b"\x01\x00", "too large for its type"),
        (b"\x29\x15\x02\x00", "list of a header holds type 5"),
    ],
)
def test_footers_made_by_hand(content: bytes, reason: str | None) -> None:
    if reason is None:
        assert read_claims(footer_of(content)).columns == []
        return
    with pytest.raises(ValueError, match=reason):
        read_claims(footer_of(content))


def zigzag(numbers: tuple[int, ...]) -> list[bytes]:
    """Numbers as Thrift writes them."""
    return [varint(2 * number if number >= 0 else -2 * number - 1) for number in numbers]


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 + 128]) + varint(number // 128)


def page_of(*numbers: int) -> bytes:
    """A data page's header: type, unpacked and packed size, and values."""
    kind, unpacked, packed, values = zigzag(numbers)
    return b"\x15%b\x15%b\x15%b\x2c\x15%b\x15\x00\x00\x00" % (kind, unpacked, packed, values)


def column_of(pages: bytes, *numbers: int, groups: int = 1) -> bytes:
    """A file of one column "a" whose metadata claims so many values, a length and a start, in each row group the same."""
    claims = b"".join(b"\x26" + number for number in zigzag(numbers))
    schema = b"\x29\x2c\x55\x02\x00\x15\x04\x38\x01a\x00"
    group = b"\x19\x1c\x3c\x39\x18\x01a" + claims + b"\x00\x00\x26\x06\x00"
    content = (
        schema + b"\x16" + varint(6 * groups) + b"\x19" + bytes([groups * 16 + 12]) + group * groups + b"\x00"
    )
    return b"PAR1" + pages + content + len(content).to_bytes(4, "little") + b"PAR1"


PAGE = page_of(0, 20, 0, 3)
LENGTH = len(PAGE)


def test_a_column_made_by_hand_is_read() -> None:
    (claim,) = read_claims(column_of(PAGE, 3, LENGTH, 4)).columns
    assert (claim.path, claim.values, claim.pages) == ("a", 3, 20)
    assert read_claims(column_of(b"", 0, -1, -1)).columns[0].pages == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (column_of(PAGE, 3, LENGTH, 3), "lies outside the file"),
        (column_of(PAGE, 3, 63, 63), "lies outside the file"),
        (column_of(PAGE, 3, -1, 4), "lies outside the file"),
        (column_of(PAGE, -3, LENGTH, 4), "lies outside the file"),
        (column_of(PAGE, 4, LENGTH, 4), "claims 4 values, its pages 3"),
        (column_of(page_of(1, 20, 0, 3), 3, LENGTH, 4), "unknown type"),
        (column_of(page_of(0, -20, 0, 3), 3, LENGTH, 4), "size below nothing"),
        (column_of(page_of(0, 20, -1, 3), 3, LENGTH, 4), "size below nothing"),
        (column_of(page_of(0, 20, 0, -3), 3, LENGTH, 4), "number of values below nothing"),
        (column_of(page_of(0, 20, 1, 3), 3, LENGTH, 4), "reaches beyond its column"),
        (column_of(PAGE, 3, LENGTH - 1, 4), "cut short"),
    ],
)
def test_columns_that_lie_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_claims(data)


def test_a_footer_with_very_many_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        read_claims(footer_of(b"\x69\xf3" + b"\xff\xff\x7f" + bytes(2_100_000)))


SCHEMA_OF_B = column_of(PAGE, 3, LENGTH, 4).replace(b"\x38\x01a", b"\x38\x01b")
GROUP_IN_ITSELF = column_of(PAGE, 3, LENGTH, 4).replace(b"\x55\x02", b"\x55\x04")
PAGE_OF_TWO_SIZES = bytes([0x15, 0, 0x15, 40, 0x06, 4, 2, *PAGE[4:]])
LONG_PAGE = bytes([0x15, 0, 0x16, *PAGE[3:]])


EMPTY_PAGE = page_of(0, 0, 0, 0)


def with_empty_pages(number: int) -> bytes:
    pages = PAGE + EMPTY_PAGE * number
    return column_of(pages, 3, len(pages), 4)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (column_of(PAGE, 3, LENGTH, 4, groups=2), "column a lies over another"),
        (with_empty_pages(16_384), "more than 16384 pages"),
    ],
)
def test_pages_are_read_once_and_not_without_end(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_claims(data)


def test_many_empty_pages_are_read() -> None:
    assert read_claims(with_empty_pages(16_383)).columns[0].values == 3


def test_the_header_of_a_page_is_small() -> None:
    more = b"\x95\x00" + b"\x15\x00" * 63  # fields 14 and on, which no page has
    wide = page_of(0, 20, 0, 3)[:-1] + more + b"\x00"
    with pytest.raises(ValueError, match="header is too large"):
        read_claims(column_of(wide, 3, len(wide), 4))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (SCHEMA_OF_B, "not those of the schema"),
        (GROUP_IN_ITSELF, "schema is cut short"),
        (column_of(PAGE_OF_TWO_SIZES, 3, len(PAGE_OF_TWO_SIZES), 4), "field 2 twice"),
        (column_of(LONG_PAGE, 3, len(LONG_PAGE), 4), "field 2 .* type 6 and not 5"),
    ],
)
def test_what_arrow_would_read_otherwise_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_claims(data)
