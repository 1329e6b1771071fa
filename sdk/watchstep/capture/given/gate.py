"""The gate of values that a program records itself: NaN and infinity are found between measurements, too.

At every step that a value is not due, its elements are checked in host memory: all of small values, another eighth of large ones. A value
that has become non-finite is measured at that step. While it stays non-finite, it is measured at its own cadence only, because some
programs mark missing elements by NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from watchstep.capture.given.names import Given
from watchstep.capture.steps.session import Session
from watchstep.kernels import native_kernel
from watchstep.kernels.native_kernel import MemoryRange

_SLICES = 8
_MAX_NAMES = 10_000


class GivenGate:
    """Finds the steps at which values become non-finite."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._native = native_kernel.load() if session.config.gate else None
        self._turn = 0
        self._clean: dict[
            str, int
        ] = {}  # names of values that are non-finite → clean checks since the last bad one

    def onset(self, given: Given, memory_of: Callable[[], Sequence[MemoryRange] | None]) -> str | None:
        """Return the collection of a value that is not due and has become non-finite since it was last checked; None if it has not.

        Args:
            given: The value's checked arguments.
            memory_of: Returns where its elements are; None if they are not in host memory, or in a format that the kernel cannot read.
        """
        if self._native is None:
            return None
        records = self._session.schedule.records
        recorded = next((name for name in given.collections if records(name, given.mode)), None)
        if recorded is None or not (memory := memory_of()):
            return None
        self._turn = (self._turn + 1) % _SLICES
        clean = self._clean.get(given.name)
        if not self._native.has_nonfinite(memory, self._turn, _SLICES):
            if clean is not None:
                self._clean[given.name] = clean + 1
                if clean + 1 >= _SLICES:  # each part of a large value was checked since
                    del self._clean[given.name]
            return None
        if len(self._clean) >= _MAX_NAMES:
            self._clean.clear()
        self._clean[given.name] = 0
        return recorded if clean is None else None
