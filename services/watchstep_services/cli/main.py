"""The command line: groups that import a command when it is called, and the entry point ``watchstep.commands``.

All commands together take seconds to import. Processes of a production service start often, and ``watchstep attach`` and
``watchstep watch`` run on machines without the service's packages.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import watchstep
from watchstep.errors import NotFoundError, WatchstepError
from watchstep_services.cli.commands import COMMANDS, CommandEntry, GroupEntry
from watchstep_services.cli.profiles import PROFILE, choose_profile
from watchstep_services.core.redaction import redacted, redacted_fault


class LazyGroup(TyperGroup):
    """Loads a command when it is called. Help and shell completion take its summary from the table.

    Arguments of methods have types of click, of which Typer has a private copy.
    """

    table: ClassVar[Mapping[str, CommandEntry | GroupEntry]] = COMMANDS
    _lists = False

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's interface
        """Return all names, in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:  # noqa: ARG002 - click's interface
        """Return the command of a name, or a stub with its summary while the commands are listed."""
        if cmd_name not in self.table:
            return None
        if self._lists:
            return TyperCommand(cmd_name, help=self.table[cmd_name].summary)
        return load(cmd_name, self.table)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without loading any command."""
        self._lists = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._lists = False

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the name of a command without loading any."""
        self._lists = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._lists = False


def load(name: str, table: Mapping[str, CommandEntry | GroupEntry] = COMMANDS) -> TyperCommand | TyperGroup:
    """Import a command.

    Args:
        name: a key of the table.
        table: table of the command's group.
    """
    entry = table[name]
    loaded = _group(entry) if isinstance(entry, GroupEntry) else _imported(name, entry)
    command = get_command(loaded)
    assert isinstance(command, TyperCommand | TyperGroup)
    command.name = name
    _keep_examples(command)
    return command


def _keep_examples(command: TyperCommand | TyperGroup) -> None:
    """Keep the line breaks of ``Examples:`` in the help of a command and of the commands below it.

    Click wraps a paragraph unless it begins with a backspace character.
    """
    if command.help:
        command.help = command.help.replace("\n\nExamples:\n", "\n\n\b\nExamples:\n")
    if isinstance(command, TyperGroup) and not isinstance(command, LazyGroup):
        for below in command.commands.values():
            assert isinstance(below, TyperCommand | TyperGroup)
            _keep_examples(below)


def _group(entry: GroupEntry) -> typer.Typer:
    class Group(LazyGroup):
        table = entry.commands

    group = typer.Typer(cls=Group, help=entry.summary, no_args_is_help=True, add_completion=False)
    group.callback()(lambda: None)  # a Typer without commands of its own is a group only with a callback
    return group


def _imported(name: str, entry: CommandEntry) -> typer.Typer:
    loaded = getattr(importlib.import_module(f"watchstep_services.cli.{entry.module}"), entry.attribute)
    if isinstance(loaded, typer.Typer):
        return loaded
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name)(loaded)
    return single


app = typer.Typer(
    cls=LazyGroup,
    name="watchstep",
    help="Watch training jobs from the inside: record them, evaluate rules while they run, stop and explain them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(watchstep.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    profile: Annotated[
        str,
        typer.Option(
            envvar=PROFILE, help="Profile with the URL, project and token of a service, from profiles.yaml."
        ),
    ] = "",
) -> None:
    """Options of the command itself."""
    choose_profile(profile)


def main(arguments: list[str]) -> None:
    """Run the command line.

    Raises:
        WatchstepError: an error for the caller to print.
    """
    sys.excepthook = redacted_fault
    try:
        app(arguments)
    except WatchstepError as error:
        if isinstance(error, NotFoundError) and _UNKNOWN_RUN.fullmatch(error.what):
            error.hint = _LIST_RUNS
        raise redacted(error) from None


_UNKNOWN_RUN = re.compile(r"run [^/\s]+/[^/\s]+: not found")
_LIST_RUNS = "'watchstep runs list', with the same --store or --service, shows the runs; or check the project and the name"
"""The service's own hint is for programs that register runs."""
