"""The end of one recording: the last step handed over, what is left written, and how it ended said once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.capture.recorder import Recorder
from watchstep.capture.shutdown.termination import deferred_sigterm
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
    def obeys(self) -> bool:
        """Whether the program ends because it was asked to stop, by whatever code."""
        return self._recorder.heeded and self._recorder.stopped is not None

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
            self._tell_what_is_left()

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

    def _tell_what_is_left(self) -> None:
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
        stopped = self._recorder.stopped if self._recorder.heeded or dying else None
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
