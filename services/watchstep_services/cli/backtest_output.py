"""How a backtest's results are shown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from watchstep_rules.backtest.backtest import AttemptOutcome, BacktestOutcome, JudgingOrder, ReplayOutcome
from watchstep_rules.backtest.many import Failed, Replayed
from watchstep_rules.backtest.replay_source import NO_JOURNAL
from watchstep_rules.backtest.report import location_of
from watchstep_rules.backtest.sweep import Variation
from watchstep_rules.engine.alert_memory import Transition
from watchstep_rules.engine.explanation import RunName, say
from watchstep_rules.engine.judge import RuleHealth
from watchstep_services.core.console import figure, table

_ORDERS = {JudgingOrder.JOURNAL: "as the service judged it", JudgingOrder.STEPS: "by steps"}
_NEVER = "by steps: no service judged it"
_INDENT = (0, 0, 0, 2)


def show_run(out: Console, outcome: BacktestOutcome) -> None:
    """What was said of one run."""
    for attempt in outcome.attempts:
        several = f", attempt {attempt.attempt}" if len(outcome.attempts) > 1 else ""
        head = f"{outcome.project}/{outcome.run}{several}"
        how = _NEVER if NO_JOURNAL in attempt.notes else _ORDERS[attempt.order]
        out.print(Text.assemble((head, "bold"), f"  {attempt.rows} rows, {how}"))
        _show_attempt(out, attempt, RunName(outcome.project, outcome.run, attempt.attempt))
        out.print()
    if not outcome.attempts:
        out.print(Text.assemble((f"{outcome.project}/{outcome.run}", "bold"), "  nothing recorded"))
        out.print()
    for name, why in outcome.damaged.items():
        out.print(f"damaged: {name}: {why}")


def _show_attempt(out: Console, attempt: AttemptOutcome, name: RunName) -> None:
    for note in attempt.notes:
        if note != NO_JOURNAL:
            _indented(out, f"note: {note}")
    shown = table("RULE", "SEVERITY", ">STEP", ">SINCE", "TENSOR", "MESSAGE")
    shown.columns[0].no_wrap = True  # a narrow terminal breaks messages before it breaks names
    for outcome in attempt.outcomes:
        for change in outcome.fired:
            shown.add_row(*_row(outcome, change, name))
    if shown.row_count:
        out.print(Padding(shown, _INDENT))
    quiet = [one for one in attempt.outcomes if not one.fired]
    _show_names(out, "silent", [one for one in quiet if one.health is RuleHealth.OK and not one.found])
    brief = [one for one in quiet if one.health is RuleHealth.OK and one.found]
    _show_names(out, "findings, but not for long enough", brief)
    _show_names(out, "no data", [one for one in quiet if one.health is RuleHealth.NO_DATA])
    for one in attempt.outcomes:
        if one.health is RuleHealth.ERROR:
            _indented(out, f"error: {one.config.name}: {one.problem}")


def _row(outcome: ReplayOutcome, change: Transition, name: RunName) -> list[str]:
    config, finding = outcome.config, change.finding
    follows = ", dry run" if config.dry_run else ", stops" if config.stops else ""
    severity = config.severity + follows
    if change.inhibited_by:
        severity = f"quiet ({change.inhibited_by})" + (", dry run" if config.dry_run else "")
    where = "" if finding is None else finding.tensor or "(the run)"
    return [
        config.name,
        severity,
        str(change.step),
        str(change.since_step),
        where + (f" @{finding.worker}" if finding is not None and finding.worker else ""),
        "" if finding is None else " ".join(say(config, change, name).split()),
    ]


def _show_names(out: Console, what: str, outcomes: Sequence[ReplayOutcome]) -> None:
    names = [one.config.name for one in outcomes]
    if names:
        _indented(out, f"{what}: {', '.join(names)}")


def _indented(out: Console, text: str) -> None:
    out.print(Padding(Text(text), _INDENT))


def show_rules(out: Console, tested: Sequence[Replayed]) -> None:
    """In how many runs each rule config fired; only those that did."""
    shown = table("RULE", ">RUNS", ">OF", ">FIRST STEP", "FIRST IN")
    seen: dict[str, list[tuple[int, str]]] = {}
    for result in tested:
        for name, step in _first_steps(result.outcome).items():
            seen.setdefault(name, []).append((step, f"{result.outcome.project}/{result.outcome.run}"))
    for name, found in sorted(seen.items(), key=lambda item: (-len(item[1]), item[0])):
        step, run = min(found)
        shown.add_row(name, str(len(found)), str(len(tested)), str(step), run)
    if shown.row_count:
        out.print(shown)
    else:
        out.print(f"No rule fired in {len(tested)} runs.")
    out.print()


def _first_steps(outcome: BacktestOutcome) -> dict[str, int]:
    """Rule config → the first step at which it fired and told somebody."""
    first: dict[str, int] = {}
    for attempt in outcome.attempts:
        for one in attempt.outcomes:
            steps = [change.step for change in one.fired if not change.inhibited_by]
            if steps:
                first.setdefault(one.config.name, min(steps))
    return first


def _ill_rules(results: Sequence[Replayed | Failed]) -> dict[str, tuple[str, set[str]]]:
    """Rule config in error → why, in the first run, and in which runs."""
    found: dict[str, tuple[str, set[str]]] = {}
    for result in results:
        for attempt in result.outcome.attempts if isinstance(result, Replayed) else ():
            for one in attempt.outcomes:
                if one.health is RuleHealth.ERROR:
                    problem = " ".join(one.problem.split())
                    found.setdefault(one.config.name, (problem, set()))[1].add(location_of(result))
    return found


def in_error(results: Sequence[Replayed | Failed]) -> bool:
    """Whether a run could not be judged, or a rule not be evaluated."""
    return any(isinstance(result, Failed) for result in results) or bool(_ill_rules(results))


def show_sweep(out: Console, varied: Sequence[Variation], tested: Sequence[Replayed]) -> None:
    """Of each combination of values: in how many runs it fires, and when first."""
    settings = varied[0].settings
    parameters = [setting.parameter for setting in settings]
    several = len(set(parameters)) < len(parameters)
    out.print(f"Sweep of {', '.join(f'{one.config}.{one.parameter}' for one in settings)}")
    names = [f"{one.config}.{one.parameter}" if several else one.parameter for one in settings]
    shown = table(*(f">{name}" for name in names), ">RUNS", ">OF", ">FIRST STEP", "FIRST IN", "")
    for place, variation in enumerate(varied):
        fired = [(held, result.outcome) for result in tested if (held := result.fired[place]) is not None]
        step, where = "-", "-"
        if fired:
            first, outcome = min(fired, key=lambda pair: (pair[0].step, pair[1].location))
            step, where = str(first.step), f"{outcome.project}/{outcome.run}"
        cells = [_value(setting.value) for setting in variation.settings]
        mark = "<- now" if variation.current else ""
        shown.add_row(*cells, str(len(fired)), str(len(tested)), step, where, mark)
    out.print(Padding(shown, _INDENT))


def _value(value: object) -> str:
    return figure(value) if isinstance(value, float) else str(value)


def show_failed(out: Console, results: Sequence[Replayed | Failed]) -> None:
    """Runs that could not be judged, and rules that could not be evaluated."""
    for name, (problem, runs) in sorted(_ill_rules(results).items()):
        many = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
        out.print(f"rule {name} cannot be evaluated ({many}): {problem}", soft_wrap=True)
    for result in results:
        if isinstance(result, Failed):
            out.print(f"not judged: {result.what}", soft_wrap=True)
            out.print(f"  hint: {result.hint}", soft_wrap=True)
