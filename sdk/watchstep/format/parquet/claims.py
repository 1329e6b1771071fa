"""Sizes that a Parquet file claims, read before decompression.

pyarrow allocates the size that a page header claims, and aborts the process when it reads the details of some damaged footers.
So the footer and the page headers are parsed here. Both are structs in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. The field numbers are defined by
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

_MAGIC = b"PAR1"
_MAX_FIELDS = 100_000
_MAX_DEPTH = 16
_MAX_PAIRS = 64
"""Maximum number of metadata entries of the file and its columns. Watchstep's own writer creates at most four."""
_MAX_CHUNKS = 2048
"""Maximum number of columns of all row groups. Watchstep's own writer creates one row group of at most about 90 columns."""
_MAX_PAGES = 16_384
"""Maximum number of pages of the columns that are read. The largest segment of Watchstep's own writer has about 5,000 (88 columns of
a million rows in pages of 20,000; 32 million histogram elements in pages of 1 MiB)."""
_MAX_PAGE_FIELDS = 64
"""Maximum number of fields of a page header. pyarrow writes up to 21, with statistics."""
Bytes = bytes | bytearray | memoryview
_TRUE, _FALSE, _BYTE, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 5, 6, 7, 8, 9, 10, 12
_MAX_FIELD = 2**15 - 1
_BITS = {4: 16, _I32: 32, _I64: 64}
_CONTINUATION = 128
"""A byte of a number with at least this value is followed by another byte."""
_LONG_LIST = 15
"""A list size that means that the size follows."""


class _Field(NamedTuple):
    """Wire type of a field. Arrow skips fields of another type, and reads elements of a list without checking their type."""

    kind: int
    element: int = 0
    form: Mapping[int, _Field] = MappingProxyType({})


_Form = Mapping[int, _Field]
_ANY: _Form = MappingProxyType({})


def _structs(form: _Form = _ANY) -> _Field:
    return _Field(_LIST, _STRUCT, form)


_WIDE, _SHORT, _TEXT = _Field(_I64), _Field(_I32), _Field(_BINARY)
_STATISTICS = _Field(_STRUCT, form={1: _TEXT, 2: _TEXT, 3: _WIDE, 4: _WIDE, 5: _TEXT, 6: _TEXT})
_SIZES = _Field(_STRUCT, form={1: _WIDE, 2: _Field(_LIST, _I64), 3: _Field(_LIST, _I64)})
_PLACES = _Field(_STRUCT, form={2: _Field(_LIST, _I32)})
_PAIRS = _structs({1: _TEXT, 2: _TEXT})
_COLUMN: _Form = {
    1: _SHORT,
    2: _Field(_LIST, _I32),
    3: _Field(_LIST, _BINARY),
    4: _SHORT,
    **dict.fromkeys((5, 6, 7), _WIDE),
    8: _PAIRS,
    **dict.fromkeys((9, 10, 11), _WIDE),
    12: _STATISTICS,
    13: _structs(),
    16: _SIZES,
    17: _PLACES,
}
_CHUNK: _Form = {1: _TEXT, 2: _WIDE, 3: _Field(_STRUCT, form=_COLUMN)}
_GROUP: _Form = {1: _structs(_CHUNK), 2: _WIDE, 3: _WIDE, 4: _structs()}
_ELEMENT: _Form = {1: _SHORT, 3: _SHORT, 4: _TEXT, 5: _SHORT}
_FILE: _Form = {1: _SHORT, 2: _structs(_ELEMENT), 3: _WIDE, 4: _structs(_GROUP), 5: _PAIRS, 7: _structs()}
_PAGE: _Form = {
    **dict.fromkeys((1, 2, 3, 4), _SHORT),
    5: _Field(_STRUCT, form={**dict.fromkeys((1, 2, 3, 4), _SHORT), 5: _STATISTICS}),
    7: _Field(_STRUCT, form={1: _SHORT, 2: _SHORT}),
    8: _Field(_STRUCT, form={**dict.fromkeys((1, 2, 3, 4, 5, 6), _SHORT), 8: _STATISTICS}),
}


@dataclass(frozen=True)
class ColumnClaim:
    """One column's part of one row group.

    Attributes:
        path: Name of the column, with ``.list.element`` for elements of a list.
        values: Claimed number of values.
        pages: Claimed uncompressed size of its pages in bytes, including dictionaries.
        dictionary_values: Claimed number of values of its dictionaries.
        dictionary_pages: Claimed uncompressed size of its dictionaries in bytes.
        encodings: Parquet's numbers of the encodings of its values.
    """

    path: str
    values: int
    pages: int
    dictionary_values: int = 0
    dictionary_pages: int = 0
    encodings: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Claims:
    """The number of rows of a file, and its columns in each row group."""

    rows: int
    columns: list[ColumnClaim]


@dataclass(frozen=True)
class Chunk:
    """Location of one column's part of one row group, according to the footer.

    Attributes:
        path: As in `ColumnClaim`.
        values: Claimed number of values.
        start: Offset of its first byte.
        length: Compressed size in bytes.
        least: Bytes of the smallest value, if the writer recorded it.
        most: Bytes of the largest value, if the writer recorded it.
    """

    path: str
    values: int
    start: int
    length: int
    least: bytes | None
    most: bytes | None


@dataclass(frozen=True)
class Footer:
    """The number of rows of a file, its columns in each row group, the paths of its columns in the schema, and its metadata."""

    rows: int
    chunks: list[Chunk]
    leaves: list[tuple[str, ...]]
    metadata: dict[bytes, bytes]


def read_footer(data: Bytes) -> Footer:
    """Read a file's footer. Only the footer and the first four bytes are read.

    Raises:
        ValueError: The file is not a Parquet file, or a column is outside of it.
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
    ) as error:  # the header does not have Parquet's form
        raise ValueError(f"the footer has another form ({error})") from error


def _footer(data: Bytes, size: int) -> Footer:
    footer, _, _ = _struct(data, len(data) - 8 - size, len(data) - 8, _MAX_FIELDS, form=_FILE)
    groups = _entry(footer, 4, list)
    # Arrow reserves memory for a row group's rows before it reads one.
    rows = [_entry(group, 3, int) for group in groups]
    if any(count < 0 for count in rows) or sum(rows) != _entry(footer, 3, int):
        raise ValueError("the rows of its row groups are not the file's rows")
    leaves = _leaves(footer.get(2, []))
    pairs = footer.get(5, [])
    columns = [chunk.get(3, {}) for group in groups for chunk in _entry(group, 1, list)]
    if len(columns) > _MAX_CHUNKS:
        raise ValueError(f"has {len(columns)} columns in its row groups, at most {_MAX_CHUNKS} are read")
    if len(pairs) + sum(len(column.get(8, [])) for column in columns) > _MAX_PAIRS:
        raise ValueError(f"has more than {_MAX_PAIRS} entries of metadata")
    chunks = [chunk for group in groups for chunk in _chunks(len(data), group, leaves)]
    _check_apart(chunks)
    metadata = {_entry(pair, 1, bytes): _entry(pair, 2, bytes) for pair in pairs if 2 in pair}
    return Footer(_entry(footer, 3, int), chunks, leaves, metadata)


def _check_apart(chunks: list[Chunk]) -> None:
    """Check that chunks do not overlap: shared pages would be read once per chunk."""
    end = 0
    for chunk in sorted((chunk for chunk in chunks if chunk.length), key=lambda chunk: chunk.start):
        if chunk.start < end:
            raise ValueError(f"column {chunk.path[:80]} lies over another")
        end = chunk.start + chunk.length


def _leaves(elements: list[dict[int, Any]]) -> list[tuple[str, ...]]:
    """Return the paths of a schema's columns. In the schema, groups precede their members."""
    leaves: list[tuple[str, ...]] = []
    groups: list[tuple[tuple[str, ...], int]] = []  # path and remaining number of children of each open group
    for number, element in enumerate(elements):
        children = element.get(5, 0)
        if (1 in element) == (children > 0) or (number > 0 and not groups):
            if number > 0 or len(elements) > 1 or children:
                raise ValueError("the schema is no tree of groups and columns")
            return []
        path: tuple[str, ...] = ()
        if number > 0:
            parent, remaining = groups.pop()
            path = (*parent, _entry(element, 4, bytes).decode())
            if remaining > 1:
                groups.append((parent, remaining - 1))
        if len(path) > _MAX_DEPTH:
            raise ValueError("the schema is too deep")
        if children:
            groups.append((path, children))
        else:
            leaves.append(path)
    if groups:
        raise ValueError("the schema is cut short")
    return leaves


def _chunks(size: int, group: dict[int, Any], leaves: list[tuple[str, ...]]) -> list[Chunk]:
    """Return the columns of a row group. Arrow identifies them by their index in the schema, not by their path."""
    metas = [_entry(chunk, 3, dict) for chunk in _entry(group, 1, list)]
    chunks = [_chunk(size, meta) for meta in metas]
    if [tuple(part.decode() for part in meta[3]) for meta in metas] != leaves:
        raise ValueError("the columns of a row group are not those of the schema")
    return chunks


def claims_of(data: Bytes, footer: Footer, columns: Container[str] | None = None) -> Claims:
    """Read the claims of pages.

    Args:
        data: The file. If only some columns are requested, bytes of others may be zero.
        footer: Result of `read_footer` for the file.
        columns: Names of columns; None for all.

    Raises:
        ValueError: The pages contradict the footer.
    """
    claims: list[ColumnClaim] = []
    budget = _MAX_PAGES
    for chunk in footer.chunks:
        if columns is None or is_chosen(chunk.path, columns):
            claim, budget = _column_claim(data, chunk, budget)
            claims.append(claim)
    return Claims(footer.rows, claims)


def is_chosen(path: str, columns: Container[str]) -> bool:
    """Return whether pyarrow reads a column for requested names: by its path, or by a prefix of it that ends before a dot."""
    return path in columns or any(path[:end] in columns for end, sign in enumerate(path) if sign == ".")


def _chunk(size: int, meta: dict[int, Any]) -> Chunk:
    path = b".".join(_entry(meta, 3, list)).decode()
    values, length = _entry(meta, 5, int), _entry(meta, 7, int)
    if values == 0:  # Arrow reads no page of it, and writes no offset
        return Chunk(path, 0, 4, 0, None, None)
    start = min(_entry(meta, 9, int), meta.get(11, _entry(meta, 9, int)))
    if start < 4 or length < 0 or values < 0 or start + length > size:
        raise ValueError(f"column {path[:80]} lies outside the file")
    statistics = meta.get(12, {})
    return Chunk(path, values, start, length, statistics.get(6), statistics.get(5))


def _column_claim(data: Bytes, chunk: Chunk, budget: int) -> tuple[ColumnClaim, int]:
    """Return the claim of a chunk's pages, and the remaining number of allowed pages."""
    values = size = dictionary_values = dictionary_size = 0
    encodings: set[int] = set()
    for page in _pages(data, chunk.start, chunk.start + chunk.length):
        budget -= 1
        if budget < 0:
            raise ValueError(f"more than {_MAX_PAGES} pages")
        size += page.unpacked
        encodings.add(page.encoding)
        if page.kind == _DICTIONARY:
            dictionary_values += page.values
            dictionary_size += page.unpacked
        else:
            values += page.values
    if values != chunk.values:
        raise ValueError(f"column {chunk.path[:80]} claims {chunk.values} values, its pages {values}")
    claim = ColumnClaim(chunk.path, values, size, dictionary_values, dictionary_size, frozenset(encodings))
    return claim, budget


_DICTIONARY = 2
_HEADERS = {0: (5, 2), _DICTIONARY: (7, 2), 3: (8, 4)}
"""By page type (data, dictionary, data of version 2): its field in the header, and the field of the encoding in it."""


class _Page(NamedTuple):
    kind: int
    values: int
    unpacked: int
    encoding: int


def _pages(data: Bytes, offset: int, end: int) -> Iterator[_Page]:
    """Yield the pages between two offsets."""
    while offset < end:
        header, behind, _ = _struct(data, offset, end, _MAX_PAGE_FIELDS, form=_PAGE)
        kind, unpacked, packed = (_entry(header, number, int) for number in (1, 2, 3))
        if kind not in _HEADERS or unpacked < 0 or packed < 0:
            raise ValueError("a page is of an unknown type, or claims a size below nothing")
        own, encoding = _HEADERS[kind]
        details = _entry(header, own, dict)
        values = _entry(details, 1, int)
        if values < 0:
            raise ValueError("a page claims a number of values below nothing")
        yield _Page(kind, values, unpacked, _entry(details, encoding, int))
        offset = behind + packed
    if offset != end:
        raise ValueError("a page reaches beyond its column")


def _entry(struct: Any, number: int, kind: type) -> Any:
    value = struct.get(number) if isinstance(struct, dict) else None
    if type(value) is not kind:
        raise ValueError(f"field {number} is missing, or of another type")
    return value


# The functions below parse every segment's footer. For speed, offsets are passed on and short numbers are parsed inline.
def _struct(
    data: Bytes, offset: int, end: int, budget: int, depth: int = 0, form: _Form = _ANY
) -> tuple[dict[int, Any], int, int]:
    """Parse a struct without trusting lengths beyond ``end``.

    Returns:
        The struct as a dict by field number, the offset after it, and the remaining number of allowed fields.

    Raises:
        ValueError: The struct is truncated, too large, too deep or of another form, or Thrift would parse another value.
        IndexError: The struct is truncated at the end of the data.
    """
    fields: dict[int, Any] = {}
    number = 0
    if depth > _MAX_DEPTH:
        raise ValueError("a header is too deep")
    while offset < end:
        head = data[offset]
        offset += 1
        if head == 0:
            return fields, offset, budget
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, offset = _number(data, offset, end, _I64)
        budget -= 1
        if budget < 0:
            raise ValueError("a header is too large")
        if number in fields or not 1 <= number <= _MAX_FIELD:
            raise ValueError(f"a header holds field {number} twice, or its number cannot be")
        expected = form.get(number)
        if expected is not None and expected.kind != kind:
            raise ValueError(f"field {number} of a header is of type {kind} and not {expected.kind}")
        if _BYTE < kind <= _I64:  # most fields
            if offset < end and (short := data[offset]) < _CONTINUATION:
                fields[number], offset = (short >> 1) ^ -(short & 1), offset + 1
            else:
                fields[number], offset = _number(data, offset, end, kind)
        elif kind == _BINARY:
            fields[number], offset = _bytes(data, offset, end)
        elif _TRUE <= kind <= _FALSE:
            fields[number] = kind == _TRUE
        elif kind == _STRUCT:
            fields[number], offset, budget = _struct(
                data, offset, end, budget, depth + 1, expected.form if expected is not None else _ANY
            )
        elif _LIST <= kind <= _SET:
            fields[number], offset, budget = _list(data, offset, end, budget, depth + 1, expected)
        else:
            fields[number], offset = _plain(kind, data, offset, end)
    raise ValueError("a header is cut short")


def _list(
    data: Bytes, offset: int, end: int, budget: int, depth: int, expected: _Field | None = None
) -> tuple[list[Any], int, int]:
    head, offset = data[offset], offset + 1
    size, kind = head >> 4, head & 15
    if size == _LONG_LIST:
        size, offset = _varint(data, offset, end)
    budget -= size
    if budget < 0 or depth > _MAX_DEPTH:
        raise ValueError("a header is too large or too deep")
    if expected is not None and size and kind != expected.element:
        raise ValueError(f"a list of a header holds type {kind} and not {expected.element}")
    form = expected.form if expected is not None else _ANY
    values: list[Any] = []
    for _ in range(size):
        value: Any
        if kind == _STRUCT:
            value, offset, budget = _struct(data, offset, end, budget, depth + 1, form)
        elif _BYTE < kind <= _I64:
            value, offset = _number(data, offset, end, kind)
        elif kind == _BINARY:
            value, offset = _bytes(data, offset, end)
        elif _LIST <= kind <= _SET:
            value, offset, budget = _list(data, offset, end, budget, depth + 1)
        else:
            value, offset = _plain(kind, data, offset, end)
        values.append(value)
    return values, offset, budget


def _plain(kind: int, data: Bytes, offset: int, end: int) -> tuple[int | bytes, int]:
    """Parse a value of another type. In a list, a boolean takes one byte."""
    if kind != _DOUBLE and not _TRUE <= kind <= _BYTE:
        raise ValueError(f"a header holds a value of unknown type {kind}")
    size = 8 if kind == _DOUBLE else 1
    if size > end - offset:
        raise ValueError("a header is cut short")
    text = bytes(data[offset : offset + size])
    return (text if kind == _DOUBLE else text[0]), offset + size


def _bytes(data: Bytes, offset: int, end: int) -> tuple[bytes, int]:
    if offset < end and (size := data[offset]) < _CONTINUATION:
        offset += 1
    else:
        size, offset = _varint(data, offset, end)
    if size > end - offset:
        raise ValueError("a header is cut short")
    return bytes(data[offset : offset + size]), offset + size


def _number(data: Bytes, offset: int, end: int, kind: int) -> tuple[int, int]:
    """Return a signed number, and the offset after it."""
    if offset < end and (value := data[offset]) < _CONTINUATION:
        return (value >> 1) ^ -(value & 1), offset + 1
    value, offset = _varint(data, offset, end)
    if value >> _BITS[kind]:  # Thrift would truncate it
        raise ValueError("a header holds a number that is too large for its type")
    return (value >> 1) ^ -(value & 1), offset


def _varint(data: Bytes, offset: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if offset >= end:
            raise ValueError("a header is cut short")
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < _CONTINUATION:
            return value, offset
    raise ValueError("a header holds a number that is too long")
