"""Noting, beside the training, that the program saved a checkpoint."""

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

_MOST_WAITING = 256
_KEPT = 64
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
JUDGED_SECONDS = 120.0
"""So long after a step, at the most, a rule has judged it where the service keeps up: what was saved since is not yet known to be
good, and what was saved before it may be the last that is."""


class CheckpointNotes:
    """Writes each note from a thread of its own, which tries again while the store does not answer."""

    def __init__(self, open_store: Callable[[], Store], health: RecorderHealth) -> None:
        self._open_store, self._health = open_store, health
        self._waiting: queue.Queue[Checkpoint | None] = queue.Queue(_MOST_WAITING)
        self._saved: list[Checkpoint] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal's handler may save a checkpoint or close the hook

    def add(self, checkpoint: Checkpoint) -> None:
        """Note a checkpoint. Never waits."""
        with self._lock:
            self._saved = [*self._saved, checkpoint][-_KEPT:]
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
        """Paths that may hold the last good state: all that are too new to be judged, and the newest before them."""
        since = time.time_ns() - round(JUDGED_SECONDS * 1e9)
        with self._lock:
            new = [checkpoint for checkpoint in self._saved if checkpoint.saved_ns >= since]
            old = [checkpoint for checkpoint in self._saved if checkpoint.saved_ns < since]
        return frozenset(checkpoint.path for checkpoint in [*old[-1:], *new])

    def close(self) -> None:
        """Have what is left written. Waits for nothing."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)

    def join(self, is_late: Callable[[], bool]) -> None:
        """Wait until all is written, or it is late."""
        join_until(self._thread, is_late)

    def _write_all(self) -> None:
        while (checkpoint := self._waiting.get()) is not None:
            pause = _FIRST_PAUSE
            while not self._wrote(checkpoint):
                if self._closing.wait(pause):
                    return
                pause = min(_LONGEST_PAUSE, 2 * pause)

    def _wrote(self, checkpoint: Checkpoint) -> bool:
        try:
            self._open_store().create(checkpoint.key, checkpoint.encode())
        except StoreError as error:
            self._health.fault("checkpoint", error)
            return False
        except Exception as error:  # noqa: BLE001 - a note must not end the notes that follow
            self._health.fault("checkpoint", error)
        return True
