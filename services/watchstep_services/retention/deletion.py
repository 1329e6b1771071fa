"""Deleting a run: its objects, and then its rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sqlalchemy import Select, Table, delete, select
from sqlalchemy.orm import Session

from watchstep.format.layout import RUN_DOCUMENT
from watchstep.store.store import Store
from watchstep_services.db.models import Base, RunRow

TENSORS = "tensors/"


def delete_objects(run_store: Store, prefix: str = "") -> int:
    """Delete a run's objects, or those below a prefix; returns how many. Safe to repeat.

    The run's own document goes last: what is left of a deletion that was interrupted is still a run, and is found.

    Raises:
        StoreError: the store refused; some are deleted.
    """
    keys = sorted(entry.key for entry in run_store.entries(prefix))
    keys.sort(key=lambda key: key == RUN_DOCUMENT)
    for key in keys:
        run_store.delete(key)
    if run_store.is_local:
        _remove_empty_folders(Path(run_store.location) / prefix)
    return len(keys)


def _remove_empty_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            Path(folder).rmdir()
        except OSError:
            continue


def delete_rows(session: Session, run_id: int) -> None:
    """Delete all that the database holds of a run: each table that refers to it, by however many steps."""
    for table in reversed(Base.metadata.sorted_tables):
        if table.name == RunRow.__tablename__:
            session.execute(delete(table).where(table.c.id == run_id))
        else:
            for condition in _of_run(table, run_id):
                session.execute(delete(table).where(condition))


def _of_run(table: Table, run_id: int) -> list[Any]:
    """Conditions, each of which picks rows of a table that belong to a run."""
    conditions: list[Any] = []
    for key in table.foreign_keys:
        parent = key.column.table
        if parent is table:
            continue
        if parent.name == RunRow.__tablename__:
            conditions.append(key.parent == run_id)
        else:
            conditions += [key.parent.in_(chosen) for chosen in _chosen(parent, key.column, run_id)]
    return conditions


def _chosen(parent: Table, column: Any, run_id: int) -> list[Select[Any]]:
    return [select(column).where(condition) for condition in _of_run(parent, run_id)]
