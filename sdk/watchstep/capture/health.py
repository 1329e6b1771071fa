"""The recorder's account of itself: what it wrote, what it dropped, and its faults."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

from watchstep.errors import RecordingEndedError
from watchstep.platform.program_errors import is_of_program
from watchstep.platform.terminal_text import printable

_log = logging.getLogger("watchstep")
_MAX_KINDS = 32
EVALUATION = "evaluation"
"""Name of the note that the service evaluates nothing of the run."""
_LOGGED_NOTES = frozenset({"collections", "trainings", EVALUATION})
"""Notes about a faulty configuration, a model that is not recorded, or a missing evaluation. They are also logged, once each, because nobody looks for them in health."""


class RecorderHealth:
    """Counters of one recorder. Thread-safe; nothing here raises an error of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may close the hook
        self._counts: dict[str, int] = {}
        self._faults: dict[str, str] = {}
        self._logged: set[str] = set()
        self._expected: dict[str, Callable[[BaseException], bool]] = {}
        self._notes: dict[str, str] = {}
        self._logged_notes: set[str] = set()
        self._warned: set[str] = set()
        self._accounts: dict[str, Callable[[], dict[str, Any]]] = {}

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + by

    def reached(self, name: str, value: int) -> None:
        """Keep the largest value of a bounded quantity."""
        with self._lock:
            self._counts[name] = max(self._counts.get(name, 0), value)

    def fault(self, where: str, error: BaseException) -> None:
        """Count a fault of the recorder. Each kind is logged once, unless it is expected. Writes of an ended recording are no fault.

        Raises:
            BaseException: ``error``, if it is being handled and is the program's: of a signal handler, or of the function of a stop.
        """
        if sys.exc_info()[1] is error and is_of_program(error):
            raise error
        self.contain(where, error)

    def contain(self, where: str, error: BaseException) -> None:
        """Count a fault as `fault` does, whoever has raised it."""
        if isinstance(error, RecordingEndedError):
            return
        text = printable(f"{type(error).__name__}: {error}".split("\n", 1)[0][:300])
        with self._lock:
            self._counts["faults"] = self._counts.get("faults", 0) + 1
            has_room = where in self._faults or len(self._faults) < _MAX_KINDS
            expected = where in self._expected and self._expected[where](error)
            new = has_room and not expected and where not in self._logged
            if new:
                self._logged.add(where)
            if new or (has_room and where not in self._faults):
                self._faults[where] = text
        if new:
            _log.warning(
                "watchstep: %s: %s. Training continues; further faults of this kind are counted.", where, text
            )

    def expect(self, where: str, is_expected: Callable[[BaseException], bool]) -> None:
        """Expect faults that the user already knows: they are counted, but not logged again."""
        with self._lock:
            self._expected[where] = is_expected

    def unexpect(self, where: str) -> None:
        """End `expect`: the next fault is logged."""
        with self._lock:
            self._expected.pop(where, None)

    def note(self, name: str, text: str) -> None:
        """Add a note about the recording, e.g. that activations are not observed, and why. A note about the configuration is logged once."""
        with self._lock:
            self._notes[name] = text
            is_logged = name in _LOGGED_NOTES and name not in self._logged_notes
            if is_logged:
                self._logged_notes.add(name)
        if is_logged:
            _log.warning("watchstep: %s: %s", name, printable(text))

    def warn(self, name: str, text: str) -> None:
        """Add a note that the user must learn while the program runs, e.g. that NaN stops nothing. Each text is logged, once."""
        self.note(name, text)
        with self._lock:
            is_logged = text not in self._warned and len(self._warned) < _MAX_KINDS
            if is_logged:
                self._warned.add(text)
        if is_logged:
            _log.warning("watchstep: %s", printable(text))

    def withdraw(self, name: str) -> None:
        """Remove a note that no longer applies."""
        with self._lock:
            self._notes.pop(name, None)

    def account(self, name: str, source: Callable[[], dict[str, Any]]) -> None:
        """Add an external source of JSON-ready data, which is called on any thread."""
        with self._lock:
            self._accounts[name] = source

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        with self._lock:
            accounts = {name: source() for name, source in self._accounts.items()}
        return {**self.counted(), **accounts}

    def counted(self) -> dict[str, Any]:
        """A JSON-ready copy without external sources."""
        with self._lock:
            return {"counts": dict(self._counts), "faults": dict(self._faults), "notes": dict(self._notes)}
