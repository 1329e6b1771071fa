"""The commands of the SDK, for help and completion: the SDK runs them by itself, before it loads this package."""

from __future__ import annotations

from typing import Annotated

import typer

from watchstep.wrapper.migrate_command import parser as migrate_options
from watchstep.wrapper.run_command import parser as run_options
from watchstep.wrapper.sync_command import parser as sync_options

run = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
sync = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
migrate_store = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@run.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _run(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] -- PROGRAM …")] = None,
) -> None:
    """Start a program so that it records itself, with no change to it."""
    run_options().parse_args(arguments or ["--help"])


@sync.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _sync(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER]")] = None,
) -> None:
    """Upload what recorders left on this machine when their store could not be reached. Safe to repeat."""
    sync_options().parse_args(arguments or ["--help"])


@migrate_store.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _migrate_store(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] STORE")] = None,
) -> None:
    """Rewrite runs that an earlier version recorded with the names that this version reads. Safe to repeat."""
    migrate_options().parse_args(arguments or ["--help"])
