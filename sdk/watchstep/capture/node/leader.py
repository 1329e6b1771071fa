"""The leader of a node: the rank that writes for all ranks of its machine.

It gathers blocks, creates one object of them at a time, and announces the object to the other ranks before and after writing it.
`Leading` is its state, without input or output: waiting blocks, the object in flight, and the next number.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from watchstep.capture.node import protocol
from watchstep.capture.node.protocol import Connection, Handing, Leadership, Message, MessageQueue
from watchstep.capture.upload.access import claim_node, restore_documents
from watchstep.capture.upload.outgoing import Blocks, Notice, Outgoing, blocks_of, merge, rows_of
from watchstep.capture.upload.uploader import UploadContext
from watchstep.errors import FormatError, StoreError
from watchstep.format import segment
from watchstep.format.block import Block
from watchstep.format.control import ControlDocument
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.store.store import Store

_MAX_ROWS = 200_000  # of one object, unless a single block has more
_MAX_BYTES = 32 * 1024 * 1024

Items = dict[str, tuple[Outgoing, ...]]


@dataclass(frozen=True)
class Batch:
    """An object to create, and its blocks."""

    notice: Notice
    items: Items

    def under(self, term: str, gone: Collection[str] = ()) -> Batch:
        """Return the batch for a term, without the blocks of ranks that could not be notified.

        The object keeps its name, even if nothing is left in it: a rank that knows the name may create the object.
        """
        items = {token: blocks for token, blocks in self.items.items() if token not in gone}
        blocks = {token: self.notice.blocks[token] for token in items}
        return Batch(Notice(self.notice.key, blocks, term), items)


class Leading:
    """The leader's state. One object is created at a time; a number is reused only for the same name.

    Attributes:
        writer: the node's writer.
        seq: number of the next object.
        flight: the object in flight, which the store may have received.
    """

    def __init__(self, writer: WriterId, seq: int) -> None:
        self.writer = writer
        self.seq = seq
        self.flight: Batch | None = None
        self._waiting: dict[str, deque[Outgoing]] = {}
        self._next: dict[str, int] = {}
        self._gone: set[str] = set()  # ranks that own their blocks in flight again

    def join(self, token: str) -> None:
        """Add a rank that hands over from now on; its first block may have any number."""
        self._waiting[token] = deque()
        self._next.pop(token, None)

    def lose(self, token: str) -> None:
        """Remove a rank that has left or writes for itself: it owns its blocks again, except those in flight."""
        self._waiting.pop(token, None)
        if self.flight is not None:
            self._gone.add(token)

    def take(self, token: str, item: Outgoing) -> bool:
        """Add a block. Returns False if it is not expected."""
        number = item.place.seq
        if token not in self._waiting or number != self._next.get(token, number):
            return False
        self._waiting[token].append(item)
        self._next[token] = number + 1
        return True

    def propose(self) -> Batch | None:
        """Return the next object, which is not announced yet; None if nothing waits, or one is in flight."""
        if self.flight is not None:
            return None
        items: Items = {}
        rows = size = 0
        for token, waiting in self._waiting.items():
            chosen: list[Outgoing] = []
            for item in waiting:
                over = rows + item.place.rows > _MAX_ROWS or size + len(item.data) > _MAX_BYTES
                if over and (items or chosen):
                    break
                chosen.append(item)
                rows, size = rows + item.place.rows, size + len(item.data)
            if chosen:
                items[token] = tuple(chosen)
        if not items:
            return None
        places = [item.place for blocks in items.values() for item in blocks]
        key = SegmentKey(
            self.writer, self.seq, min(place.first for place in places), max(place.last for place in places)
        )
        blocks = {token: tuple(item.place.seq for item in blocks) for token, blocks in items.items()}
        return Batch(Notice(key, blocks, ""), items)

    def begin(self, batch: Batch) -> None:
        """Start an announced batch: no other object is created until the store has answered."""
        assert self.flight is None
        for token, items in batch.items.items():
            for _ in items:
                self._waiting[token].popleft()
        self.flight = batch

    def land(self, contained: Blocks) -> None:
        """Complete the object in flight, stored with these blocks. Other blocks of present ranks wait again."""
        assert self.flight is not None
        for token, items in self.flight.items.items():
            back = [item for item in items if item.place.seq not in contained.get(token, ())]
            if token in self._waiting and token not in self._gone:
                self._waiting[token].extendleft(reversed(back))
        self.seq = self.flight.notice.key.seq + 1
        self.flight = None
        self._gone.clear()


_GATHER_SECONDS = 1.0
_ALL = 1 << 62


class ApartError(Exception):
    """The ranks of this node cannot share one writer; each writes for itself."""


class Leader:
    """Leads while it holds the lock file. Its owner locks, but not during requests to the store.

    Attributes:
        begun: the store has been reached, and the writer has a name.
    """

    def __init__(
        self,
        leadership: Leadership,
        context: UploadContext,
        handing: Handing,
        inbox: MessageQueue,
        lock: threading.RLock,
    ) -> None:
        self._leadership = leadership
        self._context = context
        self._handing = handing
        self._inbox = inbox
        self._lock = lock
        self._leading: Leading | None = None
        self._lines: dict[Connection, str] = {}  # with the token, empty before it is known
        self._welcomed: set[Connection] = set()
        self._requested: set[Connection] = set()
        self._rows: dict[tuple[str, int], Block] = {}
        self._data = b""
        self._more = False
        self._closed = False

    @property
    def begun(self) -> bool:
        """Whether the store has been reached, and the writer has a name."""
        return self._leading is not None

    def listen(self) -> None:
        """Accept connections.

        Raises:
            OSError: the socket cannot be created.
        """

        def arrived(line: socket.socket) -> None:
            connection = Connection(line, self._inbox)
            self._lines.setdefault(connection, "")
            if self._closed:
                connection.shut()

        self._leadership.listen(arrived)
        self._context.control.relay = self._relay

    def receive(self, origin: Connection, message: Message | None) -> bool:
        """Process a message. Returns whether it is urgent."""
        if message is None:
            self._lose(origin)
        elif isinstance(message, protocol.Hello):
            self._lines[origin] = message.token
            if message.version != protocol.VERSION:
                origin.send(protocol.Apart("ranks of one node have different versions of watchstep"))
            elif self._leading is not None:
                self._welcome(origin)
        elif self._leading is not None and origin in self._welcomed:
            if isinstance(message, protocol.Handed):
                self._leading.take(self._lines[origin], message.item)
            elif isinstance(message, protocol.BatchEnd):
                self._more |= message.more
                if not message.urgent:
                    self._requested.discard(origin)
                return message.urgent
        return False

    def turn(self, settle: Callable[[Store, bool], None], *, flush: bool) -> None:
        """Start, continue the object in flight, and write the ranks' blocks if it is time.

        Args:
            settle: determines the state of an object that this rank knows of.
            flush: whether it is time.

        Raises:
            ApartError: the ranks of this node cannot share one writer.
        """
        access = self._context.access
        if not access.ready:
            return
        try:
            store = access.open()
            if self._leading is None:
                self._begin(store, settle)
                self._context.control.verify(store)
            if self._flight is not None:
                self._make(store)
            self._more = flush
            while self._more and not self._closed:
                self._more = False
                self._gather()
                wrote = False
                while self._prepare():
                    self._make(store)
                    wrote = True
                self._more &= wrote
            access.done()
        except StoreError as error:
            access.failed(error)
        if access.store is not None:
            self._context.control.refresh(access.store)

    def close(self) -> None:
        """Stop leading: the others elect a new leader."""
        self._closed = True
        self._context.control.relay = None
        lines = list(self._lines)
        for line in lines:
            line.shut()
        for line in lines:
            line.close()
        self._leadership.release(alone=not lines)

    def forget(self) -> None:
        """Reset in a forked child."""
        for line in list(self._lines):
            line.forget()
        self._leadership.forget()

    @property
    def _flight(self) -> Batch | None:
        return self._leading.flight if self._leading is not None else None

    def _begin(self, store: Store, settle: Callable[[Store, bool], None]) -> None:
        handing, target = self._handing, self._context.access.target
        inherits = handing.may_inherit(self._leadership.last_term)
        settle(store, inherits)
        if inherits and handing.writer is not None:
            writer, seq = handing.writer, handing.seq
        else:
            self._context.access.warn_of_reuse(store)
            drawn, seq = claim_node(store, target.run, target.attempt, target.identity), 0
            if drawn is None:
                raise ApartError(f"store {target.store_url} lets an object be created twice")
            writer = drawn
        with self._lock:
            if self._closed:
                return
            handing.join(writer, seq, self._new_term(), None)
            handing.sent = self._context.backlog.oldest
            self._leading = Leading(writer, seq)
            self._leading.join(handing.token)
            for line, token in list(self._lines.items()):
                if token:
                    self._welcome(line)

    def _new_term(self) -> str:
        try:
            return self._leadership.begin_term()
        except OSError as error:
            raise ApartError(f"the lock file cannot be written ({error})") from error

    def _welcome(self, line: Connection) -> None:
        assert self._leading is not None
        token = self._lines[line]
        for other in [
            connection
            for connection in self._welcomed
            if connection is not line and self._lines[connection] == token
        ]:
            self._lose(other)
        flight = self._flight
        notice = flight.notice if flight is not None else None
        self._leading.join(token)
        self._welcomed.add(line)
        line.send(protocol.Welcome(self._leading.writer, self._leading.seq, self._leadership.term, notice))
        line.send(protocol.Control(self._context.control.document.encode()))

    def _lose(self, line: Connection) -> None:
        token = self._lines.pop(line, "")
        self._requested.discard(line)
        line.close()
        if line in self._welcomed and self._leading is not None:
            self._welcomed.discard(line)
            self._leading.lose(token)
            term = self._new_term()
            self._handing.accept_term(term)
            self._send_all(protocol.Term(term))

    def _send_all(self, message: Message) -> list[Connection]:
        """Send a message to all ranks. Returns those that could not be reached."""
        return [line for line in list(self._welcomed) if not line.send(message)]

    def _relay(self, document: ControlDocument) -> None:
        with self._lock:
            self._send_all(protocol.Control(document.encode()))

    def _gather(self) -> None:
        """Request blocks from all ranks, and wait for them briefly."""
        with self._lock:
            if self._leading is None:
                return
            for item in self._context.backlog.after(self._handing.sent, _ALL):
                self._leading.take(self._handing.token, item)
                self._handing.sent = item.place.seq + 1
            self._requested = set(self._welcomed)
            self._send_all(protocol.Give())
        until = time.monotonic() + _GATHER_SECONDS
        while self._requested and not self._closed and (remaining := until - time.monotonic()) > 0:
            received = self._inbox.take(remaining)
            if received is not None:
                with self._lock:
                    self.receive(*received)

    def _prepare(self) -> bool:
        """Announce the next object to every rank. Returns False if nothing waits."""
        with self._lock:
            while self._leading is not None and not self._closed:
                batch = self._leading.propose()
                if batch is None:
                    return False
                if not self._decode(batch):
                    continue
                batch = self._announced(batch)
                self._data, self._rows = merge(batch.items, self._rows), {}
                self._leading.begin(batch)
                self._handing.accept_notice(batch.notice)
                return True
        return False

    def _announced(self, batch: Batch) -> Batch:
        """Announce an object to all ranks. Returns it without the ranks that could not be reached."""
        batch = batch.under(self._new_term())
        while unreachable := self._send_all(protocol.ObjectStarted(batch.notice)):
            gone = {self._lines[line] for line in unreachable}
            for line in unreachable:
                self._lose(line)
            batch = batch.under(self._new_term(), gone)
        return batch

    def _decode(self, batch: Batch) -> bool:
        """Decode the blocks. Returns False if one is invalid; its rank then writes for itself."""
        for token, items in batch.items.items():
            for item in items:
                if not self._decode_one(token, item):
                    return False
        return True

    def _decode_one(self, token: str, item: Outgoing) -> bool:
        name = (token, item.place.seq)
        try:
            if name not in self._rows:
                self._rows[name] = rows_of(token, item)
        except FormatError as error:
            self._context.health.fault("node", error)
            if token == self._handing.token:
                raise ApartError(error.what) from error
            for line in [connection for connection in self._welcomed if self._lines[connection] == token]:
                line.send(protocol.Apart(error.what))
                self._lose(line)
            return False
        return True

    def _make(self, store: Store) -> None:
        """Create the object in flight, and announce the result.

        Raises:
            StoreError: the store refuses; the same bytes are tried again under the same name.
        """
        flight = self._flight
        assert flight is not None
        key, data = flight.notice.key, self._data
        target = self._context.access.target
        restore_documents(store, target.run, target.attempt, key.writer.attempt, self._context.health)
        blocks = flight.notice.blocks if store.create(key.path, data) else self._existing(store, flight)
        self._context.access.advanced()
        with self._lock:
            if self._closed or self._leading is None:
                return
            self._leading.land(blocks)
            self._context.backlog.acknowledge(self._handing.accept_stored(key, blocks))
            self._send_all(protocol.ObjectStored(key, blocks))
        self._context.health.count("objects")
        self._context.health.count("bytes", len(data))
        self._context.access.announce(key)

    def _existing(self, store: Store, flight: Batch) -> Blocks:
        """Return the blocks of an object that already exists: the same one, if an answer was lost, or one of a rank that has left."""
        path = flight.notice.key.path
        existing = store.get(path, limit=segment.MAX_BYTES)
        if existing == self._data:
            return flight.notice.blocks
        try:
            return blocks_of(existing, path)
        except FormatError:
            return {}
