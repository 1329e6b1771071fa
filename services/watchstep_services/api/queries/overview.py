"""The overview of a run: what the database says about it, and its scalars binned over the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep.format.statistics import Floats
from watchstep.format.tensors import LOSSES, METRICS, SYSTEM, TensorInfo
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.comparison.settings import is_hyperparameter
from watchstep.reading.queries import loss_values
from watchstep.reading.run import Run
from watchstep_services.api.queries.line_bins import (
    LineBins,
    as_output,
    bin_rows,
    carried_forward,
    earliest,
    empty_line,
    grid_edges,
    in_order,
    only,
)
from watchstep_services.api.queries.rule_lanes import lanes_of, read_lane_rows
from watchstep_services.api.queries.run_events import (
    RunEvent,
    VisibleSteps,
    mark_of,
    read_events,
    stop_of,
    visible_steps,
)
from watchstep_services.api.queries.run_facts import (
    digest_of,
    dropped_of,
    facts_of,
    faults_of,
    overhead_of,
    problems_of_documents,
    reason_of_ends,
    reports_of,
)
from watchstep_services.api.schemas.binned_lines import LineGroup, StepGrid
from watchstep_services.api.schemas.run_pages import (
    AttemptFacts,
    Configuration,
    ExternalLink,
    RecorderFacts,
    RuleLane,
    RunFacts,
    RunHealth,
    RunMark,
    StopFacts,
)
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Attempt, BoundJobRow, RunRow, Segment
from watchstep_services.runs.lifecycle import health_of

REPEATED_STEPS = 1000
"""Recorders repeat an unchanged hyperparameter after this number of steps."""

SCALAR_FIGURES = ("mean", "count", "nan", "pos_inf", "neg_inf")
_MAX_LINES = {"losses": 32, "optimizer": 64, "metrics": 64, "system": 128}
_OF_WORKERS = frozenset({"metrics", "system"})
"""Groups with a line per worker: a flag, or the load of a machine, has no mean over workers."""

_MAX_RECORDERS = 64
_MAX_ATTEMPTS = 200
_MAX_URL = 2000


@dataclass(frozen=True)
class RunRecords:
    """What the database says about a run. With the state of its statistics, it determines the overview."""

    facts: RunFacts
    stop: StopFacts | None
    events: Sequence[RunEvent]
    earlier_events: int
    marks: Sequence[RunMark]
    lanes: Sequence[RuleLane]
    attempts: Sequence[AttemptFacts]
    health: RunHealth
    links: Sequence[ExternalLink]
    visible: Mapping[str, VisibleSteps]

    def inputs(self) -> list[Any]:
        """Return it as JSON-ready data."""
        models = [self.facts, self.stop, *self.marks, *self.lanes, *self.attempts, self.health, *self.links]
        return [model.model_dump(mode="json") for model in models if model is not None]


def read_records(session: Session, base_url: str, run: RunRow) -> RunRecords:
    """Read what the database says about a run, in a fixed number of queries."""
    (facts,) = facts_of(session, base_url, [run])
    events, earlier = read_events(session, run.id)
    attempts = _attempts(session, run)
    first_steps = {
        attempt.attempt: attempt.first_step for attempt in attempts if attempt.first_step is not None
    }
    visible = visible_steps(first_steps)
    marks = [mark_of(event, visible, run.attempt) for event in events]
    marks += _starts(attempts, visible)
    lanes = lanes_of(
        run, read_lane_rows(session, run, [attempt.attempt for attempt in attempts]), events, visible
    )
    return RunRecords(
        facts=facts,
        stop=stop_of(session, run, run.attempt, events) if run.attempt else None,
        events=events,
        earlier_events=earlier,
        marks=sorted(marks, key=lambda mark: mark.at_ns),
        lanes=lanes,
        attempts=attempts,
        health=_health(session, run),
        links=list(_links(run.health)),
        visible=visible,
    )


def _attempts(session: Session, run: RunRow) -> list[AttemptFacts]:
    chosen = select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.id.desc()).limit(_MAX_ATTEMPTS)
    rows = list(session.execute(chosen).scalars())[::-1]
    first_of_attempt = (
        select(Segment.attempt, func.min(Segment.first).label("first"))
        .where(Segment.run_id == run.id, Segment.seq == 0)
        .group_by(Segment.attempt)
    )
    first_steps = {row.attempt: row.first for row in session.execute(first_of_attempt)}
    jobs = {
        job.attempt: job for job in session.execute(select(BoundJobRow).filter_by(run_id=run.id)).scalars()
    }
    return [_attempt(row, first_steps.get(row.attempt), jobs.get(row.attempt)) for row in rows]


def _attempt(row: Attempt, first_step: int | None, job: BoundJobRow | None) -> AttemptFacts:
    states = Counter(str(end.get("state", "")) for end in row.ends.values() if isinstance(end, dict))
    return AttemptFacts(
        attempt=row.attempt,
        world_size=row.world_size,
        started_ns=row.started_ns or None,
        first_seen_ns=row.first_seen_ns or None,
        first_step=first_step,
        last_step=row.largest,
        watermark=row.watermark,
        states=dict(states),
        reason=reason_of_ends(row.ends),
        job="" if job is None else f"{job.backend}:{job.job_id}",
        job_state="" if job is None else job.state,
    )


def _starts(attempts: Sequence[AttemptFacts], visible: Mapping[str, VisibleSteps]) -> Iterator[RunMark]:
    for attempt in attempts:
        at_ns = attempt.first_seen_ns or attempt.started_ns
        if at_ns is None:
            continue
        yield RunMark(
            id=f"attempt:{attempt.attempt}",
            type="attempt.started",
            at_ns=at_ns,
            step=attempt.first_step,
            attempt=attempt.attempt,
            superseded=attempt.first_step is not None and attempt.attempt not in visible,
            title=f"attempt {attempt.attempt} begins",
            severity="",
            name="",
            fingerprint="",
        )


def _health(session: Session, run: RunRow) -> RunHealth:
    health = health_of(run, read_clock(session))
    reports = list(reports_of(health))
    recorders = [
        RecorderFacts(
            writer=writer,
            overhead=overhead_of(report),
            faults=faults_of(report),
            dropped=dropped_of(report),
            notes=_notes(report),
            report=dict(report),
        )
        for writer, report in reports[:_MAX_RECORDERS]
    ]
    return RunHealth(
        summary=digest_of(health),
        recorders=recorders,
        left_out=max(0, len(reports) - _MAX_RECORDERS),
        documents=problems_of_documents(health),
    )


def _notes(report: Mapping[str, Any]) -> dict[str, str]:
    notes = report.get("notes")
    return {str(name): str(text) for name, text in notes.items()} if isinstance(notes, dict) else {}


def _links(health: Mapping[str, Any]) -> Iterator[ExternalLink]:
    """Yield the addresses of the run in other tools, as recorders report them; only addresses of web pages."""
    found: dict[str, str] = {}
    for _, report in reports_of(health):
        mirror = report.get("mirror")
        for name, tool in mirror.items() if isinstance(mirror, dict) else ():
            url = tool.get("url") if isinstance(tool, dict) else None
            if isinstance(url, str) and _is_web_page(url):
                found.setdefault(str(name)[:64], url)
    for name, url in sorted(found.items()):
        yield ExternalLink(name=name, url=url)


def _is_web_page(url: str) -> bool:
    if len(url) > _MAX_URL or not url.isprintable():
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


@dataclass(frozen=True)
class OverviewWindow:
    """The steps of a picture, its number of columns, and the rank of the only worker that it shows; None for all."""

    first: int
    last: int
    points: int
    worker: int | None = None


@dataclass(frozen=True)
class Scalars:
    """The scalars of a run over a grid."""

    grid: StepGrid
    losses: LineGroup
    optimizer: LineGroup
    metrics: LineGroup
    system: LineGroup
    workers: Sequence[int]
    hyperparameters: Mapping[str, float | None]
    collections: Mapping[str, int]


EMPTY_GRID = StepGrid(first=0, last=-1, edges=[], time_ns=[])
_NO_LINES = LineGroup(lines=[])
EMPTY_SCALARS = Scalars(EMPTY_GRID, _NO_LINES, _NO_LINES, _NO_LINES, _NO_LINES, (), {}, {})


def read_scalars(run: Run, window: OverviewWindow) -> Scalars:
    """Read losses, hyperparameters and other metrics of a run, binned over one grid.

    Raises:
        StoreError: the store cannot be read.
        OverBudgetError: reading exceeds the run's budget.
    """
    first, last = run.index.step_range()
    edges = grid_edges(max(first, window.first), min(last, window.last), window.points)
    infos = run.index.tensors()
    collections = Counter(name for info in infos for name in info.collections)
    kinds = [kind_of(info) for info in infos]
    names = frozenset(info.name for info, kind in zip(infos, kinds, strict=True) if kind)
    grid = StepGrid(first=first, last=last, edges=edges.tolist(), time_ns=[])
    workers = run.workers
    if not names or not len(edges):
        times: list[int | None] = [None] * max(0, len(edges) - 1)
        timed = grid.model_copy(update={"time_ns": times})
        return replace(EMPTY_SCALARS, grid=timed, workers=workers, collections=collections)
    earlier = max(0, int(edges[0]) - REPEATED_STEPS)
    selection = Selection((*SCALAR_FIGURES, "time_ns"), names, earlier, int(edges[-1]) - 1)
    columns = run.index.consistently(lambda: run.index.collect(selection))
    if window.worker is not None:
        columns = only(columns, columns["worker"] == window.worker)
    of_tensor = np.array([_KINDS.index(kind) for kind in kinds])[columns["tensor"]]
    groups = {}
    hyperparameters: dict[str, float | None] = {}
    for place, kind in enumerate(_KINDS):
        if not kind:
            continue
        chosen = only(columns, of_tensor == place)
        groups[kind] = _group(kind, chosen, infos, edges)
        if kind == "optimizer":
            # Of the run, whatever steps are shown.
            newest = chosen if edges[-1] > last else _newest_hyperparameters(run, infos, last)
            hyperparameters = _last_values(newest, infos)
    time_ns = earliest(columns["step"].astype(np.int64), columns["time_ns"].astype(np.int64), edges)
    return Scalars(
        grid.model_copy(update={"time_ns": time_ns}),
        groups["losses"],
        groups["optimizer"],
        groups["metrics"],
        groups["system"],
        workers,
        hyperparameters,
        collections,
    )


def _newest_hyperparameters(run: Run, infos: Sequence[TensorInfo], last: int) -> Columns:
    """Read the last rows of the hyperparameters; they are recorded at least every `REPEATED_STEPS` steps."""
    names = frozenset(info.name for info in infos if kind_of(info) == "optimizer")
    selection = Selection(SCALAR_FIGURES, names, max(0, last - REPEATED_STEPS), last)
    return run.index.consistently(lambda: run.index.collect(selection))


_KINDS = ("", "losses", "optimizer", "metrics", "system")


def kind_of(info: TensorInfo) -> str:
    """Return the group of a scalar: losses, optimizer, metrics or system; empty for other tensors."""
    if LOSSES in info.collections:
        return "losses"
    if SYSTEM in info.collections:
        return "system"
    if METRICS not in info.collections:
        return ""
    return "optimizer" if is_hyperparameter(info) else "metrics"


def _group(kind: str, columns: Columns, infos: Sequence[TensorInfo], edges: NDArray[np.int64]) -> LineGroup:
    steps, values = columns["step"].astype(np.int64), loss_values(columns)
    is_of_workers = kind in _OF_WORKERS and len(np.unique(columns["worker"])) > 1
    lines = bin_rows(columns, values, steps, edges, by_worker=is_of_workers)
    if kind == "optimizer":
        lines = _repeated(lines, columns, values, edges)
    limit = _MAX_LINES[kind]
    return LineGroup(
        lines=[as_output(line, infos[line.tensor], "mean") for line in in_order(lines, infos)[:limit]],
        left_out=max(0, len(lines) - limit),
    )


def _repeated(
    lines: Sequence[LineBins], columns: Columns, values: Floats, edges: NDArray[np.int64]
) -> list[LineBins]:
    """Return hyperparameters that last until their next row, also those whose last row is before the grid."""
    steps = columns["step"].astype(np.int64)
    rows = np.flatnonzero(steps < edges[0])
    rows = rows[np.argsort(steps[rows], kind="stable")]
    before = dict(zip(columns["tensor"][rows].tolist(), values[rows].tolist(), strict=True))
    recorded = {line.tensor for line in lines}
    others = [empty_line(tensor, "train", len(edges) - 1) for tensor in before if tensor not in recorded]
    return [carried_forward(line, before.get(line.tensor, np.nan)) for line in (*lines, *others)]


def _last_values(columns: Columns, infos: Sequence[TensorInfo]) -> dict[str, float | None]:
    values, order = loss_values(columns), np.argsort(columns["step"], kind="stable")
    last = dict(zip(columns["tensor"][order].tolist(), values[order].tolist(), strict=True))
    named = {infos[tensor].name: value for tensor, value in last.items()}
    return {name: value if np.isfinite(value) else None for name, value in sorted(named.items())}


def configuration_of(
    run: Run | None, location: str, hyperparameters: Mapping[str, float | None]
) -> Configuration:
    """Return the configuration of a run; without its document if nothing is on the store."""
    document = None if run is None else run.document
    return Configuration(
        config={} if document is None else document.config,
        environment={} if run is None else run.environment(),
        hyperparameters=dict(hyperparameters),
        created_ns=None if document is None else document.created_ns,
        location=location,
    )
