"""``watchstep trace``: name the first bad operation of a trace, with its source line, and list operations and alerts.

The trace is a file, a trace of a recorded run, or a folder with a dump of TensorFlow's Debugger V2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from watchstep.errors import ConfigError
from watchstep.platform.terminal_text import escaped_json, printable
from watchstep.reading.run import open_run
from watchstep.trace.alerts import InfNanAlert, alerts_of
from watchstep.trace.debugger_v2 import is_debugger_v2, read_debugger_v2
from watchstep.trace.operations import Operation, Trace, TraceMode
from watchstep.trace.origins import BadOrigin, Diagnosis, diagnose
from watchstep.trace.report import render_diagnosis, render_unusual
from watchstep.trace.stored_traces import find_trace, read_saved, saved_traces
from watchstep.trace.trace_file import operation_data, read_trace
from watchstep.trace.unusual import unusual_operations


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep trace",
        description="Name the first bad operation of a trace: where the non-finite values began that reached a loss, a gradient or a "
        "parameter. Exit code 1 if there is one.",
    )
    parsed.add_argument(
        "file",
        metavar="TRACE",
        help="a file that watchstep.trace.write_trace wrote; the URL or folder of a run; or a folder that was passed to "
        "tf.debugging.experimental.enable_dump_debug_info",
    )
    parsed.add_argument("--step", type=int, help="examine this step; by default the first one with damage")
    parsed.add_argument(
        "--worker", type=int, help="of a run, the trace of this worker; by default the lowest one"
    )
    parsed.add_argument("--list", action="store_true", help="list the traces of a run instead")
    parsed.add_argument("--alerts", action="store_true", help="list all outputs that were not finite instead")
    parsed.add_argument(
        "--operations",
        metavar="FIRST:LAST",
        help="list these operations instead, by their numbers; 0: for all",
    )
    parsed.add_argument("--verbose", action="store_true", help="also show further origins and whole stacks")
    parsed.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parsed


def main(arguments: Sequence[str]) -> NoReturn:
    """Print a diagnosis or operations, and exit with 1 if a bad operation was found, else 0.

    Raises:
        ConfigError: an option is invalid.
        NotFoundError, FormatError: the trace cannot be read.
    """
    options = parser().parse_args(arguments)
    chosen = None if options.operations is None else _range_of(options.operations)
    if options.list:
        _list_traces(options.file, as_json=options.json)
        raise SystemExit(0)
    trace = _opened(options.file, options.step, options.worker)
    if options.step is not None and options.step not in trace.steps:
        raise ConfigError(
            f"trace {options.file} has no step {options.step}",
            f"its steps are {', '.join(map(str, trace.steps)) or 'none'}",
        )
    if chosen is not None:
        for line in _operation_lines(trace, chosen, as_json=options.json):
            sys.stdout.write(f"{line}\n")
        raise SystemExit(0)
    if options.alerts:
        steps = {operation.index: operation.step for operation in trace.operations}
        for alert in alerts_of(trace):
            if options.step is None or steps[alert.operation] == options.step:
                sys.stdout.write(f"{_alert_line(alert, as_json=options.json)}\n")
        raise SystemExit(0)
    diagnosis = diagnose(trace, options.step)
    if options.json:
        sys.stdout.write(f"{escaped_json(json.dumps(_diagnosis_data(trace, diagnosis), indent=2))}\n")
    else:
        sys.stdout.write(render_diagnosis(trace, diagnosis, verbose=options.verbose))
        if diagnosis.first is None and options.step is not None and trace.mode is TraceMode.STATISTICS:
            sys.stdout.write(render_unusual(trace, unusual_operations(trace, options.step)))
    raise SystemExit(0 if diagnosis.first is None else 1)


def _opened(place: str, step: int | None, worker: int | None) -> Trace:
    if is_debugger_v2(place):
        return read_debugger_v2(place)
    if not _is_run(place):
        return read_trace(place)
    run = open_run(place)
    return read_saved(run.store, find_trace(saved_traces(run), step, worker, run.location))


def _is_run(place: str) -> bool:
    return "://" in place or os.path.isdir(place)  # noqa: PTH112 - a URL is no path


def _list_traces(place: str, *, as_json: bool) -> None:
    if not _is_run(place):
        raise ConfigError(f"--list {place!r}", "use the URL or folder of a run")
    for key in saved_traces(open_run(place)):
        data = {"attempt": key.attempt, "worker": key.worker, "first": key.first, "last": key.last}
        text = f"{key.attempt:<12} worker {key.worker:<5} steps {key.first}:{key.last}"
        sys.stdout.write(f"{json.dumps(data) if as_json else printable(text)}\n")


def _alert_line(alert: InfNanAlert, *, as_json: bool) -> str:
    if as_json:
        return escaped_json(json.dumps(asdict(alert)))
    counts = [
        (alert.nan, "NaN"),
        (alert.positive_infinite, "+inf"),
        (alert.negative_infinite, "-inf"),
    ]
    text = ", ".join(f"{count} {name}" for count, name in counts if count) or "not finite"
    size = "" if alert.elements is None else f" of {alert.elements}"
    return printable(f"{alert.operation:>7} {alert.name:<36} output {alert.output}: {text}{size}")


def _range_of(text: str) -> range:
    first, separator, last = text.partition(":")
    try:
        start, end = int(first or 0), int(last or 2**53)
    except ValueError:
        start, end = 0, -1
    if not separator or end < start:
        raise ConfigError(f"--operations {text!r}", "use FIRST:LAST, as 100:120")
    return range(start, end + 1)


def _operation_lines(trace: Trace, chosen: range, *, as_json: bool) -> Iterator[str]:
    for operation in trace.operations:
        if operation.index not in chosen:
            continue
        if as_json:
            yield escaped_json(json.dumps(_operation_data(trace, operation)))
            continue
        state = "BAD" if operation.is_bad else ""
        shapes = " ".join(output.shape_text for output in operation.outputs)
        site = trace.line_of(operation)
        place = f"{site.file}:{site.line}" if site is not None else ""
        columns = (
            operation.index,
            operation.step,
            operation.phase,
            state,
            operation.name,
            operation.module,
            shapes,
            place,
        )
        yield printable("{:>7} {:>6} {:<13} {:<3} {:<36} {:<24} {:<16} {}".format(*columns).rstrip())


def _operation_data(trace: Trace, operation: Operation) -> dict[str, Any]:
    stack = [
        {"file": site.file, "line": site.line, "function": site.function, "text": trace.text_of(site)}
        for site in trace.stack_of(operation)
    ]
    return {**operation_data(operation), "stack": stack}


def _diagnosis_data(trace: Trace, diagnosis: Diagnosis) -> dict[str, Any]:
    def origin(bad: BadOrigin) -> dict[str, Any]:
        site = trace.line_of(bad.operation)
        return {
            "cause": bad.cause,
            "reaches": bad.reaches,
            "tensor": bad.tensor.name if bad.tensor is not None else "",
            "line": None
            if site is None
            else {"file": site.file, "line": site.line, "text": trace.text_of(site)},
            "operation": _operation_data(trace, bad.operation),
        }

    return {
        "first": None if diagnosis.first is None else origin(diagnosis.first),
        "others": [origin(bad) for bad in diagnosis.others],
        "contained": [_operation_data(trace, operation) for operation in diagnosis.contained],
        "operations": len(trace.operations),
        "left_out": trace.left_out,
        "notes": list(trace.notes),
    }
