"""Which workers recorded which steps: complete and incomplete steps, passed steps, and the numbers of evaluations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from operator import index as whole
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import ENDS
from watchstep.format.tensors import Mode, mode_index
from watchstep.reading.columns import NO_CUT, Selection
from watchstep.reading.index import RunIndex
from watchstep.reading.run_documents import END, read_documents
from watchstep.store.store import Store

StepState = Literal["complete", "incomplete", "missing", "pending"]


def checked_step(step: Any) -> int:
    """Return a step that a caller passes.

    Raises:
        ConfigError: it is not a whole number.
    """
    try:
        return whole(step)
    except TypeError:
        raise ConfigError(
            f"step {step!r} is not a whole number", "use a step of Run.steps() or Tensor.saved_steps()"
        ) from None


_COPIES = 2
"""How often the steps are in memory at the end: of each object and of all."""


def recorded_steps(index: RunIndex) -> NDArray[np.int64]:
    """Return distinct (step, mode, worker) of the default view, shape (n, 3), ascending.

    Raises:
        StoreError: the store cannot be read.
        OverBudgetError: the index's budget is exceeded.
    """
    parts = [np.empty((0, 3), np.int64)]
    for columns in index.scan(Selection(())):
        part = np.stack([columns["step"], columns["mode"], columns["worker"]], axis=1).astype(np.int64)
        parts.append(_distinct(part))
        if index.budget is not None:
            index.budget.keep(_COPIES * parts[-1].nbytes)
    return _distinct(np.concatenate(parts))


def _distinct(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return distinct rows, ascending. NumPy's own `unique` of rows compares them as bytes, which takes several times as long."""
    rows = _without_repetitions(rows)  # rows of a segment are in the order of their steps
    return _without_repetitions(rows[np.lexsort(rows.T[::-1])])


def _without_repetitions(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows that differ from the one before."""
    changes = np.ones(len(rows), np.bool_)
    changes[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return rows[changes]


def last_steps(store: Store, attempt: str) -> dict[int, int]:
    """Return the last step of each worker of an attempt that has ended.

    Raises:
        StoreError: the store cannot be read.
    """
    ends = read_documents(store, END, f"{ENDS}{attempt}/").documents
    return {end.worker: end.last_step for end in ends}


class StepRecords:
    """The recorded steps of a run, by attempt.

    The workers that record in a mode are those with records in this mode in the attempt of a step. A worker that has ended is not
    expected at later steps.

    Args:
        seen: (step, mode, worker) of rows and of saved objects, of all steps; shape (n, 3).
        first_steps: attempt → its first step, oldest first.
        ends: returns the result of `last_steps`.
    """

    def __init__(
        self,
        seen: NDArray[np.int64],
        first_steps: Mapping[str, int],
        ends: Callable[[str], Mapping[int, int]],
    ) -> None:
        self._seen = seen
        self._ends = ends
        starts: list[tuple[int, str]] = []
        cut = NO_CUT
        for attempt, first in reversed(list(first_steps.items())):
            if first < cut:
                starts.insert(0, (first, attempt))
                cut = first
        self._starts = starts

    def steps(self, mode: Mode | None) -> list[int]:
        """Return the steps with records, ascending."""
        return [int(step) for step in np.unique(self._of_mode(mode)[:, 0])]

    def complete(self, mode: Mode | None) -> list[int]:
        """Return the steps with records of all workers that record, ascending.

        Raises:
            StoreError: the store cannot be read.
        """
        chosen = np.unique(self._of_mode(mode)[:, [0, 2]], axis=0)
        complete: list[int] = []
        for position, (_, attempt) in enumerate(self._starts):
            first, end = self._bounds(position)
            rows = chosen[(chosen[:, 0] >= first) & (chosen[:, 0] < end)]
            steps, counts = np.unique(rows[:, 0], return_counts=True)
            workers = np.unique(rows[:, 1])
            if (counts < len(workers)).any():
                ends = self._ends(attempt)
                last = np.sort([ends.get(int(worker), NO_CUT) for worker in workers])
                # A worker that ended before a step is not expected; of those that remain, none may be absent.
                expected = len(workers) - np.searchsorted(last, steps)
                ended = np.array([ends.get(int(worker), NO_CUT) for worker in rows[:, 1]], np.int64)
                in_time = rows[ended >= rows[:, 0], 0]
                counts = np.searchsorted(in_time, steps, "right") - np.searchsorted(in_time, steps)
                steps = steps[counts >= expected]
            complete.extend(int(step) for step in steps)
        return complete

    def has_passed(self, step: int, mode: Mode | None) -> bool:
        """Implement `watchstep.Run.has_passed_step`."""
        of_mode = self._of_mode(mode)
        if not self._starts:
            return False
        first, attempt = self._starts[-1]
        if step < first:
            return True
        newest = self._seen[self._seen[:, 0] >= first]
        workers = {int(worker) for worker in np.unique(newest[:, 2])}
        of_mode = of_mode[of_mode[:, 0] >= first]
        passed = newest[newest[:, 0] > step, 2].tolist() + of_mode[of_mode[:, 0] == step, 2].tolist()
        behind = workers - set(passed)
        if mode is not None and self.workers_at(step, mode):
            behind &= self._recording(step, mode)
        return not behind or behind <= self._ends(attempt).keys()

    def state(self, step: int, mode: Mode | None) -> StepState:
        """Implement `watchstep.Run.step_state`."""
        present = self.workers_at(step, mode)
        if not present:
            return "missing" if self.has_passed(step, mode) else "pending"
        absent = self._recording(step, mode) - present
        if absent:
            ends = self._ends(self._attempt_of(step))
            absent = {worker for worker in absent if ends.get(worker, NO_CUT) >= step}
        return "incomplete" if absent else "complete"

    def workers_at(self, step: int, mode: Mode | None) -> set[int]:
        """Return the workers with records at a step."""
        rows = self._of_mode(mode)
        return {int(worker) for worker in rows[rows[:, 0] == step, 2]}

    def _recording(self, step: int, mode: Mode | None) -> set[int]:
        """Return the workers with records of a mode in the attempt of a step."""
        first, end = self._bounds(self._position(step))
        rows = self._of_mode(mode)
        return {int(worker) for worker in np.unique(rows[(rows[:, 0] >= first) & (rows[:, 0] < end), 2])}

    def _attempt_of(self, step: int) -> str:
        return self._starts[self._position(step)][1]

    def _bounds(self, position: int) -> tuple[int, int]:
        """Return the first step of an attempt in the default view, and the step behind its last."""
        first = self._starts[position][0] if position else 0
        return first, self._starts[position + 1][0] if position + 1 < len(self._starts) else NO_CUT

    def _position(self, step: int) -> int:
        return max(0, bisect_right([first for first, _ in self._starts], step) - 1)

    def _of_mode(self, mode: Mode | None) -> NDArray[np.int64]:
        return self._seen if mode is None else self._seen[self._seen[:, 1] == mode_index(mode)]


def mode_step(records: StepRecords, step: int, mode: Mode) -> int:
    """Implement `watchstep.Run.mode_step`."""
    mode_index(mode)  # raises if it is unknown
    if mode in {"train", "global"}:
        return step
    steps = records.steps(mode)
    position = bisect_right(steps, step) - 1
    if position < 0 or steps[position] != step:
        raise NotFoundError(
            f"step {step}: nothing was recorded in mode {mode}",
            "use a step of Run.steps() or Tensor.saved_steps() in this mode",
        )
    return position


def global_step(records: StepRecords, number: int, mode: Mode) -> int:
    """Implement `watchstep.Run.global_step`."""
    mode_index(mode)
    if mode in {"train", "global"}:
        return number
    steps = records.steps(mode)
    if not 0 <= number < len(steps):
        raise NotFoundError(
            f"mode {mode} has no pass {number}: {len(steps)} were recorded",
            "use a lower number; the first is 0",
        )
    return steps[number]
