"""What a Parquet file says of its own sizes, read before anything is unpacked.

pyarrow allocates what a page header claims, and aborts the process on some damaged footers when it is asked for their
details; so the footer and the page headers are read here. Both are structs in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, whose field numbers these are.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

_MAGIC = b"PAR1"
_MAX_FIELDS = 500_000
_MAX_DEPTH = 16
Bytes = bytes | bytearray | memoryview
_TRUE, _FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12
_MORE = 128
"""A byte of a number from which on further ones follow."""
_LONG_LIST = 15
"""A list's size that says that its size follows."""


@dataclass(frozen=True)
class ColumnClaim:
    """One column's part of one row group.

    Attributes:
        path: the column's name; of a list's elements, with ``.list.element``.
        values: how many values it claims.
        pages: bytes that its pages claim to take when unpacked.
    """

    path: str
    values: int
    pages: int


@dataclass(frozen=True)
class Claims:
    """A file's rows, and its columns in each row group."""

    rows: int
    columns: list[ColumnClaim]


@dataclass(frozen=True)
class Chunk:
    """Where one column's part of one row group lies, as the footer says.

    Attributes:
        path: as in `ColumnClaim`.
        values: how many values it claims.
        start: its first byte.
        length: bytes, packed.
        least: the smallest value's bytes, where the writer said it.
        most: the largest value's bytes, where the writer said it.
    """

    path: str
    values: int
    start: int
    length: int
    least: bytes | None
    most: bytes | None


@dataclass(frozen=True)
class Footer:
    """A file's rows, its columns in each row group, and its metadata."""

    rows: int
    chunks: list[Chunk]
    metadata: dict[bytes, bytes]


def read_claims(data: bytes) -> Claims:
    """Read what a file claims.

    Raises:
        ValueError: it is no Parquet file, or contradicts itself.
    """
    footer = read_footer(data)
    return claims_of(data, footer)


def read_footer(data: Bytes) -> Footer:
    """Read a file's footer; only it and the first four bytes are looked at.

    Raises:
        ValueError: it is no Parquet file, or a column lies outside it.
    """
    size = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC or size > len(data) - 12:
        raise ValueError("no whole Parquet file")
    try:
        return _footer(data, size)
    except (
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
    ) as error:  # a header of another shape than Parquet's
        raise ValueError(f"the footer has another form ({error})") from error


def _footer(data: Bytes, size: int) -> Footer:
    footer, _, _ = _struct(data, len(data) - 8 - size, len(data) - 8, _MAX_FIELDS)
    chunks = [
        _chunk(len(data), _held(chunk, 3, dict))
        for group in _held(footer, 4, list)
        for chunk in _held(group, 1, list)
    ]
    pairs = footer.get(5, [])
    metadata = {_held(pair, 1, bytes): _held(pair, 2, bytes) for pair in pairs if 2 in pair}
    return Footer(_held(footer, 3, int), chunks, metadata)


def claims_of(data: Bytes, footer: Footer, columns: Container[str] | None = None) -> Claims:
    """Read what the pages claim.

    Args:
        data: the file; where only some columns are asked for, the others' bytes may be missing (be zero).
        footer: what `read_footer` gave for it.
        columns: names of columns; all where it is left out.

    Raises:
        ValueError: the pages contradict the footer.
    """
    chosen = [
        chunk
        for chunk in footer.chunks
        if columns is None or chunk.path.removesuffix(".list.element") in columns
    ]
    return Claims(footer.rows, [_column_claim(data, chunk) for chunk in chosen])


def _chunk(size: int, meta: dict[int, Any]) -> Chunk:
    path = b".".join(_held(meta, 3, list)).decode()
    values, length = _held(meta, 5, int), _held(meta, 7, int)
    if values == 0:  # Arrow reads no page of it, and writes no place for one
        return Chunk(path, 0, 4, 0, None, None)
    start = min(_held(meta, 9, int), meta.get(11, _held(meta, 9, int)))
    if start < 4 or length < 0 or values < 0 or start + length > size:
        raise ValueError(f"column {path[:80]} lies outside the file")
    known = meta.get(12, {})
    return Chunk(path, values, start, length, known.get(6), known.get(5))


def _column_claim(data: Bytes, chunk: Chunk) -> ColumnClaim:
    seen = unpacked = 0
    for kind, held, pages in _pages(data, chunk.start, chunk.start + chunk.length):
        seen += held if kind != _DICTIONARY else 0
        unpacked += pages
    if seen != chunk.values:
        raise ValueError(f"column {chunk.path[:80]} claims {chunk.values} values, its pages {seen}")
    return ColumnClaim(chunk.path, chunk.values, unpacked)


_DICTIONARY = 2
_HEADERS = {0: 5, _DICTIONARY: 7, 3: 8}
"""Page types, and the field of the header that is theirs: data, dictionary, data of version 2."""


def _pages(data: Bytes, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Type, values and unpacked bytes of each page between two places."""
    while place < end:
        header, behind, _ = _struct(data, place, end, _MAX_FIELDS)
        kind, unpacked, packed = (_held(header, number, int) for number in (1, 2, 3))
        if kind not in _HEADERS or unpacked < 0 or packed < 0:
            raise ValueError("a page is of an unknown type, or claims a size below nothing")
        values = _held(_held(header, _HEADERS[kind], dict), 1, int)
        if values < 0:
            raise ValueError("a page claims a number of values below nothing")
        yield kind, values, unpacked
        place = behind + packed
    if place != end:
        raise ValueError("a page reaches beyond its column")


def _held(struct: Any, number: int, kind: type) -> Any:
    value = struct.get(number) if isinstance(struct, dict) else None
    if type(value) is not kind:
        raise ValueError(f"field {number} is missing, or of another type")
    return value


# Every segment's footer is read by what follows: places are handed on and short numbers read in line, for calls are felt.
def _struct(data: Bytes, place: int, end: int, left: int, depth: int = 0) -> tuple[dict[int, Any], int, int]:
    """A struct as a dict by field number, believing no length beyond its end; the place behind it, and how many fields are left.

    Raises:
        ValueError: it is cut short, too large, too deep, or of another form.
        IndexError: it is cut short where the data are.
    """
    fields: dict[int, Any] = {}
    number = 0
    if depth > _MAX_DEPTH:
        raise ValueError("a header is too deep")
    while place < end:
        head = data[place]
        place += 1
        if head == 0:
            return fields, place, left
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, place = _number(data, place, end)
        left -= 1
        if left < 0:
            raise ValueError("a header is too large")
        if _BYTE < kind <= _I64:  # as most are
            if place < end and (short := data[place]) < _MORE:
                fields[number], place = (short >> 1) ^ -(short & 1), place + 1
            else:
                fields[number], place = _number(data, place, end)
        elif kind == _BINARY:
            fields[number], place = _bytes(data, place, end)
        elif _TRUE <= kind <= _FALSE:
            fields[number] = kind == _TRUE
        elif kind == _STRUCT:
            fields[number], place, left = _struct(data, place, end, left, depth + 1)
        elif _LIST <= kind <= _SET:
            fields[number], place, left = _list(data, place, end, left, depth + 1)
        else:
            fields[number], place = _plain(kind, data, place, end)
    raise ValueError("a header is cut short")


def _list(data: Bytes, place: int, end: int, left: int, depth: int) -> tuple[list[Any], int, int]:
    head, place = data[place], place + 1
    size, kind = head >> 4, head & 15
    if size == _LONG_LIST:
        size, place = _varint(data, place, end)
    left -= size
    if left < 0 or depth > _MAX_DEPTH:
        raise ValueError("a header is too large or too deep")
    values: list[Any] = []
    for _ in range(size):
        value: Any
        if kind == _STRUCT:
            value, place, left = _struct(data, place, end, left, depth + 1)
        elif _BYTE < kind <= _I64:
            value, place = _number(data, place, end)
        elif kind == _BINARY:
            value, place = _bytes(data, place, end)
        elif _LIST <= kind <= _SET:
            value, place, left = _list(data, place, end, left, depth + 1)
        else:
            value, place = _plain(kind, data, place, end)
        values.append(value)
    return values, place, left


def _plain(kind: int, data: Bytes, place: int, end: int) -> tuple[int | bytes, int]:
    """A value of another type; a truth takes a byte in a list."""
    if kind != _DOUBLE and not _TRUE <= kind <= _BYTE:
        raise ValueError(f"a header holds a value of unknown type {kind}")
    size = 8 if kind == _DOUBLE else 1
    if size > end - place:
        raise ValueError("a header is cut short")
    held = bytes(data[place : place + size])
    return (held if kind == _DOUBLE else held[0]), place + size


def _bytes(data: Bytes, place: int, end: int) -> tuple[bytes, int]:
    if place < end and (size := data[place]) < _MORE:
        place += 1
    else:
        size, place = _varint(data, place, end)
    if size > end - place:
        raise ValueError("a header is cut short")
    return bytes(data[place : place + size]), place + size


def _number(data: Bytes, place: int, end: int) -> tuple[int, int]:
    """A signed number, and the place behind it."""
    if place < end and (value := data[place]) < _MORE:
        return (value >> 1) ^ -(value & 1), place + 1
    value, place = _varint(data, place, end)
    return (value >> 1) ^ -(value & 1), place


def _varint(data: Bytes, place: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            raise ValueError("a header is cut short")
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < _MORE:
            return value, place
    raise ValueError("a header holds a number that is too long")
