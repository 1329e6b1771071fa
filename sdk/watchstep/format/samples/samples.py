"""Samples of training steps: ids, the records of a ring and of an object on the store, and their bytes.

One record is one batch of one step. Consecutive and narrow numbers take little space; other ids are JSON. A record has a
checksum, so that one that was being written when the process was killed is recognised.

Records have the same bytes in a ring and in an object. Layout, little endian::

    frame    magic (4), checksum of what follows (4), length of the payload (4), reserved (4), number (8), payload
    payload  step (8), epoch (8), number of the batch (8), ids that were left out (4), bytes of the source (2), form (1),
             source in UTF-8, ids
    ids      form 0: first number (8), count (8)                consecutive whole numbers
             form 1, 2, 4, 8: smallest number (8), offsets      whole numbers, with offsets of this many bytes
             form 255: JSON, a list                             anything else

An object is `OBJECT_MAGIC` followed by frames. Everything on a store is hostile input: sizes are checked before memory is taken.
"""

from __future__ import annotations

import json
import operator
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Union, cast

from watchstep.errors import FormatError
from watchstep.format.documents import parse_json

SampleId: TypeAlias = Union[int, str, "tuple[Any, ...]", "dict[str, Any]"]
"""An index, a file or another name, a pair such as (file, offset), or a dictionary of numbers and strings."""

OBJECT_MAGIC = b"WSSAMPL\x01"
MAX_OBJECT_BYTES = 64 * 1024 * 1024
"""Maximum size of an object on the store."""

MAX_RECORD_BYTES = 1024 * 1024
"""Maximum size of a record. A batch with larger ids is shortened."""

MAX_IDS = 65_536
"""Maximum number of ids in a record."""

_MAX_SOURCE = 200
_MAX_JSON_MEMORY = 64 * 1024 * 1024
_FRAME_MAGIC = b"\xabWS\xf1"
_FRAME = struct.Struct("<4sIIIQ")
_HEAD = struct.Struct("<qqqIHB")
_PAIR = struct.Struct("<qq")
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_RANGE, _JSON = 0, 255
_WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_ALIGNMENT = 8
_HINT = "remove the object; the run's other data does not depend on it"


@dataclass(frozen=True)
class SampleBatch:
    """The samples of one batch that a step was trained on.

    Attributes:
        step: the step.
        ids: the samples, as the sampler or the program named them, in the order of the batch.
        source: name of the dataset's class; empty for samples that the program named.
        epoch: epoch of the data loader, from 0; -1 if unknown.
        number: number of the batch in the epoch, from 0; -1 if unknown.
        left_out: number of further samples of the batch that are not recorded.
        worker: the rank.
        attempt: the attempt.
    """

    step: int
    ids: tuple[SampleId, ...]
    source: str = ""
    epoch: int = -1
    number: int = -1
    left_out: int = 0
    worker: int = 0
    attempt: str = ""

    def as_data(self) -> dict[str, Any]:
        """JSON-ready attributes."""
        return {
            "step": self.step,
            "worker": self.worker,
            "attempt": self.attempt,
            "source": self.source,
            "epoch": self.epoch,
            "number": self.number,
            "left_out": self.left_out,
            "ids": list(self.ids),
        }


def plain_id(value: Any) -> SampleId:
    """Return a sample id of any library's types as plain Python objects.

    Raises:
        TypeError: it is neither a whole number, a string, a list or tuple of such and of other numbers, nor a dictionary of them.
    """
    kind = type(value)
    if kind is int or kind is str:
        return cast("SampleId", value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_part(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_plain_part(part) for part in value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if hasattr(value, "__fspath__"):
        return str(value.__fspath__())
    return int(operator.index(value))  # also of a bool


def _plain_part(value: Any) -> Any:
    if value is None or isinstance(value, bool | float):
        return value if value is None or isinstance(value, bool) else float(value)
    return plain_id(value)


def encode_batch(batch: SampleBatch, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the payload of a record. Ids beyond `MAX_IDS` or the size are counted as left out; worker and attempt are not encoded.

    Args:
        batch: the batch.
        max_bytes: maximum size of the payload, at most `MAX_RECORD_BYTES`.

    Raises:
        TypeError, ValueError: an id is not of the kind of `SampleId`.
    """
    count = min(len(batch.ids), MAX_IDS)
    form, data = _encoded_ids(batch.ids[:count])
    source = batch.source.encode("utf-8", "replace")[:_MAX_SOURCE]
    while count and _HEAD.size + len(source) + len(data) > max_bytes:
        count //= 2
        form, data = _encoded_ids(batch.ids[:count])
    left_out = min(batch.left_out + len(batch.ids) - count, 2**32 - 1)
    head = _HEAD.pack(batch.step, batch.epoch, batch.number, left_out, len(source), form)
    return head + source + data


def _encoded_ids(ids: Sequence[SampleId]) -> tuple[int, bytes]:
    """Return the form and the bytes of ids."""
    if ids and set(map(type, ids)) == {int}:
        numbers = cast("Sequence[int]", ids)
        first, last = min(numbers), max(numbers)
        if first >= _LOWEST and last <= _HIGHEST:
            if last - first == len(numbers) - 1 and numbers[0] == first and _is_consecutive(numbers):
                return _RANGE, _PAIR.pack(first, len(numbers))
            width = _width_of(last - first)
            if first >= 0 and _width_of(last) == width:
                first = 0  # offsets take no less space
            offsets = [number - first for number in numbers] if first else numbers
            return width, first.to_bytes(8, "little", signed=True) + _little(array(_WIDTHS[width], offsets))
    return _JSON, json.dumps(ids, separators=(",", ":"), allow_nan=False).encode()


def _width_of(number: int) -> int:
    return 1 if number < 1 << 8 else 2 if number < 1 << 16 else 4 if number < 1 << 32 else 8


def _is_consecutive(numbers: Sequence[int]) -> bool:
    return tuple(numbers) == tuple(range(numbers[0], numbers[0] + len(numbers)))


def _little(values: array[int]) -> bytes:
    if struct.pack("=H", 1) != b"\x01\x00":
        values.byteswap()
    return values.tobytes()


def decode_batch(payload: bytes, name: str, limit: int = MAX_IDS) -> SampleBatch:
    """Parse the result of `encode_batch`.

    Args:
        payload: the bytes.
        name: name of the file or object, for messages.
        limit: maximum number of ids; further ones count as left out.

    Raises:
        FormatError: the bytes have another form.
    """
    try:
        step, epoch, number, left_out, source_bytes, form = _HEAD.unpack_from(payload)
        start = _HEAD.size + source_bytes
        source = payload[_HEAD.size : start].decode("utf-8", "replace")
        ids, more = _decoded_ids(form, payload[start:], limit)
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise FormatError(f"{name}: a record of samples is damaged ({error})", _HINT) from error
    return SampleBatch(step, ids, source, epoch, number, left_out + more)


def _decoded_ids(form: int, data: bytes, limit: int) -> tuple[tuple[SampleId, ...], int]:
    """Return the first ids, and the number of further ones. Only ids in JSON are all parsed."""
    if form == _RANGE:
        first, count = _PAIR.unpack(data)
        if not 0 < count <= MAX_IDS:
            raise ValueError(f"{count} ids")
        return tuple(range(first, first + min(count, limit))), max(0, count - limit)
    if form == _JSON:
        parsed = parse_json(data, _MAX_JSON_MEMORY)
        if not isinstance(parsed, list) or len(parsed) > MAX_IDS:
            raise ValueError("ids are not a list")
        return tuple(_checked(value) for value in parsed[:limit]), max(0, len(parsed) - limit)
    offsets = array(_WIDTHS[form])
    if len(data) < 8 or (len(data) - 8) // form > MAX_IDS:
        raise ValueError(f"{len(data)} bytes of ids")
    count = (len(data) - 8) // form
    offsets.frombytes(data[8 : 8 + form * min(count, limit)] if (len(data) - 8) % form == 0 else data[8:])
    if struct.pack("=H", 1) != b"\x01\x00":
        offsets.byteswap()
    first = int.from_bytes(data[:8], "little", signed=True)
    ids = tuple(offsets) if not first else tuple(first + offset for offset in offsets)
    return ids, max(0, count - limit)


def _checked(value: Any) -> SampleId:
    if isinstance(value, bool) or not isinstance(value, int | str | list | dict):
        raise ValueError(f"{value!r} is no id"[:80])  # noqa: TRY004 - a damaged object
    return cast("SampleId", _as_tuples(value))


def _as_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples instead of lists, as ids had them."""
    if isinstance(value, list):
        return tuple(_as_tuples(part) for part in value)
    if isinstance(value, dict):
        return {key: _as_tuples(part) for key, part in value.items()}
    return value


def frame(number: int, payload: bytes) -> bytes:
    """Return the bytes of a record with its number; their length is a multiple of 8."""
    rest = _FRAME.pack(_FRAME_MAGIC, 0, len(payload), 0, number)[8:]
    checksum = zlib.crc32(payload, zlib.crc32(rest))
    padding = -(_FRAME.size + len(payload)) % _ALIGNMENT
    return b"".join((_FRAME_MAGIC, checksum.to_bytes(4, "little"), rest, payload, b"\0" * padding))


def intact_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and payload of the records in a ring that have a valid checksum, in the order of the bytes.

    Records that are cut off or partly overwritten are skipped.
    """
    place = data.find(_FRAME_MAGIC)
    while place >= 0:
        framed = _frame_at(data, place) if place % _ALIGNMENT == 0 else None
        if framed is None:
            place = data.find(_FRAME_MAGIC, place + 1)
            continue
        number, payload, end = framed
        yield number, payload
        place = data.find(_FRAME_MAGIC, end)


def _frame_at(data: bytes, place: int) -> tuple[int, bytes, int] | None:
    """Return number, payload and end of the record at a place; None if it is not intact."""
    if place + _FRAME.size > len(data):
        return None
    magic, checksum, length, reserved, number = _FRAME.unpack_from(data, place)
    start = place + _FRAME.size
    if magic != _FRAME_MAGIC or reserved or length > MAX_RECORD_BYTES or start + length > len(data):
        return None
    payload = data[start : start + length]
    if zlib.crc32(payload, zlib.crc32(data[place + 8 : start])) != checksum:
        return None
    return number, payload, start + length + -(_FRAME.size + length) % _ALIGNMENT


def encode_object(records: Iterable[tuple[int, bytes]]) -> bytes:
    """Return the object of some records, given as number and payload."""
    return b"".join([OBJECT_MAGIC, *(frame(number, payload) for number, payload in records)])


def step_of(payload: bytes) -> int:
    """Return the step of an intact record without decoding it; -1 for one without a step."""
    return int.from_bytes(payload[:8], "little", signed=True) if len(payload) >= _HEAD.size else -1


def decode_object(data: bytes, name: str, steps: range | None = None) -> Iterator[SampleBatch]:
    """Parse an object, one batch after another.

    Args:
        data: its bytes.
        name: its name, for messages.
        steps: only batches of these steps are decoded; all if None.

    Raises:
        FormatError: it is damaged or cut off; batches before the damage are yielded.
    """
    for payload in payloads_of(data, name, steps):
        yield decode_batch(payload, name)


def payloads_of(data: bytes, name: str, steps: range | None = None) -> Iterator[bytes]:
    """Yield the payloads of the records of an object, each of which `decode_batch` parses.

    Args:
        data: its bytes.
        name: its name, for messages.
        steps: only records of these steps; all if None.

    Raises:
        FormatError: it is damaged or cut off; records before the damage are yielded.
    """
    if len(data) > MAX_OBJECT_BYTES or not data.startswith(OBJECT_MAGIC):
        raise FormatError(f"{name} is not an object with samples of steps", _HINT)
    place = len(OBJECT_MAGIC)
    while place < len(data):
        framed = _frame_at(data, place)
        if framed is None:
            raise FormatError(f"{name}: damaged at byte {place} of {len(data)}", _HINT)
        _, payload, place = framed
        if steps is None or step_of(payload) in steps:
            yield payload
