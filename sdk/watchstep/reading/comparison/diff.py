"""Where two runs diverge: the first step and tensor with different figures or values, and all differences.

Tensors of a step are compared in the order in which the step computes them, so that the first one that differs is closest to the cause: inputs;
weights, which are recorded as the forward pass used them; activations in module order; losses; gradients in reverse module order; and what the
update made: optimizer state and updates.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.block import from_codes
from watchstep.format.layout import SnapshotKey
from watchstep.format.segment_checks import PROBE
from watchstep.format.statistics import COUNT_COLUMNS, Floats
from watchstep.format.tensors import MODES, SYSTEM, Mode, TensorInfo
from watchstep.reading.columns import COUNTED, NO_CUT, Columns, Selection
from watchstep.reading.comparison.tolerances import ElementDifference, Tolerances, differing_element
from watchstep.reading.run import Run
from watchstep.reading.saved.saved_tensor import SavedTensor

if TYPE_CHECKING:
    import pyarrow as pa

_KEY = ("step", "mode", "tensor", "worker", "replica", "stage")

_PHASES = {
    "input": 0,
    "label": 0,
    "weight": 1,
    "bias": 1,
    "checksum": 1,
    "output": 2,
    "buffer": 3,
    "loss": 4,
    "gradient": 5,
    "not_in_optimizer": 5,
    "momentum": 6,
    "second_moment": 6,
    "state": 6,
    "update": 7,
}
"""Role → when a step computes such a tensor. Buffers are recorded after the forward pass, which changes them."""
_LAST_PHASE = 8
_SCALAR_ROLES = frozenset({"loss", "metric"})
_OF_PREVIOUS = frozenset({f"{PROBE}gradient_cosine"})
"""Figures that relate a row to the previous one of its tensor. They are compared where both runs measured that one at the same step."""

_EXACT_FIGURES = frozenset({"count", "nan", "pos_inf", "neg_inf"})
_ValueRow = tuple[int, Mode, str, int, str, float, float, float]
"""A row of `RunDifference.table` about a full tensor."""

_CHUNK_BYTES = 32 * 2**20
_MAX_VALUE_BYTES = 2**30


@dataclass(frozen=True)
class RunDifference:
    """Differences between two runs.

    Attributes:
        step: the first step with a difference; None if there is none.
        tensor: the first tensor at that step, in the order of the computation; None if there is none.
        table: all differences: step, mode, tensor, worker, figure, a, b, relative; by step and the order of the computation. The figure of a full
            tensor is ``value[…]`` with the index of the element that differs most.
        compared: number of rows that both runs have, of the same numbers of elements.
        only_a: tensors of the first run only.
        only_b: tensors of the second run only.
        steps_only_a: steps that only the first run recorded.
        steps_only_b: steps that only the second run recorded.
        rows_only_a: number of rows of the first run without a partner, of tensors and steps that both runs have.
        rows_only_b: the same of the second run.
        values: number of full tensors that were compared, of those that both runs saved up to the first difference.
        notes: attempts, repeated steps, and what could not be compared.
    """

    step: int | None
    tensor: str | None
    table: pa.Table
    compared: int
    only_a: list[str]
    only_b: list[str]
    steps_only_a: list[int]
    steps_only_b: list[int]
    rows_only_a: int
    rows_only_b: int
    values: int
    notes: tuple[str, ...]


def diff(
    run_a: Run,
    run_b: Run,
    tolerance: float | Tolerances | None = None,
    *,
    value_bytes: int = _MAX_VALUE_BYTES,
) -> RunDifference:
    """Compare the figures of two runs, row by row of the default views, with shards as recorded; and full tensors that both saved.

    Probes are compared if both runs have them, with at least the tolerance of float32 and the scale 1. Figures of the process and its machine always differ, and are
    omitted. Checksums of bits are compared only with the tolerance 0.

    Rows of different numbers of elements are not compared: other micro-batches, batches or shapes were measured. The notes name them. The
    cosine to the previous gradient is compared where both runs measured that gradient at the same step.

    Two figures differ if ``|a - b| > tolerance * scale``, or if one of them is missing. The scale is the larger
    magnitude; for a number of zero or negative elements, the number of elements, where one more is always equal; for a mean, the mean magnitude; for extremes at least the root
    mean square; and for the sum of squared deviations the sum of squares: a figure close to zero by cancellation has no significant
    digits. Numbers of elements that are NaN or infinite are compared exactly. Memory: some 300 bytes for each row of both.

    Args:
        run_a: a run.
        run_b: another run.
        tolerance: the same for all dtypes, 0 for equal bits; by default `Tolerances`. Losses and metrics, which are recorded as float64, have the
            largest tolerance of the dtypes of the runs' tensors.
        value_bytes: size of full tensors that are read from each run, from the first step on.

    Raises:
        ConfigError: the tolerance is negative.
        StoreError: a run cannot be read.
    """
    if tolerance is None:
        tolerance = Tolerances()
    elif not isinstance(tolerance, Tolerances):
        tolerance = Tolerances.uniform(tolerance)
    infos_a, infos_b = (_compared(run, tolerance) for run in (run_a, run_b))
    infos = _in_order({**infos_b, **infos_a})
    names = [info.name for info in infos]
    tolerances = _by_tensor(infos, {**infos_b, **infos_a}, infos_b, tolerance)
    probes = sorted({*run_a.index.probes()} & {*run_b.index.probes()})
    figures = (*COUNTED, *(PROBE + probe for probe in probes))
    a, b = (_with_previous(_rows(run, names, figures)) for run in (run_a, run_b))
    left, right = _common(a, b)
    gaps = [
        _gaps(columns, rows, other)
        for columns, rows, other in ((a, left, (b, names, infos_b)), (b, right, (a, names, infos_a)))
    ]
    steps = [set(np.unique(columns["step"]).tolist()) for columns in (a, b)]
    a, b = (
        {name: column[rows] for name, column in columns.items()} for columns, rows in ((a, left), (b, right))
    )
    order = np.lexsort([a[name] for name in ("worker", "mode", "tensor", "step")])
    a, b = ({name: column[order] for name, column in columns.items()} for columns in (a, b))
    uncompared = _UncomparedRows(names)
    a, b = uncompared.without(a, b)
    table = _table(a, b, (names, figures), (tolerances, tolerance.of("float32")))
    values = _SavedValues(run_a, run_b, tolerance, value_bytes)
    table = values.joined(table, infos)
    return RunDifference(
        table["step"][0].as_py() if table.num_rows else None,
        table["tensor"][0].as_py() if table.num_rows else None,
        table,
        len(a["step"]),
        [name for name in infos_a if name not in infos_b],
        [name for name in infos_b if name not in infos_a],
        sorted(steps[0] - steps[1]),
        sorted(steps[1] - steps[0]),
        gaps[0],
        gaps[1],
        values.compared,
        (*_attempts(run_a, "A"), *_attempts(run_b, "B"), *uncompared.notes(), *values.notes),
    )


FIRST_FIGURES = ("count", "nan", "pos_inf", "neg_inf", "min", "max", "mean", "abs_sum", "square_sum")
"""Figures that `first_divergences` reads: those that show any difference of the others, with fewer columns. The number of elements decides
which rows are compared."""

_PART_ROWS = 200_000
_PROBED_STEPS = 8
"""Steps that are compared before all others: runs with other seeds differ everywhere from the first step on."""


@dataclass(frozen=True)
class TensorDivergence:
    """The first difference of a tensor between two runs.

    Attributes:
        step: step of the difference.
        mode: mode of the step.
        tensor: name of the tensor.
        worker: worker of the rows.
        figure: figure that differs.
        a: value of the first run; NaN for none.
        b: value of the second run.
        relative: difference in relation to the figure's scale, as in `diff`.
    """

    step: int
    mode: Mode
    tensor: str
    worker: int
    figure: str
    a: float
    b: float
    relative: float


@dataclass(frozen=True)
class RunDivergences:
    """The first difference of each tensor between two runs.

    Attributes:
        tensors: by step and the order of the computation; the first one is the first difference of the runs.
        first: first compared step.
        last: last compared step; -1 if no step was compared.
        rows: number of compared rows of each run.
        left_out: number of tensors that were not compared up to ``last`` because the time was over.
        only_a: tensors of the first run only.
        only_b: tensors of the second run only.
        notes: attempts and repeated steps.
    """

    tensors: list[TensorDivergence]
    first: int
    last: int
    rows: int
    left_out: int
    only_a: list[str]
    only_b: list[str]
    notes: tuple[str, ...]


def first_divergences(
    run_a: Run,
    run_b: Run,
    tolerance: float | Tolerances | None = None,
    *,
    steps: tuple[int, int] = (0, NO_CUT),
    seconds: float = float("inf"),
) -> RunDivergences:
    """Find where each tensor first differs, as `diff` compares figures, from a bounded number of rows in memory.

    Rows are read in parts: of some tensors over all steps if the objects of a run have few tensors, as those of a compaction, else of all
    tensors over some steps. A tensor is not read any further after its first difference.

    Args:
        run_a: a run.
        run_b: another run.
        tolerance: as for `diff`.
        steps: the first and the last step to compare.
        seconds: time after which no further part is read.

    Raises:
        ConfigError: the tolerance is negative.
        StoreError: a run cannot be read.
        OverBudgetError: reading exceeds the budget of a run.
    """
    deadline = time.monotonic() + seconds
    if tolerance is None:
        tolerance = Tolerances()
    elif not isinstance(tolerance, Tolerances):
        tolerance = Tolerances.uniform(tolerance)
    infos_a, infos_b = (_compared(run, tolerance) for run in (run_a, run_b))
    infos = _in_order({**infos_b, **infos_a})
    allowances = (_by_tensor(infos, {**infos_b, **infos_a}, infos_b, tolerance), tolerance.of("float32"))
    ranges = [run.index.step_range() for run in (run_a, run_b)]
    first = max(steps[0], *(low for low, _ in ranges))
    last = min(steps[1], *(high for _, high in ranges))
    search = _DivergenceSearch((run_a, run_b), [info.name for info in infos], allowances)
    shared = [info.name for info in infos if info.name in infos_a and info.name in infos_b]
    compared, left_out = search.run(shared, (first, last), deadline)
    return RunDivergences(
        search.in_order(),
        first,
        compared,
        search.rows,
        left_out,
        [name for name in infos_a if name not in infos_b],
        [name for name in infos_b if name not in infos_a],
        (*_attempts(run_a, "A"), *_attempts(run_b, "B"), *search.uncompared.notes()),
    )


class _UncomparedRows:
    """Rows that two runs measured on different numbers of elements.

    Args:
        names: names of the tensors that the column ``tensor`` indexes.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._firsts: dict[int, tuple[int, int, int]] = {}
        self._rows = 0

    def without(self, a: Columns, b: Columns) -> tuple[Columns, Columns]:
        """Return the same rows of both runs without those of different numbers of elements, which it notes."""
        is_comparable = a["count"] == b["count"]
        others = np.flatnonzero(~is_comparable)
        self._rows += len(others)
        for row in others[np.unique(a["tensor"][others], return_index=True)[1]].tolist():
            first = int(a["step"][row]), int(a["count"][row]), int(b["count"][row])
            tensor = int(a["tensor"][row])
            self._firsts[tensor] = min(first, self._firsts.get(tensor, first))
        rows = np.flatnonzero(is_comparable)
        left, right = ({name: column[rows] for name, column in part.items()} for part in (a, b))
        return left, right

    def notes(self) -> Iterator[str]:
        """Describe them: the first tensor in the order of the computation is an example."""
        if self._firsts:
            tensor = min(self._firsts)
            step, count_a, count_b = self._firsts[tensor]
            yield (
                f"{self._rows:,} rows of {len(self._firsts):,} tensors were measured on different numbers of elements and are not "
                f"compared, for example {self._names[tensor]} at step {step}: {count_a:,} elements in the first run, {count_b:,} in the second"
            )


@dataclass
class _DivergenceSearch:
    """Searches the first difference of each tensor.

    Attributes:
        runs: both runs.
        names: names of their tensors, in the order of the computation.
        allowances: tolerance of each tensor, and of probes.
        found: name of the tensor → its first difference.
        rows: number of compared rows.
        uncompared: rows that were not compared.
    """

    runs: tuple[Run, Run]
    names: list[str]
    allowances: tuple[Floats, float]
    found: dict[str, TensorDivergence] = field(default_factory=dict)
    rows: int = 0

    def __post_init__(self) -> None:
        self.uncompared = _UncomparedRows(self.names)

    def run(self, shared: list[str], steps: tuple[int, int], deadline: float) -> tuple[int, int]:
        """Compare the tensors that both runs have; return the last compared step, -1 for none, and the number of tensors left out."""
        first, last = steps
        if not shared or last < first:
            return -1, 0
        if _has_objects_of_few_tensors(self.runs[0]):
            groups = _tensor_groups(self.runs[0], shared)
            for place, group in enumerate(groups):
                if time.monotonic() >= deadline:
                    return last, sum(map(len, groups[place:]))
                self.compare(group, steps)
            return last, 0
        low, width = first, _PROBED_STEPS
        while low <= last:
            remaining = [name for name in shared if name not in self.found]
            if not remaining:
                return last, 0
            if time.monotonic() >= deadline:
                return (low - 1 if low > first else -1), 0
            high = min(last, low + width - 1)
            self.compare(remaining, (low, high))
            low, width = high + 1, _steps_of_part(self.runs[0])
        return last, 0

    def compare(self, tensors: Collection[str], steps: tuple[int, int]) -> None:
        """Compare some tensors at some steps."""
        a, b = (_rows(run, self.names, FIRST_FIGURES, frozenset(tensors), steps) for run in self.runs)
        reserved = [sum(column.nbytes for column in columns.values()) for columns in (a, b)]
        left, right = _common(a, b)
        order = np.lexsort([a[name][left] for name in ("worker", "mode", "step", "tensor")])
        a = {name: column[left[order]] for name, column in a.items()}
        b = {name: column[right[order]] for name, column in b.items()}
        a, b = self.uncompared.without(a, b)
        self.rows += len(a["step"])
        firsts: dict[int, tuple[int, str, float]] = {}
        for figure in FIRST_FIGURES:
            rows, relatives = _differing(a, b, figure, self.allowances)
            # Rows are ordered by tensor and step, so the first one of a tensor is its first difference.
            tensor, place = np.unique(a["tensor"][rows], return_index=True)
            for number, row, relative in zip(
                tensor.tolist(), rows[place].tolist(), relatives[place].tolist(), strict=True
            ):
                if number not in firsts or row < firsts[number][0]:
                    firsts[number] = row, figure, relative
        for number, (row, figure, relative) in firsts.items():
            self.found[self.names[number]] = TensorDivergence(
                int(a["step"][row]),
                MODES[a["mode"][row]],
                self.names[number],
                int(a["worker"][row]),
                figure,
                float(a[figure][row]),
                float(b[figure][row]),
                relative,
            )
        for run, size in zip(self.runs, reserved, strict=True):
            if run.index.budget is not None:
                run.index.budget.release(size)

    def in_order(self) -> list[TensorDivergence]:
        """Return the differences by step and the order of the computation."""
        ranks = {name: rank for rank, name in enumerate(self.names)}
        return sorted(self.found.values(), key=lambda entry: (entry.step, ranks[entry.tensor]))


def _has_objects_of_few_tensors(run: Run) -> bool:
    """Return whether the objects of a run have less than half of its tensors on average, as those of a compaction have."""
    objects = run.index.objects()
    tensors = sum(len(located.object.catalogue) for located in objects)
    return bool(objects) and 2 * tensors < len(objects) * len(run.index.tensors())


def _tensor_groups(run: Run, names: list[str]) -> list[list[str]]:
    """Return the tensors in groups, each with those of one object or of several small ones, so that an object is read once."""
    objects: dict[str, str] = {}
    total = 0
    for located in run.index.objects():
        total += located.object.rows
        for info in located.object.catalogue:
            objects.setdefault(info.name, located.object.key)
    by_object: dict[str, list[str]] = {}
    for name in names:
        by_object.setdefault(objects.get(name, ""), []).append(name)
    size = max(1, _PART_ROWS * max(1, len(objects)) // max(1, total))
    groups: list[list[str]] = []
    for members in by_object.values():
        if groups and len(groups[-1]) + len(members) <= size:
            groups[-1] += members
        else:
            groups += [members[place : place + size] for place in range(0, len(members), size)]
    return groups


def _steps_of_part(run: Run) -> int:
    """Return the number of steps with about `_PART_ROWS` rows."""
    first, last = run.index.step_range()
    rows = sum(located.object.rows for located in run.index.objects())
    return max(1, _PART_ROWS * (last - first + 1) // max(1, rows))


def _compared(run: Run, tolerances: Tolerances) -> dict[str, TensorInfo]:
    return {
        info.name: info
        for info in run.catalogue
        if SYSTEM not in info.collections and (tolerances.is_exact or info.role != "checksum")
    }


def _in_order(infos: dict[str, TensorInfo]) -> list[TensorInfo]:
    """Return tensors in the order in which a step computes them."""

    def key(entry: tuple[int, TensorInfo]) -> tuple[int, int, int]:
        place, info = entry
        phase = _PHASES.get(info.role, _LAST_PHASE)
        return (phase, -info.order, -place) if phase == _PHASES["gradient"] else (phase, info.order, place)

    in_model = sorted(infos.values(), key=lambda info: (info.order, info.name))
    return [info for _, info in sorted(enumerate(in_model), key=key)]


def _by_tensor(
    infos: list[TensorInfo],
    infos_a: dict[str, TensorInfo],
    infos_b: dict[str, TensorInfo],
    tolerances: Tolerances,
) -> Floats:
    """Return the tolerance of each tensor, the larger one where the runs have different dtypes."""
    both = [*infos_a.values(), *infos_b.values()]
    scalars = tolerances.largest(
        [info.dtype for info in both if info.role in {"weight", "gradient", "output"}]
    )
    return np.array(
        [
            scalars
            if info.role in _SCALAR_ROLES
            else tolerances.largest(
                [each[info.name].dtype for each in (infos_a, infos_b) if info.name in each]
            )
            for info in infos
        ],
        np.float64,
    )


def _attempts(run: Run, name: str) -> Iterator[str]:
    """Describe the attempts of a run with several, and the steps that each one has in the default view."""
    attempts = run.attempts
    if len(attempts) > 1:
        starts = run.index.first_steps()
        parts = ", ".join(f"{attempt} from step {starts.get(attempt, 0)}" for attempt in attempts)
        yield f"run {name} has {len(attempts)} attempts ({parts}): of a repeated step the newest attempt is compared"


def _gaps(
    columns: Columns, matched: NDArray[np.intp], other: tuple[Columns, list[str], dict[str, TensorInfo]]
) -> int:
    """Return the number of rows without a partner, of tensors and steps that the other run has."""
    rows, names, infos = other
    is_shared = np.array([name in infos for name in names] or [False], np.bool_)
    unmatched = np.ones(len(columns["step"]), np.bool_)
    unmatched[matched] = False
    unmatched &= np.isin(columns["step"], rows["step"])
    return int(np.count_nonzero(unmatched & is_shared[columns["tensor"]]))


def _rows(
    run: Run,
    names: list[str],
    figures: tuple[str, ...],
    tensors: frozenset[str] | None = None,
    steps: tuple[int, int] = (0, NO_CUT),
) -> Columns:
    """Return rows of a run with the rank of each tensor, by default all; ``steps`` are the first and the last."""
    index = run.index
    selection = Selection((*figures, "shard_index"), tensors, *steps)
    columns = index.consistently(lambda: index.collect(selection))
    ranks_by_name = {name: rank for rank, name in enumerate(names)}
    ranks = np.array([ranks_by_name.get(info.name, -1) for info in index.tensors()] or [0], np.int64)[
        columns["tensor"]
    ]
    return {name: column[ranks >= 0] for name, column in {**columns, "tensor": ranks}.items()}


def _with_previous(columns: Columns) -> Columns:
    """Add the step of the previous row of the same tensor, mode and worker as ``previous``; -1 for the first one."""
    keys = ("tensor", "mode", "worker", "replica", "stage", "shard_index")
    order = np.lexsort([columns["step"], *(columns[name] for name in keys)])
    same = np.all([columns[name][order][1:] == columns[name][order][:-1] for name in keys], axis=0)
    previous = np.full(len(order), -1, np.int64)
    previous[order[1:][same]] = columns["step"][order][:-1][same]
    return {**columns, "previous": previous}


def _common(a: Columns, b: Columns) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return rows of both with the same key; of rows with equal keys, the first."""
    both = {name: np.concatenate([a[name], b[name]]).astype(np.int64) for name in (*_KEY, "shard_index")}
    order = np.lexsort([*both.values()])
    starts = np.ones(len(order), np.bool_)
    if len(order):
        starts[1:] = np.any([column[order][1:] != column[order][:-1] for column in both.values()], axis=0)
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(starts) - 1
    size = len(a["step"])
    groups_a, first_a = np.unique(group[:size], return_index=True)
    groups_b, first_b = np.unique(group[size:], return_index=True)
    _, in_a, in_b = np.intersect1d(groups_a, groups_b, assume_unique=True, return_indices=True)
    return first_a[in_a], first_b[in_b]


def _scale(a: Columns, b: Columns, figure: str) -> Floats:
    """Return the scale of the differences of a figure, as `diff` states."""
    count = np.fmax(a["count"], b["count"]).astype(np.float64)
    if figure in COUNT_COLUMNS:
        return count
    if figure == "mean":
        with np.errstate(all="ignore"):
            shares = [columns["abs_sum"] / np.maximum(columns["count"], 1) for columns in (a, b)]
        return np.fmax(*shares)
    scale: Floats = np.fmax(np.abs(a[figure]), np.abs(b[figure]))
    squares = np.fmax(a["square_sum"], b["square_sum"])
    if figure == "m2":
        return np.fmax(scale, squares)
    if figure.startswith(PROBE):
        return np.fmax(scale, 1.0)
    if figure in {"min", "max", "abs_min"}:
        with np.errstate(all="ignore"):
            return np.fmax(scale, np.sqrt(squares / np.maximum(count, 1)))
    return scale


def _table(
    a: Columns, b: Columns, keys: tuple[list[str], tuple[str, ...]], allowances: tuple[Floats, float]
) -> pa.Table:
    """Return the differences of figures as in `RunDifference.table`.

    Args:
        a: rows of the first run.
        b: the same rows of the second run.
        keys: names of tensors and figures.
        allowances: tolerance of each tensor, and of probes, which are computed in float32.
    """
    import pyarrow as pa

    names, compared = keys
    rows, figures, relatives = [], [], []
    for index, figure in enumerate(compared):
        differs, relative = _differing(a, b, figure, allowances)
        rows.append(differs)
        figures.append(np.full(len(differs), index))
        relatives.append(relative)
    row, figure_at = np.concatenate(rows), np.concatenate(figures)
    order = np.lexsort([figure_at, row])
    row, figure_at = row[order], figure_at[order]

    def values(columns: Columns) -> Floats:
        result = np.full(len(row), np.nan)
        for index, name in enumerate(compared):
            result[figure_at == index] = columns[name][row[figure_at == index]]
        return result

    return pa.table(
        {
            "step": a["step"][row],
            "mode": from_codes(a["mode"][row], MODES),
            "tensor": from_codes(a["tensor"][row], names),
            "worker": a["worker"][row],
            "figure": from_codes(figure_at, compared),
            "a": pa.array(values(a), from_pandas=True),
            "b": pa.array(values(b), from_pandas=True),
            "relative": pa.array(np.concatenate(relatives)[order], from_pandas=True),
        }
    )


def _differing(
    a: Columns, b: Columns, figure: str, allowances: tuple[Floats, float]
) -> tuple[NDArray[np.intp], Floats]:
    """Return the rows whose figure differs, ascending, and their difference in relation to the figure's scale.

    Args:
        a: rows of the first run.
        b: the same rows of the second run.
        figure: the figure.
        allowances: tolerance of each tensor, and of probes.
    """
    tolerances, of_probes = allowances
    of_row = tolerances[a["tensor"]] if len(tolerances) else np.zeros(len(a["tensor"]))
    x, y = a[figure].astype(np.float64), b[figure].astype(np.float64)
    scale = _scale(a, b, figure)
    with np.errstate(all="ignore"):
        distance = np.abs(x - y)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        allowed = np.zeros(len(of_row)) if figure in _EXACT_FIGURES else of_row * scale
        if figure.startswith(PROBE):
            allowed = np.where(of_row > 0, np.fmax(of_row, of_probes) * scale, 0.0)
        elif figure in COUNT_COLUMNS and figure not in _EXACT_FIGURES:
            allowed = np.where(of_row > 0, np.fmax(allowed, 1.0), 0.0)
        if figure in _OF_PREVIOUS:
            same |= a["previous"] != b["previous"]
        rows = np.flatnonzero(~same & ~(distance <= allowed))
        return rows, (distance[rows] / scale[rows]).astype(np.float64)


class _SavedValues:
    """Compares full tensors that both runs saved.

    Attributes:
        compared: number of compared tensors.
        notes: what could not be compared.
    """

    def __init__(self, run_a: Run, run_b: Run, tolerances: Tolerances, limit: int) -> None:
        self.compared = 0
        self.notes: list[str] = []
        self._runs = run_a, run_b
        self._tolerances = tolerances
        self._left = limit

    def joined(self, table: pa.Table, infos: list[TensorInfo]) -> pa.Table:
        """Return a table of differences, with those of full tensors up to its first step added in order."""
        last = table["step"][0].as_py() if table.num_rows else None
        ranks = {info.name: rank for rank, info in enumerate(infos)}
        found: list[_ValueRow] = []
        for step, mode, names in self._common(last):
            if found and found[0][0] < step:
                break
            for name in sorted(names, key=lambda name: (ranks.get(name, len(ranks)), name)):
                element = self._difference(name, step, mode)
                if element is not None:
                    figure = f"value[{','.join(map(str, element.index))}]"
                    found.append((step, mode, name, 0, figure, element.a, element.b, element.relative))
        return _merged(table, found, ranks) if found else table

    def _common(self, last: int | None) -> Iterator[tuple[int, Mode, set[str]]]:
        """Yield steps and modes that both runs saved, up to a step, and the names that both contain."""
        keys_a, keys_b = (_keys_by_pass(run) for run in self._runs)
        for step, mode in sorted(keys_a.keys() & keys_b.keys()):
            if last is not None and step > last:
                return
            names = [
                self._names(run, keys[step, mode])
                for run, keys in zip(self._runs, (keys_a, keys_b), strict=True)
            ]
            yield step, mode, names[0] & names[1]

    def _names(self, run: Run, keys: list[SnapshotKey]) -> set[str]:
        names: set[str] = set()
        for key in keys:
            try:
                names.update(run.open_snapshot(key).tensors)
            except (NotFoundError, FormatError) as error:
                self.notes.append(f"full tensors of step {key.step}: {error.what}")
        return names

    def _difference(self, name: str, step: int, mode: Mode) -> ElementDifference | None:
        try:
            tensors = [run.tensor(name) for run in self._runs]
            tolerance = self._tolerances.largest([tensor.info.dtype for tensor in tensors])
            a, b = (tensor.saved(step, mode=mode) for tensor in tensors)
            return self._compare(a, b, tolerance)
        except (NotFoundError, FormatError) as error:
            self.notes.append(f"full tensor {name} of step {step}: {error.what}")
            return None

    def _compare(self, a: SavedTensor, b: SavedTensor, tolerance: float) -> ElementDifference | None:
        name, step = a.name, a.step
        if a.shape != b.shape:
            self.notes.append(
                f"full tensor {name} of step {step}: shape {a.shape} in the first run and {b.shape} in the second"
            )
            return None
        if a.nbytes > self._left:
            self.notes.append(
                f"full tensor {name} of step {step}: not compared, the limit of bytes is exceeded"
            )
            return None
        self._left -= a.nbytes
        self.compared += 1
        if not a.shape:
            return differing_element(a.numpy(), b.numpy(), tolerance)
        rows = max(1, _CHUNK_BYTES * a.shape[0] // max(1, a.nbytes))
        for first in range(0, a.shape[0], rows):
            part = slice(first, first + rows)
            found = differing_element(a.numpy(part), b.numpy(part), tolerance)
            if found is not None:
                index = (found.index[0] + first, *found.index[1:])
                return ElementDifference(index, found.a, found.b, found.relative, found.elements)
        return None


def _keys_by_pass(run: Run) -> dict[tuple[int, Mode], list[SnapshotKey]]:
    keys: dict[tuple[int, Mode], list[SnapshotKey]] = {}
    for key in run.snapshots():
        if key.mode in MODES:
            keys.setdefault((key.step, key.mode), []).append(key)
    return keys


def _merged(table: pa.Table, found: list[_ValueRow], ranks: dict[str, int]) -> pa.Table:
    import pyarrow as pa

    plain = table.cast(
        pa.schema(
            [
                pa.field(field.name, pa.string() if pa.types.is_dictionary(field.type) else field.type)
                for field in table.schema
            ]
        )
    )
    columns = zip(plain.schema, zip(*found, strict=True), strict=True)
    added = pa.table({field.name: pa.array(list(values), field.type) for field, values in columns})
    both = pa.concat_tables([added, plain])
    steps, names = both["step"].to_pylist(), both["tensor"].to_pylist()
    order = sorted(range(both.num_rows), key=lambda row: (steps[row], ranks.get(names[row], len(ranks))))
    return both.take(pa.array(order, pa.int64()))
