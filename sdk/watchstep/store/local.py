"""A store in a local folder: files are written whole or not at all, and read only if they are regular files.

Every folder on the way is opened within the folder before it, so nothing is written at the old path of a folder that is
moved away meanwhile. Reading a named pipe would block without end and a device may do anything; whoever may write to a
shared store can put one in the place of an object.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence

from watchstep.errors import StoreError

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
