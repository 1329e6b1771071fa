"""The catalogue of a segment's tensors, and the metadata of a segment, in any form."""

from __future__ import annotations

import base64
import json
import zlib

from watchstep.format.documents import parse_json
from watchstep.format.layout import SCHEMA_VERSION, check_schema
from watchstep.format.tensors import KnownCatalogues, TensorInfo

_MAX_CATALOGUE = 16 * 1024 * 1024
_MAX_CATALOGUE_MEMORY = 256 * 1024 * 1024
_MOST_LISTS, _MOST_VALUES = 64, 1024
"""Brackets and commas of a catalogue for each tensor in it, in its names included: a parser holds the interpreter's lock as long as it makes lists."""
_MOST_BYTES = 16 * 1024
"""Bytes of a catalogue for each tensor in it: names are shorter."""
_MAX_META = 4096
_known = KnownCatalogues()

META = b"watchstep"
"""Key of the version in a segment's metadata."""

CATALOGUE = b"watchstep.tensors"
"""Key of the catalogue in a segment's metadata."""


def catalogue_bytes(catalogue: tuple[TensorInfo, ...]) -> bytes:
    """Return the catalogue in the form of a segment's metadata. Writers keep it while the tensors stay the same."""
    text = json.dumps([info.as_data() for info in catalogue], separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6))


def metadata(catalogue: bytes) -> dict[bytes, bytes]:
    """Return a segment's metadata, with the result of `catalogue_bytes`."""
    return {META: json.dumps({"schema": SCHEMA_VERSION}).encode(), CATALOGUE: catalogue}


def check_version(stored: dict[bytes, bytes], name: str) -> None:
    """Check in a segment's metadata that its version is supported.

    Raises:
        FormatError: The segment has another version.
        ValueError, TypeError, KeyError: These are not a segment's metadata.
    """
    check_schema(f"segment {name}", schema_of(stored))


def schema_of(stored: dict[bytes, bytes]) -> int:
    """Return the version in a segment's metadata.

    Raises:
        ValueError, TypeError, KeyError: These are not a segment's metadata.
    """
    if len(stored[META]) > _MAX_META:
        raise ValueError(f"its metadata take {len(stored[META])} bytes, at most {_MAX_META} are read")
    return int(json.loads(stored[META])["schema"])


def catalogue_of(stored: bytes) -> tuple[TensorInfo, ...]:
    """Return the catalogue that `catalogue_bytes` packed.

    Raises:
        ValueError, TypeError, KeyError, zlib.error: The bytes are not a catalogue, or exceed the limit.
    """
    return _known.get(stored, _unpacked)


def _unpacked(stored: bytes) -> tuple[int, tuple[TensorInfo, ...]]:
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(base64.b64decode(stored, validate=True), _MAX_CATALOGUE)
    if unpacker.unconsumed_tail or unpacker.unused_data or not unpacker.eof:
        raise ValueError("the catalogue of its tensors is too large, truncated, or followed by other data")
    tensors = text.count(b"{")
    if (
        len(text) > _MOST_BYTES * (tensors + 1)
        or text.count(b"[") > _MOST_LISTS * (tensors + 1)
        or text.count(b",") > _MOST_VALUES * (tensors + 1)
    ):
        raise ValueError("the catalogue of its tensors contains data other than tensors")
    return len(text), tuple(TensorInfo.from_data(entry) for entry in parse_json(text, _MAX_CATALOGUE_MEMORY))
