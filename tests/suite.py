"""Run a suite of tests, keep its report, and print what a reader of a log's last lines needs.

    python -m tests.suite test [--retry] [pytest's arguments]

The JUnit report and a summary go to `$CI_REPORTS`, by default `reports/`: NAME.xml holds each test's duration and, as the property
`cpu_seconds`, the processor time that it took; NAME.json holds the totals. The last lines are the slowest tests, the suite's cost
and, where tests failed, one line for each.

A suite has a budget of processor time (user and system, of pytest and of all processes that it waited for), because wall time says
little on a shared machine. A suite that exceeds it fails. `WATCHSTEP_SUITE_BUDGET` replaces the budget, in seconds; 0 is no limit.

With `--retry`, up to a dozen failed tests in up to six files run once more, alone: real servers and processes can fail for time on
a shared machine. Tests that pass then are listed as flaky, and the suite passes. After a crash of a worker process nothing runs
once more: the same fault can crash the trainings of users.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
SLOWEST = 20
# One line of a failure, as long as a terminal shows without breaking it.
LINE = 200
RETRIED_TESTS, RETRIED_FILES = 12, 6
FAULTS = "tests/sdk/faults"
WEB = "tests/web"
STORES = "tests/stores"
FRAMEWORKS = "tests/frameworks"
LAWS = ["tests/rules/test_contract.py", "tests/rules/engine", "tests/sdk/format/test_statistics.py"]


@dataclass(frozen=True)
class Suite:
    """What a suite collects, and how much processor time it may take.

    Attributes:
        arguments: pytest's.
        workers: processes that run tests; each runs whole files, whose tests share their servers. Tests wait for servers and child
            processes for a quarter of their time, so that three keep two cores busy.
        budget: seconds of processor time, for slower processors: `make test` took 2,522 s when it was set, on a machine that did other work too.
        examples: of a Hypothesis law that does not set its own number.
    """

    arguments: tuple[str, ...]
    workers: int = 3
    budget: float = 3600.0
    examples: int | None = None


def suites() -> dict[str, Suite]:
    """Each suite by its name."""
    return {
        "test": Suite(
            (
                "--ignore",
                FAULTS,
                "--ignore",
                WEB,
                "--ignore",
                FRAMEWORKS,
                "--ignore",
                STORES,
                "-m",
                "not slow",
            )
        ),
        "test-slow": Suite(("-m", "slow", *marked_files("slow"))),
        "test-laws": Suite(tuple(LAWS), examples=100),
        "test-faults": Suite((FAULTS,), workers=0, budget=600.0),
        "test-stores": Suite((STORES,), workers=0, budget=600.0),
        "test-web": Suite((WEB,), workers=0, budget=600.0),
        "test-frameworks": Suite((FRAMEWORKS,), workers=2, budget=900.0),
    }


def marked_files(mark: str) -> list[str]:
    """Test files that name a mark, so that the others are not imported."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if not path.is_relative_to(ROOT / FAULTS) and f"mark.{mark}" in path.read_text(encoding="utf-8")
    )


@dataclass(frozen=True)
class Case:
    """A test's result.

    Attributes:
        name: as pytest takes it for an argument.
        cpu_seconds: processor time of the test's process and of the children that it waited for.
        reason: the first line of its failure; None where it passed or was skipped.
        has_crashed: whether the process crashed that ran it.
    """

    name: str
    seconds: float
    cpu_seconds: float | None
    reason: str | None
    has_crashed: bool = False

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
    return Case(
        properties.get("nodeid") or f"{element.get('classname', '')}::{element.get('name', '')}",
        float(element.get("time", "0")),
        None if cpu is None else float(cpu),
        None
        if failure is None
        else _first_line(text if has_crashed else failure.get("message") or text or "failed"),
        has_crashed,
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

    @property
    def over_budget(self) -> bool:
        """Whether it took more processor time than it may."""
        return 0 < self.budget < self.cpu_seconds

    @property
    def passed(self) -> bool:
        """Whether the suite as a whole passed."""
        return self.code == 0 and not self.over_budget


def run(name: str, suite: Suite, reports: Path, extra: list[str], *, retry: bool) -> Result:
    """Run a suite, and its few failed tests again if asked to."""
    report = reports / f"{name}.xml"
    start = time.monotonic()
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
    return Result(cases, flaky, code, time.monotonic() - start, usage.ru_utime + usage.ru_stime, budget)


def _few(failed: list[Case]) -> bool:
    files = {case.file for case in failed}
    is_crash = any(case.has_crashed for case in failed)
    return 0 < len(failed) <= RETRIED_TESTS and len(files) <= RETRIED_FILES and not is_crash


def _pytest(suite: Suite, arguments: list[str], report: Path) -> tuple[int, list[Case]]:
    report.unlink(missing_ok=True)
    workers = ["-n", str(suite.workers), "--dist", "loadfile"] if suite.workers else []
    environment = dict(os.environ)
    if suite.examples is not None:
        environment["WATCHSTEP_LAW_EXAMPLES"] = str(suite.examples)
    command = [sys.executable, "-m", "pytest", *workers, f"--junitxml={report}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return done.returncode, read_report(report) if report.exists() else []


def summary(name: str, result: Result) -> list[str]:
    """The last lines of a suite's output."""
    cost = f"{result.cpu_seconds:.0f} s of processor time in {result.seconds:.0f} s"
    lines = ["", f"=== make {name}: the slowest of {len(result.cases)} tests", *slowest(result.cases)]
    lines.append(f"=== make {name}: {cost}, budget {result.budget:.0f} s")
    lines += failures(result.cases)
    lines += [f"FLAKY {case.name}: {case.reason}"[:LINE] for case in result.flaky]
    if result.code and not failures(result.cases):
        lines.append(f"FAILED make {name}: pytest ended with code {result.code}")
    if result.over_budget:
        lines.append(f"FAILED make {name}: exceeded its budget of {result.budget:.0f} s of processor time")
    return lines


def main(arguments: list[str]) -> int:
    """Run the suite that the first argument names."""
    name, *extra = arguments
    reports = Path(os.environ.get("CI_REPORTS") or ROOT / "reports").resolve()
    reports.mkdir(parents=True, exist_ok=True)
    retry = "--retry" in extra
    result = run(name, suites()[name], reports, [each for each in extra if each != "--retry"], retry=retry)
    totals = {
        "suite": name,
        "passed": result.passed,
        "tests": len(result.cases),
        "seconds": round(result.seconds, 1),
        "cpu_seconds": round(result.cpu_seconds, 1),
        "budget_cpu_seconds": result.budget,
        "failed": failures(result.cases),
        "flaky": [case.name for case in result.flaky],
    }
    (reports / f"{name}.json").write_text(json.dumps(totals, indent=2) + "\n", encoding="utf-8")
    print("\n".join(summary(name, result)), flush=True)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
