"""A local folder as a store for untrusted writers: no symbolic link below it is followed.

Each part of a key is opened relative to the folder before it, without following links. So a user who may write below the
folder cannot direct the service outside of it, even by replacing a folder with a link between a check and a use. Other file
types, such as pipes, are not opened either.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from watchstep.errors import NotFoundError, StoreError
from watchstep.platform.folders import is_usable
from watchstep.store.local import (
    MARKER,
    StoreIdentity,
    create_file,
    descend,
    opened_folder,
    put_file,
    read_range,
)
from watchstep.store.store import ObjectEntry, Store, WriteGate, oversized

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_UNFINISHED = re.compile(r".*#[0-9]+", re.DOTALL)
"""Files that are being written, by obstore or this module."""

_DEEPEST = 16
"""Levels of folders that are listed; Watchstep's keys have six."""

_log = logging.getLogger(__name__)


class ConfinedFolder(Store):
    """Objects in a folder, as `Store`. Links are left out of listings, and raise an error if they are read. Thread-safe."""

    def __init__(self, folder: Path, prefix: str = "", identity: StoreIdentity | None = None) -> None:
        """Create it without opening anything.

        Args:
            folder: an absolute path; links in it belong to its owner, and are followed.
            prefix: prefix of all keys, with a slash at its end.
            identity: identity of the folder; if it is given, a missing or different folder raises `MissingStoreError`.
        """
        super().__init__(folder.as_uri(), None, prefix, identity=identity)
        self._folder = folder

    def _view(self, prefix: str, gate: WriteGate | None) -> ConfinedFolder:  # noqa: ARG002 - gates are for recordings
        """The same folder with another prefix, for `child` and `sibling`."""
        return ConfinedFolder(self._folder, prefix, self._identity)

    def put(self, key: str, data: bytes) -> None:
        """As `Store.put`."""
        with self._translating("write", key), self._folder_of(key, create=True) as (folder, name):
            put_file(folder, name, (data,))

    def create(self, key: str, data: bytes) -> bool:
        """As `Store.create`."""
        return self._create(key, (data,))

    def create_in_parts(self, key: str, size: int, parts: Iterable[memoryview]) -> bool:  # noqa: ARG002 - a file grows
        """As `Store.create_in_parts`."""
        return self._create(key, parts)

    def _create(self, key: str, parts: Iterable[bytes | memoryview]) -> bool:
        with self._translating("write", key), self._folder_of(key, create=True) as (folder, name):
            return create_file(folder, name, parts)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """As `Store.get`."""
        with self._translating("read", key), self._file(key) as (file, size):
            if limit is None or size <= limit:
                return read_range(file, 0, size)
        raise oversized(self._description(key), size, limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """As `Store.get_range`."""
        with self._translating("read", key), self._file(key) as (file, size):
            if start < size:
                return read_range(file, start, min(length, size - start))
        raise StoreError(
            f"object {self._description(key)}: has {size} bytes, cannot be read from byte {start} on",
            "read it again: it may have changed",
        )

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """As `Store.get_ranges`."""
        with self._translating("read", key), self._file(key) as (file, size):
            return [
                memoryview(read_range(file, start, max(0, min(length, size - start))))
                for start, length in ranges
            ]

    def size(self, key: str) -> int:
        """As `Store.size`."""
        with self._translating("read", key), self._file(key) as (_, size):
            return size

    def entries(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """As `Store.entries`."""
        whole = (self._prefix + prefix).strip("/")
        with self._translating("list", prefix):
            try:
                folder = self._descend(_parts(whole) if whole else [])
            except (FileNotFoundError, NotADirectoryError):
                return
            skip = len(self._prefix)
            for key, size in _walk(folder, f"{whole}/" if whole else ""):
                if key == MARKER:
                    continue
                yield ObjectEntry(key[skip:], size)

    def folders(self, prefix: str = "") -> list[str]:
        """As `Store.folders`."""
        whole = (self._prefix + prefix).strip("/")
        with self._translating("list", prefix):
            try:
                folder = self._descend(_parts(whole) if whole else [])
            except (FileNotFoundError, NotADirectoryError):
                return []
            try:
                with os.scandir(folder) as scanned:
                    entries = list(scanned)
            finally:
                os.close(folder)
            for entry in entries:
                if entry.is_symlink():
                    _log.debug("%s/%s%s: a symbolic link; left out", self.location, prefix, entry.name)
            return sorted(
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and is_usable(entry.name)
            )

    def delete(self, key: str) -> None:
        """As `Store.delete`."""
        try:
            with self._translating("delete", key), self._folder_of(key) as (folder, name):
                os.unlink(name, dir_fd=folder)
        except NotFoundError:
            pass

    def remove_empty_folders(self, prefix: str) -> None:
        """Remove the empty folders below a prefix, and its own if it is empty then. Links are neither followed nor removed.

        Raises:
            StoreError: a folder cannot be read.
        """
        whole = (self._prefix + prefix).rstrip("/")
        with contextlib.suppress(NotFoundError), self._translating("delete", prefix):
            *parts, top = _parts(whole)
            outer = self._descend(parts)
            try:
                for _, names, _, folder in os.fwalk(top, topdown=False, dir_fd=outer):
                    for name in names:
                        with contextlib.suppress(OSError):
                            os.rmdir(name, dir_fd=folder)
                with contextlib.suppress(OSError):
                    os.rmdir(top, dir_fd=outer)
            finally:
                os.close(outer)

    @contextlib.contextmanager
    def _folder_of(self, key: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """The folder of an object, opened, and the object's name in it."""
        *parts, name = _parts(self._prefix + key)
        folder = self._descend(parts, create=create)
        try:
            yield folder, name
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _file(self, key: str) -> Iterator[tuple[int, int]]:
        """A regular file, opened, and its size."""
        with self._folder_of(key) as (folder, name):
            file = os.open(name, _FILE, dir_fd=folder)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
            yield file, status.st_size
        finally:
            os.close(file)

    def _descend(self, parts: Sequence[str], *, create: bool = False) -> int:
        identity = self._identity
        with opened_folder(self._folder) if identity is None else identity.opened() as folder:
            return descend(folder, parts, create=create, follow_links=False)

    @contextlib.contextmanager
    def _translating(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            named = self._description(key)
            if error.errno == errno.ELOOP:
                # As for a folder or a named pipe: what is written once and only read must not be waited for.
                kind = NotFoundError if verb == "read" else StoreError
                raise kind(
                    f"object {named}: a symbolic link, which is not followed", "put the object itself there"
                ) from error
            if verb == "write" and error.errno == errno.ENOTDIR:
                raise StoreError(
                    f"store {self.url}: cannot write {key!r} (a part of it is an object already, or a link)",
                    "choose another name, or remove that file",
                ) from error
            if error.errno in {errno.ENOENT, errno.ENOTDIR}:
                raise NotFoundError(
                    f"object {named}: not found",
                    "check the run's URL and the name; links in a store are not followed",
                ) from error
            if error.errno in {errno.EACCES, errno.EPERM}:
                raise StoreError(
                    f"store {self.url}: access denied, cannot {verb} {key!r}",
                    "check the folder's owner and mode",
                ) from error
            raise StoreError(
                f"store {self.url}: cannot {verb} {key!r} ({error.strerror})", "check the folder and its disk"
            ) from error


def _parts(key: str) -> list[str]:
    """Split a key.

    Raises:
        NotFoundError: it is not a valid key, so no object can have it.
    """
    parts = key.split("/")
    if any(part in {"", ".", ".."} or "\0" in part for part in parts):
        raise NotFoundError(f"object {key!r}: not a key", "use names between single slashes, and no '..'")
    return parts


def _walk(folder: int, prefix: str, deep: int = 0) -> Iterator[tuple[str, int]]:
    """Key and size of every regular file below an open folder, which is closed."""
    inner: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not is_usable(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    inner.append(entry.name)
                elif entry.is_file(follow_symlinks=False) and not _UNFINISHED.fullmatch(entry.name):
                    size = _size_of(entry)
                    if size >= 0:
                        yield prefix + entry.name, size
        for name in inner if deep < _DEEPEST else ():
            try:
                below = os.open(name, _FOLDER, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed or replaced with a link meanwhile
            yield from _walk(below, f"{prefix}{name}/", deep + 1)
    finally:
        os.close(folder)


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return -1
