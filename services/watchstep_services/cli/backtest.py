"""``watchstep rules backtest``: evaluates rules on recorded runs and shows the results.

It runs here or, with --service, on the service that has access to the runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from watchstep.errors import ConfigError, ServiceError, WatchstepError
from watchstep.reading.run import open_run
from watchstep_rules.backtest.backtest import (
    AttemptOutcome,
    BacktestOutcome,
    Failed,
    JudgingOrder,
    Replayed,
    ReplayOutcome,
    Task,
    backtest_many,
    location_of,
    read_report,
    report,
)
from watchstep_rules.backtest.replay import NO_JOURNAL
from watchstep_rules.backtest.sweep import Variation, parse_sweep, variations
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Transition
from watchstep_rules.engine.incident import RunName, event_message
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule_files import rule_file
from watchstep_services.cli.connection import DEFAULT_STORE, StoreOption, call, service_of
from watchstep_services.cli.runs.alerts import fired_alerts
from watchstep_services.cli.runs.recorded import locations
from watchstep_services.core.console import console, echo_json, figure, table

FAILED = 1
"""Exit code if a run or a rule could not be evaluated."""

_OUT = Path("-")


def backtest(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Runs: an id, <project>/<run> or a URL, with wildcards; <project>/ for all runs of a project."
        ),
    ],
    *,
    rules: Annotated[Path | None, typer.Option(help="Rule file. Default: the default rules.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of a parameter to try: [CONFIG.]PARAMETER=FROM:TO[:NUMBER] or =A,B,C. Repeat for a grid."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. Default: the number of cores.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write all results to this file as JSON; - for standard output."),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    service: Annotated[
        str | None,
        typer.Option(
            help="Run the backtest on the service of this URL; '' for the service of the store. Specify runs as <project>/<run>. Token: WATCHSTEP_TOKEN."
        ),
    ] = None,
) -> None:
    """Show which rules would have fired in recorded runs, when and where. Exit code 1 if a run or a rule fails.

    Examples:
        watchstep rules backtest night-1 --rules rules.yaml
        watchstep rules backtest 'vision/*' --sweep loss_spike.factor=2:8:4 --json results.json
    """
    configs = DEFAULT_RULES if rules is None else rule_file.load(rules)
    varied = variations(configs, [parse_sweep(text, configs) for text in sweep or ()])
    if service is not None:
        results = list(backtest_by_service(service, store, runs, configs, sweep or ()))
    else:
        found_runs, failed = _resolve(runs, store)
        with _progress(len(found_runs)) as advance:
            results = [*failed, *advance(backtest_many(found_runs, Task(configs, tuple(varied)), jobs))]
        results = [_with_answers(result) for result in results]
    results.sort(key=location_of)
    tested = [result for result in results if isinstance(result, Replayed)]
    # If standard output is the JSON, the text goes to standard error.
    out = console(stderr=json_file == _OUT)
    for result in tested:
        show_run(out, result.outcome)
    if len(tested) > 1:
        show_rules(out, tested)
    if varied:
        show_sweep(out, varied, tested)
    show_failed(console(stderr=True), results)
    if json_file is not None:
        _write(json_file, json.dumps(report(results, varied), indent=1))
    if in_error(results):
        raise typer.Exit(FAILED)


def _with_answers(result: Replayed | Failed) -> Replayed | Failed:
    """Add the answers to whether the run's alerts were right, if a service on this machine watches the run."""
    if isinstance(result, Failed):
        return result
    fired = fired_alerts(open_run(result.outcome.location), "") or ()
    return replace(
        result, was_right={alert["name"]: alert["was_right"] for alert in fired if alert["was_right"]}
    )


def _resolve(runs: Sequence[str], store: str) -> tuple[list[str], list[Failed]]:
    """Return the locations of the runs, without duplicates, and a failure for each name that matches none."""
    unique: dict[str, None] = {}
    failed = []
    for run in runs:
        try:
            unique |= dict.fromkeys(locations(run, store))
        except WatchstepError as error:
            failed.append(Failed(run, error.what, error.hint))
    return list(unique), failed


class _Advance:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._task = progress, progress.add_task("evaluating runs", total=total)

    def __call__(self, results: Iterable[Replayed | Failed]) -> Iterator[Replayed | Failed]:
        for result in results:
            self._progress.advance(self._task)
            yield result


@contextmanager
def _progress(total: int) -> Iterator[_Advance]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
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
            f"{path}: cannot be written ({error.strerror})", "use another file with --json"
        ) from error


_ORDERS = {JudgingOrder.JOURNAL: "in the order of the service", JudgingOrder.STEPS: "by step"}
_NEVER = "by step: no service evaluated it"
_INDENT = (0, 0, 0, 2)


def show_run(out: Console, outcome: BacktestOutcome) -> None:
    """Print the results of one run."""
    for attempt in outcome.attempts:
        several = f", attempt {attempt.attempt}" if len(outcome.attempts) > 1 else ""
        head = f"{outcome.project}/{outcome.run}{several}"
        order = _NEVER if NO_JOURNAL in attempt.notes else _ORDERS[attempt.order]
        out.print(Text.assemble((head, "bold"), f"  {attempt.rows} rows, {order}"))
        _show_attempt(out, attempt, RunName(outcome.project, outcome.run, attempt.attempt))
        out.print()
    if not outcome.attempts:
        out.print(Text.assemble((f"{outcome.project}/{outcome.run}", "bold"), "  nothing recorded"))
        out.print()
    for name, problem in outcome.damaged.items():
        out.print(f"damaged: {name}: {problem}")


def _show_attempt(out: Console, attempt: AttemptOutcome, name: RunName) -> None:
    for note in attempt.notes:
        if note != NO_JOURNAL:
            _indented(out, f"note: {note}")
    shown = table("RULE", "SEVERITY", ">STEP", ">SINCE", "TENSOR", "MESSAGE")
    shown.columns[0].no_wrap = True  # a narrow terminal wraps messages rather than names
    for outcome in attempt.outcomes:
        for change in outcome.fired:
            shown.add_row(*_row(outcome, change, name))
    if shown.row_count:
        out.print(Padding(shown, _INDENT))
    not_fired = [outcome for outcome in attempt.outcomes if not outcome.fired]
    _show_names(
        out,
        "silent",
        [outcome for outcome in not_fired if outcome.health is RuleHealth.OK and not outcome.found],
    )
    brief = [outcome for outcome in not_fired if outcome.health is RuleHealth.OK and outcome.found]
    _show_names(out, "findings, but not for long enough", brief)
    _show_names(out, "no data", [outcome for outcome in not_fired if outcome.health is RuleHealth.NO_DATA])
    for outcome in attempt.outcomes:
        if outcome.health is RuleHealth.ERROR:
            _indented(out, f"error: {outcome.config.name}: {outcome.problem}")


def _row(outcome: ReplayOutcome, change: Transition, name: RunName) -> list[str]:
    config, finding = outcome.config, change.finding
    actions = ", dry run" if config.dry_run else ", stops" if config.stops else ""
    severity = config.severity + actions
    if change.inhibited_by:
        severity = f"inhibited by {change.inhibited_by}" + (", dry run" if config.dry_run else "")
    tensor = "" if finding is None else finding.tensor or "(the run)"
    return [
        config.name,
        severity,
        str(change.step),
        str(change.since_step),
        tensor + (f" @{finding.worker}" if finding is not None and finding.worker else ""),
        "" if finding is None else " ".join(event_message(config, change, name).split()),
    ]


def _show_names(out: Console, label: str, outcomes: Sequence[ReplayOutcome]) -> None:
    names = [outcome.config.name for outcome in outcomes]
    if names:
        _indented(out, f"{label}: {', '.join(names)}")


def _indented(out: Console, text: str) -> None:
    out.print(Padding(Text(text), _INDENT))


def show_rules(out: Console, tested: Sequence[Replayed]) -> None:
    """Print in how many runs each rule config fired, without those that did not fire."""
    shown = table("RULE", ">RUNS", ">OF", ">RIGHT", ">FIRST STEP", "FIRST IN")
    fired: dict[str, list[tuple[int, str]]] = {}
    answers: dict[str, list[str]] = {}
    for result in tested:
        for name, step in _first_steps(result.outcome).items():
            fired.setdefault(name, []).append((step, f"{result.outcome.project}/{result.outcome.run}"))
            answers.setdefault(name, []).append(result.was_right.get(name, ""))
    for name, firsts in sorted(fired.items(), key=lambda item: (-len(item[1]), item[0])):
        step, run = min(firsts)
        shown.add_row(name, str(len(firsts)), str(len(tested)), _precision(answers[name]), str(step), run)
    if shown.row_count:
        out.print(shown)
    else:
        out.print(f"No rule fired in {len(tested)} runs.")
    out.print()


def _precision(answers: Sequence[str]) -> str:
    """Return how many of the alerts with an answer were right: yes, of yes and no."""
    right, wrong = answers.count("yes"), answers.count("no")
    return f"{right} of {right + wrong}" if right + wrong else "-"


def _first_steps(outcome: BacktestOutcome) -> dict[str, int]:
    """Return for each rule config the first step at which it fired without being inhibited."""
    first: dict[str, int] = {}
    for attempt in outcome.attempts:
        for replay in attempt.outcomes:
            steps = [change.step for change in replay.fired if not change.inhibited_by]
            if steps:
                first.setdefault(replay.config.name, min(steps))
    return first


def _failed_rules(results: Sequence[Replayed | Failed]) -> dict[str, tuple[str, set[str]]]:
    """Return for each rule config in error the problem in the first run, and all runs."""
    failed: dict[str, tuple[str, set[str]]] = {}
    for result in results:
        for attempt in result.outcome.attempts if isinstance(result, Replayed) else ():
            for outcome in attempt.outcomes:
                if outcome.health is RuleHealth.ERROR:
                    problem = " ".join(outcome.problem.split())
                    failed.setdefault(outcome.config.name, (problem, set()))[1].add(location_of(result))
    return failed


def in_error(results: Sequence[Replayed | Failed]) -> bool:
    """Return whether a run or a rule could not be evaluated."""
    return any(isinstance(result, Failed) for result in results) or bool(_failed_rules(results))


def show_sweep(out: Console, varied: Sequence[Variation], tested: Sequence[Replayed]) -> None:
    """Print for each combination of values in how many runs the rule fires, and the first step."""
    settings = varied[0].settings
    parameters = [setting.parameter for setting in settings]
    several = len(set(parameters)) < len(parameters)
    out.print(f"Sweep of {', '.join(f'{setting.config}.{setting.parameter}' for setting in settings)}")
    names = [
        f"{setting.config}.{setting.parameter}" if several else setting.parameter for setting in settings
    ]
    shown = table(*(f">{name}" for name in names), ">RUNS", ">OF", ">RIGHT", ">FIRST STEP", "FIRST IN", "")
    for index, variation in enumerate(varied):
        fired = [
            (transition, result.outcome)
            for result in tested
            if (transition := result.fired[index]) is not None
        ]
        answers = [
            result.was_right.get(transition.config, "")
            for result in tested
            if (transition := result.fired[index]) is not None
        ]
        step, run = "-", "-"
        if fired:
            first, outcome = min(fired, key=lambda pair: (pair[0].step, pair[1].location))
            step, run = str(first.step), f"{outcome.project}/{outcome.run}"
        cells = [_value(setting.value) for setting in variation.settings]
        mark = "<- current" if variation.current else ""
        shown.add_row(*cells, str(len(fired)), str(len(tested)), _precision(answers), step, run, mark)
    out.print(Padding(shown, _INDENT))


def _value(value: object) -> str:
    return figure(value) if isinstance(value, float) else str(value)


def show_failed(out: Console, results: Sequence[Replayed | Failed]) -> None:
    """Print the runs and the rules that could not be evaluated."""
    for name, (problem, runs) in sorted(_failed_rules(results).items()):
        count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
        out.print(f"rule {name} cannot be evaluated ({count}): {problem}", soft_wrap=True)
    for result in results:
        if isinstance(result, Failed):
            out.print(f"not evaluated: {result.what}", soft_wrap=True)
            out.print(f"  hint: {result.hint}", soft_wrap=True)


_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 3.0


def backtest_by_service(
    service: str, store: str, runs: Sequence[str], configs: Sequence[RuleConfig], sweeps: Sequence[str]
) -> Iterator[Replayed | Failed]:
    """Run a backtest on a service. Yields the results of a project when all its runs are done.

    Args:
        service: URL of the service.
        store: store of a service on this machine, for an empty URL.
        runs: ``<project>/<run>``; the run may be a pattern.
        configs: the rules.
        sweeps: the values of --sweep.

    Raises:
        ConfigError: a run is specified without its project.
        ServiceError, NotFoundError: the service does not respond, refuses the request, or has no such run.
    """
    url, token = service_of(store, service)
    rules = [config.as_data() for config in configs]
    for project, names in _by_project(runs).items():
        backtests_url = f"{url}/v1/projects/{project}/backtests"
        created = call("POST", backtests_url, token, {"runs": names, "rules": rules, "sweep": list(sweeps)})
        yield from _results(f"{backtests_url}/{created['id']}", token, created)


def _by_project(runs: Sequence[str]) -> dict[str, list[str]]:
    by_project: dict[str, list[str]] = {}
    for run in runs:
        project, slash, name = run.partition("/")
        if not slash or "/" in name or "*" in project:
            raise ConfigError(
                f"run {run!r}: not of the form <project>/<run>", "use <project>/<run>; the run may contain *"
            )
        by_project.setdefault(project, []).append(name or "*")
    return by_project


def _results(url: str, token: str, backtest: dict[str, Any]) -> list[Replayed | Failed]:
    pause = _FIRST_PAUSE
    while backtest["report"] is None:
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 1.5 * pause)
        backtest = call("GET", url, token)
    try:
        return read_report(backtest["report"])[0]
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(
            f"{url}: the report cannot be read ({error})", "use the same version as the service"
        ) from error
