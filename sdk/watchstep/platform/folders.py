"""Folders: paths as users write them, folder names that can be part of a key, and the private folder of a user.

Processes of one machine find each other's locks and sockets in the private folder. It is the first of these places that
can be trusted:

1. ``$XDG_RUNTIME_DIR/watchstep``
2. ``<temporary folder>/watchstep-<user id>``
3. ``/dev/shm/watchstep-<user id>``
4. ``$XDG_CACHE_HOME/watchstep/run``, or ``~/.cache/watchstep/run``

Any user may create names in the second and third place first. A folder is therefore used only if this user owns it and
nobody else may enter it, and files in it are opened relative to the checked directory, never by their path.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from watchstep.errors import ConfigError

HOME = "WATCHSTEP_HOME"
"""Environment variable: home of the service of this user; by default ``~/.watchstep``."""

_log = logging.getLogger(__name__)


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return a user's path as an absolute path, with ``~`` expanded.

    Raises:
        ConfigError: The path begins with ``~`` and the home folder is unknown, or it is relative and the working directory no longer exists.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"path {os.fspath(path)}: the home folder of user {os.geteuid()} is unknown", "set HOME"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"path {os.fspath(path)}: the working directory cannot be read: {error.strerror}",
            "use an absolute path",
        ) from error


def usable_folders(path: str) -> list[str]:
    """Return the names of the folders in a folder, sorted. Names with control characters are omitted and logged once.

    Raises:
        OSError: The folder cannot be listed.
    """
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    for name in names:
        if not is_usable(name):
            _log_unusable(path, name)
    return sorted(filter(is_usable, names))


def is_usable(name: str) -> bool:
    """Return whether a name can be part of a key."""
    return not any(unicodedata.category(character) in {"Cc", "Cs"} for character in name)


@functools.lru_cache(maxsize=1024)
def _log_unusable(path: str, name: str) -> None:
    _log.warning("folder %r in %s is left out: rename it to a name without control characters", name, path)


_OTHERS = 0o077
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - everything opened in it is checked
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass
class PrivateFolder:
    """An open directory that this user owns and no other user may enter. Callers must `close` it.

    Attributes:
        path: Path for messages.
        descriptor: Descriptor of the directory; -1 after it is closed.
        refused: Reasons why earlier candidates were not used; empty for the first.
    """

    path: Path
    descriptor: int
    refused: str = ""

    @classmethod
    def open(cls) -> PrivateFolder:
        """Open the user's folder on this machine, and create it if missing.

        Raises:
            OSError: No candidate can be used. The message lists each.
        """
        refused: list[str] = []
        for place in _places():
            try:
                return cls(place, _opened(place), "; ".join(refused))
            except OSError as error:
                refused.append(_reason(place, error))
        raise PermissionError("; ".join(refused) or "this system has no temporary folder")

    def child(self, name: str) -> PrivateFolder:
        """Open a folder in this one, and create it if missing.

        Raises:
            OSError: The folder cannot be created, or is accessible to other users.
        """
        return PrivateFolder(self.path / name, _opened_in(self.descriptor, name, self.path / name))

    def open_file(self, name: str) -> int:
        """Open a regular file in this folder for reading and writing, create it if missing, and return its descriptor.

        Raises:
            OSError: The file cannot be opened, or is not a regular file.
        """
        handle = os.open(name, _FILE, 0o600, dir_fd=self.descriptor)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise FileExistsError(f"{self.path / name} is not a regular file")
        return handle

    def inode(self, name: str) -> int:
        """Return the inode of a file in this folder.

        Raises:
            OSError: The file does not exist.
        """
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_ino

    def remove_file(self, name: str) -> None:
        """Remove a file. A missing file is not an error.

        Raises:
            OSError: The file cannot be removed.
        """
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def close(self) -> None:
        """Close the directory. May be called again."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def cache_folder() -> Path | None:
    """Return the user's cache folder; None if it is not writable or not absolute."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - it never raises
    if cache.is_absolute() and os.access(cache if cache.is_dir() else cache.parent, os.W_OK):
        return cache
    return None


def temporary_folder() -> Path | None:
    """Return the folder for temporary files; None if no folder is writable."""
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return None


def _places() -> Iterator[Path]:
    if (runtime := os.environ.get("XDG_RUNTIME_DIR", "")) and _is_runtime_folder(runtime):
        yield Path(runtime) / "watchstep"
    for folder in (temporary_folder(), _SHARED_MEMORY):
        if folder is not None and folder.is_dir():
            yield folder / f"watchstep-{os.geteuid()}"
    if (cache := cache_folder()) is not None:
        yield cache / "watchstep" / "run"


def _is_runtime_folder(path: str) -> bool:
    """Return whether the variable is a folder as required by the XDG specification.

    `su`, `sudo` and batch systems pass on the variable of another user or machine. This is not reported as a problem.
    """
    try:
        facts = os.stat(path)  # noqa: PTH116 - like the other calls
    except (OSError, ValueError):
        return False
    return os.path.isabs(path) and _is_private(facts)  # noqa: PTH117 - as above


def _opened(path: Path) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _opened_in(parent, path.name, path)
    finally:
        os.close(parent)


def _opened_in(parent: int, name: str, path: Path) -> int:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    handle = os.open(name, _DIRECTORY, dir_fd=parent)
    facts = os.fstat(handle)
    if not _is_private(facts):
        os.close(handle)
        raise PermissionError(
            f"{path} is accessible to other users or owned by another (owner {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o})"
        )
    return handle


def _is_private(facts: os.stat_result) -> bool:
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & _OTHERS


def _reason(place: Path, error: OSError) -> str:
    return str(error) if error.errno is None else f"{place}: {error.strerror}"
