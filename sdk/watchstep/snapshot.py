"""A snapshot: full tensors of one step in one safetensors object, written whole and read by ranges.

The object is 8 bytes of header length, a JSON header, and the tensors' bytes, little-endian and row-major:
https://huggingface.co/docs/safetensors#format. Elements stay as they are, bfloat16 and fp8 too. The reader is
Watchstep's own: it believes nothing in the header that the object's size does not bear out, and it reads one tensor
without reading the others.
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
from watchstep.narrow_floats import NARROW_FLOATS, widened
from watchstep.store import Store

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

_METADATA = "__metadata__"
_FIRST_READ = 64 * 1024
_MAX_DIMENSIONS = 64  # numpy's own limit
_MAX_SIZE = 2**63 - 1
_MEND = "the writer or the transfer damaged it; take another snapshot"


@dataclass(frozen=True)
class NamedArray:
    """One tensor to be written.

    Attributes:
        name: as the user knows it.
        dtype: a name of `DTYPES`, e.g. ``F32``, ``BF16``, ``F8_E4M3``.
        shape: of the tensor.
        data: its bytes, little-endian and row-major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


def encode(tensors: Sequence[NamedArray], metadata: Mapping[str, str]) -> bytes:
    """One snapshot's bytes.

    Args:
        tensors: in any order; they are laid out by falling element size, so that each is aligned.
        metadata: free text for readers.

    Raises:
        ConfigError: two tensors of one name, an unknown dtype, or bytes that do not fit the shape.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    parts: list[bytes | memoryview] = []
    place = 0
    for tensor in sorted(tensors, key=lambda tensor: (-_checked(tensor).itemsize, tensor.name)):
        if tensor.name in header:
            raise ConfigError(
                f"snapshot: tensor name {tensor.name!r} is taken", "give each tensor its own name"
            )
        size = memoryview(tensor.data).nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, place + size],
        }
        parts.append(tensor.data)
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def _checked(tensor: NamedArray) -> np.dtype[Any]:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ConfigError(
            f"snapshot: tensor {tensor.name!r} has unknown dtype {tensor.dtype!r}",
            f"use one of {', '.join(DTYPES)}",
        )
    held, due = memoryview(tensor.data).nbytes, math.prod(tensor.shape) * dtype.itemsize
    if held != due:
        raise ConfigError(
            f"snapshot: tensor {tensor.name!r} has {held} bytes, its shape and dtype need {due}",
            "pass the tensor's own bytes, contiguous",
        )
    return dtype


@dataclass(frozen=True)
class Stored:
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
        metadata: what the writer said of it.
        tensors: by name, in the order in which they lie.
    """

    key: str
    metadata: dict[str, str]
    tensors: dict[str, Stored]
    _store: Store = field(repr=False, compare=False)

    def read(self, name: str) -> NDArray[Any]:
        """One tensor as it was written, by one ranged read; the array is read-only.

        bfloat16 and fp8 come as their bits in uint16 and uint8; ``tensors[name].dtype`` says what they are, and
        `values` gives their numbers.

        Raises:
            NotFoundError: the snapshot has no such tensor.
            FormatError: the object is shorter than when it was opened.
            StoreError: it could not be read.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise NotFoundError(
                f"tensor {name!r}: not in snapshot {self.key}", "see its tensors for the names"
            )
        data = self._store.get_range(self.key, stored.start, stored.length) if stored.length else b""
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
        held = self.read(name)
        return widened(held, self.tensors[name].dtype)


def open_snapshot(store: Store, key: str) -> Snapshot:
    """Open a snapshot: its size, one ranged read for most headers, two for long ones.

    Args:
        store: where it lies.
        key: relative to the store.

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
        header = json.loads(text, object_pairs_hook=_unique)
        metadata = _metadata(header.pop(_METADATA, {}))
        tensors = {name: _stored(name, entry, 8 + length) for name, entry in header.items()}
        _check_layout(tensors, 8 + length, size)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise FormatError(f"snapshot {key}: its header is not valid ({reason})", _MEND) from error
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].length)))
    return Snapshot(key, metadata, ordered, store)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        raise ValueError("a name stands twice")
    return held


def _metadata(data: Any) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise ValueError("its metadata is not text by name")
    return data


def _stored(name: str, entry: Any, base: int) -> Stored:
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
    return Stored(entry["dtype"], shape, base + offsets[0], offsets[1] - offsets[0])


def _integers(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(type(n) is int and n >= 0 for n in data):
        raise ValueError("a shape or offset is not a list of whole numbers")
    return tuple(data)


def _check_layout(tensors: dict[str, Stored], base: int, size: int) -> None:
    place = base
    for stored in sorted(tensors.values(), key=lambda stored: (stored.start, stored.length)):
        if stored.start != place:
            raise ValueError("its tensors overlap or leave gaps")
        place += stored.length
    if place != size:
        raise ValueError(f"its tensors end at byte {place} of {size}")
