"""Evaluate the runs that are due, several at a time.

    claim (1 statement) ── inboxes (1 statement) ── segments of remote stores (concurrently)
        └▶ of each run: collect ── judge ──▶ news or many rows: commit at once ──▶ a stop waits for no other run
                                        └──▶ no news: deferred ──▶ commit (1 statement for all)

A batch saves statements and wake-ups; rules judge each run for itself. It has as many runs as take `BATCH_SECONDS`. A run that cannot be evaluated, that another worker has taken
or whose rules are slow does not affect the others: after `RELINQUISH_SECONDS` the deferred ones are committed and the ones that have
not begun are given back, from the thread that renews leases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.engine import is_of_all
from watchstep_services.db.lease import keep_lease
from watchstep_services.evaluation.collect import ReadAhead
from watchstep_services.evaluation.commit import Committed, commit_all
from watchstep_services.evaluation.evaluate import (
    Deferred,
    Evaluation,
    commit_judged,
    evaluate_claimed,
    finished,
    release_failed,
)
from watchstep_services.evaluation.fetch_ahead import fetch_ahead
from watchstep_services.evaluation.inbox import open_inboxes
from watchstep_services.evaluation.observation import count_outcome, observing
from watchstep_services.runs.claim import Claim, claim_due, give_back
from watchstep_services.service.context import Service

RELINQUISH_SECONDS = 1.0
"""Time after which a batch keeps no run that it does not evaluate. A usual evaluation takes some hundredths of a second."""

_log = logging.getLogger(__name__)


FollowUp = Callable[[int, Evaluation], None]
"""Called with a run's id and the result of its evaluation, once it is committed or released."""


@dataclass(frozen=True)
class Claimed:
    """A batch.

    Attributes:
        runs: number of its runs.
        is_full: as many were due as it may have.
        has_exceptions: runs of a project were not claimed, because its evaluations occupy as many threads as they may.
    """

    runs: int
    is_full: bool
    has_exceptions: bool = False


def evaluate_due(service: Service, follow_up: FollowUp, run_id: int = 0) -> Claimed:
    """Evaluate the runs that have been due for longest, among the candidates of this worker.

    Errors of one run are logged and recorded in its health.

    Args:
        service: the service.
        follow_up: is called with each result; not for evaluations that failed.
        run_id: the requested run, which is a candidate if it is due; 0 for none.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    lease_ns, most = nanoseconds(service.settings.lease_seconds), service.batch_size.runs

    def claim(except_projects: list[str]) -> list[Claim]:
        return claim_due(service.database, run_id, service.worker, lease_ns, most, except_projects)

    with service.evaluation_threads.evaluating(claim) as (claims, has_exceptions):
        if claims:
            began = time.monotonic()
            batch = RunBatch(service, claims, follow_up)
            with keep_lease(batch) if len(claims) > 1 else nullcontext():
                batch.evaluate()
            service.batch_size.note(len(claims), time.monotonic() - began)
    return Claimed(len(claims), len(claims) >= most, has_exceptions)


class RunBatch:
    """Runs that were claimed together. Another thread may call `renew` meanwhile.

    Args:
        service: the service.
        claims: the claims, in the order of evaluation.
        follow_up: is called with each result, by the thread that calls `evaluate`.
    """

    def __init__(self, service: Service, claims: Sequence[Claim], follow_up: FollowUp) -> None:
        self._follow_up = follow_up
        self._results: deque[tuple[int, Evaluation]] = deque()
        self.seconds: Final = 3 * RELINQUISH_SECONDS  # `renew` is called after a third of it
        self._service = service
        self._waiting = deque(claims)
        self._deferred: list[Deferred] = []
        self._lock = threading.Lock()

    def evaluate(self) -> None:
        """Evaluate the runs, and commit them.

        Raises:
            SQLAlchemyError: the database did not answer.
        """
        try:
            ahead = self._read_ahead()
            while (claim := self._next()) is not None:
                if claim.is_troubled:
                    self._commit()  # this evaluation may end the process
                self._evaluate_one(claim, ahead.get(claim.run_id))
                self._follow_up_all()  # at once: a stop waits for no other run
            self._commit()
            self._follow_up_all()
        finally:
            self._give_back()

    def renew(self) -> bool:
        """Commit what is deferred, and give back what has not begun; it need not be done again."""
        try:
            self._give_back()
            self._commit()
        except SQLAlchemyError as error:
            _log.warning("a batch of evaluations keeps its runs: %s", error)
        return False

    def _follow_up_all(self) -> None:
        while self._results:
            self._follow_up(*self._results.popleft())

    def _next(self) -> Claim | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _read_ahead(self) -> dict[int, ReadAhead]:
        """Load the inboxes of all runs, and fetch segments from stores that are not local."""
        claims = list(self._waiting)
        if len(claims) == 1 and claims[0].place.is_local:
            return {}
        inboxes = open_inboxes(self._service.database, [claim.run_id for claim in claims])
        ahead = {run_id: ReadAhead(inbox) for run_id, inbox in inboxes.items()}
        remote = [claim for claim in claims if not (claim.place.is_local or claim.is_troubled)]
        fetch_ahead(self._service, remote, ahead)
        return ahead

    def _evaluate_one(self, claim: Claim, ahead: ReadAhead | None) -> None:
        try:
            with observing() as observation:
                result = evaluate_claimed(self._service, claim, observation, ahead, may_defer=True)
        except Exception as error:
            if is_of_all(error):
                raise
            _log_failure(claim, error)
            return
        if isinstance(result, Evaluation):
            self._add(claim, result)
            return
        with self._lock:
            self._deferred.append(result)

    def _add(self, claim: Claim, result: Evaluation) -> None:
        count_outcome(result.outcome)
        self._results.append((claim.run_id, result))

    def _commit(self) -> None:
        """Commit the deferred evaluations with one statement; those that it leaves out, one by one."""
        with self._lock:
            deferred, self._deferred = self._deferred, []
            if not deferred:
                return
            outcomes = [(entry.claim, entry.judgement.outcome) for entry in deferred]
            committed = commit_all(self._service, outcomes) if len(outcomes) > 1 else {}
            # Those that are committed first: the others may wait for a locked row.
            for entry in sorted(deferred, key=lambda entry: entry.claim.run_id not in committed):
                self._finish(entry, committed)

    def _finish(self, entry: Deferred, committed: dict[int, Committed]) -> None:
        claim, judgement, observation = entry.claim, entry.judgement, entry.observation
        try:
            if claim.run_id in committed:
                with observation.committing(claim, judgement.outcome):
                    result = finished(self._service, claim, judgement, observation, committed[claim.run_id])
            else:
                result = commit_judged(self._service, claim, judgement, observation)
        except Exception as error:
            if is_of_all(error):
                raise
            release_failed(self._service, claim, error, judgement.outcome.collected)
            _log_failure(claim, error)
            return
        self._add(claim, result)

    def _give_back(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        give_back(self._service.database, waiting)


def _log_failure(claim: Claim, error: Exception) -> None:
    """Log the error of one run; its health reports it, too."""
    if isinstance(error, WatchstepError):
        _log.warning("run %s/%s: %s", claim.project, claim.run, error)
    else:
        _log.error("run %s/%s: its evaluation failed", claim.project, claim.run, exc_info=error)
