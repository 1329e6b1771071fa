"""The suites' reports, their budgets and the last lines of their output."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import suite
from tests.suite import Case, Suite

# Packages whose import takes 0.1 s of processor time and more. A run of few tests imports their modules alone, so a module imports
# such a package in its fixtures and tests. PyTorch (1 s) is not among them: tests of most folders need it in each process.
HEAVY = {
    "accelerate", "lightning", "matplotlib", "moto", "optuna", "pandas", "pgserver", "ray", "sklearn", "tensorboard",
    "transformers", "wandb", "xgboost",
}  # fmt: skip
WITHOUT_TORCH = (
    "conftest.py",
    "suite.py",
    "infra",
    "docs",
    "launch/view",
    "services/api",
    "services/cli",
    "services/db",
)


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    """Packages that a module imports when it is imported, in the blocks of `if` and `try`, too."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module.partition(".")[0]
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) != "TYPE_CHECKING":
            yield from _imported(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _imported(statement.body)


@pytest.mark.ci
def test_collection_imports_no_heavy_framework() -> None:
    folder = Path(suite.ROOT) / "tests"
    wrong: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        heavy = HEAVY | ({"torch"} if name.startswith(WITHOUT_TORCH) else set())
        if imported := heavy.intersection(_imported(ast.parse(path.read_text(encoding="utf-8")).body)):
            wrong[name] = sorted(imported)
    assert not wrong, "import them inside fixtures and tests"


@pytest.fixture
def small(tmp_path: Path) -> Suite:
    """A suite with one test of each result."""
    (tmp_path / "test_small.py").write_text(
        "def test_passes():\n    pass\n\n\ndef test_fails():\n    assert 1 == 2, 'because'\n",
        encoding="utf-8",
    )
    return Suite((str(tmp_path / "test_small.py"), "-p", "no:cacheprovider"), workers=0)


@pytest.mark.ci
def test_a_failing_suite_ends_with_a_line_for_each_failed_test(small: Suite, tmp_path: Path) -> None:
    result = suite.run("small", small, tmp_path, [], retry=True)
    assert (result.passed, result.flaky) == (False, [])
    last = suite.summary("small", result)[-1]
    assert last.startswith("FAILED ")
    assert last.endswith("test_fails: AssertionError: because"), last


@pytest.mark.ci
def test_a_suite_that_exceeds_its_budget_fails(
    small: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_SUITE_BUDGET", "0.001")
    result = suite.run("small", small, tmp_path, ["-k", "passes"], retry=False)
    assert result.code == 0
    assert not result.passed
    assert "exceeded its budget" in suite.summary("small", result)[-1]


@pytest.mark.ci
def test_a_crash_of_a_worker_fails_the_test_in_it_and_all_others_run(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        (tmp_path / f"test_{name}.py").write_text(
            "import os, pytest\n"
            "@pytest.mark.parametrize('n', range(6))\n"
            "def test_number(n):\n"
            f"    if n == 3 and '{name}' == 'second':\n"
            "        os._exit(3)\n",
            encoding="utf-8",
        )
    crashing = Suite((str(tmp_path), "-p", "no:cacheprovider"), workers=2)
    result = suite.run("crashing", crashing, tmp_path, [], retry=True)
    assert (result.code, len(result.cases), result.flaky) == (1, 18, [])
    failed = [case for case in result.cases if case.reason is not None]
    assert [case.name.rpartition(".")[2] for case in failed] == ["test_second::test_number[3]"]
    assert failed[0].has_crashed


def test_the_slowest_tests_come_first() -> None:
    cases = [Case(f"tests/test_a.py::test_{number}", float(number), None, None) for number in range(30)]
    lines = suite.slowest(cases)
    assert len(lines) == suite.SLOWEST
    assert lines[0].endswith("test_29")


def test_a_tier_collects_only_what_may_have_a_test_of_it() -> None:
    crash, embedded = "tests/benchmarks/test_crash.py", "tests/end_to_end/test_embedded.py"
    statistics, database = "tests/sdk/format/test_statistics.py", "tests/services/db/test_engine.py"
    suites = suite.suites()
    chosen = {name: set(suites[name].arguments) & {crash, embedded, statistics, database} for name in suites}
    assert chosen["test"] == {crash, embedded}  # ignored
    assert chosen["test-ci"] == {embedded, database}
    assert chosen["test-release"] == {crash, embedded}


@pytest.mark.ci
def test_a_report_names_suites_reasons_of_skips_and_what_needed_another_run(
    small: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI_REPORTS", str(tmp_path / "reports"))
    monkeypatch.setattr(suite, "suites", lambda: {"small": small})
    with (tmp_path / "test_small.py").open("a", encoding="utf-8") as file:
        file.write("\n\ndef test_needs_more():\n    import pytest\n    pytest.skip('no GPU')\n")
    assert suite.main(["small", "-k", "not fails"]) == 0
    assert suite.main(["report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split()[:2] == ["small", "2"]
    assert lines[-2] == "skipped 1: no GPU"
    assert lines[-1] == "passed only when run once more: none"
