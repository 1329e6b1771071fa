"""A guard inside the training process: it is shown the rows of each step at once, and may stop the training.

Without one nothing here runs. With one, what is measured is waited for on the training thread: on a device that is a
synchronisation in each step that measures something.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from watchstep.block import Block
from watchstep.capture.health import Health
from watchstep.capture.record import Record, join
from watchstep.control import StopRequest
from watchstep.kernels.ready import Ready
from watchstep.statistics import Floats


class StepGuard(Protocol):
    """Judges steps as they come; on the training thread."""

    def before_update(self, rows: Block) -> str:
        """What was measured of a step so far, whose update comes next: why the training shall stop here, or nothing."""
        ...

    def after_step(self, step: int, rows: Block) -> str:
        """All rows of a step that is over: why the training shall stop, or nothing."""
        ...

    def end(self) -> str:
        """No step comes any more; there is nothing left to stop."""
        ...

    def as_data(self) -> dict[str, Any]:
        """What it has found, and what it cost, for the hook's health."""
        ...


@dataclass(frozen=True)
class _Figures:
    """Probes that are at hand."""

    columns: dict[str, Floats]

    def collect(self) -> dict[str, Floats]:
        return self.columns


class Guarding:
    """Shows a guard what a recorder has, and keeps what it asked for."""

    def __init__(self, guard: StepGuard, health: Health, *, agrees: bool = False) -> None:
        """Begin.

        Args:
            guard: judges.
            health: is told of faults; they never reach the training.
            agrees: whether it may only wish to stop, and all ranks decide together before each update.
        """
        self._guard = guard
        self._health = health
        self._agrees = agrees
        self._reason = ""
        self.ended = False
        self.seconds = 0.0

    def before_update(self, records: list[Record]) -> str:
        """Why the training shall stop before the update that comes next, or nothing; where ranks agree that is a `wish`.

        Args:
            records: of the step so far, as `at_hand` gives them.
        """
        self._reason = self._reason or self._asked(lambda: self._guard.before_update(join(records)))
        return self.stop()

    def after_step(self, step: int, records: list[Record]) -> None:
        """A step is over; what the guard wants is told by `stop`, or by `wish` where ranks agree."""
        found = self._asked(lambda: self._guard.after_step(step, join(records)))
        self._reason = self._reason or found

    def stop(self) -> str:
        """Why the training shall stop now, or nothing; nothing where ranks agree."""
        return "" if self._agrees else self._reason

    def wish(self) -> str | None:
        """Why this rank wants all to stop, or nothing; None once no step comes any more."""
        return None if self.ended else self._reason

    def end(self) -> None:
        """No step comes any more."""
        self.ended = True
        self._asked(self._guard.end)

    def as_data(self) -> dict[str, Any]:
        """For the hook's health."""
        return {**self._guard.as_data(), "seconds": round(self.seconds, 6)}

    def at_hand(self, records: list[Record]) -> list[Record]:
        """The same records, of which nothing is on its way any more; without those whose condition does not hold.

        Where that fails they are as they were.
        """
        since = time.perf_counter()
        try:
            return [
                record if _is_at_hand(record) else _waited_for(record)
                for record in records
                if record.condition is None or record.condition.holds()
            ]
        except Exception as error:  # noqa: BLE001 - what cannot be had now is the writer's to tell
            self._health.fault("guard", error)
            return records
        finally:
            self.seconds += time.perf_counter() - since

    def _asked(self, ask: Callable[[], str]) -> str:
        since = time.perf_counter()
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - a guard's own faults stop nothing
            self._health.fault("guard", error)
            return ""
        finally:
            self.seconds += time.perf_counter() - since


def request(reason: str, step: int) -> StopRequest:
    """What a stop by a guard is told as."""
    return StopRequest(attempt="", step=step, reason=reason)


def _waited_for(record: Record) -> Record:
    return replace(
        record,
        measurement=Ready(record.measurement.collect()),
        probes=tuple(_Figures(probe.collect()) for probe in record.probes),
        condition=None,
    )


def _is_at_hand(record: Record) -> bool:
    known = isinstance(record.measurement, Ready) and record.condition is None
    return known and all(isinstance(probe, _Figures) for probe in record.probes)
