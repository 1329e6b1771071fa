"""Where the ranks of a node meet: a folder in the user's private one, with a lock and a socket in it.

::

    <private folder>/<hash>/lock      held by the leader; holds the term
                            socket    where it listens

All files are opened relative to checked directories (`watchstep.platform.folders`), also the socket: by way of /proc/self/fd.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from watchstep.platform.folders import PrivateFolder

_LOCK = "lock"
_SOCKET = "socket"
_TERM_BYTES = 8
_PEER = struct.Struct("3i")  # process, user, group


class Meeting:
    """A meeting place; the same for all that are told the same words."""

    def __init__(self, words: Sequence[str]) -> None:
        """Nothing is made yet.

        Args:
            words: what the ranks have in common that meet: the store, project, run, attempt, node.
        """
        self._name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
        self.refused = ""
        """Why places that come first were not used, the last time; empty where the first was."""

    def lead(self) -> Leadership | None:
        """Become the leader; None where another is.

        Raises:
            OSError: no folder can be made that is this user's alone.
        """
        folder = self._open()
        taken = False
        try:
            lock = folder.open_file(_LOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = os.fstat(lock).st_ino == folder.inode(_LOCK)
            except (BlockingIOError, FileNotFoundError):
                pass
            finally:
                if not taken:
                    os.close(lock)
        except FileNotFoundError:
            pass  # the last leader is just removing the folder
        finally:
            if not taken:
                folder.close()
        return Leadership(folder, self._name, lock) if taken else None

    def connect(self) -> socket.socket | None:
        """A line to the leader; None where nobody listens."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.closing(self._open()) as folder:
                line.settimeout(1.0)
                line.connect(_address(folder))
            if _is_mine(line):
                return line
        except OSError:
            pass
        line.close()
        return None

    def _open(self) -> PrivateFolder:
        with contextlib.closing(PrivateFolder.open()) as private:
            self.refused = private.refused
            return private.child(self._name)


class Leadership:
    """The lock is held, and a socket listened on, until `leave`."""

    def __init__(self, folder: PrivateFolder, name: str, lock: int) -> None:
        self._folder = folder
        self._name = name
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
            self._folder.remove_file(_SOCKET)  # of a leader that was killed
            listener.bind(_address(self._folder))
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
            self._folder.remove_file(_SOCKET)
            if alone:
                self._folder.remove_file(_LOCK)
                os.rmdir(f"../{self._name}", dir_fd=self._folder.descriptor)
        self._folder.close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def forget(self) -> None:
        """This is a forked child: what it holds open is its parent's."""
        if self._listener is not None:
            self._listener.close()
        self._folder.close()
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
    return int(_PEER.unpack(held)[1]) == os.geteuid()


def _address(folder: PrivateFolder) -> str:
    """The socket's address: short however long the folder's path is, and in the very folder that was checked."""
    return f"/proc/self/fd/{folder.descriptor}/{_SOCKET}"
