"""Claims: a run is claimed for one evaluation, the claim is renewed and released, and a fence guards every write.

An evaluation's writes take effect only while its claim on the run is current. Events carry the context of the claim. A worker claims
several due runs with one statement; each of them has a claim of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    any_,
    bindparam,
    case,
    exists,
    func,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session, aliased

from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.links import PageLinks
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.db.clock import now_ns
from watchstep_services.db.engine import Database
from watchstep_services.db.lease import RUN_LEASE, unlocked
from watchstep_services.db.models import Project, ProjectStore, RunRow, StoreRow
from watchstep_services.db.records import RUNS

MESSAGE_NS = 5 * NANOSECONDS
"""A message that asks for an evaluation counts as lost after this time."""
AFFINITY_NS = 2 * NANOSECONDS
"""Time for which a due run waits for the worker that has cached its earlier rows, before any other worker may take it."""
KEPT_NS = 5 * NANOSECONDS
"""Penalty of a run that another worker has cached, in the order of what is due for longest. By as much the oldest work of two workers may
differ in age: it is what the tail of the latencies has over their median when all are behind."""
URGENT_NS = 15 * NANOSECONDS
"""A run with a sudden failure is prioritized for this time, as if it had been due for `AHEAD_NS` longer."""
AHEAD_NS = 300 * NANOSECONDS
WAITED_NS = 60 * NANOSECONDS
"""Time for which a run of a deferred project counts as due at most. It is shorter than the longest deferrals (`rule_time`): otherwise a
backlog of one project that is older than they are would delay all others."""


@dataclass(frozen=True)
class Claim:
    """The right to evaluate a run until another worker claims it.

    Attributes:
        run_id: id in the database.
        project: the project's name.
        run: the run's name.
        place: the location of the run.
        epoch: the fencing token: a commit with an older one changes nothing.
        cursor: cursor at the claim, canonical text.
        journal: journal position of the next segment.
        tick: number of this evaluation, if it evaluates rules.
        now_ns: time of the tick.
        hints: hints received before the claim; later ones are detected at the release.
        state: state of the run.
        state_attempt: the attempt of the last published start or end.
        attempt: the run's newest attempt.
        unfinished: claims in a row before this one with a process that ended without a commit or a release.
        reading: the segment that the last of these claims was reading, if it was recorded; otherwise empty.
        waits_for_turn: its last evaluation was large and had no turn, so this one takes the turn before it reads.
        is_urgent: it was prioritized, because of a sudden failure.
        order: place among the runs that one statement claimed, ascending.
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
    waits_for_turn: bool = False
    is_urgent: bool = field(default=False, compare=False)
    order: int = field(default=0, compare=False)

    @property
    def is_troubled(self) -> bool:
        """Whether the evaluation may end or occupy its process: the last one did not end, or waits for the turn of large ones."""
        return self.unfinished > 0 or self.waits_for_turn


def claim(database: Database, run_id: int, lease_ns: int) -> Claim | None:
    """Claim a run; None if another worker has claimed it, or it does not exist."""
    failpoint("evaluate.claiming", run_id)
    return next(iter(_claimed(database, _CLAIM, {"run_id": run_id, "lease_ns": lease_ns})), None)


def claim_longest_due(database: Database, run_id: int, worker: str, lease_ns: int) -> Claim | None:
    """Claim the run that has been due for longest; None if no candidate of this worker is due.

    Candidates are runs whose rows this worker has cached, runs that nobody has cached, runs that have been due for `AFFINITY_NS`,
    and the one that was requested. Runs cached by another worker get a penalty, so that overloaded workers do not
    steal each other's runs and read earlier rows again. Runs with sudden failures are prioritized. So the order of messages
    matters little, and a run whose worker is gone is claimed by the next worker, with or without its message.

    Args:
        database: the database.
        run_id: the requested run.
        worker: name of this worker.
        lease_ns: duration of the lease.
    """
    failpoint("evaluate.claiming", run_id)
    named = {"requested_id": run_id, "worker": worker, "lease_ns": lease_ns}
    return next(iter(_claimed(database, _CLAIM_LONGEST_DUE, named)), None)


def claim_due(
    database: Database,
    run_id: int,
    worker: str,
    lease_ns: int,
    most: int,
    except_projects: Sequence[str] = (),
) -> list[Claim]:
    """Claim the runs that have been due for longest, with one statement.

    Candidates and order are those of `claim_longest_due`. Runs whose last evaluation did not end, and runs that wait for their turn of a
    large evaluation, may end or occupy the process: at most one of them is claimed, and it is the last.

    Args:
        database: the database.
        run_id: the requested run; 0 for none.
        worker: name of this worker.
        lease_ns: duration of the leases.
        most: limit of the other runs.
        except_projects: names of projects whose runs are not claimed.
    """
    failpoint("evaluate.claiming", run_id)
    named = {
        "requested_id": run_id, "worker": worker, "lease_ns": lease_ns, "most": most, "except_projects": except_projects,
    }  # fmt: skip
    claims = _claimed(database, _CLAIM_DUE, named)
    return sorted(claims, key=lambda claim: (claim.is_troubled, claim.order))


def _claimed(database: Database, statement: tuple[Any, Any], named: dict[str, Any]) -> list[Claim]:
    """Execute a claim; on PostgreSQL it returns the runs' locations, too, which SQLite reads with a second statement."""
    with database.bare() as connection:
        # SQLite's RETURNING gives only columns of the updated table.
        with_place = connection.dialect.name != "sqlite"
        runs = connection.execute(statement[with_place], named).all()
        if with_place:
            return [_claim_of(run, run) for run in runs]
        return [
            _claim_of(run, connection.execute(_PLACE, {"project_store": run.project_store_id}).one())
            for run in runs
        ]


def _claim_of(run: Any, place: Any) -> Claim:
    """A claim from the columns of the run and of its location."""
    registration = StoreRegistration(
        place.url, place.role_arn, place.external_id, place.region, place.endpoint
    )
    return Claim(
        run_id=run.id,
        project=run.project,
        run=run.run,
        place=StorePlace(place.store_id, place.version, registration, place.prefix, run.project),
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
        reading=_read_by_previous(run.reading, run.epoch),
        waits_for_turn=run.waits_for_turn,
        is_urgent=_is_urgent(run),
        order=_order_of(run),
    )


def _order_of(run: Any) -> int:
    """The place of a run among those of one claim; runs with sudden failures come first."""
    due = run.due_ns or 0
    return int(due - AHEAD_NS if _is_urgent(run) else due)


def _is_urgent(run: Any) -> bool:
    return bool(run.urgent_ns > clock_of(run) - URGENT_NS)


def _read_by_previous(reading: str, epoch: int) -> str:
    """The segment that the previous claim was reading; earlier claims do not count."""
    reader, _, path = reading.partition(" ")
    return path if reader == str(epoch - 1) else ""


def clock_of(row: Any) -> int:
    """The database's clock, as returned by a claim's statement."""
    return int(row.now_ns)


# Built once, because every evaluation begins with these.
_ANY = (
    RUN_LEASE.claiming.values(
        # A commit and a release set the deadline to 0, so a nonzero deadline means that the previous claim's process ended.
        unfinished_claims=case((RunRow.lease_until_ns > 0, RunRow.unfinished_claims + 1), else_=RunRow.unfinished_claims),
    )
    .returning(
        RunRow.id, RunRow.project, RunRow.run, RunRow.project_store_id, RunRow.epoch, RunRow.cursor, RunRow.journal, RunRow.ticks, RunRow.hints, RunRow.state, RunRow.state_attempt, RunRow.attempt,
        RunRow.unfinished_claims, RunRow.reading, RunRow.waits_for_turn, RunRow.due_ns, RunRow.urgent_ns, now_ns().label("now_ns"),
    )
)  # fmt: skip
_PLACED = (
    ProjectStore.store_id, ProjectStore.prefix, StoreRow.version,
    StoreRow.url, StoreRow.role_arn, StoreRow.external_id, StoreRow.region, StoreRow.endpoint,
)  # fmt: skip
_PLACE = (
    select(*_PLACED)
    .join(StoreRow, StoreRow.id == ProjectStore.store_id)
    .where(ProjectStore.id == bindparam("project_store"))
)


def _both(statement: Any) -> tuple[Any, Any]:
    """A claim statement, and one that also returns the runs' locations."""
    joined = statement.where(ProjectStore.id == RunRow.project_store_id, StoreRow.id == ProjectStore.store_id)
    return statement, joined.returning(*_PLACED)


_CLAIM = _both(_ANY.where(RunRow.id == bindparam("run_id")))
_NOW = select(
    now_ns()
).scalar_subquery()  # a subquery is evaluated once, so that the index on due_ns can be used
_MINE = RunRow.cached_by.in_(["", bindparam("worker")])
_ABANDONED = RunRow.lease_until_ns > 0  # expired without a release: its worker is gone
_URGENT = RunRow.urgent_ns > _NOW - URGENT_NS
_DEFERRED_UNTIL = (
    select(Project.deferred_until_ns)
    .where(Project.name == RunRow.project)
    .correlate(RunRow)
    .scalar_subquery()
)
_IN_TURN = aliased(RunRow)
_TURN_IS_TAKEN = exists().where(
    Project.name == RunRow.project,
    _IN_TURN.id == Project.turn_run_id,
    _IN_TURN.epoch == Project.turn_epoch,
    _IN_TURN.lease_until_ns > _NOW,
)
_LONGEST_DUE = (
    select(RunRow.id)
    .where(
        RunRow.due_ns <= _NOW,
        RUN_LEASE.is_free(_NOW),
        or_(not_(RunRow.waits_for_turn), not_(_TURN_IS_TAKEN.correlate(RunRow))),
        or_(
            RunRow.id == bindparam("requested_id"),
            _MINE,
            RunRow.due_ns <= _NOW - AFFINITY_NS,
        ),
    )
    # Reading earlier rows again costs more than ten evaluations, so under load workers prefer the runs that they have cached.
    .order_by(
        case(
            (_DEFERRED_UNTIL <= _NOW, RunRow.due_ns),
            (RunRow.due_ns > _NOW - WAITED_NS, RunRow.due_ns + _DEFERRED_UNTIL - _NOW),
            else_=_DEFERRED_UNTIL - WAITED_NS,
        )
        + case((or_(_MINE, _ABANDONED), 0), else_=KEPT_NS)
        - case((_URGENT, AHEAD_NS), else_=0),
        RunRow.due_ns,
    )
    .limit(1)
)
_CLAIM_LONGEST_DUE = _both(_ANY.where(RunRow.id == unlocked(_LONGEST_DUE, RunRow).scalar_subquery()))

_IS_TROUBLED = or_(_ABANDONED, RunRow.unfinished_claims > 0, RunRow.waits_for_turn)


def _chosen(statement: Select[int]) -> ColumnElement[bool]:
    """Condition of the runs that a statement selects and no other transaction has locked.

    PostgreSQL evaluates an array once, before the update. A subquery of ``IN`` may be a part of a join, which evaluates it
    several times: each time it would lock other rows.
    """
    return RunRow.id == any_(func.array(unlocked(statement, RunRow).scalar_subquery()))


_OF_CLAIMED_PROJECTS = RunRow.project.not_in(bindparam("except_projects", expanding=True))
_OTHERS = _LONGEST_DUE.where(not_(_IS_TROUBLED), _OF_CLAIMED_PROJECTS).limit(
    bindparam("most", type_=Integer())
)
_TROUBLED = _LONGEST_DUE.where(_IS_TROUBLED, _OF_CLAIMED_PROJECTS)
_CLAIM_DUE = (
    _ANY.where(or_(RunRow.id.in_(_OTHERS), RunRow.id.in_(_TROUBLED))),
    _both(_ANY.where(or_(_chosen(_OTHERS), _chosen(_TROUBLED))))[1],
)


def renew(database: Database, claim: Claim, lease_ns: int) -> bool:
    """Extend a claim; False if another worker has claimed the run."""
    with database.bare() as connection:
        return RUN_LEASE.renew(connection, claim.run_id, claim.epoch, lease_ns)


def release(database: Database, claim: Claim, due_ns: int | None) -> bool:
    """Release a run without a change, unless another worker has claimed it.

    Args:
        database: the database.
        claim: the claim.
        due_ns: when the run is due without a hint; None for a hint only.

    Returns:
        Whether a hint arrived while it was claimed. Its message may have found the run claimed, so the run is due again.
    """
    return _released(database, claim, _RELEASE, due_ns)


def _released(database: Database, claim: Claim, statement: Any, due_ns: int | None) -> bool:
    named = {"lease_key": claim.run_id, "lease_token": claim.epoch, "seen": claim.hints, "next_ns": due_ns}
    with database.bare() as connection:
        hints = connection.execute(statement, named).scalar_one_or_none()
    return hints is not None and hints != claim.hints


def release_after_failure(database: Database, claim: Claim, after_ns: int) -> None:
    """Release a run that could not be evaluated, unless another worker has claimed it; it is due again after some time.

    Args:
        database: the database.
        claim: the claim.
        after_ns: time until it is due again.
    """
    named = {"lease_key": claim.run_id, "lease_token": claim.epoch, "seen": claim.hints, "after_ns": after_ns}
    with database.bare() as connection:
        connection.execute(_RELEASE_AFTER_FAILURE, named)


def give_back(database: Database, claims: Sequence[Claim]) -> None:
    """Release runs that were claimed and not evaluated, unless another worker has claimed them; they are due as before."""
    if not claims:
        return
    named = [{"lease_key": claim.run_id, "lease_token": claim.epoch} for claim in claims]
    with database.bare() as connection:
        connection.execute(_GIVE_BACK, named)


_GIVE_BACK = RUN_LEASE.writing.values(lease_until_ns=0, requested_ns=0)  # the next sweep sends a message
_UNHINTED = RUNS.c.hints == bindparam("seen")
# Built once. If a hint arrived meanwhile, the run is due at once, and the worker that releases it sends a message.
_RELEASE = RUN_LEASE.writing.values(
    lease_until_ns=0,
    unfinished_claims=0,
    reading="",
    due_ns=case((_UNHINTED, bindparam("next_ns", type_=BigInteger())), else_=now_ns()),
    requested_ns=case((_UNHINTED, RUNS.c.requested_ns), else_=now_ns()),
).returning(RUNS.c.hints)
# No message is sent, because the sweep finds the run. A hint that arrived meanwhile may be for another attempt, and is due at once.
_RELEASE_AFTER_FAILURE = RUN_LEASE.writing.values(
    lease_until_ns=0,
    reading="",
    due_ns=case((_UNHINTED, now_ns() + bindparam("after_ns", type_=BigInteger())), else_=now_ns()),
)


def take_turn(database: Database, claim: Claim) -> bool:
    """Take the turn of the claim's project for a large evaluation, unless that of another run is in progress.

    An evaluation of a hundred thousand rows takes seconds. Without turns, a project with several such runs would occupy all workers, and
    stops of other projects would wait. The turn belongs to the claim and ends with it, also if its process dies.

    Args:
        database: the database.
        claim: the claim of the run.

    Returns:
        Whether it is taken.
    """
    named = {"of_project": claim.project, "run_id": claim.run_id, "claim_epoch": claim.epoch}
    with database.bare() as connection:
        if connection.execute(_TAKE_TURN, named).rowcount != 1:
            return False
        if claim.waits_for_turn:
            connection.execute(_END_WAIT, {"lease_key": claim.run_id, "lease_token": claim.epoch})
        return True


def wait_for_turn(database: Database, claim: Claim, due_ns: int) -> bool:
    """Release a run whose large evaluation has to wait, as `release`.

    The run is not claimed as one that is due while the turn is taken, and the next claim takes the turn before it reads.
    """
    return _released(database, claim, _RELEASE_TO_WAIT, due_ns)


_TAKE_TURN = (
    update(Project)
    .where(
        Project.name == bindparam("of_project"),
        ~exists().where(
            RunRow.id == Project.turn_run_id,
            RunRow.id != bindparam("run_id"),
            RunRow.epoch == Project.turn_epoch,
            RunRow.lease_until_ns > now_ns(),
        ),
    )
    .values(turn_run_id=bindparam("run_id"), turn_epoch=bindparam("claim_epoch"))
    .execution_options(synchronize_session=False)
)
_RELEASE_TO_WAIT = _RELEASE.values(waits_for_turn=True)
_END_WAIT = RUN_LEASE.writing.values(waits_for_turn=False)


class FencedError(Exception):
    """Another worker has claimed the run: all results are discarded."""


def lock_run(session: Session, run_id: int, claim: Claim | None) -> RunRow:
    """Lock a run's row until the transaction ends, so that no worker claims the run meanwhile.

    Args:
        session: the transaction.
        run_id: id of the run.
        claim: the writer's claim; None for writers that need none.

    Raises:
        FencedError: another worker has claimed the run.
    """
    if claim is None:
        return session.get_one(RunRow, run_id, with_for_update=True)
    run = RUN_LEASE.lock(session, run_id, claim.epoch)
    if run is None:
        raise FencedError
    return run


@dataclass(frozen=True)
class EventContext:
    """An attempt of a run at a time.

    Attributes:
        base_url: URL of the API.
        run_id: id in the database.
        project: name of the project.
        run: name of the run.
        location: URL or path of the project's runs.
        attempt: name of the attempt.
        now_ns: the database's time.
        links: links to the web page.
    """

    base_url: str
    run_id: int
    project: str
    run: str
    location: str
    attempt: str
    now_ns: int
    links: PageLinks = field(default_factory=lambda: PageLinks(""))

    @classmethod
    def of(cls, base_url: str, claim: Claim, attempt: str, now_ns: int, links: PageLinks) -> EventContext:
        """The context of an evaluation."""
        place = claim.place.location
        return cls(base_url, claim.run_id, claim.project, claim.run, place, attempt, now_ns, links)

    @property
    def named(self) -> tuple[str, str]:
        """Project and run."""
        return self.project, self.run
