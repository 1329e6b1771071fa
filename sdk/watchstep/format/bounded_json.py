"""JSON that others wrote, refused before it is parsed if its objects could take more memory than a limit.

An empty list is two bytes of text and 64 bytes of memory: a text of a few megabytes can take gigabytes once it is parsed.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

_MIB = 1024 * 1024
_OBJECT, _KEY, _LIST, _ELEMENT = 156, 132, 120, 56
"""Most bytes of memory for each brace, colon, bracket and comma of a text, measured on CPython 3.10 to 3.13 with `tracemalloc`:
a container or entry, and the number or the head of the text in it."""

_NARROW, _WIDE = 2, 9
"""Most bytes of memory for each byte of a text, decoded and once more in its strings: one character beyond ASCII makes each
character of its string take four bytes."""


_LONG = 256 * 1024
"""Bytes of text from which on the collector of cycles is paused: it would walk all objects of the process again and again while the parser, which
holds the interpreter's lock, makes new ones. Three megabytes of empty lists take 0.1 s so, and 1 s otherwise in a process of the service."""


class OversizedJsonError(ValueError):
    """A text whose objects could take more memory than the limit."""


def parse_json(
    data: bytes, limit: int, unique: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None
) -> Any:
    """Parse a JSON text. Lone surrogates, which neither UTF-8 nor a database takes, become question marks.

    Args:
        data: in UTF-8.
        limit: bytes of memory that the objects may take.
        unique: as ``object_pairs_hook`` of `json.loads`.

    Raises:
        OversizedJsonError: they could take more.
        ValueError, RecursionError: it is no JSON.
    """
    needed = memory_needed(data)
    if needed > limit:
        raise OversizedJsonError(
            f"a JSON text of {len(data)} bytes could take {needed // _MIB} MiB of memory, at most {limit // _MIB} are allowed"
        )
    parsed = _parsed(data, unique)
    if b"\\ud" in data or b"\\uD" in data:
        return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
    return parsed


def _parsed(data: bytes, unique: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None) -> Any:
    pauses = len(data) >= _LONG and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        return json.loads(data, object_pairs_hook=unique)
    finally:
        if pauses:
            gc.enable()


def memory_needed(data: bytes) -> int:
    """Most bytes of memory that a JSON text takes while it is parsed and afterwards; on the safe side."""
    narrow = data.isascii() and b"\\u" not in data
    return (
        (_NARROW if narrow else _WIDE) * len(data)
        + _OBJECT * data.count(b"{")
        + _KEY * data.count(b":")
        + _LIST * data.count(b"[")
        + _ELEMENT * data.count(b",")
    )
