"""The end of a recording: what ends a process (exit, an exception, a signal, ``os._exit``, a fork), and what is written then.

**Exit status.** Python reports a `SystemExit` that ends a program to nobody: `sys.excepthook` is not called, and functions of `atexit` do not
get the code. Two facts are combined at exit:

- whether an exception has left the program's outermost frame: the last instruction of that frame is then not a return. If `sys.excepthook` was
  not called, it was a `SystemExit`, wherever it was raised. This tells it from one that was caught.
- the status that `sys.exit`, `exit` or `quit` was last called with on the main thread.

A status after which further steps were recorded is dropped: that exit was caught. The code of a ``raise SystemExit(code)`` is not known, nor
that of an ``exit`` that the program imported from `sys` before it recorded.

**Notebooks.** A cell that makes a hook is run again and again, and nobody closes the hook of the last run. The next hook ends it: it would
take the losses of the next training for its own, and keep its model, with a GPU's memory, as long as the kernel lives.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import dis
import functools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from watchstep.capture.health import RecorderHealth
from watchstep.capture.recorder import Recorder
from watchstep.capture.shutdown.termination import Termination, deferred_sigterm
from watchstep.capture.writer import Writer
from watchstep.format.documents import TERMINATED, EndDocument, EndState
from watchstep.store.store import WriteGate

_log = logging.getLogger("watchstep")

_STORE_SHARE = 0.8
"""Of the time that a SIGTERM is put off; the rest is for writing to disk what the store did not take."""


class Ending:
    """Ends a recording, however its process ends.

    Attributes:
        run_url: the run, for messages.
        close_seconds: how long the store is waited for when the program closes its hook, or exits.
        term_seconds: how long the end may take when it is terminated, from the signal or from the end's beginning.
        reason: why the process was told to end, if something has said so; told where it does end with a failure.
        survived: the program's handler of that signal returned: the program goes on, and its end alone says how it ended.
    """

    def __init__(
        self,
        run_url: str,
        recorder: Recorder,
        writer: Writer,
        health: RecorderHealth,
        report: Callable[[], Any],
        gate: WriteGate,
    ) -> None:
        """Nothing has ended.

        Args:
            run_url: the run.
            recorder: holds the step that is not handed over.
            writer: writes the rest.
            health: for faults of ending itself.
            report: gives what the end document says of the recorder's health.
            gate: closed once nothing more is waited for: the store may answer a thread of the recording after that.
        """
        bounds = writer.bounds
        self.run_url = run_url
        self.close_seconds = bounds.close_seconds
        self.term_seconds = bounds.term_seconds
        self.reason = ""
        self.survived = False
        self._recorder = recorder
        self._writer = writer
        self._health = health
        self._report = report
        self._gate = gate
        self._watches: list[Callable[[], None]] = []
        self._joins: list[Callable[[Callable[[], bool]], None]] = []
        self._ended = False
        self._forgotten = False
        self._words_given = False
        self._deadline = float("inf")

    @property
    def fails(self) -> bool:
        """Whether something ends the process with a failure."""
        return bool(self.reason) and not self.survived

    @property
    def last_step(self) -> int:
        """The last finished step."""
        return self._recorder.last_finished

    @property
    def is_requested(self) -> bool:
        """Whether the program ends because it was asked to stop, by whatever code."""
        return self._recorder.acknowledged and self._recorder.stopped is not None

    @property
    def ended(self) -> bool:
        """Whether nothing more is recorded."""
        return self._ended

    def is_late(self) -> bool:
        """Whether the time for ending is over: nothing is waited for any more. There is one deadline for all that is waited for."""
        return time.monotonic() >= self._deadline

    def detach_with(
        self, detach: Callable[[], None], join: Callable[[Callable[[], bool]], None] | None = None
    ) -> None:
        """Call this when nothing more is recorded.

        Args:
            detach: must not wait for the store or the service.
            join: called after the last rows were written, or went to disk; waits for a thread until what it is given says that it is late.
        """
        self._watches.append(detach)
        if join is not None:
            self._joins.append(join)

    def wake(self) -> None:
        """The process is told to end: have what is there written now, and let training go on to where it ends. Waits for nothing."""
        self._recorder.stops.leave()
        self._writer.wake()

    def hasten(self) -> None:
        """The process may be killed soon: have what is there written now. Waits for nothing, and nothing else changes."""
        self._writer.wake()

    def end(
        self,
        state: EndState | None = None,
        reason: str = "",
        seconds: float | None = None,
        *,
        dying: bool = False,
    ) -> None:
        """Write what is left within bounds, and how it ended. A second call only brings the bound forward.

        A SIGTERM that comes meanwhile does the same. The program's handler of it is called when this is done, unless the
        program has been told before.

        Args:
            state: how; None for completed, or stopped where Watchstep asked for it.
            reason: why, where it was not as planned.
            seconds: how long to wait for the store; where it is left out, `close_seconds`, and less than `term_seconds` where a
                SIGTERM ends the program.
            dying: the process ends right after this, and the training thread may be anywhere: hooks stay where they are.
        """
        if self._forgotten:
            return
        with deferred_sigterm(self.hurry, repeated=lambda: bool(self.reason)):
            self._end(state, reason, self._usual_seconds() if seconds is None else seconds, dying=dying)

    def _usual_seconds(self) -> float:
        """How long to wait for the store; less where a handler of SIGTERM runs, or has ended the program by an exception."""
        if self.reason == TERMINATED and self.fails:
            return min(self.close_seconds, _STORE_SHARE * self.term_seconds)
        return self.close_seconds

    def _end(self, state: EndState | None, reason: str, bound: float, *, dying: bool) -> None:
        """What `end` does. Safe to call again where a call was interrupted, by Ctrl-C or by a handler that calls it."""
        first, self._ended = not self._ended, True
        self._deadline = min(self._deadline, time.monotonic() + bound)
        complete = False
        if state == "failed" and self.reason and not reason.startswith(self.reason):
            reason = f"{self.reason}; {reason}"
        try:
            if dying:
                self._recorder.guarding = None  # what is left of the time is for writing
            else:
                self._detach()
            words = None if self._words_given else self._last_words(state, reason, dying=dying)
            self._words_given = True
            complete = self._writer.close(words, max(0.0, self._deadline - time.monotonic()))
            if not dying:
                self._join()
        except Exception as error:  # noqa: BLE001 - ending must not break the program's own
            self._health.fault("close", error)
        except BaseException:
            self._writer.close(None, 0.0)  # the program does not wait any longer: what is left goes to disk
            raise
        finally:
            self._gate.close()
        if first and not complete:
            self._log_remaining()

    def limit(self) -> None:
        """What ends after others has no more time than they: the deadline of an end that begins now."""
        self._deadline = min(self._deadline, time.monotonic() + self._usual_seconds())

    def hurry(self) -> None:
        """SIGTERM came meanwhile: from now on the store is waited for as long as a SIGTERM may be put off."""
        seconds = _STORE_SHARE * self.term_seconds
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        self._writer.hurry(seconds)

    def forget(self) -> None:
        """Record nothing more: this is a forked child, and the run is its parent's."""
        self._ended = self._forgotten = True
        self._writer.forget()
        self._detach()

    def _detach(self) -> None:
        while self._watches:  # which hold models and optimizers
            self._watches.pop()()

    def _join(self) -> None:
        """A thread that ends while the interpreter is torn down may abort it."""
        while self._joins:
            self._joins.pop()(self.is_late)

    def _log_remaining(self) -> None:
        health = self._health.as_data()
        folder = self._writer.left_in
        _log.warning(
            "watchstep: %s: not everything reached the store: %d rows wait on disk%s, %d were dropped. %s",
            self.run_url,
            health["counts"].get("spilled_rows", 0),
            f" ('watchstep sync {folder}' uploads them)" if folder else "",
            health["counts"].get("dropped_rows", 0),
            health["faults"].get("store", ""),
        )

    def _last_words(self, state: EndState | None, reason: str, *, dying: bool) -> EndDocument:
        last = self._recorder.last_finished
        self._recorder.hand_over()
        if self._recorder.guarding is not None:
            self._recorder.guarding.end()
        # One that trained to its end, whatever it was asked, was not stopped.
        stopped = self._recorder.stopped if self._recorder.acknowledged or dying else None
        return EndDocument(
            worker=self._recorder.worker,
            state=state or ("stopped" if stopped else "completed"),
            last_step=last,
            ended_ns=time.time_ns(),
            segments=0,
            writer="",
            reason=(reason or (stopped.reason if stopped else ""))[:500],
            health=self._report(),
        )


_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)
_UNKNOWN = object()


class ExitStatus:
    """Notes the status that a program asks to exit with. For one process, from its first recording to its last."""

    def __init__(self, progress: Callable[[], object]) -> None:
        """Take notes from now on.

        Args:
            progress: equal at two times if the program has recorded no step in between.
        """
        self._frame = _outermost()
        self._progress = progress
        self._noted_at: object = None
        self._status: Any = _UNKNOWN
        self._exit, self._quit = sys.exit, _sitebuiltins.Quitter.__call__
        self._own_exit, self._own_quit = self._noting_exit(), self._noting_quit()
        sys.exit = self._own_exit
        _sitebuiltins.Quitter.__call__ = self._own_quit  # type: ignore[method-assign]

    def withdraw(self) -> None:
        """Leave everything as it was found, where it is still ours."""
        self._frame = None
        if sys.exit is self._own_exit:
            sys.exit = self._exit
        if _sitebuiltins.Quitter.__call__ is self._own_quit:
            _sitebuiltins.Quitter.__call__ = self._quit  # type: ignore[method-assign]

    def failure(self) -> str:
        """At exit: how the program has failed, as ``SystemExit: 3``; empty where it has not, and where nobody knows."""
        if self._frame is None or not _is_left_by_exception(self._frame):
            return ""
        is_known = self._status is not _UNKNOWN and self._noted_at == self._progress()
        failed = is_known and self._status is not None and self._status != 0
        return f"SystemExit: {self._status}" if failed else ""

    def _note(self, status: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._status, self._noted_at = status, self._progress()

    def _noting_exit(self) -> Callable[..., NoReturn]:
        before = self._exit

        @functools.wraps(before)
        def exit_program(status: Any = None, /) -> NoReturn:
            self._note(status)
            before(status)

        return exit_program

    def _noting_quit(self) -> Callable[..., NoReturn]:
        before = self._quit

        @functools.wraps(before)
        def quit_program(quitter: Any, code: Any = None) -> NoReturn:
            self._note(code)
            before(quitter, code)

        return quit_program


def _outermost() -> FrameType | None:
    """The frame of the main thread that ends with the program."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented, for debuggers
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_left_by_exception(frame: FrameType) -> bool:
    """Whether a frame that has ended was left by an exception, and did not return."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] not in _RETURNS


_REASON = "another cell began to record"

_made: weakref.WeakKeyDictionary[Ending, tuple[int, int]] = weakref.WeakKeyDictionary()


def remember(ending: Ending) -> None:
    """Keep of which cell a recording is, if it is of one."""
    cell = _cell()
    if cell is not None:
        _made[ending] = (cell, threading.get_ident())


def end_left() -> None:
    """End what earlier cells began to record in this thread and left open, if this is a cell."""
    cell, thread = _cell(), threading.get_ident()
    if cell is None:
        return
    for ending, (earlier, of) in list(_made.items()):
        if not ending.ended and earlier != cell and of == thread:
            _log.info("watchstep: %s ends here: %s", ending.run_url, _REASON)
            ending.end(reason=_REASON)


def _cell() -> int | None:
    """The number of the cell, or of the line of IPython's, that runs now; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")  # which is not imported for this
    asked = getattr(ipython, "get_ipython", None)
    shell = None if asked is None else asked()
    number = getattr(shell, "execution_count", None)
    return number if isinstance(number, int) else None


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
        os.register_at_fork(
            before=_defer_sigterm, after_in_parent=_release_sigterm, after_in_child=_forget_all
        )


def _end_all() -> None:
    with deferred_sigterm(_hurry_all, ends=True):
        for ending in live():
            if ending.fails:
                ending.limit()
        exited = _exits[0].failure() if _exits else ""
        for ending in live():
            if ending.fails or (exited and not ending.is_requested):
                ending.end("failed", ending.reason if ending.fails else exited)
            else:
                ending.end()
        ended()


def _hurry_all() -> None:
    for ending in list(_recordings):
        ending.hurry()


def _defer_sigterm() -> None:
    """A SIGTERM that meets a child before it has forgotten the recording must end it, and not be lost."""
    if _terminations:
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
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
    _release_sigterm()
