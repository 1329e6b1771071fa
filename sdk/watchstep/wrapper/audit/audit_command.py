"""``watchstep audit -- PROGRAM``: run a program twice, and report what is not deterministic.

Each run is recorded to a temporary store at every step, traced from the import of PyTorch on, and stopped after some steps. The program attaches
as under ``watchstep run``. Nothing is sent to a service.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from watchstep.capture.identity import new_nonce
from watchstep.errors import ConfigError, NotFoundError
from watchstep.hook_arguments import AUDIT, BUDGET
from watchstep.platform.terminal_text import escaped_json, printable
from watchstep.reading.comparison.diff import RunDifference, diff
from watchstep.reading.comparison.tolerances import Tolerances
from watchstep.reading.run import open_run
from watchstep.trace.comparison import compare_traces
from watchstep.trace.report import render_trace_difference, trace_difference_data
from watchstep.trace.trace_file import read_trace
from watchstep.wrapper.audit.findings import (
    AuditReport,
    RankAudit,
    RunEnd,
    cause_of,
    differing_generators,
    record_data,
    risks_of,
)
from watchstep.wrapper.audit.record import (
    AUDIT_SEED,
    AUDIT_STEPS,
    ProgramRecord,
    read_records,
    trace_path,
)
from watchstep.wrapper.diff_command import add_tolerance_options, difference_data, difference_lines
from watchstep.wrapper.environment import AttemptLaunch, environment, find_program

_PROJECT = "audit"
_MAX_RUNS, _MAX_STEPS = 20, 1000
_MOST_ROWS = 10
_TAIL_LINES, _TAIL_BYTES = 20, 20_000
_END_CAUSE = "the runs end differently"
_END_HINT = "look at the output of the run that ended by itself: an error, or a decision that depends on time or on random numbers"
_CAPTURE = {"system": None, "snapshots": {"at_gate": False}}


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep audit",
        description="Run a program twice, and report what is not deterministic: the first step, tensor and operation that differ, with its source "
        "line, and generators without a seed. Exit code 0 if the runs are equal, 1 if they differ, 2 for an error.",
    )
    parsed.add_argument("--runs", type=int, default=2, help="number of runs (default: 2)")
    parsed.add_argument(
        "--steps", type=int, default=3, help="steps after which each run is stopped (default: 3)"
    )
    parsed.add_argument(
        "--seed", type=int, help="call watchstep.seed_all with this seed at the start of each run"
    )
    add_tolerance_options(parsed, "equal bits")
    parsed.add_argument(
        "--keep",
        metavar="FOLDER",
        help="folder for the recorded runs, traces and output, which must not exist (default: a temporary folder)",
    )
    parsed.add_argument("--json", action="store_true", help="print JSON instead of text")
    parsed.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM …", help="the program to run"
    )
    return parsed


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the program, print the report, and exit with 1 if the runs differ, else 0.

    Raises:
        ConfigError: an option is invalid, the program does not exist, or it took no step in the first two runs.
        FormatError, StoreError: what a run has recorded cannot be read.
    """
    options = parser().parse_args(arguments)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    _check(options, program)
    tolerances = Tolerances.parse(options.tolerance) if options.tolerance else Tolerances.uniform(0.0)
    with _folder(options.keep) as folder:
        runs = [_Run(folder, number) for number in range(options.runs)]
        ends: list[RunEnd] = []
        for run in runs:
            ends.append(run.execute(program, options.steps, options.seed))
            if len(ends) > 1 and not any(end.steps for end in ends):
                raise ConfigError(
                    f"run 0 of {program[0]} ended with code {ends[0].code}, and took no step of a PyTorch optimizer that was observed:\n"
                    f"{_indented(ends[0].tail)}",
                    "check that the program runs by itself, and that its Python is not started with -I, -S or -E",
                )
        report = _compared(runs, ends, tolerances)
    if options.json:
        sys.stdout.write(f"{escaped_json(json.dumps(report_data(report), indent=2))}\n")
    else:
        sys.stdout.write("".join(f"{printable(line)}\n" for line in report_lines(report)))
    raise SystemExit(1 if report.differs else 0)


def _check(options: argparse.Namespace, program: Sequence[str]) -> None:
    if not program:
        raise ConfigError(
            "watchstep audit: no program given", "use watchstep audit [options] -- python train.py"
        )
    find_program("watchstep audit", program[0])
    for name, value, least, most in (
        ("--runs", options.runs, 2, _MAX_RUNS),
        ("--steps", options.steps, 1, _MAX_STEPS),
        ("--seed", options.seed or 0, 0, 2**32 - 1),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name} {value}", f"use a number from {least} to {most}")


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="watchstep-audit-") as temporary:
            yield Path(temporary)
        return
    folder = Path(keep).absolute()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--keep {keep}: {error}", "name a folder that does not exist") from error
    yield folder


@dataclass(frozen=True)
class _Run:
    """One run of the program."""

    root: Path
    number: int

    @property
    def name(self) -> str:
        """Id of the recorded run."""
        return f"run-{self.number}"

    @property
    def folder(self) -> Path:
        """Folder of the reports and the output."""
        return self.root / f"reports-{self.number}"

    def execute(self, program: Sequence[str], steps: int, seed: int | None) -> RunEnd:
        """Run the program until it is stopped or ends.

        Raises:
            FormatError: a report of it is damaged.
        """
        self.folder.mkdir()
        launch = AttemptLaunch(
            store_url=(self.root / "store").as_uri(),
            project=_PROJECT,
            run=self.name,
            attempt=new_nonce(),
            capture=json.dumps(_CAPTURE),
        )
        # The program must not reach the service or the store of another run.
        base = {name: value for name, value in os.environ.items() if not name.startswith("WATCHSTEP_")}
        variables = environment(launch, base) | {
            AUDIT: str(self.folder),
            AUDIT_STEPS: str(steps),
            BUDGET: "none",
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED") or "0",
            "TORCH_COMPILE_DISABLE": "1",  # single operations do not exist in compiled code
        }
        if seed is not None:
            variables[AUDIT_SEED] = str(seed)
        with (self.folder / "output.txt").open("wb") as output:
            code = subprocess.run(  # noqa: S603 - this is the command's purpose
                program,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        records = read_records(self.folder)
        return RunEnd(
            self.number,
            code,
            {rank: record.steps for rank, record in records.items()},
            bool(records) and all(record.is_complete for record in records.values()),
            self._tail(),
        )

    def _tail(self) -> str:
        with (self.folder / "output.txt").open("rb") as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = output.read(_TAIL_BYTES).decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def difference(self, other: _Run, tolerances: Tolerances) -> RunDifference | None:
        """Compare the recorded figures with those of another run; None if the program did not record to the audit's store."""
        try:
            runs = [open_run(self.root / "store" / _PROJECT / run.name) for run in (self, other)]
        except NotFoundError:
            return None
        return diff(runs[0], runs[1], tolerances)


def _compared(runs: Sequence[_Run], ends: Sequence[RunEnd], tolerances: Tolerances) -> AuditReport:
    report = None
    for other in runs[1:]:
        ranks = tuple(_ranks(runs[0], other, tolerances))
        risks = risks_of(ranks, os.environ.get("PYTHONHASHSEED", ""))
        recorded = runs[0].difference(other, tolerances)
        compared = ends[0], ends[other.number]
        report = AuditReport(len(runs), other.number, compared, ranks, recorded, tuple(risks))
        if report.differs:
            break
    assert report is not None
    return report


def _ranks(a: _Run, b: _Run, tolerances: Tolerances) -> Iterator[RankAudit]:
    records_a, records_b = read_records(a.folder), read_records(b.folder)
    for rank in sorted(records_a.keys() & records_b.keys()):
        traces = [read_trace(trace_path(run.folder, rank)) for run in (a, b)]
        difference = compare_traces(traces[0], traces[1], tolerances)
        yield RankAudit(rank, (records_a[rank], records_b[rank]), traces[0], difference)


def report_lines(report: AuditReport) -> Iterator[str]:
    """Yield a report as lines of text."""
    steps = min((record.steps for audit in report.ranks for record in audit.records), default=0)
    operations = sum(audit.operations.compared for audit in report.ranks)
    what = f"{report.runs} runs of {steps} step(s), {operations} operations"
    if not report.differs:
        yield f"deterministic: {what} are equal"
    else:
        yield f"not deterministic: {what} compared, run {report.compared} differs from run 0"
    first = report.first
    if first is not None:
        if len(report.ranks) > 1:
            yield f"rank {first.rank}"
        cause, hint = cause_of(first)
        yield f"cause: {cause}"
        yield from render_trace_difference(first.trace, first.operations).splitlines()
        yield f"hint: {hint}"
    elif report.ends_differ:
        yield f"cause: {_END_CAUSE}"
        yield f"hint: {_END_HINT}"
    yield from _end_lines(report)
    if report.recorded is None:
        yield "nothing was recorded: only operations were compared"
    elif report.recorded.step is not None:
        names = ["run-0", f"run-{report.compared}"]
        yield from (f"recorded: {line}" for line in difference_lines(report.recorded, names, _MOST_ROWS))
    yield from (f"risk: {risk}" for risk in report.risks)
    for audit in report.ranks[:1]:
        yield from _record_lines(audit.records[0])


def _end_lines(report: AuditReport) -> Iterator[str]:
    """Yield how the runs ended, unless both ended alike and without an error."""
    is_alike = not report.ends_differ
    if is_alike and (report.ends[0].is_stopped or not report.ends[0].code):
        return
    for end in report.ends:
        steps = ", ".join(
            f"{steps} step(s)" if len(end.steps) == 1 else f"{steps} step(s) of rank {rank}"
            for rank, steps in sorted(end.steps.items())
        )
        after = steps or "no step that was reported"
        if end.is_stopped:
            yield f"run {end.run}: stopped by the audit after {after}"
            continue
        yield f"run {end.run}: ended by itself with code {end.code} after {after}"
        if end.tail and (end.run == report.compared or not is_alike):
            yield f"last lines of the output of run {end.run}:"
            yield from _indented(end.tail).splitlines()


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _end_data(end: RunEnd) -> dict[str, Any]:
    return {
        "run": end.run,
        "code": end.code,
        "steps": {str(rank): steps for rank, steps in sorted(end.steps.items())},
        "stopped": end.is_stopped,
        "tail": "" if end.is_stopped else end.tail,
    }


def _record_lines(record: ProgramRecord) -> Iterator[str]:
    if record.seeds:
        generators = ", ".join(map(str, record.seeds.get("generators", ())))
        yield f"seeds: watchstep.seed_all({record.seeds.get('seed')}) seeded {generators}"
    flags: Mapping[str, str] = record.flags
    yield f"flags: {', '.join(f'{name} {value}' for name, value in flags.items() if value)}"


def report_data(report: AuditReport) -> dict[str, Any]:
    """Return a report as JSON data."""
    first = report.first
    cause: dict[str, Any] | None = None
    if first is not None:
        what, hint = cause_of(first)
        cause = {"rank": first.rank, "what": what, "hint": hint}
    elif report.ends_differ:
        cause = {"rank": None, "what": _END_CAUSE, "hint": _END_HINT}
    return {
        "differs": report.differs,
        "runs": report.runs,
        "compared": report.compared,
        "cause": cause,
        "ends": [_end_data(end) for end in report.ends],
        "ranks": [
            {
                "rank": audit.rank,
                "operations": trace_difference_data(audit.trace, audit.operations),
                "generators": differing_generators(audit.records),
                "records": [record_data(record) for record in audit.records],
            }
            for audit in report.ranks
        ],
        "recorded": None if report.recorded is None else difference_data(report.recorded, _MOST_ROWS),
        "risks": list(report.risks),
    }
