"""Upkeep of ended runs: claim one, do one step with no transaction open, record it; in threads of its own.

A store that is slow or hangs delays no evaluation, no stop and no other project's upkeep.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Select, Table, delete, or_, select, update
from sqlalchemy.orm import Session

from watchstep.errors import StoreError, WatchstepError
from watchstep.format.layout import RUN_DOCUMENT, SegmentKey, WriterId
from watchstep.reading.compaction import compact
from watchstep.store.store import Store
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.db.clock import now_ns, read_clock
from watchstep_services.db.engine import insert_missing
from watchstep_services.db.lease import UPKEEP_LEASE, unlocked
from watchstep_services.db.limits import lift
from watchstep_services.db.models import ActionRow, Base, Project, RunRow, Segment, Upkeep
from watchstep_services.evaluation.baselines import summarize
from watchstep_services.retention.policy import Step, UpkeepProgress, next_step, policy_of, purge_groups
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import ENDED, advance_run
from watchstep_services.service.context import Service

_LEASE_NS = 30 * 60 * NANOSECONDS
_WAITING_NS = 86_400 * NANOSECONDS
_AGAIN_NS = 60 * NANOSECONDS
_LONGEST_NS = 24 * 3600 * NANOSECONDS
_NEVER = 2**62
_AT_ONCE = 100
_OVER = (*ENDED, "lost")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpkeepClaim:
    """A run that this process keeps for now, and the step that is due."""

    run_id: int
    project: str
    run: str
    claims: int
    step: Step
    ended_ns: int


@dataclass
class Upkept:
    """What the threads of a process are at.

    Attributes:
        projects: of which each has a step under way.
        closed: nothing more is to begin.
        claiming: held while one of them claims a run.
    """

    projects: set[str] = field(default_factory=set)
    closed: bool = False
    claiming: threading.Lock = field(default_factory=threading.Lock)


def upkeep(service: Service, most: int = _AT_ONCE, upkept: Upkept | None = None) -> int:
    """Do what is due of ended runs, one after the other; returns how many steps were done.

    What fails is recorded with the run, told in the log, and tried again later: it keeps no other from its turn. Runs of a project of
    which another thread has a step under way are left to that one.
    """
    upkept = upkept or Upkept()
    _enter_ended(service)
    purge_groups(service)
    done = 0
    while done < most and not upkept.closed:
        with upkept.claiming:
            claim = _claim(service, upkept.projects)
            if claim is None:
                break
            upkept.projects.add(claim.project)
        try:
            _do(service, claim)
        except WatchstepError as error:
            _log.warning("upkeep of %s/%s: %s: %s", claim.project, claim.run, claim.step, error.what)
            _failed(service, claim, error.what)
        except Exception as error:  # noqa: BLE001 - whatever lies on the store; it must not keep others from their turn
            _log.exception("upkeep of %s/%s: %s failed", claim.project, claim.run, claim.step)
            _failed(service, claim, f"{type(error).__name__}: {error}")
        finally:
            upkept.projects.discard(claim.project)
        done += 1
    return done


def _enter_ended(service: Service) -> None:
    """Give each run that ended, or ended once more, its place here."""
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
    """The next run with something due, of no busy project; those with nothing due now are put off until they have."""
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
            due = next_step(policy_of(session, service.settings, run.project), _kept(row))
            if run.state not in _OVER:
                row.next_ns, row.deleting = _NEVER, False  # it goes on: its next end brings it back
            elif due is not None and due[0] == "delete_run" and is_being_stopped(session, run.id):
                row.next_ns = now + _AGAIN_NS
            elif due is None or due[1] > now:
                row.next_ns = min(now + _LONGEST_NS, _NEVER if due is None else due[1])
            elif row.lease_until_ns:
                # Its process ended in the middle of this: it may do so again, and is tried less and less often.
                _put_off(row, f"{due[0]}: the process that did it was killed or crashed", now)
            else:
                deleting = row.deleting or due[0] == "delete_run"
                token = UPKEEP_LEASE.claim(session, run.id, _LEASE_NS, deleting=deleting)
                if token is None:
                    return None  # the clock was set back just now
                return UpkeepClaim(run.id, run.project, run.run, token, due[0], row.ended_ns)


def _kept(row: Upkeep) -> UpkeepProgress:
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
            if _mine(session, claim) is not None and run is not None and run.state in _OVER:
                lift(session)  # of a run that has ended: nobody else waits for its rows
                delete_rows(session, claim.run_id)
        service.known.discard(
            (claim.project, claim.run)
        )  # a run of that name that comes later is found by listing
        _log.info(
            "run %s/%s: deleted, as its project's policy says: %d objects", claim.project, claim.run, deleted
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
        delete_objects(run_store, TENSORS)
    else:
        return
    with service.database.write() as session:
        row = _mine(session, claim)
        if row is not None:
            setattr(row, _DONE[claim.step], read_clock(session))
            row.lease_until_ns, row.next_ns, row.tries, row.problem = 0, 0, 0, ""


def is_being_stopped(session: Session, run_id: int) -> bool:
    """Whether a stop is on its way: what it has written would be lost, and a program that begins anew would not be stopped."""
    pending = select(ActionRow.id).filter_by(run_id=run_id, kind="stop", state="pending").limit(1)
    return session.execute(pending).first() is not None


def _is_over(service: Service, claim: UpkeepClaim) -> bool:
    """Whether the run is still over. One that has begun anew since it was claimed is let be."""
    with service.database.write() as session:
        run, row = session.get(RunRow, claim.run_id, with_for_update=True), _mine(session, claim)
        if run is not None and run.state in _OVER:
            return row is not None
        if row is not None:
            row.lease_until_ns, row.next_ns, row.deleting = 0, _NEVER, False
    return False


def _is_still_over(service: Service, claim: UpkeepClaim) -> bool:
    """List a run before anything of it is deleted for good: an attempt may have begun anew that nobody announced.

    Returns:
        False for a run that goes on: it is let be.

    Raises:
        StoreError: something came, and is judged first. What has waited for a day is not waited for.
    """
    found = discover(service, claim.run_id)
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
    if found.fresh or waiting is not None:
        raise StoreError(
            f"run {claim.project}/{claim.run}: something was recorded since it ended", "it is judged first"
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

    The run is listed: a segment that nobody announced and no look has found yet would be written anew and deleted unjudged.

    Raises:
        StoreError: segments wait to be judged; they are judged before they are summarized or written anew.
    """
    discover(service, claim.run_id)
    with service.database.read() as session:
        states = set(
            session.execute(select(Segment.state).where(Segment.run_id == claim.run_id).distinct()).scalars()
        )
    if "announced" in states:
        raise StoreError(
            f"run {claim.project}/{claim.run}: segments wait to be judged", "it is tried again later"
        )
    return "read" in states


def _judged(service: Service, claim: UpkeepClaim) -> Callable[[SegmentKey], bool]:
    """Whether a segment was judged. One that came since the run was listed was not, though a compaction may have read it."""
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
        place = session.get_one(Project, claim.project).place
    return service.stores.of_run(place, claim.run)


def _failed(service: Service, claim: UpkeepClaim, problem: str) -> None:
    with service.database.write() as session:
        row = _mine(session, claim)
        if row is not None:
            _put_off(row, problem, read_clock(session))


def _put_off(row: Upkeep, problem: str, now: int) -> None:
    row.tries += 1
    row.problem = problem[:2000]
    row.lease_until_ns = 0
    row.next_ns = now + min(_LONGEST_NS, _AGAIN_NS * 2 ** min(row.tries, 20))


def _mine(session: Session, claim: UpkeepClaim) -> Upkeep | None:
    """The run's row, unless another process has taken the run since."""
    return UPKEEP_LEASE.lock(session, claim.run_id, claim.claims)


_THREADS = 2


class UpkeepThreads:
    """Does what is due of ended runs, for each project in one thread at a time. Thread-safe.

    Args:
        service: whose runs.
        most: steps that a thread does before it ends.
    """

    def __init__(self, service: Service, most: int) -> None:
        self._service = service
        self._most = most
        self._lock = threading.Lock()
        self._running: set[threading.Thread] = set()
        self._upkept = Upkept()

    def start(self) -> None:
        """Have threads look for what is due, as many as there may be. Never waits."""
        with self._lock:
            while not self._upkept.closed and len(self._running) < _THREADS:
                thread = threading.Thread(target=self._run, name="watchstep-upkeep", daemon=True)
                self._running.add(thread)
                thread.start()  # it waits for the lock before it ends

    def close(self) -> None:
        """Begin nothing more, and wait for the steps under way: the client's timeouts end each request."""
        self._upkept.closed = True
        with self._lock:
            threads = list(self._running)
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        try:
            upkeep(self._service, self._most, self._upkept)
        except Exception:  # noqa: BLE001 - it says so; the next look follows
            _log.exception("the upkeep of ended runs failed")
        finally:
            with self._lock:
                self._running.discard(threading.current_thread())


TENSORS = "tensors/"


def delete_objects(run_store: Store, prefix: str = "") -> int:
    """Delete a run's objects, or those below a prefix; returns how many. Safe to repeat.

    The run's own document goes last: what is left of a deletion that was interrupted is still a run, and is found.

    Raises:
        StoreError: the store refused; some are deleted.
    """
    keys = sorted(entry.key for entry in run_store.entries(prefix))
    keys.sort(key=lambda key: key == RUN_DOCUMENT)
    for key in keys:
        run_store.delete(key)
    if run_store.is_local:
        _remove_empty_folders(Path(run_store.location) / prefix)
    return len(keys)


def _remove_empty_folders(top: Path) -> None:
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            Path(folder).rmdir()
        except OSError:
            continue


def delete_rows(session: Session, run_id: int) -> None:
    """Delete all that the database holds of a run: each table that refers to it, by however many steps."""
    for table in reversed(Base.metadata.sorted_tables):
        if table.name == RunRow.__tablename__:
            session.execute(delete(table).where(table.c.id == run_id))
        else:
            for condition in _of_run(table, run_id):
                session.execute(delete(table).where(condition))


def _of_run(table: Table, run_id: int) -> list[Any]:
    """Conditions, each of which picks rows of a table that belong to a run."""
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
