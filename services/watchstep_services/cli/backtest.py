"""``watchstep rules backtest``: what rules would have said of runs that are there already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from watchstep.errors import ConfigError, WatchstepError
from watchstep_rules.backtest.many import Failed, Replayed, Task, backtest_many
from watchstep_rules.backtest.report import location_of, report
from watchstep_rules.backtest.sweep import parse_sweep, variations
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.rule_files import rule_file
from watchstep_services.cli import backtest_output as output
from watchstep_services.cli.backtest_remote import backtest_by_service
from watchstep_services.cli.run_names import locations
from watchstep_services.cli.runs import StoreOption
from watchstep_services.cli.service_options import DEFAULT_STORE
from watchstep_services.core.console import console, echo_json

FAILED = 1
"""Exit code where some run could not be judged, or some rule not be evaluated."""

_OUT = Path("-")


def backtest(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Runs: an id, <project>/<run>, a whole URL; * in any part; <project>/ for all of one."
        ),
    ],
    *,
    rules: Annotated[Path | None, typer.Option(help="Rule file; the default rules where none.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Other values of a parameter: [CONFIG.]PARAMETER=FROM:TO[:NUMBER] or =A,B,C. Several make a grid."
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; as many as cores.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results into this file; - for the output.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    service: Annotated[
        str | None,
        typer.Option(
            help="URL of a service that does it, with WATCHSTEP_TOKEN; '' for the store's own. Runs are <project>/<run>."
        ),
    ] = None,
) -> None:
    """Show which rules would have fired in recorded runs, when and where. Exit code 1 where a run or a rule fails."""
    configs = DEFAULT_RULES if rules is None else rule_file.load(rules)
    varied = variations(configs, [parse_sweep(text, configs) for text in sweep or ()])
    if service is not None:
        results = list(backtest_by_service(service, store, runs, configs, sweep or ()))
    else:
        found, failed = _named(runs, store)
        with _shown(len(found)) as advance:
            results = [*failed, *advance(backtest_many(found, Task(configs, tuple(varied)), jobs))]
    results.sort(key=location_of)
    tested = [result for result in results if isinstance(result, Replayed)]
    # Where the output is the data, what people read goes beside it.
    out = console(stderr=json_file == _OUT)
    for result in tested:
        output.show_run(out, result.outcome)
    if len(tested) > 1:
        output.show_rules(out, tested)
    if varied:
        output.show_sweep(out, varied, tested)
    output.show_failed(console(stderr=True), results)
    if json_file is not None:
        _write(json_file, json.dumps(report(results, varied), indent=1))
    if output.in_error(results):
        raise typer.Exit(FAILED)


def _named(runs: Sequence[str], store: str) -> tuple[list[str], list[Failed]]:
    """Each run once; names that stand for none are told with the results."""
    found: dict[str, None] = {}
    failed = []
    for run in runs:
        try:
            found |= dict.fromkeys(locations(run, store))
        except WatchstepError as error:
            failed.append(Failed(run, error.what, error.hint))
    return list(found), failed


class _Advance:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._task = progress, progress.add_task("judging runs", total=total)

    def __call__(self, results: Iterable[Replayed | Failed]) -> Iterator[Replayed | Failed]:
        for result in results:
            self._progress.advance(self._task)
            yield result


@contextmanager
def _shown(total: int) -> Iterator[_Advance]:
    """A bar on a terminal, and nothing elsewhere."""
    errors = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        yield _Advance(progress, total)


def _write(path: Path, text: str) -> None:
    if path == _OUT:
        echo_json(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror})", "name another file with --json"
        ) from error
