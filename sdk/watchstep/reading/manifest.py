"""The manifest of one compaction: which objects hold which rows. Written last, so that it speaks of whole objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from watchstep.bounded_json import parse_json
from watchstep.errors import FormatError
from watchstep.layout import SCHEMA_VERSION
from watchstep.segment_checks import MAX_BYTES, MAX_ROWS

COMPACTED = "compacted/"
MAX_MANIFEST = 256 * 1024 * 1024
_MAX_MEMORY = 768 * 1024 * 1024
_GENERATION = re.compile(r"compacted/([0-9]{10})/(.+)")


@dataclass(frozen=True)
class Part:
    """One object, by (tensor, step), worker and mode.

    Attributes:
        key: of the object, relative to the run.
        size: its bytes.
        first: its smallest step.
        last: its largest step.
        tensors: (place in the attempt's catalogue, rows) of each tensor, in the order in which they stand.
        columns: names of its columns.
        constant: columns with one value in all rows, and the value; they need not be read.
    """

    key: str
    size: int
    first: int
    last: int
    tensors: tuple[tuple[int, int], ...]
    columns: tuple[str, ...]
    constant: Mapping[str, int]

    @property
    def rows(self) -> int:
        """Its rows."""
        return sum(rows for _, rows in self.tensors)


@dataclass(frozen=True)
class CompactedAttempt:
    """One attempt's objects.

    Attributes:
        attempt: its id.
        started_ns: its first record's time.
        catalogue: as `watchstep.segment.catalogue_bytes` packs it.
        parts: all rows.
        recent: the rows of the last steps once more, so that the newest step is one object; from its ``first`` on.
    """

    attempt: str
    started_ns: int
    catalogue: str
    parts: tuple[Part, ...]
    recent: Part | None = None


@dataclass(frozen=True)
class Manifest:
    """What one compaction made.

    Attributes:
        generation: its number.
        created_ns: nanoseconds since the epoch.
        sources: keys of the segments whose rows are in it.
        attempts: in the order in which they started.
    """

    generation: int
    created_ns: int
    sources: tuple[str, ...]
    attempts: tuple[CompactedAttempt, ...]
    schema: int = SCHEMA_VERSION


def manifest_key(generation: int) -> str:
    """Key of a generation's manifest, relative to the run."""
    return f"{COMPACTED}{generation:010d}/manifest.json"


def generation_of(key: str) -> tuple[int, str] | None:
    """Generation and name of an object below ``compacted/``; None for what is none."""
    found = _GENERATION.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


def encode(manifest: Manifest) -> bytes:
    """A manifest's bytes."""
    return json.dumps(asdict(manifest), separators=(",", ":")).encode()


def decode(data: bytes, name: str) -> Manifest:
    """Read a manifest.

    Raises:
        FormatError: it is none, or of a later version.
    """
    try:
        held = parse_json(data, _MAX_MEMORY)
        if int(held["schema"]) > SCHEMA_VERSION:
            raise FormatError(f"{name}: schema {held['schema']}", "read the run with a newer watchstep")
        attempts = tuple(_attempt(entry) for entry in held["attempts"])
        return Manifest(
            int(held["generation"]),
            int(held["created_ns"]),
            tuple(str(source) for source in held["sources"]),
            attempts,
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise FormatError(f"{name}: not a manifest ({error})", "compact the run again") from error


def _attempt(held: dict[str, Any]) -> CompactedAttempt:
    recent = held["recent"]
    return CompactedAttempt(
        str(held["attempt"]),
        int(held["started_ns"]),
        str(held["catalogue"]),
        tuple(_part(entry) for entry in held["parts"]),
        None if recent is None else _part(recent),
    )


def _part(held: dict[str, Any]) -> Part:
    part = Part(
        str(held["key"]),
        int(held["size"]),
        int(held["first"]),
        int(held["last"]),
        tuple((int(place), int(rows)) for place, rows in held["tensors"]),
        tuple(str(name) for name in held["columns"]),
        {str(name): int(value) for name, value in held["constant"].items()},
    )
    impossible = any(place < 0 or rows < 1 for place, rows in part.tensors)
    if impossible or part.rows > MAX_ROWS or not 0 < part.size <= MAX_BYTES:
        raise ValueError(f"part {part.key[:80]!r} has an impossible size")
    if generation_of(part.key) is None or ".." in part.key:
        raise ValueError(f"part {part.key[:80]!r} lies elsewhere")
    if len({place for place, _ in part.tensors}) < len(part.tensors):
        raise ValueError(f"part {part.key[:80]!r} names a tensor twice")
    return part
