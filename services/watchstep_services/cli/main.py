"""The entry point ``watchstep.commands``."""

from __future__ import annotations

import sys

from watchstep.errors import WatchstepError
from watchstep_services.cli.app import app
from watchstep_services.core.redaction import redacted, redacted_fault


def main(arguments: list[str]) -> None:
    """Run the command line.

    Raises:
        WatchstepError: a user's error, for the caller to print.
    """
    sys.excepthook = redacted_fault
    try:
        app(arguments)
    except WatchstepError as error:
        raise redacted(error) from None
