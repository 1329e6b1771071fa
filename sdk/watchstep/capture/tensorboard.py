"""TensorBoard event files that are written during the run, from the rows of each segment."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from watchstep.capture.health import RecorderHealth
from watchstep.format.block import Block
from watchstep.format.event_files.tensorboard import EventFile, Events, encode_rows

_INTERVAL_SECONDS = 2.0
_MAX_BYTES = 16 * 1024 * 1024
"""Size of waiting rows. What exceeds it, while the folder does not answer, is dropped and counted."""

_ROW_BYTES = 60
_CLOSE_SECONDS = 2.0
_MIN_CLOSE_SECONDS = 0.2
_FAULT = "tensorboard"
_DROPPED = "dropped_tensorboard_rows"


class TensorBoardSink:
    """Writes rows to event files on a thread of its own, at most every two seconds and on close.

    A folder that fails or hangs affects nothing else: rows for it are dropped and counted as ``dropped_tensorboard_rows``. Each
    kind of fault is counted in health once. After a fault, the next rows go to a new file.
    """

    def __init__(self, folder: Path, attempt: str, first_step: int, health: RecorderHealth) -> None:
        """Prepare the sink. Nothing is created before the first rows.

        Args:
            folder: contains a folder with an event file for each mode and worker.
            attempt: the attempt, which has its own files.
            first_step: steps of earlier attempts from this one on are superseded.
            health: counts faults.
        """
        self._folder = folder
        self._attempt = attempt
        self._first_step = first_step
        self._health = health
        self._blocks: deque[tuple[int, Block]] = deque()
        self._added = 0  # bytes; written by the writer only
        self._written = 0  # bytes; written by this thread only
        self._files: dict[str, EventFile] = {}
        self._opened: set[str] = set()
        self._reported: set[tuple[type[BaseException], int | None]] = set()
        self._cost: Callable[[float], None] | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchstep-tensorboard", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def report_cost(self, report: Callable[[float], None]) -> None:
        """Set a callback for the processor seconds of each turn."""
        self._cost = report

    def add(self, block: Block) -> None:
        """Add rows. Never blocks."""
        size = block.statistics.bytes + _ROW_BYTES * len(block)
        waiting = self._added - self._written
        if waiting and waiting + size > _MAX_BYTES:
            self._health.count(_DROPPED, len(block))
            return
        self._added += size
        self._blocks.append((size, block))
        self._wake.set()

    def close(self, seconds: float) -> None:
        """Write the rest, and close the files.

        Args:
            seconds: time limit, within fixed bounds.
        """
        self._closing.set()
        self._wake.set()
        self._thread.join(max(_MIN_CLOSE_SECONDS, min(_CLOSE_SECONDS, seconds)))
        if self._thread.is_alive():
            self._fault(TimeoutError(f"folder {self._folder}: no answer within the time limit of closing"))

    def forget(self) -> None:
        """Reset in a forked child: the files belong to its parent."""
        self._blocks.clear()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._closing.is_set()  # everything was added before
            began = time.thread_time()
            while self._blocks:
                size, block = self._blocks.popleft()
                self._write(block)
                self._written += size
            if self._cost is not None:
                self._cost(time.thread_time() - began)
            self._closing.wait(_INTERVAL_SECONDS)
        for file in self._files.values():
            file.close()

    def _write(self, block: Block) -> None:
        rest = len(block)
        try:
            for events in encode_rows(block):
                if events.data and not self._append(events):
                    self._health.count(_DROPPED, events.rows)
                rest -= events.rows
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._fault(error)
            self._health.count(_DROPPED, rest)

    def _append(self, events: Events) -> bool:
        """Append events to their file. Returns whether that succeeded."""
        name = events.folder
        try:
            if name not in self._files:
                # Only the first file supersedes: a second one continues after a fault.
                first_step = None if name in self._opened else self._first_step
                self._files[name] = EventFile(self._folder / name, self._attempt, first_step)
                self._opened.add(name)
            self._files[name].append(events.data)
        except (OSError, ValueError) as error:
            self._fault(error)
            if (file := self._files.pop(name, None)) is not None:
                file.close()
            return False
        return True

    def _fault(self, error: Exception) -> None:
        kind = type(error), getattr(error, "errno", None)
        if kind not in self._reported:
            self._reported.add(kind)
            self._health.fault(_FAULT, error)
