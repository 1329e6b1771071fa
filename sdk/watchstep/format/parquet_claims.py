"""Sizes that a Parquet file claims, read before decompression.

pyarrow allocates what a page header claims, and aborts the process on some damaged footers when it is asked for their
details; so the footer and the page headers are read here. Both are structs in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md and
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, whose field numbers these are.
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
"""Entries of metadata, of the file and of its columns together; Watchstep's own writer has at most four."""
_MAX_CHUNKS = 2048
"""Columns of all row groups. Watchstep's own writer makes one row group of at most some 90 columns."""
_MAX_PAGES = 16_384
"""Pages of the columns that are read. The largest segment of Watchstep's own writer has some 5,000 (a million rows in pages of
20,000, 88 columns of them; 32 million histogram elements in pages of 1 MiB)."""
_MAX_PAGE_FIELDS = 64
"""Fields of one page's header; pyarrow writes up to 21 with statistics."""
Bytes = bytes | bytearray | memoryview
_TRUE, _FALSE, _BYTE, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 5, 6, 7, 8, 9, 10, 12
_MAX_FIELD = 2**15 - 1
_BITS = {4: 16, _I32: 32, _I64: 64}
_MORE = 128
"""A byte of a number from which on further ones follow."""
_LONG_LIST = 15
"""A list's size that says that its size follows."""


class _Field(NamedTuple):
    """The type of a field on the wire: Arrow skips a field of another one, and reads a list's elements without a look at theirs."""

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
        path: the column's name; of a list's elements, with ``.list.element``.
        values: how many values it claims.
        pages: bytes that its pages claim to take when unpacked, dictionaries included.
        dictionary_values: how many values its dictionaries claim.
        dictionary_pages: bytes that its dictionaries claim to take when unpacked.
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
    """A file's rows, its columns in each row group, the paths of its columns in the schema, and its metadata."""

    rows: int
    chunks: list[Chunk]
    leaves: list[tuple[str, ...]]
    metadata: dict[bytes, bytes]


def read_claims(data: bytes) -> Claims:
    """Read the claims of a file.

    Raises:
        ValueError: The file is not a Parquet file, or is inconsistent.
    """
    footer = read_footer(data)
    return claims_of(data, footer)


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
    ) as error:  # a header of another shape than Parquet's
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
    """Check that chunks do not share bytes: the same pages would be read once for each of them."""
    end = 0
    for chunk in sorted((chunk for chunk in chunks if chunk.length), key=lambda chunk: chunk.start):
        if chunk.start < end:
            raise ValueError(f"column {chunk.path[:80]} lies over another")
        end = chunk.start + chunk.length


def _leaves(elements: list[dict[int, Any]]) -> list[tuple[str, ...]]:
    """The paths of a schema's columns, whose groups stand before what they hold."""
    leaves: list[tuple[str, ...]] = []
    groups: list[tuple[tuple[str, ...], int]] = []  # each open group's path, and how many children are due
    for number, element in enumerate(elements):
        children = element.get(5, 0)
        if (1 in element) == (children > 0) or (number > 0 and not groups):
            if number > 0 or len(elements) > 1 or children:
                raise ValueError("the schema is no tree of groups and columns")
            return []
        path: tuple[str, ...] = ()
        if number > 0:
            parent, due = groups.pop()
            path = (*parent, _entry(element, 4, bytes).decode())
            if due > 1:
                groups.append((parent, due - 1))
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
    """A row group's columns. Arrow reads them by their place in the schema, whatever path they name."""
    metas = [_entry(chunk, 3, dict) for chunk in _entry(group, 1, list)]
    chunks = [_chunk(size, meta) for meta in metas]
    if [tuple(part.decode() for part in meta[3]) for meta in metas] != leaves:
        raise ValueError("the columns of a row group are not those of the schema")
    return chunks


def claims_of(data: Bytes, footer: Footer, columns: Container[str] | None = None) -> Claims:
    """Read what the pages claim.

    Args:
        data: the file; where only some columns are asked for, the others' bytes may be missing (be zero).
        footer: what `read_footer` gave for it.
        columns: names of columns; all where it is left out.

    Raises:
        ValueError: the pages contradict the footer.
    """
    claims: list[ColumnClaim] = []
    left = _MAX_PAGES
    for chunk in footer.chunks:
        if columns is None or is_chosen(chunk.path, columns):
            claim, left = _column_claim(data, chunk, left)
            claims.append(claim)
    return Claims(footer.rows, claims)


def is_chosen(path: str, columns: Container[str]) -> bool:
    """Whether pyarrow reads a column where some names are asked for: by its path, or by any part of it that ends at a dot."""
    return path in columns or any(path[:end] in columns for end, sign in enumerate(path) if sign == ".")


def _chunk(size: int, meta: dict[int, Any]) -> Chunk:
    path = b".".join(_entry(meta, 3, list)).decode()
    values, length = _entry(meta, 5, int), _entry(meta, 7, int)
    if values == 0:  # Arrow reads no page of it, and writes no place for one
        return Chunk(path, 0, 4, 0, None, None)
    start = min(_entry(meta, 9, int), meta.get(11, _entry(meta, 9, int)))
    if start < 4 or length < 0 or values < 0 or start + length > size:
        raise ValueError(f"column {path[:80]} lies outside the file")
    statistics = meta.get(12, {})
    return Chunk(path, values, start, length, statistics.get(6), statistics.get(5))


def _column_claim(data: Bytes, chunk: Chunk, left: int) -> tuple[ColumnClaim, int]:
    """What a chunk's pages claim, and how many pages may follow of those that may follow."""
    values = size = dictionary_values = dictionary_size = 0
    encodings: set[int] = set()
    for page in _pages(data, chunk.start, chunk.start + chunk.length):
        left -= 1
        if left < 0:
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
    return claim, left


_DICTIONARY = 2
_HEADERS = {0: (5, 2), _DICTIONARY: (7, 2), 3: (8, 4)}
"""Page types; the field of the header that is theirs, and in it the field of the encoding: data, dictionary, data of version 2."""


class _Page(NamedTuple):
    kind: int
    values: int
    unpacked: int
    encoding: int


def _pages(data: Bytes, place: int, end: int) -> Iterator[_Page]:
    """The pages between two places."""
    while place < end:
        header, behind, _ = _struct(data, place, end, _MAX_PAGE_FIELDS, form=_PAGE)
        kind, unpacked, packed = (_entry(header, number, int) for number in (1, 2, 3))
        if kind not in _HEADERS or unpacked < 0 or packed < 0:
            raise ValueError("a page is of an unknown type, or claims a size below nothing")
        own, encoding = _HEADERS[kind]
        details = _entry(header, own, dict)
        values = _entry(details, 1, int)
        if values < 0:
            raise ValueError("a page claims a number of values below nothing")
        yield _Page(kind, values, unpacked, _entry(details, encoding, int))
        place = behind + packed
    if place != end:
        raise ValueError("a page reaches beyond its column")


def _entry(struct: Any, number: int, kind: type) -> Any:
    value = struct.get(number) if isinstance(struct, dict) else None
    if type(value) is not kind:
        raise ValueError(f"field {number} is missing, or of another type")
    return value


# Every segment's footer is read by what follows: places are handed on and short numbers read in line, for calls are felt.
def _struct(
    data: Bytes, place: int, end: int, left: int, depth: int = 0, form: _Form = _ANY
) -> tuple[dict[int, Any], int, int]:
    """A struct as a dict by field number, believing no length beyond its end; the place behind it, and how many fields are left.

    Raises:
        ValueError: it is cut short, too large, too deep, or of another form, or Thrift would read another value of it.
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
            number, place = _number(data, place, end, _I64)
        left -= 1
        if left < 0:
            raise ValueError("a header is too large")
        if number in fields or not 1 <= number <= _MAX_FIELD:
            raise ValueError(f"a header holds field {number} twice, or its number cannot be")
        due = form.get(number)
        if due is not None and due.kind != kind:
            raise ValueError(f"field {number} of a header is of type {kind} and not {due.kind}")
        if _BYTE < kind <= _I64:  # as most are
            if place < end and (short := data[place]) < _MORE:
                fields[number], place = (short >> 1) ^ -(short & 1), place + 1
            else:
                fields[number], place = _number(data, place, end, kind)
        elif kind == _BINARY:
            fields[number], place = _bytes(data, place, end)
        elif _TRUE <= kind <= _FALSE:
            fields[number] = kind == _TRUE
        elif kind == _STRUCT:
            fields[number], place, left = _struct(
                data, place, end, left, depth + 1, due.form if due is not None else _ANY
            )
        elif _LIST <= kind <= _SET:
            fields[number], place, left = _list(data, place, end, left, depth + 1, due)
        else:
            fields[number], place = _plain(kind, data, place, end)
    raise ValueError("a header is cut short")


def _list(
    data: Bytes, place: int, end: int, left: int, depth: int, due: _Field | None = None
) -> tuple[list[Any], int, int]:
    head, place = data[place], place + 1
    size, kind = head >> 4, head & 15
    if size == _LONG_LIST:
        size, place = _varint(data, place, end)
    left -= size
    if left < 0 or depth > _MAX_DEPTH:
        raise ValueError("a header is too large or too deep")
    if due is not None and size and kind != due.element:
        raise ValueError(f"a list of a header holds type {kind} and not {due.element}")
    form = due.form if due is not None else _ANY
    values: list[Any] = []
    for _ in range(size):
        value: Any
        if kind == _STRUCT:
            value, place, left = _struct(data, place, end, left, depth + 1, form)
        elif _BYTE < kind <= _I64:
            value, place = _number(data, place, end, kind)
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
    text = bytes(data[place : place + size])
    return (text if kind == _DOUBLE else text[0]), place + size


def _bytes(data: Bytes, place: int, end: int) -> tuple[bytes, int]:
    if place < end and (size := data[place]) < _MORE:
        place += 1
    else:
        size, place = _varint(data, place, end)
    if size > end - place:
        raise ValueError("a header is cut short")
    return bytes(data[place : place + size]), place + size


def _number(data: Bytes, place: int, end: int, kind: int) -> tuple[int, int]:
    """A signed number, and the place behind it."""
    if place < end and (value := data[place]) < _MORE:
        return (value >> 1) ^ -(value & 1), place + 1
    value, place = _varint(data, place, end)
    if value >> _BITS[kind]:  # Thrift would cut it
        raise ValueError("a header holds a number that is too large for its type")
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
