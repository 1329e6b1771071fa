"""What a rank knows that hands over: which blocks it sent, the last notice, and whether it may succeed. No input or output."""

from __future__ import annotations

from watchstep.capture.upload.outgoing import Blocks, Doubt, Notice
from watchstep.format.layout import SegmentKey, WriterId


class Handing:
    """A rank's own account of its blocks, across leaders; a leader keeps one for its own blocks too.

    Attributes:
        token: names this process among those of its node.
        sent: the number of the next block to send; blocks below it that are not acknowledged are with the leader.
        notice: the object that was announced last, while nobody has said that it is there.
        writer: the node's writer; None before a leader has named it.
        seq: its next number, as far as known here.
        account: the writer's name, and how many of its segments it takes until all that it holds of this rank are read.
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
        """A leader has said who writes, and which object it is just making.

        What was in doubt before has been settled, or was not of this rank.
        """
        self.writer, self.seq, self._term, self.notice = writer, seq, term, notice
        if self.account[0] != writer.writer:
            self.account = (writer.writer, 0)

    def hear_notice(self, notice: Notice) -> None:
        """An object is about to be made; a notice replaces one whose object was never begun."""
        self.notice, self._term = notice, notice.term

    def hear_term(self, term: str) -> None:
        """A rank has left."""
        self._term = term

    def hear_stored(self, key: SegmentKey, blocks: Blocks) -> tuple[int, ...]:
        """An object is there; returns which of this rank's blocks are in it."""
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
        """Own blocks of which nobody knows whether they are on the store, for their leader is gone."""
        numbers = self.notice.blocks.get(self.token, ()) if self.notice is not None else ()
        return Doubt(self.notice.key, self.token, tuple(numbers)) if self.notice and numbers else None

    def may_inherit(self, term: str) -> bool:
        """Whether this rank may go on with the writer's sequence.

        A leader draws a new term when it begins, whenever a rank leaves it, and with each object that it announces; it
        writes it to the lock file first, and then tells the ranks. So whoever finds the term that it was told last was
        there until the last leader was gone, and has heard of every object that anybody has heard of.

        Args:
            term: what the lock file holds.
        """
        return self.writer is not None and bool(term) and term == self._term

    def part(self) -> Doubt | None:
        """This rank writes for itself from now on; returns what is in doubt."""
        doubt = self.doubt
        self.notice, self.writer, self._term = None, None, ""
        return doubt
