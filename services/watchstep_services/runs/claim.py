"""Claims: a run is claimed for one evaluation, the claim is renewed and released, and a fence guards every write.

What an evaluation writes, it writes while the run is claimed by it, or not at all. Events carry the context of the claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, bindparam, case, or_, select
from sqlalchemy.orm import Session

from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.db.clock import now_ns
from watchstep_services.db.engine import Database
from watchstep_services.db.lease import RUN_LEASE, unlocked
from watchstep_services.db.models import Project, ProjectStore, RunRow, StoreRow
from watchstep_services.db.records import RUNS

MESSAGE_NS = 5 * NANOSECONDS
"""A message that asks for an evaluation counts as lost after this time."""
KEPT_NS = 20 * NANOSECONDS
"""Penalty of a run that another worker has cached, in the order of what is due for longest."""
URGENT_NS = 15 * NANOSECONDS
"""A run with a sudden failure is prioritized for this time, as if it had been due for `AHEAD_NS` longer."""
AHEAD_NS = 300 * NANOSECONDS


@dataclass(frozen=True)
class Claim:
    """The right to evaluate a run until another worker claims it.

    Attributes:
        run_id: in the database.
        project: the project's name.
        run: the run's name.
        place: of the project.
        epoch: the fence: a commit with an older one changes nothing.
        cursor: as it was at the claim, canonical text.
        journal: position that the next segment takes.
        tick: number of this evaluation, should it judge.
        now_ns: the tick's clock.
        hints: how many hints of work had come; those that come later are not lost.
        state: of the run.
        state_attempt: the attempt whose start or end was published last.
        attempt: the run's newest.
        unfinished: claims before this one, in a row, whose process ended without a commit or a release.
        reading: the segment that the last of them was reading, where that was noted; else empty.
    """

    run_id: int
    project: str
    run: str
    place: StorePlace
    epoch: int
    cursor: str
    journal: int
    tick: int
    now_ns: int
    hints: int
    state: str
    state_attempt: str
    attempt: str
    unfinished: int = 0
    reading: str = ""


def claim(database: Database, run_id: int, lease_ns: int) -> Claim | None:
    """Claim a run; None where another holds it, or there is none."""
    failpoint("evaluate.claiming", run_id)
    return _claimed(database, _CLAIM, {"run_id": run_id, "lease_ns": lease_ns})


def claim_longest_due(database: Database, run_id: int, worker: str, lease_ns: int) -> Claim | None:
    """Claim the run that has been due for longest; None where none is that this worker is to take.

    Candidates are runs whose rows this worker has cached, runs that nobody has cached, runs that have been due for longer than a live
    worker lets them wait, and the one that was requested. Runs cached by another worker get a penalty, so that overloaded workers do not
    steal each other's runs and read earlier rows again. Runs with sudden failures are prioritized. So the order of messages
    matters little, and a run whose worker is gone is claimed by the next worker, with or without its message.

    Args:
        database: the database.
        run_id: the one that it was asked for.
        worker: its name.
        lease_ns: how long it is held.
    """
    failpoint("evaluate.claiming", run_id)
    named = {"asked_id": run_id, "worker": worker, "lease_ns": lease_ns}
    return _claimed(database, _CLAIM_LONGEST_DUE, named)


def _claimed(database: Database, statement: tuple[Any, Any], named: dict[str, Any]) -> Claim | None:
    with database.bare() as connection:
        # SQLite's RETURNING gives columns of the updated table alone.
        at_once = connection.dialect.name != "sqlite"
        run = connection.execute(statement[at_once], named).one_or_none()
        if run is None:
            return None
        claim = run if at_once else connection.execute(_PLACE, {"project": run.project}).one()
    registration = StoreRegistration(
        claim.url, claim.role_arn, claim.external_id, claim.region, claim.endpoint
    )
    return Claim(
        run_id=run.id,
        project=run.project,
        run=run.run,
        place=StorePlace(claim.store_id, claim.version, registration, claim.prefix, run.project),
        epoch=run.epoch,
        cursor=run.cursor,
        journal=run.journal,
        tick=run.ticks,
        now_ns=clock_of(run),
        hints=run.hints,
        state=run.state,
        state_attempt=run.state_attempt,
        attempt=run.attempt,
        unfinished=run.unfinished_claims,
        reading=_read_by_last(run.reading, run.epoch),
    )


def _read_by_last(reading: str, epoch: int) -> str:
    """The segment that the claim before this one was reading; one before that does not count."""
    noted, _, path = reading.partition(" ")
    return path if noted == str(epoch - 1) else ""


def clock_of(row: Any) -> int:
    """The database's clock, as a claim's statement gave it."""
    return int(row.now_ns)


# Made once: every evaluation begins with these.
_ANY = (
    RUN_LEASE.claiming.values(
        # A commit and a release set the deadline to 0: one that has merely passed was left by a process that ended.
        unfinished_claims=case((RunRow.lease_until_ns > 0, RunRow.unfinished_claims + 1), else_=RunRow.unfinished_claims),
    )
    .returning(
        RunRow.id, RunRow.project, RunRow.run, RunRow.epoch, RunRow.cursor, RunRow.journal, RunRow.ticks, RunRow.hints, RunRow.state, RunRow.state_attempt, RunRow.attempt,
        RunRow.unfinished_claims, RunRow.reading, now_ns().label("now_ns"),
    )
)  # fmt: skip
_PLACED = (
    ProjectStore.store_id, ProjectStore.prefix, StoreRow.version,
    StoreRow.url, StoreRow.role_arn, StoreRow.external_id, StoreRow.region, StoreRow.endpoint,
)  # fmt: skip
_PLACE = (
    select(*_PLACED)
    .join(StoreRow, StoreRow.id == ProjectStore.store_id)
    .where(ProjectStore.project == bindparam("project"))
)


def _both(statement: Any) -> tuple[Any, Any]:
    """A claim by itself, and one that gives the project's place as well."""
    joined = statement.where(ProjectStore.project == RunRow.project, StoreRow.id == ProjectStore.store_id)
    return statement, joined.returning(*_PLACED)


_CLAIM = _both(_ANY.where(RunRow.id == bindparam("run_id")))
_NOW = select(now_ns()).scalar_subquery()  # asked once, so that the index of what is due can be used
_MINE = RunRow.cached_by.in_(["", bindparam("worker")])
_LEFT = RunRow.lease_until_ns > 0  # and over: nobody let it go, so whoever held it is gone
_URGENT = RunRow.urgent_ns > _NOW - URGENT_NS
_DEFERRED_UNTIL = (
    select(Project.deferred_until_ns)
    .where(Project.name == RunRow.project)
    .correlate(RunRow)
    .scalar_subquery()
)
_LONGEST_DUE = (
    select(RunRow.id)
    .where(
        RunRow.due_ns <= _NOW,
        RUN_LEASE.is_free(_NOW),
        or_(
            RunRow.id == bindparam("asked_id"),
            _MINE,
            RunRow.due_ns <= _NOW - MESSAGE_NS,
        ),
    )
    # To read earlier rows again costs more than ten evaluations: where all wait, workers keep to what they hold.
    .order_by(
        RunRow.due_ns
        + case((or_(_MINE, _LEFT), 0), else_=KEPT_NS)
        - case((_URGENT, AHEAD_NS), else_=0)
        + case((_DEFERRED_UNTIL > _NOW, _DEFERRED_UNTIL - _NOW), else_=0)
    )
    .limit(1)
)
_CLAIM_LONGEST_DUE = _both(_ANY.where(RunRow.id == unlocked(_LONGEST_DUE, RunRow).scalar_subquery()))


def renew(database: Database, claim: Claim, lease_ns: int) -> bool:
    """Extend a claim; False where another worker has taken the run."""
    with database.bare() as connection:
        return RUN_LEASE.renew(connection, claim.run_id, claim.epoch, lease_ns)


def release(database: Database, claim: Claim, due_ns: int | None) -> bool:
    """Release a run without a change, unless another worker has claimed it.

    Args:
        database: the database.
        claim: the claim.
        due_ns: when to look again without a hint.

    Returns:
        Whether a hint came while it was held, whose message may have found it held: it is to be looked at again.
    """
    named = {"lease_key": claim.run_id, "lease_token": claim.epoch, "seen": claim.hints, "next_ns": due_ns}
    with database.bare() as connection:
        hints = connection.execute(_RELEASE, named).scalar_one_or_none()
    return hints is not None and hints != claim.hints


def release_after_failure(database: Database, claim: Claim, after_ns: int) -> None:
    """Release a run that could not be evaluated, unless another worker has claimed it; it is due again after some time.

    Args:
        database: the database.
        claim: the claim.
        after_ns: how long to wait, from now on.
    """
    named = {"lease_key": claim.run_id, "lease_token": claim.epoch, "seen": claim.hints, "after_ns": after_ns}
    with database.bare() as connection:
        connection.execute(_RELEASE_AFTER_FAILURE, named)


_UNHINTED = RUNS.c.hints == bindparam("seen")
# Made once. Where a hint came meanwhile it is due at once, and whoever lets it go sends a message.
_RELEASE = RUN_LEASE.writing.values(
    lease_until_ns=0,
    unfinished_claims=0,
    reading="",
    due_ns=case((_UNHINTED, bindparam("next_ns", type_=BigInteger())), else_=now_ns()),
    requested_ns=case((_UNHINTED, RUNS.c.requested_ns), else_=now_ns()),
).returning(RUNS.c.hints)
# Nobody sends a message: the sweep finds the run. What was hinted meanwhile may be of another attempt, and does not wait.
_RELEASE_AFTER_FAILURE = RUN_LEASE.writing.values(
    lease_until_ns=0,
    reading="",
    due_ns=case((_UNHINTED, now_ns() + bindparam("after_ns", type_=BigInteger())), else_=now_ns()),
)


class FencedError(Exception):
    """Another worker has claimed the run: all results are discarded."""


def lock_run(session: Session, run_id: int, claim: Claim | None) -> RunRow:
    """Lock a run's row until the transaction ends, so that nobody claims the run meanwhile.

    Args:
        session: the transaction.
        run_id: of the run.
        claim: the claim in whose name is written; None for work that needs none.

    Raises:
        FencedError: another worker has taken the run.
    """
    if claim is None:
        return session.get_one(RunRow, run_id, with_for_update=True)
    run = RUN_LEASE.lock(session, run_id, claim.epoch)
    if run is None:
        raise FencedError
    return run


@dataclass(frozen=True)
class EventContext:
    """A run's attempt at a moment.

    Attributes:
        base_url: of the API.
        run_id: in the database.
        project: the run's.
        run: its name.
        location: URL or path that holds the project's runs.
        attempt: which attempt.
        now_ns: the database's time.
    """

    base_url: str
    run_id: int
    project: str
    run: str
    location: str
    attempt: str
    now_ns: int

    @classmethod
    def of(cls, base_url: str, claim: Claim, attempt: str, now_ns: int) -> EventContext:
        """That of an evaluation."""
        return cls(base_url, claim.run_id, claim.project, claim.run, claim.place.location, attempt, now_ns)

    @property
    def named(self) -> tuple[str, str]:
        """Project and run."""
        return self.project, self.run
