"""All event streams of a process: how many there may be, and how they end with it."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, Request

from watchstep_services.api.problems import RefusedError
from watchstep_services.api.streaming.tail import Tail
from watchstep_services.service import Service


class Streams:
    """The streams of one process; but for `close`, to be used in its event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tails: dict[str, Tail] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self.open = 0

    @property
    def closing(self) -> asyncio.Event:
        """Set when the process ends."""
        return self._closing

    def enter(self) -> None:
        """Take a place for a stream; `exit` gives it back.

        Raises:
            RefusedError: 429; there is none, or the process ends.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._tails, self._closing, self.open = loop, {}, asyncio.Event(), 0
        if self.open >= self._service.settings.event_streams or self._closing.is_set():
            raise RefusedError(
                429,
                f"{self.open} event streams are open",
                "try again later, or follow all runs of a project by one",
            )
        self.open += 1

    def tail(self, project: str) -> Tail:
        """The newest events of a project."""
        return self._tails.setdefault(project, Tail(self._service.database, project))

    def exit(self, project: str) -> None:
        """Give a place back."""
        self.open -= 1
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
