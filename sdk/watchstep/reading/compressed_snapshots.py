"""Snapshots of schema 1 whose tensors may be compressed, written anew as plain safetensors; only a migration reads them.

A compressed tensor stands in such a file as bytes (U8). The metadata describe it: its dtype, its shape, and the bytes of its blocks. A
block is `BLOCK` bytes of the tensor: the first bytes of all its elements, then the second ones, and so on, compressed with zstd; one that
is as long as before is not compressed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError
from watchstep.format.bounded_json import parse_json
from watchstep.format.snapshot import COMPRESSED, DTYPES, Described, TensorLocation, header, read_header

if TYPE_CHECKING:
    from watchstep.store.store import Store

CODEC = "planes-zstd"
BLOCK = 4 * 1024 * 1024
MAX_DECODED = 2 * 1024**3
_MAX_DIMENSIONS = 64
_MAX_MEMORY = 256 * 1024 * 1024  # of the metadata


@dataclass(frozen=True)
class CompressedTensor:
    """A compressed tensor.

    Attributes:
        tensor: its name, dtype and shape.
        blocks: bytes of each block.
    """

    tensor: Described
    blocks: tuple[int, ...]


def decompressed(store: Store, key: str) -> bytes | None:
    """The bytes of a snapshot without compression; None where nothing in it is compressed.

    Raises:
        NotFoundError: there is no such object.
        FormatError: it is damaged.
        StoreError: it could not be read.
    """
    metadata, locations = read_header(store, key)
    if COMPRESSED not in metadata:
        return None
    try:
        compressed = _from_metadata(metadata, locations)
        described = [
            compressed[name].tensor if name in compressed else Described(name, location.dtype, location.shape)
            for name, location in locations.items()
        ]
        pieces: list[bytes] = []
        for name, location in locations.items():
            data = store.get_range(key, location.start, location.length) if location.length else b""
            pieces.append(_decompressed(data, compressed[name]) if name in compressed else data)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise FormatError(f"snapshot {key}: does not decompress ({reason})", "remove the object") from error
    rest = {name: text for name, text in metadata.items() if name != COMPRESSED}
    return b"".join([header(described, rest), *pieces])


def _from_metadata(
    metadata: Mapping[str, str], locations: Mapping[str, TensorLocation]
) -> dict[str, CompressedTensor]:
    described = parse_json(metadata[COMPRESSED].encode(), _MAX_MEMORY)
    return {name: _checked(name, entry, locations[name]) for name, entry in described.items()}


def _checked(name: str, entry: Any, location: TensorLocation) -> CompressedTensor:
    """Raises ValueError or TypeError for a description that does not fit the object."""
    if entry.get("codec") != CODEC or entry.get("block") != BLOCK or entry.get("dtype") not in DTYPES:
        raise ValueError(f"tensor {name!r} is compressed in an unknown way")
    tensor = Described(name, entry["dtype"], _whole_numbers(entry.get("shape")))
    blocks = _whole_numbers(entry.get("blocks"))
    claimed = math.prod(max(1, size) for size in tensor.shape) * tensor.itemsize
    if len(tensor.shape) > _MAX_DIMENSIONS or claimed > MAX_DECODED:
        raise ValueError(f"tensor {name!r} claims {claimed} bytes, at most {MAX_DECODED} are decoded")
    sizes = _block_sizes(tensor.length)
    if len(blocks) != len(sizes) or any(not 0 < n <= raw for n, raw in zip(blocks, sizes, strict=True)):
        raise ValueError(f"tensor {name!r} has blocks that do not fit its shape")
    if location.dtype != "U8" or sum(blocks) != location.length:
        raise ValueError(f"tensor {name!r} is not as long as its blocks")
    return CompressedTensor(tensor, blocks)


def _whole_numbers(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(type(n) is int and n >= 0 for n in data):
        raise ValueError("a shape or the blocks of a compressed tensor are not a list of whole numbers")
    return tuple(data)


def _block_sizes(size: int) -> list[int]:
    full, rest = divmod(size, BLOCK)
    return [BLOCK] * full + ([rest] if rest else [])


def _decompressed(data: bytes, compressed: CompressedTensor) -> bytes:
    itemsize = compressed.tensor.itemsize
    raw = np.empty(compressed.tensor.length, np.uint8)
    start = offset = 0
    for length, size in zip(compressed.blocks, _block_sizes(len(raw)), strict=True):
        block = memoryview(data)[start : start + length]
        target = raw[offset : offset + size]
        if length == size:
            target[:] = np.frombuffer(block, np.uint8)
        else:
            target.reshape(-1, itemsize)[:] = _planes(block, size).reshape(itemsize, -1).T
        start += length
        offset += size
    return raw.tobytes()


def _planes(block: memoryview, size: int) -> NDArray[np.uint8]:
    import pyarrow as pa

    planes = pa.Codec("zstd").decompress(pa.py_buffer(block), decompressed_size=size)
    if len(planes) != size:
        raise ValueError(f"a block has {len(planes)} bytes, {size} were claimed")
    return np.frombuffer(planes, np.uint8)
