"""Rate limits: requests of a token, and failures of an address to present a valid one.

Limits keep the service responsive; they never decide whether something is lost. If their storage does not answer, requests
pass, which is logged and counted. Requests that passed are counted locally until the storage has them. Recorders have a
limit of their own, far above what training needs: what it refuses is a hint, which the sweep does not depend on.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.errors import StorageError
from limits.storage import MemoryStorage, Storage
from limits.strategies import SlidingWindowCounterRateLimiter

from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.auth.tokens import AuthenticatedCaller, Permission, digest_of
from watchstep_services.core.settings import Settings
from watchstep_services.core.telemetry import metrics

_EVERY_SECONDS = 1.0
_MOST_KEPT = 10_000


@dataclass
class _Count:
    """Of one caller.

    Attributes:
        waiting: requests that the storage has not heard of.
        told: when it last heard of some.
        exact_until: until then it hears of each.
    """

    waiting: int = 0
    told: float = -math.inf
    exact_until: float = -math.inf


class Tally:
    """Counts of callers. Thread-safe.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: OrderedDict[tuple[str, str], _Count] = OrderedDict()
        self._lock = threading.Lock()

    def spared(self, who: tuple[str, str], most: int) -> bool:
        """Count one, unless the storage is to hear of it.

        Args:
            who: asks.
            most: so many may wait.
        """
        with self._lock:
            held = self._counts.get(who)
            now = self._clock()
            if (
                held is None
                or held.waiting + 1 >= most
                or now - held.told >= _EVERY_SECONDS
                or now < held.exact_until
            ):
                return False
            held.waiting += 1
            return True

    def taken(self, who: tuple[str, str]) -> int:
        """How many have waited, beside the one that is told now."""
        with self._lock:
            held = self._counts.setdefault(who, _Count())
            self._counts.move_to_end(who)
            while len(self._counts) > _MOST_KEPT:
                self._counts.popitem(last=False)
            waited, held.waiting, held.told = held.waiting, 0, self._clock()
            return waited

    def refused(self, who: tuple[str, str], seconds: float) -> None:
        """For so long each request is told."""
        with self._lock:
            self._counts.setdefault(who, _Count()).exact_until = self._clock() + seconds


_KEPT_SECONDS = 600.0
_PAUSE_SECONDS = 5.0
_ANSWER_SECONDS = 0.25
_NAMESPACE = "watchstep"
_BATCHES = 600
"""Of a limit, so many parts: up to one of them, and for up to a second, is counted in memory before the storage hears of it."""

_EXACT_SECONDS = 60.0
_log = logging.getLogger(__name__)


class TooOftenError(RequestRefusedError):
    """A request that came too soon.

    Args:
        seconds: after which it may come again.
        what: who asks too often.
        hint: what to do about it.
    """

    def __init__(self, seconds: int, what: str, hint: str) -> None:
        super().__init__(429, what, hint, {"retry-after": str(seconds)})


class RateLimits:
    """The limits of one service; the same for all of its processes where they share a storage. Thread-safe.

    Args:
        settings: how much is allowed.
        storage: where it is counted.
        clock: seconds, for what this process remembers by itself.
    """

    def __init__(
        self, settings: Settings, storage: Storage, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limiter = SlidingWindowCounterRateLimiter(storage)
        self._clock = clock
        self._asking = _per_minute(settings.requests_per_minute)
        self._recording = _per_minute(settings.recordings_per_minute)
        self._failing = _per_minute(settings.failures_per_minute)
        self._silent_until = -math.inf
        self._tally = Tally(clock)
        self._known: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def spared(self, identity: AuthenticatedCaller, permission: Permission | None) -> bool:
        """Count a request of a token in memory alone; False where the storage has to be asked: `take` does that."""
        item, kind = self._of(permission)
        return item is None or self._tally.spared((kind, identity.token), item.amount // _BATCHES)

    def take(self, identity: AuthenticatedCaller, permission: Permission | None) -> None:
        """Count a request of a token, and those that were counted in memory before it.

        Raises:
            TooOftenError: it was one too many.
        """
        item, kind = self._of(permission)
        recording = kind == "record"
        wait = self._hit(item, kind, identity.token, cost=1 + self._tally.taken((kind, identity.token)))
        if wait:
            self._tally.refused((kind, identity.token), _EXACT_SECONDS)
        if wait and recording:
            raise TooOftenError(
                wait,
                f"token {identity.token}: more than {_amount(item)} recordings in a minute",
                f"nothing is lost: what lies on the store is found without being announced; announce again in {wait} s",
            )
        if wait:
            raise TooOftenError(
                wait,
                f"token {identity.token}: more than {_amount(item)} requests in a minute",
                f"ask again in {wait} s; WATCHSTEP_REQUESTS_PER_MINUTE sets the limit",
            )

    def check_address(self, address: str, token: str) -> None:
        """Refuse an address that has failed too often to show a token, unless it shows one that was good lately.

        Whoever shares the address with a wrong token goes on, and nobody goes on guessing.

        Raises:
            TooOftenError: it has.
        """
        if self._failing is None or self._was_good(token):
            return
        wait = self._wait(self._failing, "fail", network_of(address))
        if wait:
            metrics.LIMITS_REFUSED.labels("fail").inc()
            raise self._locked_out(address, wait)

    def note_failure(self, address: str) -> None:
        """Count a request without a good token.

        Raises:
            TooOftenError: it was one too many.
        """
        wait = self._hit(self._failing, "fail", network_of(address))
        if wait:
            raise self._locked_out(address, wait)

    def note_open(self, address: str) -> None:
        """Count a request that needs no token.

        Raises:
            TooOftenError: it was one too many.
        """
        wait = self._hit(self._failing, "open", network_of(address))
        if wait:
            raise TooOftenError(
                wait,
                f"address {address}: more than {_amount(self._failing)} requests for the API's document in a minute",
                f"ask again in {wait} s; WATCHSTEP_FAILURES_PER_MINUTE sets the limit",
            )

    def note_success(self, token: str) -> None:
        """Remember a good token for a while; not the token itself, but its hash."""
        with self._lock:
            self._known.pop(digest_of(token), None)
            self._known[digest_of(token)] = self._clock() + _KEPT_SECONDS
            while len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)

    def _was_good(self, token: str) -> bool:
        with self._lock:
            return self._known.get(digest_of(token), -math.inf) > self._clock()

    def _of(self, permission: Permission | None) -> tuple[RateLimitItem | None, str]:
        return (self._recording, "record") if permission == "record" else (self._asking, "ask")

    def _locked_out(self, address: str, wait: int) -> TooOftenError:
        return TooOftenError(
            wait,
            f"address {address}: more than {_amount(self._failing)} requests without a valid token in a minute",
            f"ask again in {wait} s, with a valid token",
        )

    def _hit(self, item: RateLimitItem | None, *names: str, cost: int = 1) -> int:
        """Count; seconds to wait where it was one too many, else 0."""
        if item is None or self._tried(lambda: self._limiter.hit(item, *names, cost=cost), True):
            return 0
        metrics.LIMITS_REFUSED.labels(names[0]).inc()
        return self._seconds(item, *names)

    def _wait(self, item: RateLimitItem, *names: str) -> int:
        """As `_hit`, without counting."""
        return (
            0 if self._tried(lambda: self._limiter.test(item, *names), True) else self._seconds(item, *names)
        )

    def _seconds(self, item: RateLimitItem, *names: str) -> int:
        reset = self._tried(lambda: self._limiter.get_window_stats(item, *names).reset_time, 0.0)
        wait = reset - time.time()
        return min(60, max(1, math.ceil(wait))) if math.isfinite(wait) else 1

    def _tried(self, ask: Callable[[], Any], otherwise: Any) -> Any:
        """What the storage says; where it does not answer, something else, and it is left alone for some seconds."""
        if self._clock() < self._silent_until:
            metrics.LIMITS_OPEN.inc()
            return otherwise
        try:
            return ask()
        except StorageError as error:
            self._silent_until = self._clock() + _PAUSE_SECONDS
            metrics.LIMITS_OPEN.inc()
            _log.warning(
                "rate limits: their storage does not answer (%s); requests go through uncounted",
                type(error.storage_error).__name__,
            )
            return otherwise


def rate_limits(settings: Settings) -> RateLimits:
    """The limits as set, counted in Redis where there is one, so that all processes count together."""
    url = settings.broker_url.get_secret_value()
    return RateLimits(settings, redis_storage(url) if url else MemoryStorage(wrap_exceptions=True))


def redis_storage(url: str) -> Storage:
    """Redis, which gets a fraction of a second to answer. Nothing is asked of it yet."""
    from limits.storage import RedisStorage
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {
        "socket_timeout": _ANSWER_SECONDS,
        "socket_connect_timeout": _ANSWER_SECONDS,
        "retry": Retry(NoBackoff(), 1),
    }
    return RedisStorage(url, key_prefix=_NAMESPACE, wrap_exceptions=True, **options)


def _per_minute(amount: int) -> RateLimitItem | None:
    return RateLimitItemPerMinute(amount, namespace=_NAMESPACE) if amount else None


def _amount(item: RateLimitItem | None) -> int:
    return 0 if item is None else item.amount


def network_of(address: str) -> str:
    """Who is counted as one: an IPv4 address, or the network of an IPv6 one, for whoever has one has 2^64."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)
    return str(parsed)
