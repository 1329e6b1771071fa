"""Views of the pages about runs: the table of runs and the overview of a run, each in one response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from watchstep.reading.run import Run
from watchstep_services.api.lookup import find_run, run_store
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.etags import IfNoneMatch, etag_of_inputs, unchanged
from watchstep_services.api.queries.forms import View, encode_model
from watchstep_services.api.queries.overview import (
    EMPTY_SCALARS,
    OverviewWindow,
    RunRecords,
    Scalars,
    configuration_of,
    read_records,
    read_scalars,
)
from watchstep_services.api.queries.run_table import (
    MAX_TAGS,
    Order,
    RunFilter,
    RunPage,
    Sort,
    put_tags,
    read_table,
)
from watchstep_services.api.queries.state import UNREADABLE, Querying
from watchstep_services.api.schemas.binned_lines import LAST_STEP, Columns, FirstStep, LastStep
from watchstep_services.api.schemas.filters import Since, States, Until, Word
from watchstep_services.api.schemas.run_pages import Configuration, RunOverview, RunTable
from watchstep_services.api.views import ViewRequest, respond
from watchstep_services.db.models.runs import TAG_LENGTH

_MAX_ROWS = 200
_MAX_OFFSET = 100_000

TablePhase = Literal["pending", "firing", "resolved"]

router = APIRouter(prefix="/v1/projects/{project}", tags=["runs"])


class TagsInput(BaseModel):
    """The tags of a run."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"examples": [{"tags": ["baseline"]}]}
    )

    tags: list[Annotated[Word, Field(max_length=TAG_LENGTH)]] = Field(max_length=MAX_TAGS)


class TagsOutput(BaseModel):
    """The tags of a run, in order."""

    tags: list[str]


@router.get("/run-table", summary="Read the table of runs")
@permits("read")
def get_run_table(
    project: str,
    service: Served,
    search: Annotated[
        Word,
        Query(max_length=200, description="Only runs whose name or tag contains this text, in any case."),
    ] = "",
    states: States = None,
    alerts: Annotated[
        list[TablePhase] | None,
        Query(alias="alert", max_length=3, description="Only runs with an alert in one of these phases."),
    ] = None,
    rules: Annotated[
        list[Annotated[Word, Query(max_length=128)]] | None,
        Query(alias="rule", max_length=20, description="Only runs on which one of these rules fires."),
    ] = None,
    tags: Annotated[
        list[Annotated[Word, Query(max_length=TAG_LENGTH)]] | None,
        Query(alias="tag", max_length=MAX_TAGS, description="Only runs with all of these tags."),
    ] = None,
    since: Since = None,
    until: Until = None,
    sort: Annotated[Sort, Query(description="What the table is sorted by.")] = "created",
    order: Annotated[Order, Query(description="Direction of the order.")] = "descending",
    limit: Annotated[int, Query(ge=1, le=_MAX_ROWS, description="Maximum number of runs.")] = 50,
    offset: Annotated[int, Query(ge=0, le=_MAX_OFFSET, description="Number of runs before the page.")] = 0,
) -> RunTable:
    """Return a page of the table of runs: state, progress, rate, overhead, health, alerts and tags of each run.

    No store is read.
    """
    runs = RunFilter(project, search, states or (), alerts or (), rules or (), tags or (), since, until)
    with service.database.read() as session:
        return read_table(session, service.base_url, runs, RunPage(sort, order, offset, limit))


@router.put("/runs/{run}/tags", summary="Set the tags of a run")
@permits("operate")
def put_run_tags(project: str, run: str, body: TagsInput, service: Served, caller: Caller) -> TagsOutput:
    """Replace the tags of a run, by which people find it in the table."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        return TagsOutput(tags=put_tags(session, row, body.tags, caller.who))


@router.get(
    "/runs/{run}/overview",
    summary="Read the overview of a run",
    response_model=RunOverview,
)
@permits("read")
def get_overview(
    project: str,
    run: str,
    queries: Querying,
    points: Columns = 1000,
    first: FirstStep = 0,
    last: LastStep = LAST_STEP,
    worker: Annotated[
        int | None,
        Query(ge=0, lt=2**31, description="Only rows of this worker, of losses, metrics and the system."),
    ] = None,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """Return losses, learning rates and metrics over the steps, events, one lane per rule, configuration, attempts and health of a run.

    All lines have the columns of one grid. The ETag is known before the statistics are read.
    """
    service = queries.service
    with queries.slots.acquire(project), service.database.read() as session:
        records = read_records(session, service.base_url, find_run(session, project, run))
    location = run_store(service, project, run).location
    window = OverviewWindow(first, last, points, worker)

    def build(opened: Run) -> View:
        scalars = read_scalars(opened, window)
        configuration = configuration_of(opened, location, scalars.hyperparameters)
        return encode_model(_overview(records, scalars, configuration, ""))

    inputs = (records.inputs(), first, last, points, worker, location)
    request = ViewRequest(project, run, RunOverview, "json", inputs, if_none_match)
    try:
        return respond(queries, request, build)
    except UNREADABLE as error:
        etag = etag_of_inputs(RunOverview, *inputs, error.what)
        overview = _overview(records, EMPTY_SCALARS, configuration_of(None, location, {}), error.what)
        return unchanged(if_none_match, etag) or encode_model(overview).response(etag)


def _overview(
    records: RunRecords, scalars: Scalars, configuration: Configuration, problem: str
) -> RunOverview:
    return RunOverview(
        run=records.facts,
        stop=records.stop,
        problem=problem,
        grid=scalars.grid,
        losses=scalars.losses,
        optimizer=scalars.optimizer,
        metrics=scalars.metrics,
        system=scalars.system,
        workers=list(scalars.workers),
        collections=dict(scalars.collections),
        marks=list(records.marks),
        marks_left_out=records.earlier_events,
        lanes=list(records.lanes),
        configuration=configuration,
        attempts=list(records.attempts),
        health=records.health,
        links=list(records.links),
    )
