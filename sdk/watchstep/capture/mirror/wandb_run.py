"""A run of Weights & Biases.

**Rows.** W&B gives each row of a run's history a step of its own, which only increases: a row that a program logs with a smaller ``step`` than the last one is
dropped. Rows of the mirror would therefore cost rows of the program. Mirrored values are added to the row that the program has not committed yet
(``commit=False``), with their step as ``watchstep/step``, which is the horizontal axis of all mirrored values. A row has one such step. If several steps are
waiting for the same row, the newest one is written, unless an earlier one has values that the newer ones do not have. A value is never shown at another step.

With ``wandb:rows`` each step is a row of its own. It is meant for programs that log without ``step=``, or nothing at all.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from watchstep.capture.mirror.mirrored_run import PREFIX, AlertChange, MirroredPoint, OtherRun, RunLinks

_STEP = f"{PREFIX}/step"
_MAX_WAITING = 1024
_MAX_TITLE = 63
_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}


class WandbRun:
    """The program's active run, ``wandb.run``.

    Attributes:
        thinned: number of points that were not written, because a newer one was written to the same row.
        merged: number of points that became part of a waiting one.
    """

    def __init__(self, run: Any, *, has_own_rows: bool = False) -> None:
        """Define the axis of mirrored values.

        Args:
            run: a ``wandb.Run``.
            has_own_rows: whether each point is a row of its own.
        """
        self._run = run
        self._has_own_rows = has_own_rows
        self._waiting: deque[MirroredPoint] = deque()
        self._row = -1
        self._names: frozenset[str] = frozenset()
        self.merged = self.thinned = 0
        run.define_metric(_STEP, hidden=True)
        run.define_metric(f"{PREFIX}/*", step_metric=_STEP)

    @property
    def identity(self) -> OtherRun:
        """Its path ``entity/project/id``, its URL, and its folder if it is offline."""
        is_offline = bool(getattr(self._run, "offline", False))
        return OtherRun(
            str(self._run.path),
            "" if is_offline else str(self._run.url or ""),
            str(self._run.dir) if is_offline else "",
        )

    @property
    def is_over(self) -> bool:
        """Whether the program has finished the run: W&B then has another active one, or none."""
        return getattr(sys.modules.get("wandb"), "run", None) is not self._run

    def link(self, links: RunLinks) -> None:
        """Add the links to the run's config, as ``watchstep``."""
        self._run.config.update({PREFIX: links.as_data()}, allow_val_change=True)

    def alert(self, change: AlertChange) -> None:
        """Send an alert of W&B for an alert that fires, and set the summary ``watchstep/alert/<name>`` to the last change."""
        self._run.summary[f"{PREFIX}/alert/{change.name}"] = change.text
        if change.phase == "firing":
            level = _LEVELS.get(change.severity, "WARN")
            title = f"Watchstep: {change.name}"[:_MAX_TITLE]
            self._run.alert(title=title, text=change.text, level=level, wait_duration=0)

    def write(self, points: Sequence[MirroredPoint]) -> int:
        """Write to the current row at most once, or each point to a row of its own."""
        if self._has_own_rows:
            for point in points:
                self._run.log({**point.values, _STEP: point.step})
            return 0
        for point in points:
            self._add(point)
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.popleft()
            self.thinned += 1
        if self._waiting:
            self._write_to_row(self._run.step)
        return len(self._waiting)

    def close(self, *, is_stopped: bool) -> int:
        """Write to the current row once more, or all waiting points after a stop; W&B commits the last row when the run is finished."""
        if is_stopped and not self._has_own_rows:
            row = self._run.step
            while self._waiting:
                row += 1
                point = self._waiting.popleft()
                self._run.log({**point.values, _STEP: point.step}, step=row)
        return self.write(())

    def _add(self, point: MirroredPoint) -> None:
        """Add a point, to the waiting one of the same step if there is one: an alert arrives after the values of its step."""
        for index in range(len(self._waiting) - 1, -1, -1):
            waiting = self._waiting[index]
            if waiting.step == point.step:
                self._waiting[index] = replace(waiting, values={**waiting.values, **point.values})
                self.merged += 1
                return
        self._waiting.append(point)

    def _write_to_row(self, row: int) -> None:
        is_free = row != self._row
        point = self._take(frozenset() if is_free else self._names)
        if point is None:
            return
        self._run.log({**point.values, _STEP: point.step}, commit=False)
        # The program may have committed the row meanwhile: the values are then in a later one, at most in the current one.
        self._row, self._names = self._run.step, frozenset(point.values)

    def _take(self, names: frozenset[str]) -> MirroredPoint | None:
        """Take the newest point that may replace values of these names, and drop the older ones whose names it has.

        Returns:
            The point; None if none of the waiting ones has all names.
        """
        best = None
        for index, point in enumerate(self._waiting):
            if not names <= point.values.keys():
                if any(name not in names for name in point.values):
                    break  # it has values of its own, which must not be lost: it waits for a row
                continue
            names = frozenset(point.values)
            best = index
        if best is None:
            return None
        for _ in range(best):
            self._waiting.popleft()
        self.thinned += best
        return self._waiting.popleft()
