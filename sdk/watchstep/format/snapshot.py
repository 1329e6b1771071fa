"""Snapshots: complete tensors of one step in one safetensors object, written as a stream and read by ranges.

The object is 8 bytes of header length, a JSON header, and the tensors' bytes, little-endian and row-major:
https://huggingface.co/docs/safetensors#format, which every safetensors library reads. Elements keep their type, including bfloat16
and fp8. The reader reads ranges of unchecked objects in a store: it checks every number of the header against
the size of the object before it allocates memory, and reads one tensor without reading the others.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError, FormatError, NotFoundError
from watchstep.format.documents import parse_json
from watchstep.format.tensors import TensorInfo, check_word
from watchstep.store.store import Store

NARROW_FLOATS: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}
"""The unsigned integer type for the bits of each format, by safetensors' names."""


def widened(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Convert bits to the numbers that they encode, as float32, which represents each of them exactly.

    Args:
        bits: An array of any shape.
        dtype: A name in `NARROW_FLOATS`. For any other, the array is returned unchanged.
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
"""Element types by safetensors' names. numpy has no bfloat16 and no fp8: their bits are stored in unsigned integers."""

MAX_HEADER = 16 * 1024 * 1024
"""Largest JSON header that a reader accepts, enough for 100,000 tensors. The limit of safetensors itself is 100 MB."""

HEADER_METADATA = "__metadata__"
"""The entry of the header that is not a tensor: text by name."""

MISSING = "watchstep.missing"
"""Key of the metadata for the number of tensors missing from the snapshot, in decimal."""

MISSING_NAMES = "watchstep.missing_names"
"""Key of the metadata for their names: a JSON list, possibly not of all."""

PARTS = "watchstep.parts"
"""Key of the metadata for tensors of which the object has a part only: JSON, by name, as `TensorPart.as_data`."""

INFOS = "watchstep.tensors"
"""Key of the metadata for the descriptions of the tensors of a collection: JSON, by name, without name, shape and dtype."""

_FIRST_READ = 64 * 1024
_MAX_HEADER_MEMORY = 512 * 1024 * 1024
_MAX_NAMES_MEMORY = 48 * 1024 * 1024
"""Limit of the memory for the names of missing tensors, enough for `MAX_NAMES` of the longest."""

_MAX_DIMENSIONS = 64  # numpy's own limit
_WIDEST = 16
"""Bytes of the widest elements, complex128, to which readers convert others."""

_MAX_SIZE = 2**63 - 1
_MEND = "the writer or the transfer damaged it; take another snapshot"


@dataclass(frozen=True)
class TensorLocation:
    """Location of one tensor: ``length`` bytes from byte ``start`` of the object."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class TensorPart:
    """The place of a saved tensor within a larger one.

    Attributes:
        shape: Shape of the larger tensor.
        start: Index of the first saved element in each dimension.
        is_shard: Whether other workers save the rest; otherwise only this part was selected.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    is_shard: bool

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {"shape": list(self.shape), "start": list(self.start), "shard": self.is_shard}

    @classmethod
    def from_data(cls, data: Any) -> TensorPart:
        """Read the result of `as_data`.

        Raises:
            ValueError: The data is not valid.
        """
        if not isinstance(data, dict) or set(data) != {"shape", "start", "shard"}:
            raise ValueError("a part is not described by shape, start and shard")
        shape, start = _integers(data["shape"]), _integers(data["start"])
        is_placed = len(shape) == len(start) <= _MAX_DIMENSIONS and isinstance(data["shard"], bool)
        if not is_placed or math.prod(max(1, size) for size in shape) > _MAX_SIZE:
            raise ValueError("a part has an invalid shape, start or shard")
        return cls(shape, start, data["shard"])


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot. The header has been read and checked; the tensors have not been read.

    Attributes:
        key: Key of the object, relative to its store.
        metadata: The writer's metadata: the ``reason`` (cadence, gate, request or program), and whether
            ``parameters`` are as they were before or after the update.
        tensors: Locations by name, in the order of their bytes.
        missing: Number of tensors that did not fit into the writer's memory.
        missing_names: Names of those, or of the first thousand.
        parts: Places of tensors of which the object has a part only, by name.
    """

    key: str
    metadata: dict[str, str]
    tensors: dict[str, TensorLocation]
    missing: int
    missing_names: tuple[str, ...]
    parts: dict[str, TensorPart]
    _store: Store = field(repr=False, compare=False)

    def read(self, name: str) -> NDArray[Any]:
        """Read one tensor with one ranged read. The array is read-only.

        bfloat16 and fp8 are returned as their bits in uint16 and uint8. ``tensors[name].dtype`` is their type, and
        `values` returns their numbers.

        Raises:
            NotFoundError: The snapshot has no such tensor, or no longer exists.
            FormatError: The object is shorter than when it was opened.
            StoreError: The object could not be read.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise self._not_held(name)
        data = self._ranged(name, stored, 0, stored.length)
        return np.frombuffer(data, DTYPES[stored.dtype]).reshape(stored.shape)

    def read_bytes(self, name: str, start: int, length: int) -> bytes:
        """Read some of the bytes of one tensor with one ranged read.

        Args:
            name: The tensor.
            start: First byte, from the tensor's first one.
            length: Number of bytes, within the tensor.

        Raises:
            NotFoundError, FormatError, StoreError: As for `read`.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise self._not_held(name)
        return self._ranged(name, stored, start, length)

    def values(self, name: str) -> NDArray[Any]:
        """Read one tensor like `read`, but bfloat16 and fp8 as float32, which represents each number exactly.

        Raises:
            NotFoundError, FormatError, StoreError: As for `read`.
        """
        elements = self.read(name)
        return widened(elements, self.tensors[name].dtype)

    def _ranged(self, name: str, stored: TensorLocation, start: int, length: int) -> bytes:
        if not length:
            return b""
        try:
            data = self._store.get_range(self.key, stored.start + start, length)
        except NotFoundError as error:
            raise _gone(self.key) from error
        if len(data) != length:
            raise FormatError(
                f"snapshot {self.key}: tensor {name!r} ends after {start + len(data)} of {stored.length} bytes",
                _MEND,
            )
        return data

    @property
    def is_local(self) -> bool:
        """Whether it is in a folder on this machine."""
        return self._store.is_local

    def is_left_out(self, name: str) -> bool:
        """Whether the writer left a tensor out, as far as the object names those."""
        return name in self.missing_names

    def _not_held(self, name: str) -> NotFoundError:
        if name in self.missing_names or self.missing > len(self.missing_names):
            return NotFoundError(
                f"tensor {name!r} is not in snapshot {self.key}: its writer left out {self.missing} tensors, which exceeded a limit",
                "raise Snapshots.memory_bytes or TensorLimits.hour_bytes, or save tensors at steps further apart",
            )
        return NotFoundError(
            f"tensor {name!r} is not in snapshot {self.key}", "see Snapshot.tensors for the names"
        )


def _gone(key: str) -> NotFoundError:
    return NotFoundError(
        f"snapshot {key} does not exist, or no longer exists",
        "list the snapshots again: those of a cadence make room for newer ones (TensorLimits.ring_bytes)",
    )


def open_snapshot(store: Store, key: str, size: int | None = None) -> Snapshot:
    """Open a snapshot. This reads most headers with one ranged read, long ones with two.

    Args:
        store: The store of the snapshot.
        key: Key relative to the store.
        size: Size of the object in bytes, if a listing has shown it; requested by default.

    Raises:
        NotFoundError: The object does not exist, or no longer exists.
        FormatError: The header does not agree with the object's size.
        StoreError: The object could not be read.
    """
    try:
        return _opened(store, key, size)
    except NotFoundError as error:
        raise _gone(key) from error


def _opened(store: Store, key: str, size: int | None) -> Snapshot:
    metadata, tensors = read_header(store, key, size)
    try:
        missing, missing_names = _missing(metadata)
        parts = _parts(metadata, tensors)
    except (ValueError, RecursionError) as error:
        raise _invalid(key, error) from error
    return Snapshot(key, metadata, tensors, missing, missing_names, parts, store)


def read_header(
    store: Store, key: str, size: int | None = None
) -> tuple[dict[str, str], dict[str, TensorLocation]]:
    """Return a snapshot's metadata, and the locations of its tensors in the order of their bytes.

    Args:
        store: The store of the snapshot.
        key: Key relative to the store.
        size: Size of the object in bytes, if known.

    Raises:
        NotFoundError: The object does not exist.
        FormatError: The header does not agree with the object's size.
        StoreError: The object could not be read.
    """
    if size is None:
        size = store.size(key)
    if size < 8:
        raise FormatError(f"snapshot {key} has {size} bytes, which is too short for a header", _MEND)
    start = store.get_range(key, 0, min(size, _FIRST_READ))
    if len(start) < min(size, _FIRST_READ):
        raise FormatError(f"snapshot {key} ends after {len(start)} of {size} bytes", _MEND)
    length = int.from_bytes(start[:8], "little")
    if length > min(MAX_HEADER, size - 8):
        raise FormatError(
            f"snapshot {key} claims a header of {length} bytes in an object of {size}; at most {MAX_HEADER} are read",
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
    return FormatError(f"snapshot {key} has an invalid header ({reason})", _MEND)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("duplicate tensor name")
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
    # numpy refuses such shapes even of empty tensors, as soon as their elements are converted to a wider type.
    if len(shape) > _MAX_DIMENSIONS or math.prod(max(1, n) for n in shape) * _WIDEST > _MAX_SIZE:
        raise ValueError(f"tensor {name!r} has an invalid shape")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} has offsets that do not fit its shape")
    return TensorLocation(entry["dtype"], shape, base + offsets[0], offsets[1] - offsets[0])


def _missing(metadata: dict[str, str]) -> tuple[int, tuple[str, ...]]:
    names = parse_json(metadata.get(MISSING_NAMES, "[]").encode(), _MAX_NAMES_MEMORY)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its missing tensors are not a list of names")
    if len(names) > MAX_NAMES:
        raise ValueError(f"it names {len(names)} missing tensors, writers name at most {MAX_NAMES}")
    return max(int(metadata.get(MISSING, "0")), len(names)), tuple(names)


def _parts(metadata: dict[str, str], tensors: Mapping[str, TensorLocation]) -> dict[str, TensorPart]:
    data = parse_json(metadata.get(PARTS, "{}").encode(), _MAX_HEADER_MEMORY)
    if not isinstance(data, dict):
        raise ValueError("its parts are not described by name")  # noqa: TRY004 - callers catch this
    parts = {name: TensorPart.from_data(entry) for name, entry in data.items() if name in tensors}
    for name, part in parts.items():
        shape = tensors[name].shape
        if len(shape) != len(part.shape) or any(
            start + size > whole for start, size, whole in zip(part.start, shape, part.shape, strict=True)
        ):
            raise ValueError(f"tensor {name!r} is not within the tensor that it is a part of")
    return parts


def _integers(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(type(n) is int and n >= 0 for n in data):
        raise ValueError("a shape or offset is not a list of whole numbers")
    return tuple(data)


def _check_layout(tensors: dict[str, TensorLocation], base: int, size: int) -> None:
    place = base
    for stored in sorted(tensors.values(), key=lambda stored: (stored.start, stored.length)):
        if stored.start != place:
            raise ValueError("its tensors overlap or have gaps between them")
        place += stored.length
    if place != size:
        raise ValueError(f"its tensors end at byte {place} of {size}")


MAX_NAMES = 1000
"""Maximum number of names of missing tensors in the metadata. Their total number is always recorded."""


@dataclass(frozen=True)
class Described:
    """A tensor in a snapshot: ``dtype`` is a name of `DTYPES`, e.g. ``F32``, ``BF16``, ``F8_E4M3``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Size in bytes.

        Raises:
            ConfigError: The dtype is unknown.
        """
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes.

        Raises:
            ConfigError: The dtype is unknown.
        """
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise ConfigError(
                f"snapshot: tensor {self.name!r} has unknown dtype {self.dtype!r}",
                f"use one of {', '.join(DTYPES)}",
            )
        return dtype.itemsize


def aligned_order(tensors: Sequence[Described]) -> list[int]:
    """Return the tensors' indices in an order that aligns each to its elements: by descending element size."""
    return sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize)


def header(tensors: Sequence[Described], metadata: Mapping[str, str]) -> bytes:
    """Return the header that precedes the tensors' bytes. Its length is a multiple of eight bytes.

    Args:
        tensors: The tensors in the order of their bytes.
        metadata: Free text for readers.

    Raises:
        ConfigError: Two tensors have the same name, or a dtype is unknown.
    """
    entries: dict[str, Any] = {HEADER_METADATA: dict(metadata)}
    place = 0
    for tensor in tensors:
        if tensor.name in entries:
            raise ConfigError(
                f"snapshot: tensor name {tensor.name!r} is a duplicate or reserved",
                "use a different name for each tensor",
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


MAX_COLLECTIONS = 32
"""Maximum number of collections of a tensor that a reader accepts."""

_DESCRIBING = ("collections", "role", "module", "module_type", "order", "optimizer")


def infos_metadata(infos: Iterable[TensorInfo]) -> dict[str, str]:
    """Return a snapshot's metadata that describes its tensors."""
    described = {
        info.name: {name: getattr(info, name) for name in _DESCRIBING if getattr(info, name)}
        for info in infos
    }
    return {INFOS: json.dumps(described, separators=(",", ":"))}


def infos_of(snapshot: Snapshot) -> dict[str, TensorInfo]:
    """Return the descriptions of a snapshot's tensors, by name; only name, shape and dtype of those that it does not describe.

    Raises:
        FormatError: The metadata is not valid.
    """
    try:
        data = parse_json(snapshot.metadata.get(INFOS, "{}").encode(), _MAX_HEADER_MEMORY)
        if not isinstance(data, dict):
            raise TypeError("its tensors are not described by name")  # noqa: TRY301 - reported like other damage
        return {
            name: _info(name, stored, snapshot, data.get(name, {}))
            for name, stored in snapshot.tensors.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _invalid(snapshot.key, error) from error


def _info(name: str, stored: TensorLocation, snapshot: Snapshot, data: Any) -> TensorInfo:
    part = snapshot.parts.get(name)
    order = data.get("order", 0)
    collections = data.get("collections", [])
    words = [data.get(key, "") for key in ("role", "module", "module_type", "optimizer")]
    if not isinstance(collections, list) or not all(isinstance(word, str) for word in [*words, *collections]):
        raise ValueError(f"tensor {name[:80]!r} is described by values of other types")
    if type(order) is not int or not 0 <= order < _MAX_SIZE:
        raise ValueError(f"tensor {name[:80]!r} has an invalid order")
    if len(collections) > MAX_COLLECTIONS:
        raise ValueError(
            f"tensor {name[:80]!r} is in {len(collections)} collections, at most {MAX_COLLECTIONS} are allowed"
        )
    for word in (name, *words, *collections):
        check_word("tensor", word)
    role, module, module_type, optimizer = words
    return TensorInfo(
        name=name,
        collections=tuple(sorted(collections)),
        role=role or "custom",
        module=module,
        module_type=module_type,
        order=order,
        shape=stored.shape if part is None else part.shape,
        dtype=_NAMES.get(stored.dtype, stored.dtype.lower()),
        optimizer=optimizer,
    )


_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Names of dtypes in descriptions of tensors, by safetensors' names."""


def parts_metadata(parts: Mapping[str, TensorPart]) -> dict[str, str]:
    """Return a snapshot's metadata about parts of tensors, empty if all tensors are whole."""
    if not parts:
        return {}
    return {PARTS: json.dumps({name: part.as_data() for name, part in parts.items()}, separators=(",", ":"))}


def missing_metadata(names: Sequence[str]) -> dict[str, str]:
    """Return a snapshot's metadata about missing tensors, empty if no tensor is missing."""
    if not names:
        return {}
    return {MISSING: str(len(names)), MISSING_NAMES: json.dumps(list(names[:MAX_NAMES]))}
