"""Migration of runs with schema 1, which has the names from before 0.1.0, and schema 2, whose segments are Parquet.

Each object is replaced as a whole, ``run.json`` last, which states the run's schema. An interrupted migration is completed by the next
one; objects that already have the new schema are unchanged. Segments of attempts are written as Arrow IPC under a new name, and the
replaced ones are deleted. Compacted segments are written as a new generation, and the replaced generation is deleted afterwards.

Tensors in snapshots of schema 1 may be compressed; they are written as plain safetensors. In such a file, a compressed tensor is stored as
bytes (U8), and the metadata contain its dtype, its shape, and the bytes of its blocks. A block is `BLOCK` bytes of the tensor: the first
bytes of all its elements, then the second ones, and so on, compressed with zstd; a block of unchanged length is not compressed.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError, WatchstepError
from watchstep.format import segment as segments
from watchstep.format.catalogue import CATALOGUE, catalogue_bytes, catalogue_of, metadata, schema_of
from watchstep.format.documents import MAX_BYTES as MAX_DOCUMENT
from watchstep.format.documents import parse_json
from watchstep.format.journal import MAX_BYTES as MAX_JOURNAL
from watchstep.format.layout import (
    BASELINES,
    CONTROL_DOCUMENT,
    ENDS,
    JOURNALS,
    RUN_DOCUMENT,
    SCHEMA_VERSION,
    SEGMENTS,
    SNAPSHOTS,
    SegmentKey,
)
from watchstep.format.parquet.claims import claims_of, read_footer
from watchstep.format.parquet.table import check_claims, check_leaves, checked_columns, to_block
from watchstep.format.segment_checks import MAX_BYTES, PROBE, WORD_COLUMNS, whole
from watchstep.format.snapshot import COMPRESSED, DTYPES, Described, TensorLocation, header, read_header
from watchstep.reading import compacted
from watchstep.reading.compacted import (
    COMPACTED,
    MAX_MANIFEST,
    CompactedAttempt,
    CompactedSegment,
    generation_of,
    manifest_key,
)
from watchstep.reading.compaction import claim_generation, encode_compacted
from watchstep.reading.run_documents import read_state

if TYPE_CHECKING:
    import pyarrow as pa

    from watchstep.format.tensors import TensorInfo
    from watchstep.store.store import Store


CODEC = "planes-zstd"
BLOCK = 4 * 1024 * 1024
MAX_DECODED = 2 * 1024**3
_MAX_DIMENSIONS = 64
_MAX_DESCRIPTION = 256 * 1024 * 1024  # of the metadata


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
    """Return the bytes of a snapshot without compression; None if nothing in it is compressed.

    Raises:
        NotFoundError: the object does not exist.
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
        raise FormatError(f"snapshot {key} cannot be decompressed ({reason})", "remove the object") from error
    rest = {name: text for name, text in metadata.items() if name != COMPRESSED}
    return b"".join([header(described, rest), *pieces])


def _from_metadata(
    metadata: Mapping[str, str], locations: Mapping[str, TensorLocation]
) -> dict[str, CompressedTensor]:
    described = parse_json(metadata[COMPRESSED].encode(), _MAX_DESCRIPTION)
    return {name: _checked(name, entry, locations[name]) for name, entry in described.items()}


def _checked(name: str, entry: Any, location: TensorLocation) -> CompressedTensor:
    """Raises ValueError or TypeError for a description that does not fit the object."""
    if entry.get("codec") != CODEC or entry.get("block") != BLOCK or entry.get("dtype") not in DTYPES:
        raise ValueError(f"tensor {name!r} has an unknown compression")
    tensor = Described(name, entry["dtype"], _whole_numbers(entry.get("shape")))
    blocks = _whole_numbers(entry.get("blocks"))
    claimed = math.prod(max(1, size) for size in tensor.shape) * tensor.itemsize
    if len(tensor.shape) > _MAX_DIMENSIONS or claimed > MAX_DECODED:
        raise ValueError(f"tensor {name!r} claims {claimed} bytes, more than the limit of {MAX_DECODED}")
    sizes = _block_sizes(tensor.length)
    if len(blocks) != len(sizes) or any(not 0 < n <= raw for n, raw in zip(blocks, sizes, strict=True)):
        raise ValueError(f"the blocks of tensor {name!r} do not match its shape")
    if location.dtype != "U8" or sum(blocks) != location.length:
        raise ValueError(f"the length of tensor {name!r} does not match its blocks")
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
        raise ValueError(f"a block has {len(planes)} bytes instead of the claimed {size}")
    return np.frombuffer(planes, np.uint8)


FROM_SCHEMAS = (1, 2)
"""Schemas that are rewritten."""

_OLD_SUFFIX = ".parquet"
_BLOCKS = b"watchstep.blocks"  # metadata of segments of several ranks

SILENT_SECONDS = 900.0
"""How long nothing in a run without an end may have changed until it no longer counts as being written."""

NAMES = {
    "unheld": "not_in_optimizer",
    "was_held": "was_optimized",
    "held_share": "optimized_share",
    "after_held": "after_optimized",
    "beside_held": "weight_optimized",
    "kept_gradients": "stale_gradients",
    "kept gradients": "stale gradients",
}
"""Collections, roles, probes and their columns, and kinds of faults: the name in schema 1 and the name since schema 2."""

_UNHELD = ":unheld"
_KEPT = re.compile(r"((?:.*\.)?gradients:)kept((?:_\d+)?)")
_IN_TEXT = re.compile(
    rf"\b(?:{'|'.join(name for name in NAMES if ' ' not in name)})\b|\bgradients:kept(?=_\d|\b)"
)
_MAX_MEMORY = 512 * 1024 * 1024
_BEING_WRITTEN = ("created", "open", "stopping")


class RunInUseError(WatchstepError):
    """The run may still be written to."""


@dataclass
class MigratedRun:
    """Result of migrating one run, or of a dry run.

    Attributes:
        name: ``<project>/<run>``.
        segments: segments rewritten.
        compacted: compacted segments rewritten.
        snapshots: compressed snapshots rewritten without compression.
        documents: JSON documents rewritten.
        damaged: key → why the object was left unchanged.
    """

    name: str
    segments: int = 0
    compacted: int = 0
    snapshots: int = 0
    documents: int = 0
    damaged: dict[str, str] = field(default_factory=dict)

    @property
    def is_current(self) -> bool:
        """Whether nothing had to be rewritten."""
        return not (self.segments or self.compacted or self.snapshots or self.documents)


def new_name(name: str) -> str:
    """Return the name in schema 2 of a collection, role, probe or tensor; the same name if it did not change."""
    if name in NAMES:
        return NAMES[name]
    if name.endswith(_UNHELD):
        return f"{name.removesuffix(_UNHELD)}:{NAMES['unheld']}"
    if match := _KEPT.fullmatch(name):
        return f"{match[1]}stale{match[2]}"
    return name


def new_text(text: str) -> str:
    """Return a pattern, query or program text with the names of schema 2."""
    return _IN_TEXT.sub(lambda match: NAMES.get(match[0], "gradients:stale"), text)


def migrate_run(
    run_store: Store, name: str, *, dry_run: bool = False, silent_seconds: float = SILENT_SECONDS
) -> MigratedRun:
    """Rewrite the objects of a run that have an earlier schema. Safe to repeat and to interrupt.

    Args:
        run_store: the run's store.
        name: ``<project>/<run>``, for messages.
        dry_run: count what would be rewritten, and write nothing.
        silent_seconds: how long nothing may have changed in a run that has not ended.

    Raises:
        RunInUseError: the run may still be written to.
        NotFoundError: there is no run.
        StoreError: the store cannot be read or written.
    """
    migration = _Migration(run_store, MigratedRun(name), silent_seconds, dry_run=dry_run)
    if migration.from_schema > SCHEMA_VERSION:
        return migration.done
    for entry in list(run_store.entries(SEGMENTS)):
        migration.segment(entry.key)
    if migration.from_schema not in FROM_SCHEMAS:
        # Of a current run, only segments may still come from a recorder of an earlier version.
        return migration.done
    migration.compaction()
    for entry in list(run_store.entries(SNAPSHOTS)):
        migration.snapshot(entry.key)
    for entry in list(run_store.entries(ENDS)):
        migration.document(entry.key, MAX_DOCUMENT)
    for entry in list(run_store.entries(BASELINES)):
        migration.document(entry.key, MAX_DOCUMENT)
    for entry in list(run_store.entries(JOURNALS)):
        migration.document(entry.key, MAX_JOURNAL)
    migration.document(CONTROL_DOCUMENT, MAX_DOCUMENT)
    migration.document(RUN_DOCUMENT, MAX_DOCUMENT)  # the last one: it states the schema of the run
    return migration.done


class _Migration:
    def __init__(self, store: Store, done: MigratedRun, silent_seconds: float, *, dry_run: bool) -> None:
        self.done = done
        self._store = store
        self._silent_seconds = silent_seconds
        self._dry_run = dry_run
        self._may_write = False
        self.from_schema = self._stated_schema()

    def _stated_schema(self) -> int:
        """Return the schema in ``run.json``; 1 if the document is damaged."""
        try:
            document = parse_json(self._store.get(RUN_DOCUMENT, limit=MAX_DOCUMENT), _MAX_MEMORY)
            schema = document["schema"]
        except (FormatError, ValueError, TypeError, KeyError, RecursionError):
            return FROM_SCHEMAS[0]
        return schema if type(schema) is int else FROM_SCHEMAS[0]

    def segment(self, key: str) -> None:
        """Rewrite one segment as Arrow IPC, if it is Parquet."""
        if not key.endswith(_OLD_SUFFIX):
            return
        try:
            data = _as_arrow(self._store.get(key, limit=MAX_BYTES), key)
            new_key = _new_key(key)
        except NotFoundError:
            return  # deleted after listing
        except FormatError as error:
            self.done.damaged[key] = error.what
            return
        self._put(new_key, data)
        if not self._dry_run:
            self._store.delete(key)
        self.done.segments += 1

    def snapshot(self, key: str) -> None:
        """Rewrite one snapshot, if its tensors are compressed."""
        try:
            data = decompressed(self._store, key)
        except NotFoundError:
            return
        except FormatError as error:
            self.done.damaged[key] = error.what
            return
        if data is not None:
            self._put(key, data)
            self.done.snapshots += 1

    def document(self, key: str, limit: int) -> None:
        """Rewrite one JSON document, if a name in it changed or it states an earlier schema."""
        try:
            data = self._store.get(key, limit=limit)
            document = parse_json(data, _MAX_MEMORY)
        except NotFoundError:
            if key == RUN_DOCUMENT:
                raise
            return
        except FormatError as error:
            self.done.damaged[key] = error.what
            return
        except (ValueError, RecursionError) as error:
            self.done.damaged[key] = f"{key}: not JSON ({error})"
            return
        if key == RUN_DOCUMENT:
            new = _current_run(document)
        else:
            new = _current_document(document, new_name if self.from_schema == 1 else _same)
        if new != document:
            self._put(key, json.dumps(new, indent=1).encode())
            self.done.documents += 1

    def compaction(self) -> None:
        """Write the newest compaction, if it is of an earlier schema, as a new generation, and delete the older ones."""
        generations = [
            match
            for entry in list(self._store.entries(COMPACTED))
            if (match := generation_of(entry.key)) and match[1] == "manifest.json"
        ]
        newest = max((generation for generation, _ in generations), default=None)
        if newest is None:
            return
        key = manifest_key(newest)
        try:
            manifest = parse_json(self._store.get(key, limit=MAX_MANIFEST), _MAX_MEMORY)
            schema = manifest["schema"]
            if schema not in FROM_SCHEMAS:
                return
            entries = manifest["attempts"]
            attempts = tuple(
                compacted.attempt_from_data(_as_schema_2(entry) if schema == 1 else entry)
                for entry in entries
            )
            sources = tuple(_new_key(str(source)) for source in manifest["sources"])
            self._rewrite_compaction(int(manifest["created_ns"]), sources, attempts, schema)
        except (FormatError, NotFoundError) as error:
            self.done.damaged[key] = error.what
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.done.damaged[key] = f"{key}: not a manifest ({error})"

    def _rewrite_compaction(
        self, created_ns: int, sources: tuple[str, ...], attempts: tuple[CompactedAttempt, ...], schema: int
    ) -> None:
        generation = 0 if self._dry_run else self._claimed()
        rewritten = []
        for attempt in attempts:
            prefix = f"{COMPACTED}{generation:010d}/{attempt.attempt}/"
            segments = [self._rewrite_compacted(segment, prefix, schema) for segment in attempt.segments]
            recent = (
                None if attempt.recent is None else self._rewrite_compacted(attempt.recent, prefix, schema)
            )
            catalogue = catalogue_bytes(_current_catalogue(catalogue_of(attempt.catalogue.encode()), schema))
            rewritten.append(
                replace(attempt, catalogue=catalogue.decode(), segments=tuple(segments), recent=recent)
            )
        if self._dry_run:
            return
        manifest = compacted.Manifest(generation, created_ns, sources, tuple(rewritten))
        self._put(manifest_key(generation), compacted.encode(manifest))
        old = [
            entry.key
            for entry in self._store.entries(COMPACTED)
            if (match := generation_of(entry.key)) and match[0] < generation
        ]
        # Delete a manifest before its segments, so that no reader starts to use it.
        for key in sorted(old, key=lambda key: (not key.endswith("/manifest.json"), key)):
            self._store.delete(key)

    def _claimed(self) -> int:
        self._check_silent()
        return claim_generation(self._store)

    def _rewrite_compacted(self, segment: CompactedSegment, prefix: str, schema: int) -> CompactedSegment:
        stated, table, _ = _read_table(self._store.get(segment.key, limit=MAX_BYTES), segment.key)
        if stated != schema:
            raise FormatError(
                f"{segment.key} does not have the schema of its manifest", "compact the run again"
            )
        data = encode_compacted(table)
        key = f"{prefix}{segment.key.rpartition('/')[2]}"
        self._put(key, data)
        self.done.compacted += 1
        columns = tuple(_new_column(name) if schema == 1 else name for name in segment.columns)
        return replace(segment, key=key, size=len(data), columns=columns)

    def _put(self, key: str, data: bytes) -> None:
        if not self._dry_run:
            self._check_silent()
            self._store.put(key, data)

    def _check_silent(self) -> None:
        """Refuse a run that may be written to, before the first object is replaced.

        Raises:
            RunInUseError: it has not ended, and changed recently.
        """
        if self._may_write:
            return
        state = read_state(self._store).state
        silent = time.time() - self._store.newest_ns() / 1e9
        if state in _BEING_WRITTEN and silent < self._silent_seconds:
            raise RunInUseError(
                f"run {self.done.name} is {state}, and was written to {max(0.0, silent):.0f} s ago",
                f"wait until the run has ended, or has been silent for {self._silent_seconds:.0f} s",
            )
        self._may_write = True


def _same(name: str) -> str:
    return name


def _new_key(key: str) -> str:
    """Return the name of a segment since schema 3.

    Raises:
        FormatError: the name is not that of a segment.
    """
    return SegmentKey.parse(f"{key.removesuffix(_OLD_SUFFIX)}.arrow").path


def _as_arrow(data: bytes, key: str) -> bytes:
    """Return a segment of an earlier schema as Arrow IPC.

    Raises:
        FormatError: the bytes are not a complete segment of an earlier schema, or claim sizes over the limits.
    """
    _, table, catalogue = _read_table(data, key)
    block = to_block(table, catalogue, key)
    blocks = table.schema.metadata.get(_BLOCKS)
    return segments.encode(block, more=None if blocks is None else {_BLOCKS: blocks})


def _read_table(data: bytes, key: str) -> tuple[int, pa.Table, tuple[TensorInfo, ...]]:
    """Return a segment's schema, its table with today's names and metadata, and its catalogue.

    Raises:
        FormatError: the bytes are not a complete segment of an earlier schema, or claim sizes over the limits.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with whole(key):
        footer = read_footer(data)
        check_leaves(footer.leaves)
        file = pq.ParquetFile(
            pa.BufferReader(data), read_dictionary=list(WORD_COLUMNS), page_checksum_verification=True
        )
        stored = dict(file.metadata.metadata or {})
        schema = schema_of(stored)
        if schema not in FROM_SCHEMAS:
            raise ValueError(f"it has schema {schema}")
        columns = checked_columns(file.schema_arrow)
        check_claims(claims_of(data, footer, frozenset(columns)), columns)
        catalogue = _current_catalogue(catalogue_of(stored[CATALOGUE]), schema)
        table = file.read(columns, use_threads=False).combine_chunks()
        if schema == 1:
            places = table.column_names.index("tensor")
            table = table.set_column(places, "tensor", _renamed_words(table.column("tensor")))
            table = table.rename_columns([_new_column(name) for name in table.column_names])
        table = table.replace_schema_metadata({**stored, **metadata(catalogue_bytes(catalogue))})
        return schema, table, catalogue


def _renamed_words(column: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa

    return pa.chunked_array(
        [
            pa.DictionaryArray.from_arrays(
                chunk.indices,
                pa.array([new_name(word) for word in chunk.dictionary.to_pylist()], pa.string()),
            )
            for chunk in column.chunks
        ],
        column.type,
    )


def _current_catalogue(catalogue: tuple[TensorInfo, ...], schema: int) -> tuple[TensorInfo, ...]:
    if schema != 1:
        return catalogue
    return tuple(
        replace(
            info,
            name=new_name(info.name),
            role=new_name(info.role),
            collections=tuple(sorted(new_name(name) for name in info.collections)),
        )
        for info in catalogue
    )


def _new_column(name: str) -> str:
    return f"{PROBE}{new_name(name.removeprefix(PROBE))}" if name.startswith(PROBE) else name


def _current_run(document: Any) -> Any:
    """Rename in ``run.json``. Patterns, queries and programs of its rules may contain a name anywhere in their text."""
    if not isinstance(document, dict) or document.get("schema") not in FROM_SCHEMAS:
        return document
    texts = {name: document[name] for name in ("config", "rules") if name in document}
    renamed = _current_document(texts, new_text) if document["schema"] == 1 else {}
    return document | renamed | {"schema": SCHEMA_VERSION}


def _current_document(value: Any, rename: Callable[[str], str]) -> Any:
    """Return a JSON value with today's names, as keys and as values, and today's schema."""
    if isinstance(value, dict):
        renamed = {rename(key): _current_document(entry, rename) for key, entry in value.items()}
        return renamed | {"schema": SCHEMA_VERSION} if value.get("schema") in FROM_SCHEMAS else renamed
    if isinstance(value, list):
        return [_current_document(entry, rename) for entry in value]
    return rename(value) if isinstance(value, str) else value


def _as_schema_2(attempt: dict[str, Any]) -> dict[str, Any]:
    """Convert an attempt of a manifest of schema 1, in which compacted segments were named parts."""
    return {**attempt, "segments": attempt["parts"]}
