"""Which store a local folder is: a folder that vanished, or another one in its place, must not be taken for it.

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
from collections.abc import Iterator, Mapping
from pathlib import Path

from watchstep.errors import ConfigError, MissingStoreError
from watchstep.store.local import create_file, opened_folder, put_file

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
            known, self._folder = self.is_known, folder
            if not known:
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
        held = os.stat(name, dir_fd=folder)
        stamp = (held.st_dev, held.st_ino, held.st_mtime_ns)
        if stamp == self._seen:
            return
        found = _read(path)
        if found != self.id:
            raise MissingStoreError(
                f"store {path}: another store lies there ({found or 'unmarked'}, and not {self.id})", _MEND
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
            found = _ID.match(file.read(64))
    except FileNotFoundError:
        return ""
    except OSError as error:
        if error.errno in {errno.ENXIO, errno.EISDIR}:
            raise _no_marker(folder) from error
        raise
    return found[0].decode() if found else ""


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
