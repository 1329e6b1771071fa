"""The end of one recording: the last step handed over, what is left written, and how it ended said once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from watchstep.capture.health import Health
from watchstep.capture.recorder import Recorder
from watchstep.capture.writer import Writer
from watchstep.documents import EndDocument, EndState

_log = logging.getLogger("watchstep")


class Ending:
    """Ends a recording, however its process ends.

    Attributes:
        run_url: the run, for messages.
        close_seconds: how long the store is waited for when the program closes its hook, or exits.
        term_seconds: the same when it is terminated.
        reason: why the process is about to end with a failure, if something has said so; told where it does end.
    """

    def __init__(
        self, run_url: str, recorder: Recorder, writer: Writer, health: Health, report: Callable[[], Any]
    ) -> None:
        """Nothing has ended.

        Args:
            run_url: the run.
            recorder: holds the step that is not handed over.
            writer: writes the rest.
            health: for faults of ending itself.
            report: gives what the end document says of the recorder's health.
        """
        bounds = writer.bounds
        self.run_url = run_url
        self.close_seconds = bounds.close_seconds
        self.term_seconds = bounds.term_seconds
        self.reason = ""
        self._recorder = recorder
        self._writer = writer
        self._health = health
        self._report = report
        self._watches: list[Callable[[], None]] = []
        self._ended = False
        self._forgotten = False

    @property
    def ended(self) -> bool:
        """Whether nothing more is recorded."""
        return self._ended

    def detach_with(self, detach: Callable[[], None]) -> None:
        """Call this when nothing more is recorded."""
        self._watches.append(detach)

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

        Args:
            state: how; None for completed, or stopped where Watchstep asked for it.
            reason: why, where it was not as planned.
            seconds: how long to wait for the store; `close_seconds` where it is left out.
            dying: the process ends right after this, and the training thread may be anywhere: hooks stay where they are.
        """
        if self._forgotten:
            return
        bound = self.close_seconds if seconds is None else seconds
        first, self._ended = not self._ended, True
        if not first:
            self._writer.close(None, bound)
            return
        try:
            if dying:
                self._recorder.guarding = None  # what is left of the time is for writing
            else:
                self._detach()
            if not self._writer.close(self._last_words(state, reason, dying=dying), bound):
                self._tell_what_is_left()
        except Exception as error:  # noqa: BLE001 - ending must not break the program's own
            self._health.fault("close", error)

    def forget(self) -> None:
        """Record nothing more: this is a forked child, and the run is its parent's."""
        self._ended = self._forgotten = True
        self._writer.forget()
        self._detach()

    def _detach(self) -> None:
        while self._watches:  # which hold models and optimizers
            self._watches.pop()()

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
