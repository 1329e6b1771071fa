"""The sampler: a thread that looks at the process and its machine twice a second, off the training thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from watchstep.capture.config import SystemSampling
from watchstep.capture.health import Health
from watchstep.capture.identity import Identity
from watchstep.capture.system.alongside import Alongside
from watchstep.capture.system.process_start import seconds_before_recording
from watchstep.capture.system.samples import Samples
from watchstep.capture.system.source import Source
from watchstep.capture.system.sources import opened
from watchstep.system_figures import DATA_WAIT, INITIALIZATION_SECONDS, STEP_SECONDS

_SHARE_BEFORE = 0.2  # of a row's time: a program that ends at once is not looked at at all
_CLOSING_SECONDS = 1.0


class Sampler:
    """Samples until it is closed, and makes a row of each figure's samples every few seconds.

    A recording that is shorter than that has no such rows; what is left at the end of a longer one becomes its last.
    """

    def __init__(
        self,
        settings: SystemSampling,
        alongside: Alongside,
        identity: Identity,
        health: Health,
        cost: Callable[[float], None] | None = None,
    ) -> None:
        """Not begun.

        Args:
            settings: how often.
            alongside: where rows go, and step times come from.
            identity: of this rank: the first of a machine samples the machine.
            health: told what cannot be sampled.
            cost: told the processor time that each sample took, in seconds.
        """
        self._settings = settings
        self._alongside = alongside
        self._identity = identity
        self._health = health
        self._cost = cost
        self._samples = Samples()
        self._sources: list[Source] = []
        self._age: float | None = None
        self._began = time.perf_counter()
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchstep-system", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Give the last rows, and end. A forked child has nothing to end: the thread is its parent's."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join(_CLOSING_SECONDS)

    def _work(self) -> None:
        if self._stop.wait(_SHARE_BEFORE * self._settings.row_seconds):
            return
        try:
            self._begin()
            self._go_on()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach the program
            self._health.fault("system", error)
        for source in self._sources:
            try:
                source.close()
            except OSError as error:
                self._health.fault("system", error)

    def _begin(self) -> None:
        began = time.thread_time()
        self._sources = opened(self._identity, self._health, gpus=self._settings.gpus)
        self._age = _age(self._began)
        self._tell(began)

    def _go_on(self) -> None:
        last, due = time.perf_counter(), self._began + self._settings.row_seconds
        is_over, cost = False, 0.0
        while not is_over:
            is_over = self._stop.wait(max(self._settings.seconds, cost / self._settings.share))
            began, now = time.thread_time(), time.perf_counter()
            self._sample(now - last)
            last, cost = now, 0.8 * cost + 0.2 * (time.thread_time() - began)
            if now >= due or (is_over and now >= self._began + self._settings.row_seconds):
                self._give()
                due = now + self._settings.row_seconds
            self._tell(began)

    def _sample(self, seconds: float) -> None:
        for source in list(self._sources):
            try:
                self._samples.add(source.sample(seconds))
            except (OSError, ValueError, LookupError) as error:
                self._sources.remove(source)
                self._health.note(
                    f"system: {type(source).__name__}",
                    f"not sampled any more: {type(error).__name__}: {error}"[:300],
                )

    def _give(self) -> None:
        times = self._alongside.times
        seconds, waits = times.take()
        self._samples.add_all(STEP_SECONDS, seconds)
        self._samples.add_all(DATA_WAIT, waits)
        if self._age is not None and times.first is not None:
            self._samples.add({INITIALIZATION_SECONDS: self._age + times.first - self._began})
            self._age = None
        rows = self._samples.as_rows()
        if rows is not None:
            self._alongside.rows.give(rows)

    def _tell(self, began: float) -> None:
        if self._cost is not None:
            self._cost(time.thread_time() - began)


def _age(began: float) -> float | None:
    """How old the process was when the recording began, by its own clock; None where that is no part of a training."""
    age = seconds_before_recording()
    return None if age is None else age - (time.perf_counter() - began)
