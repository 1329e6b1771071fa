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
    footer = _Thrift(data, len(data) - 8 - size, len(data) - 8).struct()
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
        reader = _Thrift(data, place, end)
        header = reader.struct()
        kind, unpacked, packed = (_held(header, number, int) for number in (1, 2, 3))
        if kind not in _HEADERS or unpacked < 0 or packed < 0:
            raise ValueError("a page is of an unknown type, or claims a size below nothing")
        values = _held(_held(header, _HEADERS[kind], dict), 1, int)
        if values < 0:
            raise ValueError("a page claims a number of values below nothing")
        yield kind, values, unpacked
        place = reader.place + packed
    if place != end:
        raise ValueError("a page reaches beyond its column")


def _held(struct: Any, number: int, kind: type) -> Any:
    value = struct.get(number) if isinstance(struct, dict) else None
    if type(value) is not kind:
        raise ValueError(f"field {number} is missing, or of another type")
    return value


class _Thrift:
    """Reads one struct as a dict by field number, believing no length beyond its end."""

    def __init__(self, data: Bytes, place: int, end: int) -> None:
        self._data = data
        self.place = place
        self._end = end
        self._left = _MAX_FIELDS

    def struct(self, depth: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        data, end, place = (
            self._data,
            self._end,
            self.place,
        )  # every segment's footer is read: calls saved here are felt
        while place < end:
            head = data[place]
            self.place = place = place + 1
            if head == 0:
                return fields
            kind = head & 15
            if head >> 4:
                number += head >> 4
            else:
                number = self._zigzag()
            if _BYTE < kind <= _I64 and self._left > 0:  # as most are
                self._left -= 1
                fields[number] = self._zigzag()
            elif kind in {_TRUE, _FALSE}:
                fields[number] = kind == _TRUE
            else:
                fields[number] = self._value(kind, depth + 1)
            place = self.place
        raise ValueError("a header is cut short")

    def _value(self, kind: int, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise ValueError("a header is too large or too deep")
        if _BYTE < kind <= _I64:
            return self._zigzag()
        if _TRUE <= kind <= _BYTE:
            return self._byte()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in {_LIST, _SET}:
            head = self._byte()
            size = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(size)]
        if kind == _STRUCT:
            return self.struct(depth)
        raise ValueError(f"a header holds a value of unknown type {kind}")

    def _byte(self) -> int:
        place = self.place
        if place >= self._end:
            raise ValueError("a header is cut short")
        self.place = place + 1
        return self._data[place]

    def _bytes(self, length: int) -> bytes:
        start = self.place
        if length > self._end - start:
            raise ValueError("a header is cut short")
        self.place = start + length
        return bytes(self._data[start : self.place])

    def _varint(self) -> int:
        byte = self._byte()
        if byte < 128:
            return byte
        value = byte & 127
        for shift in range(7, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a header holds a number that is too long")

    def _zigzag(self) -> int:
        place = self.place
        value = self._data[place] if place < self._end else 128
        if value < 128:
            self.place = place + 1
        else:
            value = self._varint()
        return (value >> 1) ^ -(value & 1)
