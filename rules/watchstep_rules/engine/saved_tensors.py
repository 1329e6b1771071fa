"""Full tensors as the input of rules: read from the store by range requests, within limits.

The recorder adds a row to the statistics for each object with full tensors, once it is on the store (`watchstep.format.tensors.SAVED`). Such a
row makes a rule that needs tensors read the object. So the journal of an attempt determines which objects a rule judges in which
evaluation, and a backtest judges the same.

Objects are immutable. One that was deleted since, because its collection has a limit on the store, or that is damaged, is left out and
reported in the rule's health. Names, sizes and descriptions in an object come from the recorder, and are checked before memory is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import BadNameError, FormatError, NotFoundError, RuleError, WatchstepError
from watchstep.format.block import Block, LazyStatistics, Places
from watchstep.format.layout import SnapshotKey, check_name
from watchstep.format.snapshot import (
    DTYPES,
    Snapshot,
    TensorLocation,
    infos_of,
    open_snapshot,
    widened,
)
from watchstep.format.statistics import Histograms, StatisticsBatch, scalars
from watchstep.format.tensors import MODES, Placement, SavedName, TensorInfo
from watchstep.kernels.array_kernel import measure_array
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.rule import Needs, TensorNeeds
from watchstep_rules.saved_block import SavedBlock

STEP_BYTES = 128 * 1024 * 1024
"""Limit of the tensors of one object that one rule reads, as they are in memory: bfloat16 and fp8 take four bytes."""

EVALUATION_BYTES = 512 * 1024 * 1024
"""Limit of the tensors that one evaluation reads for all rules; they are in memory together."""

EVALUATION_TENSORS = 100_000
"""Limit of the tensors that the objects of one evaluation have together, whether they are read or not: their descriptions take memory."""

EVALUATION_DESCRIPTION_BYTES = 256 * 1024 * 1024
"""Limit of the memory of these descriptions. Their words may be long."""

EVALUATION_OBJECTS = 50
"""Limit of the objects that one rule reads in one evaluation. If there are more, the newest are read, and the rest are counted."""

EVALUATION_SECONDS = 10.0
"""Limit of the time for reading and measuring them, without the time of the rules."""

_LOCATION_BYTES, _DIMENSION_BYTES = 700, 40
"""Memory of the location and the part of a tensor in an opened object, and of a dimension of its shape."""

_GAP = 256 * 1024
"""Tensors that are no further apart are read with one request."""

_REQUEST_BYTES = 16 * 1024 * 1024
"""Limit of a request for several tensors, with the bytes between them."""

_LAST_STEP = 2**63
_MODE_NUMBERS: Mapping[str, int] = {mode: number for number, mode in enumerate(MODES)}

_MAX_PROBLEMS = 3


@dataclass(frozen=True)
class ReferenceRun:
    """The attempt of another run that tensors are compared with, as pinned when the judged attempt began.

    Attributes:
        run: name of the run.
        attempt: its attempt.
        store: its store.
    """

    run: str
    attempt: str
    store: Store


OpenReference = Callable[[str], ReferenceRun | None]
"""Returns the pinned attempt of a run of the same project; None if it had none when the judged attempt began."""


def _no_reference(_run: str) -> ReferenceRun | None:
    return None


class SavedTensors:
    """Reads the full tensors of one attempt for the rules of one evaluation. Values are cached, because rules may share them."""

    def __init__(
        self,
        store: Store | None,
        attempt: str = "",
        open_reference: OpenReference = _no_reference,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read nothing yet.

        Args:
            store: the run's store; None where tensors cannot be read, as in the training process.
            attempt: the attempt.
            open_reference: opens reference runs.
            clock: seconds.
        """
        self._store = store
        self._attempt = attempt
        self._open_reference = open_reference
        self._clock = clock
        self._seconds = 0.0
        self._began: float | None = None
        self._bytes = 0
        self._tensors = 0
        self._description_bytes = 0
        self._opened: dict[tuple[str, str], _Opened | _NotOpened] = {}
        self._values: dict[tuple[str, str, str], NDArray[Any]] = {}
        self._measured: dict[tuple[str, tuple[str, ...]], StatisticsBatch] = {}
        self._references: dict[str, ReferenceRun | None] = {}

    def block(self, config: RuleConfig, marks: Block) -> tuple[SavedBlock, str]:
        """The tensors that a rule config judges, and which of them could not be read.

        Args:
            config: a rule config whose rule needs tensors.
            marks: rows about saved objects (`watchstep.format.tensors.SavedName`).

        Raises:
            RuleError: a limit is exceeded, or tensors cannot be read here.
            StoreError: the store did not answer.
        """
        if not len(marks):
            return SavedBlock.empty(), ""
        if self._store is None:
            raise RuleError(
                "full tensors cannot be read here: these rows have no store",
                "evaluate this rule in a service, in a backtest of a run, or in a rule test with saved tensors",
            )
        needs = config.implementation.needed(config.parameters)
        assert needs.tensors is not None
        with self._counted():
            return self._block(config, needs, needs.tensors, marks)

    def _block(
        self, config: RuleConfig, needs: Needs, tensors: TensorNeeds, marks: Block
    ) -> tuple[SavedBlock, str]:
        run = config.implementation.reference(config.parameters) if tensors.reference else ""
        parts: list[SavedBlock] = []
        problems: list[str] = []
        rows = _newest(marks)
        if len(rows) < len(marks):
            problems.append(
                f"{len(marks) - len(rows)} of {len(marks)} saved objects were not read: at most {EVALUATION_OBJECTS} are read in one evaluation"
            )
        for row in rows:
            try:
                part = self._of_mark(config, needs, marks, row)
            except (FormatError, NotFoundError, BadNameError) as error:
                problems.append(error.what)
                continue
            if part is not None:
                parts.append(self._with_references(part, run, problems) if run else part.rows)
        return joined_saved(parts), _summary(problems)

    def _of_mark(self, config: RuleConfig, needs: Needs, marks: Block, row: int) -> _ObjectRows | None:
        """The chosen tensors of one object; None if it has none of them."""
        key = self._key(marks, row)
        assert self._store is not None
        opened = self._open(self._store, key.path)
        snapshot, infos = opened.snapshot, opened.infos
        in_object = replace(needs, tensors=None)
        chosen = [name for name, info in infos.items() if config.tensors.selects(info, in_object)]
        if not chosen:
            return None
        size = sum(_memory(snapshot.tensors[name]) for name in chosen)
        if size > STEP_BYTES:
            raise RuleError(
                f"step {key.step}: {len(chosen)} tensors of {key.collection or 'the snapshot'} have {size} bytes; a rule reads at most {STEP_BYTES} "
                "of a step",
                "restrict the rule config's 'tensors', or save fewer rows (TensorLimits)",
            )
        arrays = self._arrays(self._store, snapshot, chosen)
        count = len(chosen)
        rows = Block(
            step=np.full(count, key.step, np.int64),
            mode=np.full(count, _MODE_NUMBERS[key.mode], np.int8),
            worker=np.full(count, key.worker, np.int32),
            time_ns=np.full(count, int(marks.time_ns[row]), np.int64),
            tensor=np.arange(count, dtype=np.int32),
            catalogue=tuple(infos[name] for name in chosen),
            places=Places.of([Placement()] * count),
            statistics=self._statistics((key.path, tuple(chosen)), arrays),
        )
        return _ObjectRows(key, snapshot, SavedBlock.of(rows, arrays))

    def _key(self, marks: Block, row: int) -> SnapshotKey:
        """The object that a row is about.

        Raises:
            FormatError: the row names no object.
        """
        name, step = SavedName.of(marks.info(row)), float(marks.statistics.mean[row])
        if name is None or not step.is_integer() or not 0 <= step < _LAST_STEP:
            raise FormatError(
                f"row {marks.info(row).name[:80]!r} names no saved object", "a later version wrote it"
            )
        return SnapshotKey(self._attempt, int(marks.worker[row]), int(step), name.mode, name.collection)

    def _with_references(self, part: _ObjectRows, run: str, problems: list[str]) -> SavedBlock:
        """The rows of an object with the same tensors at the same step of the reference run, from the objects of any of their collections.

        A tensor has no reference if another part of it was saved there.
        """
        rows = part.rows
        reference = self._reference(run)
        if reference is None:
            problems.append(f"run {run!r} had no attempt to compare with when this attempt began")
            return rows
        values: dict[str, NDArray[Any]] = {}
        for collection, all_names in _names_by_collection(part).items():
            self._check_time()
            names = [name for name in all_names if name not in values]
            if not names:
                continue
            key = replace(part.key, attempt=reference.attempt, collection=collection)
            try:
                snapshot = self._open(reference.store, key.path).snapshot
                names = [
                    name
                    for name in names
                    if name in snapshot.tensors and snapshot.parts.get(name) == part.snapshot.parts.get(name)
                ]
                values.update(zip(names, self._arrays(reference.store, snapshot, names), strict=True))
            except NotFoundError:
                continue  # not saved there, or no longer
            except FormatError as error:
                problems.append(f"run {run!r}: {error.what}")
        return SavedBlock.of(rows, rows.values, [values.get(rows.info(row).name) for row in range(len(rows))])

    def _reference(self, run: str) -> ReferenceRun | None:
        if run not in self._references:
            self._references[run] = self._open_reference(run)
        return self._references[run]

    def _open(self, store: Store, path: str) -> _Opened:
        place = (store.location, path)
        if place not in self._opened:
            self._check_time()
            try:
                self._opened[place] = self._open_object(store, path)
            except (FormatError, NotFoundError) as error:
                # Not the exception itself, whose traceback would keep the header in memory.
                self._opened[place] = _NotOpened(type(error), error.what, error.hint)
        opened = self._opened[place]
        if isinstance(opened, _NotOpened):
            raise opened.error()
        return opened

    def _open_object(self, store: Store, path: str) -> _Opened:
        snapshot = open_snapshot(store, path)
        self._count_tensors(len(snapshot.tensors))
        opened = _Opened(snapshot, infos_of(snapshot)).without_metadata()
        self._description_bytes += opened.memory
        if self._description_bytes > EVALUATION_DESCRIPTION_BYTES:
            raise RuleError(
                f"the descriptions of the saved tensors of this evaluation take more than {EVALUATION_DESCRIPTION_BYTES} bytes",
                "save fewer tensors: collections by name, or a cadence of more steps",
            )
        return opened

    def _count_tensors(self, count: int) -> None:
        self._tensors += count
        if self._tensors > EVALUATION_TENSORS:
            raise RuleError(
                f"the saved objects of this evaluation have more than {EVALUATION_TENSORS} tensors",
                "save fewer tensors: collections by name, or a cadence of more steps",
            )

    def _arrays(self, store: Store, snapshot: Snapshot, names: Sequence[str]) -> list[NDArray[Any]]:
        """The values of tensors of one object, in this order."""
        place = (store.location, snapshot.key)
        missing = [name for name in names if (place[0], place[1], name) not in self._values]
        size = sum(_memory(snapshot.tensors[name]) for name in missing)
        if self._bytes + size > EVALUATION_BYTES:
            raise RuleError(
                f"the tensors of this evaluation have more than {EVALUATION_BYTES} bytes",
                "restrict the 'tensors' of the rule configs that read full tensors",
            )
        self._bytes += size
        for request in _requests(snapshot, missing):
            self._check_time()
            self._values.update(
                {(place[0], place[1], name): array for name, array in _read(store, snapshot, request)}
            )
        return [self._values[place[0], place[1], name] for name in names]

    def _statistics(
        self, place: tuple[str, tuple[str, ...]], arrays: Sequence[NDArray[Any]]
    ) -> StatisticsBatch:
        """The statistics of arrays, measured on the first access; many rules read values only.

        Args:
            place: the path of their object and their names. Rules that judge the same tensors share their statistics.
            arrays: the values.
        """

        def column(name: str) -> Any:
            if place not in self._measured:
                with self._counted():
                    self._measured[place] = _measured(arrays, self._check_time)
            return getattr(self._measured[place], name)

        return LazyStatistics.of(len(arrays), column)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the time of the ``with`` block."""
        if self._began is not None:
            yield
            return
        self._began = self._clock()
        try:
            yield
        finally:
            self._seconds += self._clock() - self._began
            self._began = None

    def _check_time(self) -> None:
        """Check the time limit.

        Raises:
            RuleError: it is exceeded.
        """
        since = 0.0 if self._began is None else self._clock() - self._began
        if self._seconds + since > EVALUATION_SECONDS:
            raise RuleError(
                f"reading full tensors took more than {EVALUATION_SECONDS:g} s in one evaluation",
                "restrict the 'tensors' of the rule configs that read full tensors",
            )


@dataclass(frozen=True)
class _Opened:
    """An object whose header was read, and the descriptions of its tensors by name."""

    snapshot: Snapshot
    infos: Mapping[str, TensorInfo] = field(repr=False)

    def without_metadata(self) -> _Opened:
        """The same without texts of the header that are not needed any more, which may take 64 MiB."""
        return replace(self, snapshot=replace(self.snapshot, metadata={}, missing_names=()))

    @property
    def memory(self) -> int:
        """Approximate size in memory in bytes."""
        return sum(
            info.memory + _LOCATION_BYTES + _DIMENSION_BYTES * len(info.shape) for info in self.infos.values()
        )


@dataclass(frozen=True)
class _NotOpened:
    """Why an object could not be opened."""

    kind: type[WatchstepError]
    what: str
    hint: str

    def error(self) -> WatchstepError:
        """The error, for the next rule."""
        return self.kind(self.what, self.hint)


@dataclass(frozen=True)
class _ObjectRows:
    """Rows of one object."""

    key: SnapshotKey
    snapshot: Snapshot
    rows: SavedBlock


def _names_by_collection(part: _ObjectRows) -> dict[str, list[str]]:
    """Collections whose objects may contain tensors of an object, and their names: the object's own first, and last the whole model.

    Collections with names that no object can have are left out.
    """
    catalogue = part.rows.catalogue
    all_names = [info.name for info in catalogue]
    by_collection: dict[str, list[str]] = {part.key.collection: all_names}
    others: dict[str, list[str]] = {}
    for info in catalogue:
        for collection in info.collections:
            others.setdefault(collection, []).append(info.name)
    by_collection.update(
        {
            name: names
            for name, names in others.items()
            if name not in by_collection and _can_be_a_collection(name)
        }
    )
    by_collection.setdefault("", all_names)
    return by_collection


def _can_be_a_collection(name: str) -> bool:
    try:
        check_name("collection", name)
    except BadNameError:
        return False
    return True


def _summary(problems: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(problems))
    more = len(distinct) - _MAX_PROBLEMS
    return "; ".join([*distinct[:_MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])])


def _memory(stored: TensorLocation) -> int:
    """Memory of a tensor's elements as float64 or complex128, to which rules convert them."""
    return math.prod(stored.shape) * (16 if DTYPES[stored.dtype].kind == "c" else 8)


def _measured(arrays: Sequence[NDArray[Any]], check: Callable[[], None]) -> StatisticsBatch:
    """The statistics of arrays; of complex numbers those of their real and imaginary parts.

    Single numbers are measured together, because an object may have tens of thousands.
    """
    is_single = np.array([array.size == 1 and array.dtype.kind != "c" for array in arrays], np.bool_)
    singles = [float(array.flat[0]) for array, single in zip(arrays, is_single, strict=True) if single]
    batches = [scalars(singles)]
    for array, single in zip(arrays, is_single, strict=True):
        if not single:
            check()
            flat = array.reshape(-1).view(np.float32) if array.dtype.kind == "c" else array
            batches.append(measure_array(flat))
    place = np.empty(len(arrays), np.intp)
    place[np.concatenate([np.flatnonzero(is_single), np.flatnonzero(~is_single)])] = np.arange(len(arrays))
    return StatisticsBatch.concatenate(batches).take(place)


def _newest(marks: Block) -> list[int]:
    """Rows of the newest objects, up to the limit, in their order."""
    order = np.argsort(marks.statistics.mean, kind="stable")[-EVALUATION_OBJECTS:]
    rows: list[int] = np.sort(order).tolist()
    return rows


def _requests(snapshot: Snapshot, names: Iterable[str]) -> list[list[str]]:
    """Tensors by the order of their bytes, those that are read with one request together."""
    ordered = sorted(names, key=lambda name: snapshot.tensors[name].start)
    requests: list[list[str]] = []
    first = end = 0
    for name in ordered:
        location = snapshot.tensors[name]
        last = location.start + location.length
        if requests and location.start - end <= _GAP and last - first <= _REQUEST_BYTES:
            requests[-1].append(name)
        else:
            requests.append([name])
            first = location.start
        end = last
    return requests


def _read(store: Store, snapshot: Snapshot, names: Sequence[str]) -> list[tuple[str, NDArray[Any]]]:
    first, last = snapshot.tensors[names[0]], snapshot.tensors[names[-1]]
    length = last.start + last.length - first.start
    data = store.get_range(snapshot.key, first.start, length) if length else b""
    if len(data) < length:
        raise FormatError(
            f"object {snapshot.key} ends before its last tensor", "the writer or the transfer damaged it"
        )
    arrays = []
    for name in names:
        location = snapshot.tensors[name]
        start = location.start - first.start
        bits = np.frombuffer(data[start : start + location.length], DTYPES[location.dtype])
        bits = bits.reshape(location.shape)
        arrays.append((name, widened(bits, location.dtype)))
    return arrays


def joined_saved(parts: Sequence[SavedBlock]) -> SavedBlock:
    """Join rows of several objects, in the canonical order for rules.

    A tensor that several objects describe has the description of the last.
    """
    parts = [part for part in parts if len(part)]
    if not parts:
        return SavedBlock.empty()
    infos: Mapping[str, TensorInfo] = {info.name: info for part in parts for info in part.catalogue}
    catalogue = tuple(infos[name] for name in sorted(infos))
    index = {info.name: place for place, info in enumerate(catalogue)}
    rows = Block(
        step=np.concatenate([part.step for part in parts]),
        mode=np.concatenate([part.mode for part in parts]),
        worker=np.concatenate([part.worker for part in parts]),
        time_ns=np.concatenate([part.time_ns for part in parts]),
        tensor=np.concatenate(
            [np.array([index[info.name] for info in part.catalogue], np.int32)[part.tensor] for part in parts]
        ),
        catalogue=catalogue,
        places=Places.concatenate([part.places for part in parts]),
        statistics=_joined_statistics([part.statistics for part in parts]),
    )
    values = [value for part in parts for value in part.values]
    references = [value for part in parts for value in part.references]
    return SavedBlock.of(rows, values, references).ordered()


def _joined_statistics(parts: Sequence[StatisticsBatch]) -> StatisticsBatch:
    """Join statistics, each column on the first access."""

    def column(name: str) -> Any:
        columns = [getattr(part, name) for part in parts]
        return Histograms.concatenate(columns) if name == "histogram" else np.concatenate(columns)

    return LazyStatistics.of(sum(map(len, parts)), column)
