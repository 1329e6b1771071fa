"""Which store belongs at a path: what the folder contains, and what earlier processes of this user know."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from watchstep.errors import MissingStoreError, StoreError
from watchstep.platform.folders import HOME
from watchstep.store.known_stores import HOME_NOTE, note_in_home
from watchstep.store.local import MARKER, StoreIdentity, new_store
from watchstep.store.store import Store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a store, with an empty cache and an empty home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "home").mkdir()
    return tmp_path / "disk" / "runs"


def opened(folder: Path) -> StoreIdentity:
    identity = StoreIdentity()
    Store.open(folder, create=True, identity=identity).put("p/r/run.json", b"{}")
    return identity


def left_alone(folder: Path, _: str) -> None:
    """No process knows more than the folder shows."""


def noted(folder: Path, identity: str) -> None:
    """A service with its home elsewhere was started on the store, and runs no more."""
    note_in_home(folder.parent.parent / "home", str(folder), identity)


def unmounted(folder: Path, _: str) -> None:
    """The store was on a disk whose mount point has no disk now."""
    (record,) = (folder.parent.parent / "cache" / "watchstep" / "stores").iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "mount": str(folder.parent)}))


def missing(folder: Path) -> str:
    return ""


def empty(folder: Path) -> str:
    folder.mkdir()
    return ""


def replaced(folder: Path) -> str:
    return new_store(folder)


@pytest.mark.parametrize("now", [missing, empty, replaced])
@pytest.mark.parametrize(
    ("evidence", "uses", "waits"),
    [(left_alone, False, False), (left_alone, True, True), (noted, False, True), (unmounted, False, True)],
    ids=["unknown", "in-use", "noted", "unmounted"],
)
def test_a_store_that_is_away_is_waited_for_and_any_other_path_gets_a_new_store(
    folder: Path,
    now: Callable[[Path], str],
    evidence: Callable[[Path, str], None],
    uses: bool,
    waits: bool,
) -> None:
    user = opened(folder)
    evidence(folder, user.id)
    if not uses:
        user.release()
    folder.rename(folder.parent / "away")
    other = now(folder)
    content = sorted(folder.rglob("*")) if folder.exists() else None
    later = StoreIdentity()
    if not waits:
        Store.open(folder, create=True, identity=later).put("p/r/run.json", b"{}")
        assert later.id == (folder / MARKER).read_text().strip() != user.id
        assert not other or later.id == other
        return
    with pytest.raises(MissingStoreError, match=r"no longer exists|another store"):
        Store.open(folder, create=True, identity=later).put("p/r/run.json", b"{}")
    assert later.id == user.id
    assert (sorted(folder.rglob("*")) if folder.exists() else None) == content
    if folder.exists():
        folder.rename(folder.parent / "aside")
    (folder.parent / "away").rename(folder)
    Store.open(folder, create=True, identity=later).put("p/r2/run.json", b"{}")
    assert (folder / "p" / "r2" / "run.json").exists()


def test_a_new_folder_needs_neither_a_cache_nor_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv(HOME)
    monkeypatch.setenv("HOME", str(folder.parent / "no-home"))
    assert opened(folder).id == (folder / MARKER).read_text().strip()


def test_a_note_in_the_home_that_is_no_file_of_the_user_is_ignored(folder: Path) -> None:
    noted(folder, "0" * 32)
    note = folder.parent.parent / "home" / HOME_NOTE
    note.rename(note.with_name("other"))
    note.symlink_to("other")
    assert opened(folder).id != "0" * 32
    note.unlink()
    os.mkfifo(note)
    assert opened(folder).id != "0" * 32


def test_damaged_records_are_ignored(folder: Path) -> None:
    opened(folder).release()
    (record,) = (folder.parent.parent / "cache" / "watchstep" / "stores").iterdir()
    folder.rename(folder.parent / "away")
    for content in (b"", b"{", b"[]", b'{"id": 1, "mount": ""}', b"\xff", b"[" * 65536):
        record.write_bytes(content)
        assert opened(folder).id
        for path in (folder / MARKER, folder / "p" / "r" / "run.json"):
            path.unlink()


def test_ranks_that_look_at_the_same_time_do_not_take_each_other_for_users(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(folder).release()
    (record,) = (folder.parent.parent / "cache" / "watchstep" / "stores").iterdir()
    folder.rename(folder.parent / "removed")
    with record.open() as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(another, fcntl.LOCK_UN))
        assert opened(folder).id == (folder / MARKER).read_text().strip()


def test_a_service_names_the_store_after_another_was_opened(folder: Path) -> None:
    identity = opened(folder)
    store = Store.open(folder, identity=identity)
    assert identity.require("0" * 32)
    assert not identity.require("0" * 32)
    with pytest.raises(MissingStoreError, match="another store"):
        store.put("p/r/a", b"")
    with pytest.raises(StoreError, match="is not new, its id is"):
        new_store(folder)
