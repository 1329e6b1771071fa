"""The command line: its groups, and how its words become calls."""

from __future__ import annotations

from typing import Annotated

import typer

import watchstep
from watchstep.wrapper.run_command import parser as run_options
from watchstep.wrapper.sync_command import parser as sync_options
from watchstep_services.cli import (
    attach,
    check_config,
    database,
    demo,
    export,
    processes,
    receivers,
    rules,
    runs,
    serve,
    silences,
    tenancy,
    tokens,
    watch,
)

app = typer.Typer(
    name="watchstep",
    help="Watches training jobs from the inside: records, judges while they run, stops, explains.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("api")(processes.api)
app.command("worker")(processes.worker)
app.command("scheduler")(processes.scheduler)
app.command("attach")(attach.attach)
app.command("watch")(watch.watch)
app.command("check-config")(check_config.check_config)
app.add_typer(database.app, name="database")
app.command("export")(export.export)
app.add_typer(runs.app, name="runs")
app.add_typer(rules.app, name="rules")
app.add_typer(receivers.app, name="receivers")
app.add_typer(silences.app, name="silences")
app.add_typer(tokens.app, name="tokens")
app.add_typer(tenancy.projects, name="projects")
app.add_typer(tenancy.stores, name="stores")
app.add_typer(tenancy.backends, name="backends")


@app.command("run", add_help_option=False, context_settings={"ignore_unknown_options": True})
def run(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] -- PROGRAM …")] = None,
) -> None:
    """Start a program so that it records itself, with no change to it."""
    # The SDK's own command comes first and never gets here with a program; this is for lists of commands.
    run_options().parse_args(arguments or ["--help"])


@app.command("sync", add_help_option=False)
def sync(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER]")] = None,
) -> None:
    """Upload what recorders left on this machine when their store could not be reached. Safe to repeat."""
    # The SDK's own too, so that a training container needs nothing of the service.
    sync_options().parse_args(arguments or ["--help"])


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
