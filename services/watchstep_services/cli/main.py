"""The entry point ``watchstep.commands``: words to the commands that know them."""

from __future__ import annotations

import importlib
import sys

import typer

from watchstep.errors import WatchstepError
from watchstep_services.redaction import redacted, redacted_fault

_PROCESSES = {"api", "worker", "scheduler"}
_LAUNCHING = {"attach", "watch"}
_GROUPS = {
    "database": ("database", "app"),
    "runs": ("runs", "app"),
    "rules": ("rules", "app"),
    "receivers": ("receivers", "app"),
    "silences": ("silences", "app"),
    "tokens": ("tokens", "app"),
    "projects": ("tenancy", "projects"),
    "stores": ("tenancy", "stores"),
    "backends": ("tenancy", "backends"),
}
"""Groups of commands: the module of each, and its name there."""


def main(arguments: list[str]) -> None:
    """Run the command line.

    Raises:
        WatchstepError: what a user did wrong, for the caller to print.
    """
    sys.excepthook = redacted_fault
    try:
        _known(arguments)(arguments)
    except WatchstepError as error:
        raise redacted(error) from None


def _known(arguments: list[str]) -> typer.Typer:
    """Of the commands only those that are asked for are loaded: all together take seconds.

    Production's processes start often, and many of them; what launchers call loads nothing of the service, which need not
    be installed with them.
    """
    if _PROCESSES.issuperset(arguments[:1]) and arguments:
        from watchstep_services.cli.processes import app as processes

        return processes
    if _LAUNCHING.issuperset(arguments[:1]) and arguments:
        from watchstep_services.cli.launching import app as launching

        return launching
    if arguments and arguments[0] in _GROUPS:
        return _group(arguments[0])
    from watchstep_services.cli.app import app

    return app


def _group(word: str) -> typer.Typer:
    module, name = _GROUPS[word]
    app = typer.Typer(name="watchstep", add_completion=False, pretty_exceptions_enable=False)
    app.add_typer(getattr(importlib.import_module(f"watchstep_services.cli.{module}"), name), name=word)
    return app
