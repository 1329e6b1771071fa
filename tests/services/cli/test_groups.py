"""A group of commands is loaded by itself, and is the same as among all of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from watchstep_services.cli import main
from watchstep_services.cli.app import app


def test_every_group_is_known_by_its_word() -> None:
    assert {group.name for group in app.registered_groups} == set(main._GROUPS)


@pytest.mark.parametrize("word", sorted(main._GROUPS))
def test_a_group_by_itself_is_that_of_all_commands(word: str) -> None:
    alone = main._known([word])
    assert isinstance(alone, typer.Typer)
    for arguments in ([word, "--help"], [word], [word, "nothing-of-this-name"]):
        one, other = (CliRunner().invoke(each, arguments, prog_name="watchstep") for each in (alone, app))
        assert (one.exit_code, one.output) == (other.exit_code, other.output)
        assert word in one.output


def test_to_list_runs_loads_nothing_of_the_service() -> None:
    program = "import sys; from watchstep_services.cli import runs; print(*sorted({'fastapi', 'sqlalchemy', 'alembic'} & {*sys.modules}))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"
