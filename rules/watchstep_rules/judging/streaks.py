"""Streaks: how often in a row each series had findings, or had none, over whole columns.

Only series that matter to an alert are looked at: those with a finding in the block, and those that it remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.block import Block
from watchstep.tensors import MODES, TensorInfo
from watchstep_rules.finding import Finding

RUN = "run"
"""The series of findings about the run as a whole, those without a tensor."""


class Streak(NamedTuple):
    """Judged steps in a row that are alike: all with a finding, or all without.

    Attributes:
        steps: how many.
        first: the first of them.
        time_ns: when that was, by the clock of the row.
    """

    steps: int
    first: int
    time_ns: int


NONE = Streak(0, 0, 0)


@dataclass(frozen=True)
class Timing:
    """How long findings last before an alert fires, and how long a series is clean before it is resolved.

    Attributes:
        hold_steps: so many judged steps with findings in a row,
        hold_ns: and so many nanoseconds from the first of them to the last.
        keep_steps: so many judged steps without,
        keep_ns: and so many nanoseconds from the first of them to the last.
    """

    hold_steps: int = 1
    hold_ns: int = 0
    keep_steps: int = 1
    keep_ns: int = 0


@dataclass(frozen=True)
class Tick:
    """An evaluation of a rule that watches the clock: the last step that was seen, and the clock, nanoseconds."""

    step: int
    now_ns: int


@dataclass(frozen=True)
class JudgedRows:
    """What an alert needs to know of judged rows, each column of shape (n,), as in `Block`; views, not copies."""

    step: NDArray[np.int64]
    worker: NDArray[np.int32]
    mode: NDArray[np.int8]
    time_ns: NDArray[np.int64]
    tensor: NDArray[np.int32]
    catalogue: tuple[TensorInfo, ...]

    def __len__(self) -> int:
        return len(self.step)

    @classmethod
    def of(cls, block: Block, rows: slice) -> JudgedRows:
        """Rows of a block that stand together."""
        return cls(
            block.step[rows],
            block.worker[rows],
            block.mode[rows],
            block.time_ns[rows],
            block.tensor[rows],
            block.catalogue,
        )


@dataclass(frozen=True)
class Change:
    """A row at which a series' streak begins, or comes to be long enough; or that came late: after a later step's.

    Attributes:
        group: which group of rows it is in; an alert moves at the end of a group.
        series: which series.
        finding: what was found there, if anything.
        enough: the streak is as long as `Timing` asks.
        since: the streak up to here.
        row: its place among all rows of the series that matter, as they were judged,
        line: and series by series.
    """

    group: int
    series: str
    finding: Finding | None
    enough: bool
    since: Streak
    row: int
    line: int


@dataclass(frozen=True)
class Streaks:
    """What a block does to the streaks of an alert.

    Attributes:
        changes: in the order of the rows.
        ends: of each series with rows in the block, the streak at its last one, and whether it is of findings.
        steps: of each group, its step, int64.
        tick: the group that a tick is, -1 for none; it comes when it comes, and is about no step.
        lines: all rows of the series that matter.
    """

    changes: list[Change]
    ends: dict[str, tuple[bool, Streak]]
    steps: NDArray[np.int64]
    tick: int
    lines: _Lines

    def beyond(self, change: Change, step: int) -> Change | None:
        """After a change, the first row of the same streak that is about a later step than this one; None if none is."""
        return self.lines.beyond(change, step)


@dataclass(frozen=True)
class _Begun:
    """Of each streak in a block: how much of it lies before the block, and when it began; shape (streaks,)."""

    count: NDArray[np.int64]
    step: NDArray[np.int64]
    time_ns: NDArray[np.int64]


@dataclass(frozen=True)
class _Rows:
    """Rows of the series that matter, in the order in which they were judged; each column of shape (m,)."""

    group: NDArray[np.int64]
    series: NDArray[np.int64]
    step: NDArray[np.int64]
    time_ns: NDArray[np.int64]

    def take(self, rows: NDArray[np.intp]) -> _Rows:
        return _Rows(self.group[rows], self.series[rows], self.step[rows], self.time_ns[rows])


@dataclass(frozen=True)
class _Lines:
    """Rows of the series that matter, series by series, with the streaks that they are in; each column of shape (m,).

    Attributes:
        rows: the rows.
        names: of the series.
        findings: what the rule said.
        found: the place of each row's finding, or -1.
        order: the place of each among the rows as they were judged.
        heads: the first row of each streak, shape (streaks,).
        which: the streak that each is in.
        begun: the streaks.
        count: rows of the streak up to each.
        enough: the streak is long enough there.
    """

    rows: _Rows
    names: list[str]
    findings: Sequence[Finding]
    found: NDArray[np.int64]
    order: NDArray[np.intp]
    heads: NDArray[np.intp]
    which: NDArray[np.intp]
    begun: _Begun
    count: NDArray[np.int64]
    enough: NDArray[np.bool_]

    def streak(self, line: int) -> Streak:
        run = self.which[line]
        return Streak(int(self.count[line]), int(self.begun.step[run]), int(self.begun.time_ns[run]))

    def change(self, line: int) -> Change:
        found = self.found[line]
        return Change(
            group=int(self.rows.group[line]),
            series=self.names[self.rows.series[line]],
            finding=self.findings[found] if found >= 0 else None,
            enough=bool(self.enough[line]),
            since=self.streak(line),
            row=int(self.order[line]),
            line=line,
        )

    def beyond(self, one: Change, step: int) -> Change | None:
        start, run = one.line + 1, self.which[one.line] + 1
        end = self.heads[run] if run < len(self.heads) else len(self.order)
        later = np.flatnonzero(self.rows.step[start:end] > step)
        return self.change(start + int(later[0])) if len(later) else None


def series_of(tensor: str, worker: int, mode: str) -> str:
    """The name of a series."""
    return f"{tensor}@{worker}/{mode}" if tensor else RUN


def follow(
    block: JudgedRows,
    findings: Sequence[Finding],
    known: tuple[dict[str, Streak], dict[str, Streak]],
    timing: Timing,
    tick: Tick | None,
) -> Streaks:
    """Follow the series that matter through a block.

    Rows of one (step, worker, mode) that stand together are a group. The run as a whole is judged once for each step,
    with the step's last group; where a tick is given, once, at the tick, in a group of its own, and steps do not
    count for it.

    Args:
        block: the judged rows.
        findings: what the rule said of them.
        known: streaks of findings, and streaks without, as they stood before.
        timing: how long is enough.
        tick: of a rule that watches the clock.
    """
    hits, clean = known
    names = list(dict.fromkeys([*map(_series_of, findings), *hits, *clean]))
    first, steps = _groups(block, tick)
    rows = _rows(block, names, first, tick)
    found = _matched(rows, names, findings)
    order = np.argsort(rows.series, kind="stable")
    rows, found = rows.take(order), found[order]
    hit = found >= 0

    begins = np.ones(len(order), np.bool_)
    begins[1:] = (rows.series[1:] != rows.series[:-1]) | (hit[1:] != hit[:-1])
    heads = np.flatnonzero(begins)
    before = _carried(rows, hit, heads, names, known)
    which = np.cumsum(begins) - 1
    count = np.arange(len(order)) - heads[which] + 1 + before.count[which]
    enough = _enough(hit, count, rows.time_ns - before.time_ns[which], timing)
    if tick is not None:
        enough |= _enough_by_clock(rows, names, hit, rows.time_ns - before.time_ns[which], timing)
    changed = begins.copy()
    changed[1:] |= (enough[1:] != enough[:-1]) | (rows.step[1:] < rows.step[:-1])
    lines = _Lines(rows, names, findings, found, order, heads, which, before, count, enough)
    places = np.flatnonzero(changed)
    changes = [lines.change(line) for line in places[np.argsort(order[places])].tolist()]
    last = np.flatnonzero(np.diff(rows.series, append=-1))
    ends = {names[rows.series[line]]: (bool(hit[line]), lines.streak(line)) for line in last.tolist()}
    return Streaks(changes, ends, steps, -1 if tick is None else len(first), lines)


def _series_of(finding: Finding) -> str:
    return series_of(finding.tensor, finding.worker, finding.mode)


def _groups(block: JudgedRows, tick: Tick | None) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """The first row of each group, and the step of each."""
    begins = np.ones(len(block), np.bool_)
    begins[1:] = (
        (block.step[1:] != block.step[:-1])
        | (block.worker[1:] != block.worker[:-1])
        | (block.mode[1:] != block.mode[:-1])
    )
    first = np.flatnonzero(begins)
    steps = block.step[first]
    return first, steps if tick is None else np.append(steps, tick.step)


def _rows(block: JudgedRows, names: list[str], first: NDArray[np.intp], tick: Tick | None) -> _Rows:
    row, series = _rows_of_series(block, names)
    if RUN in names and tick is None and len(block):
        ends = np.flatnonzero(np.append(block.step[1:] != block.step[:-1], True))
        row = np.concatenate([row, ends])
        series = np.concatenate([series, np.full(len(ends), names.index(RUN))])
        order = np.argsort(row, kind="stable")
        row, series = row[order], series[order]
    group = np.searchsorted(first, row, side="right") - 1
    rows = _Rows(group, series, block.step[row], block.time_ns[row])
    if RUN not in names or tick is None:
        return rows
    return _Rows(
        np.append(rows.group, len(first)),
        np.append(rows.series, names.index(RUN)),
        np.append(rows.step, tick.step),
        np.append(rows.time_ns, tick.now_ns),
    )


def _rows_of_series(block: JudgedRows, names: list[str]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Which rows of the block belong to a named series, and the place of its name."""
    place = {info.name: index for index, info in enumerate(block.catalogue)}
    keys, chosen = {}, np.zeros(len(block.catalogue), np.bool_)
    for index, name in enumerate(names):
        tensor, _, rest = name.rpartition("@")
        if tensor not in place:
            continue  # the run as a whole, or a tensor that the block does not hold
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
    known = np.array(sorted(keys), np.int64)
    index_of = np.array([keys[number] for number in known.tolist()], np.int64)
    at = np.minimum(np.searchsorted(known, key), len(known) - 1)
    held = known[at] == key
    return rows[held], index_of[at[held]]


def _matched(rows: _Rows, names: list[str], findings: Sequence[Finding]) -> NDArray[np.int64]:
    """For each row the place of its finding, or -1; of several about one step and series, the last."""
    found = np.full(len(rows.step), -1, np.int64)
    if not findings or not len(found):
        return found
    index = {name: place for place, name in enumerate(names)}
    steps = np.unique(np.array([finding.step for finding in findings], np.int64))
    width = len(steps)
    step = np.searchsorted(steps, [finding.step for finding in findings])
    keys = np.array([index[_series_of(finding)] for finding in findings], np.int64) * width + step
    at = np.minimum(np.searchsorted(steps, rows.step), width - 1)
    wanted = rows.series * width + at
    order = np.argsort(keys, kind="stable")
    last = np.searchsorted(keys[order], wanted, side="right") - 1
    held = (steps[at] == rows.step) & (last >= 0) & (keys[order[last]] == wanted)
    found[held] = order[last[held]]
    return found


def _carried(
    rows: _Rows,
    hit: NDArray[np.bool_],
    heads: NDArray[np.intp],
    names: list[str],
    known: tuple[dict[str, Streak], dict[str, Streak]],
) -> _Begun:
    """The beginnings of streaks; the first of each series may go on from before the block."""
    hits, clean = known
    begun = _Begun(np.zeros(len(heads), np.int64), rows.step[heads], rows.time_ns[heads])
    series = rows.series[heads]
    for place in np.flatnonzero(np.diff(series, prepend=-1)).tolist():
        held = (hits if hit[heads[place]] else clean).get(names[series[place]], NONE)
        if held.steps:
            begun.count[place], begun.step[place], begun.time_ns[place] = held
    return begun


def _enough(
    hit: NDArray[np.bool_], count: NDArray[np.int64], lasted_ns: NDArray[np.int64], timing: Timing
) -> NDArray[np.bool_]:
    steps = np.where(hit, timing.hold_steps, timing.keep_steps)
    return (count >= steps) & (lasted_ns >= np.where(hit, timing.hold_ns, timing.keep_ns))


def _enough_by_clock(
    rows: _Rows, names: list[str], hit: NDArray[np.bool_], lasted_ns: NDArray[np.int64], timing: Timing
) -> NDArray[np.bool_]:
    run = rows.series == (names.index(RUN) if RUN in names else -1)
    enough: NDArray[np.bool_] = run & (lasted_ns >= np.where(hit, timing.hold_ns, timing.keep_ns))
    return enough
