"""The service of launched jobs: watches one store, outlives the launcher, and ends after an idle time.

It corresponds to ``watchstep serve`` on a free port of this machine, with the same service note in its home.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import func, select

from watchstep_services.core.process import raise_file_limit
from watchstep_services.core.settings import settings_for
from watchstep_services.core.telemetry import logs
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ActionRow, RunRow
from watchstep_services.serve.embedded import EmbeddedService

_POLL_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal, or until the idle time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--idle-seconds", type=float, required=True)
    options = parser.parse_args(arguments)
    settings = settings_for(options.store, options.home, host="127.0.0.1", port=0)
    logs.configure(settings.log, settings.log_level)
    raise_file_limit()
    with EmbeddedService(settings) as service:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop_waiting())
        last_busy = time.monotonic()
        while not service.wait(_POLL_SECONDS):
            if _has_work(service.database):
                last_busy = time.monotonic()
            elif time.monotonic() - last_busy > options.idle_seconds:
                return


def _has_work(database: Database) -> bool:
    """Return whether a run is in progress or an action is pending."""
    with database.read() as session:
        runs = session.execute(select(func.count()).select_from(RunRow).filter_by(ended_ns=None)).scalar_one()
        if runs:
            return True
        pending = select(func.count()).select_from(ActionRow).filter_by(state="pending")
        return bool(session.execute(pending).scalar_one())


if __name__ == "__main__":
    main()
