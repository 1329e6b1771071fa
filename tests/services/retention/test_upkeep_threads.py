"""A store at which upkeep hangs holds one thread, and nothing else."""

from __future__ import annotations

import threading

import pytest

from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.recording import PROJECT
from tests.services.retention.test_upkeep import ended
from watchstep.store.store import Store
from watchstep_services import retention as upkeeping
from watchstep_services.db.models import Project, ProjectStore, RunRow
from watchstep_services.retention import UpkeepThreads


def move(driven: Driven, run_id: int, project: str) -> None:
    """Give a run to another project, which lies at the same place."""
    with driven.service.database.write() as session:
        store = session.get_one(Project, PROJECT).placed.store_id
        placed = ProjectStore(project=project, store_id=store)
        session.add(Project(name=project, placed=placed))
        session.flush()
        row = session.get_one(RunRow, run_id)
        row.project, row.project_store_id = project, placed.id


def test_a_step_that_hangs_holds_up_its_own_project_alone(
    driven: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, hangs, done = threading.Event(), threading.Event(), []
    for run in ("run-1", "run-2"):
        ended(driven, folder_store, run)
    other, _ = ended(driven, folder_store, "run-3")
    move(driven, other, "other")

    def compact(store: Store) -> None:
        if PROJECT in store.location:
            begun.set()
            assert hangs.wait(60)
        done.append(store.location.rpartition("/")[2])

    def is_done() -> bool:
        threads.start()  # each thread does one step and ends
        return begun.is_set() and done == ["run-3"]

    monkeypatch.setattr(upkeeping, "compact", compact)
    threads = UpkeepThreads(driven.with_settings(compact_after_seconds=1e-9).service, 1)
    try:
        eventually(is_done)
    finally:
        hangs.set()
        threads.close()
    threads.start()
    assert done == ["run-3", "run-1"]
