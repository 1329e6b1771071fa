"""The end of a recording: the ways in which a process ends (exit, an exception, a signal, ``os._exit``, a fork), and the data written then.

**Exit status.** Python does not report a `SystemExit` that ends a program: `sys.excepthook` is not called, and functions of `atexit` do not
get the code. Two facts are combined at exit:

- whether an exception has left the program's outermost frame: the last instruction of that frame is then not a return. If `sys.excepthook` was
  not called, it was a `SystemExit`, regardless of where it was raised. This distinguishes it from a caught one.
- the status that `sys.exit`, `exit` or `quit` was last called with on the main thread.

A status after which further steps were recorded is dropped: that exit was caught. The code of a ``raise SystemExit(code)`` is not known, nor
that of an ``exit`` that the program imported from `sys` before it recorded.

**Notebooks.** A cell that creates a hook is run repeatedly, and the previous hook is usually not closed. The next hook closes it: it would
otherwise record the losses of the next training, and keep its model, including GPU memory, for the lifetime of the kernel.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import dis
import functools
import gc
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
from watchstep.capture.shutdown.termination import Termination, deferred_sigterm
from watchstep.capture.steps.recorder import Recorder
from watchstep.capture.writer import Writer
from watchstep.format.documents import TERMINATED, EndDocument, EndState
from watchstep.store.store import WriteGate

_log = logging.getLogger("watchstep")

_STORE_SHARE = 0.8
"""Share of the time by which a SIGTERM is deferred. The rest is for writing to disk the data that the store did not accept."""


class Ending:
    """Ends a recording for every way in which its process can end.

    Attributes:
        run_url: URL of the run, for messages.
        close_seconds: Seconds to wait for the store when the program closes its hook or exits.
        term_seconds: Maximum seconds of the end after termination, from the signal or from the start of the end.
        reason: Reason of the request to end the process, if any; reported if the process ends with a failure.
        survived: Whether the program's signal handler returned. The program then continues, and only its end determines the state.
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
        """Create it for an open recording.

        Args:
            run_url: URL of the run.
            recorder: The recorder, which has the current step.
            writer: Writes the remaining data.
            health: For errors of the end itself.
            report: Returns the recorder's health for the end document.
            gate: Closed when nothing more is waited for, because the store may respond to a thread of the recording after that.
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
        """Return whether the process ends with a failure."""
        return bool(self.reason) and not self.survived

    @property
    def last_step(self) -> int:
        """Return the last finished step."""
        return self._recorder.last_finished

    @property
    def updates(self) -> int:
        """Return the number of updates that adapters of frameworks have recorded."""
        return self._recorder.updates

    @property
    def is_requested(self) -> bool:
        """Return whether the program ends because of a stop request."""
        return self._recorder.acknowledged and self._recorder.stopped is not None

    @property
    def ended(self) -> bool:
        """Return whether the recording has ended."""
        return self._ended

    def note(self, name: str, text: str) -> None:
        """Add a note about what is not recorded to the recorder's health."""
        self._health.note(name, text)

    def is_late(self) -> bool:
        """Return whether the time for the end is over. One deadline applies to all waits."""
        return time.monotonic() >= self._deadline

    def detach_with(
        self, detach: Callable[[], None], join: Callable[[Callable[[], bool]], None] | None = None
    ) -> None:
        """Register functions to call when the recording ends.

        Args:
            detach: Must not wait for the store or the service.
            join: Called after the last rows were written to the store or to disk. It waits for a thread until its argument returns True.
        """
        self._watches.append(detach)
        if join is not None:
            self._joins.append(join)

    def wake(self) -> None:
        """Start writing the available data after a request to end the process, while training continues. Does not wait."""
        self._recorder.stops.stop_waiting()
        self._writer.wake()

    def hasten(self) -> None:
        """Start writing the available data because the process may be killed soon. Does not wait, and changes nothing else."""
        self._writer.wake()

    def end(
        self,
        state: EndState | None = None,
        reason: str = "",
        seconds: float | None = None,
        *,
        dying: bool = False,
    ) -> None:
        """Write the remaining data and the end document within a time limit. A second call only shortens the limit.

        A SIGTERM during this call does the same. The program's handler is called afterwards, unless the
        program has already been notified.

        Args:
            state: State of the end; None for completed, or stopped if Watchstep requested it.
            reason: Reason of an unplanned end.
            seconds: Seconds to wait for the store; by default `close_seconds`, and less than `term_seconds` if a
                SIGTERM ends the program.
            dying: Whether the process ends directly after this, with the training thread in any state. Hooks are then not removed.
        """
        if self._forgotten:
            return
        with deferred_sigterm(self.hurry, repeated=lambda: bool(self.reason)):
            self._end(state, reason, self._usual_seconds() if seconds is None else seconds, dying=dying)

    def _usual_seconds(self) -> float:
        """Return the seconds to wait for the store: less if a SIGTERM handler is running, or has ended the program with an exception."""
        if self.reason == TERMINATED and self.fails:
            return min(self.close_seconds, _STORE_SHARE * self.term_seconds)
        return self.close_seconds

    def _end(self, state: EndState | None, reason: str, bound: float, *, dying: bool) -> None:
        """Implement `end`. It may be called again after an interruption by Ctrl-C or by a handler that calls it."""
        first, self._ended = not self._ended, True
        self._deadline = min(self._deadline, time.monotonic() + bound)
        complete = False
        if state == "failed" and self.reason and not reason.startswith(self.reason):
            reason = f"{self.reason}; {reason}"
        try:
            if dying:
                self._recorder.guarding = None  # the remaining time is for writing
            else:
                self._detach()
            words = None if self._words_given else self._last_words(state, reason, dying=dying)
            self._words_given = True
            complete = self._writer.close(words, max(0.0, self._deadline - time.monotonic()))
            if not dying:
                self._join()
        except Exception as error:  # noqa: BLE001 - errors here must not break the end of the program
            self._health.fault("close", error)
        except BaseException:
            self._writer.close(
                None, 0.0
            )  # the program does not wait any longer: the remaining data goes to disk
            raise
        finally:
            self._gate.close()
        if first and not complete:
            self._log_remaining()

    def limit(self) -> None:
        """Set the deadline of an end that begins now. Recordings that end after others have no additional time."""
        self._deadline = min(self._deadline, time.monotonic() + self._usual_seconds())

    def hurry(self) -> None:
        """Shorten the wait for the store after a SIGTERM to the time by which a SIGTERM may be deferred."""
        seconds = _STORE_SHARE * self.term_seconds
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        self._writer.hurry(seconds)

    def forget(self) -> None:
        """Stop recording in a forked child, because the run belongs to its parent."""
        self._ended = self._forgotten = True
        self._writer.forget()
        self._detach()

    def _detach(self) -> None:
        while self._watches:  # they reference models and optimizers
            self._watches.pop()()

    def _join(self) -> None:
        """Join threads, because a thread that ends during the interpreter's teardown may abort it."""
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
        self._writer.expect_end()
        self._recorder.is_recalling |= dying or state == "failed"
        try:
            self._recorder.hand_over()
        except Exception as error:  # noqa: BLE001 - the end is written without the last step
            self._health.fault("close", error)
        if self._recorder.guarding is not None:
            self._recorder.guarding.end()
        # A program that trained to its end was not stopped, despite any request.
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
    """Records the status with which a program requests its exit. There is one per process, from its first recording to its last."""

    def __init__(self, progress: Callable[[], object]) -> None:
        """Start recording.

        Args:
            progress: Returns equal values at two times if the program has recorded no step in between.
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
        """Restore the original functions unless the program has replaced them."""
        self._frame = None
        if sys.exit is self._own_exit:
            sys.exit = self._exit
        if _sitebuiltins.Quitter.__call__ is self._own_quit:
            _sitebuiltins.Quitter.__call__ = self._quit  # type: ignore[method-assign]

    def failure(self) -> str:
        """Return at exit how the program failed, e.g. ``SystemExit: 3``; empty if it did not, or if this is unknown."""
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
    """Return the main thread's outermost frame, which ends with the program."""
    frame = _frame_of(threading.main_thread())
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _frame_of(thread: threading.Thread) -> FrameType | None:
    """Return the current frame of a thread; None if it has none."""
    if thread is threading.current_thread():
        return sys._getframe()  # noqa: SLF001 - documented, for such uses
    # Python before 3.12 waits for itself forever if a garbage collection begins within `sys._current_frames` (CPython issue 106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - documented, for debuggers
    finally:
        if collects:
            gc.enable()


def _is_left_by_exception(frame: FrameType) -> bool:
    """Return whether an ended frame was left by an exception instead of a return."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] not in _RETURNS


_REASON = "another cell began to record"

_made: weakref.WeakKeyDictionary[Ending, tuple[int, int]] = weakref.WeakKeyDictionary()


def remember(ending: Ending) -> None:
    """Store the cell of a recording, if any."""
    cell = _cell()
    if cell is not None:
        _made[ending] = (cell, threading.get_ident())


def end_left() -> None:
    """In a cell, end the open recordings of earlier cells in this thread."""
    cell, thread = _cell(), threading.get_ident()
    if cell is None:
        return
    for ending, (earlier, of) in list(_made.items()):
        if not ending.ended and earlier != cell and of == thread:
            _log.info("watchstep: %s ends here: %s", ending.run_url, _REASON)
            ending.end(reason=_REASON)


def _cell() -> int | None:
    """Return the number of the current cell or IPython line; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")  # not imported for this
    asked = getattr(ipython, "get_ipython", None)
    shell = None if asked is None else asked()
    number = getattr(shell, "execution_count", None)
    return number if isinstance(number, int) else None


_recordings: weakref.WeakSet[Ending] = weakref.WeakSet()
_terminations: list[Termination] = []  # one, or none before the first recording
_exits: list[ExitStatus] = []  # likewise
_masks: dict[int, set[int | signal.Signals]] = {}  # of threads that are about to fork


def watch(ending: Ending) -> None:
    """Ensure that a recording ends with its process."""
    _recordings.add(ending)
    _watch_exit()
    if not _terminations:
        _terminations.append(Termination(_Recordings()))
        _exits.append(ExitStatus(lambda: [ending.last_step for ending in live()]))
    _terminations[0].take_sigterm()


def ended() -> None:
    """Handle the end of a recording. After the last one all handlers are removed."""
    if not live():
        while _terminations:
            _terminations.pop().withdraw()
        while _exits:
            _exits.pop().withdraw()


def live() -> list[Ending]:
    """Return the open recordings of this process."""
    return [ending for ending in _recordings if not ending.ended]


class _Recordings:
    """The recordings of this process for its `Termination`."""

    def within(self, seconds: float, reason: str, *, failed: bool) -> None:
        """End all recordings, including those that are being closed."""
        deadline = time.monotonic() + seconds
        for ending in list(_recordings):
            left = max(0.1, deadline - time.monotonic())
            ending.end("failed" if failed else None, reason if failed else "", left, dying=True)

    def bound(self) -> float:
        """Return the maximum time of any recording in seconds."""
        return max((ending.term_seconds for ending in list(_recordings)), default=0.0)

    def noted(self, reason: str) -> None:
        """Store the reason of the coming end, and start writing the available data."""
        for ending in live():
            ending.reason, ending.survived = reason, False
            ending.wake()

    def survived(self) -> None:
        """Handle a program that continues: a later end determines the state."""
        for ending in live():
            ending.survived = True

    def urged(self) -> None:
        """Start writing the available data."""
        for ending in live():
            ending.hasten()


def described(error: BaseException) -> str:
    """Return an exception as one line, like the end of a traceback; only its class if its text is not available."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the text is the program's own code, which may raise anything
        return type(error).__name__


@functools.cache
def _watch_exit() -> None:
    """Once per process and its forks: end recordings at exit, record an exception that ends the process, and detach in forks."""
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
    """Defer a SIGTERM: one that reaches a child before it has detached from the recording must end it and not be lost."""
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
