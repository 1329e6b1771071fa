"""Runs by the names that people type: an id, ``<project>/<run>``, or a URL."""

from __future__ import annotations

from watchstep.errors import NotFoundError
from watchstep.reading.run import Run, open_run
from watchstep.reading.run_documents import RunEntry, find_runs
from watchstep.store.store import Store


def find_run(run: str, store: str) -> Run:
    """Open a run by URL, by project and id, or by id only.

    Args:
        run: the id, ``<project>/<run>``, or the path or URL of the run.
        store: folder or URL of the store of a run without one.

    Raises:
        NotFoundError: the run does not exist, or runs of several projects have the id.
        ConfigError, StoreError: the store cannot be read.
    """
    parts = run.split("/")
    if len(parts) > 2:
        return open_run(run)
    if len(parts) == 1:
        entries: list[RunEntry] = [entry for entry in find_runs(Store.open(store)) if entry.run == run]
        if len(entries) != 1:
            reason = (
                f"in several projects: {', '.join(entry.project for entry in entries)}"
                if entries
                else "not found"
            )
            raise NotFoundError(
                f"run {run!r} in {store}: {reason}",
                "use <project>/<run>; 'watchstep runs list' shows all runs",
            )
        parts = [entries[0].project, run]
    return open_run("/".join([Store.open(store).location, *parts]))
