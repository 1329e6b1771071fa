"""Keep claims while what they were taken for goes on: however long rules take, nobody else begins the same."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from watchstep_services.core.settings import nanoseconds
from watchstep_services.runs.claim import Claim, renew
from watchstep_services.service.context import Service

_MOST_RENEWALS = 120
"""Forty leases: what takes longer hangs, and another may try."""
_IDLE_SECONDS = 60.0

_log = logging.getLogger(__name__)


@contextmanager
def keep_lease(service: Service, held: Claim) -> Iterator[None]:
    """Renew a claim three times in each lease, from a thread, until the block ends.

    A claim that is another's by now is left to them; the block finds out at its commit.
    """
    keeper = _keeper_of(os.getpid())
    number = keeper.take(service, held)
    try:
        yield
    finally:
        keeper.leave(number)


@dataclass
class _Kept:
    service: Service
    held: Claim
    due: float
    renewals: int = 0

    @property
    def every(self) -> float:
        """Seconds between two renewals."""
        return self.service.settings.lease_seconds / 3


class _Keeper:
    """One thread for all claims of a process, asleep until the first is due: most evaluations end before, and never wake it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._claims: dict[int, _Kept] = {}
        self._numbers = itertools.count()
        self._wakes = 0.0
        self._renewing: int | None = None
        self._runs = False

    def take(self, service: Service, held: Claim) -> int:
        """Keep a claim; returns what to call it by."""
        with self._condition:
            number = next(self._numbers)
            one = self._claims[number] = _Kept(service, held, 0.0)
            one.due = time.monotonic() + one.every
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="watchstep-leases", daemon=True).start()
            elif one.due < self._wakes:
                self._condition.notify_all()
        return number

    def leave(self, number: int) -> None:
        """Keep it no longer: when this returns, it is not being renewed."""
        with self._condition:
            self._claims.pop(number, None)
            self._condition.wait_for(lambda: self._renewing != number)

    def _run(self) -> None:
        while True:
            with self._condition:
                number = self._await_due()
                if number is None:
                    self._runs = False
                    return
                one, self._renewing = self._claims[number], number
            goes_on = one.renewals < _MOST_RENEWALS and _renewed(one)
            with self._condition:
                self._renewing = None
                one.renewals, one.due = one.renewals + 1, time.monotonic() + one.every
                if not goes_on:
                    self._claims.pop(number, None)
                self._condition.notify_all()

    def _await_due(self) -> int | None:
        """The claim to be renewed; None where there was none for long. The lock is held."""
        idle_until = time.monotonic() + _IDLE_SECONDS
        while True:
            first = min(self._claims, key=lambda number: self._claims[number].due, default=None)
            now = time.monotonic()
            if first is not None:
                idle_until = now + _IDLE_SECONDS
                if self._claims[first].due <= now:
                    return first
            elif now >= idle_until:
                return None
            self._wakes = idle_until if first is None else self._claims[first].due
            self._condition.wait(self._wakes - now)


@functools.lru_cache(maxsize=1)
def _keeper_of(process: int) -> _Keeper:  # noqa: ARG001 - the cache's key: a forked child has no thread of its parent's
    return _Keeper()


def _renewed(one: _Kept) -> bool:
    lease = nanoseconds(one.service.settings.lease_seconds)
    try:
        return renew(one.service.database, one.held, lease)
    except SQLAlchemyError as error:
        _log.warning("run %s/%s: its lease is not renewed: %s", one.held.project, one.held.run, error)
        return True
