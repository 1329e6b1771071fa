"""A recorder's own spill folder: made when first needed, bounded, and never a reason to fail."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from watchstep.capture.health import RecorderHealth
from watchstep.capture.upload.outgoing import Outgoing, SegmentPlace
from watchstep.capture.upload.spill_folder import Spilled, SpillFolder, SpillOwner
from watchstep.format.documents import EndDocument
from watchstep.platform.folders import cache_folder, temporary_folder
from watchstep.store.identity import StoreIdentity

SPILL = "WATCHSTEP_SPILL"
_PAUSE_SECONDS = 5.0
_log = logging.getLogger("watchstep")


def spill_roots() -> list[Path]:
    """Where spill folders are created, in the order of preference.

    ``WATCHSTEP_SPILL`` alone; else the user's cache, a folder for the user in the temporary one, and the temporary one itself.
    """
    if named := os.environ.get(SPILL):
        return [Path(os.path.expanduser(named)).absolute()]  # noqa: PTH111 - it never raises
    cache = cache_folder()
    roots = [cache / "watchstep" / "spill"] if cache is not None else []
    if (temporary := temporary_folder()) is not None:
        roots += [temporary / f"watchstep-spill-{os.geteuid()}", temporary]
    return roots


class Spill:
    """Objects on disk, oldest first. Not thread-safe: its owner locks.

    Attributes:
        bytes: of the objects that wait.
        ending: the process is about to end; how it went is said then.
    """

    def __init__(
        self,
        about: SpillOwner,
        limit: int,
        health: RecorderHealth,
        store_identity: StoreIdentity | None = None,
    ) -> None:
        self._about = about
        self._store_identity = store_identity or StoreIdentity()
        self._limit = limit
        self._health = health
        self._folder: SpillFolder | None = None
        self._waiting: deque[Spilled] = deque()
        self._not_before = float("-inf")
        self.bytes = 0
        self.ending = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def rows(self) -> int:
        """Rows of statistics that wait."""
        return sum(held.place.rows for held in self._waiting)

    def add(self, item: Outgoing) -> bool:
        """Take an object; False where it does not fit, or the disk refuses."""
        if self.bytes + len(item.data) > self._limit or time.monotonic() < self._not_before:
            return False
        try:
            held = self._opened().add(item)
        except OSError as error:
            self._failed(error)
            return False
        self._waiting.append(held)
        self.bytes += held.size
        self._health.count("spilled_objects")
        self._tell()
        return True

    def head(self) -> Outgoing | None:
        """The oldest object. One that can no longer be read is counted as dropped."""
        while self._waiting:
            assert self._folder is not None
            try:
                return self._folder.read(self._waiting[0])
            except OSError as error:
                self._health.fault("spill", error)
                self._health.count("dropped_objects")
                self._health.count("dropped_rows", self._waiting[0].place.rows)
                self.remove(self._waiting[0].place.seq)
        return None

    def remove(self, seq: int) -> bool:
        """Remove the oldest segment, if it has this number: it lies on the store now."""
        if not self._waiting or self._waiting[0].place.seq != seq:
            return False
        assert self._folder is not None
        held = self._waiting.popleft()
        self.bytes -= held.size
        try:
            self._folder.drop(held.name)
        except OSError as error:
            self._health.fault("spill", error)
        self._tell()
        if not self._waiting:
            self.close()
        return True

    @property
    def waiting(self) -> SegmentPlace | None:
        """The oldest; None where there is none."""
        return self._waiting[0].place if self._waiting else None

    @property
    def about(self) -> SpillOwner:
        """Whose objects wait."""
        return self._about

    def oldest(self, until: int) -> list[Outgoing]:
        """Those up to a number. One that can no longer be read is left out."""
        found = []
        for held in self._waiting:
            if held.place.seq <= until and self._folder is not None:
                try:
                    found.append(self._folder.read(held))
                except OSError as error:
                    self._health.fault("spill", error)
        return found

    def describe(self, about: SpillOwner) -> None:
        """Something new is known of what lies here: the store could be reached, and this is the writer."""
        self._about = about
        if self._folder is not None:
            try:
                self._folder.describe(self._described())
            except OSError as error:
                self._failed(error)

    def add_end(self, end: EndDocument) -> bool:
        """Keep how the worker ended, for whoever uploads what lies here."""
        if self._limit <= 0:
            return False
        try:
            self._opened().add_end(end)
        except OSError as error:
            self._failed(error)
            return False
        return True

    def close(self) -> None:
        """Leave the folder to others, and remove it where nothing waits in it."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._waiting:
            folder.release()
        else:
            folder.remove()

    def leave(self) -> str:
        """Let go of the folder with all that lies in it; its path, empty where there is none."""
        folder, self._folder = self._folder, None
        if folder is None:
            return ""
        folder.release()
        return str(folder.path)

    def forget(self) -> None:
        """This is a forked child: the folder is its parent's, and so must the lock be."""
        self.leave()

    def _opened(self) -> SpillFolder:
        if self._folder is None:
            who = self._about.identity
            name = f"{who.run[:60]}-{who.attempt[:40]}-w{who.worker}"
            self._folder = self._made(name)
            if not self.ending:
                _log.warning(
                    "watchstep: %s cannot be reached: what is recorded waits in %s. "
                    "Should the process end before it is uploaded, 'watchstep sync' does it.",
                    self._about.store_url,
                    self._folder.path,
                )
        return self._folder

    def _made(self, name: str) -> SpillFolder:
        roots = spill_roots()
        failure: OSError = FileNotFoundError("this system has no temporary folder")
        for place, root in enumerate(roots):
            try:
                return SpillFolder.make(root, name, self._described())
            except OSError as error:
                failure = error
                if place + 1 < len(roots):
                    self._health.fault("spill folder", error)
        raise failure

    def _described(self) -> SpillOwner:
        return replace(self._about, store_id=self._store_identity.id)

    def _failed(self, error: OSError) -> None:
        self._health.fault("spill", error)
        self._not_before = time.monotonic() + _PAUSE_SECONDS
        if not self._waiting:
            self.close()

    def _tell(self) -> None:
        where = f" in {self._folder.path}" if self._waiting and self._folder is not None else ""
        self._health.note("spill", f"{len(self._waiting)} objects, {self.bytes} bytes wait{where}")
