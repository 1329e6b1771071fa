"""``watchstep samples`` shows which samples steps were trained on; ``watchstep skip-list`` writes them to a file for a training that resumes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from watchstep.client import Client
from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.samples.samples import SampleBatch
from watchstep.format.samples.skip_list import SkipList
from watchstep.hook import STORE
from watchstep.platform.terminal_text import escaped_json, printable
from watchstep.reading.run import Run
from watchstep.reading.run_lookup import find_run
from watchstep.reading.samples import list_samples

_DEFAULT_STORE = "watchstep-runs"
_MAX_SHOWN = 20
_MAX_WIDTH = 60


def samples_parser() -> argparse.ArgumentParser:
    """Return the options of ``watchstep samples``."""
    parsed = argparse.ArgumentParser(
        prog="watchstep samples",
        description="Show which samples a step was trained on, by worker and batch. Without a step, list the steps whose samples are "
        "on the store.",
    )
    _add_run(parsed)
    step = parsed.add_mutually_exclusive_group()
    step.add_argument("--step", type=int, help="the step")
    step.add_argument("--event", metavar="ID", help="the step of an event of the service")
    parsed.add_argument("--worker", type=int, help="only this worker")
    parsed.add_argument("--json", action="store_true", help="print JSON instead of text, with all samples")
    return parsed


def skip_list_parser() -> argparse.ArgumentParser:
    """Return the options of ``watchstep skip-list``."""
    parsed = argparse.ArgumentParser(
        prog="watchstep skip-list",
        description="Write the samples of some steps, of all workers, to a file that a sampler leaves out when the training resumes.",
    )
    _add_run(parsed)
    steps = parsed.add_mutually_exclusive_group(required=True)
    steps.add_argument("--step", type=int, help="the step")
    steps.add_argument("--steps", metavar="A:B", help="the steps from A to B, both included")
    steps.add_argument("--event", metavar="ID", help="the step of an event of the service")
    parsed.add_argument("--worker", type=int, help="only this worker")
    parsed.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write")
    return parsed


def _add_run(parsed: argparse.ArgumentParser) -> None:
    parsed.add_argument("run", metavar="RUN", help="run id, <project>/<run>, or the URL of a run")
    parsed.add_argument(
        "--store",
        help=f"folder or URL that contains the run (default: {STORE}, or the folder {_DEFAULT_STORE})",
    )


def samples_main(arguments: Sequence[str]) -> NoReturn:
    """Print the samples of a step, or the steps with samples, and exit with 0.

    Raises:
        ConfigError, StoreError, ServiceError: an option is invalid, or the run or the service cannot be read.
        NotFoundError: the run does not exist, or the samples of the step are not on the store.
    """
    options = samples_parser().parse_args(arguments)
    run = _run_of(options)
    if options.step is None and options.event is None:
        _write(_index_lines(run, options.worker, as_json=options.json))
    else:
        batches = _samples(run, _step_of(options, run), options.worker)
        _write(_json_lines(batches) if options.json else _batch_lines(batches))
    raise SystemExit(0)


def skip_list_main(arguments: Sequence[str]) -> NoReturn:
    """Write a skip list, and exit with 0.

    Raises:
        ConfigError, StoreError, ServiceError: an option is invalid, the file cannot be written, or the run or the service cannot be read.
        NotFoundError: the run does not exist, or no sample of the steps is on the store.
    """
    options = skip_list_parser().parse_args(arguments)
    run = _run_of(options)
    steps = _range_of(options.steps) if options.steps is not None else _step_of(options, run)
    batches = _samples(run, steps, options.worker)
    skip_list = SkipList.of_batches(f"{run.document.project}/{run.id}", batches)
    try:
        Path(options.output).write_bytes(skip_list.encode())
    except OSError as error:
        raise ConfigError(
            f"file {options.output}: {error.strerror}", "name a file that can be written"
        ) from error
    left_out = sum(batch.left_out for batch in batches)
    unknown = f"; {left_out} further samples were not recorded" if left_out else ""
    shown = _steps_text(sorted({batch.step for batch in batches}))
    _write([f"{options.output}: {len(skip_list)} samples of step {shown}{unknown}"])
    raise SystemExit(0)


def _run_of(options: argparse.Namespace) -> Run:
    return find_run(options.run, options.store or os.environ.get(STORE) or _DEFAULT_STORE)


def _step_of(options: argparse.Namespace, run: Run) -> range:
    step: Any = options.step
    if options.event is not None:
        client = Client.from_environment(run.document.project)
        event = next((event for event in client.events(run.id) if event.id == options.event), None)
        data = {} if event is None else event.data
        step = data.get("evidence", {}).get("step", data.get("step"))
        if not isinstance(step, int):
            raise NotFoundError(
                f"event {options.event!r} of run {run.id}: {'not found' if event is None else 'it names no step'}",
                "'watchstep events' lists the events of a run",
            )
    if step < 0:
        raise ConfigError(f"step {step}", "use a step from 0")
    return range(step, step + 1)


def _range_of(text: str) -> range:
    first, separator, last = text.partition(":")
    try:
        start, end = int(first), int(last)
    except ValueError:
        start, end = 0, -1
    if not separator or not 0 <= start <= end < 2**62:
        raise ConfigError(f"--steps {text!r}", "use A:B, as 100:120")
    return range(start, end + 1)


def _samples(run: Run, steps: range, worker: int | None) -> list[SampleBatch]:
    batches = run.samples(steps, worker)
    for key, reason in run.damaged.items():
        if key.startswith("samples/"):
            sys.stderr.write(f"watchstep: {printable(f'{key}: {reason}')}\n")
    if not batches:
        step = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        raise NotFoundError(
            f"samples of {step} of run {run.id} are not on the store",
            "'watchstep samples RUN' lists the steps that are; 'watchstep sync' uploads what a killed process left on its machine",
        )
    return batches


def _index_lines(run: Run, worker: int | None, *, as_json: bool) -> Iterator[str]:
    index = list_samples(run.store)
    keys = [key for key in index.keys if worker is None or key.worker == worker]
    for key in keys:
        if as_json:
            yield json.dumps(
                {"attempt": key.attempt, "worker": key.worker, "first": key.first, "last": key.last}
            )
        else:
            yield f"{key.attempt}  worker {key.worker}  steps {key.first} to {key.last}"
    if not keys and not as_json:
        yield "no samples are on the store: they are written when something goes wrong, and at the end of the attempt, if batches came from a DataLoader or hook.samples"


def _json_lines(batches: Sequence[SampleBatch]) -> Iterator[str]:
    for batch in batches:
        yield json.dumps(batch.as_data())


def _batch_lines(batches: Sequence[SampleBatch]) -> Iterator[str]:
    for batch in batches:
        where = f"step {batch.step}  worker {batch.worker}"
        if batch.source:
            where += f"  {batch.source}"
        if batch.number >= 0:
            where += f"  epoch {batch.epoch} batch {batch.number}"
        yield f"{where}: {short_text(batch, _MAX_SHOWN)}"


def short_text(batch: SampleBatch, most: int) -> str:
    """Return the first ids of a batch as text, and the number of the others."""
    shown = [str(value)[:_MAX_WIDTH] for value in batch.ids[:most]]
    more = len(batch.ids) - len(shown) + batch.left_out
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _steps_text(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _write(lines: Sequence[str] | Iterator[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{escaped_json(line) if line.startswith('{') else printable(line)}\n")
