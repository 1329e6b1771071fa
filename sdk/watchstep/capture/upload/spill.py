"""The spill folder: encoded objects that wait on disk for a store that cannot be reached. It is created when needed, bounded, and its errors never end a recording.

::

    <folder>/spill.json                        the owner of the objects, and their store
      lock                                     held by the process that adds or uploads
      <seq>-<place>                            a segment
      end.json                                 how the worker ended, written last
      samples.ring                             the samples of the last steps, in a folder of its own

Files are written under a temporary name, then renamed.

A folder, or a file in it, is used only if this user owns it and nobody else may write to it: otherwise another user's data
would be uploaded with this user's permissions. Files are opened relative to the checked directory, and never through a link. The directory
is opened for each access, because a program may close descriptors that it did not open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.upload.outgoing import Doubt, Outgoing, SegmentPlace
from watchstep.errors import BadNameError, FormatError
from watchstep.format import documents
from watchstep.format.documents import EndDocument
from watchstep.format.layout import SegmentKey, WriterId, check_name
from watchstep.platform.folders import cache_folder, temporary_folder
from watchstep.store.local import StoreIdentity, read_owned_file

ABOUT = "spill.json"
END = "end.json"
_LOCK = "lock"
_TEMPORARY = ".part-"
_WRITABLE_BY_OTHERS = 0o022
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCKING = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FILE = re.compile(r"[0-9]{10}-(.+)")
_HINT = "remove the folder if it is not needed"


@dataclass(frozen=True)
class SpillOwner:
    """Owner of the objects in a spill folder.

    Attributes:
        store_url: URL of their store.
        identity: identity of the recorder.
        run: the run's document.
        attempt: the attempt's document.
        writer: the claimed writer; None if the store could not be reached for a claim.
        base: number of the block that is this writer's first; earlier ones were handed over to the node's writer.
            None if that depends on the blocks in doubt.
        written: if ``base`` is None, number of segments of this writer on the store.
        doubt: the oldest blocks here, if they may be on the store already.
        store_id: id of a local store; empty if it was never opened, or has none.
    """

    store_url: str
    identity: Identity
    run: documents.RunDocument
    attempt: documents.AttemptDocument
    writer: WriterId | None = None
    base: int | None = 0
    written: int = 0
    doubt: Doubt | None = None
    store_id: str = ""

    def encode(self) -> bytes:
        """Encode as a file."""
        return json.dumps(asdict(self), indent=1, default=str).encode()

    @classmethod
    def decode(cls, data: bytes, name: str) -> SpillOwner:
        """Parse the result of `encode`.

        Raises:
            FormatError: the data has another form.
        """
        try:
            document: dict[str, Any] = json.loads(data)
            identity = Identity(**document["identity"])
            writer = WriterId(**document["writer"]) if document["writer"] is not None else None
            for kind, value in asdict(identity).items():
                if isinstance(value, str):
                    check_name(kind, value)
            return cls(
                str(document["store_url"]),
                identity,
                documents.decode(documents.RunDocument, json.dumps(document["run"]).encode(), name),
                documents.decode(documents.AttemptDocument, json.dumps(document["attempt"]).encode(), name),
                writer,
                None if document.get("base", 0) is None else int(document.get("base", 0)),
                int(document.get("written", 0)),
                _doubt(document["doubt"]) if document.get("doubt") else None,
                str(document.get("store_id", "")),
            )
        except (ValueError, KeyError, TypeError, BadNameError) as error:
            raise FormatError(f"{name} is not a spill folder's file ({error!r})", _HINT) from error


def _doubt(document: dict[str, Any]) -> Doubt:
    key = document["key"]
    writer = WriterId(**key["writer"])
    named = SegmentKey.parse(SegmentKey(writer, key["seq"], key["first"], key["last"]).path)
    return Doubt(named, str(document["token"]), tuple(map(int, document["numbers"])))


@dataclass(frozen=True)
class Spilled:
    """A segment in the folder: its place and size."""

    place: SegmentPlace
    size: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.place.seq:010d}-{self.place.name}"


def is_own(facts: os.stat_result) -> bool:
    """Whether a directory or file belongs to this user, and is not writable by others."""
    return facts.st_uid == os.geteuid() and not facts.st_mode & _WRITABLE_BY_OTHERS


def _check_regular(facts: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file", str(path))


def _check_own(facts: os.stat_result, path: Path) -> None:
    if not is_own(facts):
        mode = stat.S_IMODE(facts.st_mode)
        raise PermissionError(
            errno.EPERM, f"not exclusively this user's: owner {facts.st_uid}, mode {mode:04o}", str(path)
        )


class SpillFolder:
    """One folder, locked while this object is open."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, root: Path, name: str, about: SpillOwner) -> SpillFolder:
        """Create a new private folder.

        Raises:
            OSError: it cannot be created.
        """
        path = root / f"{name}-{secrets.token_hex(4)}"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = root.stat()
        if facts.st_uid != os.geteuid() and not (facts.st_uid == 0 and facts.st_mode & stat.S_ISVTX):
            # Its owner could replace the folder.
            raise PermissionError(f"{root} belongs to another user ({facts.st_uid})")
        path.mkdir(mode=0o700)
        try:
            folder = cls._locked(path, create=True)
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise
        assert folder is not None, "no other process knows the new folder"
        try:
            folder.describe(about)
        except OSError:
            folder.remove()
            raise
        return folder

    @classmethod
    def take(cls, path: Path) -> SpillFolder | None:
        """Lock an existing folder; None if another process has locked it, or it does not exist.

        Raises:
            OSError: it cannot be opened, or does not belong exclusively to this user.
        """
        return cls._locked(path, create=False)

    @classmethod
    def _locked(cls, path: Path, *, create: bool) -> SpillFolder | None:
        try:
            with _opened(path) as directory:
                lock = os.open(_LOCK, _LOCKING | (os.O_CREAT if create else 0), 0o600, dir_fd=directory)
                try:
                    facts = os.fstat(lock)
                    _check_regular(facts, path / _LOCK)
                    _check_own(facts, path / _LOCK)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    there = os.stat(_LOCK, dir_fd=directory, follow_symlinks=False)
                    if facts.st_ino == there.st_ino:
                        return cls(path, lock)
                except OSError:  # including file systems without locks
                    os.close(lock)
                    raise
                os.close(lock)
        except (BlockingIOError, FileNotFoundError):
            pass
        return None

    def about(self) -> SpillOwner:
        """Return the owner of the objects.

        Raises:
            FormatError: the file cannot be read or is invalid.
        """
        try:
            return SpillOwner.decode(self._read(ABOUT), str(self.path / ABOUT))
        except OSError as error:
            raise FormatError(f"{self.path / ABOUT}: cannot be read ({error})", _HINT) from error

    def describe(self, about: SpillOwner) -> None:
        """Write the owner; again once the writer is claimed, before anything is uploaded under its name.

        Raises:
            OSError: it cannot be written.
        """
        self._write(ABOUT, about.encode())

    def add(self, item: Outgoing) -> Spilled:
        """Write an object.

        Raises:
            OSError: it cannot be written; nothing of it remains.
        """
        spilled = Spilled(item.place, len(item.data))
        self._write(spilled.name, item.data)
        return spilled

    def add_end(self, end: documents.EndDocument) -> None:
        """Write how the worker ended.

        Raises:
            OSError: it cannot be written.
        """
        self._write(END, documents.encode(end))

    def end(self) -> documents.EndDocument | None:
        """Return how the worker ended; None if unknown.

        Raises:
            FormatError: the file is invalid.
        """
        try:
            data = self._read(END)
        except FileNotFoundError:
            return None
        return documents.decode(documents.EndDocument, data, str(self.path / END))

    def entries(self) -> list[Spilled]:
        """Return the folder's segments in order. Files with other names are ignored.

        Raises:
            OSError: the folder cannot be read.
        """
        listed = []
        with _opened(self.path) as directory, os.scandir(directory) as entries:
            for entry in entries:
                named = _FILE.fullmatch(entry.name)
                place = SegmentPlace.parse(named[1]) if named else None
                if place is not None and entry.is_file(follow_symlinks=False):
                    listed.append(Spilled(place, entry.stat(follow_symlinks=False).st_size))
        return sorted(listed, key=lambda spilled: spilled.place.seq)

    def read(self, spilled: Spilled) -> Outgoing:
        """Read an object.

        Raises:
            OSError: it cannot be read.
        """
        return Outgoing(spilled.place, self._read(spilled.name))

    @contextlib.contextmanager
    def created(self, name: str) -> Iterator[int]:
        """Create a file, and yield its descriptor for reading and writing.

        Raises:
            OSError: it exists, or cannot be created.
        """
        with _opened(self.path) as directory:
            file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            yield file
        finally:
            os.close(file)

    def contents(self, name: str, max_bytes: int) -> bytes:
        """Read a file of at most so many bytes.

        Raises:
            OSError: it cannot be read, is larger, or does not belong exclusively to this user.
        """
        with _opened(self.path) as directory:
            return read_owned_file(
                name,
                {os.geteuid()},
                folder=directory,
                refused_modes=_WRITABLE_BY_OTHERS,
                max_bytes=max_bytes,
            )

    def drop(self, name: str) -> None:
        """Remove a file; a missing one is not an error.

        Raises:
            OSError: it cannot be removed.
        """
        with _opened(self.path) as directory:
            _unlink(name, directory)

    def remove(self) -> None:
        """Remove the folder with the files that Watchstep created, and release it. Other files remain."""
        try:
            with _opened(self.path) as directory:
                for name in os.listdir(directory):  # noqa: PTH208 - a descriptor
                    if name.startswith(_TEMPORARY) or name in {ABOUT, END}:
                        _unlink(name, directory)
                _unlink(_LOCK, directory)
            self.path.rmdir()
        except OSError:
            pass  # it contains other files, or is gone already
        self.release()

    def release(self) -> None:
        """Unlock the folder."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _write(self, name: str, data: bytes) -> None:
        temporary = f"{_TEMPORARY}{name}"
        with _opened(self.path) as directory:
            try:
                handle = os.open(temporary, _WRITING, 0o600, dir_fd=directory)
                with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor
                    file.write(data)
                os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                _unlink(temporary, directory)
                raise

    def _read(self, name: str) -> bytes:
        with _opened(self.path) as directory:
            return read_owned_file(name, {os.geteuid()}, folder=directory, refused_modes=_WRITABLE_BY_OTHERS)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a directory that only this user may write to."""
    directory = os.open(path, _DIRECTORY)
    try:
        _check_own(os.fstat(directory), path)
        yield directory
    finally:
        os.close(directory)


def _unlink(name: str, directory: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


SPILL = "WATCHSTEP_SPILL"
_PAUSE_SECONDS = 5.0
_log = logging.getLogger("watchstep")


def spill_roots() -> list[Path]:
    """Return folders for spill folders, in the order of preference.

    ``WATCHSTEP_SPILL`` only; else the user's cache, a folder for the user in the temporary folder, and the temporary folder itself.
    """
    if configured := os.environ.get(SPILL):
        return [Path(os.path.expanduser(configured)).absolute()]  # noqa: PTH111 - it never raises
    cache = cache_folder()
    roots = [cache / "watchstep" / "spill"] if cache is not None else []
    if (temporary := temporary_folder()) is not None:
        roots += [temporary / f"watchstep-spill-{os.geteuid()}", temporary]
    return roots


class Spill:
    """Objects on disk, oldest first. Not thread-safe: the owner locks.

    Attributes:
        bytes: size of the waiting objects.
        ending: the process is about to end, and reports the folder then.
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
        """Number of waiting rows."""
        return sum(spilled.place.rows for spilled in self._waiting)

    def add(self, item: Outgoing) -> bool:
        """Add an object. Returns False if it does not fit, or the disk refuses."""
        if self.bytes + len(item.data) > self._limit or time.monotonic() < self._not_before:
            return False
        try:
            spilled = self._opened().add(item)
        except OSError as error:
            self._failed(error)
            return False
        self._waiting.append(spilled)
        self.bytes += spilled.size
        self._health.count("spilled_objects")
        self._report()
        return True

    def drop_removed(self) -> None:
        """Count objects that others have removed from the disk as dropped. Without any left, the next one has a new folder."""
        if self._folder is None:
            return
        try:
            present = {spilled.name for spilled in self._folder.entries()}
        except FileNotFoundError:
            present = set()
        except OSError:
            return  # they may be there
        removed = [spilled for spilled in self._waiting if spilled.name not in present]
        if not removed:
            return
        self._health.fault("spill", FileNotFoundError(f"{self._folder.path}: files were removed"))
        self._health.count("dropped_objects", len(removed))
        self._health.count("dropped_rows", sum(spilled.place.rows for spilled in removed))
        self._waiting = deque(spilled for spilled in self._waiting if spilled.name in present)
        self.bytes = sum(spilled.size for spilled in self._waiting)
        self._report()
        if not self._waiting:
            self.close()

    def head(self) -> Outgoing | None:
        """Return the oldest object. Unreadable ones are counted as dropped."""
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
        """Remove the oldest segment, if it has this number, because it is on the store."""
        if not self._waiting or self._waiting[0].place.seq != seq:
            return False
        assert self._folder is not None
        spilled = self._waiting.popleft()
        self.bytes -= spilled.size
        try:
            self._folder.drop(spilled.name)
        except OSError as error:
            self._health.fault("spill", error)
        self._report()
        if not self._waiting:
            self.close()
        return True

    @property
    def waiting(self) -> SegmentPlace | None:
        """The oldest segment's place; None if there is none."""
        return self._waiting[0].place if self._waiting else None

    @property
    def about(self) -> SpillOwner:
        """The owner of the objects."""
        return self._about

    def oldest(self, until: int) -> list[Outgoing]:
        """Return objects up to a number. Unreadable ones are omitted."""
        items = []
        for spilled in self._waiting:
            if spilled.place.seq <= until and self._folder is not None:
                try:
                    items.append(self._folder.read(spilled))
                except OSError as error:
                    self._health.fault("spill", error)
        return items

    def describe(self, about: SpillOwner) -> None:
        """Update the owner, when the store could be reached and the writer is known."""
        self._about = about
        if self._folder is not None:
            try:
                self._folder.describe(self._described())
            except OSError as error:
                self._failed(error)

    def add_end(self, end: EndDocument) -> bool:
        """Write the end document, for the process that uploads the folder."""
        if self._limit <= 0:
            return False
        try:
            self._opened().add_end(end)
        except OSError as error:
            self._failed(error)
            return False
        return True

    def close(self) -> None:
        """Unlock the folder, and remove it if it is empty."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if self._waiting:
            folder.release()
        else:
            folder.remove()

    def detach(self) -> str:
        """Unlock the folder and keep its contents. Returns its path; empty if there is none, or others have removed it."""
        folder, self._folder = self._folder, None
        if folder is None:
            return ""
        folder.release()
        return str(folder.path) if folder.path.is_dir() else ""

    def forget(self) -> None:
        """Reset in a forked child: the folder and its lock belong to the parent."""
        self.detach()

    def _opened(self) -> SpillFolder:
        if self._folder is None:
            identity = self._about.identity
            name = f"{identity.run[:60]}-{identity.attempt[:40]}-w{identity.worker}"
            self._folder = self._create(name)
            if not self.ending:
                _log.warning(
                    "watchstep: %s cannot be reached: recorded data waits in %s. "
                    "If the process ends before the upload, run 'watchstep sync'.",
                    self._about.store_url,
                    self._folder.path,
                )
        return self._folder

    def _create(self, name: str) -> SpillFolder:
        roots = spill_roots()
        failure: OSError = FileNotFoundError("this system has no temporary folder")
        for index, root in enumerate(roots):
            try:
                return SpillFolder.make(root, name, self._described())
            except OSError as error:
                failure = error
                if index + 1 < len(roots):
                    self._health.fault("spill folder", error)
        raise failure

    def _described(self) -> SpillOwner:
        return replace(self._about, store_id=self._store_identity.id)

    def _failed(self, error: OSError) -> None:
        self._health.fault("spill", error)
        self._not_before = time.monotonic() + _PAUSE_SECONDS
        if not self._waiting:
            self.close()

    def _report(self) -> None:
        where = f" in {self._folder.path}" if self._waiting and self._folder is not None else ""
        self._health.note("spill", f"{len(self._waiting)} objects, {self.bytes} bytes waiting{where}")
