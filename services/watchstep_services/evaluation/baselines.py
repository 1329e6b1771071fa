"""Baselines of a project's programs: summaries of healthy runs, and the baseline that is pinned to a new attempt.

After a run has completed, its upkeep stores a summary of it. Before the first rows of an attempt are evaluated, the newest summaries
of healthy runs of the same program become the attempt's baseline. It is created as an object on the store, then recorded in the
database, and never changes, so rows are evaluated alike however they arrive, and a backtest gives the live results.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from watchstep.capture.provenance import CUT
from watchstep.errors import FormatError, StoreError
from watchstep.format.documents import AttemptDocument
from watchstep.format.layout import baseline_document
from watchstep.format.tensors import TensorInfo
from watchstep.reading.budget import OverBudgetError
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.baseline import read_baseline, summarize_run
from watchstep_rules.signals.baseline import MAX_RUNS, MIN_RUNS, BaselineRun, architecture_of, merge_summaries
from watchstep_services.db.engine import Database, insert_missing
from watchstep_services.db.models import (
    AlertInstanceRow,
    AlertRow,
    Attempt,
    PinnedBaseline,
    RunRow,
    RunSummaryRow,
)
from watchstep_services.runs import attempts
from watchstep_services.service.context import Service

_log = logging.getLogger(__name__)

_CANDIDATES = 5 * MAX_RUNS
"""Newest summaries of a program that are considered; a program may alternate between models."""


def summarize(service: Service, run_id: int, run_store: Store) -> None:
    """Store the summary of an ended run if it completed and its program is known; delete an earlier summary of it.

    Raises:
        StoreError: the store cannot be read.
    """
    with service.database.read() as session:
        run = session.get_one(RunRow, run_id)
        attempt = run.attempt if run.state == "completed" else ""
    document = attempts.read_document(run_store, attempt) if attempt else None
    program = "" if document is None else program_of(document)
    summary = None
    if program:
        try:
            summary = summarize_run(open_run(run_store))
        except OverBudgetError as error:
            _log.warning("run %s/%s: no summary for baselines: %s", run.project, run.run, error.what)
    with service.database.write() as session:
        session.execute(delete(RunSummaryRow).where(RunSummaryRow.run_id == run_id))
        if summary is not None and summary.tensors:
            session.add(
                RunSummaryRow(
                    run_id=run_id,
                    project=run.project,
                    program=program,
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
        catalogue: tensors of the first rows. Runs with other parameters do not count.
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
    document = attempts.read_document(run_store, attempt.attempt)
    program = "" if document is None else program_of(document)
    if not program:
        return
    baseline = merge_summaries(_summaries(service.database, project, program, attempt.run_id, catalogue))
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


_SEED = re.compile(r"(?i)(?:^|[-_.+])(?:seeds?|random[-_]state|rng)$")
"""Names of arguments for seeds, as ``--seed``, ``--data-seed`` and ``trainer.seed``."""


def program_of(document: AttemptDocument) -> str:
    """A hash of the program of an attempt; empty if its file or its arguments are not known.

    Equal for attempts with the same content of the program's file, arguments except seeds, capture configuration and number of workers.
    """
    digest, command = (document.environment.get(name, "") for name in ("program digest", "command"))
    if not digest or not command or command.endswith(CUT):
        return ""
    try:
        arguments = _without_seeds(shlex.split(command)[1:])
    except ValueError:
        return ""
    identity = [digest, arguments, document.config, document.world_size]
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _without_seeds(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the values of seeds left out: ``--seed 3``, ``--seed=3`` and ``trainer.seed=3``."""
    kept: list[str] = []
    follows_seed = False
    for argument in arguments:
        name, assigned, _ = argument.partition("=")
        is_seed = bool(_SEED.search(name))
        if not follows_seed or argument.startswith("--"):
            kept.append(name if is_seed and assigned else argument)
        follows_seed = is_seed and not assigned and argument.startswith("-")
    return kept


def _summaries(
    database: Database, project: str, program: str, run_id: int, catalogue: tuple[TensorInfo, ...]
) -> dict[str, BaselineRun]:
    """Summaries by run, newest first, of completed runs of the program without an alert and with the same parameters."""
    fired = (
        select(AlertRow.id)
        .outerjoin(
            AlertInstanceRow,
            (AlertInstanceRow.run_id == AlertRow.run_id)
            & (AlertInstanceRow.fingerprint == AlertRow.fingerprint),
        )
        .where(
            AlertRow.run_id == RunSummaryRow.run_id,
            AlertRow.fired_ns.is_not(None),
            func.coalesce(AlertInstanceRow.was_right, "") != "no",
        )
    )
    with database.read() as session:
        rows = session.execute(
            select(RunRow.run, RunSummaryRow.summary)
            .join(RunRow, RunRow.id == RunSummaryRow.run_id)
            .where(
                RunSummaryRow.project == project,
                RunSummaryRow.program == program,
                RunSummaryRow.run_id != run_id,
                ~fired.exists(),
            )
            .order_by(RunSummaryRow.ended_ns.desc(), RunSummaryRow.run_id.desc())
            .limit(_CANDIDATES)
        ).all()
    architecture = architecture_of(catalogue)
    summaries = {name: BaselineRun.model_validate_json(text) for name, text in rows}
    return {name: summary for name, summary in summaries.items() if summary.architecture == architecture}
