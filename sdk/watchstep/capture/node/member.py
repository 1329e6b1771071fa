"""A rank as a member of its node: it finds a leader or becomes one, and writes for itself if neither works.

A follower hands over its blocks to the leader, and keeps them until they are on the store.
"""

from __future__ import annotations

import secrets
import threading
import time

from watchstep.capture.config import Bounds
from watchstep.capture.node import protocol
from watchstep.capture.node.leader import ApartError, Leader
from watchstep.capture.node.protocol import Connection, Handing, Meeting, Message, MessageQueue
from watchstep.capture.steps.record import BoundedQueue
from watchstep.capture.upload.outgoing import Doubt, settle
from watchstep.capture.upload.uploader import UploadContext, Uploader, put_end
from watchstep.errors import FormatError, StoreError
from watchstep.format import documents
from watchstep.format.control import ControlDocument
from watchstep.store.store import Store

_ALL = 1 << 62


class Follower:
    """One connection to one leader. Its owner locks.

    Attributes:
        welcomed: the leader has sent the writer's name.
        greeted: this rank has sent its token.
        requested_at: when the leader last requested blocks, by the monotonic clock.
        apart: why each rank must write for itself; empty unless the leader has sent it.
    """

    def __init__(self, line: Connection, context: UploadContext, handing: Handing, window: int) -> None:
        self.line = line
        self._context = context
        self._handing = handing
        self._window = window
        self.welcomed = False
        self.greeted = False
        self.requested_at = time.monotonic()
        self.apart = ""
        self._is_requested = False

    def greet(self) -> None:
        """Send this rank's token. Requires that none of its blocks is in doubt."""
        self.greeted = True
        self.line.send(protocol.Hello(self._handing.token))

    def receive(self, message: Message) -> bool:
        """Process a message. Returns whether the leader requests blocks."""
        handing, backlog = self._handing, self._context.backlog
        if isinstance(message, protocol.Welcome):
            self.welcomed = True
            handing.join(message.writer, message.seq, message.term, message.notice)
            handing.sent = backlog.oldest
            return not backlog.empty  # something urgent may have come before there was a leader
        if isinstance(message, protocol.ObjectStarted):
            handing.accept_notice(message.notice)
        elif isinstance(message, protocol.ObjectStored):
            backlog.acknowledge(handing.accept_stored(message.key, message.blocks))
        elif isinstance(message, protocol.Term):
            handing.accept_term(message.term)
        elif isinstance(message, protocol.Control):
            self._accept_control(message.document)
        elif isinstance(message, protocol.Apart):
            self.apart = message.reason
        elif isinstance(message, protocol.Give):
            self.requested_at = time.monotonic()
            self._is_requested = True
            return True
        return False

    def _accept_control(self, document: bytes) -> None:
        try:
            self._context.control.accept(ControlDocument.decode(document))
        except FormatError as error:
            self._context.health.fault("control document", error)

    def hand_over(self) -> None:
        """Send the blocks that fit into the window, then the end of the batch. Without a request, ask for an immediate write."""
        if not self.welcomed:
            return
        handing, backlog = self._handing, self._context.backlog
        with_leader = [item for item in backlog.after(0, _ALL) if item.place.seq < handing.sent]
        room = self._window - sum(len(item.data) for item in with_leader)
        for item in backlog.after(handing.sent, room) if room > 0 else []:
            self.line.send(protocol.Handed(item))
            handing.sent = item.place.seq + 1
        if self._is_requested or not backlog.empty:
            more = handing.sent < backlog.segments
            self.line.send(protocol.BatchEnd(urgent=not self._is_requested, more=more))
        self._is_requested = False


_WINDOWS = 8  # the window is a fraction of a follower's own bound, so that the leader's memory is bounded too
_SEEKING_SECONDS = 0.05
_FOLLOWING_SECONDS = 0.5
_QUIET_SECONDS = 35.0
"""Slightly more than the longest flush interval: a leader without requests for this time is stuck."""
_HURRY_SECONDS = 2.0
_APART_SECONDS = 60.0
"""How long a rank writes for itself before it looks for the others again."""


class Member:
    """Uploads for a rank of a node, with the same interface as `Uploader` for a lone process.

    It has one of four roles at a time: seeking (None), leading, following, or apart, when an `Uploader` writes. Blocks that are
    handed over stay in the backlog, in memory, until they are on the store; a rank that must write to disk goes apart
    first. The lock is never held during requests to the store.
    """

    def __init__(self, context: UploadContext, queue: BoundedQueue, bounds: Bounds) -> None:
        target = context.access.target
        identity = target.identity
        self._context = context
        self._queue = queue
        self._bounds = bounds
        self._meeting = Meeting(
            (target.store_url, identity.project, identity.run, identity.attempt, identity.node)
        )
        self._handing = Handing(secrets.token_hex(8))
        self._inbox = MessageQueue(queue.wake.set)
        self._lock = threading.RLock()
        self._role: Leader | Follower | Uploader | None = None
        self._alone = Uploader(context)
        self._rejoin_at = float("inf")
        self._moved_at = time.monotonic()
        self._oldest: int | None = None
        self._hurried = False
        self._released = False
        self._ended = False
        context.backlog.hand_over()
        context.control.attempt = identity.attempt

    @property
    def claimed(self) -> tuple[Store, str] | None:
        """The store and the attempt, once they are certain to exist."""
        role, store = self._role, self._context.access.store
        if isinstance(role, Uploader):
            return role.claimed
        sure = role is not None and (role.begun if isinstance(role, Leader) else role.welcomed)
        return (store, self._context.access.target.identity.attempt) if sure and store is not None else None

    @property
    def account(self) -> tuple[str, int]:
        """The writer's name, and its number of segments up to the last one with rows of this rank."""
        return self._alone.account if isinstance(self._role, Uploader) else self._handing.account

    @property
    def writers(self) -> int:
        """Number of concurrent writers of this attempt."""
        identity = self._context.access.target.identity
        return identity.world_size if isinstance(self._role, Uploader) else identity.nodes

    @property
    def wait_seconds(self) -> float:
        """How long the writer may wait without a message."""
        if self._role is None:
            return _SEEKING_SECONDS
        polls = isinstance(self._role, Follower) or self.failing_for is not None
        return _FOLLOWING_SECONDS if polls else float("inf")

    @property
    def is_on_request(self) -> bool:
        """Whether blocks are handed over on the leader's request, and not at an interval."""
        role = self._role
        return isinstance(role, Follower) and time.monotonic() < role.requested_at + _QUIET_SECONDS

    @property
    def failing_for(self) -> float | None:
        """Seconds since the store started to refuse; None if it does not."""
        return self._context.access.failing_for

    @property
    def end_written(self) -> bool:
        """Whether the end document is on the store."""
        return self._ended or self._alone.end_written

    def hurry(self) -> None:
        """Retry at once and often, because the process is about to end."""
        self._hurried = True
        self._moved_at = time.monotonic()
        self._context.access.hurry()

    def receive(self) -> bool:
        """Process messages of the other ranks, and look for them. Returns whether blocks are requested now."""
        with self._lock:
            is_requested = False
            try:
                while (received := self._inbox.take()) is not None:
                    is_requested |= self._receive_one(*received)
                if self._role is None and not self._released:
                    self._seek()
            except Exception as error:  # noqa: BLE001 - a rank can always write for itself
                self._go_apart(error, rejoin=False)
            return is_requested

    def _receive_one(self, origin: Connection, message: Message | None) -> bool:
        role = self._role
        if isinstance(role, Leader):
            if role.receive(origin, message):
                self._queue.urgent_at = time.monotonic()
                return True
        elif isinstance(role, Follower) and role.line is origin:
            if message is not None:
                return role.receive(message)
            origin.close()
            self._role = None
            if role.apart:
                raise ApartError(role.apart)
        return False

    def _seek(self) -> None:
        try:
            leadership = self._meeting.lead()
            if leadership is not None:
                self._report_folder()
                self._role = Leader(leadership, self._context, self._handing, self._inbox, self._lock)
                self._role.listen()
                return
            line = self._meeting.connect()
        except OSError as error:
            raise ApartError(f"no meeting folder: {error}") from error
        if line is not None:
            self._report_folder()
            window = self._bounds.backlog_bytes // _WINDOWS
            self._role = Follower(Connection(line, self._inbox), self._context, self._handing, window)

    def _report_folder(self) -> None:
        if self._meeting.refused:
            self._context.health.fault("private folder", PermissionError(self._meeting.refused))

    def turn(self, *, flush: bool = True) -> None:
        """Do the work of the current role, and leave the role if it fails.

        Args:
            flush: it is time to write the backlog.
        """
        role = self._role
        try:
            if isinstance(role, Leader):
                role.turn(self._settle, flush=flush)
            elif isinstance(role, Follower):
                self._follow(role, flush=flush)
            elif role is not None:
                role.turn()
            with self._lock:
                self._check_progress()
        except Exception as error:
            if isinstance(role, Uploader):
                raise
            with self._lock:
                self._go_apart(error, rejoin=False)

    def _follow(self, role: Follower, *, flush: bool) -> None:
        access = self._context.access
        try:
            if not role.greeted and access.ready:
                if self._handing.doubt is not None:
                    self._settle(access.open(), whole=False)
                role.greet()
            if role.welcomed and access.store is None and access.ready:
                access.open()  # for snapshots, and for the end document
        except StoreError as error:
            access.failed(error)
        if role.apart:
            raise ApartError(role.apart)
        with self._lock:
            if self._role is role and (flush or self._hurried):
                role.hand_over()

    def _settle(self, store: Store, whole: bool) -> None:
        """Determine the state of an object that a former leader had announced.

        Args:
            store: the run's store.
            whole: also if it has no blocks of this rank, because this rank is the new leader.
        """
        with self._lock:
            notice, doubt = self._handing.notice, self._handing.doubt
            if notice is None or (doubt is None and not whole):
                return
            doubt = doubt or Doubt(notice.key, self._handing.token, ())
            acknowledged = [
                item for item in self._context.backlog.after(0, _ALL) if item.place.seq in doubt.numbers
            ]
        contained = settle(store, doubt, acknowledged)
        with self._lock:
            if self._handing.notice is notice:
                self._context.backlog.acknowledge(self._handing.accept_stored(notice.key, contained))

    def _check_progress(self) -> None:
        backlog, now = self._context.backlog, time.monotonic()
        oldest = None if backlog.empty else backlog.oldest
        if oldest is None or oldest != self._oldest:
            self._moved_at, self._oldest = now, oldest
        if isinstance(self._role, Uploader):
            idle = backlog.empty and self.failing_for is None and not self._hurried
            if now >= self._rejoin_at and idle and not self._released and backlog.hand_over():
                self._role = None
            return
        bound = self._bounds.backlog_seconds
        if self._hurried and not isinstance(self._role, Leader):
            bound = min(bound, _HURRY_SECONDS)
        if backlog.full or now - self._moved_at >= bound:
            self._go_apart(None, rejoin=True)

    def _go_apart(self, error: Exception | None, *, rejoin: bool) -> None:
        """Write for this rank only from now on: blocks that are handed over and not on the store belong to this rank again."""
        role = self._role
        if isinstance(role, Uploader):
            return
        if error is not None:
            self._context.health.fault("node", error)
        self._disconnect(role)
        self._role = self._alone
        self._rejoin_at = time.monotonic() + _APART_SECONDS if rejoin else float("inf")
        self._context.backlog.take_back(self._handing.separate(), self._alone.written)
        self._context.health.count("apart")

    def _disconnect(self, role: Leader | Follower | None) -> None:
        if role is None:
            return
        if isinstance(role, Leader):
            role.close()
            return
        role.line.close()
        while (received := self._inbox.take()) is not None:  # messages sent before the connection closed
            if received[0] is role.line and received[1] is not None:
                role.receive(received[1])

    def release(self) -> None:
        """End uploads of this process: the remaining blocks are its own, and are written to disk."""
        with self._lock:
            self._released = True
            self._go_apart(None, rejoin=False)

    def leave(self) -> None:
        """Leave after everything is written: the other ranks continue without this one."""
        with self._lock:
            self._released = True
            role, self._role = self._role, None
            if not isinstance(role, Uploader):
                self._disconnect(role)

    def forget(self) -> None:
        """Reset in a forked child: open files belong to its parent. Takes no lock, because its owner may not exist in the child."""
        role = self._role
        if isinstance(role, Leader):
            role.forget()
        elif isinstance(role, Follower):
            role.line.forget()

    def write_end(self, end: documents.EndDocument) -> None:
        """Write the end document, after everything else."""
        access = self._context.access
        if isinstance(self._role, Uploader):
            self._alone.write_end(end)
        elif self._role is not None and self.claimed is not None and access.ready:
            try:
                put_end(access.open(), access.target.identity.attempt, end)
                self._ended = True
            except StoreError as error:
                access.failed(error)
