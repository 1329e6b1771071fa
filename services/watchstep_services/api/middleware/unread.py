"""Answers that wait for clients to read them: sent in parts, and bounded in bytes.

A large answer stays in memory until its client has taken it. It is handed to the server in parts as the client reads, so that
the request lasts as long as its answer is there. How many bytes wait is bounded for each token, each project and the process.
"""

from __future__ import annotations

from collections import Counter

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from watchstep_services.api.middleware.access import address_of, identity_of
from watchstep_services.api.schemas.problems import RequestRefusedError, answer_to
from watchstep_services.core.telemetry import metrics

PART_BYTES = 64 * 1024
"""As much as asyncio's transports take before they ask to wait."""

_MEGABYTE = 1024 * 1024
_OF_PROJECT = 2
_OF_TOKEN = 4
"""Parts of the limit of a process that one project and one token may have: a half, a quarter."""

_RETRY_SECONDS = 5


class UnreadBytes:
    """Counts bytes of answers that are not read yet. To be used in one event loop.

    One answer of each token is let through however large it is, as long as the process has room for it or holds no other.

    Args:
        total_mb: the limit of the process, in MiB.
    """

    def __init__(self, total_mb: int) -> None:
        self._most = total_mb * _MEGABYTE
        self._bytes: Counter[tuple[str, str]] = Counter()

    def take(self, size: int, project: str | None, token: str) -> None:
        """Count an answer.

        Args:
            size: its bytes.
            project: the token's; None where it belongs to none.
            token: its id, or the client's address.

        Raises:
            RefusedError: 429; too much is unread.
        """
        for what, key, most in self._shares(project, token):
            if self._bytes[key] and self._bytes[key] + size > most:
                metrics.LIMITS_REFUSED.labels("unread").inc()
                raise RequestRefusedError(
                    429,
                    f"{what}: {self._bytes[key]} bytes of answers are not read yet, and this one has {size}; "
                    f"the limit is {most}",
                    "read the answers that were asked for, or ask for less; WATCHSTEP_UNREAD_MB sets the limit",
                    {"retry-after": str(_RETRY_SECONDS)},
                )
        for _, key, _ in self._shares(project, token):
            self._bytes[key] += size

    def give_back(self, size: int, project: str | None, token: str) -> None:
        """Count the end of what `take` counted."""
        for _, key, _ in self._shares(project, token):
            self._bytes[key] -= size
            if not self._bytes[key]:
                del self._bytes[key]

    def _shares(self, project: str | None, token: str) -> list[tuple[str, tuple[str, str], int]]:
        shares = [("the process", ("process", ""), self._most)]
        if project is not None:
            shares.append((f"project {project}", ("project", project), self._most // _OF_PROJECT))
        shares.append((f"token {token}", ("token", token), self._most // _OF_TOKEN))
        return shares


class PacedAnswers:
    """ASGI: sends answers in parts of `PART_BYTES`, and refuses one for which there is no room.

    Args:
        app: what answers.
        unread: counts.
    """

    def __init__(self, app: ASGIApp, unread: UnreadBytes) -> None:
        self._app = app
        self._unread = unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        paced = _Paced(self._unread, scope, receive, send)
        try:
            await self._app(scope, receive, paced)
        finally:
            paced.end()


class _Paced:
    """Holds the start of an answer back until its first bytes are there."""

    def __init__(self, unread: UnreadBytes, scope: Scope, receive: Receive, send: Send) -> None:
        self._unread, self._scope, self._receive, self._send = unread, scope, receive, send
        self._start: Message | None = None
        self._counted: tuple[int, str | None, str] | None = None
        self._refused = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._refused:
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body = message.get("body", b"")
        if self._start is not None:
            start, self._start = self._start, None
            if len(body) > PART_BYTES and not await self._taken(len(body)):
                return
            await self._send(start)
        if len(body) <= PART_BYTES:
            await self._send(message)
            return
        more = message.get("more_body", False)
        for first in range(0, len(body), PART_BYTES):
            last = first + PART_BYTES >= len(body)
            part = bytes(memoryview(body)[first : first + PART_BYTES])
            await self._send({"type": "http.response.body", "body": part, "more_body": more or not last})

    async def _taken(self, size: int) -> bool:
        identity = identity_of(self._scope)
        project = None if identity is None else identity.project
        token = address_of(self._scope) if identity is None else identity.token
        try:
            self._unread.take(size, project, token)
        except RequestRefusedError as error:
            self._refused = True
            await answer_to(Request(self._scope), error)(self._scope, self._receive, self._send)
            return False
        self._counted = size, project, token
        return True

    def end(self) -> None:
        """The answer is written, or nobody waits for it any more."""
        if self._counted is not None:
            self._unread.give_back(*self._counted)
            self._counted = None
