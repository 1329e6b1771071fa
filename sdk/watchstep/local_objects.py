"""Objects of a local store, and files of trusted users: opened without waiting, and only if they are regular files.

A named pipe that nobody writes to keeps its reader waiting without end, and a device may do anything. Whoever may write to a shared store
can put one in the place of an object.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator

from watchstep.errors import StoreError

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
