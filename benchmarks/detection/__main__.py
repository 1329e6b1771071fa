"""Detection: ``python -m benchmarks.detection [--set own difficult mid_run frameworks] [--part tune|held_out] [--only NAME …] [--quick]``.

Four sets of the project's own programs are trained with the shipped default capture and judged by the default rules:

- ``own``: published faults, their mended twins and longer healthy trainings, once a seed;
- ``difficult``: healthy programs that are difficult to judge. Each measures its own quality, as a witness that it is healthy.
- ``mid_run``: faults that begin in the middle of a run, at a known step, each beside its sound twin;
- ``frameworks``: programs of JAX, Keras, TensorFlow, XGBoost and LightGBM, healthy and with a fault. They run in ``build/frameworks-env``
  (``make build/frameworks-env/.installed``), and are left out with a remark if it does not exist.

Each set but ``frameworks`` has a part ``tune`` and a part ``held_out``. The figures with targets are those of ``held_out``. Of the sets
``difficult`` and ``mid_run`` each alarm of the part ``tune`` is printed with rule, step, severity and whether it stops;
of ``held_out`` only totals are, and nobody looks further; a program that is not as it claims is named. While tuning::

    python -m benchmarks.detection --set difficult --part tune                 # all alarms on difficult healthy programs
    python -m benchmarks.detection --set mid_run --part tune --fraction 0.3    # every third fault
    python -m benchmarks.detection --only click_prediction --seeds 0           # one program
    python -m benchmarks.detection --set difficult --capture every_step        # everything measured at every step

With ``--cases FILE`` the programs are those of a file. ``--out`` writes the report as ``{program: {seed: [[step, rule], …]}}``:
one entry for each alert that fires; of the sets ``difficult`` and ``mid_run`` for the part ``tune`` alone, faulty runs of the
latter as ``NAME!``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.detection.detecting import detect, programs_of
from benchmarks.detection.figures import add_figures, add_own
from benchmarks.detection.other_frameworks.program import PROGRAMS as FRAMEWORK_PROGRAMS
from benchmarks.detection.other_frameworks.run import run_frameworks
from benchmarks.detection.own import Part, part_of
from benchmarks.detection.programs import Program
from benchmarks.detection.run_witnessed import KINDS, Chosen, Ran, run_witnessed
from benchmarks.detection.scoring import Report, score
from benchmarks.detection.witnessed import witnessed_programs
from benchmarks.report import Figure, arguments
from benchmarks.report import Report as Figures
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import StopAction

STEP_SECONDS = 0.001
SLOW_STEP_SECONDS = 0.02
OWN_SEEDS = (0, 1, 2)
FRAMEWORK_SEEDS = (0, 1)
QUICK_STEPS = 300
QUICK_FRACTION = 0.1
SETS = ("own", *KINDS, "frameworks")
STOPPING = {
    config.rule
    for config in DEFAULT_RULES
    if any(isinstance(action, StopAction) for action in config.actions)
}
"""Rules that stop a job by default."""


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.prog = "python -m benchmarks.detection"
    parser.add_argument(
        "--cases", type=Path, help="a Python file with CASES; the project's own set without it"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        choices=SETS,
        dest="sets",
        help="these sets of programs only; all where it is left out",
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="one training for each; 0 1 2, of a file 100")
    parser.add_argument("--only", nargs="+", help="these programs only")
    parser.add_argument("--part", choices=("tune", "held_out"), help="this part of each set only")
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="this share of difficult and mid_run programs, by name"
    )
    parser.add_argument(
        "--capture",
        choices=("default", "every_step"),
        default="default",
        help="of difficult and mid_run programs: as shipped, or everything at every step",
    )
    parser.add_argument("--processes", type=int, help="programs at a time; as many as there are cores")
    parser.add_argument("--out", type=Path, help="write the report here, as the scorer reads it")
    parser.add_argument(
        "--fast-only", action="store_true", help="of a file, leave out the run with slow steps"
    )
    return parser.parse_args()


def progress(done: int, of: int) -> None:
    """One line, written over; only the last where nobody looks."""
    if done == of:
        print(f"{done} of {of} trainings", file=sys.stderr, flush=True)
    elif sys.stderr.isatty():
        print(f"{done} of {of} trainings", end="\r", file=sys.stderr, flush=True)


def run_file(given: argparse.Namespace, figures: Figures) -> None:
    """The programs of a file, with short steps and with long ones."""
    programs = programs_of(given.cases)
    chosen, seeds = given.only or list(programs), given.seeds or [100]
    steps = QUICK_STEPS if given.quick else None
    fast = detect(given.cases, chosen, seeds, STEP_SECONDS, most_steps=steps, done=progress)
    add_figures(figures, "steps of 1 ms", score(fast, programs), targets=True)
    if not (given.fast_only or given.quick):
        slow = detect(given.cases, chosen, seeds, SLOW_STEP_SECONDS, done=progress)
        add_figures(figures, "steps of 20 ms", score(slow, programs), targets=False)
    if given.out:
        given.out.write_text(json.dumps(fast))


def chosen_of(programs: dict[str, Program], part: Part | None, *, quick: bool) -> list[str]:
    """Programs of a part; of these every other pair in a quick run."""
    names = [name for name in programs if part is None or part_of(name) == part]
    if not quick:
        return names
    pairs = [name for name in names if programs[name].kind == "faulty"][::2]
    healthy = [name for name in names if programs[name].kind == "healthy"][::2]
    return [held for name in pairs for held in (name, f"{name}.fixed")] + healthy


def run_own(given: argparse.Namespace, figures: Figures) -> Report:
    """The published faults and longer healthy trainings."""
    programs = programs_of(None)
    part: Part | None = "held_out" if given.quick else given.part
    chosen = (
        [name for name in given.only if name in programs]
        if given.only
        else chosen_of(programs, part, quick=given.quick)
    )
    if not chosen:
        return {}
    seeds = given.seeds or (OWN_SEEDS[:1] if given.quick else OWN_SEEDS)
    steps = QUICK_STEPS if given.quick else None
    report = detect(None, chosen, seeds, STEP_SECONDS, most_steps=steps, done=progress)
    add_own(figures, report, programs)
    figures.remark(f"own: seeds {' '.join(map(str, seeds))}; {len(chosen)} of {len(programs)} programs")
    if given.quick:
        figures.remark(f"--quick: one seed, every other program of held_out, {QUICK_STEPS} steps at most")
    return report


def add_stops(figures: Figures, own: Report, ran: Ran) -> None:
    """Healthy runs of all sets that an alert would have stopped, held out."""
    programs = programs_of(None)
    healthy = [
        alarms
        for name, seeds in own.items()
        if part_of(name) == "held_out" and programs[name].kind != "faulty"
        for alarms in seeds.values()
    ]
    stopped = sum(any(rule in STOPPING for _, rule in alarms) for alarms in healthy)
    runs = len(healthy) + ran.healthy
    if runs:
        figures.add(
            "held_out/wrong stops of all healthy runs",
            Figure(stopped + ran.stopped, "runs", 0.0, note=f"{runs} runs, sound twins included"),
        )


def run_others(given: argparse.Namespace, figures: Figures, sets: tuple[str, ...], own: Report) -> Report:
    """Difficult programs, and faults in the middle; of a quick run a few of those to tune on."""
    chosen = Chosen(
        tuple(kind for kind in KINDS if kind in sets),
        "tune" if given.quick else given.part,
        tuple(given.only) if given.only else None,
        tuple(given.seeds) if given.seeds else (0,) if given.quick else None,
        QUICK_FRACTION if given.quick else given.fraction,
        given.capture,
        given.processes or len(os.sched_getaffinity(0)),
    )
    ran = run_witnessed(figures, chosen, progress)
    add_stops(figures, own, ran)
    report: Report = {}
    for result in ran.tuned:
        name = f"{result.program}!" if result.faulty else result.program
        report.setdefault(name, {})[str(result.seed)] = [(alarm.step, alarm.rule) for alarm in result.alarms]
    return report


def run_sets(given: argparse.Namespace, figures: Figures) -> None:
    """The project's own programs, of the sets that are asked for.

    Raises:
        SystemExit: a program of ``--only`` is in no set.
    """
    sets = tuple(given.sets or SETS)
    names = {*programs_of(None), *witnessed_programs(), *FRAMEWORK_PROGRAMS}
    if unknown := set(given.only or ()) - names:
        raise SystemExit(f"--only: no program is named {', '.join(sorted(unknown))}")
    report = run_own(given, figures) if "own" in sets else {}
    report |= run_others(given, figures, sets, report)
    if "frameworks" in sets:
        run_frameworks(
            figures,
            given.seeds or (FRAMEWORK_SEEDS[:1] if given.quick else FRAMEWORK_SEEDS),
            only=given.only,
            processes=given.processes or len(os.sched_getaffinity(0)),
            done=progress,
        )
    if given.out:
        given.out.write_text(json.dumps(report))


def main() -> None:
    """Run it."""
    given = parsed()
    figures = Figures("Detection", quick=given.quick, packages=("scikit-learn",))
    if given.cases:
        run_file(given, figures)
    else:
        run_sets(given, figures)
    figures.finish(given.json)


if __name__ == "__main__":
    main()
