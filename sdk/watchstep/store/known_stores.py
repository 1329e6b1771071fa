"""Records of the local stores that this user's processes have opened on this machine.

A process that finds a folder without a marker must know whether the folder is new, or the disk of its store is not mounted. The record
of a path contains the id and the mount point of the store that was last opened there. Each process that has the store open locks it.

A path belongs to the recorded store, whatever its folder contains, if

- a home of ``watchstep serve`` names the store (`noted_id`), because that service does not start without it,
- a process has the store open, which therefore exists somewhere, or
- the store was on a disk whose mount point has no disk now.

Otherwise a missing folder was removed, and is created again without an option. Records are in the user's cache and are optional: without a
writable cache, a process knows only the folder that it finds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import stat
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from watchstep.platform.folders import HOME, absolute_path, cache_folder

ID = re.compile(r"[0-9a-f]{32}")
HOME_NOTE = "store-identity"
"""File in a service's home with the location and the id of each store that the service was started on."""

_OPENED = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 65536
_MAX_NOTE_BYTES = 1024 * 1024
_MAX_RECORDS = 1000
_LOOKS = 50
_PAUSE_SECONDS = 0.005


@dataclass(frozen=True)
class KnownStore:
    """The store that was last opened at a path.

    Attributes:
        id: id of the store.
        mount: mount point of its disk; empty for the root file system, and if it is unknown.
        in_use: whether a process has the store open.
    """

    id: str
    mount: str = ""
    in_use: bool = False

    @property
    def is_away(self) -> bool:
        """Return whether the store exists, but is not at its path, if its marker is not there."""
        return self.in_use or (bool(self.mount) and self.mount not in _mount_points())


def expected_id(folder: Path, marker: str) -> str:
    """Return the id of the store that belongs at a path.

    Args:
        folder: path of the store, whether it exists or not.
        marker: id in the folder's marker; empty if there is none.
    """
    if noted := noted_id(_user_home(), str(folder)):
        return noted
    known = _recall(folder, marker)
    return known.id if known is not None and known.is_away else marker


def _recall(folder: Path, marker: str) -> KnownStore | None:
    """Return the store that was last opened at a path; None if there is no valid record, or it is that of the marker."""
    path = _record_of(folder)
    if path is None:
        return None
    try:
        record = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        data = json.loads(os.pread(record, _MAX_BYTES, 0))
        identity, mount = data["id"], data["mount"]
        if not (isinstance(mount, str) and isinstance(identity, str) and ID.fullmatch(identity)):
            return None
        return None if identity == marker else KnownStore(identity, mount, _is_locked(record))
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return None
    finally:
        os.close(record)


def remember(folder: Path, identity: str) -> int | None:
    """Record that a store is open at a path, until the returned descriptor is closed; None if it cannot be recorded."""
    path = _record_of(folder)
    if path is None:
        return None
    data = json.dumps(
        {
            "id": identity,
            "mount": _mount_point_of(folder),
            "folder": str(folder),
            "host": socket.gethostname(),
        }
    ).encode()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_oldest(path.parent)
        record = os.open(path, _OPENED, 0o600)
    except OSError:
        return None
    try:
        if os.pread(record, _MAX_BYTES, 0) != data:
            os.ftruncate(record, 0)
            os.pwrite(record, data, 0)
        os.utime(record)  # the oldest are removed
        fcntl.flock(record, fcntl.LOCK_SH)
    except OSError:
        os.close(record)
        return None
    return record


def noted_id(home: Path | None, location: str) -> str:
    """Return the id of the store that a service of this home was last started on; empty if it was on none at this location."""
    return _noted(home).get(location, "") if home is not None else ""


def note_in_home(home: Path, location: str, identity: str) -> None:
    """Note the id of a service's store in its home.

    Raises:
        OSError: the note cannot be written.
    """
    noted = {**_noted(home), location: identity}
    partial = home / f".{HOME_NOTE}.{os.getpid()}"
    partial.unlink(missing_ok=True)
    with open(os.open(partial, _OPENED | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
        file.writelines(f"{name} {value}\n" for name, value in noted.items())
    partial.replace(home / HOME_NOTE)


def accept(folder: Path, identity: str) -> None:
    """Note in the user's home that the owner has accepted another store at a path that the home names.

    Raises:
        OSError: the note cannot be written.
    """
    home = _user_home()
    if home is not None and noted_id(home, str(folder)) not in {"", identity}:
        note_in_home(home, str(folder), identity)


def _noted(home: Path) -> dict[str, str]:
    try:
        text = _read_own(home / HOME_NOTE).decode()
    except (OSError, ValueError):
        return {}
    lines = (line.rpartition(" ") for line in text.splitlines())
    return {location: identity for location, _, identity in lines if location and ID.fullmatch(identity)}


def _read_own(path: Path) -> bytes:
    """Read a regular file of this user or of root: in a home that others write to, a pipe would block, and another id would divert the data.

    Raises:
        OSError: The file cannot be read, or is another one.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in {os.geteuid(), 0}:
            raise PermissionError(errno.EPERM, "not a file of this user", str(path))
        return os.pread(file, _MAX_NOTE_BYTES, 0)
    finally:
        os.close(file)


def _user_home() -> Path | None:
    with contextlib.suppress(Exception):
        return absolute_path(os.environ.get(HOME) or "~/.watchstep")
    return None


def _record_of(folder: Path) -> Path | None:
    """Return the path of a folder's record; None without a cache. Machines that share a home folder have different records."""
    cache = cache_folder()
    if cache is None:
        return None
    name = sha256(f"{socket.gethostname()}\0{os.path.realpath(folder)}".encode(errors="surrogateescape"))
    return cache / "watchstep" / "stores" / f"{name.hexdigest()[:32]}.json"


def _is_locked(record: int) -> bool:
    for _ in range(_LOOKS):
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Ranks of a job look at the same time, and exclude each other for a moment.
            time.sleep(_PAUSE_SECONDS)
            continue
        fcntl.flock(record, fcntl.LOCK_UN)
        return False
    return True


def _remove_oldest(records: Path) -> None:
    """Remove the oldest half of the records if there are too many, such as of stores in temporary folders."""
    names = os.listdir(records)  # noqa: PTH208 - names are enough
    if len(names) < _MAX_RECORDS:
        return
    paths = sorted((records / name for name in names), key=lambda path: path.stat().st_mtime_ns)
    for path in paths[: len(paths) // 2]:
        path.unlink(missing_ok=True)


def _mount_point_of(folder: Path) -> str:
    points = _mount_points()
    path = Path(os.path.realpath(folder))
    return next((str(parent) for parent in (path, *path.parents[:-1]) if str(parent) in points), "")


def _mount_points() -> frozenset[str]:
    """Return the mount points, bind mounts included; none if the system has no /proc."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return frozenset()
    return frozenset(_unescaped(line.split(" ")[4]) for line in text.splitlines())


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
