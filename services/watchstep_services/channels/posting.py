"""One POST to an address that a user wrote: checked, bounded in time, no redirects, and what came of it."""

from __future__ import annotations

import email.utils
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timezone

import httpcore

from watchstep_services.channels.connecting import CheckedBackend, Cutoff, tls_context
from watchstep_services.channels.outside import DeliveryContext
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import Address

LONGEST_PAUSE = 3600.0
"""Seconds that a receiver may put off the next try by ``Retry-After``."""

USER_AGENT = "watchstep"
_TRY_AGAIN = frozenset({408, 425, 429})
_NANOSECONDS = 1_000_000_000


class PostError(Exception):
    """The request got no answer; it may be sent again."""


@dataclass(frozen=True)
class PostResponse:
    """What a server said.

    Attributes:
        status: of HTTP.
        retry_after: as it was sent; empty where it was not.
    """

    status: int
    retry_after: str


def try_post(
    outside: DeliveryContext, address: Address, headers: Mapping[str, str], body: bytes
) -> AttemptResult:
    """Send one request, and say what came of it: by the status alone, for whoever names an address may not read what lies there.

    Args:
        outside: the way out.
        address: of the receiver.
        headers: beside ``Host``, ``User-Agent`` and the length.
        body: of the request.

    Raises:
        AddressRefusedError: the address is not allowed.
    """
    try:
        answer = post(outside, address, headers, body)
    except PostError as error:
        return AttemptResult("error", f"{address.host}: {error}")
    # The host alone: paths are secrets of some receivers.
    said = f"{address.host}: answered {answer.status}"
    if 200 <= answer.status < 300:
        return AttemptResult("done", said)
    if answer.status >= 500 or answer.status in _TRY_AGAIN:
        return AttemptResult("error", said, after_ns=_after(answer.retry_after, outside.now_ns))
    if 300 <= answer.status < 400:
        return AttemptResult(
            "failed", f"{said}; redirects are not followed: name the address that it leads to"
        )
    return AttemptResult("failed", f"{said}; the receiver refuses the event, so it is not sent again")


def post(outside: DeliveryContext, address: Address, headers: Mapping[str, str], body: bytes) -> PostResponse:
    """Send one request; all of it, from looking the host up to the answer, is bounded by ``outside.seconds``.

    Raises:
        AddressRefusedError: the address is not allowed.
        PostError: there was no answer.
    """
    seconds = outside.seconds
    url = httpcore.URL(scheme=address.scheme, host=address.host, port=address.port, target=address.target)
    sent = [("Host", address.authority), ("User-Agent", USER_AGENT), ("Content-Length", str(len(body)))]
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    with (
        Cutoff(seconds) as cutoff,
        httpcore.ConnectionPool(
            ssl_context=tls_context(),
            max_connections=1,
            network_backend=CheckedBackend(outside.reach, cutoff),
        ) as pool,
    ):
        try:
            with pool.stream(
                "POST", url, headers=[*sent, *headers.items()], content=body, extensions={"timeout": timeout}
            ) as said:
                return _read(said)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            if cutoff.passed or isinstance(error, httpcore.TimeoutException):
                raise PostError(f"no answer within {seconds:g} s") from error
            if isinstance(error, httpcore.ProtocolError):  # its message repeats what was received
                raise PostError("its answer is not HTTP") from error
            raise PostError(f"{type(error).__name__}: {error}") from error


def _read(said: httpcore.Response) -> PostResponse:
    """Status and headers; the body is left unread."""
    after = next((value for name, value in said.headers if name.lower() == b"retry-after"), b"")
    return PostResponse(said.status, after.decode("latin-1").strip())


def _after(written: str, now_ns: int) -> int:
    """When the receiver wants the next try, in nanoseconds since the epoch; 0 where it does not say."""
    if not written:
        return 0
    if written.isascii() and written.isdigit():
        pause = min(float(written[:9]), LONGEST_PAUSE)
        return now_ns + round(pause * _NANOSECONDS)
    try:
        moment = email.utils.parsedate_to_datetime(written)
    except (TypeError, ValueError):
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return min(round(moment.timestamp()) * _NANOSECONDS, now_ns + round(LONGEST_PAUSE * _NANOSECONDS))
