"""Stores in local folders: files, and the identity of a store.

A store in a local folder: files are written whole or not at all, and read only if they are regular files.

Every folder on the way is opened within the folder before it, so nothing is written at the old path of a folder that is
moved away meanwhile. Reading a named pipe would block without end and a device may do anything; whoever may write to a
shared store can put one in the place of an object.

Which store a local folder is: a folder that vanished, or another one in its place, must not be taken for it.

A disk that is unmounted leaves an empty folder, and a folder that is moved away leaves nothing, where a writer would make a new store
and split a run in two. So the first process that writes to a store puts a marker with a random id at its root, only if there is none;
every process remembers the id that it found, and takes a missing or another marker for an outage. ``watchstep run`` and an `Estimator`
pass the id that they found to the program by an environment variable. A bucket needs no marker: nobody makes it by writing to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from watchstep.errors import ConfigError, MissingStoreError, StoreError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def opened_folder(path: str | os.PathLike[str]) -> Iterator[int]:
    """A folder's descriptor, while it is needed: an open one keeps its disk from being unmounted.

    Raises:
        OSError: it cannot be opened.
    """
    folder = os.open(path, _FOLDER)
    try:
        yield folder
    finally:
        os.close(folder)


def descend(folder: int, parts: Sequence[str], *, create: bool = False, follow_links: bool = True) -> int:
    """The descriptor of a folder below an open one, to be closed by the caller.

    Args:
        folder: stays open.
        parts: names of the folders on the way.
        create: make those that are missing.
        follow_links: also through symbolic links.

    Raises:
        OSError: a folder is missing, cannot be made, or is a link that is not followed.
    """
    flags = _FOLDER if follow_links else _FOLDER | os.O_NOFOLLOW
    inner = os.dup(folder)
    for part in parts:
        outer = inner
        try:
            inner = _enter(outer, part, flags, create=create)
        finally:
            os.close(outer)
    return inner


def _enter(folder: int, name: str, flags: int, *, create: bool) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):  # another may make it in between
        os.mkdir(name, dir_fd=folder)
    return os.open(name, flags, dir_fd=folder)


def put_file(folder: int, name: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file whole, replacing one of the same name.

    Raises:
        OSError: it cannot be written; nothing of it is visible.
    """
    unfinished = _write(folder, name, parts)
    try:
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(unfinished, dir_fd=folder)
        raise


def create_file(folder: int, name: str, parts: Iterable[bytes | memoryview]) -> bool:
    """Write a file whole, only if the name is free; False where it was taken.

    Raises:
        OSError: it cannot be written; nothing of it is visible.
    """
    unfinished = _write(folder, name, parts)
    try:
        os.link(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        os.unlink(unfinished, dir_fd=folder)
    return True


def _write(folder: int, name: str, parts: Iterable[bytes | memoryview]) -> str:
    """Write a file that no listing shows yet; its name."""
    unfinished = f"{name}#{secrets.randbelow(10**9)}"
    file = os.open(unfinished, _NEW, 0o666, dir_fd=folder)
    try:
        with open(file, "wb") as opened:  # noqa: PTH123 - a descriptor
            opened.writelines(parts)
    except BaseException:
        os.unlink(unfinished, dir_fd=folder)
        raise
    return unfinished


OPENING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextlib.contextmanager
def opened_object(path: str | os.PathLike[str]) -> Iterator[tuple[int, int]]:
    """A regular file's descriptor, and its size in bytes. Symbolic links are followed.

    Raises:
        OSError: it cannot be opened; a folder counts as a file that is not there.
        StoreError: it is not a regular file.
    """
    try:
        file = os.open(path, OPENING)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise _not_regular(path) from error
        raise
    try:
        yield file, _size(os.fstat(file), path)
    finally:
        os.close(file)


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a regular file.

    Raises:
        OSError, StoreError: as `opened_object`.
    """
    return _size(os.stat(path), path)  # noqa: PTH116 - of a path as text


def read_range(file: int, start: int, length: int) -> bytes:
    """Bytes of a file; fewer where it ends before.

    Raises:
        OSError: it cannot be read.
    """
    read: list[bytes] = []
    while length > 0:
        data = os.pread(file, length, start)
        if not data:
            break
        read.append(data)
        start, length = start + len(data), length - len(data)
    return read[0] if len(read) == 1 else b"".join(read)


def read_owned_file(
    path: str | os.PathLike[str],
    owners: Collection[int],
    *,
    folder: int | None = None,
    refused_modes: int = 0,
    max_bytes: int | None = None,
) -> bytes:
    """The content of a regular file of one of some users. The last part of its path must not be a symbolic link.

    Args:
        path: of the file.
        owners: the user ids that are trusted.
        folder: the descriptor of the directory that a relative path starts from.
        refused_modes: bits of its mode that let others write, and must not be set.
        max_bytes: the largest file that is read; None for any size.

    Raises:
        OSError: it cannot be read, is a link or not a regular file, belongs to another user, has such a mode, or is larger.
    """
    file = os.open(path, OPENING | os.O_NOFOLLOW, dir_fd=folder)
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if facts.st_uid not in owners:
            raise PermissionError(errno.EPERM, f"belongs to another user ({facts.st_uid})", os.fspath(path))
        if facts.st_mode & refused_modes:
            mode = stat.S_IMODE(facts.st_mode)
            raise PermissionError(errno.EPERM, f"others may write to it (mode {mode:04o})", os.fspath(path))
        if max_bytes is not None and facts.st_size > max_bytes:
            raise OSError(
                errno.EFBIG, f"{facts.st_size} bytes, at most {max_bytes} are read", os.fspath(path)
            )
        return read_range(file, 0, facts.st_size)
    finally:
        os.close(file)


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether a regular file lies there."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - as above
    except OSError:
        return False


def _size(facts: os.stat_result, path: str | os.PathLike[str]) -> int:
    if stat.S_ISDIR(facts.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    if not stat.S_ISREG(facts.st_mode):
        raise _not_regular(path)
    return facts.st_size


def _not_regular(path: str | os.PathLike[str]) -> StoreError:
    return StoreError(
        f"object {os.fspath(path)}: not a regular file", "remove it: nothing that Watchstep writes is one"
    )


MARKER = ".watchstep-store"
"""Name of the marker at a local store's root; no project can have it."""

STORE_ID = "WATCHSTEP_STORE_ID"
"""What a launch found of its store: the id, a space, and the store's URL."""

_ID = re.compile(rb"[0-9a-f]{32}")
_VALUE = re.compile(r"(?P<id>[0-9a-f]{32}) (?P<url>\S.*)")
_MEND = "bring the folder back, e.g. mount its disk; until then nothing is written there"


class StoreIdentity:
    """The identity of one local store, as one process knows it. Thread-safe.

    Of a store without a marker only the folder's absence is noticed, until somebody puts one there: a process that may write to its
    root does so when it opens the store, and a service reads it.

    Attributes:
        id: of the store; empty before it was opened, or where it has none.
    """

    def __init__(self, id: str = "") -> None:  # noqa: A002 - what it is
        self.id = id
        self._folder: Path | None = None
        self._seen: tuple[int, int, int] | None = None
        self._lock = threading.Lock()

    @classmethod
    def of_launch(cls, url: str, variables: Mapping[str, str] = os.environ) -> StoreIdentity:
        """The identity that the launch of this program passed for a store; an unknown one for another store, and without a launch.

        Args:
            url: of the store.
            variables: the environment.

        Raises:
            ConfigError: the variable has another form.
        """
        text = variables.get(STORE_ID, "")
        if not text:
            return cls()
        value = _VALUE.fullmatch(text)
        if value is None:
            raise ConfigError(
                f"environment variable {STORE_ID}={text[:100]!r}: not an id and a URL",
                "unset it: 'watchstep run' sets it",
            )
        return cls(value["id"] if value["url"] == url else "")

    def variables(self, url: str) -> dict[str, str]:
        """What `of_launch` reads in a launched program; nothing where no id is known.

        Args:
            url: of the store, as the program opens it.
        """
        return {STORE_ID: f"{self.id} {url}"} if self.id else {}

    @property
    def is_known(self) -> bool:
        """Whether the store has been opened, or its id was given: from then on its folder is not made."""
        return bool(self.id) or self._folder is not None

    def attach(self, folder: Path, *, create: bool) -> None:
        """Find out which store a folder is, or check that it is the known one.

        Args:
            folder: the store's root, which is there.
            create: put a marker where there is none and the store is not known yet.

        Raises:
            MissingStoreError: the folder is not the store that is known, or it or its marker cannot be read.
        """
        with self._lock:
            was_known, self._folder = self.is_known, folder
            if not was_known:
                with self._noticing(folder):
                    self.id = _read(folder) or (_created(folder) if create else "")
        self.check()

    def check(self) -> None:
        """See that the folder is still the store; one request to the file system in most cases.

        Raises:
            MissingStoreError: it is not.
        """
        if self._folder is not None:
            with self._noticing(self._folder):
                self._check(self._folder, None)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The descriptor of the store's folder, which is the store however long the caller takes.

        Raises:
            MissingStoreError: the folder is missing, or another store's.
        """
        assert self._folder is not None
        with contextlib.ExitStack() as stack:
            with self._noticing(self._folder):
                folder = stack.enter_context(opened_folder(self._folder))
                self._check(self._folder, folder)
            yield folder

    def _check(self, path: Path, folder: int | None) -> None:
        """Raises OSError or MissingStoreError; by the folder's descriptor, or by its path."""
        name = MARKER if folder is not None else path / MARKER
        if not self.id:
            if folder is None:
                os.stat(path)  # noqa: PTH116 - as below
            self.id = _read(path)  # the first writer may have put a marker there by now
            return
        status = os.stat(name, dir_fd=folder)
        stamp = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if stamp == self._seen:
            return
        identity = _read(path)
        if identity != self.id:
            raise MissingStoreError(
                f"store {path}: another store lies there ({identity or 'unmarked'}, and not {self.id})", _MEND
            )
        self._seen = stamp

    @contextlib.contextmanager
    def _noticing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise MissingStoreError(
                f"store {path}: the folder of the store is gone ({error.strerror}: {error.filename})",
                _MEND,
            ) from error
        except OSError as error:
            raise MissingStoreError(
                f"store {path}: the folder of the store cannot be read ({error.strerror}: {error.filename})",
                "check its owner and mode, and those of its marker",
            ) from error


def _read(folder: Path) -> str:
    """The id in a folder's marker; empty where there is none.

    Raises:
        OSError: it cannot be read.
        MissingStoreError: the marker is no regular file.
    """
    try:
        # Without waiting: a named pipe has no writer. A link is followed, for it can only lead to another id.
        with open(folder / MARKER, "rb", opener=_opened_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _no_marker(folder)
            match = _ID.match(file.read(64))
    except FileNotFoundError:
        return ""
    except OSError as error:
        if error.errno in {errno.ENXIO, errno.EISDIR}:
            raise _no_marker(folder) from error
        raise
    return match[0].decode() if match else ""


def _opened_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _no_marker(folder: Path) -> MissingStoreError:
    return MissingStoreError(
        f"store {folder}: {MARKER} is not a regular file",
        "remove it; the next process that writes to the store makes a new one",
    )


def _created(folder: Path) -> str:
    """Put a marker into a folder, unless another process did so; the id, empty where nobody may write there."""
    made = secrets.token_hex(16)
    try:
        with opened_folder(folder) as opened:
            create_file(opened, MARKER, (f"{made}\n".encode(),))
            if not _read(folder):  # an empty one, of a machine that lost power
                put_file(opened, MARKER, (f"{made}\n".encode(),))
            return _read(folder)
    except OSError:
        return ""
