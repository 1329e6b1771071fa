"""JSON that others wrote, refused before it is parsed if its objects could take more memory than a limit.

An empty list is two bytes of text and 64 bytes of memory: a text of a few megabytes can take gigabytes once it is parsed.
"""

from __future__ import annotations

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
    parsed = json.loads(data, object_pairs_hook=unique)
    if b"\\ud" in data or b"\\uD" in data:
        return json.loads(json.dumps(parsed, ensure_ascii=False).encode("utf-8", "replace"))
    return parsed


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
