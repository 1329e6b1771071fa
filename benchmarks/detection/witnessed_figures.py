"""What results of witnessed programs are worth: alarms and wrong stops on healthy runs, faults found and their delay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.detection.isolated import Alarm, Result
from benchmarks.detection.own import Part
from benchmarks.detection.witnessed import Witnessed
from benchmarks.report import Figure
from benchmarks.report import Report as Figures

ALARMS_A_RUN = 0.05
FOUND = 0.80
DELAY_STEPS = 10.0


@dataclass
class Tally:
    """Counts over runs.

    Attributes:
        healthy: healthy runs.
        alarms: different rules with an alert of severity warning or critical in a healthy run, over all of them.
        flagged: healthy runs with any of these.
        notes: the same of severity info, which warn of nothing.
        stopped: healthy runs that an alert would have stopped.
        faulty: runs with a fault.
        delays: of those that were found, steps from the onset to the first accepted alert.
        early: alerts of warning or critical before the onset, each rule once a run.
        unexpected: what programs measured of themselves that is not as they say it must be.
    """

    healthy: int = 0
    alarms: int = 0
    flagged: int = 0
    notes: int = 0
    stopped: int = 0
    faulty: int = 0
    delays: list[int] = field(default_factory=list)
    early: int = 0
    unexpected: list[str] = field(default_factory=list)

    @property
    def found(self) -> float:
        """Share of faults that were found."""
        return len(self.delays) / max(1, self.faulty)


def counted(results: Iterable[Result], programs: dict[str, Witnessed]) -> Tally:
    """All counts. A program that failed counts as unexpected, and not as a run."""
    tally = Tally()
    for result in results:
        program = programs[result.program]
        tally.unexpected += [f"{result.program} {result.seed}: {words}" for words in result.unexpected]
        if result.failure:
            continue
        loud = [alarm for alarm in result.alarms if alarm.severity != "info"]
        if result.faulty:
            tally.faulty += 1
            tally.early += len({alarm.rule for alarm in loud if alarm.step < program.onset})
            first = delay_of(result, program)
            tally.delays += [] if first is None else [first]
            continue
        rules = {alarm.rule for alarm in loud}
        tally.healthy += 1
        tally.alarms += len(rules)
        tally.flagged += bool(rules)
        tally.notes += len({alarm.rule for alarm in result.alarms} - rules)
        tally.stopped += any(alarm.stops for alarm in result.alarms)
    return tally


def delay_of(result: Result, program: Witnessed) -> int | None:
    """Steps from the onset to the first alert of an accepted rule; None where there is none."""
    right = [
        alarm.step
        for alarm in result.alarms
        if alarm.rule in program.accepted and alarm.step >= program.onset
    ]
    return min(right) - program.onset if right else None


def add_difficult(figures: Figures, title: str, tally: Tally, *, targets: bool) -> None:
    """Figures of difficult healthy programs."""
    note = f"{tally.flagged} of {tally.healthy} runs flagged, {tally.notes} more notes of severity info"
    figures.add(
        f"{title}/alarms",
        Figure(tally.alarms / max(1, tally.healthy), "a run", ALARMS_A_RUN if targets else None, note=note),
    )
    figures.add(f"{title}/wrong stops", Figure(tally.stopped, "runs", 0.0 if targets else None))
    _add_unexpected(figures, title, tally)


def add_mid_run(figures: Figures, title: str, tally: Tally, *, targets: bool) -> None:
    """Figures of faults that begin in the middle, and of their sound twins."""
    note = f"{len(tally.delays)} of {tally.faulty} runs; {tally.early} alarms before the onset"
    figures.add(f"{title}/found", Figure(tally.found, "ratio", FOUND if targets else None, "at least", note))
    delay = median(tally.delays) if tally.delays else None
    figures.add(f"{title}/delay", Figure(delay, "steps, median", DELAY_STEPS if targets else None))
    figures.add(
        f"{title}/alarms of sound twins",
        Figure(
            tally.alarms / max(1, tally.healthy), "a run", note=f"{tally.flagged} of {tally.healthy} flagged"
        ),
    )
    figures.add(
        f"{title}/wrong stops of sound twins", Figure(tally.stopped, "runs", 0.0 if targets else None)
    )
    _add_unexpected(figures, title, tally)


def _add_unexpected(figures: Figures, title: str, tally: Tally) -> None:
    """Programs that are not what they claim to be make all other figures worthless."""
    figures.add(f"{title}/not as the program claims", Figure(len(tally.unexpected), "measures", 0.0))


def lines(results: Sequence[Result], program: Witnessed) -> list[str]:
    """What became of one program, a line for each run and for each alarm."""
    told = []
    for result in results:
        kind = "" if program.kind == "difficult" else (" faulty" if result.faulty else " sound twin")
        verdict = ""
        if result.faulty:
            delay = delay_of(result, program)
            verdict = ": MISSED" if delay is None else f": found {delay} steps after {program.onset}"
        measured = "; ".join(quality.words for quality in result.qualities)
        told.append(f"{program.name}, seed {result.seed}{kind}{verdict} [{measured}]")
        told += [f"    NOT AS CLAIMED: {words}" for words in result.unexpected]
        told += [
            f"    {alarm_line(alarm, program, faulty=result.faulty)}" for alarm in _firsts(result.alarms)
        ]
    return told


def _firsts(alarms: Iterable[Alarm]) -> list[Alarm]:
    """The first alarm of each rule and attempt, in their order."""
    seen: dict[tuple[int, str], Alarm] = {}
    for alarm in alarms:
        seen.setdefault((alarm.attempt, alarm.rule), alarm)
    return list(seen.values())


def alarm_line(alarm: Alarm, program: Witnessed, *, faulty: bool) -> str:
    """One alarm in a line."""
    stop = ", STOPS" if alarm.stops else ""
    attempt = f" of attempt {alarm.attempt}" if alarm.attempt else ""
    right = "" if not faulty else " (accepted)" if alarm.rule in program.accepted else " (not accepted)"
    return f"{alarm.rule} at step {alarm.step}{attempt}, {alarm.severity}{stop}{right}: {alarm.tensor}: {alarm.message}"


def titles(kind: str, half: Part, capture: str) -> str:
    """The title of a part of the figures."""
    name = {"difficult": "difficult", "mid_run": "mid-run"}[kind]
    return f"{name}, {half}" + ("" if capture == "default" else f", {capture.replace('_', ' ')}")
