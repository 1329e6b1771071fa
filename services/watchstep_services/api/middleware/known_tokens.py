"""Tokens that were looked up a moment ago: a recorder that announces each second is not looked up each second.

What is remembered is the hash of a token and whose it is, for `KEPT_SECONDS`: so long a token may go on in other processes
after it was revoked or has ended. The process that revokes it forgets it at once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from watchstep_services.auth.roles import AuthenticatedCaller
from watchstep_services.auth.tokens import digest_of

KEPT_SECONDS = 5.0
_MOST_KEPT = 10_000


class KnownTokens:
    """Identities by the hash of their token. Thread-safe.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: OrderedDict[str, tuple[AuthenticatedCaller, float]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, token: str) -> AuthenticatedCaller | None:
        """Whose token it is; None where that has to be looked up."""
        with self._lock:
            held = self._held.get(digest_of(token))
        return None if held is None or held[1] <= self._clock() else held[0]

    def keep(self, token: str, identity: AuthenticatedCaller, since: float) -> None:
        """Remember a token that was good.

        Args:
            token: as it was shown.
            identity: whose it is.
            since: by the clock, before it was looked up.
        """
        digest = digest_of(token)
        with self._lock:
            self._held.pop(digest, None)
            self._held[digest] = identity, since + KEPT_SECONDS
            while len(self._held) > _MOST_KEPT:
                self._held.popitem(last=False)

    def now(self) -> float:
        """By the clock."""
        return self._clock()

    def forget(self, public: str) -> None:
        """A token is good no more.

        Args:
            public: its id.
        """
        with self._lock:
            for digest in [
                digest for digest, (identity, _) in self._held.items() if identity.token == public
            ]:
                del self._held[digest]
