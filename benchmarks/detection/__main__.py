"""Detection: ``python -m benchmarks.detection [--quick] [--seeds 0 1 …] [--json FILE]``.

Without more it trains the project's own programs: published faults, their mended twins and longer healthy trainings, once
a seed, with the shipped default capture, and judges them by the default rules. The figures with targets are those of
the programs that are held out from tuning. With ``--cases FILE`` the programs are those of a file. ``--out`` writes the
report as ``{program: {seed: [[step, rule], …]}}``: one entry for each alert that fires.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.detection.detecting import detect, programs_of
from benchmarks.detection.figures import add_figures, add_own
from benchmarks.detection.own import Part, part_of
from benchmarks.detection.programs import Program
from benchmarks.detection.scoring import score
from benchmarks.report import Report as Figures
from benchmarks.report import arguments

STEP_SECONDS = 0.001
SLOW_STEP_SECONDS = 0.02
OWN_SEEDS = (0, 1, 2)
QUICK_STEPS = 300


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.prog = "python -m benchmarks.detection"
    parser.add_argument(
        "--cases", type=Path, help="a Python file with CASES; the project's own set without it"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="one training for each; 0 1 2, of a file 100")
    parser.add_argument("--only", nargs="+", help="these programs only")
    parser.add_argument("--part", choices=("tune", "held_out"), help="this part of the own set only")
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


def run_own(given: argparse.Namespace, figures: Figures) -> None:
    """The project's own programs."""
    programs = programs_of(None)
    part: Part | None = "held_out" if given.quick else given.part
    chosen = given.only or chosen_of(programs, part, quick=given.quick)
    seeds = given.seeds or (OWN_SEEDS[:1] if given.quick else OWN_SEEDS)
    steps = QUICK_STEPS if given.quick else None
    report = detect(None, chosen, seeds, STEP_SECONDS, most_steps=steps, done=progress)
    add_own(figures, report, programs)
    figures.remark(f"seeds {' '.join(map(str, seeds))}; {len(chosen)} of {len(programs)} programs")
    if given.quick:
        figures.remark(f"--quick: one seed, every other program of held_out, {QUICK_STEPS} steps at most")
    if given.out:
        given.out.write_text(json.dumps(report))


def main() -> None:
    """Run it."""
    given = parsed()
    figures = Figures("Detection", quick=given.quick, packages=("scikit-learn",))
    if given.cases:
        run_file(given, figures)
    else:
        run_own(given, figures)
    figures.finish(given.json)


if __name__ == "__main__":
    main()
