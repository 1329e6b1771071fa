"""Queries over the statistics of a run: series, histogram, deviations, SQL.

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

from watchstep.format.tensors import Mode, TensorInfo
from watchstep.reading.binning import SeriesRequest
from watchstep.reading.budget import ReadBudget
from watchstep.reading.compacted import CompactedSegmentLostError
from watchstep.reading.run import Run
from watchstep.reading.sql import scan_for
from watchstep_rules.custom.sandbox.process import StartError
from watchstep_rules.custom.sql.guard import MAX_QUERY
from watchstep_rules.custom.sql.process import QueryResult, QuerySource, Question, select
from watchstep_rules.custom.sql.query import QueryLimits
from watchstep_rules.signals.deviations import Deviation, read_deviations
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.middleware.etags import IfNoneMatch
from watchstep_services.api.queries import answers
from watchstep_services.api.queries.forms import (
    TABLES,
    AcceptHeader,
    FormatParameter,
    View,
    documented_forms,
    encode_model,
    encode_table,
    form_of,
)
from watchstep_services.api.queries.state import Querying
from watchstep_services.api.queries.tensor_views import (
    histogram_output,
    histogram_table,
    line_output,
    series_table,
    tensor_entry,
)
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.paging import Paged, PageOutput
from watchstep_services.api.schemas.problems import RequestRefusedError, documented
from watchstep_services.api.views import ViewRequest, respond

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
FirstStep = Annotated[int, Query(ge=0, le=_LAST, description="First step.")]
LastStep = Annotated[int, Query(ge=0, le=_LAST, description="Last step.")]
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
    return TensorList(tensors=[tensor_entry(info) for info in page], next_page_token=token)


@router.get(
    "/series",
    summary="Read a series",
    responses=documented_forms(TABLES),
    response_model=answers.SeriesOutput,
)
@permits("read")
def get_series(
    project: str,
    run: str,
    queries: Querying,
    tensor: Tensor,
    figure: Figure,
    worker: OfWorker = None,
    mode: OfMode = None,
    merge: Annotated[
        bool, Query(description="Merge shards to the whole tensor; otherwise each worker has its own lines.")
    ] = True,
    first: FirstStep = 0,
    last: LastStep = _LAST,
    points: Points = 1000,
    format_: FormatParameter = None,
    accept: AcceptHeader = None,
    condition: IfNoneMatch = None,
) -> Any:
    """Return one figure of one tensor over the steps, as lines. Shards are merged to the whole tensor.

    If a line has more rows than points, each point covers several steps, with the mean and the extremes of their values.
    """
    form = form_of(format_, accept, TABLES)
    series = SeriesRequest(tensor, figure, worker, mode, first, last, points, merge)
    request = ViewRequest(
        project, run, answers.SeriesOutput, form, ("series", *vars(series).values()), condition
    )

    def build(opened: Run) -> View:
        lines = opened.binned_series(series)
        if form != "json":
            return encode_table(series_table(lines), form, "series")
        return encode_model(
            answers.SeriesOutput(
                tensor=tensor,
                figure=figure,
                lines=[line_output(line) for line in lines.lines],
                left_out=lines.left_out,
            )
        )

    return respond(queries, request, build)


@router.get("/deviations", summary="Rank the tensors that deviate at a step", response_model=DeviationList)
@permits("read")
def get_deviations(
    project: str,
    run: str,
    queries: Querying,
    attempt: Annotated[Word, Query(min_length=1, max_length=128, description="Attempt of an alert.")],
    step: Annotated[int, Query(ge=0, le=_LAST, description="Field since_step of an alert.")],
    condition: IfNoneMatch = None,
) -> Any:
    """Return evidence for an alert: at most five tensors, each with the statistic that deviates most from its earlier values.

    The usual range is computed from up to 200 recorded steps before the step, after removing their drift.
    """
    request = ViewRequest(project, run, DeviationList, "json", ("deviations", attempt, step), condition)

    def build(opened: Run) -> View:
        result = read_deviations(opened, attempt, step)
        return encode_model(
            DeviationList(
                deviations=result.deviations,
                tensors_left_out=result.tensors_left_out,
                superseded=result.superseded,
            )
        )

    return respond(queries, request, build)


@router.get(
    "/histogram",
    summary="Read histograms over time",
    responses=documented_forms(TABLES),
    response_model=answers.HistogramOutput,
)
@permits("read")
def get_histogram(
    project: str,
    run: str,
    queries: Querying,
    tensor: Tensor,
    worker: OfWorker = None,
    mode: OfMode = "train",
    first: FirstStep = 0,
    last: LastStep = _LAST,
    points: Points = 200,
    format_: FormatParameter = None,
    accept: AcceptHeader = None,
    condition: IfNoneMatch = None,
) -> Any:
    """Return the distribution of a tensor's elements over powers of two, one row per range of steps."""
    form = form_of(format_, accept, TABLES)
    parameters = ("histogram", tensor, worker, mode, first, last, points)
    request = ViewRequest(project, run, answers.HistogramOutput, form, parameters, condition)

    def build(opened: Run) -> View:
        histogram = opened.histogram(tensor, points, worker, mode, first=first, last=last)
        if form == "json":
            return encode_model(histogram_output(tensor, histogram))
        return encode_table(histogram_table(histogram), form, "histogram")

    return respond(queries, request, build)


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
