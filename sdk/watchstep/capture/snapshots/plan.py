"""At which steps full tensors are taken, and why."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from watchstep.capture.config import Snapshots

Reason = Literal["cadence", "gate", "request", "program"]

MOST_BY_GATE = 2
"""Snapshots that the gate takes in one attempt: the first bad step of a run of bad steps, twice."""


@dataclass(frozen=True)
class Occasion:
    """Why a snapshot is taken.

    Attributes:
        reason: the cadence, the gate, a request of the control document, or the program's own.
        requests: ids of the requests that it answers.
    """

    reason: Reason
    requests: tuple[str, ...] = ()


class SnapshotPlan:
    """Asked once for each step that is updated. On the training thread, but for `request`."""

    def __init__(self, config: Snapshots) -> None:
        self._config = config
        self._lock = threading.RLock()  # a signal's handler may come back in
        self._seen: set[str] = set()
        self._requests: dict[str, int] = {}
        self._asked = False
        self._bad_step = -2
        self._gate_step = -1
        self._by_gate = 0
        self._taken = -1

    def ask(self) -> None:
        """The program wants the next step that is updated."""
        self._asked = True

    def request(self, name: str, step: int) -> bool:
        """A request of the control document; False where its id was seen before. From any thread."""
        with self._lock:
            if name in self._seen:
                return False
            self._seen.add(name)
            self._requests[name] = step
            return True

    def bad(self, step: int) -> bool:
        """This step holds NaN or infinity; whether it is the first of one of the first runs of such steps."""
        first = step not in {self._bad_step, self._bad_step + 1}
        self._bad_step = step
        if not first or self._by_gate >= MOST_BY_GATE:
            return False
        self._by_gate += 1
        if self._config.at_gate:
            self._gate_step = step
        return True

    def due(self, step: int) -> Occasion | None:
        """Why a snapshot is to be taken at this step; None where none is, or one was taken of it.

        Of several reasons the rarer one counts: the gate, a request, the program, the cadence.
        """
        if step == self._taken:
            return None
        occasion = self._occasion(step)
        if occasion is not None:
            self._taken = step
        return occasion

    def _occasion(self, step: int) -> Occasion | None:
        answered = self._due_requests(step) if self._requests else ()
        asked, self._asked = self._asked, False
        if step == self._gate_step:
            return Occasion("gate", answered)
        if answered:
            return Occasion("request", answered)
        if asked:
            return Occasion("program")
        every = self._config.every
        return Occasion("cadence") if every is not None and step % every == 0 else None

    def _due_requests(self, step: int) -> tuple[str, ...]:
        with self._lock:
            due = tuple(name for name, at in self._requests.items() if at <= step)
            for name in due:
                del self._requests[name]
        return due
