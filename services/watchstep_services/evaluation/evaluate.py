"""Evaluate one run. `evaluation.batch` evaluates the runs that are due; both do it by the same phases.

claim ── collect ──▶ judge ──▶ commit ──▶ committed
│          │          │          └ the claim is not current ──▶ fenced
│          └──────────┴ another large evaluation runs ──▶ released, due again
└ nothing to judge, or the store hangs ──▶ released
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from watchstep.errors import WatchstepError
from watchstep.format import layout
from watchstep_rules.config.attached import reads_tensors
from watchstep_rules.custom.sandbox.pool import on_behalf_of
from watchstep_rules.engine.rule_inputs import History, JudgingProgress, Lookback, joined, trimmed
from watchstep_rules.references import saved_tensors_of
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import NANOSECONDS, nanoseconds
from watchstep_services.db.engine import is_of_all
from watchstep_services.db.lease import RUN_LEASE, LeasedRow, keep_lease
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.evaluation import inbox as cursors
from watchstep_services.evaluation import ticks
from watchstep_services.evaluation import watermark as watermarks
from watchstep_services.evaluation.baselines import pin_baseline
from watchstep_services.evaluation.collect import (
    AbsentLookups,
    Collected,
    ReadAhead,
    RunSource,
    collect,
    reject_new_tensors,
    run_store_of,
    spans_of_ranks,
)
from watchstep_services.evaluation.commit import Committed, EvaluationOutcome, commit, has_news
from watchstep_services.evaluation.context import read_context
from watchstep_services.evaluation.inbox import FAILED_ATTEMPTS, Gap, ended_ranks
from watchstep_services.evaluation.observation import Observation, count_outcome, observing
from watchstep_services.evaluation.references import AttemptReferences
from watchstep_services.evaluation.unfinished_reads import ReadingGuard
from watchstep_services.evaluation.watermark import AttemptProgress, RankProgress
from watchstep_services.runs import attempts
from watchstep_services.runs.claim import (
    Claim,
    FencedError,
    claim,
    claim_longest_due,
    lock_run,
    release,
    release_after_failure,
    take_turn,
    wait_for_turn,
)
from watchstep_services.runs.discovery import discover
from watchstep_services.service.context import Service, StoppingError
from watchstep_services.service.judging import (
    REQUESTED_IN_TURN_SECONDS,
    REQUESTED_SECONDS,
    EvaluationLimits,
    Judged,
    LostContext,
    judge_all,
    lookback,
    report_lost_context,
)
from watchstep_services.service.rule_time import RETRY_SECONDS, charged

_RETRY_SECONDS = 5.0
_NEVER = 1 << 62
_MOST_FAILED = 20
"""Limit of failed attempts in a run's health."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        outcome: ``busy``: another worker has claimed the run; ``idle``: nothing to evaluate; ``committed``;
            ``fenced``: another worker claimed the run meanwhile, and all results were discarded.
        more: more can be evaluated at once.
        actions: ids of the actions that it caused.
        steady: nothing was found that could change the state of the run or of an alert.
    """

    outcome: Literal["busy", "idle", "committed", "fenced"]
    more: bool = False
    actions: tuple[int, ...] = ()
    steady: bool = False


def evaluate(service: Service, run_id: int) -> Evaluation:
    """Evaluate new segments of a run.

    Raises:
        StoreError, ConfigError: the store did not answer; the run is released and evaluated again later.
    """
    with observing() as observation:
        current = claim(service.database, run_id, nanoseconds(service.settings.lease_seconds))
        evaluation = _evaluate(service, current, observation)
    count_outcome(evaluation.outcome)
    return evaluation


def evaluate_longest_due(service: Service, run_id: int) -> tuple[int, Evaluation]:
    """Evaluate the run that has been due for longest, among the candidates of this worker.

    Args:
        service: the service.
        run_id: the requested run, which is evaluated if none is due.

    Returns:
        The run's id, and the result of its evaluation.

    Raises:
        StoreError, ConfigError: as `evaluate`.
    """
    with observing() as observation:
        lease_ns = nanoseconds(service.settings.lease_seconds)
        current = claim_longest_due(service.database, run_id, service.worker, lease_ns)
        if current is None:
            current = claim(service.database, run_id, lease_ns)
        evaluation = _evaluate(service, current, observation)
    count_outcome(evaluation.outcome)
    return (run_id if current is None else current.run_id), evaluation


def _evaluate(service: Service, claim: Claim | None, observation: Observation) -> Evaluation:
    if claim is None:
        return Evaluation("busy")
    result = evaluate_claimed(service, claim, observation)
    assert isinstance(result, Evaluation)  # nothing is deferred
    return result


@dataclass(frozen=True)
class Deferred:
    """An evaluation that has been judged, changes no alert, and is committed together with others.

    Attributes:
        claim: the claim.
        judgement: its results.
        observation: its telemetry.
    """

    claim: Claim
    judgement: Judgement
    observation: Observation


def evaluate_claimed(
    service: Service,
    claim: Claim,
    observation: Observation,
    ahead: ReadAhead | None = None,
    *,
    may_defer: bool = False,
) -> Evaluation | Deferred:
    """Evaluate a claimed run.

    Args:
        service: the service.
        claim: the claim.
        observation: telemetry of the evaluation.
        ahead: what was read of the run since the claim.
        may_defer: leave the commit to the caller if there is no news and few rows, so that the caller commits several with one statement.

    Raises:
        StoreError, ConfigError: as `evaluate`.
    """
    observation.claimed(claim)
    failpoint("evaluate.claimed", claim)
    with ExitStack() as end_turn:
        try:
            turn = _Turn(service, claim, end_turn)
            evaluation = _evaluate_in_phases(service, claim, observation, turn, ahead, may_defer=may_defer)
        except FencedError:
            evaluation = Evaluation("fenced")
    if isinstance(evaluation, Evaluation) and evaluation.outcome == "fenced":
        failpoint("evaluate.fenced", claim)
    return evaluation


def _evaluate_in_phases(
    service: Service,
    claim: Claim,
    observation: Observation,
    turn: _Turn,
    ahead: ReadAhead | None,
    *,
    may_defer: bool,
) -> Evaluation | Deferred:
    """Run the three phases: collect, judge, commit. Only the last writes results.

    Raises:
        FencedError: another worker has taken the run; nothing was written.
    """
    collected: Collected | None = None
    judgement: Judgement | None = None
    try:
        if not _answers(service, claim):
            wait = service.hanging_stores.retry_seconds(claim.place.registration)
            return Evaluation("idle", _postpone(service, claim, wait))
        if claim.waits_for_turn and not turn.take():
            return Evaluation("idle", _wait_for_turn(service, claim))
        with _reading(service, claim, ahead) as source:
            collected = _collect(service, claim, source)
            failpoint("evaluate.read", claim)
            waits = _is_large(service, claim, collected) and not turn.take()
            if collected.attempt and not waits:
                judgement = _judge(service, claim, source, collected, turn)
                waits = judgement is None
        if waits:
            # The thread does not wait for the other evaluation, because that would delay other runs.
            return Evaluation("idle", _wait_for_turn(service, claim))
        if judgement is None:
            more = release(service.database, claim, _due(service, claim, collected))
            failpoint("evaluate.released", claim)
            return Evaluation("idle", more)
        failpoint("evaluate.judged", claim)
        is_usual = may_defer and not turn.is_taken and not collected.has_several_rows
        if is_usual and not has_news(claim, judgement.outcome):
            return Deferred(claim, judgement, observation)
        return commit_judged(service, claim, judgement, observation)
    except FencedError:
        raise
    except StoppingError:
        release_after_failure(service.database, claim, 0)
        return Evaluation("idle")
    except BaseException as error:
        release_failed(service, claim, error, collected)
        raise


def commit_judged(
    service: Service, claim: Claim, judgement: Judgement, observation: Observation
) -> Evaluation:
    """Commit the results of the second phase."""
    with observation.committing(claim, judgement.outcome):
        committed = commit(service, claim, judgement.outcome)
    return finished(service, claim, judgement, observation, committed)


def finished(
    service: Service,
    claim: Claim,
    judgement: Judgement,
    observation: Observation,
    committed: Committed | None,
) -> Evaluation:
    """The result of an evaluation after its commit, which is None if the claim was not current."""
    if committed is None:
        return Evaluation("fenced")
    failpoint("evaluate.committed", claim)
    observation.committed(claim, judgement.outcome)
    return _remember(service, claim, judgement, committed)


@contextmanager
def _reading(service: Service, claim: Claim, ahead: ReadAhead | None) -> Iterator[RunSource]:
    """Context of the phases that read and evaluate: renews the claim, and limits the rules to the project's rule time."""
    guard, absent = ReadingGuard(service.database, claim), AbsentLookups()
    rule_seconds = service.settings.rule_seconds
    time_limits = charged(
        service.database,
        claim.project,
        rule_seconds,
        service.usual_time,
        lambda: absent.seconds,
        is_urgent=claim.is_urgent,
    )
    silence_noted = service.hanging_stores.noted(claim.place.registration)
    seconds, name = service.settings.lease_seconds, f"run {claim.project}/{claim.run}"
    leased = LeasedRow(service.database, RUN_LEASE, claim.run_id, claim.epoch, seconds, name)
    with keep_lease(leased), guard.watching(), on_behalf_of(claim.project), time_limits, silence_noted:
        yield RunSource(run_store_of(service, claim), guard, absent, ahead or ReadAhead())


def _answers(service: Service, claim: Claim) -> bool:
    """Whether the run's store may be used: it does not hang as far as this process knows."""

    def probe() -> None:
        run_store_of(service, claim).get(layout.RUN_DOCUMENT)

    return service.hanging_stores.answers(claim.place.registration, probe)


class _Turn:
    """The turn for large evaluations, of this process and of the project. It is taken when it is needed, and ends with the evaluation."""

    def __init__(self, service: Service, claim: Claim, end: ExitStack) -> None:
        self._service, self._claim, self._end = service, claim, end
        self._is_taken = False

    @property
    def is_taken(self) -> bool:
        """Whether this evaluation has the turn."""
        return self._is_taken

    def take(self) -> bool:
        """Take the turn, unless this evaluation has it. Returns whether it has it; otherwise it has to wait."""
        if not self._is_taken:
            if not self._service.large_turn.take(self._claim.project):
                return False
            self._end.callback(self._service.large_turn.release, self._claim.project)
            self._is_taken = take_turn(self._service.database, self._claim)
        return self._is_taken

    @property
    def limits(self) -> EvaluationLimits:
        """Limits of the evaluation."""
        seconds = REQUESTED_IN_TURN_SECONDS if self._is_taken else REQUESTED_SECONDS
        return EvaluationLimits(self.check_running, seconds)

    def check_running(self) -> None:
        """Stop a large evaluation if the process ends. Usual evaluations are short, and are finished.

        Raises:
            StoppingError: the process ends, and this evaluation has the turn.
        """
        if self._is_taken:
            self._service.check_running()


def _wait_for_turn(service: Service, claim: Claim) -> bool:
    """Release a run with a large evaluation until the turn may be free; return whether it is due again at once."""
    return wait_for_turn(service.database, claim, claim.now_ns + nanoseconds(RETRY_SECONDS))


def _postpone(service: Service, claim: Claim, seconds: float) -> bool:
    """Release the run until some seconds from now; return whether it is due again at once."""
    return release(service.database, claim, claim.now_ns + nanoseconds(seconds))


def _remember(service: Service, claim: Claim, judgement: Judgement, committed: Committed) -> Evaluation:
    """Cache the state with which the next evaluation begins if this process does it."""
    outcome = judgement.outcome
    key = (claim.run_id, outcome.collected.attempt)
    service.histories.put(key, outcome.cursor, judgement.lookback, judgement.rows)
    loaded = [judged.committed(committed.reported_health.get(judged.row.id)) for judged in outcome.judged]
    service.rule_states.put(key, claim.epoch, loaded)
    more = outcome.collected.more or committed.hinted
    steady = judgement.steady and not any(judged.transitions for judged in outcome.judged)
    return Evaluation("committed", more, tuple(committed.actions), steady)


def release_failed(service: Service, claim: Claim, error: BaseException, collected: Collected | None) -> None:
    """Record why an evaluation failed, and release the run. The failed attempt is evaluated after the others from now on."""
    attempt = "" if collected is None else collected.attempt
    retry_ns = nanoseconds(_RETRY_SECONDS)
    failure = error if isinstance(error, Exception) and not is_of_all(error) else None
    try:
        if failure is not None:
            problem = _problem_of(failure)
            with suppress(FencedError), service.database.write() as session:
                run = lock_run(session, claim.run_id, claim)
                health = {**run.health, "evaluation": problem}
                if attempt:
                    failed = {**health.get(FAILED_ATTEMPTS, {}), attempt: problem}
                    health[FAILED_ATTEMPTS] = dict(list(failed.items())[-_MOST_FAILED:])
                run.health = health
        if failure is not None and collected is not None and attempt and attempt not in collected.failing:
            retry_ns = 0  # the other attempts are evaluated at once
        release_after_failure(service.database, claim, retry_ns)
    except SQLAlchemyError as database_error:
        # The evaluation's own error is raised, not this one. The run becomes due again when its lease expires.
        _log.warning(
            "run %s/%s: claimed until its lease expires: %s", claim.project, claim.run, database_error
        )


def _problem_of(error: Exception) -> str:
    """The text of an error in a run's health. Errors that are not meant for users are not quoted: they may contain anything."""
    if isinstance(error, WatchstepError):
        return error.what[:500]
    return f"the service failed on it ({type(error).__name__}); see the service's log"


@dataclass(frozen=True)
class Judgement:
    """The result of the second phase, which the third commits.

    Attributes:
        outcome: results to commit.
        rows: earlier rows within the next evaluation's lookback.
        lookback: lookback of the rules.
        steady: nothing was found that could change the state of the run.
    """

    outcome: EvaluationOutcome
    rows: History
    lookback: Lookback
    steady: bool


def _collect(service: Service, claim: Claim, source: RunSource) -> Collected:
    """Collect new rows, or choose an attempt whose watermark can advance or whose silence is evaluated."""
    collected = collect(service, claim, source)
    if collected.blocks:
        return collected
    silent = ticks.attempt_to_tick(service, claim.run_id, claim.now_ns)
    # A lost announcement looks like a stalled training; only a listing distinguishes the two.
    if silent and discover(service, claim.run_id, claim).fresh:
        collected = collect(service, claim, source)
        silent = ticks.attempt_to_tick(service, claim.run_id, claim.now_ns)
    if not collected.attempt:
        waiting = (_attempt_past_deadline(service, claim, collected.failing), silent)
        candidates = [attempt for attempt in waiting if attempt]
        collected.attempt = min(candidates, key=lambda attempt: attempt in collected.failing, default="")
    return collected


def _is_large(service: Service, claim: Claim, collected: Collected) -> bool:
    """Whether evaluating the segments may take long: many rows, or rows for many rules, steps for SQL rules, long names, or full tensors."""
    if collected.is_large or collected.has_long_words:
        return True
    if not any(info.role == "saved" for _, block in collected.blocks for info in block.catalogue):
        return False
    configs = ticks.cached_configs(service, claim, collected.attempt)
    return any(loaded.config is not None and reads_tensors(loaded.config) for loaded in configs)


def _judge(
    service: Service, claim: Claim, source: RunSource, collected: Collected, turn: _Turn
) -> Judgement | None:
    """Evaluate the rules; None if references have to be read for them, and another large evaluation runs."""
    attempt = collected.attempts.get(collected.attempt)
    if attempt is None or not attempt.world_size:
        attempt = attempts.load(service.database, source.store, claim.run_id, collected.attempt, claim)
    # Ticks of rules that evaluate the clock may precede the first rows.
    first = (
        next((block for _, block in collected.blocks if len(block)), None) if attempt.largest < 0 else None
    )
    if first is not None:
        pin_baseline(service, source.store, attempt, claim.project, first.catalogue)
    configs = ticks.cached_configs(service, claim, collected.attempt, reload=first is not None)
    references = AttemptReferences(service, source.store, claim.project, attempt)
    first_step = None if first is None else int(first.step.min())
    compared = references.add(configs, first_step=first_step, take_turn=turn.take)
    if compared is None:
        return None
    depth = lookback(configs)
    before, lost = _history(service, claim, source, attempt, depth)
    reject_new_tensors(collected, before.block.catalogue)
    for entry, _ in collected.blocks:
        source.guard.check(entry.key)  # from here on, these segments are the likely cause of a crash

    progress = _progress(service, claim, attempt, collected)
    # While segments wait to be read, a worker without rows is not silent.
    lateness_ns = _NEVER if collected.more else nanoseconds(service.settings.allowed_lateness_seconds)
    blocks = [block if depth.histograms else block.without_histograms() for _, block in collected.blocks]
    parts = list(enumerate(blocks, claim.journal))
    arrived = joined(parts, History.empty()).block
    steps = np.concatenate([before.block.step, arrived.step])
    decided = watermarks.decide(progress, claim.now_ns, lateness_ns)
    if (
        decided is not None
        and decided.cause == "deadline"
        and _finds_more(service, claim, progress, lateness_ns)
    ):
        collected.more = True
        decided = watermarks.decide(progress, claim.now_ns, _NEVER)
    advance = watermarks.bounded(decided, progress.watermark, steps)
    watermark = advance.step if advance else progress.watermark
    ended = not collected.blocks and ticks.is_over(service, claim.run_id, collected.attempt)
    judging = JudgingProgress(attempt.watermark, watermark, claim.now_ns, ended)
    saved = saved_tensors_of(source.store, collected.attempt, compared.references, references.store_of)
    judged = judge_all(compared.configs, before.block, arrived, judging, turn.limits, saved)
    judged = compared.without_statistics(judged, configs)
    if lost is not None:
        judged = report_lost_context(judged, lost, attempt.watermark)
    rows = trimmed(joined(parts, before), depth, watermark)
    outcome = EvaluationOutcome(
        collected=collected,
        cursor=cursors.encode(collected.cursor),
        progress=progress,
        advance=advance,
        context=rows.positions,
        judged=judged,
        ended=ended,
        lost=lost,
        limited=rows.limited,
        due_ns=_due(service, claim, collected, replace(progress, watermark=watermark), judged),
    )
    steady = claim.state == "running" and claim.attempt == attempt.attempt and not attempt.ends
    return Judgement(outcome, rows, depth, steady)


def _finds_more(service: Service, claim: Claim, progress: AttemptProgress, lateness_ns: int) -> bool:
    """Whether a listing finds segments of a run with a silent worker, unless one was made since the worker's deadline.

    A lost announcement looks like a silent worker; only a listing distinguishes the two.
    """
    with service.database.read() as session:
        listed_ns = session.get_one(RunRow, claim.run_id).listed_ns
    if listed_ns >= watermarks.expired_ns(progress, claim.now_ns, lateness_ns):
        return False
    return discover(service, claim.run_id, claim).fresh


def _attempt_past_deadline(service: Service, claim: Claim, failing: frozenset[str]) -> str:
    """An attempt whose watermark a deadline advances, preferably one that did not fail; empty for none."""
    with service.database.read() as session:
        rows = session.execute(
            select(Attempt).where(Attempt.run_id == claim.run_id, Attempt.watermark < Attempt.largest)
        ).scalars()
        attempts_waiting = sorted((row for row in rows if row.ranks), key=lambda row: row.attempt in failing)
    lateness_ns = nanoseconds(service.settings.allowed_lateness_seconds)
    nothing = Collected("", cursors.decode(claim.cursor))
    for row in attempts_waiting:
        if watermarks.decide(_progress(service, claim, row, nothing), claim.now_ns, lateness_ns):
            return row.attempt
    return ""


def _history(
    service: Service, claim: Claim, source: RunSource, attempt: Attempt, depth: Lookback
) -> tuple[History, LostContext | None]:
    """Earlier rows, from the cache if it is current and else from the store, and the rows that cannot be read there."""
    cached = service.histories.get((claim.run_id, attempt.attempt), claim.cursor, depth)
    if cached is not None:
        return cached, None
    return read_context(service.database, source, attempt, depth)


def _progress(service: Service, claim: Claim, row: Attempt, collected: Collected) -> AttemptProgress:
    until = claim.now_ns - nanoseconds(service.settings.gap_seconds)
    progress = AttemptProgress(
        row.world_size,
        row.first_seen_ns,
        watermarks.ranks_from_data(row.ranks),
        ended_ranks(collected.cursor, row.attempt, row.ends, until),
        row.watermark,
    )
    # A segment of a node's writer contains several ranks, which may be at different steps.
    return progress.with_segments(
        (rank, RankProgress(last, entry.found_ns))
        for entry, block in collected.blocks
        for rank, _, last, _ in spans_of_ranks(block)
    )


def _due(
    service: Service,
    claim: Claim,
    collected: Collected,
    progress: AttemptProgress | None = None,
    judged: Sequence[Judged] = (),
) -> int | None:
    """When the next evaluation is due if no hint arrives before; None if it waits for a hint."""
    settings = service.settings
    if collected.more:
        return claim.now_ns
    retry_ns = claim.now_ns + nanoseconds(_RETRY_SECONDS)
    moments = [retry_ns for _ in collected.failed]
    moments += [_gap_due(service, claim, gap) for gap in collected.waiting]
    moments += _later_watermarks(service, claim, collected)
    if progress is not None:
        deadline_ns = watermarks.due_ns(progress, nanoseconds(settings.allowed_lateness_seconds))
        moments += [] if deadline_ns is None else [deadline_ns]
    ticking = _tick_due(service, claim, collected.attempt, judged)
    moments += [] if ticking is None else [ticking]
    return min(moments, default=None)


def _tick_due(service: Service, claim: Claim, attempt: str, judged: Sequence[Judged]) -> int | None:
    """When a rule is due without new rows; a moment in the past is put off to the next second."""
    if claim.attempt == attempt and ticks.next_tick(judged) is None:
        return None  # none of its rules evaluates the clock
    newest = ticks.newest_attempt(service, claim.run_id)
    if not newest:
        return None
    configs = (
        judged if newest == attempt else ticks.load_configs(service, claim.run_id, newest, only_clocks=True)
    )
    due = ticks.next_tick(configs)
    return None if due is None else max(due, claim.now_ns + NANOSECONDS)


def _gap_due(service: Service, claim: Claim, gap: Gap) -> int:
    return min(
        gap.since_ns + nanoseconds(service.settings.gap_seconds),
        claim.now_ns + service.settings.listing_ns(local=claim.place.is_local),
    )


def _later_watermarks(service: Service, claim: Claim, collected: Collected) -> list[int]:
    """When deadlines advance the watermarks of other attempts."""
    nothing = Collected("", cursors.decode(claim.cursor))
    due = [
        watermarks.due_ns(
            _progress(service, claim, row, nothing), nanoseconds(service.settings.allowed_lateness_seconds)
        )
        for row in collected.attempts.values()
        if row.watermark < row.largest and row.attempt != collected.attempt
    ]
    return [moment for moment in due if moment is not None]
