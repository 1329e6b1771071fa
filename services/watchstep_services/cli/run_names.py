"""Runs as they are named on the command line: one, or many by a pattern."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from watchstep.errors import NotFoundError
from watchstep.format.layout import RUN_DOCUMENT
from watchstep.store.store import Store
from watchstep_services.cli.runs import find_run

_WILD = frozenset("*?[")


def locations(run: str, store: str) -> list[str]:
    """Where the runs lie that a name stands for.

    Args:
        run: a run's id, ``<project>/<run>`` or its whole URL; each part may hold ``*``, ``?`` and ``[…]``, and a name that
            ends in ``/`` is that of a project.
        store: where runs lie that are named without a store.

    Raises:
        NotFoundError: there is no such run.
        StoreError, ConfigError: the store cannot be read.
    """
    if run.endswith("/"):
        run += "*"
    if not _WILD & set(run):
        return [find_run(run, store).location]
    root, project, name = _parts(run, store)
    opened = Store.open(root)
    found = [
        f"{opened.location}/{held}/{each}"
        for held in sorted(opened.folders())
        if fnmatchcase(held, project)
        for each in sorted(opened.folders(f"{held}/"))
        if fnmatchcase(each, name) and _is_run(opened.child(f"{held}/{each}"))
    ]
    if not found:
        raise NotFoundError(f"runs {run!r} in {root}: none", "'watchstep runs list' shows all")
    return found


def _parts(run: str, store: str) -> tuple[str, str, str]:
    parts = run.rsplit("/", 2)
    if len(parts) == 1:
        return store, "*", run
    if len(parts) == 2:
        return store, parts[0], parts[1]
    return (parts[0] or "/"), parts[1], parts[2]


def _is_run(folder: Store) -> bool:
    try:
        return folder.size(RUN_DOCUMENT) > 0
    except NotFoundError:
        return False


def short(location: str) -> str:
    """``<project>/<run>``."""
    return "/".join(Path(location).parts[-2:])
