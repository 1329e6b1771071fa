"""Run a suite of tests, keep its report, and print what a reader of a log's last lines needs.

    python -m tests.suite test [--retry] [pytest's arguments]
    python -m tests.suite report

The JUnit report and a summary go to `$CI_REPORTS`, by default `reports/`: NAME.xml holds each test's duration and, as the properties
`cpu_seconds` and `children_seconds`, the processor time that it took, with and of the processes that it started; NAME.json holds the totals. The last lines are the slowest tests, the suite's cost
and, where tests failed, one line for each. `report` prints a line for each suite whose summary is there, what was skipped and why,
and the tests that passed only when they ran once more.

Tests belong to one of three tiers. Those without a mark are run for each commit; those marked `ci` take long, or need other processes,
PostgreSQL or another framework; those marked `release` are compilers, campaigns and fuzzers, for which no commit waits.

A suite has a budget of processor time (user and system, of pytest and of all processes that it waited for), because wall time says
little on a shared machine. The same work takes up to three times as long on a slow or busy processor, so that a piece of work is timed all
the while and the cost is stated as of the processor on which the budgets were measured. A suite that exceeds its budget fails.
`WATCHSTEP_SUITE_BUDGET` replaces the budget, in seconds; 0 is no limit.

With `--retry`, up to a dozen failed tests in up to six files run once more, alone: real servers and processes can fail for time on
a shared machine. Tests that pass then are listed as flaky, and the suite passes. After a crash of a worker process nothing runs
once more: the same fault can crash the trainings of users.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
SLOWEST = 20
# Processor time of a piece of work (`Processor`) where the budgets were measured.
WORK_SECONDS = 0.16
# One line of a failure, as long as a terminal shows without breaking it.
LINE = 200
RETRIED_TESTS, RETRIED_FILES = 12, 6
FAULTS = "tests/sdk/faults"
WEB = "tests/web"
STORES = "tests/stores"
FRAMEWORKS = "tests/frameworks"
LAWS = ("tests/rules/test_contract.py", "tests/rules/engine", "tests/sdk/format/test_statistics.py")
TIERS = ("ci", "release")
_WHOLE_FILE = re.compile(rf"^pytestmark = (?:\[\s*)?pytest\.mark\.({'|'.join(TIERS)})\b", re.MULTILINE)


@dataclass(frozen=True)
class Suite:
    """What a suite collects, and how much processor time it may take.

    Attributes:
        arguments: pytest's.
        workers: processes that run tests; each runs whole files, whose tests share their servers. Tests wait for servers and child
            processes for a quarter of their time, so that three keep two cores busy.
        budget: seconds of processor time on the processor on which `WORK_SECONDS` was measured.
        examples: of a Hypothesis law that does not set its own number.
    """

    arguments: tuple[str, ...]
    workers: int = 3
    budget: float = 0.0
    examples: int | None = None


def suites() -> dict[str, Suite]:
    """Each suite by its name."""
    return {
        "test": Suite(("-m", "not ci and not release", *_commit_arguments()), budget=1100.0, examples=12),
        "test-ci": Suite(("-m", "ci and not release", *marked_files("ci")), budget=1500.0, examples=25),
        "test-faults": Suite((FAULTS,), workers=0, budget=150.0),
        "test-stores": Suite((STORES,), workers=0, budget=90.0),
        "test-web": Suite((WEB,), workers=0, budget=290.0),
        # One process: JAX and TensorFlow have threads once they are imported, and a process with threads must not fork.
        "test-frameworks": Suite((FRAMEWORKS, "-m", "not release"), workers=0, budget=750.0, examples=25),
        "test-release": Suite(("-m", "release", *marked_files("release")), examples=100),
        "test-laws": Suite(LAWS, examples=400),
    }


def _commit_arguments() -> list[str]:
    """Arguments that leave out what has no test of the first tier, so that it is not imported."""
    others = [FAULTS, WEB, FRAMEWORKS, STORES]
    whole = [
        str(path.relative_to(ROOT)) for path in _test_files() if _WHOLE_FILE.search(path.read_text("utf-8"))
    ]
    return [argument for path in (*others, *whole) for argument in ("--ignore", path)]


def _test_files() -> list[Path]:
    """Test files of the suites that are chosen by marks."""
    apart = tuple(ROOT / folder for folder in (FAULTS, WEB, FRAMEWORKS, STORES))
    return [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if not any(path.is_relative_to(folder) for folder in apart)
    ]


def marked_files(mark: str) -> list[str]:
    """Test files that name a mark or use a fixture whose parameters have it, so that the others are not imported."""
    named = re.compile(
        rf"mark\.{mark}\b" + (r"|\b(database|empty_database|driven)\b" if mark == "ci" else "")
    )
    return [str(path.relative_to(ROOT)) for path in _test_files() if named.search(path.read_text("utf-8"))]


@dataclass(frozen=True)
class Case:
    """A test's result.

    Attributes:
        name: as pytest takes it for an argument.
        cpu_seconds: processor time of the test's process and of the children that it waited for.
        reason: the first line of its failure; None where it passed or was skipped.
        has_crashed: whether the process crashed that ran it.
        skipped: why it was skipped; None where it ran.
    """

    name: str
    seconds: float
    cpu_seconds: float | None
    reason: str | None
    has_crashed: bool = False
    skipped: str | None = None

    @property
    def file(self) -> str:
        """The test's file, or what collection names."""
        return self.name.partition("::")[0]


def read_report(path: Path) -> list[Case]:
    """The tests of a JUnit report."""
    return [_case(element) for element in ET.parse(path).iter("testcase")]


def _case(element: ET.Element) -> Case:
    properties = {each.get("name"): each.get("value") for each in element.iter("property")}
    failure = next((each for each in element if each.tag in {"failure", "error"}), None)
    text = "" if failure is None else failure.text or ""
    has_crashed = text.startswith("worker ") and "crashed while running" in text
    cpu = properties.get("cpu_seconds")
    skipped = element.find("skipped")
    return Case(
        properties.get("nodeid") or f"{element.get('classname', '')}::{element.get('name', '')}",
        float(element.get("time", "0")),
        None if cpu is None else float(cpu),
        None
        if failure is None
        else _first_line(text if has_crashed else failure.get("message") or text or "failed"),
        has_crashed,
        None if skipped is None else _first_line(skipped.get("message") or "no reason"),
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "failed")


def slowest(cases: list[Case]) -> list[str]:
    """A line for each of the slowest tests, the slowest first."""
    ranked = sorted(cases, key=lambda case: case.seconds, reverse=True)[:SLOWEST]
    return [f"{case.seconds:8.1f} s {_cpu(case)}  {case.name}" for case in ranked]


def _cpu(case: Case) -> str:
    return " " * 12 if case.cpu_seconds is None else f"{case.cpu_seconds:6.1f} s CPU"


def failures(cases: list[Case], word: str = "FAILED") -> list[str]:
    """A line for each failed test."""
    return [f"{word} {case.name}: {case.reason}"[:LINE] for case in cases if case.reason is not None]


@dataclass(frozen=True)
class Result:
    """What a run of a suite came to."""

    cases: list[Case]
    flaky: list[Case]
    code: int
    seconds: float
    cpu_seconds: float
    budget: float
    slowness: float = 1.0

    @property
    def cost(self) -> float:
        """Seconds of processor time that it would have taken on the processor on which budgets were measured."""
        return self.cpu_seconds / self.slowness

    @property
    def over_budget(self) -> bool:
        """Whether it took more processor time than it may."""
        return 0 < self.budget < self.cost

    @property
    def passed(self) -> bool:
        """Whether the suite as a whole passed."""
        return self.code == 0 and not self.over_budget


@dataclass
class Processor:
    """How slow the processor is: a piece of work is timed every ten seconds."""

    _work: str = field(
        default_factory=lambda: json.dumps([{"name": str(n), "value": n / 7} for n in range(60_000)])
    )
    _times: list[float] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._measure()
        threading.Thread(target=self._watch, daemon=True).start()

    def slowness(self) -> float:
        """Return by what factor the same work takes longer than on the processor on which budgets were measured, and stop."""
        self._is_over.set()
        return max(1.0, sum(self._times) / len(self._times) / WORK_SECONDS)

    def _watch(self) -> None:
        while not self._is_over.wait(10):
            self._measure()

    def _measure(self) -> None:
        start = time.thread_time()
        json.dumps(json.loads(self._work))
        self._times.append(time.thread_time() - start)


def run(name: str, suite: Suite, reports: Path, extra: list[str], *, retry: bool) -> Result:
    """Run a suite, and its few failed tests again if asked to."""
    report = reports / f"{name}.xml"
    start = time.monotonic()
    processor = Processor()
    code, cases = _pytest(suite, [*suite.arguments, *extra], report)
    flaky: list[Case] = []
    failed = [case for case in cases if case.reason is not None]
    # 1 is pytest's code for failed tests; anything else is no result of tests.
    if retry and code == 1 and _few(failed):
        print(f"=== {len(failed)} tests run once more, alone", flush=True)
        again = reports / f"{name}-again.xml"
        code, repeated = _pytest(replace(suite, workers=0), [case.name for case in failed], again)
        passed = {case.name for case in repeated if case.reason is None}
        flaky = [case for case in failed if case.name in passed]
        cases = [replace(case, reason=None) if case in flaky else case for case in cases]
        code = code or (1 if len(flaky) < len(failed) else 0)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    budget = float(os.environ.get("WATCHSTEP_SUITE_BUDGET") or suite.budget)
    seconds, cpu = time.monotonic() - start, usage.ru_utime + usage.ru_stime
    return Result(cases, flaky, code, seconds, cpu, budget, processor.slowness())


def _few(failed: list[Case]) -> bool:
    files = {case.file for case in failed}
    is_crash = any(case.has_crashed for case in failed)
    return 0 < len(failed) <= RETRIED_TESTS and len(files) <= RETRIED_FILES and not is_crash


def _pytest(suite: Suite, arguments: list[str], report: Path) -> tuple[int, list[Case]]:
    report.unlink(missing_ok=True)
    workers = ["-p", "tests.forking", "--workers", str(suite.workers)] if suite.workers else []
    environment = dict(os.environ)
    if suite.examples is not None:
        environment["WATCHSTEP_LAW_EXAMPLES"] = str(suite.examples)
    command = [sys.executable, "-m", "pytest", *workers, f"--junitxml={report}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return done.returncode, read_report(report) if report.exists() else []


def summary(name: str, result: Result) -> list[str]:
    """The last lines of a suite's output."""
    cost = f"{result.cpu_seconds:.0f} s of processor time in {result.seconds:.0f} s"
    if result.slowness > 1:
        cost += f", {result.cost:.0f} s on a processor that is not {result.slowness:.1f} times as slow"
    lines = ["", f"=== make {name}: the slowest of {len(result.cases)} tests", *slowest(result.cases)]
    lines.append(
        f"=== make {name}: {cost}, budget {result.budget:.0f} s"
        if result.budget
        else f"=== make {name}: {cost}"
    )
    lines += failures(result.cases)
    lines += [f"FLAKY {case.name}: {case.reason}"[:LINE] for case in result.flaky]
    if result.code and not failures(result.cases):
        lines.append(f"FAILED make {name}: pytest ended with code {result.code}")
    if result.over_budget:
        lines.append(f"FAILED make {name}: exceeded its budget of {result.budget:.0f} s of processor time")
    return lines


def report(reports: Path) -> list[str]:
    """Return a line for each suite that has run, why tests were skipped, and the tests that needed a second run."""
    lines = [f"{'suite':18}{'tests':>7}{'wall':>8}{'CPU':>8}{'budget':>8}{'skipped':>9}"]
    skipped: Counter[str] = Counter()
    flaky: list[str] = []
    for path in sorted(reports.glob("*.json"), key=lambda path: path.stat().st_mtime):
        each = json.loads(path.read_text(encoding="utf-8"))
        reasons = each["skipped"]
        skipped.update(reasons)
        flaky += each["flaky"]
        lines.append(
            f"{each['suite']:18}{each['tests']:7}{each['seconds']:6.0f} s{each['cost_seconds']:6.0f} s"
            f"{each['budget_seconds']:6.0f} s{sum(reasons.values()):9}"
        )
    lines += [f"skipped {count}: {reason}"[:LINE] for reason, count in skipped.most_common()]
    lines.append(f"passed only when run once more: {', '.join(flaky) or 'none'}")
    return lines


def main(arguments: list[str]) -> int:
    """Run the suite that the first argument names, or report on those that have run."""
    name, *extra = arguments
    reports = Path(os.environ.get("CI_REPORTS") or ROOT / "reports").resolve()
    reports.mkdir(parents=True, exist_ok=True)
    if name == "report":
        print("\n".join(report(reports)), flush=True)
        return 0
    retry = "--retry" in extra
    result = run(name, suites()[name], reports, [each for each in extra if each != "--retry"], retry=retry)
    totals = {
        "suite": name,
        "passed": result.passed,
        "tests": len(result.cases),
        "seconds": round(result.seconds, 1),
        "cpu_seconds": round(result.cpu_seconds, 1),
        "cost_seconds": round(result.cost, 1),
        "budget_seconds": result.budget,
        "failed": failures(result.cases),
        "flaky": [case.name for case in result.flaky],
        "skipped": Counter(case.skipped for case in result.cases if case.skipped is not None),
    }
    (reports / f"{name}.json").write_text(json.dumps(totals, indent=2) + "\n", encoding="utf-8")
    print("\n".join(summary(name, result)), flush=True)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
