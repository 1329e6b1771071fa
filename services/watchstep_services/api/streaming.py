"""Event streams: server-sent events, https://html.spec.whatwg.org/multipage/server-sent-events.html.

The database is the only source: every process polls it, and processes do not notify each other. `Tail` reads the newest events of a
project once for all its streams in a process. `Streams` limits the number of streams, and closes them when the process ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any

from anyio import fail_after, move_on_after
from fastapi import Depends, Request
from sqlalchemy import func, select
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.core.redaction import without_addresses
from watchstep_services.db.engine import Database
from watchstep_services.db.models import EventRow, RunRow
from watchstep_services.service.context import Service


@dataclass(frozen=True)
class EncodedEvent:
    """An event, encoded for a stream.

    Attributes:
        number: position of the event.
        run_id: id of its run.
        type: type of the event.
        text: encoded text.
    """

    number: int
    run_id: int
    type: str
    text: bytes


@dataclass(frozen=True)
class EventFilter:
    """Selects events of a project: of one run or all, of some types or all."""

    run_id: int | None = None
    types: frozenset[str] = frozenset()

    def matches(self, event: EncodedEvent) -> bool:
        """Return whether the filter selects an event."""
        return (self.run_id is None or event.run_id == self.run_id) and (
            not self.types or event.type in self.types
        )


def read_after(
    database: Database, project: str, after: int, event_filter: EventFilter, limit: int
) -> list[EncodedEvent]:
    """Return the next events after a position, in order."""
    chosen = (
        select(EventRow.number, EventRow.run_id, EventRow.type, EventRow.event)
        .join(RunRow, RunRow.id == EventRow.run_id)
        .where(RunRow.project == project, EventRow.number > after)
    )
    if event_filter.run_id is not None:
        chosen = chosen.where(EventRow.run_id == event_filter.run_id)
    if event_filter.types:
        chosen = chosen.where(EventRow.type.in_(event_filter.types))
    with database.read() as session:
        rows = session.execute(chosen.order_by(EventRow.number).limit(limit)).all()
    return [
        EncodedEvent(number, run_id, kind, encode(number, kind, event))
        for number, run_id, kind, event in rows
    ]


def last_number(database: Database, project: str) -> int:
    """Return the position of a project's newest event; 0 if it has none."""
    newest = (
        select(func.max(EventRow.number))
        .join(RunRow, RunRow.id == EventRow.run_id)
        .where(RunRow.project == project)
    )
    with database.read() as session:
        return session.execute(newest).scalar_one() or 0


def encode(number: int, kind: str, event: dict[str, Any]) -> bytes:
    """Encode an event for a stream. JSON contains no line breaks, so that one data line is sufficient."""
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(without_addresses(event), separators=(',', ':'))}\n\n".encode()


POLL_SECONDS = 0.5
_BUFFERED = 256
_PAGE = 200

_log = logging.getLogger(__name__)


class Tail:
    """Polls the newest events of a project while it has followers. Use it in one event loop only.

    Attributes:
        floor: the buffer contains all events after this position, up to `newest`.
        newest: position up to which all events have been read.
    """

    def __init__(self, database: Database, project: str) -> None:
        self._database, self._project = database, project
        self._buffer: deque[EncodedEvent] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.followers = 0
        self.floor = self.newest = -1

    async def join(self) -> int:
        """Start to follow, and return the current position. Call `leave` at the end.

        Raises:
            SQLAlchemyError: the database does not respond.
        """
        self.followers += 1
        try:
            async with self._starting:
                if self._task is None:
                    self.floor = self.newest = await run_in_threadpool(
                        last_number, self._database, self._project
                    )
                    self._task = asyncio.create_task(self._poll(), name=f"events of {self._project}")
        except BaseException:
            self.followers -= 1
            raise
        return self.newest

    async def position(self, after: int) -> int:
        """Return the position to resume from. A position beyond the newest event becomes the current one.

        Raises:
            SQLAlchemyError: the database does not respond.
        """
        if after <= self.newest:
            return after
        return min(after, await run_in_threadpool(last_number, self._database, self._project))

    def leave(self) -> None:
        """End following. The polling stops with the last follower."""
        self.followers -= 1
        if not self.followers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._buffer.clear()

    async def batch(self, after: int, event_filter: EventFilter) -> tuple[list[EncodedEvent], int]:
        """Return the available events after a position, and the position after them.

        Raises:
            SQLAlchemyError: the database does not respond.
        """
        if after >= self.floor:
            return [event for event in self._after(after) if event_filter.matches(event)], max(
                after, self.newest
            )
        # Taken before the query: no event up to this position can appear later, because numbers follow the commits.
        newest = self.newest
        events = await run_in_threadpool(
            read_after, self._database, self._project, after, event_filter, _PAGE
        )
        if len(events) == _PAGE:
            return events, events[-1].number
        return events, max([newest, *(event.number for event in events)])

    async def wait(self, after: int, seconds: float) -> None:
        """Wait for an event after a position, or for some seconds."""
        if self.newest > after:
            return
        with move_on_after(seconds):  # asyncio.wait_for may lose a cancellation before Python 3.12
            await self._changed.wait()

    def _after(self, position: int) -> list[EncodedEvent]:
        return list(takewhile(lambda event: event.number > position, reversed(self._buffer)))[::-1]

    async def _poll(self) -> None:
        while True:
            try:
                new = await run_in_threadpool(
                    read_after, self._database, self._project, self.newest, EventFilter(), _PAGE
                )
            except Exception as error:  # noqa: BLE001 - retried; the followers only get a delay
                _log.warning("events of project %s cannot be read: %s", self._project, error)
                new = []
            self._add(new)
            if len(new) < _PAGE:
                await asyncio.sleep(POLL_SECONDS)

    def _add(self, new: list[EncodedEvent]) -> None:
        if not new:
            return
        for event in new:
            self._buffer.append(event)
            if len(self._buffer) > _BUFFERED:
                self.floor = self._buffer.popleft().number
        self.newest = new[-1].number
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


_RETRY_SECONDS = 5


class Streams:
    """The streams of one process. Use all methods except `close` in its event loop only."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tails: dict[str, Tail] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self.open = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        """Number of streams by project and by token."""

    @property
    def closing(self) -> asyncio.Event:
        """Set when the process ends."""
        return self._closing

    def enter(self, project: str, token: str) -> None:
        """Count a new stream; `exit` removes it.

        Args:
            project: project of the events.
            token: id of the client's token.

        Raises:
            RequestRefusedError: 429; the process, the project or the token has too many streams, or the process ends.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._tails, self._closing, self.open = loop, {}, asyncio.Event(), 0
            self._counts.clear()
        settings = self._service.settings
        for name, limit, count in (
            (f"token {token}", settings.token_event_streams, self._counts["token", token]),
            (f"project {project!r}", settings.project_event_streams, self._counts["project", project]),
            ("this process", settings.event_streams, self.open),
        ):
            if count >= limit or self._closing.is_set():
                raise RequestRefusedError(
                    429,
                    f"{count} event streams of {name} are open",
                    "close some, or follow all runs of a project with one stream",
                    {"retry-after": str(_RETRY_SECONDS)},
                )
        self.open += 1
        self._counts.update([("token", token), ("project", project)])

    def tail(self, project: str) -> Tail:
        """Return the tail of a project."""
        return self._tails.setdefault(project, Tail(self._service.database, project))

    def exit(self, project: str, token: str) -> None:
        """Remove a stream from the count."""
        self.open -= 1
        for name in (("token", token), ("project", project)):
            self._counts[name] -= 1
            if self._counts[name] <= 0:
                del self._counts[name]
        tail = self._tails.get(project)
        if tail is not None and not tail.followers:
            del self._tails[project]

    def close(self) -> None:
        """Close all streams, so that the server can end. Thread-safe."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)


async def _streams(request: Request) -> Streams:
    streams = request.app.state.streams
    assert isinstance(streams, Streams)
    return streams


Streaming = Annotated[Streams, Depends(_streams)]


HEARTBEAT_SECONDS = 15.0
SEND_SECONDS = 20.0
_RETRY_MS = 2000


@dataclass(frozen=True)
class Subscription:
    """Subscription of a client.

    Attributes:
        project: project of the events.
        token: id of the client's token.
        event_filter: selects the events.
        after: position of the last event that the client has received; None: the current position.
        allowed: returns whether the token is still valid; called at every heartbeat.
    """

    project: str
    token: str
    event_filter: EventFilter
    after: int | None
    allowed: Callable[[], Awaitable[bool]]


class EventStream(Response):
    """Sends events until the client disconnects, its token becomes invalid, it is too slow, or the process ends.

    The only state of a client is its position. A client that reads nothing for `SEND_SECONDS` is disconnected, and resumes with its
    Last-Event-ID.
    """

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, subscription: Subscription) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._streams, self._subscription = streams, subscription

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - part of the ASGI interface
        receive: Receive,
        send: Send,
    ) -> None:
        """Handle a stream."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            tasks.append(asyncio.create_task(self._follow(send)))
            tasks.append(asyncio.create_task(_disconnected(receive)))
            tasks.append(asyncio.create_task(self._streams.closing.wait()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._streams.exit(self._subscription.project, self._subscription.token)
        if isinstance(results[0], TimeoutError):
            _log.info(
                "event stream of project %s: the client is too slow and was disconnected",
                self._subscription.project,
            )
        elif isinstance(results[0], Exception):
            _log.warning("event stream of project %s failed: %s", self._subscription.project, results[0])
        elif self._streams.closing.is_set() or results[0] is None:
            with fail_after(SEND_SECONDS):
                await send({"type": "http.response.body"})

    async def _follow(self, send: Send) -> None:
        tail = self._streams.tail(self._subscription.project)
        now = await tail.join()
        try:
            after = now if self._subscription.after is None else await tail.position(self._subscription.after)
            await _send(send, f"retry: {_RETRY_MS}\nid: {after}\n\n".encode())
            loop = asyncio.get_running_loop()
            next_heartbeat = loop.time() + HEARTBEAT_SECONDS
            while True:
                events, after = await tail.batch(after, self._subscription.event_filter)
                if events:
                    await _send(send, b"".join(event.text for event in events))
                else:
                    await tail.wait(after, max(0.0, next_heartbeat - loop.time()))
                if loop.time() >= next_heartbeat:
                    if not await self._subscription.allowed():
                        return
                    await _send(send, f": heartbeat\nid: {after}\n\n".encode())
                    next_heartbeat = loop.time() + HEARTBEAT_SECONDS
        finally:
            tail.leave()


async def _send(send: Send, body: bytes) -> None:
    # Not asyncio.wait_for: before Python 3.12 it can lose a cancellation at the end of the wait, and the stream would continue.
    with fail_after(SEND_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
