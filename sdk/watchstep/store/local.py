"""Files and the identity of stores in local folders.

Files of a local store are written atomically, and read only if they are regular files.

Every folder of a path is opened relative to its parent, so nothing is written at the old path of a folder that is
moved away meanwhile. Reading a named pipe would block indefinitely, and a device may do anything; any writer of a
shared store can replace an object by one.

A missing folder, or another folder at its path, must not be mistaken for the store.

An unmounted disk leaves an empty folder, and a moved folder leaves nothing. There a writer would create a new store
and split a run in two. So the first process that writes to a store puts a marker with a random id at its root if it has none;
every process remembers the id, and treats a missing or different marker as an outage. The id of a path is, in this order,

1. what the service answers to the registration of a run (`StoreIdentity.require`), at launch or at any later time;
2. what ``watchstep run`` and an `Estimator` pass to the program in an environment variable;
3. what earlier processes have recorded, if the store exists elsewhere (`watchstep.store.known_stores`);
4. what the folder's marker contains; the first writer creates one.

A bucket needs no marker, because writing does not create it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from watchstep.errors import ConfigError, MissingStoreError, StoreError
from watchstep.store import known_stores

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def opened_folder(path: str | os.PathLike[str]) -> Iterator[int]:
    """Yield a folder's descriptor, and close it afterwards: an open descriptor prevents its disk from being unmounted.

    Raises:
        OSError: The folder cannot be opened.
    """
    folder = os.open(path, _FOLDER)
    try:
        yield folder
    finally:
        os.close(folder)


def descend(folder: int, parts: Sequence[str], *, create: bool = False, follow_links: bool = True) -> int:
    """Open a folder below an open one, and return its descriptor. The caller closes it.

    Args:
        folder: Descriptor of the open folder, which stays open.
        parts: Names of the folders of the path.
        create: Create missing folders.
        follow_links: Follow symbolic links.

    Raises:
        OSError: A folder is missing, cannot be created, or is a link that is not followed.
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
    with contextlib.suppress(FileExistsError):  # another process may create it meanwhile
        os.mkdir(name, dir_fd=folder)
    return os.open(name, flags, dir_fd=folder)


def put_file(folder: int, name: str, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file atomically, and replace a file of the same name.

    Raises:
        OSError: The file cannot be written; no part of it is visible.
    """
    unfinished = _write(folder, name, parts)
    try:
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(unfinished, dir_fd=folder)
        raise


def create_file(folder: int, name: str, parts: Iterable[bytes | memoryview]) -> bool:
    """Write a file atomically if the name does not exist. Returns False if it exists.

    Raises:
        OSError: The file cannot be written; no part of it is visible.
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
    """Write a file that listings do not show, and return its name."""
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
    """Yield a regular file's descriptor and its size in bytes. Symbolic links are followed.

    Raises:
        OSError: The file cannot be opened; a folder counts as a missing file.
        StoreError: It is not a regular file.
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
    """Return the size of a regular file in bytes.

    Raises:
        OSError, StoreError: As for `opened_object`.
    """
    return _size(os.stat(path), path)  # noqa: PTH116 - of a path as text


def read_range(file: int, start: int, length: int) -> bytes:
    """Read bytes of a file; fewer if it ends before.

    Raises:
        OSError: The file cannot be read.
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
    """Read a regular file that belongs to one of some users. The last part of its path must not be a symbolic link.

    Args:
        path: Path of the file.
        owners: The trusted user ids.
        folder: Descriptor of the directory of a relative path.
        refused_modes: Bits of its mode that permit others to write, which must not be set.
        max_bytes: Maximum size in bytes; None for any size.

    Raises:
        OSError: The file cannot be read, is a link or not a regular file, belongs to another user, has such a mode, or is larger.
    """
    file = os.open(path, OPENING | os.O_NOFOLLOW, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if status.st_uid not in owners:
            raise PermissionError(errno.EPERM, f"belongs to another user ({status.st_uid})", os.fspath(path))
        if status.st_mode & refused_modes:
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(errno.EPERM, f"others may write to it (mode {mode:04o})", os.fspath(path))
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(
                errno.EFBIG, f"{status.st_size} bytes, at most {max_bytes} are read", os.fspath(path)
            )
        return read_range(file, 0, status.st_size)
    finally:
        os.close(file)


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is a regular file."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - as above
    except OSError:
        return False


def _size(status: os.stat_result, path: str | os.PathLike[str]) -> int:
    if stat.S_ISDIR(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise _not_regular(path)
    return status.st_size


def _not_regular(path: str | os.PathLike[str]) -> StoreError:
    return StoreError(
        f"object {os.fspath(path)} is not a regular file", "remove it: Watchstep writes only regular files"
    )


MARKER = ".watchstep-store"
"""Name of the marker at a local store's root. No project can have this name."""

STORE_ID = "WATCHSTEP_STORE_ID"
"""Environment variable with the store of a launch: its id, a space, and its URL."""

_ID = re.compile(known_stores.ID.pattern.encode())
_VALUE = re.compile(r"(?P<id>[0-9a-f]{32}) (?P<url>\S.*)")
_HINT = (
    "bring the folder back, e.g. mount its disk; until then nothing is written there. If the store was replaced on purpose: "
    "watchstep sync --accept-store ID, or --accept-store new"
)


class StoreIdentity:
    """The identity of one local store, as known to one process. Thread-safe.

    For a store without a marker, only the absence of the folder is detected, until it has a marker: a process that may write to its
    root creates the marker when it opens the store, and a service reads it.

    Attributes:
        id: Id of the store; empty before it is opened, or without a marker.
    """

    def __init__(self, id: str = "") -> None:  # noqa: A002 - what it is
        self.id = id
        self._folder: Path | None = None
        self._last_stamp: tuple[int, int, int] | None = None
        self._lock = threading.Lock()
        self._close_record: Callable[[], object] | None = None

    @classmethod
    def of_launch(cls, url: str, variables: Mapping[str, str] = os.environ) -> StoreIdentity:
        """Return the identity that the launch of this program passed for a store; an unknown one for another store or without a launch.

        Args:
            url: URL of the store.
            variables: The environment.

        Raises:
            ConfigError: The variable has another form.
        """
        text = variables.get(STORE_ID, "")
        if not text:
            return cls()
        value = _VALUE.fullmatch(text)
        if value is None:
            raise ConfigError(
                f"environment variable {STORE_ID}={text[:100]!r} is not an id and a URL",
                "unset it: 'watchstep run' sets it",
            )
        return cls(value["id"] if value["url"] == url else "")

    def variables(self, url: str) -> dict[str, str]:
        """Return the variables that `of_launch` reads in a launched program; empty if no id is known.

        Args:
            url: URL of the store, as the program opens it.
        """
        return {STORE_ID: f"{self.id} {url}"} if self.id else {}

    @property
    def is_known(self) -> bool:
        """Return whether the store has been opened or its id was passed. After that its folder is not created."""
        return bool(self.id) or self._folder is not None

    def require(self, id: str) -> bool:  # noqa: A002 - what it is
        """Treat every other store as an outage from now on. Returns whether the id differs from the known one."""
        with self._lock:
            differs, self.id = self.id != id, id
            if differs:
                self._last_stamp = None
            return differs

    def recall(self, folder: Path) -> None:
        """Read the id of the store that belongs at a path, whether its folder exists or not, unless the store is known already.

        Raises:
            MissingStoreError: The folder or its marker cannot be read.
        """
        with self._lock, self._translating(folder):
            if not self.is_known:
                self.id = known_stores.expected_id(folder, _read(folder))

    def attach(self, folder: Path, *, create: bool) -> None:
        """Check that a folder is the known store.

        Args:
            folder: The existing root of the store.
            create: Create a missing marker if no store is known.

        Raises:
            MissingStoreError: The folder is not the known store, or it or its marker cannot be read.
        """
        with self._lock:
            was_known, self._folder = self.is_known, folder
            if create and not was_known:
                with self._translating(folder):
                    self.id = _read(folder) or _create_marker(folder)
        self.check()

    def release(self) -> None:
        """Record that this process does not use the store any more. Does nothing before `attach`."""
        close, self._close_record = self._close_record, None
        if close is not None:
            close()

    def missing(self, folder: Path) -> MissingStoreError:
        """Return the error for a missing folder at the path of the store."""
        if not self.id:
            return MissingStoreError(
                f"store {folder} does not exist", "check the path, or create the folder first"
            )
        return MissingStoreError(
            f"store {folder}: the folder of the store no longer exists (its id is {self.id})", _HINT
        )

    def check(self) -> None:
        """Check that the folder is still the store. This is usually one call of the file system.

        Raises:
            MissingStoreError: The folder is not the store.
        """
        if self._folder is not None:
            with self._translating(self._folder):
                self._check(self._folder, None)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yield the descriptor of the store's folder, which remains the store for the whole block.

        Raises:
            MissingStoreError: The folder is missing, or of another store.
        """
        assert self._folder is not None
        with contextlib.ExitStack() as stack:
            with self._translating(self._folder):
                folder = stack.enter_context(opened_folder(self._folder))
                self._check(self._folder, folder)
            yield folder

    def _check(self, path: Path, folder: int | None) -> None:
        """Check the folder by its descriptor or path. Raises OSError or MissingStoreError."""
        name = MARKER if folder is not None else path / MARKER
        if not self.id:
            if folder is None:
                os.stat(path)  # noqa: PTH116 - as below
            self.id = _read(path)  # the first writer may have created a marker meanwhile
            return
        status = os.stat(name, dir_fd=folder)
        stamp = (status.st_dev, status.st_ino, status.st_mtime_ns)
        if stamp == self._last_stamp:
            return
        identity = _read(path)
        if identity != self.id:
            raise MissingStoreError(
                f"store {path}: the folder contains another store ({identity or 'unmarked'} instead of {self.id})",
                _HINT,
            )
        self._last_stamp = stamp
        self._record_use(path)

    def _record_use(self, path: Path) -> None:
        """Record the store and that this process uses it, for processes that find no marker at its path."""
        record = known_stores.remember(path, self.id)
        if record is not None:
            with self._lock:
                close, self._close_record = self._close_record, weakref.finalize(self, os.close, record)
            if close is not None:
                close()

    @contextlib.contextmanager
    def _translating(self, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise MissingStoreError(
                f"store {path}: the folder of the store no longer exists ({error.strerror}: {error.filename})",
                _HINT,
            ) from error
        except OSError as error:
            raise MissingStoreError(
                f"store {path}: the folder of the store cannot be read ({error.strerror}: {error.filename})",
                "check its owner and mode, and those of its marker",
            ) from error


def _read(folder: Path) -> str:
    """Return the id in a folder's marker; empty without a marker.

    Raises:
        OSError: The marker cannot be read.
        MissingStoreError: The marker is not a regular file.
    """
    try:
        # Do not wait: a named pipe has no writer. Links are followed, because they can only lead to another id.
        with open(folder / MARKER, "rb", opener=_open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _no_marker(folder)
            match = _ID.match(file.read(64))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        if error.errno in {errno.ENXIO, errno.EISDIR}:
            raise _no_marker(folder) from error
        raise
    return match[0].decode() if match else ""


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _no_marker(folder: Path) -> MissingStoreError:
    return MissingStoreError(
        f"store {folder}: {MARKER} is not a regular file",
        "remove it; the next process that writes to the store makes a new one",
    )


def new_store(folder: Path) -> str:
    """Create a store in a folder without a marker, whatever was there before, and return its id.

    Raises:
        StoreError: The folder has a marker, or cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = _read(folder)
    except OSError as error:
        raise StoreError(f"store {folder}: cannot be created ({error.strerror})", "check its path") from error
    if found:
        raise StoreError(f"store {folder}: is not new, its id is {found}", f"accept it by its id: {found}")
    created = _create_marker(folder)
    if not created:
        raise StoreError(f"store {folder}: its marker cannot be written", "check the folder's owner and mode")
    return created


def refuse_replacement(folder: Path) -> None:
    """Check that a folder that a service is about to create or to use is not in the place of a store that is away.

    Raises:
        MissingStoreError: A known store belongs there, and it is not there.
    """
    identity = StoreIdentity()
    identity.recall(folder)
    if not identity.id:
        return
    if not folder.is_dir():
        raise identity.missing(folder)
    identity.attach(folder, create=False)
    identity.release()


def _create_marker(folder: Path) -> str:
    """Create a marker in a folder unless it has one. Returns the id; empty if the folder is not writable."""
    identity = secrets.token_hex(16)
    try:
        with opened_folder(folder) as opened:
            create_file(opened, MARKER, (f"{identity}\n".encode(),))
            if not _read(folder):  # an empty marker, after a power failure
                put_file(opened, MARKER, (f"{identity}\n".encode(),))
            return _read(folder)
    except OSError:
        return ""
