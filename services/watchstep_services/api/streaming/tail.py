"""The newest events of one project, read once for all who follow it in this process."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import takewhile

from anyio import move_on_after
from starlette.concurrency import run_in_threadpool

from watchstep_services.api.streaming.reading import Sent, Wanted, last_number, read_after
from watchstep_services.db.engine import Database

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
