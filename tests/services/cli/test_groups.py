"""A command is imported when it is called; help and completion import none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from watchstep_services.cli.commands import COMMANDS, RULES, RUNS, CommandEntry, GroupEntry
from watchstep_services.cli.main import app, load

WITHOUT_JSON = {
    "starts a process": ("api", "explain", "run", "scheduler", "serve", "worker"),
    "changes something, and reports it in one line": (
        "attach", "backends add", "backends remove", "projects archive", "projects create", "projects remove-capture",
        "projects set-capture", "receivers test", "rules allow-stop", "rules revoke-stop", "runs acknowledge", "runs allow-restart", "runs cadence", "runs delete", "runs hold", "runs release",
        "runs snapshot", "runs stop", "silences create", "silences expire", "stores add", "stores remove", "tokens create",
        "tokens revoke",
    ),
    "changes or writes what is stored": (
        "database downgrade", "database upgrade", "export", "report", "runs compact", "skip-list", "sync",
    ),
    "prints a schema, which is JSON, or a single key": (
        "receivers new-key", "receivers new-secret", "receivers schema", "rules schema",
    ),
    "has a parser of its own, with --json": ("audit", "bundles", "diff", "replay", "samples", "trace"),
}  # fmt: skip
"""Commands without --json, by reason. Every other command shows something, and programs read it."""

LISTS = """
import sys
from typer.testing import CliRunner
from watchstep_services.cli.main import app
done = CliRunner().invoke(app, ["--help"])
assert done.exit_code == 0 and "silences" in done.output
print(*sorted(name for name in sys.modules if name.startswith("watchstep_services.cli.")))
"""


TABLES = {"": COMMANDS, "runs": RUNS, "rules": RULES}
ENTRIES = [(group, name) for group, table in TABLES.items() for name in sorted(table)]


def table_of(group: str) -> Mapping[str, CommandEntry | GroupEntry]:
    return TABLES[group]


@pytest.mark.parametrize(("group", "name"), ENTRIES)
def test_the_table_has_the_help_of_each_command(group: str, name: str) -> None:
    text = load(name, table_of(group)).help or ""
    assert " ".join(text.split("\n\n")[0].split()) == table_of(group)[name].summary


@pytest.mark.parametrize(("group", "name"), ENTRIES)
def test_every_command_has_help(group: str, name: str) -> None:
    done = CliRunner().invoke(app, [*group.split(), name, "--help"], prog_name="watchstep")
    assert done.exit_code == 0
    assert name in done.output


def test_an_unknown_command_is_an_error() -> None:
    done = CliRunner().invoke(app, ["run-s"], prog_name="watchstep")
    assert done.exit_code == 2
    assert "No such command" in done.output


def test_listing_the_commands_imports_none() -> None:
    done = subprocess.run([sys.executable, "-c", LISTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "watchstep_services.cli.commands",
        "watchstep_services.cli.main",
        "watchstep_services.cli.profiles",
    ]


def test_names_are_completed() -> None:
    words = {"_WATCHSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "watchstep si", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], prog_name="watchstep", env=words)
    assert done.output.split() == ["silences"]


def test_names_in_a_group_and_options_are_completed() -> None:
    words = {"_WATCHSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "watchstep runs al", "COMP_CWORD": "2"}
    done = CliRunner().invoke(app, [], prog_name="watchstep", env=words)
    assert done.output.split() == ["alerts", "allow-restart"]
    words = {
        "_WATCHSTEP_COMPLETE": "complete_bash",
        "COMP_WORDS": "watchstep runs list --se",
        "COMP_CWORD": "3",
    }
    done = CliRunner().invoke(app, [], prog_name="watchstep", env=words)
    assert done.output.split() == ["--service"]


@pytest.mark.ci
def test_listing_runs_imports_little() -> None:
    heavy = {"fastapi", "sqlalchemy", "alembic", "numpy", "pyarrow", "pydantic", "watchstep_rules.registry"}
    program = f"import sys, watchstep.client, watchstep_services.cli.runs.listing; print(*sorted({heavy} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def commands() -> Iterator[tuple[str, TyperCommand]]:
    """All commands with their words, without `watchstep`."""
    for group, name in ENTRIES:
        if isinstance(table_of(group)[name], GroupEntry):
            continue  # its commands are entries of their own
        loaded = load(name, table_of(group))
        below = loaded.commands if isinstance(loaded, TyperGroup) else {"": loaded}
        for last, command in below.items():
            assert isinstance(command, TyperCommand)
            yield " ".join(filter(None, (group, name, last))), command


def test_every_command_that_shows_something_has_json() -> None:
    without = {
        words
        for words, command in commands()
        if "--json" not in {option for parameter in command.params for option in parameter.opts}
    }
    assert without == {words for several in WITHOUT_JSON.values() for words in several}


@pytest.mark.parametrize(("group", "name"), ENTRIES)
def test_every_command_has_examples_with_options_that_exist(group: str, name: str) -> None:
    loaded = load(name, table_of(group))
    commands = dict(loaded.commands) if isinstance(loaded, TyperGroup) else {"": loaded}
    if isinstance(table_of(group)[name], GroupEntry):
        return  # its commands are entries of their own
    for below, command in commands.items():
        words = " ".join(filter(None, ("watchstep", group, name, below)))
        _, _, examples = (command.help or "").partition("\n\n\b\nExamples:\n")
        assert examples, f"{words} has no examples"
        options = {option for parameter in command.params for option in parameter.opts}
        for line in map(str.strip, examples.splitlines()):
            assert words.removeprefix("watchstep ") in line
            own, _, _ = line.removeprefix("watchstep --profile lab").partition(" -- ")
            for word in own.split():
                if word.startswith("--") and name not in (
                    "run",
                    "sync",
                    "trace",
                    "report",
                    "replay",
                    "bundles",
                    "diff",
                    "audit",
                    "samples",
                    "skip-list",
                ):
                    assert word.split("=")[0] in options, f"{line}: {word}"
