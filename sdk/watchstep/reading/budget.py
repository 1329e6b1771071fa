"""What one question to a run may take, where many ask and none may starve the others: seconds, and bytes that are kept."""

from __future__ import annotations

import time

from watchstep.errors import WatchstepError

_MEGABYTE = 1024 * 1024


class OverBudgetError(WatchstepError):
    """A question took more than it may; what was found of the run's objects until then is not read again."""


class ReadBudget:
    """A budget of one question; begins when it is made. Looked at between objects, each of which is bounded by itself.

    Args:
        seconds: from now on.
        megabytes: of columns that are held at once.
    """

    def __init__(self, seconds: float, megabytes: float) -> None:
        self._seconds, self._megabytes = seconds, megabytes
        self._deadline = time.monotonic() + seconds
        self._left = megabytes * _MEGABYTE

    def check(self) -> None:
        """See to the time.

        Raises:
            OverBudgetError: it is up.
        """
        if time.monotonic() > self._deadline:
            raise OverBudgetError(
                f"the question took more than {self._seconds:g} s",
                "ask for fewer tensors or steps; a run that is compacted answers sooner (watchstep runs compact)",
            )

    def keep(self, size: int) -> None:
        """Account for bytes that stay until the answer.

        Raises:
            OverBudgetError: they are too many, or the time is up.
        """
        self._left -= size
        if self._left < 0:
            raise OverBudgetError(
                f"the question needs more than {self._megabytes:g} MiB",
                "ask for fewer tensors, workers or steps",
            )
        self.check()

    @property
    def left_seconds(self) -> float:
        """Seconds that are left; 0 where none are."""
        return max(0.0, self._deadline - time.monotonic())
