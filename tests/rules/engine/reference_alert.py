"""A row-by-row reference of the alert state machine, for comparison with `watchstep_rules.engine.alert`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from watchstep.format.tensors import MODES
from watchstep_rules.config.rule_config import Timing
from watchstep_rules.engine.alert import Phase, Transition
from watchstep_rules.engine.streaks import RUN, ClockTick, JudgedRows, Streak, series_of
from watchstep_rules.rule import Finding


@dataclass
class Series:
    """Of one series: whether its last judged row had a finding, and since when that is so."""

    bad: bool
    count: int
    step: int
    time_ns: int
    last: int
    lasts_ns: int = 0

    def long_enough(self, timing: Timing, *, by_clock: bool) -> bool:
        steps, lasts_ns = (
            (timing.hold_steps, timing.hold_ns) if self.bad else (timing.keep_steps, timing.keep_ns)
        )
        return (by_clock or self.count >= steps) and self.lasts_ns >= lasts_ns


@dataclass(frozen=True)
class Judged:
    """The judgement of a row, and why the alert may fire for it."""

    step: int
    name: str
    bad: bool
    enough: bool
    why: tuple[Finding, Streak] | None = None


@dataclass
class PlainAlert:
    """An alert that receives every row, then processes them step by step; no row is late."""

    timing: Timing
    phase: Phase = Phase.INACTIVE
    finding: Finding | None = None
    since: Streak = field(default_factory=lambda: Streak(0, 0, 0))
    series: dict[str, Series] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    firing: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    transitions: list[Transition] = field(default_factory=list)
    clock: bool = False
    closed: int = -1

    def judge(self, judged: JudgedRows, findings: Sequence[Finding], tick: ClockTick | None = None) -> None:
        self.clock = tick is not None
        by_series = {(f.step, series_of(f.tensor, f.worker, f.mode)): f for f in findings}
        about_run = any(not f.tensor for f in findings) or RUN in self.series
        rows: list[Judged] = []
        behind: list[tuple[str, int, int, Finding]] = []
        steps = judged.step.tolist()
        conclusive_step = False
        for row, step in enumerate(steps):
            time_ns = int(judged.time_ns[row])
            tensor = judged.catalogue[judged.tensor[row]].name
            conclusive = bool(judged.conclusive[row])
            names = {series_of(tensor, int(judged.worker[row]), MODES[judged.mode[row]]): conclusive}
            conclusive_step |= conclusive
            if steps[row + 1 : row + 2] != [step]:
                if tick is None and about_run:
                    names[RUN] = conclusive_step
                conclusive_step = False
            for name, counts in names.items():
                found = by_series.get((step, name))
                if found is None and not counts:
                    continue
                if name in self.series and step < self.series[name].last:
                    behind += [] if found is None else [(name, step, time_ns, found)]
                else:
                    rows.append(self._row(name, step, time_ns, found))
        for late_row in behind:
            rows += self._behind(*late_row)
        rows.sort(key=lambda row: row.step)
        for step in dict.fromkeys(row.step for row in rows):
            self._step(step, [row for row in rows if row.step == step])
        if tick is not None:
            last = next((f for f in reversed(findings) if not f.tensor), None)
            self._step(tick.step, [self._row(RUN, tick.step, tick.now_ns, last)])

    def _row(self, name: str, step: int, time_ns: int, finding: Finding | None) -> Judged:
        bad, by_clock = finding is not None, self.clock and name == RUN
        current = self.series.get(name)
        if current is None or current.bad != bad:
            current = self.series[name] = Series(bad, 0, step, time_ns, step)
        current.count += 1
        current.last = step
        current.lasts_ns = time_ns - current.time_ns
        enough = current.long_enough(self.timing, by_clock=by_clock)
        why = (finding, Streak(current.count, current.step, current.time_ns)) if finding and enough else None
        return Judged(step, name, bad, enough, why)

    def _behind(self, name: str, step: int, time_ns: int, finding: Finding) -> list[Judged]:
        if self.timing.hold_steps > 1 or self.timing.hold_ns > 0:
            return []
        current = self.series[name]
        rows = [Judged(step, name, True, True, (finding, Streak(1, step, time_ns)))]
        if not current.bad:
            enough = current.count >= self.timing.keep_steps and not self.timing.keep_ns
            rows.append(Judged(current.last, name, False, enough))
        return rows

    def _step(self, step: int, rows: list[Judged]) -> None:
        fired = bool(self.firing)
        for row in rows:
            (self.bad.add if row.bad else self.bad.discard)(row.name)
            if row.bad and row.enough:
                self.firing.add(row.name)
            if not row.bad and row.enough and row.name in self.firing:
                self.settled.add(row.name)
            else:
                self.settled.discard(row.name)
        if self.firing and not fired:
            self.finding, self.since = min((row.why for row in rows if row.why), key=_likelihood)
            self._go(Phase.FIRING, step)
        if self.firing and self.settled == self.firing:
            self.closed = max(self.closed, step)
            self.firing, self.settled = set(), set()
            self._go(Phase.RESOLVED, step)
        if not self.firing and self.bad and self.phase is not Phase.PENDING:
            self._go(Phase.PENDING, step)
        elif not self.firing and not self.bad and self.phase is Phase.PENDING:
            self._go(Phase.INACTIVE, step)

    def _go(self, phase: Phase, step: int) -> None:
        self.phase = phase
        if phase in (Phase.FIRING, Phase.RESOLVED):
            since = self.since
            self.transitions.append(Transition(phase, step, self.finding, since.first, since.time_ns))
        else:
            self.transitions.append(Transition(phase, step, None, step, 0))


def _likelihood(found: tuple[Finding, Streak]) -> tuple[int, tuple[int, int], int]:
    return found[0].step, found[0].cause_rank, found[0].worker
