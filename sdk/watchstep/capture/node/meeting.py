"""Where the ranks of a node meet: a folder of the user's own in the temporary one, with a lock and a socket in it.

::

    <temporary>/watchstep-<user id>/<hash>/lock      held by the leader; holds the term
                                           socket    where it listens
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_LOCK = "lock"
_SOCKET = "socket"
_LONGEST_ADDRESS = 100  # bytes; the system takes 107
_TERM_BYTES = 8
_PEER = struct.Struct("3i")  # process, user, group


class Meeting:
    """A meeting place; the same for all that are told the same words."""

    def __init__(self, words: Sequence[str]) -> None:
        """Nothing is made yet.

        Args:
            words: what the ranks have in common that meet: the store, project, run, attempt, node.
        """
        name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
        self.folder = Path(tempfile.gettempdir()) / f"watchstep-{os.getuid()}" / name

    def lead(self) -> Leadership | None:
        """Become the leader; None where another is.

        Raises:
            OSError: the folder cannot be made, or is not this user's alone.
        """
        for folder in (self.folder.parent, self.folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            held = folder.lstat()
            if not stat.S_ISDIR(held.st_mode) or held.st_uid != os.getuid() or held.st_mode & 0o077:
                raise PermissionError(f"{folder} is not this user's alone")
        path = self.folder / _LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            return None  # the last leader is just removing the folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return Leadership(self.folder, lock)
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
        return None

    def connect(self) -> socket.socket | None:
        """A line to the leader; None where nobody listens."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self.folder) as address:
                line.settimeout(1.0)
                line.connect(address)
            if _is_mine(line):
                return line
        except OSError:
            pass
        line.close()
        return None


class Leadership:
    """The lock is held, and a socket listened on, until `leave`."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock
        self._listener: socket.socket | None = None
        self.last_term = os.pread(lock, 64, 0).decode("ascii", "replace")
        """What the last leader left in the lock file; empty where there was none."""
        self.term = ""

    def begin_term(self) -> str:
        """Draw a new term and write it down; no term comes twice.

        Raises:
            OSError: it cannot be written.
        """
        term = secrets.token_hex(_TERM_BYTES)
        os.pwrite(self._lock, term.encode(), 0)
        self.term = term
        return term

    def listen(self, welcome: Callable[[socket.socket], None]) -> None:
        """Take connections of this user's processes from now on, on a thread of its own.

        Raises:
            OSError: there can be no socket.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            (self._folder / _SOCKET).unlink(missing_ok=True)  # of a leader that was killed
            with _address(self._folder) as address:
                listener.bind(address)
            listener.listen(256)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        threading.Thread(target=_accept, args=(listener, welcome), name="watchstep-node", daemon=True).start()

    def leave(self, *, alone: bool) -> None:
        """Let others lead; where there are none, what was made here is removed."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # the thread that accepts closes it
        with contextlib.suppress(OSError):
            (self._folder / _SOCKET).unlink(missing_ok=True)
            if alone:
                (self._folder / _LOCK).unlink(missing_ok=True)
                self._folder.rmdir()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def forget(self) -> None:
        """This is a forked child: what it holds open is its parent's."""
        if self._listener is not None:
            self._listener.close()
        if self._lock >= 0:
            os.close(self._lock)


def _accept(listener: socket.socket, welcome: Callable[[socket.socket], None]) -> None:
    with listener:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            if _is_mine(line):
                welcome(line)
            else:
                line.close()


def _is_mine(line: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    try:
        held = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return False
    return int(_PEER.unpack(held)[1]) == os.getuid()


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """The socket's address; where it is too long, a short one that leads to it."""
    address = str(folder / _SOCKET)
    if len(os.fsencode(address)) <= _LONGEST_ADDRESS:
        yield address
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{_SOCKET}"
    finally:
        os.close(handle)
