"""The writer: a background thread that encodes and uploads what the training thread hands over, and has it announced."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - it cannot be imported, by pyarrow say, once the program ends
import functools
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from watchstep.capture.config import Bounds
from watchstep.capture.health import RecorderHealth
from watchstep.capture.node.member import Member
from watchstep.capture.record import BoundedQueue, FinishedStep
from watchstep.capture.snapshots import SnapshotWriter
from watchstep.capture.stop import ControlReader
from watchstep.capture.upload.access import Access, UploadTarget
from watchstep.capture.upload.backlog import Backlog, SegmentEncoder
from watchstep.capture.upload.spill import Spill, SpillOwner
from watchstep.capture.upload.uploader import UploadContext, Uploader
from watchstep.format import documents
from watchstep.store.cloud import load_libraries
from watchstep.store.store import checked_scheme

_DENSE_SECONDS = 60.0
_SHORTEST_FLUSH = 2.0
_FLUSH_OF_EACH = 0.25
"""Seconds for each writer: 64 that flush every 18 s cost as much as the published figure allows."""
_LONGEST_FLUSH = 30.0
_HASTY_PAUSE = 0.1
_SETTLING_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_SHARE_OF_SNAPSHOTS = 0.7  # of the time for closing; how the worker ended is written after them
_MAX_ROWS = 50_000
_MAX_BYTES = 16 * 1024 * 1024
"""Of the rows of a segment before it is encoded, unless one step has more; with what encoding takes it is three times as much."""

_STEPS_AT_ONCE = 8
"""Steps that are made into arrays together; so many wait as objects of Python's, at most twice, where steps are short."""

_SHORTEST_LOOK = 0.02
_LONGEST_LOOK = 0.64
"""Seconds from one look into the queue to the next, as steps come fast or slowly."""


class Writer:
    """Takes finished steps, makes segments of them, and sees them onto the store in order.

    Two threads: one works, and may be held up by the store; the other only waits for the end, and then keeps to the
    time that it may take: what is left goes to disk while the first may still wait for an answer.

    Attributes:
        bounds: limits of time and memory.
        left_in: the folder where the rest waits after closing; empty where there is none.
    """

    def __init__(
        self,
        target: UploadTarget,
        queue: BoundedQueue,
        snapshots: SnapshotWriter,
        control: ControlReader,
        health: RecorderHealth,
        bounds: Bounds,
    ) -> None:
        about = SpillOwner(target.store_url, target.identity, target.run, target.attempt)
        self._target = target
        self._queue = queue
        self._snapshots = snapshots
        self._health = health
        self.bounds = bounds
        self.left_in = ""
        spill = Spill(about, bounds.spill_bytes, health, target.store_identity)
        self._backlog = Backlog(bounds.backlog_bytes, spill, health)
        self._encoder = SegmentEncoder(self._backlog, health)
        self._access = Access(target, control, health, queue.is_urgent)
        context = UploadContext(self._access, self._backlog, control, health)
        self._uploader = Member(context, queue, bounds) if _shares_node(target) else Uploader(context)
        self._due_at = float("inf")
        self._look_seconds = _SHORTEST_LOOK
        self._filling = threading.Lock()
        self._cost: Callable[[float], None] | None = None
        self._end: documents.EndDocument | None = None
        self._deadline = float("inf")
        self._closing = threading.Event()
        self._worked = threading.Event()
        self._settled = threading.Event()
        self._complete = False
        self._threads = [
            threading.Thread(target=self._work, name="watchstep-writer", daemon=True),
            threading.Thread(target=self._keep, name="watchstep-keeper", daemon=True),
        ]

    def wake(self) -> None:
        """Look at the queue at once."""
        self._queue.press()

    def start(self) -> None:
        """Start the threads, once the libraries that they need are loaded."""
        _load_libraries(checked_scheme(self._target.store_url))
        for thread in self._threads:
            thread.start()

    def report_cost(self, report: Callable[[float], None]) -> None:
        """Tell of the processor time that each turn took, in seconds."""
        self._cost = report
        self._access.report_cost(report)

    def close(self, end: documents.EndDocument | None, seconds: float) -> bool:
        """Write what is left and how the worker ended, first to the store and at last to disk. May be called again.

        Args:
            end: how it ended; None where that was said before.
            seconds: how long the store is waited for, at most; a later call can only bring that forward.

        Returns:
            Whether all of it reached the store in time.
        """
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        self._end = self._end or end
        self._snapshots.close(_SHARE_OF_SNAPSHOTS * seconds)
        self._uploader.hurry()
        self._closing.set()
        self._queue.press()
        # In short turns: `hurry` brings the deadline forward meanwhile.
        while not self._settled.wait(_LOOK_SECONDS) and time.monotonic() < self._deadline + _SETTLING_SECONDS:
            pass
        if self._settled.is_set() and self._worked.is_set():
            # A thread that ends while the interpreter is torn down aborts it, if it has ever been in C++.
            for thread in self._threads:
                thread.join(max(_LOOK_SECONDS, self._deadline + _SETTLING_SECONDS - time.monotonic()))
        return self._complete

    def hurry(self, seconds: float) -> None:
        """Bring the end of a `close` that waits forward. Never waits: a signal's handler calls it."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def forget(self) -> None:
        """This is a forked child: it has no threads, and what they held is its parent's."""
        self._backlog.forget()
        self._uploader.forget()

    def _work(self) -> None:
        started = time.monotonic()
        while not self._closing.is_set():
            pause = self._interval(time.monotonic() - started)
            self._due_at = min(self._due_at, time.monotonic() + pause)
            left = self._due_at - time.monotonic()
            # A follower writes when it is asked; should nobody ask, it does at last.
            self._wait(max(0.0, min(self._uploader.patience, pause if self._uploader.asks else left)))
            if self._turn():
                self._due_at = float("inf")
        while not self._turn_and_see() and time.monotonic() < self._deadline:
            time.sleep(0.05)
        self._access.finish_announcing(lambda: time.monotonic() >= self._deadline)
        self._worked.set()

    def _wait(self, seconds: float) -> None:
        """Wait so long, or until something is to be written at once; meanwhile take in what the training thread hands over."""
        until = time.monotonic() + seconds
        while not self._queue.wake.wait(max(0.0, min(self._look_seconds, until - time.monotonic()))):
            if time.monotonic() >= until:
                break
            began = time.thread_time()
            try:
                with self._filling:
                    taken = self._take_in(_STEPS_AT_ONCE)
            except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
                self._health.fault("writer", error)
                taken = 0
            if taken >= _STEPS_AT_ONCE:
                self._look_seconds = max(_SHORTEST_LOOK, self._look_seconds / 2)
            elif taken < _STEPS_AT_ONCE // 4:
                self._look_seconds = min(_LONGEST_LOOK, self._look_seconds * 2)
            if self._cost is not None:
                self._cost(time.thread_time() - began)
        self._queue.wake.clear()

    def _interval(self, age: float) -> float:
        """Seconds from flush to flush: short in the first minute, then longer the more write beside each other.

        After something urgent a stop may follow: the service is asked often for a while, unless it refuses. Where the service
        lags and asks for fewer announcements, segments grow instead; nothing is lost by it.
        """
        if self._queue.is_urgent() and not self._access.is_left_alone:
            return min(_HASTY_PAUSE, self.bounds.flush_seconds)
        usual = min(_LONGEST_FLUSH, _SHORTEST_FLUSH + _FLUSH_OF_EACH * self._uploader.writers)
        if age < _DENSE_SECONDS:
            usual = self.bounds.flush_seconds
        service = self._target.service
        return usual if service is None else max(usual, service.pause_seconds)

    def _turn(self) -> bool:
        """Look at what others said, and write if it is time; whether it was."""
        began = time.thread_time()
        due = False
        try:
            due = self._is_due(wanted=self._uploader.receive())
            more = True
            while more:
                more = False
                if due:
                    with self._filling:
                        more = self._fill()
                self._uploader.turn(flush=due)
                if (claimed := self._uploader.claimed) is not None:
                    self._snapshots.open(*claimed)
            failing = self._uploader.failing_for
            if failing is not None and failing >= self.bounds.backlog_seconds:
                self._backlog.relieve()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("writer", error)
        if self._cost is not None:
            self._cost(time.thread_time() - began)
        return due

    def _is_due(self, *, wanted: bool) -> bool:
        pressing, self._queue.pressing = self._queue.pressing, False  # before the queue is emptied
        if wanted or pressing or self._closing.is_set():
            return True
        return not self._uploader.asks and time.monotonic() >= self._due_at

    def _turn_and_see(self) -> bool:
        """One turn while closing; whether everything has been written."""
        self._turn()
        if self._backlog.empty and self._snapshots.settled and self._end is not None:
            self._uploader.write_end(self._last_words())
        return self._uploader.end_written

    def _fill(self) -> bool:
        """Encode what the queue holds, as far as the backlog has room; whether more is left that fits.

        Where there is no room the queue fills, and drops what is over its own bound.
        """
        while self._take_in(_STEPS_AT_ONCE):
            pass
        more = self._is_enough(self._encoder.rows, self._encoder.bytes)
        self._encoder.encode()
        return more and not self._backlog.full

    def _take_in(self, most: int) -> int:
        """Let the encoder take in so many steps at most, as far as a segment and the backlog have room; how many it were."""
        steps: list[FinishedStep] = []
        rows, size = self._encoder.rows, self._encoder.bytes
        while len(steps) < most and not self._is_enough(rows, size) and not self._backlog.full:
            item = self._queue.take()
            if item is None:
                break
            steps.append(item)
            rows, size = rows + item.rows, size + item.bytes
        if steps:
            self._encoder.take_in(steps)
        return len(steps)

    @staticmethod
    def _is_enough(rows: int, size: int) -> bool:
        """Whether so much makes a segment."""
        return rows >= _MAX_ROWS or size >= _MAX_BYTES

    def _keep(self) -> None:
        """Wait until the working thread is done or the time is over, and then put on disk what it could not write."""
        self._closing.wait()
        while time.monotonic() < self._deadline and not self._worked.wait(0.02):
            pass
        try:
            self._settle()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the program
            self._health.fault("writer", error)
        self._settled.set()

    def _settle(self) -> None:
        self._snapshots.settle()
        with self._filling:
            while self._fill():
                pass
        if self._uploader.end_written and self._backlog.empty:
            self._uploader.leave()
            self._backlog.leave(None)
            self._complete = True
            return
        self._uploader.release()
        self._backlog.seal()
        with self._filling:
            self._drop_rest()
        # Whoever uploads what is left finds out which of it is on the store already, and counts the rest.
        words = self._last_words() if self._end is not None else None
        self.left_in = self._backlog.leave(words and replace(words, segments=self._backlog.segments))

    def _drop_rest(self) -> None:
        """Count what is still in the queue, and what has no segment yet."""
        self._encoder.drop_rest()
        while (item := self._queue.take()) is not None:
            self._health.count("dropped_rows", item.rows)
            self._health.count("dropped_steps")

    def _last_words(self) -> documents.EndDocument:
        assert self._end is not None
        writer, segments = self._uploader.account
        return replace(
            self._end,
            segments=segments,
            writer=writer,
            health={**self._end.health, **self._health.counted()},
        )


@functools.cache
def _load_libraries(scheme: str) -> None:
    """Import what writing to a store needs: once a process, on the calling thread, before the first step.

    Beside training an import would hold the interpreter's lock while a shared library is loaded. When Ctrl-C ends the program, it
    would undo its exit code: Python forgets that it was interrupted when it runs a text as code, as the imports of boto3 and pyarrow
    do, and exits with 1. The objects that imports make bring a full run of the collector of cycles, which stops all threads for some
    tenths of a second: it is made here, too, and not at some step.
    """
    import obstore.store  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    load_libraries(scheme)
    if gc.isenabled():
        gc.collect()


def _shares_node(target: UploadTarget) -> bool:
    """Whether other ranks of the attempt may be on this machine. What they meet by is Linux' own."""
    who = target.identity
    return sys.platform == "linux" and who.world_size > 1 and who.local_size > 1
