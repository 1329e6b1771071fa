"""Retention policies: retention times, the next due step, and groups of alerts over several runs.

A group of one run is deleted with its run, and a group of several once it contains no alert. Ids of notifications contain the
group's number, which is never reused, so a recreated group notifies again.

Upkeep of ended runs, in its own threads: claim a run, do one step with no transaction open, record it.

A store that is slow or hangs delays no evaluation, no stop and no other project's upkeep.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Select, Table, delete, or_, select, update
from sqlalchemy.orm import Session

from watchstep.errors import StoreError, WatchstepError
from watchstep.format.layout import BUNDLES, RUN_DOCUMENT, SegmentKey, WriterId
from watchstep.reading.compaction import compact
from watchstep.store.store import Store
from watchstep_services.core.settings import NANOSECONDS, Settings
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import insert_missing, lift
from watchstep_services.db.lease import UPKEEP_LEASE, unlocked
from watchstep_services.db.models import (
    ActionRow,
    AlertGroup,
    Base,
    GroupMember,
    RetentionPolicy,
    RunRow,
    Segment,
    Upkeep,
)
from watchstep_services.evaluation.baselines import summarize
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import ENDED, advance_run
from watchstep_services.service.context import Service
from watchstep_services.stores.confined_folder import ConfinedFolder

Step = Literal["delete_run", "summarize", "compact", "delete_originals", "delete_tensors"]


@dataclass(frozen=True)
class RetentionTimes:
    """Nanoseconds after a run's end or, for the originals, after its compaction; None for never."""

    compact_after: int | None
    originals: int | None
    tensors: int | None
    runs: int | None


@dataclass(frozen=True)
class UpkeepProgress:
    """The completed upkeep of a run that ended at ``ended_ns``; times by the database's clock."""

    ended_ns: int
    compacted_ns: int | None = None
    originals_gone_ns: int | None = None
    tensors_gone_ns: int | None = None
    deleting: bool = False
    on_hold: bool = False
    summarized_ns: int | None = None


def policy_of(session: Session, settings: Settings, project: str) -> RetentionTimes:
    """A project's policy, with the settings' values as defaults. Runs and tensors are deleted only if the project's policy says so."""
    own = session.get(RetentionPolicy, project)
    compact: float | None = None if own is None else own.compact_after_s
    originals: float | None = None if own is None else own.originals_s
    return RetentionTimes(
        compact_after=_ns(settings.compact_after_seconds if compact is None else compact) or None,
        originals=_ns(settings.originals_seconds if originals is None else originals),
        tensors=_ns(None if own is None else own.keep_tensors_s),
        runs=_ns(None if own is None else own.keep_runs_s),
    )


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * NANOSECONDS)


def next_step(policy: RetentionTimes, progress: UpkeepProgress) -> tuple[Step, int] | None:
    """The next step and when it is due, in nanoseconds; None if no step follows.

    A deletion that has begun is completed even if the policy changes, unless the run is on hold.
    """
    steps: list[tuple[int, Step]] = []
    if not progress.on_hold:
        if progress.deleting:
            return "delete_run", progress.ended_ns
        if policy.runs is not None:
            steps.append((progress.ended_ns + policy.runs, "delete_run"))
        if policy.tensors is not None and progress.tensors_gone_ns is None:
            steps.append((progress.ended_ns + policy.tensors, "delete_tensors"))
    if progress.summarized_ns is None:
        steps.append((progress.ended_ns, "summarize"))
    if policy.compact_after is not None and progress.compacted_ns is None:
        steps.append((progress.ended_ns + policy.compact_after, "compact"))
    if (
        policy.originals is not None
        and progress.compacted_ns is not None
        and progress.originals_gone_ns is None
    ):
        steps.append((progress.compacted_ns + policy.originals, "delete_originals"))
    if not steps:
        return None
    # If two are due together, permanent deletions come first, because they make other steps unnecessary.
    at, step = min(steps, key=lambda due: (due[0], _ORDER.index(due[1])))
    return step, at


_ORDER: tuple[Step, ...] = ("delete_run", "delete_tensors", "summarize", "compact", "delete_originals")


IDLE_NS = 24 * 3600 * NANOSECONDS
_RUNS_AT_ONCE = 1000


def purge_groups(service: Service) -> None:
    """Delete groups over several runs without alerts, without open notifications, and without a notification for a day."""
    has_members = select(GroupMember.group_id).where(GroupMember.group_id == AlertGroup.id)
    empty = (
        select(AlertGroup.id)
        .where(
            AlertGroup.run_id.is_(None),
            AlertGroup.due_ns.is_(None),
            AlertGroup.open.is_(False),
            AlertGroup.notified_ns < now_ns() - IDLE_NS,
            ~has_members.exists(),
        )
        .limit(_RUNS_AT_ONCE)
        .with_for_update(skip_locked=True)
    )
    with service.database.write() as session:
        empty_ids = list(session.execute(empty).scalars())
        if empty_ids:
            session.execute(
                delete(AlertGroup)
                .where(AlertGroup.id.in_(empty_ids))
                .execution_options(synchronize_session=False)
            )


_LEASE_NS = 30 * 60 * NANOSECONDS
_WAITING_NS = 86_400 * NANOSECONDS
_RETRY_NS = 60 * NANOSECONDS
_LONGEST_NS = 24 * 3600 * NANOSECONDS
_NEVER = 2**62
_AT_ONCE = 100
_OVER = (*ENDED, "lost")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpkeepClaim:
    """A run that this process has claimed, and the due step."""

    run_id: int
    project: str
    run: str
    claims: int
    step: Step
    ended_ns: int


@dataclass
class UpkeepState:
    """State that the upkeep threads of a process share.

    Attributes:
        projects: projects with a step in progress.
        closed: no more steps may begin.
        claiming: lock for claims.
    """

    projects: set[str] = field(default_factory=set)
    closed: bool = False
    claiming: threading.Lock = field(default_factory=threading.Lock)


def upkeep(service: Service, most: int = _AT_ONCE, state: UpkeepState | None = None) -> int:
    """Do due steps of ended runs, one after the other; return the number of steps.

    An error is recorded with the run, logged, and retried later; it does not affect other runs. Projects with a step in progress in another
    thread are skipped.
    """
    state = state or UpkeepState()
    _enter_ended(service)
    purge_groups(service)
    done = 0
    while done < most and not state.closed:
        with state.claiming:
            claim = _claim(service, state.projects)
            if claim is None:
                break
            state.projects.add(claim.project)
        try:
            _do(service, claim)
        except WatchstepError as error:
            _log.warning("upkeep of %s/%s: %s: %s", claim.project, claim.run, claim.step, error.what)
            _failed(service, claim, error.what)
        except Exception as error:  # noqa: BLE001 - the store may contain anything; other runs must not be affected
            _log.exception("upkeep of %s/%s: %s failed", claim.project, claim.run, claim.step)
            _failed(service, claim, f"{type(error).__name__}: {error}")
        finally:
            state.projects.discard(claim.project)
        done += 1
    return done


def _enter_ended(service: Service) -> None:
    """Add or reset the upkeep row of each run that ended, or ended again."""
    with service.database.read() as session:
        fresh = session.execute(
            select(RunRow.id, RunRow.ended_ns)
            .outerjoin(Upkeep, Upkeep.run_id == RunRow.id)
            .where(RunRow.state.in_(_OVER), RunRow.ended_ns.is_not(None))
            .where(or_(Upkeep.run_id.is_(None), Upkeep.ended_ns != RunRow.ended_ns))
            .limit(1000)
        ).all()
    for run_id, ended in fresh:
        with service.database.write() as session:
            reset = {
                "ended_ns": ended, "next_ns": 0, "summarized_ns": None, "compacted_ns": None, "originals_gone_ns": None, "tensors_gone_ns": None,
            }  # fmt: skip
            values = {
                "lease_until_ns": 0, "claims": 0, "deleting": False, "on_hold": False, "hold_by": "", "hold_reason": "",
                "tries": 0, "problem": "",
            }  # fmt: skip
            if not insert_missing(session, Upkeep, {"run_id": run_id, **reset, **values}):
                session.execute(update(Upkeep).where(Upkeep.run_id == run_id).values(**reset))


def _claim(service: Service, busy: Collection[str]) -> UpkeepClaim | None:
    """Claim the next run with a due step, of no busy project; postpone runs without one."""
    due_now = (
        select(Upkeep.run_id)
        .join(RunRow, RunRow.id == Upkeep.run_id)
        .where(Upkeep.next_ns <= now_ns(), UPKEEP_LEASE.is_free(), RunRow.project.not_in(busy))
        .order_by(Upkeep.next_ns, Upkeep.run_id)
        .limit(1)
    )
    while True:
        with service.database.write() as session:
            run_id = session.execute(unlocked(due_now, Upkeep)).scalar_one_or_none()
            if run_id is None:
                return None
            row = session.get_one(Upkeep, run_id)
            run, now = session.get_one(RunRow, row.run_id), read_clock(session)
            due = next_step(policy_of(session, service.settings, run.project), _progress_of(row))
            if run.state not in _OVER:
                row.next_ns, row.deleting = _NEVER, False  # it runs again: its next end resets this
            elif due is not None and due[0] == "delete_run" and is_being_stopped(session, run.id):
                row.next_ns = now + _RETRY_NS
            elif due is None or due[1] > now:
                row.next_ns = min(now + _LONGEST_NS, _NEVER if due is None else due[1])
            elif row.lease_until_ns:
                # Its process ended during this step, and may do so again, so it is retried with growing intervals.
                _postpone(row, f"{due[0]}: the process that did it was killed or crashed", now)
            else:
                deleting = row.deleting or due[0] == "delete_run"
                token = UPKEEP_LEASE.claim(session, run.id, _LEASE_NS, deleting=deleting)
                if token is None:
                    return None  # the clock was set back just now
                return UpkeepClaim(run.id, run.project, run.run, token, due[0], row.ended_ns)


def _progress_of(row: Upkeep) -> UpkeepProgress:
    return UpkeepProgress(
        row.ended_ns,
        row.compacted_ns,
        row.originals_gone_ns,
        row.tensors_gone_ns,
        row.deleting,
        row.on_hold,
        row.summarized_ns,
    )


def _do(service: Service, claim: UpkeepClaim) -> None:
    run_store = _store(service, claim)
    if claim.step == "delete_run":
        if not _is_still_over(service, claim):
            return
        deleted = delete_objects(run_store)
        with service.database.write() as session:
            run = session.get(RunRow, claim.run_id, with_for_update=True)
            placed = 0 if run is None else run.project_store_id
            if _lock(session, claim) is not None and run is not None and run.state in _OVER:
                lift(session)  # no other transaction waits for the rows of an ended run
                delete_rows(session, claim.run_id)
        service.known_runs.discard((placed, claim.run))  # a later run of that name is found by a listing
        _log.info(
            "run %s/%s: deleted according to its project's policy: %d objects",
            claim.project,
            claim.run,
            deleted,
        )
        return
    if claim.step == "summarize":
        if _is_read(service, claim):
            summarize(service, claim.run_id, run_store)
    elif claim.step == "compact":
        if _is_read(service, claim):
            compact(run_store)
    elif claim.step == "delete_originals":
        if _is_read(service, claim):
            compact(run_store, delete_after=0.0, may_delete=_judged(service, claim))
    elif _is_still_over(service, claim):
        for prefix in (TENSORS, BUNDLES):
            delete_objects(run_store, prefix)
    else:
        return
    with service.database.write() as session:
        row = _lock(session, claim)
        if row is not None:
            setattr(row, _DONE[claim.step], read_clock(session))
            row.lease_until_ns, row.next_ns, row.tries, row.problem = 0, 0, 0, ""


def is_being_stopped(session: Session, run_id: int) -> bool:
    """Whether a stop is pending: a deletion would lose its records, and a restarted program would not be stopped."""
    pending = select(ActionRow.id).filter_by(run_id=run_id, kind="stop", state="pending").limit(1)
    return session.execute(pending).first() is not None


def _is_over(service: Service, claim: UpkeepClaim) -> bool:
    """Whether the run is still over. A run that has begun again since the claim is released."""
    with service.database.write() as session:
        run, row = session.get(RunRow, claim.run_id, with_for_update=True), _lock(session, claim)
        if run is not None and run.state in _OVER:
            return row is not None
        if row is not None:
            row.lease_until_ns, row.next_ns, row.deleting = 0, _NEVER, False
    return False


def _is_still_over(service: Service, claim: UpkeepClaim) -> bool:
    """List a run before a permanent deletion, because an unannounced attempt may have begun.

    Returns:
        False for a run that runs again, which is released.

    Raises:
        StoreError: there are new objects, which are evaluated first. Segments that have waited for a day are ignored.
    """
    listing = discover(service, claim.run_id)
    with service.database.read() as session:
        now, run = read_clock(session), session.get_one(RunRow, claim.run_id)
        begun = run.attempt != run.state_attempt
        waiting = session.execute(
            select(Segment.id)
            .where(
                Segment.run_id == claim.run_id,
                Segment.state == "announced",
                Segment.found_ns > now - _WAITING_NS,
            )
            .limit(1)
        ).first()
    if listing.fresh or waiting is not None:
        raise StoreError(
            f"run {claim.project}/{claim.run}: something was recorded since it ended", "it is evaluated first"
        )
    if begun:
        advance_run(service, claim.run_id)
    return _is_over(service, claim)


_DONE = {
    "summarize": "summarized_ns",
    "compact": "compacted_ns",
    "delete_originals": "originals_gone_ns",
    "delete_tensors": "tensors_gone_ns",
}


def _is_read(service: Service, claim: UpkeepClaim) -> bool:
    """Whether there is something to summarize or to compact.

    The run is listed first: otherwise an unannounced segment would be compacted and deleted without an evaluation.

    Raises:
        StoreError: segments wait to be evaluated, which happens before they are summarized or compacted.
    """
    discover(service, claim.run_id)
    with service.database.read() as session:
        states = set(
            session.execute(select(Segment.state).where(Segment.run_id == claim.run_id).distinct()).scalars()
        )
    if "announced" in states:
        raise StoreError(
            f"run {claim.project}/{claim.run}: segments wait to be evaluated", "it is tried again later"
        )
    return "read" in states


def _judged(service: Service, claim: UpkeepClaim) -> Callable[[SegmentKey], bool]:
    """A function that returns whether a segment was evaluated; one found after the listing was not, even if it was compacted."""
    with service.database.read() as session:
        rows = session.execute(
            select(Segment.attempt, Segment.node, Segment.writer, Segment.seq).where(
                Segment.run_id == claim.run_id, Segment.state.in_(("read", "corrupt"))
            )
        ).all()
    judged = {(WriterId(attempt, node, writer), seq) for attempt, node, writer, seq in rows}
    return lambda key: (key.writer, key.seq) in judged


def _store(service: Service, claim: UpkeepClaim) -> Store:
    with service.database.read() as session:
        place = session.get_one(RunRow, claim.run_id).place
    return service.stores.of_run(place, claim.run)


def _failed(service: Service, claim: UpkeepClaim, problem: str) -> None:
    with service.database.write() as session:
        row = _lock(session, claim)
        if row is not None:
            _postpone(row, problem, read_clock(session))


def _postpone(row: Upkeep, problem: str, now: int) -> None:
    row.tries += 1
    row.problem = problem[:2000]
    row.lease_until_ns = 0
    row.next_ns = now + min(_LONGEST_NS, _RETRY_NS * 2 ** min(row.tries, 20))


def _lock(session: Session, claim: UpkeepClaim) -> Upkeep | None:
    """Lock the run's upkeep row; None if another process has claimed it since."""
    return UPKEEP_LEASE.lock(session, claim.run_id, claim.claims)


_THREADS = 2


class UpkeepThreads:
    """Threads for the upkeep of ended runs, with one step of each project at a time. Thread-safe.

    Args:
        service: the service.
        most: steps that a thread does before it ends.
    """

    def __init__(self, service: Service, most: int) -> None:
        self._service = service
        self._most = most
        self._lock = threading.Lock()
        self._running: set[threading.Thread] = set()
        self._state = UpkeepState()

    def start(self) -> None:
        """Start threads up to the limit. Never waits."""
        with self._lock:
            while not self._state.closed and len(self._running) < _THREADS:
                thread = threading.Thread(target=self._run, name="watchstep-upkeep", daemon=True)
                self._running.add(thread)
                thread.start()  # it waits for the lock before it ends

    def close(self) -> None:
        """Begin no more steps, and wait for those in progress; the client's timeouts end each request."""
        self._state.closed = True
        with self._lock:
            threads = list(self._running)
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        try:
            upkeep(self._service, self._most, self._state)
        except Exception:  # noqa: BLE001 - logged; the next start tries again
            _log.exception("the upkeep of ended runs failed")
        finally:
            with self._lock:
                self._running.discard(threading.current_thread())


TENSORS = "tensors/"


def delete_objects(run_store: Store, prefix: str = "") -> int:
    """Delete a run's objects, or those with a prefix; return their number. Safe to repeat.

    The run's document is deleted last, so that the rest of an interrupted deletion is still found as a run.

    Raises:
        StoreError: the store refused; some objects are deleted.
    """
    keys = sorted(entry.key for entry in run_store.entries(prefix))
    keys.sort(key=lambda key: key == RUN_DOCUMENT)
    for key in keys:
        run_store.delete(key)
    if isinstance(run_store, ConfinedFolder):
        run_store.remove_empty_folders(prefix)
    return len(keys)


def delete_rows(session: Session, run_id: int) -> None:
    """Delete all rows of a run, in every table that refers to it directly or through other tables."""
    for table in reversed(Base.metadata.sorted_tables):
        if table.name == RunRow.__tablename__:
            session.execute(delete(table).where(table.c.id == run_id))
        else:
            for condition in _of_run(table, run_id):
                session.execute(delete(table).where(condition))


def _of_run(table: Table, run_id: int) -> list[Any]:
    """Conditions that select the rows of a table that belong to a run, one for each path to it."""
    conditions: list[Any] = []
    for key in table.foreign_keys:
        parent = key.column.table
        if parent is table:
            continue
        if parent.name == RunRow.__tablename__:
            conditions.append(key.parent == run_id)
        else:
            conditions += [key.parent.in_(chosen) for chosen in _chosen(parent, key.column, run_id)]
    return conditions


def _chosen(parent: Table, column: Any, run_id: int) -> list[Select[Any]]:
    return [select(column).where(condition) for condition in _of_run(parent, run_id)]
