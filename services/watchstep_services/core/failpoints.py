"""Named points of the service's work, at which a harness may end, pause or cut off a process. Nothing in production.

A point costs one comparison. No setting and no variable of the environment makes it do anything: a listener is there
only where a program put one there by calling `listening` in its own process, as the crash benchmark's start program
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
"""Every point, in the order in which a bad step's way reaches them. ``…ing`` is before, or within the transaction."""

_listener: Listener | None = None


def failpoint(name: str, subject: object = None) -> None:
    """Say that a point is reached.

    Args:
        name: one of `POINTS`.
        subject: what the work is about there: a claim, an action.
    """
    if _listener is not None:
        _listener(name, subject)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have a listener called at every point of this process; what it raises comes out of the point."""
    global _listener  # noqa: PLW0603 - one process has one listener; whatever holds it, a point must find it cheaply
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
