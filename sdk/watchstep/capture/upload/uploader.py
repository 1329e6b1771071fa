"""The uploader: writes the claim first, then the objects of the backlog in order, with pauses after a failure.

`sync` uploads the spill folders of ended processes.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from watchstep.capture.health import RecorderHealth
from watchstep.capture.service.client import lent, open_recorded
from watchstep.capture.service.location import local_folder
from watchstep.capture.stop import ControlReader
from watchstep.capture.upload.access import Access, claim_attempt, restore_documents
from watchstep.capture.upload.backlog import Backlog
from watchstep.capture.upload.outgoing import Outgoing, settle
from watchstep.capture.upload.sample_objects import upload_left_ring
from watchstep.capture.upload.spill import ABOUT, Spilled, SpillFolder, SpillOwner, is_own
from watchstep.errors import ConfigError, FormatError, NotFoundError, StoreError, WatchstepError
from watchstep.format import documents
from watchstep.format.layout import RUN_DOCUMENT, WriterId, attempt_document, end_document, run_prefix
from watchstep.store import known_stores
from watchstep.store.local import StoreIdentity, new_store
from watchstep.store.store import Store


@dataclass(frozen=True)
class UploadContext:
    """What an uploader needs: access to the store and the service, the backlog, the control reader, and health."""

    access: Access
    backlog: Backlog
    control: ControlReader
    health: RecorderHealth


class Uploader:
    """Uploads this process's segments with its own writer. Used on the writer's thread."""

    def __init__(self, context: UploadContext) -> None:
        self._access = context.access
        self._backlog = context.backlog
        self._control = context.control
        self._health = context.health
        self._writer: WriterId | None = None
        self._end_written = False
        self.written = 0
        """Number of segments of this writer on the store."""

    @property
    def claimed(self) -> tuple[Store, str] | None:
        """The store and the attempt; None before the claim."""
        store, writer = self._access.store, self._writer
        return (store, writer.attempt) if store is not None and writer is not None else None

    @property
    def account(self) -> tuple[str, int]:
        """The writer's name, empty before the claim, and its number of segments when everything is written."""
        return (self._writer.writer if self._writer else "", self._backlog.segments - self._backlog.base)

    @property
    def writers(self) -> int:
        """Number of concurrent writers of this attempt."""
        return self._access.target.identity.world_size

    @property
    def wait_seconds(self) -> float:
        """How long the writer may wait without a message."""
        return float("inf")

    @property
    def is_on_request(self) -> bool:
        """Whether segments are written on request; False: they are written at an interval."""
        return False

    @property
    def failing_for(self) -> float | None:
        """Seconds since the store started to refuse; None if it does not."""
        return self._access.failing_for

    @property
    def end_written(self) -> bool:
        """Whether the end document is on the store."""
        return self._end_written

    def hurry(self) -> None:
        """Retry at once and often, because the process is about to end."""
        self._access.hurry()

    def receive(self) -> bool:
        """Return True: without other ranks, the writer wakes up in order to write."""
        return True

    def turn(self, *, flush: bool = True) -> None:  # noqa: ARG002 - it writes whatever is there
        """Claim, upload the backlog, and read the control document. The first refusal ends the turn.

        This keeps sequence numbers in order.
        """
        if not self._access.ready:
            return
        try:
            target, store = self._access.target, self._access.open()
            before, writer = self._writer, self._claimed(store)
            store = store if before is not None else self._access.change_to(writer.attempt)
            self._control.verify(store)
            self._settle(store)
            if not self._backlog.empty:
                restore_documents(store, target.run, target.attempt, writer.attempt, self._health)
            while (head := self._backlog.head()) is not None:
                self._write(store, head, writer)
                self._access.advanced()
            self._access.done()
        except StoreError as error:
            self._access.failed(error)
        if self.claimed is not None and self._access.store is not None:
            self._control.refresh(self._access.store)

    def release(self) -> None:
        """End uploads of this process. Everything is in the backlog already."""

    def leave(self) -> None:
        """Leave after everything is written. No other rank depends on this process."""

    def forget(self) -> None:
        """Reset in a forked child. There is nothing to close."""

    def _claimed(self, store: Store) -> WriterId:
        if self._writer is None:
            target = self._access.target
            self._access.warn_of_reuse(store)
            writer = claim_attempt(
                store, target.run, target.attempt, target.identity, others=target.open_attempt
            )
            self._backlog.claimed(writer)
            self._control.attempt = writer.attempt
            self._writer = writer
        return self._writer

    def _settle(self, store: Store) -> None:
        """Determine what the node's writer may have written, before anything is written again."""
        doubt = self._backlog.doubt
        contained: tuple[int, ...] = ()
        if doubt is not None:
            contained = settle(store, doubt, self._backlog.doubted()).get(doubt.token, ())
        self._backlog.settled(contained)

    def _write(self, store: Store, item: Outgoing, writer: WriterId) -> None:
        key = item.place.key(writer, self._backlog.base)
        is_stored = write_whole(store, key.path, item.data)
        if not self._backlog.remove(item):
            return
        self.written = key.seq + 1
        if not is_stored:
            self._health.count("overwritten_names")
            self._health.count("dropped_rows", item.place.rows)
            return
        self._health.count("objects")
        self._health.count("bytes", len(item.data))
        self._health.count("rows", item.place.rows)
        self._access.announce(key)

    def write_end(self, end: documents.EndDocument) -> None:
        """Write the end document, after everything else."""
        if self._writer is None or self._access.store is None:
            return
        try:
            put_end(self._access.store, self._writer.attempt, end)
            self._end_written = True
        except StoreError as error:
            self._access.failed(error)


def write_whole(store: Store, path: str, data: bytes) -> bool:
    """Write an object that may exist already, because the answer to an earlier request was lost.

    Returns:
        Whether it is on the store; False if another object has its name.

    Raises:
        StoreError: the store refuses.
    """
    if store.create(path, data):
        return True
    try:
        return store.get(path, limit=len(data)) == data
    except FormatError:  # larger
        return False


def put_end(store: Store, attempt: str, end: documents.EndDocument) -> None:
    """Write an end document, unless a later process of the same rank has written one.

    Raises:
        StoreError: the store refuses.
    """
    key = end_document(attempt, end.worker)
    try:
        if store.create(key, documents.encode(end)):
            return
        existing = documents.decode(documents.EndDocument, store.get(key, limit=documents.MAX_BYTES), key)
        if existing.ended_ns >= end.ended_ns:
            return
    except (NotFoundError, FormatError):
        pass  # removed meanwhile, or invalid: write it
    store.put(key, documents.encode(end))


@dataclass(frozen=True)
class Synced:
    """Result of syncing one folder.

    Attributes:
        folder: the folder; removed if nothing is left in it.
        run: ``<project>/<run>``, empty if unknown.
        objects: number of uploaded objects.
        bytes: their size.
        left: number of remaining objects.
        why: why objects remain; empty if none do.
    """

    folder: Path
    run: str = ""
    objects: int = 0
    bytes: int = 0
    left: int = 0
    why: str = ""


def spill_folders(root: Path) -> list[Path]:
    """Return this user's spill folders directly in a folder, sorted by name.

    Another user's spill folders are omitted: they would be uploaded with this user's permissions. The folder itself is
    never one: another user may have added the files that make it look like one.
    """
    try:
        with os.scandir(root) as listed:
            entries = list(listed)
    except OSError:
        return []
    return sorted(Path(entry.path) for entry in entries if _is_own(entry) and (Path(entry) / ABOUT).is_file())


def named_spill_folders(path: Path) -> list[Path]:
    """Return a folder that the user named, if it is a spill folder; else those in it, as `spill_folders`.

    A folder that does not belong exclusively to this user counts as a spill folder only if it contains none of this user's; `sync` then
    reports why it is skipped.
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


def sync(path: Path, accepted: str = "") -> Synced:
    """Upload the contents of one spill folder in order, and remove it. Safe to repeat, and to interrupt at any point.

    A folder that another process has locked, because it still records or syncs, is skipped.

    Args:
        path: the spill folder.
        accepted: id of the store that is at the path of a local store now, and that receives data recorded for another one. Empty: data is
            uploaded only to the store that it was recorded for.
    """
    try:
        folder = SpillFolder.take(path)
    except OSError as error:
        return Synced(path, why=f"cannot be opened ({error.strerror})")
    if folder is None:
        return Synced(
            path, why="in use: its process still records, or another sync is running" * path.is_dir()
        )
    try:
        return _sync_locked(folder, accepted)
    finally:
        folder.release()


def _sync_locked(folder: SpillFolder, accepted: str) -> Synced:
    entries: list[Spilled] = []
    run, done, size = "", 0, 0
    try:
        entries = folder.entries()
        about = _accepting(folder, folder.about(), accepted)
        run = f"{about.identity.project}/{about.identity.run}"
        store = _open(about, about.writer.attempt if about.writer else about.identity.attempt)
        about = _settled(folder, about, store)
        if accepted and about.writer is not None:
            _write_documents(store, about, about.writer)
        writer = about.writer or _claim(folder, about, store)
        if lent() and about.writer is None and writer.attempt != about.identity.attempt:
            store = _open(about, writer.attempt)
        entries = folder.entries()
        for spilled in entries:
            item = folder.read(spilled)
            key = item.place.key(writer, about.base or 0).path
            if not write_whole(store, key, item.data):
                raise StoreError(
                    f"object {key}: another object has this name", f"move {spilled.name} away, and sync again"
                )
            folder.drop(spilled.name)
            done, size = done + 1, size + spilled.size
        samples = upload_left_ring(folder, store, writer.attempt, about.identity.worker)
        if samples is not None:
            done, size = done + 1, size + samples
        _sync_end(folder, store, writer, about.base or 0)
    except (WatchstepError, OSError) as error:
        reason = f"{error.what}; hint: {error.hint}" if isinstance(error, WatchstepError) else str(error)
        return Synced(folder.path, run, done, size, len(entries) - done, reason)
    folder.remove()
    return Synced(folder.path, run, done, size)


def create_accepted(paths: Sequence[Path]) -> str:
    """Create a store in the folder that the contents of spill folders were recorded for, and return its id; empty if there is none.

    Raises:
        ConfigError: they were recorded for several folders, of which others may only be away.
        StoreError: the folder has a store, or cannot be written to.
    """
    roots = {root for path in paths if (root := _local_root(path)) is not None}
    if len(roots) > 1:
        raise ConfigError(
            f"{len(paths)} spill folders are for several stores: {', '.join(sorted(map(str, roots)))}",
            "name a spill folder of the store that was replaced: watchstep sync FOLDER --accept-store new",
        )
    return new_store(roots.pop()) if roots else ""


def _local_root(path: Path) -> Path | None:
    """Return the folder that the contents of a spill folder were recorded for; None if it cannot be read, which `sync` reports."""
    try:
        folder = SpillFolder.take(path)
    except OSError:
        return None
    if folder is None:
        return None
    try:
        return local_folder(folder.about().store_url)
    except WatchstepError:
        return None
    finally:
        folder.release()


def _accepting(folder: SpillFolder, about: SpillOwner, accepted: str) -> SpillOwner:
    """Return the owner of a spill folder, for the store that is accepted instead of its own.

    The data that its own store has, if it has any, remains there. The claimed writer is retained, because the numbers continue.

    Raises:
        StoreError: there is no such store at the path.
        OSError: the owner cannot be saved.
    """
    root = local_folder(about.store_url)
    if not accepted or root is None:
        return about
    Store.open(about.store_url, identity=StoreIdentity(accepted))
    known_stores.accept(root, accepted)
    about = replace(about, store_id=accepted)
    folder.describe(about)
    return about


def _open(about: SpillOwner, attempt: str) -> Store:
    project, run = about.identity.project, about.identity.run
    opened = open_recorded(about.store_url, (project, run, attempt), identity=StoreIdentity(about.store_id))
    return opened.child(run_prefix(project, run))


def _write_documents(store: Store, about: SpillOwner, writer: WriterId) -> None:
    """Write the documents of a run and an attempt that were written to another store."""
    store.create(RUN_DOCUMENT, documents.encode(about.run))
    attempt = replace(about.attempt, attempt=writer.attempt, late=True)
    store.create(attempt_document(writer.attempt), documents.encode(attempt))


def _claim(folder: SpillFolder, about: SpillOwner, store: Store) -> WriterId:
    """Claim what the process itself could not claim, and save the claim before anything is uploaded."""
    others = functools.partial(_open, about) if lent() else None
    writer = claim_attempt(store, about.run, about.attempt, about.identity, late=True, others=others)
    folder.describe(replace(about, writer=writer))
    return writer


def _settled(folder: SpillFolder, about: SpillOwner, store: Store) -> SpillOwner:
    """Drop what the node's writer has stored meanwhile, and determine which block is this writer's first."""
    if about.base is not None:
        return about
    contained: tuple[int, ...] = ()
    if about.doubt is not None:
        last = max(about.doubt.numbers)
        doubted = [folder.read(entry) for entry in folder.entries() if entry.place.seq <= last]
        contained = settle(store, about.doubt, doubted).get(about.doubt.token, ())
    entries = folder.entries()
    remaining = [spilled for spilled in entries if spilled.place.seq not in contained]
    end = folder.end()
    following = remaining[0].place.seq if remaining else end.segments if end is not None else 0
    # Drop stored segments before updating the owner: an interrupted sync determines the state again.
    for spilled in entries:
        if spilled.place.seq in contained:
            folder.drop(spilled.name)
    settled = replace(about, base=following - about.written, doubt=None)
    folder.describe(settled)
    return settled


def _sync_end(folder: SpillFolder, store: Store, writer: WriterId, base: int) -> None:
    """Upload the end document. The one in the folder counts the process's segments; the uploaded one counts the writer's."""
    end = folder.end()
    if end is not None:
        put_end(store, writer.attempt, replace(end, writer=writer.writer, segments=end.segments - base))
