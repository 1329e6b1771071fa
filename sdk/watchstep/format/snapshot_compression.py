"""Lossless compression of one tensor inside a snapshot: byte planes, then zstd, block by block.

The bytes of numbers that are alike differ in their low bytes and agree in their high ones: sign and exponent. So the
first bytes of all elements are put next to each other, then the second ones, and so on, before zstd sees them. A tensor
is cut into blocks of `BLOCK` bytes, each compressed by itself: writer and reader then need memory for one block besides
the tensor. The safetensors file stays valid: a compressed tensor stands in it as bytes (U8), and the metadata say under
`METADATA` what it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.bounded_json import parse_json

METADATA = "watchstep.compressed"
"""Where a snapshot's metadata hold the compressed tensors: JSON, name → `Packed`."""

CODEC = "planes-zstd"
BLOCK = 4 * 1024 * 1024
"""Bytes of a block before compression; divisible by every element's size."""

MAX_DECODED = 2 * 1024**3
"""Largest tensor that is compressed, and that a reader decodes; a larger one is written as it is."""

_MAX_DIMENSIONS = 64
_MAX_MEMORY = 256 * 1024 * 1024  # of the metadata
_LEVEL = 1
_WORTH = 0.9  # of the size; above it a tensor stays as it is


class DamagedBlockError(ValueError):
    """A block that is not what the header says."""


@dataclass(frozen=True)
class Packed:
    """A compressed tensor.

    Attributes:
        dtype: of the tensor, a safetensors name.
        shape: of the tensor.
        blocks: bytes of each block; one as large as the block itself is not compressed.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[int, ...]

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {
            "codec": CODEC,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "block": BLOCK,
            "blocks": list(self.blocks),
        }


def to_metadata(packed: Mapping[str, Packed]) -> dict[str, str]:
    """What a snapshot's metadata say of its compressed tensors; empty where there are none."""
    if not packed:
        return {}
    told = {name: one.as_data() for name, one in packed.items()}
    return {METADATA: json.dumps(told, separators=(",", ":"))}


def from_metadata(metadata: Mapping[str, str], itemsizes: Mapping[str, int]) -> dict[str, Packed]:
    """Read what `to_metadata` gave; nothing in it is believed.

    Args:
        metadata: of a snapshot.
        itemsizes: element sizes of the dtypes that there are, in bytes.

    Raises:
        ValueError: it has another form, or a tensor is over `MAX_DECODED`.
    """
    if METADATA not in metadata:
        return {}
    told = parse_json(metadata[METADATA].encode(), _MAX_MEMORY)
    return {name: _packed(name, entry, itemsizes) for name, entry in told.items()}


def _packed(name: str, entry: Any, itemsizes: Mapping[str, int]) -> Packed:
    if not isinstance(entry, dict) or entry.get("codec") != CODEC or entry.get("block") != BLOCK:
        raise ValueError(f"tensor {name!r} is compressed in a way that is not known here")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in itemsizes:
        raise ValueError(f"tensor {name!r} has unknown dtype {dtype!r}")
    shape, blocks = _whole_numbers(entry.get("shape")), _whole_numbers(entry.get("blocks"))
    size = math.prod(shape) * itemsizes[dtype]
    if len(shape) > _MAX_DIMENSIONS or math.prod(max(1, n) for n in shape) * itemsizes[dtype] > MAX_DECODED:
        raise ValueError(f"tensor {name!r} claims {size} bytes, compressed ones have at most {MAX_DECODED}")
    held = _block_sizes(size)
    if len(blocks) != len(held) or any(not 0 < n <= raw for n, raw in zip(blocks, held, strict=True)):
        raise ValueError(f"tensor {name!r} has blocks that do not fit its shape")
    return Packed(dtype, shape, blocks)


def _whole_numbers(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(type(n) is int and n >= 0 for n in data):
        raise ValueError("a shape or the blocks of a compressed tensor are not a list of whole numbers")
    return tuple(data)


def _block_sizes(size: int) -> list[int]:
    full, rest = divmod(size, BLOCK)
    return [BLOCK] * full + ([rest] if rest else [])


def compress_in_place(
    memory: NDArray[np.uint8], start: int, length: int, itemsize: int, place: int
) -> tuple[int, ...] | None:
    """Compress the ``length`` bytes at ``start`` to ``place``, or move them there as they are.

    Whether it is worth it is told by three blocks of the tensor, the first, the middle and the last one: it must save a
    tenth. Besides the buffer, memory for one block and its compressed form is needed.

    Args:
        memory: where the tensor lies; overwritten between ``place`` and the tensor's end.
        start: of the tensor.
        length: of the tensor.
        itemsize: bytes of an element.
        place: where its new form begins; at ``start`` or before.

    Returns:
        Bytes of each block; None where the tensor was only moved.
    """
    if not _worth_it(memory[start : start + length], itemsize):
        view = memory.data  # its assignment allows for overlap without a copy
        view[place : place + length] = view[start : start + length]
        return None
    blocks = []
    for offset in range(start, start + length, BLOCK):
        raw = memory[offset : min(offset + BLOCK, start + length)]
        packed = _compress(raw, itemsize)
        if len(packed) >= len(raw):
            packed = raw.tobytes()
        memory[place : place + len(packed)] = np.frombuffer(packed, np.uint8)
        place += len(packed)
        blocks.append(len(packed))
    return tuple(blocks)


def _worth_it(raw: NDArray[np.uint8], itemsize: int) -> bool:
    if not 0 < len(raw) <= MAX_DECODED:
        return False
    count = math.ceil(len(raw) / BLOCK)
    chosen = sorted({0, count // 2, count - 1})
    samples = [raw[index * BLOCK : (index + 1) * BLOCK] for index in chosen]
    return sum(len(_compress(sample, itemsize)) for sample in samples) <= _WORTH * sum(map(len, samples))


def _compress(raw: NDArray[np.uint8], itemsize: int) -> bytes:
    import pyarrow as pa

    planes = np.ascontiguousarray(raw.reshape(-1, itemsize).T)
    data: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(planes, asbytes=True)
    return data


def decompress(data: memoryview, packed: Packed, itemsize: int) -> NDArray[np.uint8]:
    """The bytes of a compressed tensor.

    Args:
        data: its blocks, one after the other; as long as ``packed.blocks`` together.
        packed: as `from_metadata` checked it.
        itemsize: bytes of an element.

    Raises:
        DamagedBlockError: a block does not decode to its size.
    """
    size = math.prod(packed.shape) * itemsize
    raw = np.empty(size, np.uint8)
    place = offset = 0
    for length, block in zip(packed.blocks, _block_sizes(size), strict=True):
        piece = data[place : place + length]
        into = raw[offset : offset + block]
        if length == block:
            into[:] = np.frombuffer(piece, np.uint8)
        else:
            into.reshape(-1, itemsize)[:] = _decompressed(piece, block).reshape(itemsize, -1).T
        place += length
        offset += block
    return raw


def _decompressed(piece: memoryview, size: int) -> NDArray[np.uint8]:
    import pyarrow as pa

    try:
        held = pa.Codec("zstd").decompress(pa.py_buffer(piece), decompressed_size=size)
    except (OSError, ValueError) as error:
        raise DamagedBlockError(str(error)) from error
    if len(held) != size:
        raise DamagedBlockError(f"a block has {len(held)} bytes, {size} were claimed")
    return np.frombuffer(held, np.uint8)
