"""Streaks: consecutive judged rows of a series that all have a finding, or all have none.

A *series* is a tensor on one worker in one mode, ``tensor@worker/mode``, or the run as a whole (`RUN`). A series alternates between two
kinds of streak::

             conclusive row without a finding
    ┌──────────┐ ─────────────────────────────▶ ┌───────┐
    │ FINDINGS │                                │ CLEAN │
    └──────────┘ ◀───────────────────────────── └───────┘
                     row with a finding

    FINDINGS  long enough after ``for``: the series makes the alert fire
    CLEAN     long enough after ``keep_firing``: the series no longer keeps the alert firing

Rows that are not conclusive and have no finding are skipped, and belong to no streak. Rows about an earlier step than the last row of
their series are *late*; each late finding is a streak of its own.

Blocks hold up to hundreds of thousands of rows, so `follow` works on columns: it selects the rows of the series that matter (those with
a finding in the block, and those that the alert remembers), sorts them by series, and finds the boundaries between streaks with one
comparison of neighbours. Python objects exist only for the rows at which a streak begins or becomes long enough.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.tensors import MODES, TensorInfo
from watchstep_rules.config.rule_config import Timing
from watchstep_rules.rule import Finding, FindingRows, Likelihood, likelihood_of, steps_of

RUN = "run"
"""The series of findings about the run as a whole, those without a tensor."""


class Streak(NamedTuple):
    """Consecutive judged steps that all have a finding, or all have none.

    Attributes:
        steps: their number.
        first: the first step.
        time_ns: the time of the first step's row, nanoseconds since the epoch.
    """

    steps: int
    first: int
    time_ns: int


NONE = Streak(0, 0, 0)
_NO_STEP = -(1 << 62)


@dataclass(frozen=True)
class ClockTick:
    """An evaluation of a rule that watches the clock: the last recorded step, and the time in nanoseconds."""

    step: int
    now_ns: int


@dataclass(frozen=True)
class OpenSeries:
    """The state of series before a block.

    Attributes:
        finding_streaks: streaks of findings, of series with a finding at their last judged step.
        clean_streaks: clean streaks of the other series that the alert follows.
        last_steps: the last judged step of each series; a missing series has none.
    """

    finding_streaks: dict[str, Streak]
    clean_streaks: dict[str, Streak]
    last_steps: dict[str, int]


@dataclass(frozen=True)
class JudgedRows:
    """The columns of judged rows that an alert needs, each of shape (n,), as in `Block`; views, not copies."""

    step: NDArray[np.int64]
    worker: NDArray[np.int32]
    mode: NDArray[np.int8]
    time_ns: NDArray[np.int64]
    tensor: NDArray[np.int32]
    conclusive: NDArray[np.bool_]
    catalogue: tuple[TensorInfo, ...]

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def of(cls, block: Block, conclusive: NDArray[np.bool_] | None = None) -> JudgedRows:
        """All rows of a block.

        Args:
            block: the judged rows.
            conclusive: rows that count for their series even without a finding, bool, shape (n,); None for all.
        """
        every = np.ones(len(block), np.bool_) if conclusive is None else conclusive
        return cls(block.step, block.worker, block.mode, block.time_ns, block.tensor, every, block.catalogue)

    def part(self, rows: slice) -> JudgedRows:
        """Consecutive rows."""
        return JudgedRows(
            self.step[rows],
            self.worker[rows],
            self.mode[rows],
            self.time_ns[rows],
            self.tensor[rows],
            self.conclusive[rows],
            self.catalogue,
        )


@dataclass(frozen=True)
class Change:
    """A row at which the streak of a series begins, or becomes long enough.

    Attributes:
        step: the step of the row.
        series: the name of the series.
        findings: the rule's findings for the block.
        finding_index: the index of the row's finding in ``findings``, or -1.
        long_enough: whether the streak is as long as `Timing` requires.
        streak: the streak up to this row.
        row: the index among the followed rows in order of arrival.
        index: the index among the followed rows sorted by series.
    """

    step: int
    series: str
    findings: Sequence[Finding]
    finding_index: int
    long_enough: bool
    streak: Streak
    row: int
    index: int

    @property
    def has_finding(self) -> bool:
        """Whether the row has a finding."""
        return self.finding_index >= 0

    @property
    def finding(self) -> Finding:
        """The finding of the row; only if `has_finding`."""
        return self.findings[self.finding_index]

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the row's finding; only if `has_finding`."""
        return likelihood_of(self.findings, self.finding_index)


@dataclass(frozen=True)
class SeriesEnd:
    """A series after its last row in a block: whether that row has a finding, the streak, and the step."""

    has_finding: bool
    streak: Streak
    step: int


@dataclass(frozen=True)
class Streaks:
    """The changes of an alert's streaks in a block.

    Attributes:
        changes: changes in the order of the rows.
        out_of_order: findings of rows that arrived after a row of the same series with a later step; no streak counts them.
        ends: the state of each series with rows in the block, after its last row.
        has_tick: whether the last change belongs to a clock tick, which belongs to no step.
        sorted_rows: all rows of the followed series.
    """

    changes: list[Change]
    out_of_order: list[Change]
    ends: dict[str, SeriesEnd]
    has_tick: bool
    sorted_rows: _SortedRows

    def first_after(self, change: Change, step: int) -> Change | None:
        """The first row after a change in the same streak whose step is later than ``step``, or None."""
        return self.sorted_rows.first_after(change, step)


@dataclass(frozen=True)
class _StreakStarts:
    """For each streak in a block: the number of steps before the block, and when it began; shape (streaks,)."""

    count: NDArray[np.int64]
    step: NDArray[np.int64]
    time_ns: NDArray[np.int64]


@dataclass(frozen=True)
class _SeriesRows:
    """Rows of the followed series, in the order in which they were judged; each column of shape (m,)."""

    series: NDArray[np.int64]
    step: NDArray[np.int64]
    time_ns: NDArray[np.int64]
    conclusive: NDArray[np.bool_]

    def take(self, rows: NDArray[np.intp]) -> _SeriesRows:
        return _SeriesRows(self.series[rows], self.step[rows], self.time_ns[rows], self.conclusive[rows])


@dataclass(frozen=True)
class _SortedRows:
    """Rows of the followed series, sorted by series, with their streaks; each column of shape (m,).

    Attributes:
        rows: the rows.
        names: names of the series.
        findings: the rule's findings.
        finding_index: the index of each row's finding, or -1.
        order: the index of each row in the order in which rows were judged.
        heads: the first row of each streak, shape (streaks,).
        streak_of: the streak of each row.
        starts: where each streak begins.
        count: the length of the streak up to each row.
        long_enough: whether the streak is long enough at each row.
    """

    rows: _SeriesRows
    names: list[str]
    findings: Sequence[Finding]
    finding_index: NDArray[np.int64]
    order: NDArray[np.intp]
    heads: NDArray[np.intp]
    streak_of: NDArray[np.intp]
    starts: _StreakStarts
    count: NDArray[np.int64]
    long_enough: NDArray[np.bool_]

    def streak(self, index: int) -> Streak:
        streak = self.streak_of[index]
        return Streak(int(self.count[index]), int(self.starts.step[streak]), int(self.starts.time_ns[streak]))

    def change(self, index: int) -> Change:
        return Change(
            step=int(self.rows.step[index]),
            series=self.names[self.rows.series[index]],
            findings=self.findings,
            finding_index=int(self.finding_index[index]),
            long_enough=bool(self.long_enough[index]),
            streak=self.streak(index),
            row=int(self.order[index]),
            index=index,
        )

    def end(self, index: int) -> SeriesEnd:
        return SeriesEnd(bool(self.finding_index[index] >= 0), self.streak(index), int(self.rows.step[index]))

    def first_after(self, change: Change, step: int) -> Change | None:
        start, following = change.index + 1, self.streak_of[change.index] + 1
        end = self.heads[following] if following < len(self.heads) else len(self.order)
        later = np.flatnonzero(self.rows.step[start:end] > step)
        return self.change(start + int(later[0])) if len(later) else None


def series_of(tensor: str, worker: int, mode: str) -> str:
    """The name of a series: ``tensor@worker/mode``, with a checksum in the place of the end of a long name; or `RUN`."""
    return f"{_short(tensor)}@{worker}/{mode}" if tensor else RUN


_NAME_CHARACTERS = 200
"""Names of tensors may have 4 KiB, and an alert keeps one for each of thousands of series."""


def _short(tensor: str) -> str:
    return tensor if len(tensor) <= _NAME_CHARACTERS else _shortened(tensor)


@functools.lru_cache(maxsize=1024)
def _shortened(tensor: str) -> str:
    checksum = hashlib.sha256(tensor.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{tensor[: _NAME_CHARACTERS - len(checksum)]}~{checksum}"


def follow(
    block: JudgedRows,
    findings: Sequence[Finding],
    open_series: OpenSeries,
    timing: Timing,
    tick: ClockTick | None,
) -> Streaks:
    """Follow the series with findings, and those that the alert remembers, through a block.

    The run as a whole is judged once per step, with the step's last row. With a tick it is judged once, at the tick, and steps do not
    count. A row that arrives after a row of its series with a later step belongs to no streak. Neither does a row that has no finding
    and is not conclusive or, for the run as a whole, a step without a conclusive row.

    Args:
        block: the judged rows.
        findings: the rule's findings for these rows.
        open_series: the state of the series before the block.
        timing: how long a streak must last.
        tick: the tick of a rule that watches the clock.
    """
    finding_names, series = named_series(findings)
    names = list(dict.fromkeys([*finding_names, *open_series.finding_streaks, *open_series.clean_streaks]))
    rows = _rows(block, names, tick)
    finding_index = _finding_indices(rows, series, steps_of(findings))
    counts = np.flatnonzero(rows.conclusive | (finding_index >= 0))
    rows, finding_index = rows.take(counts), finding_index[counts]
    order = np.argsort(rows.series, kind="stable")
    rows, finding_index = rows.take(order), finding_index[order]
    late = _out_of_order(rows, names, open_series)
    out_of_order = [
        _single_row_streak(rows, names, findings, finding_index, timing, index)
        for index in np.flatnonzero(late & (finding_index >= 0)).tolist()
    ]
    rows, finding_index, order = rows.take(np.flatnonzero(~late)), finding_index[~late], order[~late]
    hit = finding_index >= 0

    begins = np.ones(len(order), np.bool_)
    begins[1:] = (rows.series[1:] != rows.series[:-1]) | (hit[1:] != hit[:-1])
    heads = np.flatnonzero(begins)
    before = _streak_starts(rows, hit, heads, names, open_series)
    streak_of = np.cumsum(begins) - 1
    count = np.arange(len(order)) - heads[streak_of] + 1 + before.count[streak_of]
    long_enough = _is_long_enough(hit, count, rows.time_ns - before.time_ns[streak_of], timing)
    if tick is not None:
        long_enough |= _is_long_enough_by_clock(
            rows, names, hit, rows.time_ns - before.time_ns[streak_of], timing
        )
    changed = begins.copy()
    changed[1:] |= long_enough[1:] != long_enough[:-1]
    sorted_rows = _SortedRows(
        rows, names, findings, finding_index, order, heads, streak_of, before, count, long_enough
    )
    places = np.flatnonzero(changed)
    changes = [sorted_rows.change(index) for index in places[np.argsort(order[places])].tolist()]
    last = np.flatnonzero(np.diff(rows.series, append=-1))
    ends = {names[rows.series[index]]: sorted_rows.end(index) for index in last.tolist()}
    return Streaks(changes, out_of_order, ends, tick is not None and RUN in names, sorted_rows)


def named_series(findings: Sequence[Finding]) -> tuple[list[str], NDArray[np.int64]]:
    """The distinct series names of findings, and for each finding the index of its name."""
    if isinstance(findings, FindingRows):
        series, index = findings.series()
        return [series_of(tensor, worker, mode) for tensor, worker, mode in series], index
    index_of: dict[str, int] = {}
    names = [series_of(finding.tensor, finding.worker, finding.mode) for finding in findings]
    index = np.array([index_of.setdefault(name, len(index_of)) for name in names], np.int64)
    return list(index_of), index


def _out_of_order(rows: _SeriesRows, names: list[str], open_series: OpenSeries) -> NDArray[np.bool_]:
    """Rows, sorted by series, that follow a row of their series with a later step."""
    lasts = np.array([open_series.last_steps.get(name, _NO_STEP) for name in names], np.int64)
    steps, places = np.unique(np.concatenate([rows.step, lasts]), return_inverse=True)
    floor = rows.series * len(steps)
    place, last = floor + places[: len(rows.step)], floor + places[len(rows.step) :][rows.series]
    out_of_order: NDArray[np.bool_] = place < np.maximum.accumulate(np.maximum(place, last))
    return out_of_order


def _single_row_streak(
    rows: _SeriesRows,
    names: list[str],
    findings: Sequence[Finding],
    finding_index: NDArray[np.int64],
    timing: Timing,
    index: int,
) -> Change:
    """A finding that forms a streak of its own."""
    step = int(rows.step[index])
    streak = Streak(1, step, int(rows.time_ns[index]))
    long_enough = timing.hold_steps <= 1 and timing.hold_ns <= 0
    return Change(
        step, names[rows.series[index]], findings, int(finding_index[index]), long_enough, streak, -1, index
    )


def _rows(block: JudgedRows, names: list[str], tick: ClockTick | None) -> _SeriesRows:
    row, series = _rows_of_series(block, names)
    conclusive = block.conclusive[row]
    if RUN in names and tick is None and len(block):
        ends = np.flatnonzero(np.append(block.step[1:] != block.step[:-1], True))
        row = np.concatenate([row, ends])
        series = np.concatenate([series, np.full(len(ends), names.index(RUN))])
        by_step = np.logical_or.reduceat(block.conclusive, np.append(0, ends[:-1] + 1))
        conclusive = np.concatenate([conclusive, by_step])
        order = np.argsort(row, kind="stable")
        row, series, conclusive = row[order], series[order], conclusive[order]
    rows = _SeriesRows(series, block.step[row], block.time_ns[row], conclusive)
    if RUN not in names or tick is None:
        return rows
    return _SeriesRows(
        np.append(rows.series, names.index(RUN)),
        np.append(rows.step, tick.step),
        np.append(rows.time_ns, tick.now_ns),
        np.append(rows.conclusive, True),
    )


def _rows_of_series(block: JudgedRows, names: list[str]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Rows of the block that belong to a named series, and the index of the name."""
    place = {_short(info.name): index for index, info in enumerate(block.catalogue)}
    keys, chosen = {}, np.zeros(len(block.catalogue), np.bool_)
    for index, name in enumerate(names):
        tensor, _, rest = name.rpartition("@")
        if tensor not in place:
            continue  # the run as a whole, or a tensor that is not in the block
        worker, _, mode = rest.partition("/")
        keys[place[tensor] << 32 | int(worker) << 4 | MODES.index(mode)] = index
        chosen[place[tensor]] = True
    if not keys or not len(block):
        return np.empty(0, np.intp), np.empty(0, np.int64)
    rows = np.flatnonzero(chosen[block.tensor])
    key = (
        block.tensor[rows].astype(np.int64) << 32
        | block.worker[rows].astype(np.int64) << 4
        | block.mode[rows]
    )
    sorted_keys = np.array(sorted(keys), np.int64)
    index_of = np.array([keys[number] for number in sorted_keys.tolist()], np.int64)
    at = np.minimum(np.searchsorted(sorted_keys, key), len(sorted_keys) - 1)
    matched = sorted_keys[at] == key
    return rows[matched], index_of[at[matched]]


def _finding_indices(
    rows: _SeriesRows, series: NDArray[np.int64], step: NDArray[np.int64]
) -> NDArray[np.int64]:
    """For each row the index of its finding, or -1; of several findings for one step and series, the last.

    Args:
        rows: the rows.
        series: the series of each finding, an index into the names of the series.
        step: the step of each finding.
    """
    finding_index = np.full(len(rows.step), -1, np.int64)
    if not len(step) or not len(finding_index):
        return finding_index
    steps = np.unique(step)
    width = len(steps)
    keys = series * width + np.searchsorted(steps, step)
    at = np.minimum(np.searchsorted(steps, rows.step), width - 1)
    wanted = rows.series * width + at
    order = np.argsort(keys, kind="stable")
    last = np.searchsorted(keys[order], wanted, side="right") - 1
    matched = (steps[at] == rows.step) & (last >= 0) & (keys[order[last]] == wanted)
    finding_index[matched] = order[last[matched]]
    return finding_index


def _streak_starts(
    rows: _SeriesRows,
    hit: NDArray[np.bool_],
    heads: NDArray[np.intp],
    names: list[str],
    open_series: OpenSeries,
) -> _StreakStarts:
    """The starts of streaks; the first streak of each series may continue one from before the block."""
    starts = _StreakStarts(np.zeros(len(heads), np.int64), rows.step[heads], rows.time_ns[heads])
    series = rows.series[heads]
    for place in np.flatnonzero(np.diff(series, prepend=-1)).tolist():
        earlier = (open_series.finding_streaks if hit[heads[place]] else open_series.clean_streaks).get(
            names[series[place]], NONE
        )
        if earlier.steps:
            starts.count[place], starts.step[place], starts.time_ns[place] = earlier
    return starts


def _is_long_enough(
    hit: NDArray[np.bool_], count: NDArray[np.int64], lasted_ns: NDArray[np.int64], timing: Timing
) -> NDArray[np.bool_]:
    steps = np.where(hit, timing.hold_steps, timing.keep_steps)
    return (count >= steps) & (lasted_ns >= np.where(hit, timing.hold_ns, timing.keep_ns))


def _is_long_enough_by_clock(
    rows: _SeriesRows, names: list[str], hit: NDArray[np.bool_], lasted_ns: NDArray[np.int64], timing: Timing
) -> NDArray[np.bool_]:
    run = rows.series == (names.index(RUN) if RUN in names else -1)
    long_enough: NDArray[np.bool_] = run & (lasted_ns >= np.where(hit, timing.hold_ns, timing.keep_ns))
    return long_enough
