"""Runs the witnessed programs that are asked for, prints what became of them, and adds their figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.detection.isolated import Capture, Result, Task, run_tasks
from benchmarks.detection.own import Part
from benchmarks.detection.witnessed import SEEDS, Kind, Witnessed, witnessed_programs
from benchmarks.detection.witnessed_figures import add_difficult, add_mid_run, counted, lines, titles
from benchmarks.report import Report as Figures

HALVES: tuple[Part, ...] = ("tune", "held_out")
KINDS: tuple[Kind, ...] = ("difficult", "mid_run")


@dataclass(frozen=True)
class Chosen:
    """What to run.

    Attributes:
        kinds: difficult programs, faults in the middle, or both.
        half: one half; None for both.
        only: these programs; None for all.
        seeds: instead of those of each half.
        fraction: this share of programs, every so manieth of them by name.
        capture: the shipped default, or everything at every step.
        processes: programs at a time; as many as there are cores where it is None.
    """

    kinds: tuple[Kind, ...] = KINDS
    half: Part | None = None
    only: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    fraction: float = 1.0
    capture: Capture = "default"
    processes: int | None = None


def programs_of(chosen: Chosen, kind: Kind, half: Part) -> list[Witnessed]:
    """Those of a kind and a half, by name."""
    held = [
        program
        for _, program in sorted(witnessed_programs().items())
        if program.kind == kind and program.half == half and (not chosen.only or program.name in chosen.only)
    ]
    count = max(1, round(chosen.fraction * len(held))) if held else 0
    return [held[at * len(held) // count] for at in range(count)]


@dataclass(frozen=True)
class Ran:
    """What was run.

    Attributes:
        tuned: the results of the half ``tune``.
        healthy: of the half ``held_out``, healthy runs, sound twins included.
        stopped: how many of these an alert would have stopped.
    """

    tuned: list[Result]
    healthy: int = 0
    stopped: int = 0


def run_witnessed(
    figures: Figures, chosen: Chosen, done: Callable[[int, int], None] = lambda _done, _all: None
) -> Ran:
    """Run, print alarms of the half ``tune`` alone and programs of either that are not as they claim, and add the figures of both."""
    programs = witnessed_programs()
    groups = [
        (kind, half, held)
        for kind in chosen.kinds
        for half in HALVES
        if chosen.half in (None, half) and (held := programs_of(chosen, kind, half))
    ]
    tasks = [
        Task(
            program.name,
            chosen.seeds or SEEDS[half],
            (False, True) if kind == "mid_run" else (False,),
            chosen.capture,
        )
        for kind, half, held in groups
        for program in held
    ]
    processes = chosen.processes or len(os.sched_getaffinity(0))
    results: list[Result] = []
    for task, own in zip(tasks, run_tasks(tasks, processes, done), strict=True):
        results += own
        if programs[task.program].half == "tune":
            print("\n".join(lines(own, programs[task.program])), flush=True)
        else:  # what a program measured of itself says nothing of the rules
            for words in counted(own, programs).unexpected:
                print(f"NOT AS CLAIMED: {words}", flush=True)
    healthy = stopped = 0
    for kind, half, held in groups:
        tally = counted(_of(results, held), programs)
        if half == "held_out":
            healthy, stopped = healthy + tally.healthy, stopped + tally.stopped
        add = add_difficult if kind == "difficult" else add_mid_run
        add(figures, titles(kind, half, chosen.capture), tally, targets=half == "held_out")
    tuned = [result for result in results if programs[result.program].half == "tune"]
    return Ran(tuned, healthy, stopped)


def _of(results: Sequence[Result], programs: Sequence[Witnessed]) -> list[Result]:
    names = {program.name for program in programs}
    return [result for result in results if result.program in names]
