"""Writing notes of saved checkpoints in the background."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from watchstep.capture.health import RecorderHealth
from watchstep.errors import StoreError
from watchstep.format.documents import Checkpoint
from watchstep.platform.process import join_until
from watchstep.store.store import Store

_MAX_QUEUED = 256
_MAX_REMEMBERED = 64
_FIRST_PAUSE, _MAX_PAUSE = 0.5, 30.0
EVALUATED_SECONDS = 120.0
"""Upper bound of the time until rules have evaluated a step, if the service keeps up. Checkpoints saved since then are not yet known to be
good, and the newest one before may be the last good one."""


class CheckpointNotes:
    """Writes each note from its own thread, with retries while the store does not answer."""

    def __init__(self, open_store: Callable[[], Store], health: RecorderHealth) -> None:
        self._open_store, self._health = open_store, health
        self._waiting: queue.Queue[Checkpoint | None] = queue.Queue(_MAX_QUEUED)
        self._saved: list[Checkpoint] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal's handler may save a checkpoint or close the hook

    def add(self, checkpoint: Checkpoint) -> None:
        """Queue a checkpoint. Never blocks."""
        with self._lock:
            self._saved = [*self._saved, checkpoint][-_MAX_REMEMBERED:]
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write_all, name="watchstep-checkpoints", daemon=True
                )
                self._thread.start()
        try:
            self._waiting.put_nowait(checkpoint)
        except queue.Full:
            self._health.count("dropped_checkpoint_notes")

    def protected(self) -> frozenset[str]:
        """Return paths of possible last good checkpoints: all that are too new to be evaluated, and the newest before them."""
        since = time.time_ns() - round(EVALUATED_SECONDS * 1e9)
        with self._lock:
            new = [checkpoint for checkpoint in self._saved if checkpoint.saved_ns >= since]
            old = [checkpoint for checkpoint in self._saved if checkpoint.saved_ns < since]
        return frozenset(checkpoint.path for checkpoint in [*old[-1:], *new])

    def close(self) -> None:
        """Write what is left, then end. Does not block."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def join(self, is_late: Callable[[], bool]) -> None:
        """Wait until all notes are written, or until ``is_late`` returns True."""
        join_until(self._thread, is_late)

    def _write_all(self) -> None:
        while (checkpoint := self._waiting.get()) is not None:
            pause = _FIRST_PAUSE
            while not self._try_write(checkpoint):
                if self._closing.wait(pause):
                    return
                pause = min(_MAX_PAUSE, 2 * pause)

    def _try_write(self, checkpoint: Checkpoint) -> bool:
        try:
            self._open_store().create(checkpoint.key, checkpoint.encode())
        except StoreError as error:
            self._health.fault("checkpoint", error)
            return False
        except Exception as error:  # noqa: BLE001 - one note must not prevent the following ones
            self._health.fault("checkpoint", error)
        return True
