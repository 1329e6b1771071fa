"""Full tensors of a run, in snapshots and in objects of collections: lists, contents, and the tensors themselves, in parts of bounded size."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any

import numpy as np
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Header, Path, Query, Response
from fastapi.responses import StreamingResponse
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.layout import SNAPSHOTS, SnapshotKey, check_name
from watchstep.format.snapshot import (
    DTYPES,
    INFOS,
    MISSING,
    MISSING_NAMES,
    PARTS,
    Snapshot,
    TensorLocation,
    widened,
)
from watchstep.format.statistics import StatisticsBatch, merge_rows
from watchstep.format.tensors import Mode
from watchstep.kernels.array_kernel import measure_array
from watchstep.store.store import Store
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.queries.answers import FIGURES, FiguresOutput, Numbers, numbers
from watchstep_services.api.queries.snapshot_headers import read_snapshot
from watchstep_services.api.queries.state import Querying
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.paging import Paged, PageOutput, Paging
from watchstep_services.api.schemas.problems import RequestRefusedError, documented

router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/snapshots", tags=["snapshots"], responses=documented(502)
)

MEDIA_TYPE = "application/octet-stream"
_MEGABYTE = 1024 * 1024
_SAMPLE = 32
_DESCRIPTIONS = frozenset((INFOS, MISSING, MISSING_NAMES, PARTS))
"""Metadata about the tensors, which can be as large as the header."""

_MOST_METADATA = 64
_MOST_CHARACTERS = 4096
_PART = 4 * _MEGABYTE
"""Bytes of a streamed tensor that are read at once: the memory that a slow client occupies."""

_MEASURED = 1024 * 1024
"""Elements that are widened and measured at once."""

_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


@dataclass(frozen=True)
class SnapshotPath:
    """The snapshot in a request path."""

    project: str
    run: str
    key: SnapshotKey


async def _snapshot_path(
    project: str,
    run: str,
    attempt: Annotated[str, Path(max_length=128)],
    worker: Annotated[int, Path(ge=0, lt=2**31)],
    step: Annotated[int, Path(ge=0, lt=2**59)],
    mode: Mode,
    collection: Annotated[
        Word,
        Query(
            max_length=128,
            description="Collection whose tensors were saved; default: a snapshot of weights and gradients.",
            examples=["activations"],
        ),
    ] = "",
) -> SnapshotPath:
    name = check_name("collection", collection) if collection else ""
    return SnapshotPath(project, run, SnapshotKey(check_name("attempt", attempt), worker, step, mode, name))


Placed = Annotated[SnapshotPath, Depends(_snapshot_path)]
Name = Annotated[
    Word, Query(min_length=1, max_length=1024, description="Name of the tensor.", examples=["conv1.weight"])
]

_RAW: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            "X-Watchstep-Dtype": {
                "schema": {"type": "string"},
                "description": "Data type, by its safetensors name: F32, BF16, …",
            },
            "X-Watchstep-Shape": {
                "schema": {"type": "string"},
                "description": "Shape, separated by commas; empty for a scalar.",
            },
            "Accept-Ranges": {"schema": {"type": "string"}},
        },
    }
    for status, text in (
        (200, "Bytes of the tensor, little-endian and row-major."),
        (206, "Bytes of the Range."),
    )
}


class SnapshotEntry(BaseModel):
    """A snapshot, or the saved tensors of a collection."""

    attempt: str
    worker: int
    step: int
    mode: str
    collection: str = Field(description="Collection; empty for a snapshot of weights and gradients.")
    bytes: int


class SnapshotList(PageOutput):
    """Snapshots by attempt, worker, step, mode and collection."""

    snapshots: list[SnapshotEntry]


class PartOutput(BaseModel):
    """The place of a stored tensor within a larger one."""

    shape: list[int] = Field(description="Shape of the larger tensor.")
    start: list[int] = Field(description="Index of the first stored element in each dimension.")
    shard: bool = Field(
        description="Whether other workers store the rest; otherwise only this part was selected."
    )


class StoredTensor(BaseModel):
    """A tensor of a snapshot."""

    name: str
    dtype: str = Field(description="Data type, by its safetensors name: F32, BF16, F8_E4M3, …")
    shape: list[int]
    bytes: int = Field(description="Size of its elements.")
    part: PartOutput | None = Field(description="Its place, if it is a part of a larger tensor.")


class SnapshotOutput(SnapshotEntry, PageOutput):
    """A snapshot with a page of its tensors."""

    metadata: dict[str, str] = Field(
        description=f"What the writer noted about the snapshot; at most {_MOST_METADATA} entries, and none of more than {_MOST_CHARACTERS:,} characters."
    )
    tensors: list[StoredTensor] = Field(description="Tensors in the order of their bytes.")
    missing: int = Field(description="Number of tensors that exceeded a limit of the writer.")


class TensorSummary(StoredTensor):
    """Figures of a tensor, and its first elements."""

    figures: FiguresOutput
    first: Numbers = Field(description=f"The first {_SAMPLE} elements; null if not finite.")


@router.get("", summary="List snapshots")
@permits("read")
def list_snapshots(
    project: str,
    run: str,
    queries: Querying,
    paging: Paged,
    collection: Annotated[
        Word | None,
        Query(
            max_length=128,
            description="Only tensors of this collection; empty: only snapshots. Default: both, and those of all collections.",
        ),
    ] = None,
) -> SnapshotList:
    """Return the snapshots and saved tensors of a run, by attempt, worker, step, mode and collection."""
    with queries.open_store(project, run) as store:
        page, token = paging.fetch_streamed(
            ((key.attempt, key.worker, key.step, key.mode, key.collection), (key, size))
            for key, size in _list_keys(store, queries.budget().check)
            if collection is None or key.collection == collection
        )
    return SnapshotList(snapshots=[_entry(key, size) for key, size in page], next_page_token=token)


@router.get("/{attempt}/{worker}/{step}/{mode}", summary="Get a snapshot")
@permits("read")
def get_snapshot(place: Placed, queries: Querying, paging: Paged) -> SnapshotOutput:
    """Return a snapshot, and a page of its tensors with their data types and shapes."""
    with queries.open_store(place.project, place.run) as store:
        return read_snapshot(store, place.key.path, queries.budget(), partial(_output, place.key, paging))


@router.get(
    "/{attempt}/{worker}/{step}/{mode}/tensor",
    summary="Read a tensor's bytes",
    response_class=Response,
    responses={**_RAW, **documented(416)},
)
@permits("read")
def get_tensor(
    place: Placed,
    name: Name,
    queries: Querying,
    range_: Annotated[
        str | None, Header(alias="Range", max_length=100, description="bytes=FIRST-LAST")
    ] = None,
) -> Response:
    """Return the elements as recorded, little-endian and row-major, or the part that a Range selects."""
    key = place.key
    with queries.open_store(place.project, place.run) as store:
        stored, _ = read_snapshot(store, key.path, queries.budget(), partial(_find, name))
        size = stored.length
        start, end = _byte_range(range_, size)
        _bounded(end - start, queries.service.settings.tensor_mb, "a smaller Range")
        first = min(end, start + _PART)
        content = _plain(store, key.path, stored, (start, first))
    headers = {
        "x-watchstep-dtype": stored.dtype,
        "x-watchstep-shape": ",".join(map(str, stored.shape)),
        "accept-ranges": "bytes",
        "etag": f'"{hashlib.sha256(f"{key.path} {name}".encode()).hexdigest()[:32]}"',
        "cache-control": "private, max-age=3600, immutable",
    }
    status = 200 if range_ is None else 206
    if range_ is not None:
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    if first == end:
        return Response(content, status, headers, MEDIA_TYPE)
    headers["content-length"] = str(end - start)
    parts = _parts(content, partial(_plain, store, key.path, stored), (first, end), queries.part_threads)
    return StreamingResponse(parts, status, headers, MEDIA_TYPE)


@router.get("/{attempt}/{worker}/{step}/{mode}/summary", summary="Get a tensor's figures")
@permits("read")
def get_tensor_summary(place: Placed, name: Name, queries: Querying) -> TensorSummary:
    """Return figures over all elements of a tensor, and its first elements."""
    key = place.key
    with queries.open_store(place.project, place.run) as store:
        stored, described = read_snapshot(store, key.path, queries.budget(), partial(_find, name))
        _bounded(stored.length, queries.service.settings.tensor_mb, "its bytes in pieces, by Range")
        elements = np.frombuffer(_plain(store, key.path, stored, (0, stored.length)), DTYPES[stored.dtype])
        figures = _measure(elements, stored.dtype)
        first = _real(elements[:_SAMPLE], stored.dtype)
    return TensorSummary(
        **described.model_dump(),
        figures=FiguresOutput(**{key: figure(figures) for key, figure in FIGURES.items()}),
        first=numbers(first.astype(float)),
    )


def _measure(elements: NDArray[Any], dtype: str) -> StatisticsBatch:
    """Measure stored elements in parts, because widening may take eight times their memory."""
    starts = range(0, max(1, len(elements)), _MEASURED)
    parts = [measure_array(_real(elements[start : start + _MEASURED], dtype)) for start in starts]
    return merge_rows(StatisticsBatch.concatenate(parts), np.zeros(len(parts), np.intp), 1)


def _real(elements: NDArray[Any], dtype: str) -> NDArray[Any]:
    values = widened(elements, dtype)
    return abs(values) if values.dtype.kind == "c" else values


def _list_keys(store: Store, check: Any) -> Iterator[tuple[SnapshotKey, int]]:
    for entry in store.entries(SNAPSHOTS):
        check()
        try:
            yield SnapshotKey.parse(entry.key), entry.size
        except FormatError:
            continue  # not an object of Watchstep


def _entry(key: SnapshotKey, size: int) -> SnapshotEntry:
    return SnapshotEntry(
        attempt=key.attempt,
        worker=key.worker,
        step=key.step,
        mode=key.mode,
        collection=key.collection,
        bytes=size,
    )


def _output(key: SnapshotKey, paging: Paging, snapshot: Snapshot, size: int) -> SnapshotOutput:
    names, token = paging.fetch_fixed(snapshot.tensors)
    metadata = (
        (name, text)
        for name, text in snapshot.metadata.items()
        if name not in _DESCRIPTIONS and len(name) + len(text) <= _MOST_CHARACTERS
    )
    return SnapshotOutput(
        **_entry(key, size).model_dump(),
        metadata=dict(islice(metadata, _MOST_METADATA)),
        tensors=[_stored(name, snapshot) for name in names],
        missing=snapshot.missing,
        next_page_token=token,
    )


def _stored(name: str, snapshot: Snapshot) -> StoredTensor:
    stored, part = snapshot.tensors[name], snapshot.parts.get(name)
    return StoredTensor(
        name=name,
        dtype=stored.dtype,
        shape=list(stored.shape),
        bytes=stored.length,
        part=None if part is None else PartOutput.model_validate(part.as_data()),
    )


def _find(name: str, snapshot: Snapshot, _size: int) -> tuple[TensorLocation, StoredTensor]:
    stored = snapshot.tensors.get(name)
    if stored is None:
        snapshot.read(name)  # raises an error with the reason
        raise NotFoundError(f"tensor {name!r}: not in the snapshot", "list its tensors")
    return stored, _stored(name, snapshot)


def _bounded(size: int, most_mb: int, instead: str) -> None:
    if size > most_mb * _MEGABYTE:
        raise RequestRefusedError(
            413,
            f"{size} bytes: more than the {most_mb} MiB of one response",
            f"request {instead}, or raise WATCHSTEP_TENSOR_MB",
        )


def _plain(store: Store, key: str, stored: TensorLocation, piece: tuple[int, int]) -> bytes:
    start, end = piece
    content = store.get_range(key, stored.start + start, end - start) if end > start else b""
    if len(content) != end - start:
        raise FormatError(
            f"snapshot {key}: a tensor is shorter than its header states", "take another snapshot"
        )
    return content


async def _parts(
    content: bytes,
    read: Callable[[tuple[int, int]], bytes],
    rest: tuple[int, int],
    threads: CapacityLimiter,
) -> AsyncIterator[bytes]:
    """Yield the first part, then the rest at the client's pace: a part is read after the previous ones are sent."""
    yield content
    start, end = rest
    while start < end:
        content = await to_thread.run_sync(read, (start, min(end, start + _PART)), limiter=threads)
        start += len(content)
        yield content


def _byte_range(text: str | None, size: int) -> tuple[int, int]:
    """Return the first byte and the end of a Range; the whole tensor without one."""
    if text is None:
        return 0, size
    match = _RANGE.fullmatch(text.strip())
    if match is None or not (match[1] or match[2]):
        raise RequestRefusedError(416, f"Range {text!r}: not a single range of bytes", "use bytes=FIRST-LAST")
    if not match[1]:
        start, end = max(0, size - int(match[2])), size
    else:
        start = int(match[1])
        end = min(size, int(match[2]) + 1) if match[2] else size
    if start >= end:
        raise RequestRefusedError(
            416, f"Range {text!r}: outside the {size} bytes of the tensor", "request a range within them"
        )
    return start, end
