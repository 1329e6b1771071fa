"""``watchstep rules test``, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.rules.custom.programs import LOUD
from tests.services.cli.typed import typed

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
    done = typed("rules", "test", good)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1 test, all passed"
    done = typed("rules", "test", good, bad, "--junit", tmp_path / "junit.xml")
    assert done.returncode == 1
    assert "- expected: fires at 70" in done.stdout
    assert "+ got:      fires at 69, tensor loss" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 tests, 1 failed"
    assert (tmp_path / "junit.xml").read_text(encoding="utf-8").count("<testcase") == 2


def test_what_a_user_can_mend(tmp_path: Path) -> None:
    for arguments in (["/no/tests.yaml"], []):
        done = typed("rules", "test", *arguments)
        assert done.returncode == 2
        assert "hint: " in done.stderr
        assert "Traceback" not in done.stderr


def test_the_schema_is_printed() -> None:
    assert json.loads(typed("rules", "test", "--schema").stdout)["title"] == "Watchstep rule tests"


def test_a_check_says_how_far_programs_are_shut_in(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOUD, encoding="utf-8")
    (tmp_path / "rules.yaml").write_text(
        "rules: [{rule: python, name: mine, params: {file: mine.py, class: Loud}}]", encoding="utf-8"
    )
    done = typed("rules", "check", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout
    assert "mine: a program; its isolation here is full" in done.stdout
