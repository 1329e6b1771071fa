"""How a process ends, and what becomes of its recordings: exit, an exception, a signal, ``os._exit``, a fork."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time
import weakref
from types import TracebackType

from watchstep.capture.shutdown.ending import Ending
from watchstep.capture.shutdown.exit_status import ExitStatus
from watchstep.capture.shutdown.termination import Termination, deferred_sigterm

_recordings: weakref.WeakSet[Ending] = weakref.WeakSet()
_terminations: list[Termination] = []  # one, or none before the first recording
_exits: list[ExitStatus] = []  # likewise
_masks: dict[int, set[int | signal.Signals]] = {}  # of threads that are about to fork


def watch(ending: Ending) -> None:
    """See to it that a recording ends with its process."""
    _recordings.add(ending)
    _watch_exit()
    if not _terminations:
        _terminations.append(Termination(_Recordings()))
        _exits.append(ExitStatus(lambda: [ending.last_step for ending in live()]))
    _terminations[0].take_sigterm()


def ended() -> None:
    """A recording has ended; after the last one nothing is left in the way of the process."""
    if not live():
        while _terminations:
            _terminations.pop().withdraw()
        while _exits:
            _exits.pop().withdraw()


def live() -> list[Ending]:
    """The recordings of this process that have not ended."""
    return [ending for ending in _recordings if not ending.ended]


class _Recordings:
    """The recordings of this process, as its termination sees them."""

    def within(self, seconds: float, reason: str, *, failed: bool) -> None:
        """End them all, also those that are just being closed."""
        deadline = time.monotonic() + seconds
        for ending in list(_recordings):
            left = max(0.1, deadline - time.monotonic())
            ending.end("failed" if failed else None, reason if failed else "", left, dying=True)

    def bound(self) -> float:
        """The longest that any of them may take."""
        return max((ending.term_seconds for ending in list(_recordings)), default=0.0)

    def noted(self, reason: str) -> None:
        """Remember why the program is about to end, and have written what is there."""
        for ending in live():
            ending.reason, ending.survived = reason, False
            ending.wake()

    def survived(self) -> None:
        """The program goes on: whatever ends it later says how."""
        for ending in live():
            ending.survived = True

    def urged(self) -> None:
        """Have written what is there."""
        for ending in live():
            ending.hasten()


def described(error: BaseException) -> str:
    """An exception in one line, as a traceback ends; its class alone where its text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the text is the program's own code, which may raise anything
        return type(error).__name__


@functools.cache
def _watch_exit() -> None:
    """Once a process and its forks: end what records at exit, note an exception that ends it, forget it in forks."""
    previous = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with deferred_sigterm(_hurry_all, ends=True):
            for ending in live():
                if issubclass(kind, KeyboardInterrupt):
                    # ended at exit, so that its code stays 130
                    ending.reason, ending.survived = kind.__name__, False
                else:
                    ending.end("failed", described(error))
        previous(kind, error, trace)

    sys.excepthook = note
    atexit.register(_end_all)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_hold_sigterm, after_in_parent=_let_sigterm, after_in_child=_forget_all)


def _end_all() -> None:
    with deferred_sigterm(_hurry_all, ends=True):
        for ending in live():
            if ending.fails:
                ending.limit()
        exited = _exits[0].failure() if _exits else ""
        for ending in live():
            if ending.fails or (exited and not ending.obeys):
                ending.end("failed", ending.reason if ending.fails else exited)
            else:
                ending.end()
        ended()


def _hurry_all() -> None:
    for ending in list(_recordings):
        ending.hurry()


def _hold_sigterm() -> None:
    """A SIGTERM that meets a child before it has forgotten the recording must end it, and not be lost."""
    if _terminations:
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_sigterm() -> None:
    mask = _masks.pop(threading.get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_all() -> None:
    for ending in live():
        ending.forget()
    while _terminations:
        _terminations.pop().forget()
    while _exits:
        _exits.pop().withdraw()
    _let_sigterm()
