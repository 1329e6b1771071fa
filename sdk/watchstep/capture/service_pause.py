"""How long a recorder leaves a service alone that refuses or does not answer, so that it can recover, and refuses no longer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from watchstep.errors import ServiceError
from watchstep.transport import LONGEST_RETRY_AFTER, RefusedError

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 30.0
_PAUSED = frozenset((401, 403, 429, 502, 503, 504))
_random = random.SystemRandom()  # the program's own generator stays as it is


def _jitter() -> float:
    return _random.uniform(0.0, 0.25)


class ServicePause:
    """The pause after a failure: what the service asks for, or else longer from failure to failure, 30 s at the most.

    Each is up to a quarter longer, at random: recorders that failed together must not return together.

    Args:
        clock: seconds, growing.
        jitter: the share that is added.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = _jitter
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._until = float("-inf")
        self._next = _FIRST_SECONDS

    @property
    def goes_on(self) -> bool:
        """Whether the service should not be asked yet."""
        return self._clock() < self._until

    @property
    def left(self) -> float:
        """Seconds until it may be asked."""
        return max(0.0, self._until - self._clock())

    def failed(self, error: ServiceError) -> None:
        """The service refused, did not answer, or with something else.

        Of refusals, 401, 403 and 429 are about the caller, and 502 to 504 about a service that is starting; any other makes a
        pause only if the answer names one.
        """
        after = error.after_seconds if isinstance(error, RefusedError) else None
        if isinstance(error, RefusedError) and after is None and error.status not in _PAUSED:
            return
        pause = self._next if after is None else max(self._next, min(LONGEST_RETRY_AFTER, after))
        self._until = self._clock() + pause * (1.0 + self._jitter())
        self._next = min(_LONGEST_SECONDS, 2 * self._next)

    def answered(self) -> None:
        """The service took what it was told."""
        self._until, self._next = float("-inf"), _FIRST_SECONDS

    def hurry(self) -> None:
        """The process is about to end: the service is asked once more at once."""
        self._until = float("-inf")
