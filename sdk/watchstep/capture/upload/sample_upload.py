"""Upload of the ring of samples: rarely, when something went wrong, and at the end of the attempt.

A request, of the gate or of the control document, uploads the records that are not on the store yet. Requests within
`_PAUSE_SECONDS` are one. Rings that ended processes of the same run have left on this machine are uploaded when the attempt
is claimed; those of other runs by ``watchstep sync``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from watchstep.capture.config import Bounds
from watchstep.capture.health import RecorderHealth
from watchstep.capture.samples.ring import SampleRing, map_memory
from watchstep.capture.upload.access import UploadTarget
from watchstep.capture.upload.sample_objects import (
    folder_prefix,
    is_ring_folder,
    make_ring,
    object_of,
    remove_ring,
)
from watchstep.capture.upload.spill import SpillFolder, SpillOwner, spill_roots
from watchstep.capture.upload.uploader import Synced, spill_folders, sync
from watchstep.errors import RecordingEndedError, StoreError, WatchstepError
from watchstep.format.layout import WriterId
from watchstep.platform.process import join_until
from watchstep.store.store import Store

_PAUSE_SECONDS = 30.0
_FIRST_BACKOFF, _MAX_BACKOFF = 0.2, 10.0
_MAX_LEFT = 64
"""Rings of ended processes that are uploaded at a start."""


class SampleUpload:
    """Owns the ring of a recording and its folder, and writes its records to the store from its own thread.

    The thread starts when there is something to upload.
    """

    def __init__(self, target: UploadTarget, bounds: Bounds, health: RecorderHealth) -> None:
        """Start without a ring.

        Args:
            target: the store and the recorder's identity.
            bounds: size and steps of the ring.
            health: counts faults and uploads.
        """
        self._about = SpillOwner(target.store_url, target.identity, target.run, target.attempt)
        self._store_identity = target.store_identity
        self._bounds = bounds
        self._health = health
        self._process = os.getpid()
        self._folder: SpillFolder | None = None
        self._ring: SampleRing | None = None
        self._destination: tuple[Store, str] | None = None
        self._left: list[Path] = []
        # Reentrant, because a signal handler may interrupt the thread that holds the lock and call back.
        self._changed = threading.Condition()
        self._describing = threading.RLock()  # while the folder's files are written or removed
        self._requested = False
        self._closing = False
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def ring(self) -> SampleRing | None:
        """Create the ring, on the training thread; None if samples are not recorded."""
        if not self._bounds.sample_bytes or not self._bounds.sample_steps:
            return None
        try:
            folder, ring = make_ring(self._about, self._bounds.sample_bytes, self._bounds.sample_steps)
        except OSError as error:
            self._health.fault("samples", error)
            self._health.note("samples", "recorded in memory only, because no folder can be used")
            ring = SampleRing(map_memory(self._bounds.sample_bytes), self._bounds.sample_steps)
        else:
            self._folder = folder
            self._describe()
        self._ring = ring
        return ring

    def open(self, store: Store, attempt: str) -> None:
        """Set the store and the attempt, once the attempt is claimed. Called on the writer's thread, again at each turn."""
        if self._destination is not None:
            return
        left = _left_folders(self._about.identity.run)
        with self._changed:
            self._destination = (store, attempt)
            self._left = left
            if self._requested or left:
                self._start_or_wake()
        self._describe()

    def request(self) -> None:
        """Upload the records that are not on the store. Never blocks; called on any thread."""
        with self._changed:
            self._requested = True
            if self._destination is not None and self._ring is not None:
                self._start_or_wake()

    def close(self) -> None:
        """Upload the rest, then end. Does not block. In a forked child, only release the folder, which belongs to the parent."""
        if os.getpid() != self._process:
            if self._folder is not None:
                self._folder.release()
            return
        with self._changed:
            self._closing = self._requested = True
            if self._ring is not None or self._thread is not None:
                self._start_or_wake()

    def join(self, is_late: Callable[[], bool]) -> None:
        """Wait until the rest is uploaded, or until ``is_late`` returns True. What is not stays on disk for ``watchstep sync``."""
        join_until(self._thread, is_late)
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def _start_or_wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchstep-samples", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _describe(self) -> None:
        """Name the claimed attempt in the folder, for the process that uploads it if this one is killed."""
        with self._describing:
            folder, destination = self._folder, self._destination
            if folder is None or destination is None:
                return
            identity = self._about.identity
            writer = WriterId(destination[1], identity.node, f"w{identity.worker}")
            try:
                folder.describe(replace(self._about, writer=writer, store_id=self._store_identity.id))
            except OSError as error:
                self._health.fault("samples", error)

    def _run(self) -> None:
        """Upload on request, until the rest is uploaded or the recording has ended."""
        backoff = _FIRST_BACKOFF
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                is_last, self._requested = self._closing, False
            if self._abandoned:
                self._release()
                return
            pause = _PAUSE_SECONDS
            try:
                self._take_over()
                self._upload()
            except RecordingEndedError:
                self._release()
                return
            except StoreError as error:
                self._health.fault("samples", error)
                self._requested = True
                pause, backoff = backoff, min(_MAX_BACKOFF, 2 * backoff)
            except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
                self._health.fault("samples", error)
                if is_last:
                    self._release()
                    return
            else:
                backoff = _FIRST_BACKOFF
                if is_last:
                    self._end()
                    return
            with self._changed:
                self._changed.wait_for(self._is_abandoned if is_last else self._is_closing, pause)

    def _is_closing(self) -> bool:
        return self._closing

    def _is_abandoned(self) -> bool:
        return self._abandoned

    def _has_work(self) -> bool:
        if self._abandoned:
            return True
        return self._destination is not None and (self._requested or bool(self._left))

    def _take_over(self) -> None:
        """Upload the rings that ended processes of this run have left."""
        left, self._left = self._left, []
        for path in left:
            synced = _taken_over(path, self._about)
            if synced is not None and synced.objects:
                self._health.count("sample_uploads", synced.objects)

    def _upload(self) -> None:
        """Write the records that are not on the store as one object.

        Raises:
            StoreError: the store refuses.
        """
        assert self._destination is not None
        store, attempt = self._destination
        if self._ring is None:
            return
        records = self._ring.records()
        made = object_of(records, attempt, self._about.identity.worker)
        if made is None:
            return
        key, content = made
        store.create(key.path, content)  # if it exists, the answer to an earlier try was lost
        self._ring.uploaded(records[-1].number + 1)
        self._health.count("sample_uploads")
        self._health.count("objects")
        self._health.count("bytes", len(content))

    def _release(self) -> None:
        """Leave the ring on disk, for ``watchstep sync``."""
        with self._describing:
            folder, self._folder = self._folder, None
            if folder is not None:
                folder.release()

    def _end(self) -> None:
        """Remove the ring: all of it is on the store."""
        with self._describing:
            folder, self._folder = self._folder, None
            try:
                if folder is not None:
                    remove_ring(folder)
            except OSError as error:
                self._health.fault("samples", error)


def _left_folders(run: str) -> list[Path]:
    """Return folders of rings of a run's recorders on this machine, of this user; those in use are among them."""
    prefix = folder_prefix(run)
    found = [
        path
        for root in spill_roots()
        for path in spill_folders(root)
        if is_ring_folder(path.name) and path.name.startswith(prefix)
    ]
    return found[:_MAX_LEFT]


def _taken_over(path: Path, about: SpillOwner) -> Synced | None:
    """Upload a ring if its process has ended and it belongs to the same run; else return None."""
    try:
        folder = SpillFolder.take(path)
        if folder is None:
            return None
        try:
            left = folder.about()
        finally:
            folder.release()
    except (OSError, WatchstepError):
        return None  # 'watchstep sync' reports it
    same_run = (left.identity.project, left.identity.run) == (about.identity.project, about.identity.run)
    return sync(path) if same_run and left.store_url == about.store_url else None
