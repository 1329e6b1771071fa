"""The protocol between the ranks of a node: messages, connections, the meeting folder, and the state of a rank that hands over.

A message consists of the header's length, the payload's length, a JSON header and a payload. Ranks meet in a folder within the user's private one::

    <private folder>/<hash>/lock      locked by the leader; contains the term
                            socket    the leader listens on it

All files, and the socket (through /proc/self/fd), are opened relative to checked directories (`watchstep.platform.folders`).
`Handing` does no input or output.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from watchstep.capture.upload.outgoing import Blocks, Doubt, Notice, Outgoing, SegmentPlace
from watchstep.errors import FormatError
from watchstep.format import segment
from watchstep.format.layout import SegmentKey, WriterId, check_name
from watchstep.platform.folders import PrivateFolder

VERSION = 1
_LENGTHS = struct.Struct("!II")
_MAX_HEADER = 4 * 1024 * 1024


@dataclass(frozen=True)
class Hello:
    """First message of a rank on a connection: it starts to hand over."""

    token: str
    version: int = VERSION


@dataclass(frozen=True)
class Welcome:
    """The leader is ready: the node's writer, its next number, the term, and the object in flight."""

    writer: WriterId
    seq: int
    term: str
    notice: Notice | None


@dataclass(frozen=True)
class Give:
    """The leader is about to write: send blocks, then `BatchEnd`."""


@dataclass(frozen=True)
class BatchEnd:
    """End of a batch; ``urgent`` requests an immediate write, ``more`` another request."""

    urgent: bool = False
    more: bool = False


@dataclass(frozen=True)
class Handed:
    """A block."""

    item: Outgoing


@dataclass(frozen=True)
class ObjectStarted:
    """An object is about to be created."""

    notice: Notice


@dataclass(frozen=True)
class ObjectStored:
    """An object is on the store with these blocks."""

    key: SegmentKey
    blocks: Blocks


@dataclass(frozen=True)
class Term:
    """A rank has left, and a new term has begun."""

    term: str


@dataclass(frozen=True)
class Control:
    """The run's control document."""

    document: bytes


@dataclass(frozen=True)
class Apart:
    """Each rank must write for itself from now on."""

    reason: str


Message = Hello | Welcome | Give | BatchEnd | Handed | ObjectStarted | ObjectStored | Term | Control | Apart


def encode(message: Message) -> bytes:
    """Encode a message."""
    payload = b""
    if isinstance(message, Handed):
        fields: Any = message.item.place.name
        payload = message.item.data
    elif isinstance(message, Control):
        fields, payload = None, message.document
    elif isinstance(message, Welcome):
        notice = _notice_as_data(message.notice) if message.notice else None
        fields = [_writer_as_data(message.writer), message.seq, message.term, notice]
    elif isinstance(message, ObjectStarted):
        fields = _notice_as_data(message.notice)
    elif isinstance(message, ObjectStored):
        fields = [message.key.path, message.blocks]
    else:
        fields = vars(message)
    header = json.dumps([type(message).__name__, fields]).encode()
    return b"".join((_LENGTHS.pack(len(header), len(payload)), header, payload))


def read(receive: Callable[[int], bytes]) -> Message:
    """Read the next message.

    Args:
        receive: returns exactly this number of bytes, or raises.

    Raises:
        FormatError: the message is invalid, or exceeds the limits.
    """
    header, payload = _LENGTHS.unpack(receive(_LENGTHS.size))
    if header > _MAX_HEADER or payload > segment.MAX_BYTES:
        raise FormatError(f"a message of {header} and {payload} bytes exceeds the limit", _HINT)
    return _decode(receive(header), receive(payload))


_HINT = "use one version of watchstep for all ranks of a node"


def _decode(header: bytes, payload: bytes) -> Message:
    try:
        kind, fields = json.loads(header)
        return _KINDS[kind](fields, payload)
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"message {header[:80]!r} is invalid ({error})", _HINT) from error


def _handed(fields: Any, payload: bytes) -> Handed:
    place = SegmentPlace.parse(fields)
    if place is None or place.first > place.last:
        raise ValueError("the block's place is invalid")
    return Handed(Outgoing(place, payload))


def _welcome(fields: Any, _: bytes) -> Welcome:
    writer, seq, term, notice = fields
    return Welcome(_writer(writer), _whole(seq), str(term), _notice(notice) if notice else None)


def _writer(fields: Any) -> WriterId:
    attempt, node, writer = fields
    return WriterId(check_name("attempt", attempt), check_name("node", node), check_name("writer", writer))


def _notice(fields: Any) -> Notice:
    path, blocks, term = fields
    return Notice(SegmentKey.parse(path), _blocks(blocks), str(term))


def _blocks(fields: Any) -> Blocks:
    return {str(token): tuple(_whole(number) for number in numbers) for token, numbers in fields.items()}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number from 0")
    return value


def _writer_as_data(writer: WriterId) -> list[str]:
    return [writer.attempt, writer.node, writer.writer]


def _notice_as_data(notice: Notice) -> list[Any]:
    return [notice.key.path, notice.blocks, notice.term]


_KINDS: dict[str, Callable[[Any, bytes], Message]] = {
    "Hello": lambda fields, _: Hello(str(fields["token"]), _whole(fields["version"])),
    "Welcome": _welcome,
    "Give": lambda *_: Give(),
    "BatchEnd": lambda fields, _: BatchEnd(bool(fields["urgent"]), bool(fields["more"])),
    "Handed": _handed,
    "ObjectStarted": lambda fields, _: ObjectStarted(_notice(fields)),
    "ObjectStored": lambda fields, _: ObjectStored(SegmentKey.parse(fields[0]), _blocks(fields[1])),
    "Term": lambda fields, _: Term(str(fields["term"])),
    "Control": lambda _, payload: Control(payload),
    "Apart": lambda fields, _: Apart(str(fields["reason"])[:500]),
}


_SEND_SECONDS = 2
_DRAIN_SECONDS = 1.0


class MessageQueue:
    """Received messages of all connections, in order; None marks the end of a connection."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._queue: queue.SimpleQueue[tuple[Connection, Message | None]] = queue.SimpleQueue()

    def put(self, origin: Connection, message: Message | None) -> None:
        """Add a message."""
        self._queue.put((origin, message))
        self._wake()

    def take(self, seconds: float = 0.0) -> tuple[Connection, Message | None] | None:
        """Return the oldest message; None if there is none within ``seconds``."""
        try:
            return self._queue.get(timeout=seconds) if seconds > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None


class Connection:
    """A socket with a reading thread, so that neither side ever waits for the other to read."""

    def __init__(self, line: socket.socket, inbox: MessageQueue) -> None:
        self._line = line
        self._inbox = inbox
        self._usable = True
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._thread = threading.Thread(target=self._read, name="watchstep-node", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Send a message. Returns False if the other side is gone, or does not read; the connection is then unusable."""
        if self._usable:
            try:
                self._line.sendall(encode(message))
            except OSError:
                self.shut()
        return self._usable

    def close(self) -> None:
        """Stop sending on both sides. Messages received earlier are in the inbox, followed by the end.

        From here on, the other side's attempts to send fail, which notifies it before it does anything of consequence.
        """
        self.shut()
        self._thread.join(_DRAIN_SECONDS)
        if not self._thread.is_alive():
            self._line.close()

    def forget(self) -> None:
        """Reset in a forked child: the socket belongs to its parent."""
        self._line.close()

    def shut(self) -> None:
        """Like `close`, without waiting for received messages."""
        self._usable = False
        with contextlib.suppress(OSError):  # closed by the other side
            self._line.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(self, read(self._receive))
        except (EOFError, OSError, FormatError):
            self.shut()
        finally:
            self._inbox.put(self, None)

    def _receive(self, size: int) -> bytes:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            got = self._line.recv_into(view)
            if got == 0:
                raise EOFError
            view = view[got:]
        return bytes(buffer)


class Handing:
    """A rank's account of its own blocks, across leaders. A leader keeps one for its own blocks as well.

    Attributes:
        token: identifies this process among those of its node.
        sent: number of the next block to send; unacknowledged blocks below it are with the leader.
        notice: the last announced object, while its result is unknown.
        writer: the node's writer; None before a leader has named it.
        seq: the writer's next number, as far as known.
        account: the writer's name, and its number of segments up to the last one with blocks of this rank.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.sent = 0
        self.notice: Notice | None = None
        self.writer: WriterId | None = None
        self.seq = 0
        self.account = ("", 0)
        self._term = ""

    def join(self, writer: WriterId, seq: int, term: str, notice: Notice | None) -> None:
        """Follow a leader: set the writer and the object in flight.

        Earlier doubt has been settled, or did not concern this rank.
        """
        self.writer, self.seq, self._term, self.notice = writer, seq, term, notice
        if self.account[0] != writer.writer:
            self.account = (writer.writer, 0)

    def accept_notice(self, notice: Notice) -> None:
        """Accept an announcement; it replaces one whose object was never started."""
        self.notice, self._term = notice, notice.term

    def accept_term(self, term: str) -> None:
        """Accept a new term, because a rank has left."""
        self._term = term

    def accept_stored(self, key: SegmentKey, blocks: Blocks) -> tuple[int, ...]:
        """Accept that an object is stored. Returns this rank's blocks in it."""
        numbers = tuple(blocks.get(self.token, ()))
        if numbers:
            self.account = (key.writer.writer, key.seq + 1)
        if self.notice is not None and self.notice.key == key:
            self.notice = None
        if self.writer == key.writer:
            self.seq = max(self.seq, key.seq + 1)
        return numbers

    @property
    def doubt(self) -> Doubt | None:
        """Own blocks with unknown state, because their leader is gone."""
        numbers = self.notice.blocks.get(self.token, ()) if self.notice is not None else ()
        return Doubt(self.notice.key, self.token, tuple(numbers)) if self.notice and numbers else None

    def may_inherit(self, term: str) -> bool:
        """Whether this rank may continue the writer's sequence.

        A leader creates a new term when it starts, whenever a rank leaves, and with each announced object. It
        writes the term to the lock file first, and then sends it to the ranks. A rank whose last term is in the lock file was therefore
        present until the last leader was gone, and knows every announced object.

        Args:
            term: content of the lock file.
        """
        return self.writer is not None and bool(term) and term == self._term

    def separate(self) -> Doubt | None:
        """Let this rank write for itself from now on. Returns its blocks in doubt."""
        doubt = self.doubt
        self.notice, self.writer, self._term = None, None, ""
        return doubt


_LOCK = "lock"
_SOCKET = "socket"
_TERM_BYTES = 8
_PEER = struct.Struct("3i")  # process, user, group


class Meeting:
    """A meeting folder, determined by the ranks' common words."""

    def __init__(self, words: Sequence[str]) -> None:
        """Define the folder without creating it.

        Args:
            words: what the meeting ranks have in common: the store, project, run, attempt, node.
        """
        self._name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
        self.refused = ""
        """Why preferred folders were not used, the last time; empty if the first one was."""

    def lead(self) -> Leadership | None:
        """Become the leader; None if there is one.

        Raises:
            OSError: no private folder can be created.
        """
        folder = self._open()
        is_locked = False
        try:
            lock = folder.open_file(_LOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = os.fstat(lock).st_ino == folder.inode(_LOCK)
            except (BlockingIOError, FileNotFoundError):
                pass
            finally:
                if not is_locked:
                    os.close(lock)
        except FileNotFoundError:
            pass  # the last leader is removing the folder
        finally:
            if not is_locked:
                folder.close()
        return Leadership(folder, self._name, lock) if is_locked else None

    def connect(self) -> socket.socket | None:
        """Connect to the leader; None if nobody listens."""
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
    """A held lock and a listening socket, until `release`."""

    def __init__(self, folder: PrivateFolder, name: str, lock: int) -> None:
        self._folder = folder
        self._name = name
        self._lock = lock
        self._listener: socket.socket | None = None
        self.last_term = os.pread(lock, 64, 0).decode("ascii", "replace")
        """The last leader's term in the lock file; empty if there is none."""
        self.term = ""

    def begin_term(self) -> str:
        """Create a new unique term and write it to the lock file.

        Raises:
            OSError: it cannot be written.
        """
        term = secrets.token_hex(_TERM_BYTES)
        os.pwrite(self._lock, term.encode(), 0)
        self.term = term
        return term

    def listen(self, welcome: Callable[[socket.socket], None]) -> None:
        """Accept connections of this user's processes from now on, on a separate thread.

        Raises:
            OSError: the socket cannot be created.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._folder.remove_file(_SOCKET)  # left over by a killed leader
            listener.bind(_address(self._folder))
            listener.listen(256)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        threading.Thread(target=_accept, args=(listener, welcome), name="watchstep-node", daemon=True).start()

    def release(self, *, alone: bool) -> None:
        """Let others lead; without others, remove the files of the meeting."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # closed by the accepting thread
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
        """Reset in a forked child: open files belong to its parent."""
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
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except OSError:
        return False
    return int(_PEER.unpack(credentials)[1]) == os.geteuid()


def _address(folder: PrivateFolder) -> str:
    """Return the socket's address: short regardless of the folder's path, and in exactly the folder that was checked."""
    return f"/proc/self/fd/{folder.descriptor}/{_SOCKET}"
