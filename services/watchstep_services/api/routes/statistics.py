"""Queries over what a run recorded: series, heatmap, histogram, SQL. The server bins: no answer outgrows a screen."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from watchstep.errors import ConfigError
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.reading.queries import Reduce
from watchstep_rules.custom.sql.guard import MAX_QUERY
from watchstep_rules.custom.sql.process import Question
from watchstep_rules.custom.sql.query import QueryLimits
from watchstep_rules.signals.deviations import Deviation, read_deviations
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.queries import answers
from watchstep_services.api.queries.series import Line, Lines, SeriesRequest, read_lines
from watchstep_services.api.queries.sql import run_sql
from watchstep_services.api.queries.state import Asking
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.paging import Paged, PageOutput
from watchstep_services.api.schemas.problems import documented

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
    int, Query(ge=1, le=MAX_POINTS, description="Most points over the steps: as wide as your screen.")
]
OfMode = Annotated[Mode | None, Query(description="Only rows of this mode.")]
OfWorker = Annotated[int | None, Query(ge=0, lt=2**31, description="Only what this worker measured.")]
Accept = Annotated[str | None, Header(include_in_schema=False)]


class TensorList(PageOutput):
    """Tensors in the model's order."""

    tensors: list[answers.TensorEntry]


class DeviationList(BaseModel):
    """Tensors that left the range of their own run, the most unusual first."""

    deviations: list[Deviation]
    tensors_left_out: int = Field(description="Tensors that were not compared: there are too many.")
    superseded: bool = Field(
        description="A later attempt did the step again: the attempt's own values are not compared."
    )


class SqlInput(BaseModel):
    """A query."""

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
        description="One SELECT over the tables statistics, tensors and losses; functions as in SQL rules.",
    )
    limit: int = Field(1000, ge=1, le=_MAX_ROWS, description="Most rows of the answer.")


@router.get("/tensors", summary="List recorded tensors")
@permits("read")
def list_tensors(
    project: str,
    run: str,
    asking: Asking,
    paging: Paged,
    collection: Annotated[
        Word | None, Query(max_length=128, description="Only those of this collection.")
    ] = None,
) -> TensorList:
    """Names, shapes and collections of the tensors whose statistics were recorded."""
    with asking.asked(project, run) as (opened, _):
        infos = sorted(opened.index.tensors(), key=_place)
    chosen = [info for info in infos if collection is None or collection in info.collections]
    shown, token = paging.fetch_sorted([_place(info) for info in chosen], chosen)
    return TensorList(tensors=[_entry(info) for info in shown], next_page_token=token)


@router.get("/series", summary="Read a series", responses=_ARROW, response_model=answers.SeriesOutput)
@permits("read")
def get_series(
    project: str,
    run: str,
    asking: Asking,
    tensor: Tensor,
    figure: Figure,
    worker: OfWorker = None,
    mode: OfMode = None,
    first: Annotated[int, Query(ge=0, le=_LAST, description="From this step on.")] = 0,
    last: Annotated[int, Query(ge=0, le=_LAST, description="Up to this step.")] = _LAST,
    points: Points = 1000,
    accept: Accept = None,
) -> Any:
    """One figure of one tensor over the steps, as lines; shards are merged to the whole tensor.

    Where a line has more rows than points, each point is of several steps, with the mean and the extremes of its values.
    """
    asked = SeriesRequest(tensor, figure, worker, mode, first, last, points)
    with asking.asked(project, run) as (opened, _):
        found = read_lines(opened, asked)
    if answers.wants_arrow(accept):
        return answers.arrow(_as_table(found))
    return answers.SeriesOutput(
        tensor=tensor, figure=figure, lines=[_line(line) for line in found.lines], left_out=found.left_out
    )


@router.get("/deviations", summary="Rank the tensors that deviate at a step")
@permits("read")
def get_deviations(
    project: str,
    run: str,
    asking: Asking,
    attempt: Annotated[Word, Query(min_length=1, max_length=128, description="An alert's attempt.")],
    step: Annotated[int, Query(ge=0, le=_LAST, description="An alert's since_step.")],
) -> DeviationList:
    """Evidence for an alert: at most five tensors, each with the statistic that is farthest from its own earlier values.

    The usual range is that of up to 200 recorded steps before the step, without their drift.
    """
    with asking.asked(project, run) as (opened, _):
        found = read_deviations(opened, attempt, step)
    return DeviationList(
        deviations=found.deviations, tensors_left_out=found.tensors_left_out, superseded=found.superseded
    )


@router.get("/heatmap", summary="Read a heatmap")
@permits("read")
def get_heatmap(
    project: str,
    run: str,
    asking: Asking,
    figure: Figure,
    collection: Annotated[
        Word | None, Query(max_length=128, description="Tensors of this collection.", examples=["gradients"])
    ] = None,
    tensor: Annotated[
        list[Annotated[Word, Query(max_length=1024)]] | None,
        Query(max_length=_MAX_TENSORS, description="These tensors, in place of a collection."),
    ] = None,
    mode: OfMode = "train",
    reduce: Annotated[Reduce, Query(description="How the values of a cell become one.")] = "mean",
    points: Points = 200,
    rows: Annotated[int, Query(ge=1, le=_MAX_TENSORS, description="Most tensors.")] = 200,
) -> answers.HeatmapOutput:
    """One figure of many tensors over the steps: a row for each tensor, a column for some steps each."""
    if (collection is None) == (not tensor):
        raise ConfigError("collection and tensor: one of them is needed", "name a collection, or tensors")
    with asking.asked(project, run) as (opened, _):
        names = tensor or opened.tensors(collection)
        if not names:
            raise ConfigError(
                f"collection {collection!r}: no tensor is in it", "see …/tensors for the collections"
            )
        names = list(dict.fromkeys(names))
        found = opened.heatmap(names[:rows], figure, points, mode, reduce)
    return answers.HeatmapOutput(
        figure=figure,
        tensors=found.tensors,
        left_out=max(0, len(names) - rows),
        edges=answers.whole_numbers(found.edges),
        values=[answers.numbers(row) for row in found.values],
    )


@router.get("/histogram", summary="Read histograms over time")
@permits("read")
def get_histogram(
    project: str,
    run: str,
    asking: Asking,
    tensor: Tensor,
    worker: OfWorker = None,
    mode: OfMode = "train",
    points: Points = 200,
) -> answers.HistogramOutput:
    """How a tensor's elements spread over powers of two, in rows of some steps each."""
    with asking.asked(project, run) as (opened, _):
        found = opened.histogram(tensor, points, worker, mode)
    return answers.HistogramOutput(
        tensor=tensor,
        edges=answers.whole_numbers(found.edges),
        lower=answers.numbers(found.lower),
        upper=answers.numbers(found.upper),
        counts=answers.whole_numbers(found.counts),
        zeros=answers.whole_numbers(found.zeros),
        nonfinite=answers.whole_numbers(found.nonfinite),
    )


@router.post("/sql", summary="Ask in SQL", responses=_ARROW, response_model=answers.SqlOutput)
@permits("read")
def post_sql(project: str, run: str, body: SqlInput, asking: Asking, accept: Accept = None) -> Any:
    """One SELECT over the run's statistics. It changes nothing, reaches nothing else, and may take some seconds and memory.

    It is run in a process of its own, which is ended where it takes more. An answer has at most 32 MiB.
    """
    settings = asking.service.settings
    form: Literal["json", "arrow"] = "arrow" if answers.wants_arrow(accept) else "json"
    with asking.asked_in_sql(project, run) as (asked, budget):
        limits = QueryLimits(settings.query_mb, max(0.001, budget.left_seconds))
        found = run_sql(asked, Question(body.query, body.limit, form, limits), budget)
    if form == "arrow":
        more = {"x-watchstep-more": str(found.more).lower()}
        return Response(bytes(found.content), media_type=answers.ARROW, headers=more)
    return Response(bytes(found.content), media_type="application/json")


def _place(info: TensorInfo) -> tuple[int, str]:
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


def _as_table(found: Lines) -> Any:
    """All lines in one table, with the columns of `LineOutput`; null where there is no finite value."""
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
    for line in found.lines:
        size = len(line.step)
        columns = {name: pa.array([getattr(line, name)] * size, kind) for name, kind in kinds.items()}
        columns |= {name: pa.array(getattr(line, name), pa.int64()) for name in whole}
        columns |= {name: pa.array(getattr(line, name), from_pandas=True) for name in real}
        parts.append(pa.table(columns, schema=schema))
    return pa.concat_tables(parts)
