from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.format.parquet_files import read_claims

TABLE = pa.table({"a": [1, 2, 3], "words": ["x", "y", "x"], "list": [[1], [], [2, 3]]})


def written(**options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink, **options)
    return sink.getvalue()


WHOLE = written()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("rows", [1, 3])
def test_claims_are_those_that_pyarrow_reads(version: str, compression: str, rows: int) -> None:
    data = written(data_page_version=version, compression=compression, row_group_size=rows)
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


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_damaged_file_is_read_or_refused(place: int, mask: int) -> None:
    data = bytearray(WHOLE)
    data[place] ^= mask
    try:
        read_claims(bytes(data))
    except ValueError:
        return


def footer(content: bytes) -> bytes:
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
        assert read_claims(footer(content)).columns == []
        return
    with pytest.raises(ValueError, match=reason):
        read_claims(footer(content))


def zigzag(numbers: tuple[int, ...]) -> list[bytes]:
    """Numbers as Thrift writes them."""
    return [varint(2 * number if number >= 0 else -2 * number - 1) for number in numbers]


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 + 128]) + varint(number // 128)


def page(*numbers: int) -> bytes:
    """A data page's header: type, unpacked and packed size, and values."""
    kind, unpacked, packed, values = zigzag(numbers)
    return b"\x15%b\x15%b\x15%b\x2c\x15%b\x15\x00\x00\x00" % (kind, unpacked, packed, values)


def column(pages: bytes, *numbers: int, groups: int = 1) -> bytes:
    """A file of one column "a" whose metadata claims so many values, a length and a start, in each row group the same."""
    claims = b"".join(b"\x26" + number for number in zigzag(numbers))
    schema = b"\x29\x2c\x55\x02\x00\x15\x04\x38\x01a\x00"
    group = b"\x19\x1c\x3c\x39\x18\x01a" + claims + b"\x00\x00\x26\x06\x00"
    content = (
        schema + b"\x16" + varint(6 * groups) + b"\x19" + bytes([groups * 16 + 12]) + group * groups + b"\x00"
    )
    return b"PAR1" + pages + content + len(content).to_bytes(4, "little") + b"PAR1"


PAGE = page(0, 20, 0, 3)
LENGTH = len(PAGE)


def test_a_column_made_by_hand_is_read() -> None:
    (claim,) = read_claims(column(PAGE, 3, LENGTH, 4)).columns
    assert (claim.path, claim.values, claim.pages) == ("a", 3, 20)
    assert read_claims(column(b"", 0, -1, -1)).columns[0].pages == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (column(PAGE, 3, LENGTH, 3), "lies outside the file"),
        (column(PAGE, 3, 63, 63), "lies outside the file"),
        (column(PAGE, 3, -1, 4), "lies outside the file"),
        (column(PAGE, -3, LENGTH, 4), "lies outside the file"),
        (column(PAGE, 4, LENGTH, 4), "claims 4 values, its pages 3"),
        (column(page(1, 20, 0, 3), 3, LENGTH, 4), "unknown type"),
        (column(page(0, -20, 0, 3), 3, LENGTH, 4), "size below nothing"),
        (column(page(0, 20, -1, 3), 3, LENGTH, 4), "size below nothing"),
        (column(page(0, 20, 0, -3), 3, LENGTH, 4), "number of values below nothing"),
        (column(page(0, 20, 1, 3), 3, LENGTH, 4), "reaches beyond its column"),
        (column(PAGE, 3, LENGTH - 1, 4), "cut short"),
    ],
)
def test_columns_that_lie_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_claims(data)


def test_a_footer_with_very_many_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        read_claims(footer(b"\x69\xf3" + b"\xff\xff\x7f" + bytes(2_100_000)))


SCHEMA_OF_B = column(PAGE, 3, LENGTH, 4).replace(b"\x38\x01a", b"\x38\x01b")
GROUP_IN_ITSELF = column(PAGE, 3, LENGTH, 4).replace(b"\x55\x02", b"\x55\x04")
PAGE_OF_TWO_SIZES = bytes([0x15, 0, 0x15, 40, 0x06, 4, 2, *PAGE[4:]])
LONG_PAGE = bytes([0x15, 0, 0x16, *PAGE[3:]])


EMPTY_PAGE = page(0, 0, 0, 0)


def with_empty_pages(number: int) -> bytes:
    pages = PAGE + EMPTY_PAGE * number
    return column(pages, 3, len(pages), 4)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (column(PAGE, 3, LENGTH, 4, groups=2), "column a lies over another"),
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
    wide = page(0, 20, 0, 3)[:-1] + more + b"\x00"
    with pytest.raises(ValueError, match="header is too large"):
        read_claims(column(wide, 3, len(wide), 4))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (SCHEMA_OF_B, "not those of the schema"),
        (GROUP_IN_ITSELF, "schema is cut short"),
        (column(PAGE_OF_TWO_SIZES, 3, len(PAGE_OF_TWO_SIZES), 4), "field 2 twice"),
        (column(LONG_PAGE, 3, len(LONG_PAGE), 4), "field 2 .* type 6 and not 5"),
    ],
)
def test_what_arrow_would_read_otherwise_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_claims(data)
