"""The view of the page that compares runs, in one response."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from watchstep.errors import ConfigError, WatchstepError
from watchstep.format.layout import check_name
from watchstep.format.tensors import Mode
from watchstep.reading.run import Run
from watchstep_services.api.lookup import find_run, run_store
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.middleware.etags import IfNoneMatch, etag_of_inputs, unchanged
from watchstep_services.api.queries.comparison import (
    MAX_SERIES,
    AlignedSeries,
    ComparisonRequest,
    common_tensors,
    divergences_of,
    read_compared,
    readable,
    settings_of,
)
from watchstep_services.api.queries.forms import encode_model
from watchstep_services.api.queries.run_facts import facts_of
from watchstep_services.api.queries.state import Querying, recorded_state
from watchstep_services.api.schemas.binned_lines import LAST_STEP, Columns, FirstStep, LastStep
from watchstep_services.api.schemas.comparison_page import Align, ComparedRun, Comparison
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.problems import documented
from watchstep_services.api.schemas.run_pages import RunFacts

_MAX_RUNS = 8

router = APIRouter(prefix="/v1/projects/{project}", tags=["runs"], responses=documented(502))


@router.get("/comparison", summary="Compare runs", response_model=Comparison)
@permits("read")
def get_comparison(
    project: str,
    queries: Querying,
    runs: Annotated[
        Word,
        Query(
            max_length=1100,
            description=f"Names of two to {_MAX_RUNS} runs, separated by commas; the first one is the reference.",
            examples=["resnet50-17,resnet50-18"],
        ),
    ],
    tensor: Annotated[
        list[Annotated[Word, Query(max_length=1024)]] | None,
        Query(max_length=MAX_SERIES, description="These tensors; default: the losses."),
    ] = None,
    figure: Annotated[
        Word,
        Query(max_length=128, description="A recorded or derived figure, or a probe.", examples=["l2"]),
    ] = "mean",
    mode: Annotated[Mode | None, Query(description="Only rows of this mode.")] = None,
    align: Annotated[
        Align, Query(description="Axis: the step, or the time since the first row of each run.")
    ] = "step",
    points: Columns = 1000,
    first: FirstStep = 0,
    last: LastStep = LAST_STEP,
    divergence: Annotated[bool, Query(description="Whether to search where the runs first differ.")] = True,
    if_none_match: IfNoneMatch = None,
) -> Any:
    """Return series of several runs over one grid, where each run first differs from the reference, and settings that differ.

    The ETag is known before the statistics are read. The search for the first difference reads at most for a part of the time limit.
    """
    names = _names(runs)
    request = ComparisonRequest(
        names, tuple(dict.fromkeys(tensor or ())), figure, mode, align, first, last, points
    )
    service = queries.service
    with service.database.read() as session:
        rows = [find_run(session, project, name) for name in names]
        facts = dict(zip(names, facts_of(session, service.base_url, rows), strict=True))
    with queries.open_runs(project, names) as (opened, budget):
        states = [recorded_state(run) if isinstance(run := opened[name], Run) else run.what for name in names]
        parameters = [names, request.tensors, figure, mode, align, first, last, points, divergence]
        etag = etag_of_inputs(
            Comparison, [facts[name].model_dump(mode="json") for name in names], states, parameters
        )
        if (response := unchanged(if_none_match, etag)) is not None:
            return response
        if (cached := queries.views.get(etag)) is not None:
            return cached.response(etag)
        compared = read_compared(opened, request)
        settings = settings_of(opened, request)
        comparison = Comparison(
            runs=[
                _run(facts[name], opened[name], compared, run_store(service, project, name).location)
                for name in names
            ],
            grid=compared.grid,
            series=compared.series,
            left_out=compared.left_out,
            tensors=common_tensors(readable(opened)),
            divergences=divergences_of(opened, request, budget) if divergence else [],
            settings=settings,
        )
    view = encode_model(comparison)
    queries.views.add(etag, view)
    return view.response(etag)


def _names(runs: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(check_name("run", name.strip()) for name in runs.split(",") if name.strip()))
    if not 2 <= len(names) <= _MAX_RUNS:
        raise ConfigError(
            f"runs: {len(names)} different names", f"use 2 to {_MAX_RUNS} names, separated by commas"
        )
    return names


def _run(facts: RunFacts, run: Run | WatchstepError, compared: AlignedSeries, location: str) -> ComparedRun:
    first, last = run.index.step_range() if isinstance(run, Run) else (0, -1)
    return ComparedRun(
        facts=facts,
        first=first,
        last=last,
        started_ns=compared.started_ns[facts.run],
        problem="" if isinstance(run, Run) else run.what,
        location=location,
    )
