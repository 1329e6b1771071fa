"""The cursor of a run: for each writer of each attempt the next sequence number to read, as canonical text."""

from __future__ import annotations

import json

from watchstep.format.layout import WriterId


def decode(text: str) -> dict[WriterId, int]:
    """Read a cursor."""
    return {WriterId(*key.split("/")): int(seq) for key, seq in json.loads(text).items()}


def encode(cursor: dict[WriterId, int]) -> str:
    """The one text of a cursor: equal cursors have equal texts."""
    named = {f"{who.attempt}/{who.node}/{who.writer}": seq for who, seq in cursor.items()}
    return json.dumps(named, sort_keys=True, separators=(",", ":"))
