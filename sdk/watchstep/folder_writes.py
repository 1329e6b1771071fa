"""Writing files below a folder that is open: whole or not at all, and without making that folder should it vanish.

Each folder on the way is opened within the one before it. So a folder that is moved away meanwhile takes with it what is being
written, and nothing is written where it was.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence

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
