"""Detect segments that crash the process that reads them, and stop reading them.

A reader that is killed (out of memory, a crash of native code) leaves only its lease. The claim counts such leases in the
statement that it executes anyway, so ordinary evaluations have no extra cost:

    ordinary ── `CAREFUL` unfinished claims in a row ──▶ careful ── the same segment at `CONDEMNED` ──▶ marked as corrupt
        ▲                                                   │
        └───────────── nothing more waits ◀── a commit ─────┘

A careful evaluation reads one new segment, and writes the segment's path to the run before it reads it. A segment that crashed its
reader twice in a row is not read again: a new one is marked as corrupt, and an earlier one that provides context counts as lost.
Careful evaluations of one process run one at a time, so that none is blamed for another one's crash.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import bindparam

from watchstep.errors import FormatError
from watchstep.format.layout import SegmentKey
from watchstep_services.db.engine import Database
from watchstep_services.db.lease import RUN_LEASE
from watchstep_services.runs.claim import Claim, FencedError

CAREFUL = 3
"""Unfinished claims in a row after which segments are read one at a time."""
CONDEMNED = CAREFUL + 2
"""Unfinished claims in a row after which the segment that the last two of them were reading is bad."""

_turn = threading.Lock()


class ReadingGuard:
    """Checks a segment before it is read. It has no cost unless earlier claims of the run ended with their process.

    Args:
        database: the database.
        claim: the evaluation's claim.
    """

    def __init__(self, database: Database, claim: Claim) -> None:
        self._database, self._claim = database, claim
        self._noted = ""

    @property
    def is_careful(self) -> bool:
        """Whether only one new segment is read."""
        return self._claim.unfinished >= CAREFUL

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the part of an evaluation that reads and evaluates segments.

        Raises:
            FencedError: another worker has taken the run.
        """
        if not self.is_careful:
            yield
            return
        with _turn:
            yield
            self._note("", self._claim.unfinished)

    def check(self, key: SegmentKey) -> None:
        """Record that a segment is read next.

        Raises:
            FormatError: it must not be read.
            FencedError: another worker has taken the run.
        """
        if not self.is_careful:
            return
        same = key.path == self._claim.reading
        if same and self._claim.unfinished >= CONDEMNED:
            raise FormatError(
                f"segment {key.path}: the last {CONDEMNED - CAREFUL} processes that read it were killed or crashed",
                "read it in a process with a memory limit to find out why",
            )
        self._note(key.path, self._claim.unfinished if same else CAREFUL)

    def _note(self, path: str, unfinished: int) -> None:
        if path == self._noted:
            return
        values = {
            "lease_key": self._claim.run_id,
            "lease_token": self._claim.epoch,
            "reading": f"{self._claim.epoch} {path}" if path else "",
            "unfinished": unfinished,
        }
        with self._database.bare() as connection:
            if connection.execute(_NOTE, values).rowcount != 1:
                raise FencedError
        self._noted = path


def unfinished_after(claim: Claim, *, more: bool) -> int:
    """How many claims count as unfinished after a commit: evaluations stay careful until nothing more waits."""
    return CAREFUL if more and claim.unfinished >= CAREFUL else 0


_NOTE = RUN_LEASE.writing.values(reading=bindparam("reading"), unfinished_claims=bindparam("unfinished"))
