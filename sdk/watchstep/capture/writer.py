"""The writer: a background thread that encodes and uploads what the training thread hands over, and announces it to the service."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - pyarrow cannot import it during interpreter shutdown
import functools
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from watchstep.capture.config import Bounds
from watchstep.capture.health import RecorderHealth
from watchstep.capture.node.member import Member
from watchstep.capture.steps.metric_names import STALLED
from watchstep.capture.steps.record import BoundedQueue, FinishedStep, Group, Record, report_info
from watchstep.capture.steps.stalls import StallWatch
from watchstep.capture.stop import ControlReader
from watchstep.capture.tensorboard import TensorBoardSink
from watchstep.capture.tensors.snapshots import SnapshotWriter
from watchstep.capture.upload.access import Access, UploadTarget
from watchstep.capture.upload.backlog import Backlog, SegmentEncoder
from watchstep.capture.upload.spill import Spill, SpillOwner
from watchstep.capture.upload.uploader import UploadContext, Uploader
from watchstep.format import documents
from watchstep.format.layout import SnapshotKey
from watchstep.format.statistics import scalars
from watchstep.format.tensors import Mode, SavedName
from watchstep.kernels.measurement import Completed
from watchstep.store.cloud import load_libraries
from watchstep.store.store import Store, checked_scheme

if TYPE_CHECKING:
    from watchstep.capture.mirror.run_mirror import RunMirror

_DENSE_SECONDS = 60.0
_MIN_FLUSH_SECONDS = 2.0
_FLUSH_SECONDS_PER_WRITER = 0.25
"""64 writers that flush every 18 s cost as much as the published figure allows."""
_MAX_FLUSH_SECONDS = 30.0
_URGENT_PAUSE = 0.1
_SETTLING_SECONDS = 1.0
_POLL_SECONDS = 0.05
_SNAPSHOT_SHARE = 0.7  # of the time for closing; the end document is written after them
_MAX_ROWS = 50_000
_MAX_BYTES = 16 * 1024 * 1024
"""Size of a segment's rows before encoding, unless one step has more; with encoding it takes three times as much."""

_STEPS_AT_ONCE = 8
"""Steps that are converted to arrays together. With short steps, at most twice as many wait as Python objects."""

_MIN_POLL_SECONDS = 0.02
_MAX_POLL_SECONDS = 0.64
"""Interval of checking the queue, depending on the rate of steps."""


class Writer:
    """Encodes finished steps as segments, and uploads them to the store in order.

    It has two threads. One works, and may be blocked by the store. The other only waits for the end, and enforces the
    time limit: it writes the rest to disk even if the first still waits for an answer.

    Attributes:
        bounds: limits of time and memory.
        left_in: the folder with the rest after closing; empty if there is none.
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
        owner = SpillOwner(target.store_url, target.identity, target.run, target.attempt)
        self._target = target
        self._queue = queue
        self._snapshots = snapshots
        self._health = health
        self.bounds = bounds
        self.left_in = ""
        spill = Spill(owner, bounds.spill_bytes, health, target.store_identity)
        self._backlog = Backlog(bounds.backlog_bytes, spill, health)
        self._encoder = SegmentEncoder(self._backlog, health)
        self._access = Access(target, control, health, queue.is_urgent)
        context = UploadContext(self._access, self._backlog, control, health)
        self._uploader = Member(context, queue, bounds) if _shares_node(target) else Uploader(context)
        self._due_at = float("inf")
        self._poll_seconds = _MIN_POLL_SECONDS
        self._filling = threading.Lock()
        self._cost: Callable[[float], None] | None = None
        self._tensorboard: TensorBoardSink | None = None
        self._mirror: RunMirror | None = None
        self._opened: Callable[[Store, str], None] | None = None
        self._stalls: StallWatch | None = None
        self._stalled: list[Record] = []
        self._last_step = -1
        self._end_follows = False
        self._end: documents.EndDocument | None = None
        self._deadline = float("inf")
        self._closing = threading.Event()
        self._worked = threading.Event()
        self._settled = threading.Event()
        self._complete = False
        self._threads = [
            threading.Thread(target=self._work, name="watchstep-writer", daemon=True),
            threading.Thread(target=self._finish_by_deadline, name="watchstep-writer-exit", daemon=True),
        ]

    def wake(self) -> None:
        """Check the queue at once."""
        self._queue.press()

    def start(self) -> None:
        """Load the required libraries, then start the threads."""
        _load_libraries(checked_scheme(self._target.store_url))
        for thread in self._threads:
            thread.start()
        if self._tensorboard is not None:
            self._tensorboard.start()
        if self._mirror is not None:
            self._mirror.start()

    def write_tensorboard(self, sink: TensorBoardSink) -> None:
        """Also pass the rows of each segment to a sink. Called before `start`."""
        self._tensorboard = sink
        self._encoder.pass_on(sink.add)

    def mirror_rows(self, mirror: RunMirror) -> None:
        """Also pass the rows of each step to a mirror. Called before `start`."""
        self._mirror = mirror
        self._encoder.pass_on_at_once(mirror.add)

    def pass_store(self, opened: Callable[[Store, str], None]) -> None:
        """Pass the run's store and the claimed attempt to a function, at each turn from the claim on. Called before `start`."""
        self._opened = opened

    def watch_stalls(self, stalls: StallWatch) -> None:
        """Look for a training thread that does not move, and write when it does not. Called before `start`."""
        self._stalls = stalls

    def report_cost(self, report: Callable[[float], None]) -> None:
        """Set a callback for the processor seconds of each turn."""
        self._cost = report
        self._access.report_cost(report)
        if self._tensorboard is not None:
            self._tensorboard.report_cost(report)
        if self._mirror is not None:
            self._mirror.report_cost(report)

    def expect_end(self) -> None:
        """Keep the last step until the objects that it is handed over with are written. Called before the last step is handed over."""
        self._end_follows = True

    def close(self, end: documents.EndDocument | None, seconds: float) -> bool:
        """Write what is left and the end document, first to the store and then to disk. May be called again.

        Args:
            end: how the worker ended; None if a previous call passed it.
            seconds: time limit for the store; later calls can only shorten it.

        Returns:
            Whether everything reached the store in time.
        """
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        self._end = self._end or end
        self._snapshots.close(_SNAPSHOT_SHARE * seconds)
        self._uploader.hurry()
        self._end_follows = True
        self._closing.set()
        self._queue.press()
        # Wait in short turns, because `hurry` may shorten the deadline meanwhile.
        while not self._settled.wait(_POLL_SECONDS) and time.monotonic() < self._deadline + _SETTLING_SECONDS:
            pass
        if self._settled.is_set() and self._worked.is_set():
            # A thread that ends during interpreter shutdown aborts it, if it has ever run C++ code.
            for thread in self._threads:
                thread.join(max(_POLL_SECONDS, self._deadline + _SETTLING_SECONDS - time.monotonic()))
        return self._complete

    def hurry(self, seconds: float) -> None:
        """Shorten the time limit of a waiting `close`. Never blocks: called by a signal handler."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def forget(self) -> None:
        """Reset in a forked child: it has no threads, and their data belongs to the parent."""
        self._backlog.forget()
        self._uploader.forget()
        if self._tensorboard is not None:
            self._tensorboard.forget()
        if self._mirror is not None:
            self._mirror.forget()

    def _work(self) -> None:
        started = time.monotonic()
        while not self._closing.is_set():
            pause = self._interval(time.monotonic() - started)
            self._due_at = min(self._due_at, time.monotonic() + pause)
            remaining = self._due_at - time.monotonic()
            # A follower writes on request; without requests it writes after a longer time.
            self._wait(
                max(
                    0.0,
                    min(self._uploader.wait_seconds, pause if self._uploader.is_on_request else remaining),
                )
            )
            if self._turn():
                self._due_at = float("inf")
        while not self._closing_turn() and time.monotonic() < self._deadline:
            time.sleep(0.05)
        self._access.finish_announcing(lambda: time.monotonic() >= self._deadline)
        self._worked.set()

    def _wait(self, seconds: float) -> None:
        """Wait, or until something must be written at once; meanwhile encode what the training thread hands over."""
        until = time.monotonic() + seconds
        while not self._queue.wake.wait(max(0.0, min(self._poll_seconds, until - time.monotonic()))):
            if time.monotonic() >= until:
                break
            began = time.thread_time()
            self._look_for_stall()
            try:
                with self._filling:
                    taken = self._take_in(_STEPS_AT_ONCE)
            except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
                self._health.fault("writer", error)
                taken = 0
            if taken >= _STEPS_AT_ONCE:
                self._poll_seconds = max(_MIN_POLL_SECONDS, self._poll_seconds / 2)
            elif taken < _STEPS_AT_ONCE // 4:
                self._poll_seconds = min(_MAX_POLL_SECONDS, self._poll_seconds * 2)
            if self._cost is not None:
                self._cost(time.thread_time() - began)
        self._queue.wake.clear()

    def _look_for_stall(self) -> None:
        stall = None if self._stalls is None else self._stalls.look()
        if stall is not None and self._last_step >= 0:
            info = report_info(STALLED, stall.place)
            statistics = Completed(scalars([stall.seconds]))
            worker = self._target.identity.worker
            self._stalled.append(
                Record(stall.step, "train", worker, time.time_ns(), Group.of((info,)), statistics)
            )
            self._queue.press()

    def _interval(self, age: float) -> float:
        """Return the flush interval: short in the first minute, then longer with the number of writers.

        After something urgent, when a stop may follow, the service is polled often for a while unless it refuses. If the service
        lags and requests fewer announcements, segments grow instead, without loss.
        """
        if self._queue.is_urgent() and not self._access.is_service_paused:
            return min(_URGENT_PAUSE, self.bounds.flush_seconds)
        usual = min(
            _MAX_FLUSH_SECONDS, _MIN_FLUSH_SECONDS + _FLUSH_SECONDS_PER_WRITER * self._uploader.writers
        )
        if age < _DENSE_SECONDS:
            usual = self.bounds.flush_seconds
        service = self._target.service
        return usual if service is None else max(usual, service.pause_seconds)

    def _turn(self) -> bool:
        """Process messages of other ranks, and write if it is time. Returns whether it was."""
        began = time.thread_time()
        due = False
        try:
            due = self._is_due(requested=self._uploader.receive())
            more = True
            while more:
                more = False
                if due:
                    with self._filling:
                        more = self._fill()
                self._uploader.turn(flush=due)
                if (claimed := self._uploader.claimed) is not None:
                    self._snapshots.open(*claimed)
                    if self._opened is not None:
                        self._opened(*claimed)
            failing = self._uploader.failing_for
            if failing is not None and failing >= self.bounds.backlog_seconds:
                self._backlog.relieve()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("writer", error)
        if self._cost is not None:
            self._cost(time.thread_time() - began)
        return due

    def _is_due(self, *, requested: bool) -> bool:
        pressing, self._queue.pressing = self._queue.pressing, False  # before the queue is emptied
        if requested or pressing or self._closing.is_set():
            return True
        return not self._uploader.is_on_request and time.monotonic() >= self._due_at

    def _closing_turn(self) -> bool:
        """Do one turn while closing. Returns whether everything has been written."""
        self._turn()
        is_written = self._snapshots.settled and not self._snapshots.has_saved
        # The last step waits for the objects: it is still in the queue if they were finished during this turn.
        is_taken = self._queue.is_empty and not self._encoder.rows
        if is_written and is_taken and self._backlog.empty and self._end is not None:
            self._uploader.write_end(self._end_document())
        return self._uploader.end_written

    def _fill(self) -> bool:
        """Encode the queue's contents, as far as the backlog has room. Returns whether more is left that fits.

        Without room, the queue fills and drops what exceeds its own bound.
        """
        while self._take_in(_STEPS_AT_ONCE):
            pass
        more = self._is_enough(self._encoder.rows, self._encoder.bytes)
        self._encoder.encode()
        return more and not self._backlog.full

    def _take_in(self, limit: int) -> int:
        """Pass up to ``limit`` steps to the encoder, as far as a segment and the backlog have room. Returns their number."""
        steps: list[FinishedStep] = []
        rows, size = self._encoder.rows, self._encoder.bytes
        while len(steps) < limit and not self._is_enough(rows, size) and not self._backlog.full:
            item = self._next_step()
            if item is None:
                break
            steps.append(item)
            self._last_step = item.step
            rows, size = rows + item.rows, size + item.bytes
        if steps:
            self._encoder.take_in(steps)
        return len(steps)

    def _next_step(self) -> FinishedStep | None:
        """The oldest step of the queue, with rows about the objects with full tensors that are on the store since the last one.

        An object of a later step, which is on the store already, has its row at that step or after it.

        At the end, the last step is kept back until the objects are written. If the last step was written before the end began, the
        rows have a step of their own.
        """
        if self._stalled and self._queue.is_empty:
            # At the last step that was taken: at the one that does not end, readers would take its own rows, which may follow, for late ones.
            stalled, self._stalled = self._stalled[-1], []
            return FinishedStep(self._last_step, (replace(stalled, step=self._last_step),))
        is_waiting = self._end_follows and not self._snapshots.settled
        item = self._queue.take(keep=1 if is_waiting else 0)
        if item is None and not (self._closing.is_set() and not is_waiting and self._snapshots.has_saved):
            return None
        if item is not None:
            saved = self._snapshots.take_saved(item.step)
            return FinishedStep(item.step, (*item.records, *_records_of(saved, item.step))) if saved else item
        saved = self._snapshots.take_saved()
        # The last step is not written yet if its rows are still collected.
        next_step = self._last_step + (0 if self._encoder.rows else 1)
        step = max(next_step, *(key.step for key in saved))
        return FinishedStep(step, _records_of(saved, step))

    @staticmethod
    def _is_enough(rows: int, size: int) -> bool:
        """Whether the rows suffice for a segment."""
        return rows >= _MAX_ROWS or size >= _MAX_BYTES

    def _finish_by_deadline(self) -> None:
        """Wait until the working thread is done or the time limit is exceeded, then write the rest to disk."""
        self._closing.wait()
        while time.monotonic() < self._deadline and not self._worked.wait(0.02):
            pass
        try:
            self._settle()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the program
            self._health.fault("writer", error)
        if self._tensorboard is not None:
            self._tensorboard.close(self._deadline - time.monotonic())
        if self._mirror is not None:
            self._mirror.close(self._deadline - time.monotonic())
        self._settled.set()

    def _settle(self) -> None:
        self._snapshots.settle()
        with self._filling:
            while self._fill():
                pass
        if self._uploader.end_written and self._backlog.empty:
            self._uploader.leave()
            self._backlog.release(None)
            self._complete = True
            return
        self._uploader.release()
        self._backlog.seal()
        with self._filling:
            self._drop_rest()
        # The process that uploads the rest determines which of it is on the store already, and counts what is left.
        end = self._end_document() if self._end is not None else None
        self.left_in = self._backlog.release(end and replace(end, segments=self._backlog.segments))

    def _drop_rest(self) -> None:
        """Count the queue's contents and rows without a segment as dropped."""
        self._encoder.drop_rest()
        while (item := self._queue.take()) is not None:
            self._health.count("dropped_rows", item.rows)
            self._health.count("dropped_steps")

    def _end_document(self) -> documents.EndDocument:
        assert self._end is not None
        writer, segments = self._uploader.account
        return replace(
            self._end,
            segments=segments,
            writer=writer,
            health={**self._end.health, **self._health.counted()},
        )


def _records_of(saved: Sequence[SnapshotKey], step: int) -> tuple[Record, ...]:
    """The rows about objects with full tensors, for a step at which they are on the store."""
    numbers: Counter[SavedName] = Counter()
    records = []
    for key in saved:
        name = SavedName(cast("Mode", key.mode), key.collection)
        group = Group.of((name.info(numbers[name]),))
        numbers[name] += 1
        statistics = Completed(scalars([float(key.step)]))
        records.append(Record(step, "global", key.worker, time.time_ns(), group, statistics))
    return tuple(records)


_MANY_MODULES = 100
"""Imports after which a garbage collection is due. Those for a local folder are fewer."""


@functools.cache
def _load_libraries(scheme: str) -> None:
    """Import the libraries for writing to a store: once per process, on the calling thread, before the first step.

    During training, an import would hold the interpreter's lock while a shared library is loaded. When Ctrl-C ends the program, an import would
    undo its exit code: Python forgets the interrupt when it executes source text, as the import of boto3 does, and exits with 1. The objects of many
    imports trigger a full garbage collection, which stops all threads for some tenths of a second; it is done here as well, and not at some step.
    """
    before = len(sys.modules)
    import obstore.store  # noqa: F401

    load_libraries(scheme)
    if gc.isenabled() and len(sys.modules) - before > _MANY_MODULES:
        gc.collect()


def _shares_node(target: UploadTarget) -> bool:
    """Whether other ranks of the attempt may be on this machine. They communicate by Linux-specific means."""
    identity = target.identity
    return sys.platform == "linux" and identity.world_size > 1 and identity.local_size > 1
