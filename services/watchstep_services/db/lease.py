"""Leases: the implementation of work that several workers share and one does at a time.

A row of work has a deadline by the database's clock and, in most tables, an epoch that every claim increments:

    free ── claim ──▶ claimed, epoch n ── commit or release ──▶ free
                        │    ▲ renew
                        ▼    │
                     expired, epoch n ── claim ──▶ claimed, epoch n + 1

The epoch is the fencing token: a write on behalf of a claim names it, and changes nothing once another claim, or `Lease.revoke`,
has incremented it. So at most one claim is current, even if a worker was paused past its deadline. A worker with an expired lease
that no other worker has claimed may commit: its work is complete, and doing it again would give the same result.

SQLite and PostgreSQL execute the same statements here. They differ in one point, which `Lease.lock` hides: SQLite has a single writer and
ignores ``FOR UPDATE``. Groups of alerts have no lease: they are flushed within one transaction, under the lock of their row.
"""

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
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    CursorResult,
    Select,
    Update,
    and_,
    bindparam,
    true,
    update,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import KeyedColumnElement

from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.clock import now_ns
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ActionRow, Backtest, Base, RunRow, Upkeep

EXPIRED_NS = 1
"""Deadline of a lease that was ended on behalf of its owner. A released one is 0, so a claim distinguishes the two."""

_Row = TypeVar("_Row", bound=Base)
LeaseTime = int | ColumnElement[int]
"""Nanoseconds, as a number or as an expression of the row's columns."""


@dataclass(frozen=True)
class Lease(Generic[_Row]):
    """The lease columns of a table.

    Attributes:
        model: the table.
        key: column of the primary key.
        until: column of the deadline; a row with a passed deadline is free.
        epoch: column that counts claims; None if the deadline itself is the fencing token.
        is_open: condition of rows that still have work.
    """

    model: type[_Row]
    key: str
    until: str
    epoch: str | None
    is_open: ColumnElement[bool]

    @property
    def token(self) -> str:
        """Column of the fencing token."""
        return self.epoch or self.until

    def is_free(self, at_ns: ColumnElement[int] | None = None) -> ColumnElement[bool]:
        """Whether a row has work and no current claim.

        Args:
            at_ns: the time; a scalar subquery allows the database to use an index. By default the clock is read at each row.
        """
        return and_(self.is_open, self._column(self.until) <= (now_ns() if at_ns is None else at_ns))

    @property
    def claiming(self) -> Update:
        """Statement that claims the rows of further conditions, if they are free. Parameter: ``lease_ns``."""
        counted = {} if self.epoch is None else {self.epoch: self._column(self.epoch) + 1}
        deadline = now_ns() + bindparam("lease_ns", type_=BigInteger())
        return (
            update(self.model)
            .where(self.is_free())
            .values({**counted, self.until: deadline})
            .execution_options(synchronize_session=False)
        )

    @property
    def writing(self) -> Update:
        """Statement that writes to a row on behalf of a claim. Parameters: ``lease_key`` and ``lease_token``."""
        return (
            update(self.model)
            .where(
                self._column(self.key) == bindparam("lease_key"),
                self._column(self.token) == bindparam("lease_token"),
            )
            .execution_options(synchronize_session=False)
        )

    def claim(self, session: Session, key: int, lease_ns: LeaseTime, **values: object) -> int | None:
        """Claim one row.

        Args:
            session: the transaction.
            key: primary key of the row.
            lease_ns: duration of the lease, a number or an expression of the row's columns.
            **values: further columns to set.

        Returns:
            The fencing token; None if the row is not free.
        """
        return self.claim_all(session, self._column(self.key) == key, lease_ns, **values).get(key)

    def claim_all(
        self, session: Session, chosen: ColumnElement[bool], lease_ns: LeaseTime, **values: object
    ) -> dict[int, int]:
        """Claim all free rows that a condition selects, as `claim`; return their fencing tokens by key."""
        statement = self.claiming.values({self.until: now_ns() + lease_ns, **values}).where(chosen)
        columns = self._column(self.key), self._column(self.token)
        return {int(key): int(token) for key, token in session.execute(statement.returning(*columns))}

    def renew(self, connection: Connection, key: int, token: int, lease_ns: int) -> bool:
        """Extend a claim; False if it is no longer current."""
        named = {"lease_key": key, "lease_token": token}
        return connection.execute(self.writing.values({self.until: now_ns() + lease_ns}), named).rowcount == 1

    def release(self, session: Session, key: int, token: int, **values: object) -> bool:
        """End a claim and set further columns; False, and nothing is written, if it is no longer current."""
        named = {"lease_key": key, "lease_token": token}
        released = session.execute(self.writing.values({self.until: 0, **values}), named)
        assert isinstance(released, CursorResult)
        return released.rowcount == 1

    def lock(self, session: Session, key: int, token: int) -> _Row | None:
        """Lock a row until the transaction ends; None if the claim is no longer current, or the row is deleted."""
        row = session.get(self.model, key, with_for_update=True)
        return row if row is not None and getattr(row, self.token) == token else None

    def revoke(self, session: Session, key: int) -> None:
        """Free a row, and fence its current claim."""
        assert self.epoch is not None  # a deadline cannot be incremented
        values = {self.epoch: self._column(self.epoch) + 1, self.until: 0}
        statement = update(self.model).where(self._column(self.key) == key).values(values)
        session.execute(statement.execution_options(synchronize_session=False))

    def expire_all(
        self, session: Session, chosen: ColumnElement[bool], deadline: LeaseTime = EXPIRED_NS
    ) -> None:
        """End the claims of workers that are known to be dead. They stay fenced, because the next claim has another token."""
        claimed = and_(self.is_open, self._column(self.until) > now_ns(), chosen)
        statement = update(self.model).where(claimed).values({self.until: deadline})
        session.execute(statement.execution_options(synchronize_session=False))

    def _column(self, name: str) -> KeyedColumnElement[int]:
        return self.model.__table__.c[name]


def unlocked(statement: Select[int], model: type[Base]) -> Select[int]:
    """Skip rows that another transaction has locked, and lock the others, so that a hanging worker delays no others."""
    return statement.with_for_update(of=model, skip_locked=True)


RUN_LEASE = Lease(RunRow, "id", "lease_until_ns", "epoch", true())
"""Lease of evaluations."""
ACTION_LEASE = Lease(ActionRow, "id", "next_ns", "claims", ActionRow.state == "pending")
"""Lease of deliveries and stops. The deadline is also the time of the next try: an action of a dead worker is due again."""
BACKTEST_LEASE = Lease(Backtest, "id", "lease_until_ns", "claims", Backtest.state != "done")
"""Lease of the runs of backtests."""
UPKEEP_LEASE = Lease(Upkeep, "run_id", "lease_until_ns", "claims", true())
"""Lease of retention steps."""
POLL_LEASE = Lease(RunRow, "id", "poll_ns", None, true())
"""Lease of polls of runs. An announcement sets another deadline at any time, which fences the current claim."""


_MOST_RENEWALS = 120
"""Forty leases. Work that takes longer hangs, and another worker may claim it."""
_IDLE_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeasedRow:
    """A claimed row, for renewals.

    Attributes:
        database: the database.
        lease: the lease of its table.
        key: primary key of the row.
        token: the fencing token.
        seconds: duration of a renewal.
        name: name of the work, for the log.
    """

    database: Database
    lease: Lease[Any]
    key: int
    token: int
    seconds: float
    name: str

    def renew(self) -> bool:
        """Extend the claim; False if it is no longer current. If the database does not answer, it is tried again."""
        try:
            with self.database.bare() as connection:
                return self.lease.renew(connection, self.key, self.token, nanoseconds(self.seconds))
        except SQLAlchemyError as error:
            _log.warning("%s: the lease is not renewed: %s", self.name, error)
            return True


class Renewable(Protocol):
    """What is renewed while the work on it lasts: a claimed row, or a batch of them."""

    @property
    def seconds(self) -> float:
        """Duration of a renewal."""

    def renew(self) -> bool:
        """Extend the claim; False if it need not be extended any more."""


@contextmanager
def keep_lease(row: Renewable) -> Iterator[None]:
    """Renew a claim three times per lease, from a thread, until the block ends.

    A claim that another worker has replaced is no longer renewed; the block's commit fails by the fence.
    """
    renewer = _renewer_of(os.getpid())
    number = renewer.add(row)
    try:
        yield
    finally:
        renewer.remove(number)


@dataclass
class _Renewal:
    row: Renewable
    due: float
    count: int = 0

    @property
    def interval(self) -> float:
        """Seconds between two renewals."""
        return self.row.seconds / 3


class _Renewer:
    """One thread for all claims of a process, which sleeps until the first renewal is due. Most work ends before that."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._renewals: dict[int, _Renewal] = {}
        self._numbers = itertools.count()
        self._wakes = 0.0
        self._current: int | None = None
        self._runs = False

    def add(self, row: Renewable) -> int:
        """Renew a claim from now on; return its number."""
        with self._condition:
            number = next(self._numbers)
            renewal = self._renewals[number] = _Renewal(row, 0.0)
            renewal.due = time.monotonic() + renewal.interval
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="watchstep-leases", daemon=True).start()
            elif renewal.due < self._wakes:
                self._condition.notify_all()
        return number

    def remove(self, number: int) -> None:
        """Stop renewing a claim. When this returns, no renewal is in progress."""
        with self._condition:
            self._renewals.pop(number, None)
            self._condition.wait_for(lambda: self._current != number)

    def _run(self) -> None:
        while True:
            with self._condition:
                number = self._await_due()
                if number is None:
                    self._runs = False
                    return
                renewal, self._current = self._renewals[number], number
            continues = renewal.count < _MOST_RENEWALS and renewal.row.renew()
            with self._condition:
                self._current = None
                renewal.count, renewal.due = renewal.count + 1, time.monotonic() + renewal.interval
                if not continues:
                    self._renewals.pop(number, None)
                self._condition.notify_all()

    def _await_due(self) -> int | None:
        """The claim to renew next; None after a minute without claims. The caller holds the lock."""
        idle_until = time.monotonic() + _IDLE_SECONDS
        while True:
            first = min(self._renewals, key=lambda number: self._renewals[number].due, default=None)
            now = time.monotonic()
            if first is not None:
                idle_until = now + _IDLE_SECONDS
                if self._renewals[first].due <= now:
                    return first
            elif now >= idle_until:
                return None
            self._wakes = idle_until if first is None else self._renewals[first].due
            self._condition.wait(self._wakes - now)


@functools.lru_cache(maxsize=1)
def _renewer_of(process: int) -> _Renewer:  # noqa: ARG001 - the cache's key: a forked child does not have its parent's thread
    return _Renewer()
