"""The command line: the table of its commands, of which only the requested one is loaded.

All commands together take seconds to import. Processes of a production service start often, and what launchers call
loads nothing of the service, which need not be installed with them.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import watchstep


class CommandEntry(NamedTuple):
    """A command of the table.

    Attributes:
        module: of this package, where it is defined.
        attribute: the function or `typer.Typer` there.
        summary: its line in ``watchstep --help``, so that listing the commands loads none of them; the first paragraph of its
            own help.
    """

    module: str
    attribute: str
    summary: str


COMMANDS = {
    "demo": CommandEntry(
        "demo",
        "demo",
        "Watch two trainings: the healthy one ends by itself, the faulty one is stopped and explained.",
    ),
    "serve": CommandEntry(
        "serve", "serve", "Watch a store: judge its runs while they go on, keep alerts, stop jobs."
    ),
    "api": CommandEntry(
        "processes",
        "api",
        "The API of a production service. On SIGTERM, finishes running requests and exits.",
    ),
    "worker": CommandEntry(
        "processes",
        "worker",
        "A worker of a production service: evaluates runs, tries actions. On SIGTERM, finishes running tasks and exits.",
    ),
    "scheduler": CommandEntry(
        "processes",
        "scheduler",
        "The scheduler of a production service, of which there is one: tells workers when to look for work.",
    ),
    "attach": CommandEntry(
        "launching",
        "attach",
        "Have a job that was launched by other means judged by rules, and stopped by them. Safe to repeat. Token: "
        "WATCHSTEP_TOKEN, of an operator.",
    ),
    "watch": CommandEntry(
        "launching",
        "watch",
        "Show how a run goes: steps, losses, rules, alerts and stops, until it has ended or Ctrl-C. Token: WATCHSTEP_TOKEN.",
    ),
    "check-config": CommandEntry(
        "check_config",
        "check_config",
        "Try every connection of the service: database, broker, stores. Exit code 1 where one does not work.",
    ),
    "export": CommandEntry(
        "export", "export", "Write a run's figures and histograms as TensorBoard's event files."
    ),
    "run": CommandEntry(
        "recording", "run", "Start a program so that it records itself, with no change to it."
    ),
    "sync": CommandEntry(
        "recording",
        "sync",
        "Upload what recorders left on this machine when their store could not be reached. Safe to repeat.",
    ),
    "migrate-store": CommandEntry(
        "recording",
        "migrate_store",
        "Rewrite runs that an earlier version recorded with the names that this version reads. Safe to repeat.",
    ),
    "database": CommandEntry(
        "database",
        "app",
        "The schema of the database of WATCHSTEP_DATABASE_URL, or of the service of a store on this machine.",
    ),
    "runs": CommandEntry("runs", "app", "Recorded runs."),
    "rules": CommandEntry("rules", "app", "The rules."),
    "receivers": CommandEntry("receivers", "app", "Receivers of alerts."),
    "silences": CommandEntry("silences", "app", "Silences: alerts that nobody is notified of for a while."),
    "tokens": CommandEntry("tokens", "app", "Tokens for the API."),
    "projects": CommandEntry(
        "tenancy", "projects", "Projects: where their runs lie, and where their jobs may run."
    ),
    "stores": CommandEntry("tenancy", "stores", "Stores that projects can be put on."),
    "backends": CommandEntry("tenancy", "backends", "Backends that jobs may run on."),
}


class LazyGroup(TyperGroup):
    """Loads a command when it is called. Help and shell completion take its summary from the table.

    Arguments of methods are of click, of which Typer has a private copy.
    """

    _lists = False

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's interface
        """All names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:  # noqa: ARG002 - click's interface
        """The command of a name, or a stub with its summary while the commands are listed."""
        if cmd_name not in COMMANDS:
            return None
        if self._lists:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name].summary)
        return load(cmd_name)

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


def load(name: str) -> TyperCommand | TyperGroup:
    """Import a command of `COMMANDS`.

    Args:
        name: a key of the table.
    """
    entry = COMMANDS[name]
    loaded = getattr(importlib.import_module(f"watchstep_services.cli.{entry.module}"), entry.attribute)
    if not isinstance(loaded, typer.Typer):
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name)(loaded)
        loaded = single
    command = get_command(loaded)
    assert isinstance(command, TyperCommand | TyperGroup)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    name="watchstep",
    help="Watches training jobs from the inside: records, judges while they run, stops, explains.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(watchstep.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""
