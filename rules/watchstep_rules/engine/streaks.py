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
_NO_STEP = -(1 << 62)


@dataclass(frozen=True)
class ClockTick:
    """An evaluation of a rule that watches the clock: the last step that was seen, and the clock, nanoseconds."""

    step: int
    now_ns: int


@dataclass(frozen=True)
class Known:
    """Series as they stood before a block.

    Attributes:
        hits: of those with a finding at their last judged step, the streak of findings.
        clean: of others that matter, the streak without.
        last: the last judged step of each; of one that is not here, it is not known.
    """

    hits: dict[str, Streak]
    clean: dict[str, Streak]
    last: dict[str, int]


@dataclass(frozen=True)
class JudgedRows:
    """What an alert needs to know of judged rows, each column of shape (n,), as in `Block`; views, not copies."""

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
            conclusive: those that count for their series also without a finding, bool, shape (n,); None for all.
        """
        every = np.ones(len(block), np.bool_) if conclusive is None else conclusive
        return cls(block.step, block.worker, block.mode, block.time_ns, block.tensor, every, block.catalogue)

    def part(self, rows: slice) -> JudgedRows:
        """Rows that stand together."""
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
    """A row at which a series' streak begins, or comes to be long enough.

    Attributes:
        step: of the row.
        series: which series.
        findings: what the rule said of the block,
        found: and the place of what was found there, or -1.
        enough: the streak is as long as `Timing` asks.
        since: the streak up to here.
        row: its place among the rows that matter, as they came,
        line: and series by series.
    """

    step: int
    series: str
    findings: Sequence[Finding]
    found: int
    enough: bool
    since: Streak
    row: int
    line: int

    @property
    def bad(self) -> bool:
        """Whether something was found there."""
        return self.found >= 0

    @property
    def finding(self) -> Finding:
        """What was found there; only where something was."""
        return self.findings[self.found]

    @property
    def likelihood(self) -> Likelihood:
        """That of what was found there."""
        return likelihood_of(self.findings, self.found)


@dataclass(frozen=True)
class End:
    """A series after its last row of a block: whether that had a finding, the streak, and the step."""

    bad: bool
    streak: Streak
    step: int


@dataclass(frozen=True)
class Streaks:
    """What a block does to the streaks of an alert.

    Attributes:
        changes: in the order of the rows.
        behind: findings of rows that came after rows of their own series about a later step; no streak counts these.
        ends: of each series with rows in the block.
        ticked: the last of the changes is that of a tick, which comes when it comes and is about no step.
        lines: all rows of the series that matter.
    """

    changes: list[Change]
    behind: list[Change]
    ends: dict[str, End]
    ticked: bool
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

    series: NDArray[np.int64]
    step: NDArray[np.int64]
    time_ns: NDArray[np.int64]
    conclusive: NDArray[np.bool_]

    def take(self, rows: NDArray[np.intp]) -> _Rows:
        return _Rows(self.series[rows], self.step[rows], self.time_ns[rows], self.conclusive[rows])


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
        return Change(
            step=int(self.rows.step[line]),
            series=self.names[self.rows.series[line]],
            findings=self.findings,
            found=int(self.found[line]),
            enough=bool(self.enough[line]),
            since=self.streak(line),
            row=int(self.order[line]),
            line=line,
        )

    def end(self, line: int) -> End:
        return End(bool(self.found[line] >= 0), self.streak(line), int(self.rows.step[line]))

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
    known: Known,
    timing: Timing,
    tick: ClockTick | None,
) -> Streaks:
    """Follow the series that matter through a block.

    The run as a whole is judged once for each step, with the step's last row; where a tick is given, once, at the tick, and
    steps do not count for it. A row that comes after one of its own series about a later step is in no streak. Neither is one without a
    finding that is not conclusive; of the run as a whole, a step without a conclusive row.

    Args:
        block: the judged rows.
        findings: what the rule said of them.
        known: the series as they stood before.
        timing: how long is enough.
        tick: of a rule that watches the clock.
    """
    of_findings, series = _series(findings)
    names = list(dict.fromkeys([*of_findings, *known.hits, *known.clean]))
    rows = _rows(block, names, tick)
    found = _matched(rows, series, steps_of(findings))
    counts = np.flatnonzero(rows.conclusive | (found >= 0))
    rows, found = rows.take(counts), found[counts]
    order = np.argsort(rows.series, kind="stable")
    rows, found = rows.take(order), found[order]
    late = _behind(rows, names, known)
    behind = [
        _alone(rows, names, findings, found, timing, line)
        for line in np.flatnonzero(late & (found >= 0)).tolist()
    ]
    rows, found, order = rows.take(np.flatnonzero(~late)), found[~late], order[~late]
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
    changed[1:] |= enough[1:] != enough[:-1]
    lines = _Lines(rows, names, findings, found, order, heads, which, before, count, enough)
    places = np.flatnonzero(changed)
    changes = [lines.change(line) for line in places[np.argsort(order[places])].tolist()]
    last = np.flatnonzero(np.diff(rows.series, append=-1))
    ends = {names[rows.series[line]]: lines.end(line) for line in last.tolist()}
    return Streaks(changes, behind, ends, tick is not None and RUN in names, lines)


def _series(findings: Sequence[Finding]) -> tuple[list[str], NDArray[np.int64]]:
    """The names of the series that findings are about, each once, and of each finding which it is."""
    if isinstance(findings, FindingRows):
        named, which = findings.series()
        return [series_of(*one) for one in named], which
    place: dict[str, int] = {}
    of = [series_of(finding.tensor, finding.worker, finding.mode) for finding in findings]
    which = np.array([place.setdefault(name, len(place)) for name in of], np.int64)
    return list(place), which


def _behind(rows: _Rows, names: list[str], known: Known) -> NDArray[np.bool_]:
    """Which rows, series by series, come after one of their series that is about a later step."""
    lasts = np.array([known.last.get(name, _NO_STEP) for name in names], np.int64)
    steps, places = np.unique(np.concatenate([rows.step, lasts]), return_inverse=True)
    floor = rows.series * len(steps)
    place, last = floor + places[: len(rows.step)], floor + places[len(rows.step) :][rows.series]
    behind: NDArray[np.bool_] = place < np.maximum.accumulate(np.maximum(place, last))
    return behind


def _alone(
    rows: _Rows,
    names: list[str],
    findings: Sequence[Finding],
    found: NDArray[np.int64],
    timing: Timing,
    line: int,
) -> Change:
    """A finding that is a streak by itself."""
    step = int(rows.step[line])
    since = Streak(1, step, int(rows.time_ns[line]))
    enough = timing.hold_steps <= 1 and timing.hold_ns <= 0
    return Change(step, names[rows.series[line]], findings, int(found[line]), enough, since, -1, line)


def _rows(block: JudgedRows, names: list[str], tick: ClockTick | None) -> _Rows:
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
    rows = _Rows(series, block.step[row], block.time_ns[row], conclusive)
    if RUN not in names or tick is None:
        return rows
    return _Rows(
        np.append(rows.series, names.index(RUN)),
        np.append(rows.step, tick.step),
        np.append(rows.time_ns, tick.now_ns),
        np.append(rows.conclusive, True),
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


def _matched(rows: _Rows, series: NDArray[np.int64], step: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row the place of its finding, or -1; of several about one step and series, the last.

    Args:
        rows: the rows.
        series: of each finding, an index into the names of the series.
        step: of each finding.
    """
    found = np.full(len(rows.step), -1, np.int64)
    if not len(step) or not len(found):
        return found
    steps = np.unique(step)
    width = len(steps)
    keys = series * width + np.searchsorted(steps, step)
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
    known: Known,
) -> _Begun:
    """The beginnings of streaks; the first of each series may go on from before the block."""
    begun = _Begun(np.zeros(len(heads), np.int64), rows.step[heads], rows.time_ns[heads])
    series = rows.series[heads]
    for place in np.flatnonzero(np.diff(series, prepend=-1)).tolist():
        held = (known.hits if hit[heads[place]] else known.clean).get(names[series[place]], NONE)
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
