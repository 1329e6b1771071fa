"""Run the tests of a file: judge the rows as a backtest does, and hold the alerts against what is expected."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from watchstep.errors import RuleError, StoreError
from watchstep_rules.backtest.backtest import ReplayOutcome, backtest, backtest_run
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert_memory import Phase, Transition
from watchstep_rules.engine.coalesce import as_told
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule_files import rule_file
from watchstep_rules.testing.file import Expectation, RuleTest, RuleTestFile, Steps
from watchstep_rules.testing.making import made

_MOST_SHOWN = 5


@dataclass(frozen=True)
class RuleDifference:
    """What one rule config should have done, and what it did; each in a few words."""

    rule: str
    expected: str
    got: tuple[str, ...]


@dataclass(frozen=True)
class TestResult:
    """How one test went.

    Attributes:
        name: the test's.
        rows: rows that were judged.
        seconds: that it took.
        differences: none where it passed.
        problem: why it could not be run; empty where it could.
    """

    __test__ = False  # its name is no test for pytest

    name: str
    rows: int
    seconds: float
    differences: tuple[RuleDifference, ...] = ()
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything was as expected."""
        return not self.differences and not self.problem


def run_file(held: RuleTestFile, folder: Path) -> list[TestResult]:
    """All tests of a file, in order.

    Args:
        held: its content.
        folder: where its paths begin.

    Raises:
        RuleError: a rule file cannot be loaded, or two have a rule config of one name.
    """
    configs = _configs(held, folder)
    return [_timed(test, configs, folder) for test in held.tests]


def _configs(held: RuleTestFile, folder: Path) -> tuple[RuleConfig, ...]:
    if not held.rule_files:
        return DEFAULT_RULES
    found = [config for path in held.rule_files for config in rule_file.load(folder / path)]
    names = [config.name for config in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RuleError(f"rule files: two rule configs are named {twice!r}", "give one of them a 'name'")
    return tuple(found)


def _timed(test: RuleTest, configs: Sequence[RuleConfig], folder: Path) -> TestResult:
    began = time.perf_counter()
    try:
        rows, outcomes = _judged(test, configs, folder)
    except (ValueError, RuleError, StoreError) as error:
        return TestResult(test.name, 0, time.perf_counter() - began, (), str(error))
    differences = _differences(test, outcomes)
    return TestResult(test.name, rows, time.perf_counter() - began, tuple(differences))


def _judged(test: RuleTest, configs: Sequence[RuleConfig], folder: Path) -> tuple[int, list[ReplayOutcome]]:
    if test.run is None:
        rows = made(test)
        return len(rows), backtest(rows, configs)
    place = test.run if "://" in test.run else str(folder / Path(test.run).expanduser())
    attempts = backtest_run(place, configs).attempts
    chosen = [found for found in attempts if test.attempt in {None, found.attempt}]
    if not chosen:
        names = ", ".join(found.attempt for found in attempts) or "none"
        raise RuleError(f"run {test.run}: has no attempt {test.attempt or ''!r}", f"it has {names}")
    return chosen[-1].rows, chosen[-1].outcomes


def _differences(test: RuleTest, outcomes: list[ReplayOutcome]) -> list[RuleDifference]:
    by_name = {outcome.config.name: outcome for outcome in outcomes}
    found = []
    for expected in test.expect:
        outcome = by_name.get(expected.rule)
        if outcome is None:
            found.append(
                RuleDifference(
                    expected.rule,
                    _words(expected),
                    (f"no rule config; there are {', '.join(sorted(by_name))}",),
                )
            )
        elif not _as_expected(expected, outcome):
            found.append(RuleDifference(expected.rule, _words(expected), _life(outcome)))
    named = {expected.rule for expected in test.expect}
    found.extend(
        RuleDifference(name, "can be evaluated", _life(outcome))
        for name, outcome in by_name.items()
        if name not in named and outcome.health is RuleHealth.ERROR
    )
    if test.others == "silent":
        found.extend(
            RuleDifference(name, "is silent", _life(outcome))
            for name, outcome in by_name.items()
            if name not in named and outcome.fired and outcome.health is not RuleHealth.ERROR
        )
    return found


def _as_expected(expected: Expectation, outcome: ReplayOutcome) -> bool:
    health = (
        outcome.health is not RuleHealth.ERROR
        if expected.health is None
        else outcome.health.value == expected.health
    )
    config = outcome.config
    of_config = expected.severity in {None, config.severity} and expected.stops in {None, config.stops}
    life = as_told(outcome.transitions)
    firings = [
        place
        for place, transition in enumerate(life)
        if transition.phase is Phase.FIRING and _is_about(expected, transition)
    ]
    if expected.never:
        return health and of_config and not firings
    if _says_nothing_of_firing(expected):
        return health and of_config
    return health and of_config and any(_fits(expected, life[place:]) for place in firings)


def _says_nothing_of_firing(expected: Expectation) -> bool:
    """An expectation of no data or of an error is that alone."""
    return (
        expected.health in {"no_data", "error"} and expected.fires_at is None and expected.resolved_at is None
    )


def _is_about(expected: Expectation, firing: Transition) -> bool:
    finding = firing.finding
    if finding is None:
        return expected.tensor is None and expected.worker is None and expected.message is None
    return (
        expected.tensor in {None, finding.tensor}
        and expected.worker in {None, finding.worker}
        and expected.mode in {None, finding.mode}
        and (expected.message is None or expected.message in finding.message)
    )


def _fits(expected: Expectation, life: list[Transition]) -> bool:
    """Whether an alert that begins to fire there does so when it shall, and ends when it shall."""
    ends = [transition.step for transition in life if transition.phase is Phase.RESOLVED][:1]
    if expected.resolved_at == "never":
        ended = not ends
    else:
        ended = expected.resolved_at is None or bool(ends and _within(expected.resolved_at, ends[0]))
    return ended and (expected.fires_at is None or _within(expected.fires_at, life[0].step))


def _within(steps: Steps, step: int) -> bool:
    first, last = steps if isinstance(steps, tuple) else (steps, steps)
    return first <= step <= last


def _words(expected: Expectation) -> str:
    parts = ["does not fire" if expected.never else "fires"]
    if expected.fires_at is not None:
        parts[0] += f" at {_range(expected.fires_at)}"
    for name in ("tensor", "worker", "mode", "severity"):
        value = getattr(expected, name)
        if value is not None:
            parts.append(f"{name} {value}")
    if expected.message is not None:
        parts.append(f"message with {expected.message!r}")
    if expected.stops is not None:
        parts.append("stops the job" if expected.stops else "stops nothing")
    if expected.resolved_at is not None:
        never = expected.resolved_at == "never"
        parts.append("is not resolved" if never else f"resolved at {_range(expected.resolved_at)}")
    if expected.health is not None:
        parts.append(f"health {expected.health}")
    return ", ".join(parts)


def _range(steps: Steps | str) -> str:
    return f"{steps[0]} to {steps[1]}" if isinstance(steps, tuple) else str(steps)


def _life(outcome: ReplayOutcome) -> tuple[str, ...]:
    """What the alert did, one line a firing."""
    lines = []
    config = outcome.config
    stops = ", stops the job" if config.stops else ""
    life = as_told(outcome.transitions)
    for place, transition in enumerate(life):
        if transition.phase is not Phase.FIRING:
            continue
        ends = [after.step for after in life[place:] if after.phase is Phase.RESOLVED]
        end = f"resolved at {ends[0]}" if ends else "not resolved"
        finding = transition.finding
        about = (
            f", tensor {finding.tensor}, worker {finding.worker}"
            if finding is not None and finding.tensor
            else ""
        )
        lines.append(f"fires at {transition.step}{about}, severity {config.severity}{stops}, {end}")
        if finding is not None:
            lines.append(f"  {finding.message}")
    if not lines:
        lines.append(f"does not fire ({len(outcome.findings)} findings, severity {config.severity}{stops})")
    if outcome.health is not RuleHealth.OK:
        lines.append(
            f"health {outcome.health.value}{': ' if outcome.problem else ''}{' '.join(outcome.problem.split())}"
        )
    hidden = len(lines) - 2 * _MOST_SHOWN
    return tuple(lines) if hidden <= 0 else (*lines[: 2 * _MOST_SHOWN], f"… and {hidden} lines more")
