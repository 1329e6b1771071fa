"""All event streams of a process: how many there may be, and how they end with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated

from fastapi import Depends, Request

from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.api.streaming.tail import Tail
from watchstep_services.service.context import Service

_RETRY_SECONDS = 5


class Streams:
    """The streams of one process; but for `close`, to be used in its event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tails: dict[str, Tail] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self.open = 0
        self._of: Counter[tuple[str, str]] = Counter()
        """Streams by project and by token."""

    @property
    def closing(self) -> asyncio.Event:
        """Set when the process ends."""
        return self._closing

    def enter(self, project: str, token: str) -> None:
        """Take a place for a stream; `exit` gives it back.

        Args:
            project: whose events.
            token: id of the token that follows them.

        Raises:
            RefusedError: 429; the process, the project or the token has too many, or the process ends.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._tails, self._closing, self.open = loop, {}, asyncio.Event(), 0
            self._of.clear()
        settings = self._service.settings
        for name, limit, count in (
            (f"token {token}", settings.token_event_streams, self._of["token", token]),
            (f"project {project!r}", settings.project_event_streams, self._of["project", project]),
            ("this process", settings.event_streams, self.open),
        ):
            if count >= limit or self._closing.is_set():
                raise RequestRefusedError(
                    429,
                    f"{count} event streams of {name} are open",
                    "close some, or follow all runs of a project by one stream",
                    {"retry-after": str(_RETRY_SECONDS)},
                )
        self.open += 1
        self._of.update([("token", token), ("project", project)])

    def tail(self, project: str) -> Tail:
        """The newest events of a project."""
        return self._tails.setdefault(project, Tail(self._service.database, project))

    def exit(self, project: str, token: str) -> None:
        """Give a place back."""
        self.open -= 1
        for name in (("token", token), ("project", project)):
            self._of[name] -= 1
            if self._of[name] <= 0:
                del self._of[name]
        tail = self._tails.get(project)
        if tail is not None and not tail.followers:
            del self._tails[project]

    def close(self) -> None:
        """End all streams, so that the server can end. From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)


async def _streams(request: Request) -> Streams:
    held = request.app.state.streams
    assert isinstance(held, Streams)
    return held


Streaming = Annotated[Streams, Depends(_streams)]
