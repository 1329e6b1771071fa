"""Units of work that threads and Celery tasks share."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sqlalchemy import select

from watchstep.errors import WatchstepError
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.db.models import ActionRow
from watchstep_services.dispatch.dispatch import dispatch, posts_of
from watchstep_services.evaluation import evaluate as evaluating
from watchstep_services.evaluation.backtests import judge_next
from watchstep_services.evaluation.batch import evaluate_due as evaluate_batch
from watchstep_services.evaluation.evaluate import Evaluation
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.service.context import Service

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluated:
    """A batch of evaluations.

    Attributes:
        runs: number of runs that were claimed.
        is_full: as many were due as a batch may have, so that more may be.
        steady: nothing was found in any of them that could change the state of a run or of an alert.
        was_excepted: no run was claimed, and runs of a project whose evaluations occupy as many threads as they may were excepted.
    """

    runs: int
    is_full: bool
    steady: bool
    was_excepted: bool = False


def evaluate_longest_due(service: Service, run_id: int) -> Evaluation:
    """Evaluate the run that has been due for longest, among this worker's candidates; the given run if none is due.

    Then execute or hand out the actions that it caused, and advance the run's lifecycle.

    Raises:
        StoreError, ConfigError: as raised by `evaluate`.
    """
    return _followed_up(service, *evaluating.evaluate_longest_due(service, run_id))


def evaluate_due(service: Service, run_id: int = 0) -> Evaluated:
    """Evaluate the runs that have been due for longest, among this worker's candidates, with what follows from each.

    Args:
        service: the service.
        run_id: the requested run, which is a candidate if it is due; 0 for none.

    Raises:
        SQLAlchemyError: the database did not answer.
    """
    results: list[Evaluation] = []

    def follow_up(run_id: int, result: Evaluation) -> None:
        try:
            results.append(_followed_up(service, run_id, result))
        except WatchstepError as error:
            _log.warning("run %d: %s", run_id, error)

    claimed = evaluate_batch(service, follow_up, run_id)
    steady = len(results) == claimed.runs and all(result.steady for result in results)
    return Evaluated(claimed.runs, claimed.is_full, steady, claimed.has_exceptions and not claimed.runs)


def _followed_up(service: Service, run_id: int, result: Evaluation) -> Evaluation:
    posts = posts_of(service, result.actions)
    for action_id, post in posts.items():
        service.notifier.action_due(action_id, post)
    if result.more:
        service.notifier.run_changed(run_id, service.worker)
    for action_id in result.actions:
        if action_id not in posts:
            do_action(service, action_id)  # at once, because a message would wait behind earlier messages
    if result.outcome == "committed" and not result.steady:
        advance_run(service, run_id)
    return result


def do_action(service: Service, action_id: int) -> AttemptResult | None:
    """Try an action; after a stop, advance the run's lifecycle."""
    result = dispatch(service, action_id)
    if result is not None and result.facts is not None:
        with service.database.read() as session:
            run_id = session.execute(select(ActionRow.run_id).filter_by(id=action_id)).scalar_one()
        advance_run(service, run_id)
    return result


def do_backtest(service: Service, number: int) -> None:
    """Evaluate the next run of a backtest; hand out the next one behind other due work."""
    if judge_next(service, number):
        service.notifier.backtest_due(number)
