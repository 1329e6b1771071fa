"""Failpoints: named points of the service's work at which a test harness may end, pause or cut off a process.

Without a listener, which is always so in production, a failpoint costs one comparison. No setting and no environment variable adds a
listener: only a program that calls `listening` in its own process does, as the crash benchmark's start program
and the tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, object], None]

POINTS = (
    "announce.accepting",
    "announce.accepted",
    "sweep.found",
    "sweep.handed_out",
    "discover.listed",
    "discover.recorded",
    "evaluate.claiming",
    "evaluate.claimed",
    "evaluate.read",
    "evaluate.judged",
    "evaluate.writing",
    "evaluate.committed",
    "evaluate.fenced",
    "evaluate.released",
    "lifecycle.writing",
    "lifecycle.written",
    "journal.writing",
    "journal.on_store",
    "journal.noted",
    "dispatch.claiming",
    "dispatch.claimed",
    "dispatch.sent",
    "dispatch.writing",
    "dispatch.recorded",
    "control.in_database",
    "control.on_store",
    "stop.signalling",
    "stop.signalled",
)
"""All failpoints, in the order in which the handling of a bad step reaches them. ``…ing`` is before or within the transaction."""

_listener: Listener | None = None


def failpoint(name: str, subject: object = None) -> None:
    """Call the listener at a failpoint.

    Args:
        name: one of `POINTS`.
        subject: the object of the work there: a claim, an action.
    """
    if _listener is not None:
        _listener(name, subject)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener at every failpoint of this process; its exceptions are raised from the failpoint."""
    global _listener  # noqa: PLW0603 - one listener per process, so that a failpoint is cheap
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
