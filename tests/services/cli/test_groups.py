"""A command is loaded by itself, when it is called; help and completion load none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from watchstep_services.cli.app import COMMANDS, app, load

LISTS = """
import sys
from typer.testing import CliRunner
from watchstep_services.cli.app import app
done = CliRunner().invoke(app, ["--help"])
assert done.exit_code == 0 and "silences" in done.output
print(*sorted(name for name in sys.modules if name.startswith("watchstep_services.cli.")))
"""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_table_says_of_a_command_what_its_own_help_says(name: str) -> None:
    text = load(name).help or ""
    assert " ".join(text.split("\n\n")[0].split()) == COMMANDS[name].summary


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    done = CliRunner().invoke(app, [name, "--help"], prog_name="watchstep")
    assert done.exit_code == 0
    assert name in done.output


def test_a_word_that_is_no_command_is_an_error() -> None:
    done = CliRunner().invoke(app, ["run-s"], prog_name="watchstep")
    assert done.exit_code == 2
    assert "No such command" in done.output


def test_listing_the_commands_loads_none() -> None:
    done = subprocess.run([sys.executable, "-c", LISTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["watchstep_services.cli.app"]


def test_names_are_completed() -> None:
    words = {"_WATCHSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "watchstep si", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], prog_name="watchstep", env=words)
    assert done.output.split() == ["silences"]


def test_to_list_runs_loads_nothing_of_the_service() -> None:
    program = "import sys; from watchstep_services.cli import runs; print(*sorted({'fastapi', 'sqlalchemy', 'alembic'} & {*sys.modules}))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"
