"""How long a recorder leaves a service alone that has refused it: addresses that go on asking are refused for longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 30.0
_ASKED_IN_VAIN = frozenset((HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS))


class ServicePause:
    """The pause after a refusal: what the service asks for, or else longer from refusal to refusal, 30 s at the most.

    Args:
        clock: seconds, growing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._next = _FIRST_SECONDS

    @property
    def goes_on(self) -> bool:
        """Whether the service should not be asked yet."""
        return self._clock() < self._until

    def refused(self, status: int, after: float | None) -> None:
        """The service refused.

        Args:
            status: HTTP's. Only 401, 403 and 429 speak of who asks; any other makes a pause where the service names one.
            after: the seconds that it named, if it did.
        """
        if after is None and status not in _ASKED_IN_VAIN:
            return
        self._until = self._clock() + min(_LONGEST_SECONDS, max(after or 0.0, self._next))
        self._next = min(_LONGEST_SECONDS, 2 * self._next)

    def answered(self) -> None:
        """The service took what it was told."""
        self._until, self._next = float("-inf"), _FIRST_SECONDS

    def hurry(self) -> None:
        """The process is about to end: the service is asked once more at once."""
        self._until = float("-inf")
