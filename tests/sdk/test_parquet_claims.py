from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.parquet_claims import read_claims

TABLE = pa.table({"a": [1, 2, 3], "words": ["x", "y", "x"], "list": [[1], [], [2, 3]]})


def written(**options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(TABLE, sink, **options)
    return sink.getvalue()


WHOLE = written()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("rows", [1, 3])
def test_claims_are_what_pyarrow_says_of_its_own_file(version: str, compression: str, rows: int) -> None:
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
        (b"\x38\x7f", "cut short"),
        (b"\x3f\x00", "unknown type"),
        (b"\x39\xf0\xff\xff\xff\x7f", "too large"),
        (b"\x39\x20\x00\x00", "unknown type"),
        (b"\x3c" * 100, "too deep"),
        (b"\x19" * 100, "too deep"),
        (b"\x36\x06\x00", "field 4 is missing"),
        (b"\x36\x06\x19\x0c\x00", None),
        (b"\x36\x06\x19\x1c\x00\x00", "field 1 is missing"),
        (b"\x36\x06\x19\x1c\x19\x1c\x3c\x00\x00\x00\x00", "field 3 is missing"),
        (b"\x05\x06\x06\x05\x08\x09\x0c\x11\x02\x17" + bytes(8) + b"\x13\x05\x00", "missing"),
    ],
)
def test_footers_made_by_hand(content: bytes, reason: str | None) -> None:
    if reason is None:
        assert read_claims(footer(content)).columns == []
        return
    with pytest.raises(ValueError, match=reason):
        read_claims(footer(content))


def zigzag(numbers: tuple[int, ...]) -> list[int]:
    """Small numbers as Thrift writes them, each a byte."""
    return [2 * number if number >= 0 else -2 * number - 1 for number in numbers]


def page(*numbers: int) -> bytes:
    """A data page's header: type, unpacked and packed size, and values."""
    kind, unpacked, packed, values = zigzag(numbers)
    return bytes([0x15, kind, 0x15, unpacked, 0x15, packed, 0x2C, 0x15, values, 0, 0])


def column(pages: bytes, *numbers: int) -> bytes:
    """A file of one column "a" whose metadata claims so many values, a length and a start."""
    claims = b"".join(bytes([0x26, number]) for number in zigzag(numbers))
    content = b"\x36\x06\x19\x1c\x19\x1c\x3c\x39\x18\x01a" + claims + bytes(4)
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
        read_claims(footer(b"\x19\xf3" + b"\xff\xff\x7f" + bytes(2_100_000)))
