"""Baselines of a project's programs: summaries of healthy runs, and the baseline that is pinned to a new attempt.

After a run has ended, its upkeep stores a summary of it if it is healthy. Before the first rows of an attempt are evaluated, the
newest summaries of the same program become the attempt's baseline. It is created as an object on the store, then recorded in the
database, and never changes, so rows are evaluated alike however they arrive, and a backtest gives the live results.
"""

from __future__ import annotations

import hashlib
import json
import logging

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format import documents
from watchstep.format.documents import RunDocument
from watchstep.format.layout import RUN_DOCUMENT, baseline_document
from watchstep.format.tensors import BIASES, WEIGHTS, TensorInfo
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.baseline import read_baseline, summarize_run
from watchstep_rules.builtin.tensors.unlike_earlier_runs import UnlikeEarlierRuns
from watchstep_rules.signals.baseline import MAX_RUNS, MIN_RUNS, BaselineRun, merge_summaries
from watchstep_services.db.engine import Database, insert_missing
from watchstep_services.db.models import AlertRow, Attempt, PinnedBaseline, RunRow, RunSummaryRow
from watchstep_services.service.context import Service

_log = logging.getLogger(__name__)

_UNHEALTHY = ("warning", "critical")
_CANDIDATES = 5 * MAX_RUNS
"""Newest summaries of a program that are considered; a program may alternate between models."""


def summarize(service: Service, run_id: int, run_store: Store) -> None:
    """Store the summary of an ended run if it is healthy, and delete an earlier summary of it.

    A run is healthy if it completed and no alert of severity warning or critical fired. Alerts of `unlike_earlier_runs` do not
    count, because otherwise a program that was changed on purpose could never get a new baseline.

    Raises:
        StoreError: the store cannot be read.
    """
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        healthy = run.state == "completed" and not _has_fired(session, run_id)
    document = _run_document(run_store) if healthy else None
    summary = summarize_run(open_run(run_store)) if document is not None else None
    with service.database.write() as session:
        session.execute(delete(RunSummaryRow).where(RunSummaryRow.run_id == run_id))
        if document is not None and summary is not None and summary.tensors:
            session.add(
                RunSummaryRow(
                    run_id=run_id,
                    project=run.project,
                    program=program_of(document),
                    ended_ns=run.ended_ns or 0,
                    summary=summary.model_dump_json(),
                )
            )


def pin_baseline(
    service: Service, run_store: Store, attempt: Attempt, project: str, catalogue: tuple[TensorInfo, ...]
) -> None:
    """Pin the baseline of an attempt without evaluated rows; does nothing if there are too few healthy runs.

    If the store does not answer or is read-only, the run is evaluated without a baseline.

    Args:
        service: the service.
        run_store: seen from the run.
        attempt: the attempt.
        project: of the run.
        catalogue: tensors of the first rows. Runs with other parameter shapes do not count.
    """
    try:
        _pin(service, run_store, attempt, project, catalogue)
    except StoreError as error:
        _log.warning("project %s: an attempt is evaluated without a baseline: %s", project, error.what)


def _pin(
    service: Service, run_store: Store, attempt: Attempt, project: str, catalogue: tuple[TensorInfo, ...]
) -> None:
    with service.database.read() as session:
        enough = (
            select(func.count())
            .select_from(RunSummaryRow)
            .where(RunSummaryRow.project == project, RunSummaryRow.run_id != attempt.run_id)
        )
        if session.execute(enough).scalar_one() < MIN_RUNS:
            return
    document = _run_document(run_store)
    if document is None:
        return
    baseline = merge_summaries(_summaries(service.database, project, document, attempt.run_id, catalogue))
    if baseline is None:
        return
    text = baseline.model_dump_json()
    if not run_store.create(baseline_document(attempt.attempt), text.encode()):
        try:
            text = read_baseline(run_store, attempt.attempt) or ""
        except FormatError:
            return  # a backtest could not read it either
    if text:
        with service.database.write() as session:
            insert_missing(session, PinnedBaseline, {"attempt_id": attempt.id, "baseline": text})


def pinned_baseline(session: Session, run_id: int, attempt: str) -> str | None:
    """The JSON text of an attempt's pinned baseline; None if it has none."""
    return session.execute(
        select(PinnedBaseline.baseline)
        .join(Attempt, Attempt.id == PinnedBaseline.attempt_id)
        .where(Attempt.run_id == run_id, Attempt.attempt == attempt)
    ).scalar_one_or_none()


def program_of(document: RunDocument) -> str:
    """A hash of the program and its capture configuration; equal for runs of one program file with one configuration."""
    identity = [document.environment.get("program", ""), document.config]
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _summaries(
    database: Database, project: str, document: RunDocument, run_id: int, catalogue: tuple[TensorInfo, ...]
) -> dict[str, BaselineRun]:
    """Summaries by run, newest first, of runs of the program with parameters of the same shapes."""
    with database.read() as session:
        rows = session.execute(
            select(RunRow.run, RunSummaryRow.summary)
            .join(RunRow, RunRow.id == RunSummaryRow.run_id)
            .where(
                RunSummaryRow.project == project,
                RunSummaryRow.program == program_of(document),
                RunSummaryRow.run_id != run_id,
            )
            .order_by(RunSummaryRow.ended_ns.desc(), RunSummaryRow.run_id.desc())
            .limit(_CANDIDATES)
        ).all()
    shapes = {info.name: info.shape for info in catalogue if {WEIGHTS, BIASES} & set(info.collections)}
    summaries = {name: BaselineRun.model_validate_json(text) for name, text in rows}
    return {name: summary for name, summary in summaries.items() if _has_shapes(summary, shapes)}


def _has_shapes(summary: BaselineRun, shapes: dict[str, tuple[int, ...]]) -> bool:
    return all(
        name not in summary.tensors or summary.tensors[name].shape == shape for name, shape in shapes.items()
    )


def _has_fired(session: Session, run_id: int) -> bool:
    fired = select(AlertRow.id).where(
        AlertRow.run_id == run_id,
        AlertRow.fired_ns.is_not(None),
        AlertRow.severity.in_(_UNHEALTHY),
        AlertRow.rule != UnlikeEarlierRuns.name,
    )
    return session.execute(fired.limit(1)).scalar_one_or_none() is not None


def _run_document(run_store: Store) -> RunDocument | None:
    """The run's document; None if it is absent or damaged."""
    try:
        data = run_store.get(RUN_DOCUMENT, limit=documents.MAX_BYTES)
        return documents.decode(RunDocument, data, RUN_DOCUMENT)
    except (NotFoundError, FormatError):
        return None
