"""The life of an alert, row by row with nothing clever: what `watchstep_rules.judging.alert` must say as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from watchstep.block import Block
from watchstep_rules.finding import Finding
from watchstep_rules.judging.alert import Phase, Transition
from watchstep_rules.judging.streaks import RUN, Streak, Tick, Timing, series_of


@dataclass
class Series:
    """Of one series: whether its last judged row had a finding, and since when that is so."""

    bad: bool
    count: int
    step: int
    time_ns: int
    lasts_ns: int = 0

    def long_enough(self, timing: Timing, *, by_clock: bool) -> bool:
        steps, lasts_ns = (
            (timing.hold_steps, timing.hold_ns) if self.bad else (timing.keep_steps, timing.keep_ns)
        )
        return (by_clock or self.count >= steps) and self.lasts_ns >= lasts_ns


@dataclass
class PlainAlert:
    """An alert that is told every row."""

    timing: Timing
    phase: Phase = Phase.INACTIVE
    finding: Finding | None = None
    fired_at: int = -1
    since: Streak = field(default_factory=lambda: Streak(0, 0, 0))
    series: dict[str, Series] = field(default_factory=dict)
    fired: set[str] = field(default_factory=set)
    transitions: list[Transition] = field(default_factory=list)
    clock: bool = False
    closed: int = -1

    def judge(self, block: Block, findings: Sequence[Finding], tick: Tick | None = None) -> None:
        self.clock = tick is not None
        said = {(f.step, series_of(f.tensor, f.worker, f.mode)): f for f in findings}
        about_run = any(not f.tensor for f in findings) or RUN in self.series
        ripe: list[tuple[Finding, Streak]] = []
        places = [
            (int(block.step[row]), int(block.worker[row]), int(block.mode[row])) for row in range(len(block))
        ]
        for row, place in enumerate(places):
            step, time_ns = place[0], int(block.time_ns[row])
            name = series_of(block.info(row).name, place[1], block.mode_name(row))
            self._row(name, step, time_ns, said.get((step, name)), ripe)
            following = places[row + 1] if row + 1 < len(places) else None
            if tick is None and about_run and (following is None or following[0] != step):
                self._row(RUN, step, time_ns, said.get((step, RUN)), ripe)
            if following != place:
                self._settle(step, ripe, over=step <= self.closed)
                ripe = []
        if tick is not None:
            last = next((f for f in reversed(findings) if not f.tensor), None)
            self._row(RUN, tick.step, tick.now_ns, last, ripe)
            self._settle(tick.step, ripe, over=False)

    def _row(
        self,
        name: str,
        step: int,
        time_ns: int,
        finding: Finding | None,
        ripe: list[tuple[Finding, Streak]],
    ) -> None:
        bad = finding is not None
        held = self.series.get(name)
        if held is None or held.bad != bad:
            held = self.series[name] = Series(bad, 0, step, time_ns)
        held.count += 1
        held.lasts_ns = time_ns - held.time_ns
        over = step <= self.closed and not self._by_clock(name)
        if finding is not None and not over and held.long_enough(self.timing, by_clock=self._by_clock(name)):
            self.fired.add(name)
            ripe.append((finding, Streak(held.count, held.step, held.time_ns)))

    def _by_clock(self, name: str) -> bool:
        return self.clock and name == RUN

    def _settle(self, step: int, ripe: list[tuple[Finding, Streak]], *, over: bool) -> None:
        bad = any(series.bad for series in self.series.values())
        if self.phase is Phase.FIRING:
            self._revise(ripe)
            fired = [(name, self.series[name]) for name in self.fired]
            if all(
                not one.bad and one.long_enough(self.timing, by_clock=self._by_clock(name))
                for name, one in fired
            ):
                self.closed = max(self.closed, self.fired_at, step, *(one.step for _, one in fired))
                self.fired = set()
                self._go(Phase.RESOLVED, step)
        elif ripe:
            self.finding, self.since = min(ripe, key=_likelihood)
            self.fired_at = step
            self._go(Phase.FIRING, step)
        elif bad and self.phase is not Phase.PENDING:
            if not over:
                self._go(Phase.PENDING, step)
        elif not bad and self.phase is Phase.PENDING:
            self._go(Phase.INACTIVE, step)

    def _revise(self, ripe: list[tuple[Finding, Streak]]) -> None:
        if self.finding is None or not ripe:
            return
        found = min(ripe, key=_likelihood)
        if _likelihood(found) < _likelihood((self.finding, self.since)):
            self.finding, self.since = found
            since = (self.since.first, self.since.time_ns)
            self.transitions.append(
                Transition(Phase.FIRING, self.fired_at, self.finding, *since, revised=True)
            )

    def _go(self, phase: Phase, step: int) -> None:
        self.phase = phase
        if phase in (Phase.FIRING, Phase.RESOLVED):
            since = self.since
            self.transitions.append(Transition(phase, step, self.finding, since.first, since.time_ns))
        else:
            self.transitions.append(Transition(phase, step, None, step, 0))


def _likelihood(found: tuple[Finding, Streak]) -> tuple[int, tuple[int, int], int]:
    return found[0].step, found[0].cause_rank, found[0].worker
