"""``watchstep diff RUN_A RUN_B``: the settings that differ, then the first step and tensor, and with traces the first operation."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from watchstep.errors import ConfigError
from watchstep.hook import STORE
from watchstep.platform.terminal_text import escaped_json, printable
from watchstep.reading.comparison.diff import RunDifference, diff
from watchstep.reading.comparison.settings import SettingDifference, differing_settings
from watchstep.reading.comparison.tolerances import DEFAULT_UNITS, UNIT_ROUNDOFF, Tolerances
from watchstep.reading.run_lookup import find_run
from watchstep.trace.comparison import TraceDifference, compare_traces
from watchstep.trace.operations import Trace
from watchstep.trace.report import render_trace_difference, trace_difference_data
from watchstep.trace.trace_file import read_trace

_DEFAULT_STORE = "watchstep-runs"
_MAX_NAMES = 10
_MAX_SETTINGS = 20


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    shown = ", ".join(
        f"{name} {DEFAULT_UNITS[name] * UNIT_ROUNDOFF[name]:.2g}"
        for name in ("float64", "float32", "float16", "bfloat16")
    )
    parsed = argparse.ArgumentParser(
        prog="watchstep diff",
        description="Show the settings that differ between two runs, then the first step and tensor at which their records differ, and with "
        "--traces the first operation. Exit code 0 if the records are equal, 1 if they differ, 2 for an error.",
    )
    parsed.add_argument(
        "runs", nargs="*", metavar="RUN", help="two runs: run id, <project>/<run>, or the URL of a run"
    )
    parsed.add_argument(
        "--store",
        help=f"folder or URL that contains the runs (default: {STORE}, or the folder {_DEFAULT_STORE})",
    )
    add_tolerance_options(parsed, shown)
    parsed.add_argument(
        "--traces", nargs=2, metavar=("A", "B"), help="operation traces of the two runs, as files"
    )
    parsed.add_argument("--most", type=int, default=20, help="maximum number of rows to show (default: 20)")
    parsed.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parsed


def add_tolerance_options(parsed: argparse.ArgumentParser, shown: str) -> None:
    """Add ``--tolerance`` and ``--exact``.

    Args:
        parsed: The parser.
        shown: The default, for the help text.
    """
    group = parsed.add_mutually_exclusive_group()
    group.add_argument(
        "--tolerance",
        action="append",
        metavar="[DTYPE=]NUMBER",
        help=f"relative difference that counts as equal, of one dtype or of all; can be repeated (default: {shown})",
    )
    group.add_argument("--exact", action="store_true", help="only equal bits are equal: the tolerance 0")


def main(arguments: Sequence[str]) -> NoReturn:
    """Compare two runs, or two traces, and exit with 1 if they differ, else 0.

    Raises:
        ConfigError: an option is invalid, or there is nothing to compare.
        NotFoundError, FormatError, StoreError: a run or a trace cannot be read.
    """
    options = parser().parse_args(arguments)
    if len(options.runs) not in {0, 2} or (not options.runs and options.traces is None):
        raise ConfigError(
            f"watchstep diff: {len(options.runs)} run(s)",
            "use watchstep diff RUN_A RUN_B, or watchstep diff --traces A B",
        )
    if options.most < 1:
        raise ConfigError(f"--most {options.most}", "use a number from 1")
    tolerances = Tolerances.uniform(0.0) if options.exact else Tolerances.parse(options.tolerance or ())
    difference: RunDifference | None = None
    settings: list[SettingDifference] = []
    if options.runs:
        store = options.store or os.environ.get(STORE) or _DEFAULT_STORE
        run_a, run_b = (find_run(run, store) for run in options.runs)
        difference = diff(run_a, run_b, tolerances)
        settings = differing_settings([run_a, run_b]).differing
        if not difference.compared and not difference.values and options.traces is None:
            raise ConfigError(
                f"runs {options.runs[0]} and {options.runs[1]} have no recorded row in common that can be compared",
                "compare runs of one program that recorded the same steps, with batches of one size",
            )
    traces = None
    if options.traces is not None:
        traces = tuple(read_trace(path) for path in options.traces)
    compared = None if traces is None else compare_traces(traces[0], traces[1], tolerances)
    trace = None if traces is None else traces[0]
    if options.json:
        _print_json(options.runs, (settings, difference), (trace, compared), options.most)
    else:
        if difference is not None:
            lines = [
                *setting_lines(settings, options.runs),
                *difference_lines(difference, options.runs, options.most),
            ]
            sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
        if trace is not None and compared is not None:
            sys.stdout.write(render_trace_difference(trace, compared))
    differs = (difference is not None and difference.step is not None) or (
        compared is not None and compared.differs
    )
    raise SystemExit(1 if differs else 0)


def _print_json(
    runs: Sequence[str],
    of_runs: tuple[list[SettingDifference], RunDifference | None],
    of_traces: tuple[Trace | None, TraceDifference | None],
    most: int,
) -> None:
    data: dict[str, Any] = {"runs": list(runs)}
    settings, difference = of_runs
    trace, compared = of_traces
    if difference is not None:
        data["settings"] = [asdict(setting) for setting in settings]
        data |= difference_data(difference, most)
    if trace is not None and compared is not None:
        data["traces"] = trace_difference_data(trace, compared)
    sys.stdout.write(f"{escaped_json(json.dumps(data, indent=2))}\n")


def difference_data(difference: RunDifference, most: int) -> dict[str, Any]:
    """Return a difference of runs as JSON data, with at most so many rows."""
    return {
        "step": difference.step,
        "tensor": difference.tensor,
        "compared": difference.compared,
        "values": difference.values,
        "only_a": difference.only_a,
        "only_b": difference.only_b,
        "steps_only_a": difference.steps_only_a,
        "steps_only_b": difference.steps_only_b,
        "rows_only_a": difference.rows_only_a,
        "rows_only_b": difference.rows_only_b,
        "notes": list(difference.notes),
        "differences": difference.table.num_rows,
        "rows": difference.table.slice(0, most).to_pylist(),
    }


def setting_lines(settings: Sequence[SettingDifference], runs: Sequence[str]) -> Iterator[str]:
    """Yield the settings that differ between two runs as lines of text."""
    for setting in settings[:_MAX_SETTINGS]:
        yield f"{setting.source} differs: {setting.as_line(runs)}"
    if len(settings) > _MAX_SETTINGS:
        yield f"and {len(settings) - _MAX_SETTINGS} more settings differ"


def difference_lines(difference: RunDifference, runs: Sequence[str], most: int) -> Iterator[str]:
    """Yield a difference of two runs as lines of text, with at most so many rows."""
    missing = (
        (difference.only_a, difference.steps_only_a, difference.rows_only_a),
        (difference.only_b, difference.steps_only_b, difference.rows_only_b),
    )
    for run, (tensors, steps, rows) in zip(runs, missing, strict=True):
        if tensors:
            yield f"tensors only in {run}: {_listed(tensors)}"
        if steps:
            yield f"steps only in {run}: {_listed(steps)}"
        if rows:
            yield f"{rows} row(s) only in {run}, of tensors and steps that both have"
    yield from difference.notes
    values = f" and {difference.values} full tensors" if difference.values else ""
    if difference.step is None:
        yield f"no difference in {difference.compared} rows{values}"
        return
    yield f"first difference: step {difference.step}, {difference.tensor}"
    rows = difference.table.slice(0, most).to_pylist()
    cells = [["STEP", "MODE", "WORKER", "TENSOR", "FIGURE", "A", "B", "RELATIVE"]]
    cells += [
        [str(row["step"]), row["mode"], str(row["worker"]), row["tensor"], row["figure"]]
        + [_figure(row[name]) for name in ("a", "b", "relative")]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    if difference.table.num_rows > most:
        yield f"and {difference.table.num_rows - most} more of {difference.table.num_rows} differences in {difference.compared} rows{values}"


def _listed(entries: Sequence[object]) -> str:
    more = f", and {len(entries) - _MAX_NAMES} more" if len(entries) > _MAX_NAMES else ""
    return ", ".join(map(str, entries[:_MAX_NAMES])) + more


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"
