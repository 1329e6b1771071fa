"""Pictures of tensors: the heatmap of a collection with its module tree, headroom in number formats, and all about one tensor in one request.

Their data are also available as files: CSV, Parquet and Arrow; the heatmap also as matrices.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query

from watchstep.errors import ConfigError, FormatError, NotFoundError
from watchstep.format.layout import SNAPSHOTS, SnapshotKey
from watchstep.format.statistics import DERIVED
from watchstep.format.tensors import MODES, Mode, TensorInfo
from watchstep.reading.binning import SeriesRequest, read_figures
from watchstep.reading.columns import COUNTED, Selection
from watchstep.reading.grid import GridRequest
from watchstep.reading.headroom import read_magnitudes, shares_of
from watchstep.reading.queries import REDUCTIONS, HistogramSeries, Reduce
from watchstep.reading.run import Run
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.middleware.etags import IfNoneMatch
from watchstep_services.api.queries import tensor_views
from watchstep_services.api.queries.forms import (
    MATRICES,
    TABLES,
    AcceptHeader,
    FormatParameter,
    View,
    documented_forms,
    encode_model,
    encode_table,
    form_of,
)
from watchstep_services.api.queries.state import Queries, Querying
from watchstep_services.api.queries.tensor_answers import (
    FigureLines,
    HeadroomOutput,
    HeatmapOutput,
    SavedObject,
    TensorPage,
    WatchingRule,
)
from watchstep_services.api.queries.watching_rules import rules_state, watching_rules
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.problems import documented
from watchstep_services.api.views import ViewRequest, respond

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}", tags=["statistics"], responses=documented(502))

MAX_COLUMNS = 2000
"""Maximum number of columns of a picture: no screen of today shows more."""

MAX_TENSORS = 1000
_MAX_POINTS = 4000
_ENCODED_BYTES = 100
"""Memory of a cell while it is encoded as JSON or as a row of a table."""
_MAX_FIGURES = 12
_MAX_SAVED = 500
_LAST = 2**62
_FIGURES = ("mean", "std", "min", "max", "abs_max", "zero_share", "nonfinite_share")
_NOT_IN_SNAPSHOTS = frozenset(
    ("input", "output", "label", "loss", "metric", "system", "confusion", "update", "finite_check")
)
"""Roles of tensors that snapshots of weights and gradients never contain."""

FigureName = Annotated[
    Word,
    Query(max_length=128, description="A recorded or derived figure, or a probe.", examples=["l2"]),
]
CollectionName = Annotated[
    Word | None, Query(max_length=128, description="Tensors of this collection.", examples=["gradients"])
]
TensorNames = Annotated[
    list[Annotated[Word, Query(max_length=1024)]] | None,
    Query(max_length=MAX_TENSORS, description="These tensors, instead of a collection."),
]
TensorName = Annotated[Word, Query(min_length=1, max_length=1024, examples=["conv1.weight:gradient"])]
OfMode = Annotated[Mode | None, Query(description="Only rows of this mode.")]
OfWorker = Annotated[int | None, Query(ge=0, lt=2**31, description="Only rows of this worker.")]
FirstStep = Annotated[int, Query(ge=0, le=_LAST, description="First step.")]
LastStep = Annotated[int, Query(ge=0, le=_LAST, description="Last step.")]
ColumnCount = Annotated[
    int,
    Query(
        ge=1,
        le=MAX_COLUMNS,
        description="Maximum number of columns over the steps, for example the width of the picture in pixels.",
    ),
]
RowCount = Annotated[int, Query(ge=1, le=MAX_TENSORS, description="Maximum number of tensors.")]


@router.get(
    "/heatmap", summary="Read a heatmap", responses=documented_forms(MATRICES), response_model=HeatmapOutput
)
@permits("read")
def get_heatmap(
    project: str,
    run: str,
    queries: Querying,
    figure: FigureName,
    collection: CollectionName = None,
    tensor: TensorNames = None,
    mode: OfMode = "train",
    reduce: Annotated[
        list[Reduce] | None,
        Query(max_length=3, description="How the values of a cell are reduced to one; default: mean."),
    ] = None,
    first: FirstStep = 0,
    last: LastStep = _LAST,
    worker: Annotated[
        int | None,
        Query(ge=0, lt=2**31, description="Only rows of this worker, also of its shard of a tensor alone."),
    ] = None,
    points: ColumnCount = 200,
    rows: RowCount = 500,
    format_: FormatParameter = None,
    accept: AcceptHeader = None,
    condition: IfNoneMatch = None,
) -> Any:
    """Return one figure of many tensors over the steps, with the module tree: one row per tensor, one column per range of steps.

    As safetensors, the matrices mean, min, max (as requested, float32), nonfinite (uint32) and edges (int64) have the other fields as JSON in
    the metadata's ``description``. Tables have a row per tensor and column, with all reductions.
    """
    _check_selection(collection, tensor)
    form = form_of(format_, accept, MATRICES)
    reductions = list(dict.fromkeys(reduce or ("mean",)))
    request = ViewRequest(
        project,
        run,
        HeatmapOutput,
        form,
        ("heatmap", figure, collection, tensor, mode, reductions, first, last, worker, points, rows),
        condition,
    )

    def build(opened: Run) -> View:
        infos, left_out = _selected(opened, collection, tensor, rows)
        names = tuple(info.name for info in infos)
        computed = tuple(reductions) if form in ("json", "safetensors") else REDUCTIONS
        grid = opened.grid(
            GridRequest(names, figure, points, mode, first, last, computed, nonfinite=True, worker=worker)
        )
        if opened.index.budget is not None and form != "safetensors":
            matrices = len(reductions) if form == "json" else 1
            opened.index.budget.keep(_ENCODED_BYTES * matrices * grid.mean.size)
        if form in ("csv", "parquet", "arrow"):
            return encode_table(tensor_views.heatmap_table(grid), form, "heatmap")
        begin, end = opened.index.step_range()
        described = {"figure": figure, "mode": mode, "left_out": left_out, "first": begin, "last": end}
        output = tensor_views.heatmap_output(grid, infos, described, reductions, matrices=form == "json")
        if form == "json":
            return encode_model(output)
        return tensor_views.heatmap_matrices(grid, output, reductions)

    return respond(queries, request, build)


@router.get(
    "/headroom",
    summary="Read headroom in number formats",
    responses=documented_forms(TABLES),
    response_model=HeadroomOutput,
)
@permits("read")
def get_headroom(
    project: str,
    run: str,
    queries: Querying,
    collection: CollectionName = None,
    tensor: TensorNames = None,
    mode: OfMode = "train",
    first: FirstStep = 0,
    last: LastStep = _LAST,
    points: ColumnCount = 200,
    rows: RowCount = 500,
    format_: FormatParameter = None,
    accept: AcceptHeader = None,
    condition: IfNoneMatch = None,
) -> Any:
    """Return how far tensors are from overflow and underflow in fp16, bf16, fp32 and both fp8 formats."""
    _check_selection(collection, tensor)
    form = form_of(format_, accept, TABLES)
    parameters = ("headroom", collection, tensor, mode, first, last, points, rows)
    request = ViewRequest(project, run, HeadroomOutput, form, parameters, condition)

    def build(opened: Run) -> View:
        infos, left_out = _selected(opened, collection, tensor, rows)
        names = [info.name for info in infos]
        magnitudes = read_magnitudes(opened.index, names, points, mode, (first, last))
        if form == "json":
            return encode_model(tensor_views.headroom_output(magnitudes, mode, left_out))
        return encode_table(tensor_views.headroom_table(magnitudes), form, "headroom")

    return respond(queries, request, build)


@router.get("/tensor", summary="Read all about a tensor", response_model=TensorPage)
@permits("read")
def get_tensor_page(
    project: str,
    run: str,
    queries: Querying,
    tensor: TensorName,
    figure: Annotated[
        list[Annotated[Word, Query(max_length=128)]] | None,
        Query(max_length=_MAX_FIGURES, description=f"Figures; default: {', '.join(_FIGURES)}."),
    ] = None,
    worker: OfWorker = None,
    mode: OfMode = None,
    merge: Annotated[
        bool, Query(description="Merge shards to the whole tensor; otherwise each worker has its own lines.")
    ] = True,
    first: FirstStep = 0,
    last: LastStep = _LAST,
    points: Annotated[
        int, Query(ge=1, le=_MAX_POINTS, description="Maximum number of points of a line.")
    ] = 1000,
    rows: Annotated[
        int, Query(ge=0, le=MAX_COLUMNS, description="Maximum number of histograms over the steps.")
    ] = 200,
    condition: IfNoneMatch = None,
) -> Any:
    """Return series of a tensor with the rules that judge it and their thresholds, its histograms, its headroom, and where it was saved.

    Histogram and headroom are of mode train, unless another mode is requested. The files of the series and of the histogram are those of
    …/series and …/histogram.
    """
    figures = list(dict.fromkeys(figure or _FIGURES))
    with queries.service.database.read() as session:
        state = rules_state(session, project, run)
    saved = _listed_objects(queries, project, run)
    parameters = (
        *("tensor", tensor, figures, worker, mode, merge, first, last, points, rows),
        *(state, [key.path for key in saved]),
    )
    request = ViewRequest(project, run, TensorPage, "json", parameters, condition)

    def build(opened: Run) -> View:
        opened.check_tensors([tensor])
        info = next(info for info in opened.index.tensors() if info.name == tensor)
        with queries.service.database.read() as session:
            rules = watching_rules(session, project, run, info)
        series = SeriesRequest(tensor, "", worker, mode, first, last, points, merge)
        return encode_model(_page(opened, info, series, figures, rows, rules, saved))

    return respond(queries, request, build)


def _check_selection(collection: str | None, tensor: list[str] | None) -> None:
    """Check that a request selects tensors in one way.

    Raises:
        ConfigError: it does not.
    """
    if (collection is None) == (not tensor):
        raise ConfigError("collection, tensor: both or neither set", "set exactly one of them")


def _selected(
    run: Run, collection: str | None, tensor: list[str] | None, most: int
) -> tuple[list[TensorInfo], int]:
    """Return descriptions of the selected tensors, a collection in the model's order, and the number of omitted ones.

    Raises:
        ConfigError: the collection has no tensors.
        NotFoundError: a tensor does not exist.
    """
    if collection is not None:
        infos = [info for info in run.catalogue if collection in info.collections]
        if not infos:
            raise ConfigError(
                f"collection {collection!r}: contains no tensors", "list …/tensors for the collections"
            )
    else:
        names = list(dict.fromkeys(tensor or ()))
        run.check_tensors(names)
        by_name = {info.name: info for info in run.index.tensors()}
        infos = [by_name[name] for name in names]
    return infos[:most], max(0, len(infos) - most)


def _page(
    run: Run,
    info: TensorInfo,
    series: SeriesRequest,
    figures: list[str],
    rows: int,
    rules: list[WatchingRule],
    saved: list[SnapshotKey],
) -> TensorPage:
    lines = read_figures(run.index, series, figures)
    selection = Selection((), frozenset([info.name]), series.first, series.last)
    identity = run.index.consistently(lambda: run.index.collect(selection))
    modes = [MODES[code] for code in np.unique(identity["mode"]).tolist()]
    mode: Mode = series.mode if series.mode is not None else next(iter(modes), "train")
    histogram = _histogram(run, series, mode, rows)
    magnitudes = read_magnitudes(run.index, [info.name], 1, mode, (series.first, series.last))
    begin, end = run.index.step_range()
    objects = [key for key in saved if _may_contain(key, info)]
    ordered = sorted(run.index.tensors(), key=lambda other: (other.order, other.name))
    return TensorPage(
        tensor=tensor_views.tensor_entry(info),
        location=run.location,
        neighbours=tensor_views.tensor_neighbours(ordered, info),
        figures=[*COUNTED, *DERIVED, *run.index.probes()],
        first=begin,
        last=end,
        modes=list(modes),
        workers=np.unique(identity["worker"]).tolist(),
        series=[
            FigureLines(
                figure=figure,
                lines=[tensor_views.line_output(line) for line in of_figure.lines],
                left_out=of_figure.left_out,
            )
            for figure, of_figure in lines.items()
        ],
        rules=rules,
        histogram=None if histogram is None else tensor_views.histogram_output(info.name, histogram),
        headroom=tensor_views.tensor_headroom(
            magnitudes.tensors[0], () if histogram is None else shares_of(histogram)
        ),
        saved=[_saved_object(key) for key in objects[-_MAX_SAVED:]],
        saved_left_out=max(0, len(objects) - _MAX_SAVED),
    )


def _histogram(run: Run, series: SeriesRequest, mode: Mode, rows: int) -> HistogramSeries | None:
    """Return the histograms of a tensor over the steps; None without rows."""
    if not rows:
        return None
    try:
        return run.histogram(series.tensor, rows, series.worker, mode, first=series.first, last=series.last)
    except NotFoundError:  # the tensor exists, so it has no rows of this worker, mode and range
        return None


def _listed_objects(queries: Queries, project: str, run: str) -> list[SnapshotKey]:
    """Return the objects with full tensors of all attempts, by step."""
    budget = queries.budget()
    keys = []
    with queries.open_store(project, run) as store:
        for entry in store.entries(SNAPSHOTS):
            budget.check()
            try:
                keys.append(SnapshotKey.parse(entry.key))
            except FormatError:
                continue  # not an object of Watchstep
    return sorted(keys, key=lambda key: (key.step, key))


def _may_contain(key: SnapshotKey, info: TensorInfo) -> bool:
    if key.collection:
        return key.collection in info.collections
    return info.role not in _NOT_IN_SNAPSHOTS


def _saved_object(key: SnapshotKey) -> SavedObject:
    return SavedObject(
        attempt=key.attempt, worker=key.worker, step=key.step, mode=key.mode, collection=key.collection
    )
