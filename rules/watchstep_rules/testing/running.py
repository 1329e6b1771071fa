"""Rule tests: builds the rows of a test as recorders write them, judges them as a backtest does, and compares the alerts.

Results are text in the form of a diff, and JUnit XML.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np

from watchstep.errors import RuleError, StoreError
from watchstep.format.block import Block, Places, concatenate
from watchstep.format.statistics import StatisticsBatch
from watchstep.format.tensors import MODES, Placement, TensorInfo
from watchstep_rules.backtest.backtest import ReplayOutcome, backtest, backtest_run
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition, coalesce
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.rule_files import rule_file
from watchstep_rules.testing.file import (
    Expectation,
    RuleTest,
    RuleTestFile,
    Series,
    Steps,
    statistics_with,
    values_of,
)

_BEGAN_NS = 1_700_000_000_000_000_000
_OF_SUFFIX = {"gradient": "gradient", "update": "update", "output": "output", "input": "input"}
_COLLECTIONS = {
    "weight": "weights", "bias": "biases", "gradient": "gradients", "update": "updates", "output": "activations",
    "input": "activations", "loss": "losses", "metric": "metrics", "label": "labels",
}  # fmt: skip


def made(test: RuleTest) -> Block:
    """All rows, in canonical order.

    Raises:
        ValueError: a series has a figure that no tensor of its shape can have; the message names it.
    """
    parts: list[Block] = []
    for place, series in enumerate(test.series):
        workers = range(test.workers) if series.worker is None else (series.worker,)
        try:
            rows = _rows(series, info_of(series, place), round(test.interval * 1e9))
        except ValueError as error:
            raise ValueError(f"series {series.tensor!r}: {error}") from error
        parts.extend(_of_worker(rows, worker) for worker in workers)
    return concatenate(parts).ordered()


def info_of(series: Series, place: int) -> TensorInfo:
    """What is known of a series' tensor; what it does not say follows from its name, as the SDK names tensors."""
    path, _, suffix = series.tensor.partition(":")
    module, _, last = path.rpartition(".")
    role = series.role or _OF_SUFFIX.get(suffix) or _role_of(last, bool(module))
    if series.module is not None:
        module = series.module
    elif suffix in {"output", "input"}:
        module = path
    shape = series.shape
    if shape is None:
        shape = () if role in {"loss", "metric"} else (8,) if "bias" in last else (8, 8)
    kind = series.module_type if series.module_type is not None else "Linear" if module else ""
    collections = series.collections or (_COLLECTIONS.get(role, "custom"),)
    order = place if series.order is None else series.order
    return TensorInfo(series.tensor, tuple(sorted(collections)), role, module, kind, order, shape)


def _role_of(last: str, has_module: bool) -> str:
    if has_module:
        return "bias" if last == "bias" else "weight"
    if "loss" in last:
        return "loss"
    return "label" if last == "labels" else "metric"


@dataclass(frozen=True)
class _Rows:
    """The rows of a series, of any worker."""

    info: TensorInfo
    mode: int
    step: np.ndarray[tuple[int], np.dtype[np.int64]]
    time_ns: np.ndarray[tuple[int], np.dtype[np.int64]]
    statistics: StatisticsBatch
    probes: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]


def _rows(series: Series, info: TensorInfo, interval_ns: int) -> _Rows:
    written = values_of(str(series.values))
    at = [place for place, value in enumerate(written) if value is not None]
    count = math.prod(info.shape)
    figure = series.figure or ("mean" if count == 1 else "abs_mean")
    step = series.start + series.every * np.array(at, np.int64)
    probes = {name: _probe(str(values), len(written), at) for name, values in series.probes.items()}
    values = [value for value in written if value is not None]
    return _Rows(
        info,
        MODES.index(series.mode),
        step,
        _BEGAN_NS + interval_ns * step,
        statistics_with(figure, values, count),
        probes,
    )


def _probe(text: str, length: int, at: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = [math.nan if value is None else value for value in values_of(text)]
    whole = values * length if len(values) == 1 else values
    return np.array([whole[place] for place in at], np.float64)


def _of_worker(rows: _Rows, worker: int) -> Block:
    number = len(rows.step)
    return Block(
        step=rows.step,
        mode=np.full(number, rows.mode, np.int8),
        worker=np.full(number, worker, np.int32),
        time_ns=rows.time_ns,
        tensor=np.zeros(number, np.int32),
        catalogue=(rows.info,),
        places=Places.of([Placement(replica=worker)] * number),
        statistics=rows.statistics,
        probes=rows.probes,
    )


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
    life = coalesce(outcome.transitions)
    firings = [
        place
        for place, transition in enumerate(life)
        if transition.phase is Phase.FIRING and _is_about(expected, transition)
    ]
    if expected.never:
        return health and of_config and not firings
    if _is_about_health(expected):
        return health and of_config
    return health and of_config and any(_fits(expected, life[place:]) for place in firings)


def _is_about_health(expected: Expectation) -> bool:
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
    life = coalesce(outcome.transitions)
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


def lines(name: str, results: Sequence[TestResult]) -> Iterator[str]:
    """The results of one file."""
    yield name
    for result in results:
        mark = "ok  " if result.passed else "FAIL"
        yield f"  {mark}  {result.name} ({result.rows} rows, {result.seconds:.2f} s)"
        if result.problem:
            yield from (f"        {line}" for line in result.problem.splitlines())
        for difference in result.differences:
            yield f"        {difference.rule}"
            yield f"          - expected: {difference.expected}"
            yield f"          + got:      {difference.got[0]}"
            yield from (f"                    {line}" for line in difference.got[1:])


def summary(results: Mapping[str, Sequence[TestResult]]) -> str:
    """How many of all passed."""
    every = [result for held in results.values() for result in held]
    failed = sum(not result.passed for result in every)
    tests = f"{len(every)} test{'' if len(every) == 1 else 's'}"
    return f"{tests}, {failed} failed" if failed else f"{tests}, all passed"


def junit_xml(results: Mapping[str, Sequence[TestResult]]) -> bytes:
    """JUnit's XML: one test suite a file."""
    root = ET.Element("testsuites")
    for name, held in results.items():
        suite = ET.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(held)),
            failures=str(sum(bool(result.differences) for result in held)),
            errors=str(sum(bool(result.problem) for result in held)),
            time=f"{sum(result.seconds for result in held):.3f}",
        )
        for result in held:
            case = ET.SubElement(
                suite, "testcase", name=_plain(result.name), classname=name, time=f"{result.seconds:.3f}"
            )
            if result.problem:
                ET.SubElement(case, "error", message=_plain(result.problem))
            for difference in result.differences:
                failure = ET.SubElement(
                    case, "failure", message=_plain(f"{difference.rule}: expected: {difference.expected}")
                )
                failure.text = _plain("got: " + "\n".join(difference.got))
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _plain(text: str) -> str:
    """Without characters that XML cannot hold."""
    return "".join(c if c in "\n\t" or c >= " " else "?" for c in text)
