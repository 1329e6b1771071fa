"""Rate limits: requests of a token, and requests of an address without a valid token.

Limits keep the service responsive and never cause data loss. If their storage does not respond, requests pass, which is logged and
counted. Requests that passed are counted in memory until they are written to the storage. Recorders have a separate limit, far above
what training needs: a refused announcement is only a hint, on which the sweep does not depend.
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
from watchstep_services.auth import AuthenticatedCaller, Permission, digest_of
from watchstep_services.core.settings import Settings
from watchstep_services.core.telemetry import metrics

_WRITE_SECONDS = 10.0
"""Longer than the interval of recorders, each of which may have a token of its own: a write costs more than the rest of the check."""

_MOST_CALLERS = 10_000


@dataclass
class _Count:
    """Requests of one caller.

    Attributes:
        pending: number of requests that are not written to the storage yet.
        written_at: time of the last write.
        exact_until: time until which each request is written.
    """

    pending: int = 0
    written_at: float = -math.inf
    exact_until: float = -math.inf


class LocalRequestCounter:
    """Requests by caller that are not written to the storage yet. Thread-safe.

    Args:
        clock: clock in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: OrderedDict[tuple[str, str], _Count] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, caller: tuple[str, str], most: int) -> bool:
        """Count a request; False if it must be written to the storage instead.

        Args:
            caller: kind of request, and token.
            most: number of requests that may be pending.
        """
        with self._lock:
            count = self._counts.get(caller)
            now = self._clock()
            if (
                count is None
                or count.pending + 1 >= most
                or now - count.written_at >= _WRITE_SECONDS
                or now < count.exact_until
            ):
                return False
            count.pending += 1
            return True

    def drain(self, caller: tuple[str, str]) -> int:
        """Return the number of pending requests, and reset it."""
        with self._lock:
            count = self._counts.setdefault(caller, _Count())
            self._counts.move_to_end(caller)
            while len(self._counts) > _MOST_CALLERS:
                self._counts.popitem(last=False)
            pending, count.pending, count.written_at = count.pending, 0, self._clock()
            return pending

    def count_exactly(self, caller: tuple[str, str], seconds: float) -> None:
        """Require a write for each request for some seconds."""
        with self._lock:
            self._counts.setdefault(caller, _Count()).exact_until = self._clock() + seconds


_VALID_SECONDS = 600.0
_PAUSE_SECONDS = 5.0
_TIMEOUT_SECONDS = 0.25
_NAMESPACE = "watchstep"
_BATCHES = 600
"""Parts of a limit: up to one part is counted in memory, for up to `_WRITE_SECONDS`, before it is written to the storage."""

_EXACT_SECONDS = 60.0
_log = logging.getLogger(__name__)


class TooOftenError(RequestRefusedError):
    """A request that exceeds a rate limit.

    Args:
        seconds: time after which to repeat the request.
        what: caller and limit.
        hint: how to solve the problem.
    """

    def __init__(self, seconds: int, what: str, hint: str) -> None:
        super().__init__(429, what, hint, {"retry-after": str(seconds)})


class RateLimits:
    """The limits of a service, which processes with the same storage share. Thread-safe.

    Args:
        settings: the limits.
        storage: storage of the counts.
        clock: clock in seconds, for counts in memory.
    """

    def __init__(
        self, settings: Settings, storage: Storage, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limiter = SlidingWindowCounterRateLimiter(storage)
        self._clock = clock
        self._requests = _per_minute(settings.requests_per_minute)
        self._recordings = _per_minute(settings.recordings_per_minute)
        self._failures = _per_minute(settings.failures_per_minute)
        self._paused_until = -math.inf
        self._local_counter = LocalRequestCounter(clock)
        self._valid_until: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def count_locally(self, identity: AuthenticatedCaller, permission: Permission | None) -> bool:
        """Count a request of a token in memory; False if it must be written to the storage, by `take`."""
        item, kind = self._limit_for(permission)
        return item is None or self._local_counter.add((kind, identity.token), item.amount // _BATCHES)

    def take(self, identity: AuthenticatedCaller, permission: Permission | None) -> None:
        """Write a request of a token and its pending ones to the storage.

        Raises:
            TooOftenError: the request exceeds the limit.
        """
        item, kind = self._limit_for(permission)
        recording = kind == "record"
        wait = self._hit(
            item, kind, identity.token, cost=1 + self._local_counter.drain((kind, identity.token))
        )
        if wait:
            self._local_counter.count_exactly((kind, identity.token), _EXACT_SECONDS)
        if wait and recording:
            raise TooOftenError(
                wait,
                f"token {identity.token}: more than {_amount(item)} recordings in a minute",
                f"no data is lost, because the service also lists the store; announce again in {wait} s",
            )
        if wait:
            raise TooOftenError(
                wait,
                f"token {identity.token}: more than {_amount(item)} requests in a minute",
                f"repeat the request in {wait} s; WATCHSTEP_REQUESTS_PER_MINUTE sets the limit",
            )

    def check_address(self, address: str, token: str) -> None:
        """Check the number of requests of an address without a valid token. A recently valid token always passes.

        So clients behind the same address as a wrong token are not affected, but nobody can guess tokens.

        Raises:
            TooOftenError: the address has exceeded the limit.
        """
        if self._failures is None or self._was_valid(token):
            return
        wait = self._wait(self._failures, "fail", network_of(address))
        if wait:
            metrics.LIMITS_REFUSED.labels("fail").inc()
            raise self._locked_out(address, wait)

    def count_failure(self, address: str) -> None:
        """Count a request without a valid token.

        Raises:
            TooOftenError: the request exceeds the limit.
        """
        wait = self._hit(self._failures, "fail", network_of(address))
        if wait:
            raise self._locked_out(address, wait)

    def count_open(self, address: str) -> None:
        """Count a request that requires no token.

        Raises:
            TooOftenError: the request exceeds the limit.
        """
        wait = self._hit(self._failures, "open", network_of(address))
        if wait:
            raise TooOftenError(
                wait,
                f"address {address}: more than {_amount(self._failures)} requests for the API's document in a minute",
                f"repeat the request in {wait} s; WATCHSTEP_FAILURES_PER_MINUTE sets the limit",
            )

    def record_success(self, token: str) -> None:
        """Store the hash of a valid token for `check_address`."""
        with self._lock:
            self._valid_until.pop(digest_of(token), None)
            self._valid_until[digest_of(token)] = self._clock() + _VALID_SECONDS
            while len(self._valid_until) > _MOST_CALLERS:
                self._valid_until.popitem(last=False)

    def _was_valid(self, token: str) -> bool:
        with self._lock:
            return self._valid_until.get(digest_of(token), -math.inf) > self._clock()

    def _limit_for(self, permission: Permission | None) -> tuple[RateLimitItem | None, str]:
        return (self._recordings, "record") if permission == "record" else (self._requests, "ask")

    def _locked_out(self, address: str, wait: int) -> TooOftenError:
        return TooOftenError(
            wait,
            f"address {address}: more than {_amount(self._failures)} requests without a valid token in a minute",
            f"repeat the request in {wait} s, with a valid token",
        )

    def _hit(self, item: RateLimitItem | None, *names: str, cost: int = 1) -> int:
        """Count a request. Returns the seconds to wait if it exceeds the limit, else 0."""
        if item is None or self._call(lambda: self._limiter.hit(item, *names, cost=cost), True):
            return 0
        metrics.LIMITS_REFUSED.labels(names[0]).inc()
        return self._seconds(item, *names)

    def _wait(self, item: RateLimitItem, *names: str) -> int:
        """Return the seconds to wait, like `_hit`, without counting."""
        return (
            0 if self._call(lambda: self._limiter.test(item, *names), True) else self._seconds(item, *names)
        )

    def _seconds(self, item: RateLimitItem, *names: str) -> int:
        reset = self._call(lambda: self._limiter.get_window_stats(item, *names).reset_time, 0.0)
        wait = reset - time.time()
        return min(60, max(1, math.ceil(wait))) if math.isfinite(wait) else 1

    def _call(self, function: Callable[[], Any], default: Any) -> Any:
        """Call the storage. If it does not respond, return the default, and do not call it for some seconds."""
        if self._clock() < self._paused_until:
            metrics.LIMITS_OPEN.inc()
            return default
        try:
            return function()
        except StorageError as error:
            self._paused_until = self._clock() + _PAUSE_SECONDS
            metrics.LIMITS_OPEN.inc()
            _log.warning(
                "rate limits: the storage does not respond (%s); requests pass without being counted",
                type(error.storage_error).__name__,
            )
            return default


def rate_limits(settings: Settings) -> RateLimits:
    """Create the configured limits. With a Redis broker, all processes share their counts."""
    url = settings.broker_url.get_secret_value()
    return RateLimits(settings, redis_storage(url) if url else MemoryStorage(wrap_exceptions=True))


def redis_storage(url: str) -> Storage:
    """Create a Redis storage with a timeout of a fraction of a second. This does not connect yet."""
    from limits.storage import RedisStorage
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {
        "socket_timeout": _TIMEOUT_SECONDS,
        "socket_connect_timeout": _TIMEOUT_SECONDS,
        "retry": Retry(NoBackoff(), 1),
    }
    return RedisStorage(url, key_prefix=_NAMESPACE, wrap_exceptions=True, **options)


def _per_minute(amount: int) -> RateLimitItem | None:
    return RateLimitItemPerMinute(amount, namespace=_NAMESPACE) if amount else None


def _amount(item: RateLimitItem | None) -> int:
    return 0 if item is None else item.amount


def network_of(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 network of an IPv6 address, which one client usually has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)
    return str(parsed)
