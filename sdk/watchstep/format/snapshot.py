"""Snapshots: full tensors of one step in one safetensors object, written as a stream and read by ranges.

The object is 8 bytes of header length, a JSON header, and the tensors' bytes, little-endian and row-major:
https://huggingface.co/docs/safetensors#format, which every safetensors library reads. Elements keep their type, bfloat16 and fp8
too. This reader takes objects of a store, whose bytes nobody has checked, by ranges: it checks every number of the header against
the size of the object before it takes memory, and reads one tensor without reading the others.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError, FormatError, NotFoundError
from watchstep.format.documents import parse_json
from watchstep.store.store import Store

NARROW_FLOATS: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
"""What holds the bits of each format, by safetensors' names."""


def widened(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The numbers that some bits stand for, as float32, which holds every one of them exactly.

    Args:
        bits: of any shape.
        dtype: a name of `NARROW_FLOATS`; for any other, the array comes back as it is.
    """
    if dtype not in NARROW_FLOATS:
        return bits
    if dtype == "BF16":
        return np.asarray(bits.astype(np.uint32) << 16).view(np.float32)
    every = np.arange(256, dtype=np.uint16)
    table = {"F8_E4M3": _e4m3, "F8_E5M2": _e5m2, "F8_E8M0": _e8m0}[dtype](every)
    values: NDArray[Any] = table[bits]
    return values


def _e4m3(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """OCP FP8 E4M3: 4 exponent bits with bias 7, no infinity, NaN where all bits but the sign are set."""
    exponent, fraction = ((bits >> 3) & 15).astype(np.int32), (bits & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    size = np.where(bits & 127 == 127, np.float32(np.nan), size)
    return np.where(bits >= 128, -size, size).astype(np.float32)


def _e5m2(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """OCP FP8 E5M2: the upper byte of IEEE half precision."""
    return (bits << 8).view(np.float16).astype(np.float32)


def _e8m0(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """OCP MX scale: a power of two with bias 127; 255 is NaN."""
    power = np.where(bits == 255, 0, bits.astype(np.int32) - 127)
    size = np.ldexp(np.float32(1), power).astype(np.float32)
    values: NDArray[np.float32] = np.where(bits == 255, np.float32(np.nan), size)
    return values


DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    **NARROW_FLOATS,
}
"""Element types by safetensors' names. numpy has no bfloat16 and no fp8: their bits stand in unsigned integers."""

MAX_HEADER = 16 * 1024 * 1024
"""Largest JSON header that a reader takes, room for 100,000 tensors; safetensors itself stops at 100 MB."""

HEADER_METADATA = "__metadata__"
"""The entry of the header that is no tensor: text by name."""

MISSING = "watchstep.missing"
"""Where the metadata say how many tensors the snapshot should have held and does not, in decimal."""

MISSING_NAMES = "watchstep.missing_names"
"""Where they say which: a JSON list of names, maybe not of all."""

COMPRESSED = "watchstep.compressed"
"""Where the metadata of a snapshot of schema 1 describe its compressed tensors; it is rewritten before it is read."""

_FIRST_READ = 64 * 1024
_MAX_HEADER_MEMORY = 512 * 1024 * 1024
_MAX_DIMENSIONS = 64  # numpy's own limit
_MAX_SIZE = 2**63 - 1
_MEND = "the writer or the transfer damaged it; take another snapshot"


@dataclass(frozen=True)
class TensorLocation:
    """Where one tensor lies: ``length`` bytes from ``start`` of the object."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot: its header is read and checked, its tensors are not read yet.

    Attributes:
        key: of the object, relative to its store.
        metadata: what the writer said of it: the ``reason`` (cadence, gate, request or program), and whether
            ``parameters`` are as they were before or after the update.
        tensors: by name, in the order in which they lie.
        missing: tensors that did not fit into the writer's memory.
        missing_names: names of those, or of the first thousand.
    """

    key: str
    metadata: dict[str, str]
    tensors: dict[str, TensorLocation]
    missing: int
    missing_names: tuple[str, ...]
    _store: Store = field(repr=False, compare=False)

    def read(self, name: str) -> NDArray[Any]:
        """One tensor as it was, by one ranged read; the array is read-only.

        bfloat16 and fp8 come as their bits in uint16 and uint8; ``tensors[name].dtype`` says what they are, and
        `values` gives their numbers.

        Raises:
            NotFoundError: the snapshot has no such tensor, or is not there any more.
            FormatError: the object is shorter than when it was opened.
            StoreError: it could not be read.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise self._not_held(name)
        data = self._ranged(stored) if stored.length else b""
        if len(data) != stored.length:
            raise FormatError(
                f"snapshot {self.key}: tensor {name!r} ends after {len(data)} of {stored.length} bytes", _MEND
            )
        return np.frombuffer(data, DTYPES[stored.dtype]).reshape(stored.shape)

    def values(self, name: str) -> NDArray[Any]:
        """One tensor's numbers: as `read`, but bfloat16 and fp8 as float32, which holds each of them exactly.

        Raises:
            NotFoundError, FormatError, StoreError: as `read`.
        """
        elements = self.read(name)
        return widened(elements, self.tensors[name].dtype)

    def _ranged(self, stored: TensorLocation) -> bytes:
        try:
            return self._store.get_range(self.key, stored.start, stored.length)
        except NotFoundError as error:
            raise _gone(self.key) from error

    def _not_held(self, name: str) -> NotFoundError:
        if name in self.missing_names or self.missing > len(self.missing_names):
            return NotFoundError(
                f"tensor {name!r}: not in snapshot {self.key}, whose writer had no memory for {self.missing} tensors",
                "raise Snapshots.memory_bytes, or take snapshots at steps further apart",
            )
        return NotFoundError(f"tensor {name!r}: not in snapshot {self.key}", "see its tensors for the names")


def _gone(key: str) -> NotFoundError:
    return NotFoundError(
        f"snapshot {key}: not there, or not any more",
        "list the snapshots again: those of a cadence make room for newer ones (Snapshots.ring_bytes)",
    )


def open_snapshot(store: Store, key: str) -> Snapshot:
    """Open a snapshot: its size, one ranged read for most headers, two for long ones.

    Args:
        store: where it lies.
        key: relative to the store.

    Raises:
        NotFoundError: there is no such object, or not any more.
        FormatError: its header is not what the object's size bears out.
        StoreError: it could not be read.
    """
    try:
        return _opened(store, key)
    except NotFoundError as error:
        raise _gone(key) from error


def _opened(store: Store, key: str) -> Snapshot:
    metadata, tensors = read_header(store, key)
    if COMPRESSED in metadata:
        raise FormatError(
            f"snapshot {key}: compressed by an earlier version",
            "rewrite the run with 'watchstep migrate-store'",
        )
    try:
        missing, missing_names = _missing(metadata)
    except ValueError as error:
        raise _invalid(key, error) from error
    return Snapshot(key, metadata, tensors, missing, missing_names, store)


def read_header(store: Store, key: str) -> tuple[dict[str, str], dict[str, TensorLocation]]:
    """A snapshot's metadata, and where its tensors lie, in the order of their bytes.

    Raises:
        NotFoundError: there is no such object.
        FormatError: its header is not what the object's size bears out.
        StoreError: it could not be read.
    """
    size = store.size(key)
    if size < 8:
        raise FormatError(f"snapshot {key}: {size} bytes, too short for a header", _MEND)
    start = store.get_range(key, 0, min(size, _FIRST_READ))
    length = int.from_bytes(start[:8], "little")
    if length > min(MAX_HEADER, size - 8):
        raise FormatError(
            f"snapshot {key}: claims a header of {length} bytes in an object of {size}, at most {MAX_HEADER} are read",
            _MEND,
        )
    text = start[8 : 8 + length]
    if len(text) < length:
        text += store.get_range(key, 8 + len(text), length - len(text))
    try:
        header = parse_json(text, _MAX_HEADER_MEMORY, _unique)
        metadata = _metadata(header.pop(HEADER_METADATA, {}))
        tensors = {name: _stored(name, entry, 8 + length) for name, entry in header.items()}
        _check_layout(tensors, 8 + length, size)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise _invalid(key, error) from error
    return metadata, dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].length)))


def _invalid(key: str, error: Exception) -> FormatError:
    reason = str(error).split("\n", 1)[0][:200]
    return FormatError(f"snapshot {key}: its header is not valid ({reason})", _MEND)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name stands twice")
    return entries


def _metadata(data: Any) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise ValueError("its metadata is not text by name")
    return data


def _stored(name: str, entry: Any, base: int) -> TensorLocation:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"tensor {name!r} has unknown dtype {entry['dtype']!r}")
    shape, offsets = _integers(entry["shape"]), _integers(entry["data_offsets"])
    if len(shape) > _MAX_DIMENSIONS or math.prod(max(1, n) for n in shape) * dtype.itemsize > _MAX_SIZE:
        raise ValueError(f"tensor {name!r} has an impossible shape")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} has offsets that do not fit its shape")
    return TensorLocation(entry["dtype"], shape, base + offsets[0], offsets[1] - offsets[0])


def _missing(metadata: dict[str, str]) -> tuple[int, tuple[str, ...]]:
    names = parse_json(metadata.get(MISSING_NAMES, "[]").encode(), _MAX_HEADER_MEMORY)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its missing tensors are not a list of names")
    return max(int(metadata.get(MISSING, "0")), len(names)), tuple(names)


def _integers(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(type(n) is int and n >= 0 for n in data):
        raise ValueError("a shape or offset is not a list of whole numbers")
    return tuple(data)


def _check_layout(tensors: dict[str, TensorLocation], base: int, size: int) -> None:
    place = base
    for stored in sorted(tensors.values(), key=lambda stored: (stored.start, stored.length)):
        if stored.start != place:
            raise ValueError("its tensors overlap or leave gaps")
        place += stored.length
    if place != size:
        raise ValueError(f"its tensors end at byte {place} of {size}")


MOST_NAMES = 1000
"""So many names of tensors that are missing are told, and how many there are."""


@dataclass(frozen=True)
class Described:
    """A tensor in a snapshot: ``dtype`` is a name of `DTYPES`, e.g. ``F32``, ``BF16``, ``F8_E4M3``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Its bytes.

        Raises:
            ConfigError: the dtype is not known.
        """
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one element.

        Raises:
            ConfigError: the dtype is not known.
        """
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise ConfigError(
                f"snapshot: tensor {self.name!r} has unknown dtype {self.dtype!r}",
                f"use one of {', '.join(DTYPES)}",
            )
        return dtype.itemsize


def aligned_order(tensors: Sequence[Described]) -> list[int]:
    """Places of the tensors in an order in which each is aligned to its elements: by falling element size."""
    return sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize)


def header(tensors: Sequence[Described], metadata: Mapping[str, str]) -> bytes:
    """What precedes the tensors' bytes; a multiple of eight bytes.

    Args:
        tensors: in the order in which their bytes follow.
        metadata: free text for readers.

    Raises:
        ConfigError: two tensors of one name, or an unknown dtype.
    """
    entries: dict[str, Any] = {HEADER_METADATA: dict(metadata)}
    place = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise ConfigError(
                f"snapshot: tensor name {tensor.name!r} is taken", "give each tensor its own name"
            )
        end = place + tensor.length
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def missing_metadata(names: Sequence[str]) -> dict[str, str]:
    """What a snapshot's metadata say of tensors that it could not hold; empty where there are none."""
    if not names:
        return {}
    return {MISSING: str(len(names)), MISSING_NAMES: json.dumps(list(names[:MOST_NAMES]))}
