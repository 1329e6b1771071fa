"""References of an attempt: other runs of the project, or earlier attempts of its own run, compared by statistics or by full tensors.

The service pins the references of an attempt when it evaluates the first rows: the newest attempt of each reference run, and the compared
statistics of all of its rows until then, in an object that never changes. A backtest reads the same object. So the result does not depend on what
the reference run records later. A backtest of a rule that the attempt did not have compares with the reference run as it is.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from watchstep.errors import BadNameError, FormatError, NotFoundError, RuleError, StoreError, WatchstepError
from watchstep.format.block import Block, Places
from watchstep.format.documents import MAX_BYTES, RunDocument, decode, parse_json
from watchstep.format.layout import RUN_DOCUMENT, check_name, references_document
from watchstep.format.statistics import Floats
from watchstep.format.tensors import TensorInfo
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.reading.columns import IDENTITY, NO_CUT, Columns, Selection, batch_of, joined, needs_of
from watchstep.reading.index import RunIndex
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.saved_tensors import OpenReference, ReferenceRun, SavedTensors
from watchstep_rules.signals.reference import (
    MOST_POINTS,
    MOST_TENSORS,
    OWN_RUN,
    TRAINING_MODES,
    CheckedReference,
    ComparedRows,
    figure_of,
    with_merged_shards,
)

_POINTS, _MIN_POINTS = 50_000, 100
"""Points that are stored of one statistic of a reference run: in all, and at least of each tensor."""

MAX_POINTS = 10 * _POINTS
"""Limit of the points of all references of an attempt."""

_MAX_BYTES = 16 * 1024 * 1024
_MAX_STATISTICS_BYTES = 15 * 1024 * 1024
"""Limits of a stored object, and of the statistics in it."""

_MAX_MEMORY = 256 * 1024 * 1024
_MAX_COMPARED = 1000
"""Limit of the runs and statistics in a stored object; an attempt has at most as many rule configs."""

_SECONDS = 6.0
"""Limit of the time in which the statistics of all reference runs of an attempt are read and computed. The large evaluations of other runs wait
for it."""

_TRIES, _PAUSE_SECONDS = 3, 0.5
"""How often a reference run is read that the store does not return. What is pinned is never read again."""

_MEGABYTES = 256.0
"""Limit of the memory for the rows of one reference run."""

_FIRST_STEPS, _STEPS_BEFORE, _STEPS_AFTER = 5, 1000, 20
"""The steps of earlier attempts that are read for an attempt that begins at a later step: the first ones, and those around it."""

_ROW_BYTES = 64
"""Memory of a row while rows are grouped by tensor: keys, their order, and the identity columns in that order."""

_TYPES: Mapping[str, type] = {
    "mode": np.int8,
    "worker": np.int32,
    "tensor": np.int32,
    "shard_count": np.int32,
    "replica": np.int32,
    "stage": np.int8,
}
"""Types of columns in memory."""

_MERGED = ("count", "nan", "pos_inf", "neg_inf", "mean")
"""Columns from which the other columns of shards are merged."""


@dataclass(frozen=True)
class PinnedReferences:
    """The references of an attempt.

    Attributes:
        attempts: run → its pinned attempt.
        statistics: "run figure" → for each tensor its points, as `reference_of` computes them; or why the stored ones are not valid.
        problems: run → why it cannot be compared with.
        damage: why the stored object could not be decoded; empty if it could.
    """

    attempts: Mapping[str, str] = field(default_factory=dict)
    statistics: Mapping[str, CheckedReference] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    damage: str = ""

    def has(self, compared: Compared) -> bool:
        """Whether a comparison was pinned, even if the run could not be read."""
        if compared.run in self.problems:
            return True
        return compared.run in self.attempts and (not compared.figure or compared.key in self.statistics)

    def statistic(self, compared: Compared) -> CheckedReference:
        """The points that a rule config compares with, or the problem for which there are none."""
        if self.damage:
            return CheckedReference(problem=self.damage)
        found = self.statistics.get(compared.key)
        return CheckedReference(problem=self.problems.get(compared.run, "")) if found is None else found

    @property
    def points(self) -> int:
        """The number of points of all statistics."""
        return sum(reference.points for reference in self.statistics.values())

    def encode(self) -> bytes:
        """Encode as the object's content."""
        data = {"attempts": self.attempts, "statistics": self.statistics, "problems": self.problems}
        return json.dumps(data, sort_keys=True, default=dict).encode()

    @classmethod
    def decode(cls, data: bytes, key: str) -> PinnedReferences:
        """Decode the object's content. The writer may be anybody who may write to the run, so its limits are checked here.

        A statistic that is not valid is a problem of the rules that compare with it.

        Raises:
            FormatError: the object is not valid.
        """
        try:
            parsed = parse_json(data, _MAX_MEMORY)
            attempts, statistics, problems = (parsed[name] for name in ("attempts", "statistics", "problems"))
            if not all(isinstance(part, dict) for part in (attempts, statistics, problems)):
                raise TypeError("a part is not a mapping")  # noqa: TRY301 - reported like other damage
            if max(len(attempts), len(statistics), len(problems)) > _MAX_COMPARED:
                raise ValueError(f"more than {_MAX_COMPARED} runs")  # noqa: TRY301 - reported like other damage
            for run, attempt in attempts.items():
                if run != OWN_RUN:
                    check_name("run", run)
                check_name("attempt", attempt)
            checked, left = {}, MAX_POINTS
            for name, reference in statistics.items():
                checked[name] = _checked(name, reference, min(left, _POINTS), key)
                left -= checked[name].points
        except (ValueError, TypeError, KeyError, AttributeError, BadNameError, RecursionError) as error:
            raise FormatError(
                f"object {key} does not contain references ({error})"[:300], "it was damaged; delete it"
            ) from error
        return cls(attempts, checked, {str(run): str(problem)[:300] for run, problem in problems.items()})


def _checked(name: str, data: Any, most_points: int, key: str) -> CheckedReference:
    try:
        return CheckedReference.from_data(data, most_points)
    except ValueError as error:
        return CheckedReference(
            problem=f"object {key} does not contain the statistics {name[:200]!r}: {error}"[:400]
        )


@dataclass(frozen=True)
class Compared:
    """What a rule config compares: a run, by the statistic of a name (empty: by full tensors only)."""

    run: str
    figure: str

    @property
    def key(self) -> str:
        """The key of its statistics."""
        return f"{self.run} {self.figure}"


def compared_by(config: RuleConfig) -> Compared | None:
    """The reference run of a rule config; None if it compares with none, or its parameters contain the statistics.

    A rule whose reference cannot be determined has none here; its evaluation reports why.
    """
    try:
        rule, params = config.implementation, config.parameters
        run = rule.reference(params)
        if not run or (rule.reference_param and config.params.get(rule.reference_param)):
            return None
        return Compared(run, rule.reference_figure(params))
    except Exception:  # noqa: BLE001 - reported by the evaluation, and must not stop other rules
        return None


def _continue() -> None:
    """Continue."""


StoreOf = Callable[[str], Store]
"""Returns the store of a run of the judged run's project, by the run's name."""


@dataclass(frozen=True)
class JudgedAttempt:
    """An attempt whose rules compare it with other runs, or with earlier attempts of its run.

    Attributes:
        store: the store of its run.
        attempt: the attempt.
        first_step: its first step, for earlier attempts.
    """

    store: Store
    attempt: str
    first_step: int = 0

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and last steps of the earlier rows to read: all if the attempt begins at 0, because it may have lost the number of its step."""
        if not self.first_step:
            return ((0, NO_CUT),)
        around = max(0, self.first_step - _STEPS_BEFORE), self.first_step + _STEPS_AFTER
        first = 0, min(_FIRST_STEPS, around[0]) - 1
        return (around,) if first[1] < 0 else (first, around)


def pin_references(
    judged: JudgedAttempt,
    configs: Iterable[RuleConfig],
    attempts: Mapping[str, str],
    check_running: Callable[[], None] = _continue,
    store_of: StoreOf | None = None,
) -> None:
    """Store the references of an attempt, unless they were stored before; does nothing if no rule config compares runs.

    Reads the reference runs, which may take `_SECONDS`.

    Args:
        judged: the attempt.
        configs: the rule configs.
        attempts: the newest attempt of each run that has one; that of `OWN_RUN` is the one before.
        check_running: is called before each run; an exception that it raises ends the function.
        store_of: returns the store of a reference run; by default all runs of a project are on one store.

    Raises:
        StoreError: the store did not answer.
    """
    compared = _compared(configs)
    if compared:
        references = _read(store_of or _siblings_of(judged.store), compared, attempts, judged, check_running)
        judged.store.create(references_document(judged.attempt), references.encode())


def read_references(run_store: Store, attempt: str) -> PinnedReferences | None:
    """The pinned references of an attempt; None if none were pinned.

    Raises:
        FormatError: the object is not valid.
        StoreError: the store did not answer.
    """
    key = references_document(attempt)
    try:
        return PinnedReferences.decode(run_store.get(key, limit=_MAX_BYTES), key)
    except NotFoundError:
        return None


def readable_references(run_store: Store, attempt: str) -> PinnedReferences | None:
    """As `read_references`, with the problem in ``damage`` if the object is not valid.

    Raises:
        StoreError: the store did not answer.
    """
    try:
        return read_references(run_store, attempt)
    except FormatError as error:
        return PinnedReferences(damage=error.what)


def current_references(run_store: Store, attempt: str, configs: Iterable[RuleConfig]) -> PinnedReferences:
    """The references of an attempt's rule configs as they are now, from the newest attempts of the reference runs.

    Raises:
        StoreError: the store did not answer.
    """
    compared = _compared(configs)
    attempts, first_step = {}, 0
    for run in {entry.run for entry in compared}:
        if run == OWN_RUN:
            index = open_run(run_store).index
            first_step = index.first_steps().get(attempt, 0)
            if earlier := index.earlier_than(attempt).attempts():
                attempts[run] = earlier[-1]
            continue
        try:
            recorded = open_run(_store_of(run_store, run)).attempts
        except (NotFoundError, FormatError, BadNameError):
            continue  # reported as a run without an attempt
        if recorded:
            attempts[run] = recorded[-1]
    return _read(_siblings_of(run_store), compared, attempts, JudgedAttempt(run_store, attempt, first_step))


def references_of(
    run_store: Store, attempt: str, configs: Sequence[RuleConfig]
) -> tuple[PinnedReferences | None, list[str]]:
    """The references of an attempt for a backtest: the pinned ones, and those that were not pinned as they are now.

    Returns:
        The references, None if no rule config compares runs; and differences from the live run.

    Raises:
        StoreError: the store did not answer.
    """
    if not _compared(configs):
        return None, []
    pinned = readable_references(run_store, attempt) or PinnedReferences()
    notes = [pinned.damage] if pinned.damage else []
    not_pinned = [
        config for config in configs if (entry := compared_by(config)) is not None and not pinned.has(entry)
    ]
    if not not_pinned:
        return pinned, notes
    missing = {entry.run for entry in _compared(not_pinned)} - {OWN_RUN}
    current = current_references(run_store, attempt, not_pinned)
    if found := sorted(missing & current.attempts.keys()):
        notes.append(
            f"run {', '.join(found)} is compared with as it is now, because no references to it were stored when the attempt began"
        )
    notes.extend(_why_absent(run_store, run) for run in sorted(missing - current.attempts.keys()))
    return PinnedReferences(
        {**current.attempts, **pinned.attempts},
        {**current.statistics, **pinned.statistics},
        {**current.problems, **pinned.problems},
    ), notes


def _why_absent(run_store: Store, run: str) -> str:
    """Return why a run has no attempt to compare with."""
    try:
        open_run(_store_of(run_store, run))
    except NotFoundError:
        return f"no run {run} in this project"
    except (FormatError, BadNameError) as error:
        return f"run {run} cannot be compared with: {error.what}"
    return f"run {run} has no attempt to compare with"


def with_references(configs: Sequence[RuleConfig], references: PinnedReferences | None) -> list[RuleConfig]:
    """Add the statistics of reference runs to the parameters of rule configs that compare with them."""
    return [_with_reference(config, references or PinnedReferences()) for config in configs]


def saved_tensors_of(
    run_store: Store,
    attempt: str,
    references: PinnedReferences | None = None,
    store_of: StoreOf | None = None,
) -> SavedTensors:
    """The reader of an attempt's full tensors, and of those of its reference runs.

    Args:
        run_store: the store of the run.
        attempt: the attempt.
        references: its references; by default the pinned ones, which are read when a rule needs them.
        store_of: returns the store of a reference run; by default all runs of a project are on one store.
    """
    opener = _opener(run_store, attempt, references, store_of or _siblings_of(run_store))
    return SavedTensors(run_store, attempt, opener)


def _opener(
    run_store: Store, attempt: str, given: PinnedReferences | None, store_of: StoreOf
) -> OpenReference:
    @functools.cache
    def references() -> PinnedReferences:
        return given or readable_references(run_store, attempt) or PinnedReferences()

    def open_reference(run: str) -> ReferenceRun | None:
        if damage := references().damage:
            raise RuleError(damage, "delete the object, and start another attempt")
        pinned = references().attempts.get(run)
        return None if pinned is None else ReferenceRun(run, pinned, store_of(run))

    return open_reference


def _compared(configs: Iterable[RuleConfig]) -> list[Compared]:
    entries = (compared_by(config) for config in configs)
    return sorted(
        {entry for entry in entries if entry is not None}, key=lambda entry: (entry.run, entry.figure)
    )


def _read(
    store_of: StoreOf,
    compared: Sequence[Compared],
    attempts: Mapping[str, str],
    own: JudgedAttempt,
    check_running: Callable[[], None] = _continue,
) -> PinnedReferences:
    """Read each reference run once, within one time limit for all of them."""
    statistics: dict[str, CheckedReference] = {}
    problems: dict[str, str] = {}
    deadline = time.monotonic() + _SECONDS
    encoded_bytes = points = 0
    too_large = (
        f"the statistics of the reference runs of an attempt have more than {MAX_POINTS} points or {_MAX_STATISTICS_BYTES} bytes; compare fewer "
        "runs or statistics"
    )
    figures: dict[str, list[str]] = {}
    for entry in compared:
        figures.setdefault(entry.run, []).extend([entry.figure] if entry.figure else [])
    for run, names in figures.items():
        check_running()
        if run not in attempts and run == OWN_RUN:
            problems[run] = ""  # the first attempt, or one that is not compared
            continue
        if run not in attempts:
            problems[run] = f"run {run!r} has no attempt in this project"
            continue
        if too_large in problems.values() and names:
            problems[run] = too_large  # without reading it
            continue
        try:
            # A generator, so that no more than the statistics within the limits are computed.
            part = own if run == OWN_RUN else None
            for figure, reference in (
                _with_retries(part.store if part else store_of(run), names, deadline, part) if names else ()
            ):
                encoded_bytes += len(json.dumps(reference))
                points += reference.points
                if encoded_bytes > _MAX_STATISTICS_BYTES or points > MAX_POINTS:
                    problems[run] = too_large
                    break
                statistics[Compared(run, figure).key] = reference
        except OverBudgetError:
            problems[run] = (
                f"reading the statistics takes more than {_SECONDS:g} s for all reference runs of an attempt, or more than {_MEGABYTES:g} MiB for "
                "this one; compare with a shorter run, or with fewer runs"
            )
        except WatchstepError as error:
            problems[run] = error.what
    return PinnedReferences(
        {run: attempt for run, attempt in attempts.items() if run in figures}, statistics, problems
    )


def _with_retries(
    store: Store, figures: Sequence[str], deadline: float, own: JudgedAttempt | None
) -> Iterator[tuple[str, CheckedReference]]:
    """Yield what `_statistics` does, and begin again if the store fails before the first one."""
    for number in range(1, _TRIES + 1):
        computed = _statistics(store, figures, deadline, own)
        try:
            first = next(computed, None)
        except NotFoundError:
            raise
        except StoreError:
            if number == _TRIES or time.monotonic() + _PAUSE_SECONDS >= deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
            continue
        if first is not None:
            yield first
            yield from computed
        return


def _siblings_of(run_store: Store) -> StoreOf:
    return functools.partial(_store_of, run_store)


def _store_of(run_store: Store, run: str) -> Store:
    """The store of another run of the same project.

    Raises:
        BadNameError: the name could leave the project.
    """
    return run_store.sibling(check_name("run", run))


def _statistics(
    run_store: Store, figures: Sequence[str], deadline: float, own: JudgedAttempt | None
) -> Iterator[tuple[str, CheckedReference]]:
    """Statistics of the first tensors of a run in the model's order, losses and metrics first.

    The run is read once, with the columns of these statistics only.

    Args:
        run_store: the run's store.
        figures: names of the statistics.
        deadline: time of `time.monotonic` until which they are read and computed.
        own: the attempt whose earlier attempts are read; None for all attempts.

    Raises:
        NotFoundError, FormatError, OverBudgetError: they cannot be read within the limits.
        StoreError: the store did not answer.
    """
    data = run_store.get(RUN_DOCUMENT, limit=MAX_BYTES)
    decode(RunDocument, data, f"{run_store.location}/{RUN_DOCUMENT}")  # of a later version, it is not read
    budget = ReadBudget(max(0.0, deadline - time.monotonic()), _MEGABYTES)
    budget.check()
    index = RunIndex(run_store, budget).judged()
    if own is not None:
        index = index.earlier_than(own.attempt)
    spans = own.spans if own else ((0, NO_CUT),)
    index.refresh()
    block, values = index.consistently(lambda: _rows_of_run(index, figures, budget, spans))
    budget = index.budget or budget
    budget.keep(_ROW_BYTES * len(block))
    compared = ComparedRows(block)
    points = max(_MIN_POINTS, min(MOST_POINTS, _POINTS // max(1, sum(_first(block.catalogue)))))
    for figure in figures:
        budget.check()
        yield figure, CheckedReference(compared.reference(values[figure], points))


def _rows_of_run(
    index: RunIndex, figures: Sequence[str], budget: ReadBudget, spans: Sequence[tuple[int, int]]
) -> tuple[Block, dict[str, Floats]]:
    """The rows of a run that count, within spans of steps, with shards merged, and their statistics by name.

    If no tensor has shards, only the statistics of each object are kept, else the columns that they are computed from.
    """
    catalogue = tuple(index.tensors())
    tensors = frozenset(
        info.name for info, is_first in zip(catalogue, _first(catalogue), strict=True) if is_first
    )
    needs = tuple(dict.fromkeys(name for figure in figures for name in needs_of(figure)))
    parts: list[Columns] = []
    for columns in _scan(index, needs, tensors, spans):
        if (columns["shard_count"] > 1).any():
            break
        rows = _training(columns)
        identity = {name: rows[name] for name in IDENTITY}
        parts.append({**identity, **{figure: figure_of(batch_of(rows), figure) for figure in figures}})
        budget.keep(_size(parts[-1]))
    else:
        block, columns = _joined(parts, (*IDENTITY, *figures), catalogue, budget)
        return block, {figure: columns[figure] for figure in figures}
    parts.clear()
    # A new one, because objects that were read ahead still count in the other.
    budget = index.budget = ReadBudget(budget.remaining_seconds, _MEGABYTES)
    needs = tuple(dict.fromkeys((*needs, *_MERGED)))
    for columns in _scan(index, needs, tensors, spans):
        parts.append(_training(columns))
        budget.keep(_size(parts[-1]))
    block, _ = _joined(parts, (*IDENTITY, *needs), catalogue, budget)
    block = with_merged_shards(block)
    return block, {figure: figure_of(block.statistics, figure) for figure in figures}


def _scan(
    index: RunIndex, needs: tuple[str, ...], tensors: frozenset[str], spans: Sequence[tuple[int, int]]
) -> Iterator[Columns]:
    for first, last in spans:
        yield from index.scan(Selection(needs, tensors, first, last))


def _training(columns: Columns) -> Columns:
    """The columns of the rows in the modes train and global, in the types of a block."""
    rows = np.flatnonzero(np.isin(columns["mode"], TRAINING_MODES))
    return {name: column[rows].astype(_TYPES.get(name, column.dtype)) for name, column in columns.items()}


def _size(columns: Columns) -> int:
    return sum(column.nbytes for column in columns.values())


def _joined(
    parts: list[Columns], names: Sequence[str], catalogue: tuple[TensorInfo, ...], budget: ReadBudget
) -> tuple[Block, Columns]:
    """Join parts, which it removes column by column, to a block whose statistics are those of the columns."""
    budget.keep(8 * sum(len(part["step"]) for part in parts))  # one column is in memory twice
    columns = joined([], names)
    for name in names if parts else ():
        columns[name] = np.concatenate([part.pop(name) for part in parts])
    parts.clear()
    none = np.broadcast_to(np.zeros(1, np.int64), len(columns["step"]))
    places = Places(none, columns["shard_count"], columns["replica"], columns["stage"])  # type: ignore[arg-type]
    block = Block(
        step=columns["step"],
        mode=columns["mode"],
        worker=columns["worker"],
        time_ns=none,
        tensor=columns["tensor"],
        catalogue=catalogue,
        places=places,
        statistics=batch_of(columns),
    )
    return block, columns


def _first(catalogue: Sequence[TensorInfo]) -> list[bool]:
    """Which tensors are the first in the model's order, losses and metrics before them, up to the limit of a reference."""
    ranked = sorted(
        range(len(catalogue)),
        key=lambda index: (bool(catalogue[index].module), catalogue[index].order, catalogue[index].name),
    )
    chosen = set(ranked[:MOST_TENSORS])
    return [index in chosen for index in range(len(catalogue))]


def _with_reference(config: RuleConfig, references: PinnedReferences) -> RuleConfig:
    compared = compared_by(config)
    parameter = config.implementation.reference_param
    if compared is None or not parameter or not compared.figure:
        return config
    return config.model_copy(update={"params": {**config.params, parameter: references.statistic(compared)}})
