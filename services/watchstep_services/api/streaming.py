"""Events as they come, to whoever listens. The database is the truth: every process reads it, and tells none of the others.

Events of a project after a place, from the database, as they are sent.

The newest events of one project, read once for all who follow it in this process.

All event streams of a process: how many there may be, and how they end with it.

The answer that does not end: server-sent events, https://html.spec.whatwg.org/multipage/server-sent-events.html.
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
class Sent:
    """An event in the form of a stream.

    Attributes:
        number: its place.
        run_id: whose it is.
        type: of the event.
        text: what is sent.
    """

    number: int
    run_id: int
    type: str
    text: bytes


@dataclass(frozen=True)
class Wanted:
    """Which events of a project: of one run, or of all; of some types, or of all."""

    run_id: int | None = None
    types: frozenset[str] = frozenset()

    def has(self, sent: Sent) -> bool:
        """Whether an event is one of them."""
        return (self.run_id is None or sent.run_id == self.run_id) and (
            not self.types or sent.type in self.types
        )


def read_after(database: Database, project: str, after: int, wanted: Wanted, limit: int) -> list[Sent]:
    """The next events after a number, in order."""
    chosen = (
        select(EventRow.number, EventRow.run_id, EventRow.type, EventRow.event)
        .join(RunRow, RunRow.id == EventRow.run_id)
        .where(RunRow.project == project, EventRow.number > after)
    )
    if wanted.run_id is not None:
        chosen = chosen.where(EventRow.run_id == wanted.run_id)
    if wanted.types:
        chosen = chosen.where(EventRow.type.in_(wanted.types))
    with database.read() as session:
        rows = session.execute(chosen.order_by(EventRow.number).limit(limit)).all()
    return [Sent(number, run_id, kind, encode(number, kind, event)) for number, run_id, kind, event in rows]


def last_number(database: Database, project: str) -> int:
    """The number of a project's newest event; 0 where it has none."""
    newest = (
        select(func.max(EventRow.number))
        .join(RunRow, RunRow.id == EventRow.run_id)
        .where(RunRow.project == project)
    )
    with database.read() as session:
        return session.execute(newest).scalar_one() or 0


def encode(number: int, kind: str, event: dict[str, Any]) -> bytes:
    """An event of a stream; JSON has no line breaks of its own."""
    return f"id: {number}\nevent: {kind}\ndata: {json.dumps(without_addresses(event), separators=(',', ':'))}\n\n".encode()


POLL_SECONDS = 0.5
_HELD = 256
_PAGE = 200

_log = logging.getLogger(__name__)


class Tail:
    """Reads while somebody follows. To be used in one event loop.

    Attributes:
        floor: all events after this number, up to `reach`, are held.
        reach: all events up to this number have been seen.
    """

    def __init__(self, database: Database, project: str) -> None:
        self._database, self._project = database, project
        self._held: deque[Sent] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._begun = asyncio.Lock()
        self.followers = 0
        self.floor = self.reach = -1

    async def join(self) -> int:
        """Begin to follow; returns the place of now. `leave` must follow.

        Raises:
            SQLAlchemyError: the database does not answer.
        """
        self.followers += 1
        try:
            async with self._begun:
                if self._task is None:
                    self.floor = self.reach = await run_in_threadpool(
                        last_number, self._database, self._project
                    )
                    self._task = asyncio.create_task(self._read_on(), name=f"events of {self._project}")
        except BaseException:
            self.followers -= 1
            raise
        return self.reach

    async def place(self, after: int) -> int:
        """Where to go on for one who has reached a place; what no event of the project has come to yet is now.

        Raises:
            SQLAlchemyError: the database does not answer.
        """
        if after <= self.reach:
            return after
        return min(after, await run_in_threadpool(last_number, self._database, self._project))

    def leave(self) -> None:
        """Follow no more; the last one ends the reading."""
        self.followers -= 1
        if not self.followers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._held.clear()

    async def batch(self, after: int, wanted: Wanted) -> tuple[list[Sent], int]:
        """Events after a place that are known now, and the place after which the next ones are.

        Raises:
            SQLAlchemyError: the database does not answer.
        """
        if after >= self.floor:
            return [sent for sent in self._after(after) if wanted.has(sent)], max(after, self.reach)
        reach = (
            self.reach
        )  # read before: what is up to here cannot come later, for numbers follow the commits
        found = await run_in_threadpool(read_after, self._database, self._project, after, wanted, _PAGE)
        if len(found) == _PAGE:
            return found, found[-1].number
        return found, max([reach, *(sent.number for sent in found)])

    async def wait(self, after: int, seconds: float) -> None:
        """Wait until something is known after a place, or so long."""
        if self.reach > after:
            return
        with move_on_after(seconds):  # asyncio.wait_for may lose a cancellation before Python 3.12
            await self._changed.wait()

    def _after(self, place: int) -> list[Sent]:
        return list(takewhile(lambda sent: sent.number > place, reversed(self._held)))[::-1]

    async def _read_on(self) -> None:
        while True:
            try:
                new = await run_in_threadpool(
                    read_after, self._database, self._project, self.reach, Wanted(), _PAGE
                )
            except Exception as error:  # noqa: BLE001 - it is there again some time; who follows is told nothing wrong
                _log.warning("events of project %s cannot be read: %s", self._project, error)
                new = []
            self._take(new)
            if len(new) < _PAGE:
                await asyncio.sleep(POLL_SECONDS)

    def _take(self, new: list[Sent]) -> None:
        if not new:
            return
        for sent in new:
            self._held.append(sent)
            if len(self._held) > _HELD:
                self.floor = self._held.popleft().number
        self.reach = new[-1].number
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


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


HEARTBEAT_SECONDS = 15.0
SEND_SECONDS = 20.0
_RETRY_MS = 2000


@dataclass(frozen=True)
class Followed:
    """What a client follows.

    Attributes:
        project: whose events.
        token: id of the client's token.
        wanted: which of them.
        after: the place that the client has reached; None for now.
        allowed: whether it still may; asked at every heartbeat.
    """

    project: str
    token: str
    wanted: Wanted
    after: int | None
    allowed: Callable[[], Awaitable[bool]]


class EventStream(Response):
    """Sends events until the client goes, may no more, is too slow, or the process ends.

    Nothing is kept for a client but its place: one that takes nothing for `SEND_SECONDS` is dropped, and resumes by its
    Last-Event-ID.
    """

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, followed: Followed) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._streams, self._followed = streams, followed

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - as ASGI asks
        receive: Receive,
        send: Send,
    ) -> None:
        """One stream."""
        works: list[asyncio.Task[Any]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            works.append(asyncio.create_task(self._follow(send)))
            works.append(asyncio.create_task(_gone(receive)))
            works.append(asyncio.create_task(self._streams.closing.wait()))
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in works:
                work.cancel()
            results = await asyncio.gather(*works, return_exceptions=True)
            self._streams.exit(self._followed.project, self._followed.token)
        if isinstance(results[0], TimeoutError):
            _log.info(
                "event stream of project %s: the client is too slow, and dropped", self._followed.project
            )
        elif isinstance(results[0], Exception):
            _log.warning("event stream of project %s ends: %s", self._followed.project, results[0])
        elif self._streams.closing.is_set() or results[0] is None:
            with fail_after(SEND_SECONDS):
                await send({"type": "http.response.body"})

    async def _follow(self, send: Send) -> None:
        tail = self._streams.tail(self._followed.project)
        now = await tail.join()
        try:
            after = now if self._followed.after is None else await tail.place(self._followed.after)
            await _send(send, f"retry: {_RETRY_MS}\nid: {after}\n\n".encode())
            loop = asyncio.get_running_loop()
            beat = loop.time() + HEARTBEAT_SECONDS
            while True:
                found, after = await tail.batch(after, self._followed.wanted)
                if found:
                    await _send(send, b"".join(sent.text for sent in found))
                else:
                    await tail.wait(after, max(0.0, beat - loop.time()))
                if loop.time() >= beat:
                    if not await self._followed.allowed():
                        return
                    await _send(send, f": heartbeat\nid: {after}\n\n".encode())
                    beat = loop.time() + HEARTBEAT_SECONDS
        finally:
            tail.leave()


async def _send(send: Send, body: bytes) -> None:
    # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes as the wait ends, and the stream goes on.
    with fail_after(SEND_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
