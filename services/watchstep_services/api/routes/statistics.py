"""Queries over the statistics of a run: series, heatmap, histogram, SQL.

The server bins the steps, so that the size of a response depends on the screen and not on the run.

SQL queries over the statistics of a run: one SELECT, checked like SQL rules and run in an isolated child process.

The child requests rows as the query needs them. They are read from the state of the run at the start of the query, so that other
queries can use the run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from watchstep.errors import ConfigError
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.reading.budget import ReadBudget
from watchstep.reading.compacted import CompactedSegmentLostError
from watchstep.reading.queries import Reduce
from watchstep.reading.run import Run
from watchstep.reading.sql import scan_for
from watchstep_rules.custom.sandbox.process import StartError
from watchstep_rules.custom.sql.guard import MAX_QUERY
from watchstep_rules.custom.sql.process import QueryResult, QuerySource, Question, select
from watchstep_rules.custom.sql.query import QueryLimits
from watchstep_rules.signals.deviations import Deviation, read_deviations
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.queries import answers
from watchstep_services.api.queries.answers import Line, Lines, SeriesRequest, read_lines
from watchstep_services.api.queries.state import Querying
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.paging import Paged, PageOutput
from watchstep_services.api.schemas.problems import RequestRefusedError, documented

_MAX_ATTEMPTS = 3
"""Attempts at a query. It is repeated if a compaction replaces segments that it reads, and fails if that happens each time."""


def run_sql(
    open_run: Callable[[], AbstractContextManager[Run]], question: Question, budget: ReadBudget
) -> QueryResult:
    """Run a query.

    Args:
        open_run: opens the refreshed run, and locks it against other queries.
        question: the query.
        budget: limits of time, and of memory for the run's objects.

    Raises:
        ConfigError: the query is not allowed, fails, or has a result that cannot be serialized.
        OverBudgetError: the query takes too long or too much memory, or its result is too large.
        RequestRefusedError: 503; no process is free, or none can be started. 429; another query occupies the run.
        StoreError: the store cannot be read.
    """
    lost: CompactedSegmentLostError | None = None
    for _ in range(_MAX_ATTEMPTS):
        with open_run() as run:
            if lost is not None:
                run.index.follow(lost)
            index = run.index.snapshot(budget)
        try:
            return select(question, QuerySource(index.tensors(), index.probes(), partial(scan_for, index)))
        except CompactedSegmentLostError as error:
            lost = error
        except StartError as error:
            raise RequestRefusedError(503, error.what, error.hint, {"retry-after": "1"}) from error
    assert lost is not None
    raise lost


router = APIRouter(prefix="/v1/projects/{project}/runs/{run}", tags=["statistics"], responses=documented(502))

MAX_POINTS = 4000
_MAX_ROWS = 10_000
_MAX_TENSORS = 1000
_LAST = 2**62

_ARROW: dict[int | str, dict[str, Any]] = {
    200: {"content": {answers.ARROW: {"schema": {"type": "string", "format": "binary"}}}}
}
Figure = Annotated[
    Word,
    Query(max_length=128, description="A recorded or derived figure, or a probe.", examples=["l2"]),
]
Tensor = Annotated[Word, Query(min_length=1, max_length=1024, examples=["conv1.weight:gradient"])]
Points = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_POINTS,
        description="Maximum number of points over the steps, for example the width of the screen in pixels.",
    ),
]
OfMode = Annotated[Mode | None, Query(description="Only rows of this mode.")]
OfWorker = Annotated[int | None, Query(ge=0, lt=2**31, description="Only rows of this worker.")]
Accept = Annotated[str | None, Header(include_in_schema=False)]


class TensorList(PageOutput):
    """Tensors in the model's order."""

    tensors: list[answers.TensorEntry]


class DeviationList(BaseModel):
    """Tensors outside their own earlier range, largest deviation first."""

    deviations: list[Deviation]
    tensors_left_out: int = Field(
        description="Number of tensors that were not compared, because there are too many."
    )
    superseded: bool = Field(
        description="Whether a later attempt repeated the step; then the values of this attempt are not compared."
    )


class SqlInput(BaseModel):
    """A SQL query."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={
            "examples": [{"query": "SELECT step, max(abs_max) FROM statistics GROUP BY step", "limit": 100}]
        },
    )

    query: str = Field(
        min_length=1,
        max_length=MAX_QUERY,
        description="One SELECT over the tables statistics, tensors and losses, with the functions of SQL rules.",
    )
    limit: int = Field(1000, ge=1, le=_MAX_ROWS, description="Maximum number of rows in the response.")


@router.get("/tensors", summary="List recorded tensors")
@permits("read")
def list_tensors(
    project: str,
    run: str,
    queries: Querying,
    paging: Paged,
    collection: Annotated[
        Word | None, Query(max_length=128, description="Only tensors of this collection.")
    ] = None,
) -> TensorList:
    """Return names, shapes and collections of the tensors with recorded statistics."""
    with queries.open_run(project, run) as (opened, _):
        infos = sorted(opened.index.tensors(), key=_sort_key)
    chosen = [info for info in infos if collection is None or collection in info.collections]
    page, token = paging.fetch_sorted([_sort_key(info) for info in chosen], chosen)
    return TensorList(tensors=[_entry(info) for info in page], next_page_token=token)


@router.get("/series", summary="Read a series", responses=_ARROW, response_model=answers.SeriesOutput)
@permits("read")
def get_series(
    project: str,
    run: str,
    queries: Querying,
    tensor: Tensor,
    figure: Figure,
    worker: OfWorker = None,
    mode: OfMode = None,
    first: Annotated[int, Query(ge=0, le=_LAST, description="First step.")] = 0,
    last: Annotated[int, Query(ge=0, le=_LAST, description="Last step.")] = _LAST,
    points: Points = 1000,
    accept: Accept = None,
) -> Any:
    """Return one figure of one tensor over the steps, as lines. Shards are merged to the whole tensor.

    If a line has more rows than points, each point covers several steps, with the mean and the extremes of their values.
    """
    request = SeriesRequest(tensor, figure, worker, mode, first, last, points)
    with queries.open_run(project, run) as (opened, _):
        lines = read_lines(opened, request)
    if answers.wants_arrow(accept):
        return answers.arrow(_as_table(lines))
    return answers.SeriesOutput(
        tensor=tensor, figure=figure, lines=[_line(line) for line in lines.lines], left_out=lines.left_out
    )


@router.get("/deviations", summary="Rank the tensors that deviate at a step")
@permits("read")
def get_deviations(
    project: str,
    run: str,
    queries: Querying,
    attempt: Annotated[Word, Query(min_length=1, max_length=128, description="Attempt of an alert.")],
    step: Annotated[int, Query(ge=0, le=_LAST, description="Field since_step of an alert.")],
) -> DeviationList:
    """Return evidence for an alert: at most five tensors, each with the statistic that deviates most from its earlier values.

    The usual range is computed from up to 200 recorded steps before the step, after removing their drift.
    """
    with queries.open_run(project, run) as (opened, _):
        result = read_deviations(opened, attempt, step)
    return DeviationList(
        deviations=result.deviations, tensors_left_out=result.tensors_left_out, superseded=result.superseded
    )


@router.get("/heatmap", summary="Read a heatmap")
@permits("read")
def get_heatmap(
    project: str,
    run: str,
    queries: Querying,
    figure: Figure,
    collection: Annotated[
        Word | None, Query(max_length=128, description="Tensors of this collection.", examples=["gradients"])
    ] = None,
    tensor: Annotated[
        list[Annotated[Word, Query(max_length=1024)]] | None,
        Query(max_length=_MAX_TENSORS, description="These tensors, instead of a collection."),
    ] = None,
    mode: OfMode = "train",
    reduce: Annotated[Reduce, Query(description="How the values of a cell are reduced to one.")] = "mean",
    points: Points = 200,
    rows: Annotated[int, Query(ge=1, le=_MAX_TENSORS, description="Maximum number of tensors.")] = 200,
) -> answers.HeatmapOutput:
    """Return one figure of many tensors over the steps: one row per tensor, one column per range of steps."""
    if (collection is None) == (not tensor):
        raise ConfigError("collection, tensor: both or neither set", "set exactly one of them")
    with queries.open_run(project, run) as (opened, _):
        names = tensor or [info.name for info in opened.catalogue if collection in info.collections]
        if not names:
            raise ConfigError(
                f"collection {collection!r}: contains no tensors", "list …/tensors for the collections"
            )
        names = list(dict.fromkeys(names))
        heatmap = opened.heatmap(names[:rows], figure, points, mode, reduce)
    return answers.HeatmapOutput(
        figure=figure,
        tensors=heatmap.tensors,
        left_out=max(0, len(names) - rows),
        edges=answers.whole_numbers(heatmap.edges),
        values=[answers.numbers(row) for row in heatmap.values],
    )


@router.get("/histogram", summary="Read histograms over time")
@permits("read")
def get_histogram(
    project: str,
    run: str,
    queries: Querying,
    tensor: Tensor,
    worker: OfWorker = None,
    mode: OfMode = "train",
    points: Points = 200,
) -> answers.HistogramOutput:
    """Return the distribution of a tensor's elements over powers of two, one row per range of steps."""
    with queries.open_run(project, run) as (opened, _):
        histogram = opened.histogram(tensor, points, worker, mode)
    return answers.HistogramOutput(
        tensor=tensor,
        edges=answers.whole_numbers(histogram.edges),
        lower=answers.numbers(histogram.lower),
        upper=answers.numbers(histogram.upper),
        counts=answers.whole_numbers(histogram.counts),
        zeros=answers.whole_numbers(histogram.zeros),
        nonfinite=answers.whole_numbers(histogram.nonfinite),
    )


@router.post("/sql", summary="Query in SQL", responses=_ARROW, response_model=answers.SqlOutput)
@permits("read")
def post_sql(project: str, run: str, body: SqlInput, queries: Querying, accept: Accept = None) -> Any:
    """Run one SELECT over the run's statistics. It cannot change data or access anything else.

    The query runs in its own process, which is killed if it exceeds its limits of time and memory. A response has at most 32 MiB.
    """
    settings = queries.service.settings
    form: Literal["json", "arrow"] = "arrow" if answers.wants_arrow(accept) else "json"
    with queries.open_sql(project, run) as (source, budget):
        limits = QueryLimits(settings.query_mb, max(0.001, budget.remaining_seconds))
        result = run_sql(source, Question(body.query, body.limit, form, limits), budget)
    if form == "arrow":
        more = {"x-watchstep-more": str(result.more).lower()}
        return Response(bytes(result.content), media_type=answers.ARROW, headers=more)
    return Response(bytes(result.content), media_type="application/json")


def _sort_key(info: TensorInfo) -> tuple[int, str]:
    return info.order, info.name


def _entry(info: TensorInfo) -> answers.TensorEntry:
    return answers.TensorEntry.model_validate(
        {name: getattr(info, name) for name in answers.TensorEntry.model_fields}, from_attributes=True
    )


def _line(line: Line) -> answers.LineOutput:
    return answers.LineOutput(
        mode=line.mode,
        worker=line.worker,
        replica=line.replica,
        stage=line.stage,
        step=answers.whole_numbers(line.step),
        last_step=answers.whole_numbers(line.last_step),
        count=answers.whole_numbers(line.count),
        mean=answers.numbers(line.mean),
        min=answers.numbers(line.min),
        max=answers.numbers(line.max),
        nonfinite=answers.whole_numbers(line.nonfinite),
    )


def _as_table(lines: Lines) -> Any:
    """Return all lines in one table with the columns of `LineOutput`; null marks a missing finite value."""
    import pyarrow as pa

    kinds = {"mode": pa.string(), "worker": pa.int32(), "replica": pa.int32(), "stage": pa.string()}
    whole = ("step", "last_step", "count", "nonfinite")
    real = ("mean", "min", "max")
    schema = pa.schema(
        [*kinds.items(), *((name, pa.int64()) for name in whole), *((name, pa.float64()) for name in real)]
    )
    parts = [
        pa.table({name: pa.array([], kind.type) for name, kind in zip(schema.names, schema, strict=True)})
    ]
    for line in lines.lines:
        size = len(line.step)
        columns = {name: pa.array([getattr(line, name)] * size, kind) for name, kind in kinds.items()}
        columns |= {name: pa.array(getattr(line, name), pa.int64()) for name in whole}
        columns |= {name: pa.array(getattr(line, name), from_pandas=True) for name in real}
        parts.append(pa.table(columns, schema=schema))
    return pa.concat_tables(parts)
