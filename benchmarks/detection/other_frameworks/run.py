"""Runs the programs of other frameworks in their environment, judges them by the default rules, and adds their figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.detection.isolated import Alarm, alarms_of
from benchmarks.detection.other_frameworks.program import PROGRAMS, FrameworkProgram
from benchmarks.report import Figure
from benchmarks.report import Report as Figures

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / "build" / "frameworks-env" / "bin" / "python"
_PROCESS_SECONDS = 600


@dataclass(frozen=True)
class FrameworkRun:
    """One run of a program, as the default rules judged it.

    Attributes:
        program: its name.
        seed: its seed.
        faulty: whether it had its fault.
        first: its first loss.
        last: its last loss.
        alarms: alerts that began to fire.
        failure: why there are none; empty where the program ran.
    """

    program: str
    seed: int
    faulty: bool
    first: float = math.nan
    last: float = math.nan
    alarms: tuple[Alarm, ...] = ()
    failure: str = ""

    @property
    def is_found(self) -> bool:
        """Whether an expected rule fired at the onset or later."""
        return self.delay is not None

    @property
    def delay(self) -> int | None:
        """Steps from the onset to the first expected alarm; None without one."""
        program = PROGRAMS[self.program]
        steps = [
            alarm.step
            for alarm in self.alarms
            if alarm.rule in program.expected and alarm.step >= program.onset
        ]
        return min(steps) - program.onset if steps else None

    @property
    def unexpected(self) -> str:
        """How the program is not as it claims: a healthy one learns, a faulty one does not learn as well."""
        if self.failure:
            return f"failed: {self.failure}"
        learns = self.last < 0.6 * self.first
        if learns == self.faulty:
            return f"loss {self.first:.4g} to {self.last:.4g}, which is {'healthy' if learns else 'faulty'}"
        return ""

    @property
    def words(self) -> str:
        """One line for people."""
        alarms = (
            ", ".join(
                f"{alarm.rule} at {alarm.step}{' (stops)' if alarm.stops else ''}" for alarm in self.alarms
            )
            or "no alarm"
        )
        kind = "faulty" if self.faulty else "healthy"
        return f"{self.program}, seed {self.seed}, {kind}: loss {self.first:.3g} to {self.last:.3g}; {alarms}"


@cache
def importable(python: str) -> frozenset[str]:
    """Those of the frameworks that a Python finds, which are not imported to tell."""
    names = sorted({program.framework for program in PROGRAMS.values()})
    code = f"import importlib.util as u; print(*[n for n in {names!r} if u.find_spec(n)])"
    ended = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return frozenset(ended.stdout.split())


def python_of(program: FrameworkProgram) -> str | None:
    """A Python that finds the framework of a program: this one, or that of ``make build/frameworks-env/.installed``; None if none does."""
    for python in (str(ENVIRONMENT), sys.executable):
        if Path(python).exists() and program.framework in importable(python):
            return python
    return None


def run_frameworks(
    figures: Figures,
    seeds: Sequence[int],
    *,
    only: Sequence[str] | None,
    processes: int,
    done: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[FrameworkRun]:
    """Run, print each run, and add the figures. Programs whose framework is not installed are left out, and named."""
    chosen = [name for name in PROGRAMS if not only or name in only]
    if missing := [name for name in chosen if python_of(PROGRAMS[name]) is None]:
        figures.remark(
            f"frameworks: left out, as their framework is not installed (make build/frameworks-env/.installed): {', '.join(missing)}"
        )
    ready = [name for name in chosen if name not in missing]
    runs: list[FrameworkRun] = []
    with ThreadPoolExecutor(processes) as threads:
        for number, found in enumerate(threads.map(lambda name: _recorded(name, seeds), ready), 1):
            done(number, len(ready))
            runs += found
    for run in runs:
        print(run.words, flush=True)
        if run.unexpected:
            print(f"NOT AS CLAIMED: {run.program}, seed {run.seed}: {run.unexpected}", flush=True)
    if runs:
        _add(figures, runs)
    return runs


def _recorded(name: str, seeds: Sequence[int]) -> list[FrameworkRun]:
    """Record a program in a process of its own, and judge its runs here."""
    python = python_of(PROGRAMS[name])
    assert python is not None
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WATCHSTEP_")}
    environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [python, "-m", "benchmarks.detection.other_frameworks", name, folder, *map(str, seeds)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PROCESS_SECONDS,
            check=False,
        )
        written = Path(folder) / "runs.json"
        if ended.returncode or not written.exists():
            failure = (ended.stderr or ended.stdout)[-3000:]
            return [
                FrameworkRun(name, seed, faulty, failure=failure)
                for seed in seeds
                for faulty in (False, True)
            ]
        return [
            FrameworkRun(
                name, run["seed"], run["faulty"], run["first"], run["last"], tuple(alarms_of(run["url"]))
            )
            for run in json.loads(written.read_text(encoding="utf-8"))
        ]


def _add(figures: Figures, runs: Sequence[FrameworkRun]) -> None:
    faulty = [run for run in runs if run.faulty]
    healthy = [run for run in runs if not run.faulty]
    missed = sorted({run.program for run in faulty if not run.is_found})
    alarmed = [f"{run.program}: {alarm.rule}" for run in healthy for alarm in run.alarms]
    names = f"{len({run.program for run in runs})} programs of 5 frameworks"
    found = len(faulty) - sum(not run.is_found for run in faulty)
    figures.add(
        "frameworks/faults found",
        Figure(
            found / len(faulty),
            "share",
            1.0,
            "at least",
            note=f"{found} of {len(faulty)} runs, {names}"
            + (f"; not: {', '.join(missed)}" if missed else ""),
        ),
    )
    figures.add(
        "frameworks/alarms on healthy runs",
        Figure(
            float(len(alarmed)), "alarms", 0.0, note=f"{len(healthy)} runs; {', '.join(alarmed) or 'none'}"
        ),
    )
    delays = [run.delay for run in faulty if run.delay is not None]
    if delays:
        figures.add("frameworks/median delay", Figure(float(median(delays)), "steps"))
    unexpected = sum(bool(run.unexpected) for run in runs)
    figures.add("frameworks/runs that are not as they claim", Figure(float(unexpected), "runs", 0.0))
