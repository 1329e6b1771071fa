"""``watchstep check-config FILE``: check a capture file, show what it configures, and what it would record of a model."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NoReturn

from watchstep.capture.config import BUILT_IN, Cadence, CaptureConfig, Collection
from watchstep.capture.document.document import changes_of, schema_text, validated
from watchstep.capture.document.files import load_data
from watchstep.capture.document.kinds import CaptureProblem
from watchstep.errors import ConfigError
from watchstep.platform.terminal_text import escaped_json, printable

if TYPE_CHECKING:
    from watchstep.wrapper.dry_run import CollectionPlan, DryRun

_MOST_NAMES = 3
_SHORTENED = 40


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep check-config",
        description="Check a capture file, and show what it configures. Without a file, check the configuration of the service: "
        "connect to database, broker and stores. Exit code 1 if the file cannot be used, or a check fails.",
    )
    parsed.add_argument("file", nargs="?", metavar="FILE", help="a capture file, YAML or JSON")
    parsed.add_argument("--json", action="store_true", help="print JSON instead of text")
    parsed.add_argument(
        "--schema", action="store_true", help="print the JSON schema of capture files, for editors"
    )
    parsed.add_argument(
        "--dry-run",
        action="store_true",
        help="also show what would be recorded of a model; requires --model, and changes nothing on a store",
    )
    parsed.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="a function that returns a torch.nn.Module, or a module and its optimizer; the current folder is searched first",
    )
    parsed.add_argument(
        "--input",
        metavar="MODULE:FACTORY",
        help="a function that returns the model's input: a tensor, a tuple of arguments, or a mapping of keyword arguments. "
        "Without it, the shapes of activations are unknown",
    )
    parsed.add_argument(
        "--step-seconds", type=float, metavar="SECONDS", help="time of a training step, for sizes per hour"
    )
    parsed.add_argument("--store", help="without a file: the store of the service to check")
    return parsed


def main(arguments: Sequence[str]) -> None:
    """Check a capture file, and exit. Returns if no file is given, so that the service's configuration is checked.

    Raises:
        ConfigError: an option is invalid, or a factory fails.
    """
    options = parser().parse_args(arguments)
    if options.schema:
        sys.stdout.write(schema_text())
        raise SystemExit(0)
    if options.file is None:
        if options.dry_run or options.model or options.input:
            raise ConfigError("watchstep check-config: no file given", "name a capture file before --dry-run")
        return
    if options.dry_run != bool(options.model):
        raise ConfigError(
            "watchstep check-config: --dry-run and --model belong together",
            "use --dry-run --model module:factory",
        )
    if options.step_seconds is not None and not 0 < options.step_seconds < math.inf:
        raise ConfigError(
            f"invalid --step-seconds {options.step_seconds}", "use a time above 0, such as 0.25"
        )
    _check(options)


def _check(options: argparse.Namespace) -> NoReturn:
    try:
        data = load_data(options.file)
    except ConfigError as error:
        text = error.what.removeprefix(f"capture file {options.file}: ")
        config, problems = None, [CaptureProblem("", text, error.hint)]
    else:
        config, problems = validated(data)
    planned = _planned(options, config) if config is not None and options.dry_run else None
    faults = planned.faults if planned is not None else []
    warnings = [] if config is None else list(_warnings(config))
    if options.json:
        _write_json(options.file, config, problems, planned, warnings)
    else:
        for problem in problems:
            _write(f"{options.file}: error: {problem}")
            _write(f"  hint: {problem.hint}")
        if config is not None:
            _write(f"{options.file}: valid")
            _write_lines(_summary(config))
        if config is not None and planned is not None:
            _write_lines(_plan_lines(planned, options.step_seconds, config))
        for fault in (*warnings, *faults):
            _write(f"{options.file}: warning: {fault}")
    raise SystemExit(0 if config is not None else 1)


def _write(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")


def _write_lines(lines: Iterable[str]) -> None:
    for line in lines:
        _write(line)


def _write_json(
    file: str,
    config: CaptureConfig | None,
    problems: list[CaptureProblem],
    planned: DryRun | None,
    warnings: list[str],
) -> None:
    data: dict[str, Any] = {
        "file": file,
        "ok": config is not None,
        "problems": [problem._asdict() for problem in problems],
        "warnings": warnings,
        "document": None if config is None else changes_of(config),
    }
    if planned is not None:
        data["dry_run"] = {**asdict(planned), "faults": planned.faults}
    sys.stdout.write(f"{escaped_json(json.dumps(data, indent=2))}\n")


def _summary(config: CaptureConfig) -> Iterable[str]:
    built_in = CaptureConfig().chosen
    rows = [("COLLECTION", "STATISTICS", "FULL TENSORS", "TENSORS")]
    for name, collection in config.chosen.items():
        if name not in built_in or collection != built_in[name]:
            rows.append(
                (name, _statistics(collection), _full_tensors(collection), _selectors(name, collection))
            )
    yield from _table(rows) if len(rows) > 1 else ()
    unchanged = [name for name, collection in built_in.items() if config.chosen.get(name) == collection]
    if unchanged:
        yield f"as built in: {', '.join(unchanged)}"
    if left_out := [name for name in built_in if name not in config.chosen]:
        yield f"left out: {', '.join(left_out)}"
    changes = {name: value for name, value in changes_of(config).items() if name != "collections"}
    for name, value in changes.items():
        yield f"{name}: {json.dumps(value)}"


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


_ADAPTIVE = "as the budget allows"


def _warnings(config: CaptureConfig) -> Iterable[str]:
    """Return steps of cadences that are due without being listed."""
    for name, collection in config.chosen.items():
        path = f"collections.{name}"
        cadences = {
            f"{path}.cadence": collection.cadence,
            **{f"{path}.modes.{mode}": cadence for mode, cadence in collection.modes.items()},
        }
        for place, cadence in cadences.items():
            if cadence is not None and _adds_no_step(cadence):
                yield _no_effect(f"{place}.steps", cadence, "'stop: 0'")
        if collection.tensors is not None and _adds_no_step(collection.tensors):
            yield _no_effect(f"{path}.tensors.steps", collection.tensors, "'every: null'")


def _adds_no_step(cadence: Cadence) -> bool:
    """Whether a cadence lists steps of which each is due without the list."""
    without = replace(cadence, steps=())
    return cadence.every is not None and bool(cadence.steps) and all(map(without.due, cadence.steps))


def _no_effect(path: str, cadence: Cadence, only: str) -> str:
    return (
        f"{path}: no effect, because 'every' is {cadence.every} and these steps are due anyway; "
        f"add {only} for these steps only"
    )


def _statistics(collection: Collection) -> str:
    texts = ["never" if collection.cadence is None else _cadence(collection.cadence)]
    for mode, cadence in collection.modes.items():
        texts.append(
            f"{mode}: {'never' if cadence is None else _cadence(cadence, counts_steps=mode == 'train')}"
        )
    return "; ".join(texts)


def _full_tensors(collection: Collection) -> str:
    if collection.tensors is None:
        return "never"
    limits = {name: value for name, value in vars(collection.tensor_limits).items() if value is not None}
    shown = [
        f"{name} {_size(value) if isinstance(value, int) else list(value)}" for name, value in limits.items()
    ]
    modes = collection.tensors.modes
    counts_steps = not modes or "train" in modes
    one = [] if counts_steps else ["at most one pass between two steps"]
    return "; ".join([_cadence(collection.tensors, "", counts_steps=counts_steps), *one, *shown])


def _cadence(cadence: Cadence, adaptive: str = _ADAPTIVE, *, counts_steps: bool = True) -> str:
    noun = "step" if counts_steps else "pass"
    if cadence.every is None:
        every = adaptive
    elif cadence.every == 1:
        every = f"every {noun}"
    else:
        every = f"every {cadence.every}" if counts_steps else f"every {cadence.every} passes"
    start = f"from {cadence.start}" if cadence.start else ""
    stop = f"before {cadence.stop}" if cadence.stop is not None else ""
    modes = f"in {', '.join(cadence.modes)}" if cadence.modes else ""
    steps = ", ".join(map(str, cadence.steps))
    if cadence.steps and (not every or (cadence.stop is not None and cadence.stop <= cadence.start)):
        every, start, stop, steps = "", "", "", f"only at {steps}"  # no other step is due
    elif cadence.steps:
        steps = f"and at {steps}"
    span = " ".join(filter(None, (every, start, stop)))
    listed = ", ".join(filter(None, (span, steps)))
    return " ".join(filter(None, (listed, modes)))


def _selectors(name: str, collection: Collection) -> str:
    texts = [
        f"{field} {value!r}" for field in ("include", "exclude") if (value := getattr(collection, field))
    ]
    texts += [
        f"{field} {', '.join(value)}"
        for field in ("modules", "module_types", "roles")
        if (value := getattr(collection, field))
    ]
    if texts:
        return "; ".join(texts)
    return "all of the collection" if name in BUILT_IN else "those of hook.record"


def _planned(options: argparse.Namespace, config: CaptureConfig) -> DryRun:
    made, given = _made(options.model, "--model"), None
    if options.input:
        given = _made(options.input, "--input")
    try:
        from watchstep.wrapper.dry_run import dry_run
    except ModuleNotFoundError as error:
        raise ConfigError(f"--dry-run: {error}", "pip install 'watchstep[torch]'") from error
    return dry_run(config, made, given, has_input=bool(options.input), step_seconds=options.step_seconds)


def _made(name: str, option: str) -> Any:
    """Call a factory.

    Raises:
        ConfigError: it does not exist, or fails.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{option} {name}: not MODULE:FACTORY", f"use {option} train:make_model")
    sys.path[:0] = [os.getcwd()] if os.getcwd() not in sys.path else []  # noqa: PTH109 - as Python writes it
    try:
        factory = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
        return factory()  # type: ignore[operator]
    except Exception as error:
        raise ConfigError(
            f"{option} {name}: {type(error).__name__}: {error}"[:500],
            "name a module that can be imported from here, and a function without arguments in it",
        ) from error


def _plan_lines(planned: DryRun, step_seconds: float | None, config: CaptureConfig) -> Iterable[str]:
    yield ""
    head = ("COLLECTION", "TENSORS", "ROWS PER STEP", "BYTES PER OBJECT", "BYTES PER HOUR", "NAMES")
    rows: list[tuple[str, ...]] = [head]
    rows += [_plan_row(plan, config.chosen[plan.name], step_seconds) for plan in planned.collections]
    yield from _table(rows)
    in_other_modes = [
        plan.name
        for plan in planned.collections
        if (tensors := config.chosen[plan.name].tensors) is not None and not tensors.applies_in("train")
    ]
    if step_seconds is not None and in_other_modes:
        yield (
            f"bytes per hour of {', '.join(in_other_modes)} are unknown: they depend on how often the program makes passes in"
            " these modes"
        )
    if planned.by_program:
        yield f"recorded as the program passes them: {', '.join(planned.by_program)}"
    yield (
        f"a step at which everything is due: {planned.rows} rows, {planned.elements:,} elements,"
        f" about {_milliseconds(planned.full_seconds)} of CPU time"
    )
    yield (
        f"collections with a fixed cadence ('every: N'): {planned.fixed_rows_per_step:.4g} rows of statistics per step on average, about"
        f" {_milliseconds(planned.fixed_seconds_per_step)} of CPU time per step{_share(planned, step_seconds)}"
    )
    if step_seconds is not None and config.overhead_budget is not None and planned.full_seconds:
        allowed = max(config.overhead_budget * step_seconds, config.allowance_seconds)
        steps = max(1, math.ceil(planned.full_seconds / allowed))
        often = "at every step" if steps == 1 else f"about every {steps} steps"
        yield f"the overhead budget allows to measure everything {often}"
    yield f"kernel on this machine: {planned.elements_per_second / 1e9:.2f} billion float32 elements per second"
    if planned.device != "cpu":
        yield f"the model is on a {planned.device} device, whose kernel is not the measured one"
    if not planned.has_input:
        yield (
            "without --input the shapes of activations, inputs and outputs are unknown: their sizes and cost are not included,"
            " and modules that the model does not call are listed too"
        )
    if step_seconds is None:
        yield "sizes per hour require --step-seconds"


def _share(planned: DryRun, step_seconds: float | None) -> str:
    return "" if step_seconds is None else f" ({planned.fixed_seconds_per_step / step_seconds:.2%} of a step)"


def _plan_row(plan: CollectionPlan, collection: Collection, step_seconds: float | None) -> tuple[str, ...]:
    names = [name if len(name) <= _SHORTENED else f"…{name[1 - _SHORTENED :]}" for name in plan.tensors]
    more = f", … ({len(names) - _MOST_NAMES} more)" if len(names) > _MOST_NAMES else ""
    rows = "as the budget allows" if plan.rows_per_step is None else f"{plan.rows_per_step:.4g}"
    if collection.tensors is None:
        sizes = ("", "")
    else:
        unknown = f" + {plan.unknown} unknown" if plan.unknown else ""
        if step_seconds is None:
            per_hour = ""
        elif plan.hour_bytes is None or plan.unknown:
            per_hour = "unknown"
        else:
            per_hour = _size(round(plan.hour_bytes))
        sizes = (f"{_size(plan.object_bytes)}{unknown}", per_hour)
    return (plan.name, str(len(names)), rows, *sizes, ", ".join(names[:_MOST_NAMES]) + more)


def _size(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
