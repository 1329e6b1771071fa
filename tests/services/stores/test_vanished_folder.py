"""A service's store folder that disappears: nothing is read, written or created in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from watchstep.errors import MissingStoreError, NotFoundError
from watchstep.store.local import MARKER, StoreIdentity
from watchstep.store.store import Store
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores.opening import Stores


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store that a recorder has written to."""
    recorded = Store.open(tmp_path / "disk" / "runs", create=True, identity=StoreIdentity())
    recorded.put("vision/r/run.json", b"{}")
    return tmp_path / "disk" / "runs"


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.fixture(params=["own", "project"])
def store(folder: Path, stores: Stores, request: pytest.FixtureRequest) -> Store:
    if request.param == "own":
        return stores.open(str(folder))
    return stores.of(StorePlace(1, 1, StoreRegistration(str(folder)), "", "vision"))


@pytest.mark.parametrize("mount_point", [False, True])
def test_all_is_missing_until_it_is_back(folder: Path, store: Store, *, mount_point: bool) -> None:
    run = store.child("vision/r")
    assert run.get("run.json") == b"{}"
    assert [entry.key for entry in store.entries()] == ["vision/r/run.json"]
    elsewhere = folder.rename(folder.parent / "elsewhere")
    if mount_point:
        folder.mkdir()
    acts: tuple[Callable[[], object], ...] = (
        lambda: run.get("run.json"),
        lambda: run.put("control.json", b"{}"),
        lambda: run.create("control.json", b"{}"),
        lambda: run.delete("run.json"),
        lambda: list(run.entries()),
        store.folders,
    )
    for act in acts:
        with pytest.raises(MissingStoreError, match=f"store {folder}: "):
            act()
    if mount_point:
        folder.rmdir()
    assert not folder.exists()
    elsewhere.rename(folder)
    assert run.create("control.json", b"{}")
    assert run.get("run.json") == b"{}"
    with pytest.raises(NotFoundError):
        run.get("nothing.json")


def test_a_store_that_is_opened_again_is_still_the_same(folder: Path, stores: Stores) -> None:
    stores.open(str(folder))
    folder.rename(folder.parent / "elsewhere")
    folder.mkdir()
    with pytest.raises(MissingStoreError, match=r"no longer exists|another store"):
        stores.of(StorePlace(1, 1, StoreRegistration(str(folder)), "", "vision"))


def test_a_marker_that_comes_later_counts_from_then_on(tmp_path: Path, stores: Stores) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    store = stores.open(str(folder))
    assert store.folders() == []
    assert not (folder / MARKER).exists()
    Store.open(folder, create=True, identity=StoreIdentity()).put("vision/r/run.json", b"{}")
    assert store.folders() == ["vision"]
    folder.rename(tmp_path / "elsewhere")
    folder.mkdir()
    with pytest.raises(MissingStoreError):
        store.folders()
