"""What a snapshot begins with: the header that says which tensor lies where, and what could not be held."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from watchstep.errors import ConfigError
from watchstep.snapshot import DTYPES, HEADER_METADATA, MISSING, MISSING_NAMES

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


@dataclass(frozen=True)
class NamedArray:
    """A tensor and its bytes, little-endian and row-major."""

    described: Described
    data: bytes | memoryview


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
    told: dict[str, Any] = {HEADER_METADATA: dict(metadata)}
    place = 0
    for tensor in tensors:
        if tensor.name in told:
            raise ConfigError(
                f"snapshot: tensor name {tensor.name!r} is taken", "give each tensor its own name"
            )
        end = place + tensor.length
        told[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def missing_metadata(names: Sequence[str]) -> dict[str, str]:
    """What a snapshot's metadata say of tensors that it could not hold; empty where there are none."""
    if not names:
        return {}
    return {MISSING: str(len(names)), MISSING_NAMES: json.dumps(list(names[:MOST_NAMES]))}


def encode(tensors: Sequence[NamedArray], metadata: Mapping[str, str]) -> bytes:
    """One snapshot's bytes, from tensors in any order.

    Raises:
        ConfigError: two tensors of one name, an unknown dtype, or bytes that do not fit the shape.
    """
    for tensor in tensors:
        _check_size(tensor)
    ordered = [tensors[place] for place in aligned_order([tensor.described for tensor in tensors])]
    start = header([tensor.described for tensor in ordered], metadata)
    return b"".join([start, *(tensor.data for tensor in ordered)])


def _check_size(tensor: NamedArray) -> None:
    held, due = memoryview(tensor.data).nbytes, tensor.described.length
    if held != due:
        raise ConfigError(
            f"snapshot: tensor {tensor.described.name!r} has {held} bytes, its shape and dtype need {due}",
            "pass the tensor's own bytes, contiguous",
        )
