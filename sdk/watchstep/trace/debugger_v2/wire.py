"""A reader of the protobuf wire format: the fields of one message, without a schema and without a protobuf library.

Every length is checked against the end of the message before anything is taken from it. Content of fields is a view of the message, and
no copy. Messages of an unknown kind, and groups, are rejected.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""

_MAX_VARINT_BYTES = 10
_MAX_FIELD = 2**29
_WORD = 2**64

Value = int | memoryview
"""A number, or the bytes of a field with a length."""


class WireError(ValueError):
    """Bytes that are no protobuf message, or not the expected one."""


def fields(message: memoryview) -> Iterator[tuple[int, int, Value]]:
    """Yield the fields of a message: number, wire type, and value.

    Numbers of fixed size are yielded as unsigned integers of their bits.

    Raises:
        WireError: the message is damaged.
    """
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if not 0 < number < _MAX_FIELD:
            raise WireError(f"field number {number}")
        if kind == VARINT:
            value, place = _varint(message, place)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, place = _varint(message, place)
        elif kind == FIXED64:
            size = 8
        elif kind == FIXED32:
            size = 4
        else:
            raise WireError(f"wire type {kind}")
        if size > end - place:
            raise WireError(f"a field of {size} bytes, where {end - place} are left")
        content = message[place : place + size]
        place += size
        yield number, kind, content if kind == BYTES else int.from_bytes(content, "little")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    end = min(len(message), place + _MAX_VARINT_BYTES)
    while place < end:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % _WORD, place
        shift += 7
    raise WireError("a number without an end")


def text(value: Value, limit: int) -> str:
    """Return a field as text; characters that are not valid UTF-8 are replaced.

    Raises:
        WireError: the field is a number, or longer than ``limit`` bytes.
    """
    if isinstance(value, int):
        raise WireError("a number where text is expected")
    if len(value) > limit:
        raise WireError(f"text of {len(value)} bytes; the limit is {limit}")
    return str(value, "utf-8", "replace")


def message_of(value: Value) -> memoryview:
    """Return a field as a nested message, or as its bytes.

    Raises:
        WireError: the field is a number.
    """
    if isinstance(value, int):
        raise WireError("a number where a message is expected")
    return value


def signed(value: Value) -> int:
    """Return a field as a signed integer.

    Raises:
        WireError: the field is no number.
    """
    if not isinstance(value, int):
        raise WireError("bytes where a number is expected")
    return value - _WORD if value >= _WORD // 2 else value


def double(value: Value) -> float:
    """Return a field of 8 bytes as a floating-point number.

    Raises:
        WireError: the field is no number.
    """
    if not isinstance(value, int):
        raise WireError("bytes where a number is expected")
    number: float = struct.unpack("<d", struct.pack("<Q", value))[0]
    return number


def integers(value: Value, limit: int) -> list[int]:
    """Return one occurrence of a repeated field of integers, packed or not.

    Raises:
        WireError: there are more than ``limit``, or the field is damaged.
    """
    if isinstance(value, int):
        return [signed(value)]
    numbers: list[int] = []
    place = 0
    while place < len(value):
        if len(numbers) >= limit:
            raise WireError(f"more than {limit} numbers")
        number, place = _varint(value, place)
        numbers.append(signed(number))
    return numbers


def numbers_of(value: Value, kind: int, dtype: str) -> NDArray[np.generic]:
    """Return one occurrence of a repeated field of numbers of fixed size, packed or not, as an array that shows the message's memory.

    Args:
        value: The field.
        kind: Its wire type.
        dtype: Little-endian NumPy dtype of 4 or 8 bytes, as ``<f8``.

    Raises:
        WireError: the field has another size.
    """
    size = np.dtype(dtype).itemsize
    content = value
    if isinstance(content, int):
        if {FIXED64: 8, FIXED32: 4}.get(kind) != size:
            raise WireError(f"wire type {kind} for numbers of {size} bytes")
        content = memoryview(content.to_bytes(size, "little"))
    if len(content) % size:
        raise WireError(f"{len(content)} bytes for numbers of {size} bytes")
    array: NDArray[np.generic] = np.frombuffer(content, dtype)
    return array
