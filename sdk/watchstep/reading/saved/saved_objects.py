"""The objects with full tensors of a run: which tensor is in which object, at which step, and how shards are merged.

Objects never change, so their headers are cached. The listing is cached until the run is refreshed; it is read again where a step is not
found in it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import BadNameError, FormatError, NotFoundError, StoreError
from watchstep.format import documents
from watchstep.format.layout import SNAPSHOTS, SnapshotKey, attempt_document
from watchstep.format.snapshot import Snapshot, open_snapshot
from watchstep.format.tensors import MODES, Mode, TensorInfo, mode_index
from watchstep.reading.columns import NO_CUT
from watchstep.reading.index import RunIndex, prefetch, readers_of
from watchstep.reading.run_documents import ATTEMPT, get_document, read_documents
from watchstep.reading.saved.saved_tensor import WORDS, SavedPiece, SavedTensor
from watchstep.store.store import Store

_CACHED_TENSORS = 200_000
"""Tensors in cached headers, about 100 MB."""

_SHOWN = 5
_MOST_READ = 50
"""Steps of a mode that are searched for a tensor, to name in an error where it was saved."""

_HOW_TO_SAVE = "save them with Collection(tensors=Cadence(every=…)), or take snapshots"
_MAX_REMAINDERS = 1_000
_MAX_WORKERS = 65_536

Group = tuple[int, str]
"""A step and a mode."""

Box = tuple[tuple[int, int], ...]
"""First index and end in each dimension."""


@dataclass(frozen=True)
class SavedRequest:
    """Which saved tensor is requested; None for any.

    Attributes:
        name: the tensor.
        step: the step of the run.
        mode: the mode.
        worker: the worker; by default the lowest one that saved it whole, or all with a shard.
        attempt: the attempt; by default the newest one of the step.
        collection: the collection, empty for snapshots.
        preferred: collections that are looked at first.
    """

    name: str
    step: int
    mode: Mode = "train"
    worker: int | None = None
    attempt: str | None = None
    collection: str | None = None
    preferred: Collection[str] = ()

    def order(self, key: SnapshotKey) -> tuple[bool, bool, str]:
        """Return the rank of an object of one worker: the tensor's collections, other collections, snapshots."""
        return key.collection not in self.preferred, not key.collection, key.collection


class _Headers:
    """The last opened objects, limited by the number of their tensors. Thread-safe."""

    def __init__(self) -> None:
        self._opened: OrderedDict[SnapshotKey, Snapshot] = OrderedDict()
        self._tensors = 0
        self._lock = threading.Lock()

    def get(self, key: SnapshotKey) -> Snapshot | None:
        with self._lock:
            if key in self._opened:
                self._opened.move_to_end(key)
            return self._opened.get(key)

    def add(self, key: SnapshotKey, snapshot: Snapshot) -> None:
        with self._lock:
            if key in self._opened:
                return
            self._opened[key] = snapshot
            self._tensors += len(snapshot.tensors) + 1
            while self._tensors > _CACHED_TENSORS and len(self._opened) > 1:
                _, oldest = self._opened.popitem(last=False)
                self._tensors -= len(oldest.tensors) + 1


class SavedObjects:
    """The objects with full tensors of a run.

    The default view is that of the statistics: an attempt that starts at a step replaces the objects of earlier attempts from that step
    on.

    Attributes:
        damaged: objects that could not be read, and why.
    """

    def __init__(self, store: Store, index: RunIndex) -> None:
        self._store = store
        self._index = index
        self._headers = _Headers()
        self._sizes: dict[SnapshotKey, int] | None = None
        self._view: dict[Group, list[SnapshotKey]] | None = None
        self._workers: dict[str, int] = {}
        self.damaged: dict[str, str] = {}

    def forget(self) -> None:
        """Forget the listing."""
        self._sizes = self._view = None

    def keys(self) -> list[SnapshotKey]:
        """List the objects of all attempts, by attempt, worker and step.

        Raises:
            StoreError: the store cannot be read.
        """
        self.forget()
        return sorted(key for key in self._listed() if self._index.is_within(key.step))

    def open(self, key: SnapshotKey) -> Snapshot:
        """Open an object.

        Raises:
            NotFoundError, FormatError, StoreError: it does not exist, is damaged, or cannot be read.
        """
        cached = self._headers.get(key)
        if cached is None:
            try:
                cached = open_snapshot(self._store, key.path, (self._sizes or {}).get(key))
            except NotFoundError:
                self.forget()  # deleted since it was listed
                raise
            self._headers.add(key, cached)
        return cached

    def find(self, request: SavedRequest) -> SavedTensor:
        """Return a saved tensor, with merged shards.

        Raises:
            ConfigError: the mode is unknown.
            NotFoundError: it was not saved, or a shard is missing.
            FormatError: an object that would contain it is damaged, or its shards contradict each other.
            StoreError: the store cannot be read.
        """
        mode_index(request.mode)  # raises if it is unknown
        is_cached = self._sizes is not None
        try:
            return self._find(request)
        except NotFoundError:
            if not is_cached and self._sizes is not None:
                raise
            self.forget()  # objects may have been added or deleted since the listing
            return self._find(request)

    def _find(self, request: SavedRequest) -> SavedTensor:
        keys = self._keys_of(request)
        if not keys:
            raise self._not_saved(request)
        workers = _by_worker(keys, request)
        found = self._first(workers, request)
        if found is None:
            raise self._absent(keys, request)
        key, snapshot = found
        part = snapshot.parts.get(request.name)
        if part is None or not part.is_shard or request.worker is not None:
            shape = snapshot.tensors[request.name].shape
            piece = SavedPiece(key.worker, snapshot, (0,) * len(shape), shape)
            return SavedTensor(request.name, _place(key), shape, [piece], part)
        return self._merged(workers, found, request)

    def steps(self, name: str, mode: Mode | None, preferred: Collection[str]) -> list[int]:
        """Return the steps at which a tensor was saved, ascending. Reads the headers of objects until it is found at each step.

        Raises:
            ConfigError: the mode is unknown.
            StoreError: the store cannot be read.
        """
        if mode is not None:
            mode_index(mode)
        groups = [group for group in self._visible() if mode is None or group[1] == mode]
        return self._steps_in(groups, name, preferred)

    def _steps_in(self, groups: Sequence[Group], name: str, preferred: Collection[str]) -> list[int]:
        """Return the steps of the groups that contain a tensor, ascending."""
        visible = self._visible()

        def contains(group: Group) -> bool:
            keys = sorted(visible[group], key=lambda key: (key.collection not in preferred, key))
            return any(name in snapshot.tensors for snapshot in map(self._readable, keys) if snapshot)

        kept = prefetch(contains, groups, readers_of(self._store))
        return sorted({step for (step, _), is_saved in zip(groups, kept, strict=True) if is_saved})

    def without_steps(self, request: SavedRequest) -> NotFoundError:
        """Return the error for a tensor that was saved at no step in the request's mode."""
        return NotFoundError(
            f"tensor {request.name!r} was saved at no step in mode {request.mode}",
            self._where_saved(request)
            or ("some objects cannot be read: see Run.damaged" if self.damaged else _HOW_TO_SAVE),
        )

    def _where_saved(self, request: SavedRequest) -> str:
        """Return a hint that names the modes and steps at which a tensor was saved; empty if no object near the step contains it."""
        groups = sorted(self._visible(), key=lambda group: abs(group[0] - request.step))
        places = []
        for mode in sorted(MODES, key=lambda mode: mode != request.mode):
            near = [group for group in groups if group[1] == mode][:_MOST_READ]
            if steps := self._steps_in(near, request.name, request.preferred):
                nearest = sorted(sorted(steps, key=lambda step: abs(step - request.step))[: 2 * _SHOWN])
                more = ", …" if len(steps) > len(nearest) or len(near) == _MOST_READ else ""
                places.append(f"{', '.join(map(str, nearest))}{more} in mode {mode}")
        return f"it was saved at steps {' and '.join(places)}; see Tensor.saved_steps()" if places else ""

    def infos(self, step: int | None = None, mode: Mode | None = None) -> dict[str, TensorInfo]:
        """Return descriptions of saved tensors by name, as far as their objects show them.

        Without a step, the first and the last object of each worker, mode and collection are read.

        Raises:
            StoreError: the store cannot be read.
        """
        chosen = [
            key
            for (at, in_mode), keys in sorted(self._visible().items())
            if (step is None or at == step) and (mode is None or in_mode == mode)
            for key in keys
        ]
        if step is None:
            chosen = _ends(chosen)
        found: dict[str, TensorInfo] = {}
        opened = prefetch(self._readable, chosen, readers_of(self._store))
        for key, snapshot in zip(chosen, opened, strict=True):
            if snapshot is not None:
                for name in snapshot.tensors:
                    found.setdefault(name, _info(name, key.collection, snapshot))
        return found

    def info(self, name: str) -> TensorInfo | None:
        """Return the description of a tensor that may only be in saved objects; None if no readable object contains it.

        Raises:
            StoreError: the store cannot be read.
        """
        info = self.infos().get(name)
        if info is not None:
            return info
        keys = [key for keys in self._visible().values() for key in keys]
        for key, snapshot in zip(keys, prefetch(self._readable, keys, readers_of(self._store)), strict=False):
            if snapshot is not None and name in snapshot.tensors:
                return _info(name, key.collection, snapshot)
        return None

    def _listed(self) -> dict[SnapshotKey, int]:
        if self._sizes is None:
            sizes = {}
            for entry in self._store.entries(SNAPSHOTS):
                try:
                    sizes[SnapshotKey.parse(entry.key)] = entry.size
                except FormatError as error:
                    self.damaged[entry.key] = error.what
            self._sizes = sizes
        return self._sizes

    def records(self) -> NDArray[np.int64]:
        """Return distinct (step, mode, worker) of the objects of the default view, also outside a restricted range; shape (n, 3).

        Raises:
            StoreError: the store cannot be read.
        """
        rows = {
            (key.step, MODES.index(_mode(key)), key.worker)
            for keys in self._grouped().values()
            for key in keys
        }
        return np.array(sorted(rows), np.int64).reshape(-1, 3)

    def first_steps(self) -> dict[str, int]:
        """Return the first step of each attempt with statistics or objects, oldest attempt first.

        Raises:
            StoreError: the store cannot be read.
        """
        first, saved = self._index.first_steps(), dict[str, int]()
        for key in self._listed():
            if key.attempt not in first:
                saved[key.attempt] = min(key.step, saved.get(key.attempt, key.step))
        if not saved or len(saved) + len(first) == 1:
            return first | saved
        found = read_documents(self._store, ATTEMPT).documents
        started = {document.attempt: document.started_ns for document in found}
        times = {attempt: self._index.start_of(attempt) for attempt in first}
        times |= {attempt: started.get(attempt, 0) for attempt in saved}
        ordered = sorted(times, key=lambda attempt: (times[attempt], attempt))
        return {attempt: first.get(attempt, saved.get(attempt, 0)) for attempt in ordered}

    def _visible(self) -> dict[Group, list[SnapshotKey]]:
        """Return the objects of the default view within the range by step and mode, each group of one attempt."""
        grouped = self._grouped()
        if not self._index.is_restricted:
            return grouped
        return {group: keys for group, keys in grouped.items() if self._index.is_within(group[0])}

    def _grouped(self) -> dict[Group, list[SnapshotKey]]:
        """Return the objects of the default view by step and mode, each group of one attempt."""
        if self._view is None:
            groups: dict[Group, list[SnapshotKey]] = {}
            cuts: dict[str, int] = {}
            cut = NO_CUT
            for attempt, first in reversed(self.first_steps().items()):
                cuts[attempt] = cut
                cut = min(cut, first)
            ranks = {attempt: rank for rank, attempt in enumerate(cuts)}  # the newest first
            for key in sorted(self._listed(), key=lambda key: (ranks[key.attempt], key)):
                if key.step < cuts[key.attempt]:
                    group = groups.setdefault((key.step, key.mode), [])
                    if not group or group[0].attempt == key.attempt:
                        group.append(key)
            self._view = groups
        return self._view

    def _keys_of(self, request: SavedRequest) -> list[SnapshotKey]:
        if request.attempt is None:
            keys: Iterable[SnapshotKey] = self._visible().get((request.step, request.mode), [])
        else:
            keys = (
                key
                for key in self._listed()
                if (key.attempt, key.step, key.mode) == (request.attempt, request.step, request.mode)
                and self._index.is_within(key.step)
            )
        return [
            key
            for key in keys
            if (request.collection is None or key.collection == request.collection)
            and (request.worker is None or key.worker == request.worker)
        ]

    def _readable(self, key: SnapshotKey) -> Snapshot | None:
        """Open an object; None if it is damaged, or was deleted since it was listed."""
        if key.path in self.damaged:
            return None
        try:
            return self.open(key)
        except NotFoundError:
            return None
        except FormatError as error:
            self.damaged[key.path] = error.what
            return None

    def _first(
        self, workers: Mapping[int, Sequence[SnapshotKey]], request: SavedRequest
    ) -> tuple[SnapshotKey, Snapshot] | None:
        """Return the object of the lowest worker that contains the tensor."""
        numbers = list(workers)
        found = self._of_worker(workers[numbers[0]], request.name)
        if found is not None:
            return found
        others = prefetch(
            lambda number: self._of_worker(workers[number], request.name),
            numbers[1:],
            readers_of(self._store),
        )
        return next((found for found in others if found is not None), None)

    def _of_worker(self, keys: Iterable[SnapshotKey], name: str) -> tuple[SnapshotKey, Snapshot] | None:
        for key in keys:
            snapshot = self._readable(key)
            if snapshot is not None and name in snapshot.tensors:
                return key, snapshot
        return None

    def _merged(
        self,
        workers: Mapping[int, Sequence[SnapshotKey]],
        first: tuple[SnapshotKey, Snapshot],
        request: SavedRequest,
    ) -> SavedTensor:
        """Merge the shards of all workers; of equal ones, that of the lowest worker counts."""
        name = request.name
        wanted = replace(request, preferred=(first[0].collection,))
        others = [number for number in workers if number > first[0].worker]
        read = prefetch(
            lambda number: self._of_worker(sorted(workers[number], key=wanted.order), name),
            others,
            readers_of(self._store),
        )
        shards = [first, *(found for found in read if found is not None)]
        whole, dtype = first[1].parts[name].shape, first[1].tensors[name].dtype
        pieces: dict[Box, SavedPiece] = {}
        for key, snapshot in shards:
            part, stored = snapshot.parts.get(name), snapshot.tensors[name]
            if part is None or not part.is_shard or (part.shape, stored.dtype) != (whole, dtype):
                raise FormatError(
                    f"{_described(request)}: workers {first[0].worker} and {key.worker} saved shards of different tensors",
                    "read the part of one worker with worker=…",
                )
            box = tuple((start, start + size) for start, size in zip(part.start, stored.shape, strict=True))
            pieces.setdefault(box, SavedPiece(key.worker, snapshot, part.start, stored.shape))
        boxes = [box for box in pieces if all(start < end for start, end in box)]
        overlap = _overlap(boxes)
        if overlap is not None:
            numbers = " and ".join(str(pieces[box].worker) for box in overlap)
            raise FormatError(
                f"{_described(request)}: the shards of workers {numbers} overlap",
                "read the part of one worker with worker=…",
            )
        if sum(map(_volume, boxes)) != math.prod(whole):
            raise self._incomplete(request, [key for key, _ in shards], whole, boxes)
        return SavedTensor(name, _place(first[0]), whole, list(pieces.values()), None)

    def _incomplete(
        self,
        request: SavedRequest,
        keys: Sequence[SnapshotKey],
        whole: tuple[int, ...],
        boxes: Iterable[Box],
    ) -> NotFoundError:
        attempt = keys[0].attempt
        present = {key.worker for key in keys}
        expected = {key.worker for key in self._listed() if key.attempt == attempt}
        expected |= set(range(min(self._world_size(attempt), _MAX_WORKERS)))
        absent = sorted(expected - present)
        damaged = self._damage_of(self._keys_of(replace(request, collection=None)))
        which = f"no readable object of workers {_numbers(absent)} contains it" if absent else ""
        reason = "; ".join(filter(None, [which, damaged]))
        return NotFoundError(
            f"{_described(request)}: elements {_shown(_remainders(whole, boxes))} of shape {whole} are missing"
            + (f" ({reason})" if reason else ""),
            "read the part of one worker with worker=…, or another step of Tensor.saved_steps()",
        )

    def _world_size(self, attempt: str) -> int:
        """Return the number of workers of an attempt; 0 if its document cannot be read."""
        if attempt not in self._workers:
            try:
                data = get_document(self._store, attempt_document(attempt), ATTEMPT.max_bytes)
                size = documents.decode(ATTEMPT.kind, data, attempt).world_size
            except (StoreError, FormatError, BadNameError):
                size = 0
            self._workers[attempt] = size
        return self._workers[attempt]

    def _damage_of(self, keys: Iterable[SnapshotKey]) -> str:
        return "; ".join(self.damaged[key.path] for key in keys if key.path in self.damaged)

    def _not_saved(self, request: SavedRequest) -> NotFoundError:
        """Return the error for a request to which no object belongs."""
        anywhere = self._keys_of(replace(request, worker=None, collection=None))
        if anywhere and request.worker is not None:
            workers = _numbers(sorted({key.worker for key in anywhere}))
            return NotFoundError(
                f"{_described(request)}: worker {request.worker} saved nothing at this step",
                f"use one of the workers {workers}, or leave it out",
            )
        if anywhere:
            names = sorted({key.collection or "'' (snapshots)" for key in anywhere})
            return NotFoundError(
                f"{_described(request)}: nothing was saved at this step in collection {request.collection!r}",
                f"use one of {', '.join(names)}, or leave it out",
            )
        is_mode_saved = any(mode == request.mode for _, mode in self._visible())
        return NotFoundError(
            f"{_described(request)}: "
            + (
                "nothing was saved at this step"
                if is_mode_saved
                else "no full tensors were saved in this mode"
            ),
            self._where_saved(request) or _HOW_TO_SAVE,
        )

    def _absent(self, keys: Sequence[SnapshotKey], request: SavedRequest) -> NotFoundError | FormatError:
        """Return the error for a tensor that no readable object of a step contains."""
        damage = self._damage_of(keys)
        if damage:
            return FormatError(
                f"{_described(request)} is in no readable object: {damage}",
                "read another step of Tensor.saved_steps()",
            )
        opened = [snapshot for snapshot in map(self._readable, keys) if snapshot is not None]
        if any(snapshot.is_left_out(request.name) for snapshot in opened):
            return NotFoundError(
                f"{_described(request)} was left out, because it exceeded a limit of its writer",
                "raise Snapshots.memory_bytes or TensorLimits.hour_bytes, or save tensors at steps further apart",
            )
        names = ", ".join(sorted({key.collection or "snapshot" for key in keys}))
        return NotFoundError(
            f"{_described(request)} is in no object of this step ({names})",
            self._where_saved(request)
            or "see Tensor.saved_steps() for its steps, or Run.tensors(step=…) for the names at this step",
        )


def _place(key: SnapshotKey) -> tuple[int, Mode, str, str]:
    return key.step, _mode(key), key.attempt, key.collection


def _mode(key: SnapshotKey) -> Mode:
    return next(mode for mode in MODES if mode == key.mode)


def _described(request: SavedRequest) -> str:
    return f"tensor {request.name!r} at step {request.step} in mode {request.mode}"


def _by_worker(keys: Iterable[SnapshotKey], request: SavedRequest) -> dict[int, list[SnapshotKey]]:
    workers: dict[int, list[SnapshotKey]] = {}
    for key in sorted(keys, key=lambda key: (key.worker, request.order(key))):
        workers.setdefault(key.worker, []).append(key)
    return workers


def _ends(keys: Iterable[SnapshotKey]) -> list[SnapshotKey]:
    """Return the first and last object of each worker, mode and collection; keys ascend by step."""
    groups: dict[tuple[int, str, str], list[SnapshotKey]] = {}
    for key in keys:
        groups.setdefault((key.worker, key.mode, key.collection), []).append(key)
    return [key for group in groups.values() for key in dict.fromkeys((group[0], group[-1]))]


_ROLES = {
    "weights": "weight",
    "biases": "bias",
    "gradients": "gradient",
    "optimizer_state": "state",
    "losses": "loss",
    "metrics": "metric",
    "inputs": "input",
    "outputs": "output",
    "labels": "label",
    "buffers": "buffer",
}
_SUFFIXES = frozenset({"gradient", "input", "output"})


def _info(name: str, collection: str, snapshot: Snapshot) -> TensorInfo:
    """Describe a tensor without statistics. Its role follows from its name or its collection; the module's type and order are unknown."""
    stored, part = snapshot.tensors[name], snapshot.parts.get(name)
    path, _, suffix = name.rpartition(":")
    role = suffix if suffix in _SUFFIXES else _ROLES.get(collection, "custom" if collection else "weight")
    module = path if suffix in {"input", "output"} else (path or name).rpartition(".")[0]
    shape = stored.shape if part is None else part.shape
    return TensorInfo(
        name,
        (collection,) if collection else (),
        role,
        module,
        shape=shape,
        dtype=WORDS[stored.dtype],
    )


def _volume(box: Box) -> int:
    return math.prod(end - start for start, end in box)


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes with common elements; None if there are none."""
    if len(boxes) < 2 or not boxes[0]:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    bounds = np.array(boxes, np.int64)  # shape (boxes, dimensions, 2)
    bounds = bounds[np.argsort(bounds[:, 0, 0], kind="stable")]
    ends = np.searchsorted(bounds[:, 0, 0], bounds[:, 0, 1])
    for index in range(len(bounds)):
        later = bounds[index + 1 : ends[index]]  # the others begin behind its end
        hits = ((later[:, :, 0] < bounds[index, :, 1]) & (later[:, :, 1] > bounds[index, :, 0])).all(axis=1)
        if hits.any():
            other = later[int(np.argmax(hits))]
            return _box(bounds[index].tolist()), _box(other.tolist())
    return None


def _box(bounds: list[list[int]]) -> Box:
    return tuple((start, end) for start, end in bounds)


def _remainders(shape: tuple[int, ...], boxes: Iterable[Box]) -> list[Box]:
    """Return boxes of the elements that no box contains; stops early where they are very many."""
    remaining: list[Box] = [tuple((0, size) for size in shape)]
    for box in boxes:
        if len(remaining) > _MAX_REMAINDERS:
            break
        remaining = [rest for part in remaining for rest in _without(part, box)]
    return remaining


def _without(part: Box, box: Box) -> Iterator[Box]:
    """Yield disjoint boxes of the elements of one box that are not in another."""
    if any(start >= end or first >= last for (start, end), (first, last) in zip(part, box, strict=True)):
        yield part
        return
    rest = list(part)
    for axis, ((start, end), (first, last)) in enumerate(zip(part, box, strict=True)):
        if last <= start or first >= end:
            yield tuple(rest)
            return
        if start < first:
            yield (*rest[:axis], (start, first), *rest[axis + 1 :])
        if last < end:
            yield (*rest[:axis], (last, end), *rest[axis + 1 :])
        rest[axis] = (max(start, first), min(end, last))


def _shown(boxes: Sequence[Box]) -> str:
    texts = [f"[{', '.join(f'{start}:{end}' for start, end in box)}]" for box in boxes[:_SHOWN]]
    return ", ".join(texts) + (", …" if len(boxes) > _SHOWN else "")


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[: 2 * _SHOWN])) + (", …" if len(numbers) > 2 * _SHOWN else "")
