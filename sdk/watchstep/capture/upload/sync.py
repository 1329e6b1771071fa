"""Uploading what processes that are gone left in their spill folders."""

from __future__ import annotations

import functools
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from watchstep.capture.service.credentials import lent, open_recorded
from watchstep.capture.upload.claims import claim_attempt
from watchstep.capture.upload.merging import settle
from watchstep.capture.upload.spill_folder import ABOUT, Spilled, SpillFolder, SpillOwner, is_own
from watchstep.capture.upload.uploader import put_end, write_whole
from watchstep.errors import StoreError, WatchstepError
from watchstep.format.layout import WriterId, run_prefix
from watchstep.store.identity import StoreIdentity
from watchstep.store.store import Store


@dataclass(frozen=True)
class Synced:
    """What became of one folder.

    Attributes:
        folder: the folder; removed where nothing is left in it.
        run: ``<project>/<run>``, empty where that cannot be told.
        objects: how many were uploaded.
        bytes: how large they were.
        left: how many still lie there.
        why: why some do; empty where none does.
    """

    folder: Path
    run: str = ""
    objects: int = 0
    bytes: int = 0
    left: int = 0
    why: str = ""


def spill_folders(root: Path) -> list[Path]:
    """Those of this user that lie directly in a folder; sorted by name.

    What another user left in a shared folder is left out: it would be uploaded with this user's rights. The folder itself is
    never one: another user may have put what makes it look like one in it.
    """
    try:
        with os.scandir(root) as listed:
            entries = list(listed)
    except OSError:
        return []
    return sorted(Path(entry.path) for entry in entries if _is_own(entry) and (Path(entry) / ABOUT).is_file())


def named_spill_folders(path: Path) -> list[Path]:
    """A folder that the user named, where it is a spill folder; else those in it, as `spill_folders`.

    One that is not this user's alone is a spill folder only where none of this user's lies in it; `sync` then says why it is left.
    """
    if not (path / ABOUT).is_file():
        return spill_folders(path)
    try:
        facts = path.lstat()
    except OSError:
        return []  # removed meanwhile
    if stat.S_ISDIR(facts.st_mode) and is_own(facts):
        return [path]
    return spill_folders(path) or [path]


def _is_own(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat().st_uid == os.geteuid()
    except OSError:
        return False  # removed meanwhile


def sync(path: Path) -> Synced:
    """Upload what lies in one spill folder, in order, and remove it. Safe to repeat, and to interrupt at any point.

    A folder that another process holds, for it still records or uploads as well, is left to it.
    """
    try:
        folder = SpillFolder.take(path)
    except OSError as error:
        return Synced(path, why=f"cannot be opened ({error.strerror})")
    if folder is None:
        return Synced(
            path, why="in use: its process still records, or another sync is at work" * path.is_dir()
        )
    try:
        return _sync_held(folder)
    finally:
        folder.release()


def _sync_held(folder: SpillFolder) -> Synced:
    entries: list[Spilled] = []
    run, done, size = "", 0, 0
    try:
        entries = folder.entries()
        about = folder.about()
        run = f"{about.identity.project}/{about.identity.run}"
        store = _open(about, about.writer.attempt if about.writer else about.identity.attempt)
        about = _settled(folder, about, store)
        writer = about.writer or _claim(folder, about, store)
        if lent() and about.writer is None and writer.attempt != about.identity.attempt:
            store = _open(about, writer.attempt)
        entries = folder.entries()
        for held in entries:
            item = folder.read(held)
            key = item.place.key(writer, about.base or 0).path
            if not write_whole(store, key, item.data):
                raise StoreError(
                    f"object {key}: another lies there", f"move {held.name} away, and sync again"
                )
            folder.drop(held.name)
            done, size = done + 1, size + held.size
        _sync_end(folder, store, writer, about.base or 0)
    except (WatchstepError, OSError) as error:
        reason = f"{error.what}; hint: {error.hint}" if isinstance(error, WatchstepError) else str(error)
        return Synced(folder.path, run, done, size, len(entries) - done, reason)
    folder.remove()
    return Synced(folder.path, run, done, size)


def _open(about: SpillOwner, attempt: str) -> Store:
    project, run = about.identity.project, about.identity.run
    opened = open_recorded(about.store_url, (project, run, attempt), identity=StoreIdentity(about.store_id))
    return opened.child(run_prefix(project, run))


def _claim(folder: SpillFolder, about: SpillOwner, store: Store) -> WriterId:
    """Claim what the process itself could not, and keep it before anything is uploaded."""
    others = functools.partial(_open, about) if lent() else None
    writer = claim_attempt(store, about.run, about.attempt, about.identity, late=True, others=others)
    folder.describe(replace(about, writer=writer))
    return writer


def _settled(folder: SpillFolder, about: SpillOwner, store: Store) -> SpillOwner:
    """Drop what the node's writer has written after all, and keep which block is this writer's first."""
    if about.base is not None:
        return about
    contained: tuple[int, ...] = ()
    if about.doubt is not None:
        last = max(about.doubt.numbers)
        doubted = [folder.read(entry) for entry in folder.entries() if entry.place.seq <= last]
        contained = settle(store, about.doubt, doubted).get(about.doubt.token, ())
    entries = folder.entries()
    left = [held for held in entries if held.place.seq not in contained]
    end = folder.end()
    following = left[0].place.seq if left else end.segments if end is not None else 0
    # First what is known, then what follows from it: whoever is interrupted here finds the object again.
    for held in entries:
        if held.place.seq in contained:
            folder.drop(held.name)
    settled = replace(about, base=following - about.written, doubt=None)
    folder.describe(settled)
    return settled


def _sync_end(folder: SpillFolder, store: Store, writer: WriterId, base: int) -> None:
    """The end in the folder counts the process' segments; the document counts the writer's."""
    end = folder.end()
    if end is not None:
        put_end(store, writer.attempt, replace(end, writer=writer.writer, segments=end.segments - base))
