"""Runs that several queries use at the same time."""

from __future__ import annotations

import threading

import pytest

from tests.services.recording import Recording
from watchstep.reading.budget import ReadBudget
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep_services.api.queries.state import OpenedRuns
from watchstep_services.api.schemas.problems import RequestRefusedError


class NotedLock:
    """A lock that notes when somebody begins to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.awaited = threading.Event()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        self.awaited.set()
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()


@pytest.fixture
def stores(folder_store: Store) -> dict[str, Store]:
    names = ("a", "b", "c")
    for name in names:
        Recording(folder_store, name).begin().write(0, 0, 3)
    return {name: folder_store.child(f"vision/{name}") for name in names}


@pytest.mark.parametrize("busy", ["a", "b", "c"])
def test_a_query_that_waits_for_one_run_leaves_the_others_to_other_queries(
    stores: dict[str, Store], busy: str
) -> None:
    opened, lock = OpenedRuns(), NotedLock()
    opened._entry(stores[busy].location).lock = lock  # type: ignore[assignment]
    compared: list[list[str]] = []

    def compare() -> None:
        with opened.open_several(stores, ReadBudget(60, 100)) as runs:
            assert all(isinstance(run, Run) for run in runs.values())
            compared.append(list(runs))

    with opened.open(stores[busy], ReadBudget(60, 100)):
        thread = threading.Thread(target=compare)
        thread.start()
        assert lock.awaited.wait(60)
        for name in {*stores} - {busy}:
            with opened.open(stores[name], ReadBudget(5, 100)) as run:
                assert run.document.run == name
        assert not compared
    thread.join(60)
    assert compared == [["a", "b", "c"]]


def test_a_query_without_time_gets_none_of_its_runs(stores: dict[str, Store]) -> None:
    opened = OpenedRuns()
    with (
        opened.open(stores["b"], ReadBudget(60, 100)),
        pytest.raises(RequestRefusedError, match="another query of one of these runs"),
        opened.open_several(stores, ReadBudget(0, 100)),
    ):
        pass
    with opened.open_several(stores, ReadBudget(60, 100)) as runs:
        assert list(runs) == ["a", "b", "c"]
