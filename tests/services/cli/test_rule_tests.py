"""``watchstep rules test``, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.rules.custom.programs import LOUD
from tests.services.cli.command_line import run_command

TESTS = """
tests:
  - name: the loss is lost
    series: [{tensor: loss, values: 3*0.9x20 NaNx60}]
    expect: [{rule: nan_or_inf, fires_at: %d, stops: true}]
"""


def test_exit_codes_output_and_junit(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(TESTS % 69, encoding="utf-8")
    bad.write_text(TESTS % 70, encoding="utf-8")
    done = run_command("rules", "test", good)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1 test, all passed"
    done = run_command("rules", "test", good, bad, "--junit", tmp_path / "junit.xml")
    assert done.returncode == 1
    assert "- expected: fires at 70" in done.stdout
    assert "+ got:      fires at 69, tensor loss" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 tests, 1 failed"
    assert (tmp_path / "junit.xml").read_text(encoding="utf-8").count("<testcase") == 2


def test_results_as_json(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(TESTS % 69, encoding="utf-8")
    bad.write_text(TESTS % 70, encoding="utf-8")
    done = run_command("rules", "test", good, bad, "--json")
    assert (done.returncode, done.stderr) == (1, "")
    passed, failed = json.loads(done.stdout)
    assert (passed["file"], failed["file"]) == (str(good), str(bad))
    (test,) = passed["tests"]
    assert (test["name"], test["passed"], test["differences"]) == ("the loss is lost", True, [])
    (test,) = failed["tests"]
    assert not test["passed"]
    assert test["differences"][0]["rule"] == "nan_or_inf"
    assert "fires at 70" in test["differences"][0]["expected"]


def test_errors_that_a_user_can_fix(tmp_path: Path) -> None:
    for arguments in (["/no/tests.yaml"], []):
        done = run_command("rules", "test", *arguments)
        assert done.returncode == 2
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr


def test_the_schema_is_printed() -> None:
    assert json.loads(run_command("rules", "test", "--schema").stdout)["title"] == "Watchstep rule tests"


def test_a_check_reports_the_isolation_of_python_rules(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOUD, encoding="utf-8")
    (tmp_path / "rules.yaml").write_text(
        "rules: [{rule: python, name: mine, params: {file: mine.py, class: Loud}}]", encoding="utf-8"
    )
    done = run_command("rules", "check", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout
    assert "mine: Python rule; isolation on this machine: full" in done.stdout
