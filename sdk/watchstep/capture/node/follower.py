"""A rank that hands over to its node's leader, and keeps what it hands over until that lies on the store."""

from __future__ import annotations

import time

from watchstep.capture.node import messages
from watchstep.capture.node.connection import Connection
from watchstep.capture.node.handing import Handing
from watchstep.capture.node.messages import Message
from watchstep.capture.upload.uploader import UploadContext
from watchstep.errors import FormatError
from watchstep.format.control import ControlDocument

_ALL = 1 << 62


class Follower:
    """One connection to one leader. Its owner locks.

    Attributes:
        welcomed: the leader has said who writes.
        greeted: this rank has said who it is.
        asked_at: when the leader last asked for blocks, by the monotonic clock.
        apart: why each rank shall write for itself; empty where the leader has not said so.
    """

    def __init__(self, line: Connection, means: UploadContext, handing: Handing, window: int) -> None:
        self.line = line
        self._means = means
        self._handing = handing
        self._window = window
        self.welcomed = False
        self.greeted = False
        self.asked_at = time.monotonic()
        self.apart = ""
        self._asked = False

    def greet(self) -> None:
        """Say who this is; nothing of what it holds is in doubt."""
        self.greeted = True
        self.line.send(messages.Hello(self._handing.token))

    def hear(self, message: Message) -> bool:
        """Take in a message; whether the leader asks for blocks."""
        handing, backlog = self._handing, self._means.backlog
        if isinstance(message, messages.Welcome):
            self.welcomed = True
            handing.join(message.writer, message.seq, message.term, message.notice)
            handing.sent = backlog.oldest
            return not backlog.empty  # something urgent may have come before there was a leader
        if isinstance(message, messages.ObjectStarted):
            handing.hear_notice(message.notice)
        elif isinstance(message, messages.ObjectStored):
            backlog.acknowledge(handing.hear_stored(message.key, message.blocks))
        elif isinstance(message, messages.Term):
            handing.hear_term(message.term)
        elif isinstance(message, messages.Control):
            self._hear_control(message.document)
        elif isinstance(message, messages.Apart):
            self.apart = message.reason
        elif isinstance(message, messages.Give):
            self.asked_at = time.monotonic()
            self._asked = True
            return True
        return False

    def _hear_control(self, document: bytes) -> None:
        try:
            self._means.control.accept(ControlDocument.decode(document))
        except FormatError as error:
            self._means.health.fault("control document", error)

    def hand_over(self) -> None:
        """Send what the window has room for, and say that this was all; unasked, have it written at once."""
        if not self.welcomed:
            return
        handing, backlog = self._handing, self._means.backlog
        with_leader = [item for item in backlog.after(0, _ALL) if item.place.seq < handing.sent]
        room = self._window - sum(len(item.data) for item in with_leader)
        for item in backlog.after(handing.sent, room) if room > 0 else []:
            self.line.send(messages.Handed(item))
            handing.sent = item.place.seq + 1
        if self._asked or not backlog.empty:
            more = handing.sent < backlog.segments
            self.line.send(messages.BatchEnd(urgent=not self._asked, more=more))
        self._asked = False
