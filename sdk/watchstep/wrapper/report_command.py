"""``watchstep report``: write what happened to a run as one HTML file that needs no server and no network."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from watchstep.capture.service.location import find_service
from watchstep.client import Client
from watchstep.hook import STORE
from watchstep.platform.terminal_text import printable
from watchstep.reading.run import Run
from watchstep.reading.run_lookup import find_run
from watchstep.report import collect_report, write_report

_DEFAULT_STORE = "watchstep-runs"


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    parsed = argparse.ArgumentParser(
        prog="watchstep report",
        description="Write one HTML file that shows what happened to a run: losses, alerts, layers, the tensors that deviate most, "
        "configuration and health. It needs no server and makes no request.",
    )
    parsed.add_argument("run", metavar="RUN", help="the run: its id, PROJECT/ID, folder or URL")
    parsed.add_argument(
        "-o", "--output", metavar="FILE", help="the file to write (default: the run's id with .html)"
    )
    parsed.add_argument(
        "--store",
        default=os.environ.get(STORE) or _DEFAULT_STORE,
        help=f"store of a run without a folder or URL (default: {STORE}, or the folder {_DEFAULT_STORE})",
    )
    parsed.add_argument(
        "--service",
        default="",
        metavar="URL",
        help="service that is asked for alerts, with the token in WATCHSTEP_TOKEN (default: WATCHSTEP_SERVICE, or the one on this "
        "machine that watches the store)",
    )
    parsed.add_argument(
        "--no-service",
        action="store_true",
        help="do not ask a service; only the alert that stopped the run is shown",
    )
    return parsed


def main(arguments: Sequence[str]) -> NoReturn:
    """Write the report, print its path, and exit with 0.

    Raises:
        ConfigError: an option is invalid, or the file cannot be written.
        NotFoundError, StoreError, FormatError: the run cannot be read.
    """
    options = parser().parse_args(arguments)
    run = find_run(options.run, options.store)
    service = None if options.no_service else _service(run, options.service)
    path = write_report(collect_report(run, service), options.output or f"{run.id}.html")
    sys.stdout.write(f"{printable(path)}\n")
    raise SystemExit(0)


def _service(run: Run, url: str) -> Client | None:
    """Return a client of the service that evaluates the run; None if none is named, and none on this machine watches its store."""
    found = find_service(url, run.location.rsplit("/", 2)[0])
    if found is None:
        return None
    return Client(found.operator.url, found.operator.token, run.document.project)
