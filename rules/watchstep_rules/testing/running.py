"""Rule tests: builds the rows of a test as recorders write them, evaluates them like a backtest, and compares the alerts.

Results are text in the form of a diff, and JUnit XML.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from watchstep_rules.engine.saved_tensors import SavedTensors
from watchstep_rules.rule_files import rule_file
from watchstep_rules.testing.file import (
    Expectation,
    RuleTest,
    RuleTestFile,
    SavedSeries,
    Series,
    Steps,
    array_of,
    statistics_with,
    values_of,
)
from watchstep_rules.testing.saved import saved_rows

_BEGAN_NS = 1_700_000_000_000_000_000
_OF_SUFFIX = {"gradient": "gradient", "update": "update", "output": "output", "input": "input"}
_COLLECTIONS = {
    "weight": "weights", "bias": "biases", "gradient": "gradients", "update": "updates", "output": "activations",
    "input": "activations", "loss": "losses", "metric": "metrics", "label": "labels",
}  # fmt: skip


def made(test: RuleTest) -> Block:
    """Build all rows of a test, in canonical order, without those about saved tensors.

    Raises:
        ValueError: a series has a value that is impossible for its shape; the message names the series.
    """
    return concatenate(_rows_of_series(test)).ordered()


def made_with_saved(test: RuleTest) -> tuple[Block, Callable[[], SavedTensors]]:
    """Build all rows of a test, in canonical order, and a reader of its saved tensors.

    Raises:
        ValueError: as `made`.
    """
    entries = [(saved, info_of(saved, place)) for place, saved in enumerate(test.saved)]
    interval_ns = round(test.interval * 1e9)
    marks, reader = saved_rows(entries, test.workers, lambda step: _BEGAN_NS + interval_ns * step)
    return concatenate([*_rows_of_series(test), *marks]).ordered(), reader


def _rows_of_series(test: RuleTest) -> list[Block]:
    parts: list[Block] = []
    for index, series in enumerate(test.series):
        workers = range(test.workers) if series.worker is None else (series.worker,)
        try:
            rows = _rows(series, info_of(series, index), round(test.interval * 1e9))
        except ValueError as error:
            raise ValueError(f"series {series.tensor!r}: {error}") from error
        parts.extend(_of_worker(rows, worker) for worker in workers)
    return parts


def info_of(series: Series | SavedSeries, place: int) -> TensorInfo:
    """Return the catalogue entry of a series. Missing fields follow from its name, by the naming scheme of the SDK."""
    path, _, suffix = series.tensor.partition(":")
    module, _, last = path.rpartition(".")
    role = series.role or _OF_SUFFIX.get(suffix) or _role_of(last, bool(module))
    if series.module is not None:
        module = series.module
    elif suffix in {"output", "input"}:
        module = path
    if isinstance(series, SavedSeries):
        shape: tuple[int, ...] | None = array_of(next(iter(series.values.values())), series.dtype).shape
    else:
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
    """The rows of a series, without a worker."""

    info: TensorInfo
    mode: int
    step: np.ndarray[tuple[int], np.dtype[np.int64]]
    time_ns: np.ndarray[tuple[int], np.dtype[np.int64]]
    statistics: StatisticsBatch
    probes: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]


def _rows(series: Series, info: TensorInfo, interval_ns: int) -> _Rows:
    all_values = values_of(str(series.values))
    indices = [index for index, value in enumerate(all_values) if value is not None]
    count = math.prod(info.shape)
    figure = series.figure or ("mean" if count == 1 else "abs_mean")
    step = series.start + series.every * np.array(indices, np.int64)
    probes = {name: _probe(str(values), len(all_values), indices) for name, values in series.probes.items()}
    values = [value for value in all_values if value is not None]
    return _Rows(
        info,
        MODES.index(series.mode),
        step,
        _BEGAN_NS + interval_ns * step,
        statistics_with(figure, values, count),
        probes,
    )


def _probe(text: str, length: int, indices: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = [math.nan if value is None else value for value in values_of(text)]
    all_values = values * length if len(values) == 1 else values
    return np.array([all_values[index] for index in indices], np.float64)


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
    """The expected and the actual result of a rule config, as short texts."""

    rule: str
    expected: str
    got: tuple[str, ...]


@dataclass(frozen=True)
class TestResult:
    """The result of a test.

    Attributes:
        name: name of the test.
        rows: number of evaluated rows.
        seconds: duration.
        differences: differences from the expectation; empty if the test passed.
        problem: why the test could not run; empty if it ran.
    """

    __test__ = False  # keeps pytest from collecting the class

    name: str
    rows: int
    seconds: float
    differences: tuple[RuleDifference, ...] = ()
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return not self.differences and not self.problem


def run_file(held: RuleTestFile, folder: Path) -> list[TestResult]:
    """Run all tests of a file, in order.

    Args:
        held: content of the file.
        folder: folder that its paths are relative to.

    Raises:
        RuleError: a rule file cannot be loaded, or two rule configs have the same name.
    """
    configs = _configs(held, folder)
    return [_run_test(test, configs, folder) for test in held.tests]


def _configs(test_file: RuleTestFile, folder: Path) -> tuple[RuleConfig, ...]:
    if not test_file.rule_files:
        return DEFAULT_RULES
    configs = [config for path in test_file.rule_files for config in rule_file.load(folder / path)]
    names = [config.name for config in configs]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise RuleError(f"rule files: two rule configs are named {duplicate!r}", "give one of them a 'name'")
    return tuple(configs)


def _run_test(test: RuleTest, configs: Sequence[RuleConfig], folder: Path) -> TestResult:
    began = time.perf_counter()
    try:
        rows, outcomes = _evaluate(test, configs, folder)
    except (ValueError, RuleError, StoreError) as error:
        return TestResult(test.name, 0, time.perf_counter() - began, (), str(error))
    differences = _differences(test, outcomes)
    return TestResult(test.name, rows, time.perf_counter() - began, tuple(differences))


def _evaluate(test: RuleTest, configs: Sequence[RuleConfig], folder: Path) -> tuple[int, list[ReplayOutcome]]:
    if test.run is None:
        rows, reader = made_with_saved(test)
        return len(rows), backtest(rows, configs, reader)
    location = test.run if "://" in test.run else str(folder / Path(test.run).expanduser())
    attempts = backtest_run(location, configs).attempts
    chosen = [attempt for attempt in attempts if test.attempt in {None, attempt.attempt}]
    if not chosen:
        names = ", ".join(attempt.attempt for attempt in attempts) or "none"
        raise RuleError(f"run {test.run}: has no attempt {test.attempt or ''!r}", f"it has {names}")
    return chosen[-1].rows, chosen[-1].outcomes


def _differences(test: RuleTest, outcomes: list[ReplayOutcome]) -> list[RuleDifference]:
    by_name = {outcome.config.name: outcome for outcome in outcomes}
    differences = []
    for expected in test.expect:
        outcome = by_name.get(expected.rule)
        if outcome is None:
            differences.append(
                RuleDifference(
                    expected.rule,
                    _expected_text(expected),
                    (f"no rule config; there are {', '.join(sorted(by_name))}",),
                )
            )
        elif not _as_expected(expected, outcome):
            differences.append(
                RuleDifference(expected.rule, _expected_text(expected), _transitions_text(outcome))
            )
    named = {expected.rule for expected in test.expect}
    differences.extend(
        RuleDifference(name, "can be evaluated", _transitions_text(outcome))
        for name, outcome in by_name.items()
        if name not in named and outcome.health is RuleHealth.ERROR
    )
    if test.others == "silent":
        differences.extend(
            RuleDifference(name, "is silent", _transitions_text(outcome))
            for name, outcome in by_name.items()
            if name not in named and outcome.fired and outcome.health is not RuleHealth.ERROR
        )
    return differences


def _as_expected(expected: Expectation, outcome: ReplayOutcome) -> bool:
    health = (
        outcome.health is not RuleHealth.ERROR
        if expected.health is None
        else outcome.health.value == expected.health
    )
    config = outcome.config
    config_matches = expected.severity in {None, config.severity} and expected.stops in {None, config.stops}
    transitions = coalesce(outcome.transitions)
    firings = [
        index
        for index, transition in enumerate(transitions)
        if transition.phase is Phase.FIRING and _is_about(expected, transition)
    ]
    if expected.never:
        return health and config_matches and not firings
    if _is_about_health(expected):
        return health and config_matches
    return health and config_matches and any(_fits(expected, transitions[index:]) for index in firings)


def _is_about_health(expected: Expectation) -> bool:
    """Return whether the expectation is only about health: no data or an error."""
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


def _fits(expected: Expectation, transitions: list[Transition]) -> bool:
    """Return whether an alert that fires at the first transition fires and resolves when expected."""
    ends = [transition.step for transition in transitions if transition.phase is Phase.RESOLVED][:1]
    if expected.resolved_at == "never":
        ends_as_expected = not ends
    else:
        ends_as_expected = expected.resolved_at is None or bool(
            ends and _within(expected.resolved_at, ends[0])
        )
    return ends_as_expected and (expected.fires_at is None or _within(expected.fires_at, transitions[0].step))


def _within(steps: Steps, step: int) -> bool:
    first, last = steps if isinstance(steps, tuple) else (steps, steps)
    return first <= step <= last


def _expected_text(expected: Expectation) -> str:
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


def _transitions_text(outcome: ReplayOutcome) -> tuple[str, ...]:
    """Describe the transitions of the alert, one line for each firing."""
    lines = []
    config = outcome.config
    stops = ", stops the job" if config.stops else ""
    transitions = coalesce(outcome.transitions)
    for index, transition in enumerate(transitions):
        if transition.phase is not Phase.FIRING:
            continue
        ends = [later.step for later in transitions[index:] if later.phase is Phase.RESOLVED]
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
    """Format the results of a file."""
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
    """Format the number of tests and of failures."""
    all_results = [result for of_file in results.values() for result in of_file]
    failed = sum(not result.passed for result in all_results)
    tests = f"{len(all_results)} test{'' if len(all_results) == 1 else 's'}"
    return f"{tests}, {failed} failed" if failed else f"{tests}, all passed"


def junit_xml(results: Mapping[str, Sequence[TestResult]]) -> bytes:
    """Format the results as JUnit XML, with one test suite for each file."""
    root = ET.Element("testsuites")
    for name, of_file in results.items():
        suite = ET.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(of_file)),
            failures=str(sum(bool(result.differences) for result in of_file)),
            errors=str(sum(bool(result.problem) for result in of_file)),
            time=f"{sum(result.seconds for result in of_file):.3f}",
        )
        for result in of_file:
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
    """Replace characters that XML does not allow."""
    return "".join(c if c in "\n\t" or c >= " " else "?" for c in text)
