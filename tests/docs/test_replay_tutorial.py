"""The tutorial from an alert to the line: its commands run, and print what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT
from watchstep import open_run
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.defaults import DEFAULT_RULES

PAGE = ROOT / "docs" / "tutorials" / "replay-a-fault.md"
PROGRAM = ROOT / "examples" / "digits_nan.py"
_COMMANDS = re.compile(r"^(?:python|watchstep bundles|watchstep replay) .*$", re.MULTILINE)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the page's commands ran, and everything that they printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").mkdir()
    (folder / "examples" / PROGRAM.name).write_text(PROGRAM.read_text())
    text = ""
    for line in _COMMANDS.findall(PAGE.read_text(encoding="utf-8")):
        name, *arguments = line.split()
        command = [sys.executable] if name == "python" else [str(Path(sys.executable).with_name(name))]
        done = subprocess.run(
            [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode in {0, 1, 86}, done.stderr
        text += done.stdout + done.stderr
    return folder, text.replace(f"{folder}/", "")


def test_the_page_shows_what_is_printed(printed: tuple[Path, str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = list(re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    lines = [
        line
        for block in shown
        for line in block.splitlines()
        if "RULE" not in block and "silent" not in block
    ]
    assert len(lines) > 10
    for line in lines:
        wanted = re.sub(r"attempt \w+", "", line).strip()
        assert wanted in re.sub(r"attempt \w+", "", printed[1]), line


def test_the_code_on_the_page_is_that_of_the_program() -> None:
    program = [line.strip() for line in PROGRAM.read_text(encoding="utf-8").splitlines()]
    blocks = re.findall(
        r"^```{ .python .no-run }\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    for line in (line.strip() for block in blocks for line in block.splitlines()):
        assert line in program, line


@pytest.mark.parametrize(
    ("run", "fires"), [("digits", {"nan_or_inf"}), ("fixed", {"dead_relu"}), ("clean", set())]
)
def test_the_rules_report_the_fault_and_nothing_of_the_clean_run(
    printed: tuple[Path, str], run: str, fires: set[str]
) -> None:
    url = printed[0] / "runs" / "default" / run
    (attempt,) = backtest_run(str(url), DEFAULT_RULES).attempts
    assert {outcome.config.name for outcome in attempt.outcomes if outcome.fired} == fires
    assert (open_run(url).ends()[0].state == "stopped") == (run == "digits")
