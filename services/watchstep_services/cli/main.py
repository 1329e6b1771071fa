"""The entry point ``watchstep.commands``: words to the commands that know them."""

from __future__ import annotations

import sys

import typer

from watchstep.errors import WatchstepError
from watchstep_services.redaction import redacted, redacted_fault

_PROCESSES = {"api", "worker", "scheduler"}
_LAUNCHING = {"attach", "watch"}


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
    """Production's processes load nothing of the other commands: they start often, and many of them.

    What launchers call loads nothing of the service, which need not be installed with them.
    """
    if _PROCESSES.issuperset(arguments[:1]) and arguments:
        from watchstep_services.cli.processes import app as processes

        return processes
    if _LAUNCHING.issuperset(arguments[:1]) and arguments:
        from watchstep_services.cli.launching import app as launching

        return launching
    from watchstep_services.cli.app import app

    return app
