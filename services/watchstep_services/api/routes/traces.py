"""Operation traces of a run: lists, alerts, first bad operations, timelines, operations with tensors and stacks, neighbours, source texts.

All names and texts are those of the recorder, cut to a length, and never interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Path, Query, Response
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from watchstep.errors import FormatError
from watchstep.format.layout import TRACES, TraceKey, check_name
from watchstep.reading.budget import PROCESS, ReadBudget
from watchstep.store.store import Store
from watchstep.trace.indexed_trace import MAX_EDGES, MAX_NEIGHBOURS, MAX_TEXTS, IndexedTrace
from watchstep.trace.operations import Operation, TensorHealth, TracedTensor
from watchstep.trace.origins import BadOrigin, Cause, Diagnosis, diagnose
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.queries.answers import Numbers, numbers
from watchstep_services.api.queries.state import Queries, Querying
from watchstep_services.api.schemas.filters import Word
from watchstep_services.api.schemas.paging import Paged, PageOutput
from watchstep_services.api.schemas.problems import RequestRefusedError, documented

router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/traces", tags=["traces"], responses=documented(502)
)

_PLACE = "/{attempt}/{worker}/{first}/{last}"
_MAX_CHARACTERS = 500
_MAX_TENSORS = 64
"""Maximum number of inputs and of outputs of an operation in a response."""
_MAX_DIMENSIONS = 32
_MAX_FRAMES = 100
_MAX_FILES = 1000
_MAX_NOTES = 20
_MAX_STEPS = 1000
_MAX_ORIGINS = 100
"""Maximum number of further origins, and of contained operations, in a response."""
_MAX_SOURCE = 2 * 1024 * 1024
"""Maximum number of characters of a source file in a response."""
_CACHED = "private, max-age=3600, immutable"


@dataclass(frozen=True)
class TracePath:
    """The trace in a request path."""

    project: str
    run: str
    key: TraceKey


async def _trace_path(
    project: str,
    run: str,
    attempt: Annotated[str, Path(max_length=128)],
    worker: Annotated[int, Path(ge=0, lt=2**31)],
    first: Annotated[int, Path(ge=0, lt=2**59)],
    last: Annotated[int, Path(ge=0, lt=2**59)],
) -> TracePath:
    return TracePath(project, run, TraceKey(check_name("attempt", attempt), worker, first, last))


Placed = Annotated[TracePath, Depends(_trace_path)]
OperationIndex = Annotated[int, Path(ge=0, lt=2**53, description="Index of the operation.")]


class TraceEntry(BaseModel):
    """A trace."""

    attempt: str
    worker: int
    first: int = Field(description="First step.")
    last: int = Field(description="Last step.")
    bytes: int


class TraceList(PageOutput):
    """Traces by attempt, worker, and steps."""

    traces: list[TraceEntry]


class TraceOutput(TraceEntry):
    """What a trace contains."""

    location: str = Field(description="URL of the run on its store, for watchstep.open_run.")
    mode: str = Field(description="What was recorded of each output.")
    program: str
    operations: int
    alerts: int = Field(description="Number of operations with an output that is not finite.")
    left_out: int = Field(description="Number of operations that filters or limits left out.")
    steps: list[int] = Field(
        description=f"Steps with operations, the first {_MAX_STEPS}; -1: the step is not known."
    )
    raised: list[int] = Field(description="Steps that an exception has ended.")
    notes: list[str] = Field(description="What could not be observed.")
    files: list[str] = Field(description=f"Files whose text is in the trace, the first {_MAX_FILES}.")


class OperationDigest(BaseModel):
    """An operation in a list."""

    index: int
    step: int
    name: str
    node: str = Field(description="Backward function, or name of the operation in its graph; may be empty.")
    phase: str
    module: str
    bad: bool = Field(description="Whether an output is not finite.")
    shapes: list[list[int]] = Field(description="Shapes of the outputs; -1: a dimension was not recorded.")


class OperationList(PageOutput):
    """Operations in the order in which they ran."""

    operations: list[OperationDigest]


class TraceAlert(BaseModel):
    """An output that is not finite."""

    operation: OperationDigest
    output: int = Field(description="Number of the output.")
    elements: int | None = Field(description="Number of elements; null if it was not recorded.")
    nan: int | None = Field(description="Number of NaN; null if it was not counted.")
    pos_inf: int | None = Field(description="Number of +inf; null if it was not counted.")
    neg_inf: int | None = Field(description="Number of -inf; null if it was not counted.")


class TraceAlertList(PageOutput):
    """Alerts in the order in which the operations ran."""

    alerts: list[TraceAlert]


class HealthOutput(BaseModel):
    """Counts of a tensor's elements."""

    elements: int
    nan: int
    pos_inf: int
    neg_inf: int
    negative: int | None
    zero: int | None
    positive: int | None
    figures: Numbers = Field(
        description="Minimum, maximum, mean, standard deviation and L2 norm of the finite elements; null if not recorded."
    )
    first_bad: list[int] = Field(description="Index of the first element that is not finite.")
    exact: bool = Field(description="Whether the counts are exact; otherwise 1 stands for at least one.")


class TracedTensorOutput(BaseModel):
    """A tensor that an operation read or wrote."""

    id: int
    name: str
    dtype: str = Field(description="Empty if it was not recorded.")
    shape: list[int] = Field(description="-1: a dimension was not recorded.")
    device: str
    nonfinite: bool | None = Field(
        description="Whether an element is not finite; null if it was not checked."
    )
    health: HealthOutput | None


class FrameOutput(BaseModel):
    """A line of a stack."""

    file: str
    line: int
    function: str
    library: bool = Field(description="Whether the file belongs to an installed package.")
    text: str = Field(description="Text of the line; empty if it is not in the trace.")


class OperationOutput(OperationDigest):
    """An operation with its tensors and its stack."""

    inputs: list[TracedTensorOutput]
    outputs: list[TracedTensorOutput]
    more_tensors: int = Field(description=f"Number of tensors beyond {_MAX_TENSORS} inputs or outputs.")
    forward: int | None = Field(description="Index of the forward operation that a backward one belongs to.")
    error: str = Field(description="Exception that it raised; empty if none.")
    stack: list[FrameOutput] = Field(description=f"Innermost line first, at most {_MAX_FRAMES}.")


class OperationEdge(BaseModel):
    """A tensor that one operation wrote and another one read."""

    source: int = Field(description="Index of the operation that wrote it.")
    target: int = Field(description="Index of the operation that read it.")
    tensor: int = Field(description="Id of the tensor.")


class OperationGraph(BaseModel):
    """An operation with those around it."""

    operations: list[OperationDigest] = Field(description="In the order in which they ran.")
    edges: list[OperationEdge]
    truncated: bool = Field(
        description=f"Whether operations beyond {MAX_NEIGHBOURS}, or edges beyond {MAX_EDGES:,}, were left out."
    )


class TraceTimeline(BaseModel):
    """All operations in the order in which they ran, in columns of the same length. A text is a place in a list of texts."""

    index: list[int]
    step: list[int]
    name: list[int] = Field(description=f"Place in `names`; -1 beyond {MAX_TEXTS:,} distinct ones.")
    node: list[int] = Field(description="Place in `nodes`, as `name`.")
    module: list[int] = Field(description="Place in `modules`, as `name`.")
    phase: list[int] = Field(description="Place in `phases`.")
    bad: list[int] = Field(
        description="Places in these columns of the operations with an output that is not finite."
    )
    names: list[str]
    nodes: list[str]
    modules: list[str]
    phases: list[str]


class OriginOutput(BaseModel):
    """Where values that are not finite began."""

    cause: Cause = Field(
        description="operation: it made them from finite inputs; tensor: it is the first one that read a tensor that was "
        "not finite when the step began; error: it raised an exception."
    )
    operation: OperationDigest
    tensor: TracedTensorOutput | None = Field(
        description="The output; for cause `tensor`, what it read; null for cause `error`."
    )
    inputs: list[TracedTensorOutput] = Field(description=f"What the operation read, at most {_MAX_TENSORS}.")
    reaches: str = Field(description="What was damaged, such as `gradient of fc.weight`.")
    error: str = Field(description="Exception that the operation raised; empty if none.")
    line: FrameOutput | None = Field(
        description="Innermost line of its stack outside of installed packages, else the innermost one; null if it has no stack."
    )


class TraceDiagnosis(BaseModel):
    """The first bad operation of a trace."""

    first: OriginOutput | None = Field(description="Null if nothing was damaged.")
    others: list[OperationDigest] = Field(
        description=f"Further operations where values began that damaged something, the first {_MAX_ORIGINS}."
    )
    contained: list[OperationDigest] = Field(
        description=f"Operations whose values that are not finite reached nothing, the first {_MAX_ORIGINS}."
    )


class SourceOutput(BaseModel):
    """The text of a file."""

    file: str
    text: str
    truncated: bool = Field(description=f"Whether the text was cut after {_MAX_SOURCE:,} characters.")


@router.get("", summary="List traces")
@permits("read")
def list_traces(project: str, run: str, queries: Querying, paging: Paged) -> TraceList:
    """Return the operation traces of a run, by attempt, worker and steps."""
    with queries.open_store(project, run) as store:
        page, token = paging.fetch_streamed(
            ((key.attempt, key.worker, key.first, key.last), (key, size))
            for key, size in _list_keys(store, queries.budget().check)
        )
    return TraceList(traces=[_entry(key, size) for key, size in page], next_page_token=token)


@router.get(_PLACE, summary="Get a trace")
@permits("read")
def get_trace(place: Placed, queries: Querying, response: Response) -> TraceOutput:
    """Return what a trace contains."""
    with _opened(place, queries, response) as (trace, store):
        return TraceOutput(
            **_entry(place.key, store.size(place.key.path)).model_dump(),
            location=store.location,
            mode=_cut(trace.mode),
            program=_cut(trace.program),
            operations=len(trace),
            alerts=int(np.count_nonzero(trace.bad)),
            left_out=trace.left_out,
            steps=np.unique(trace.steps)[:_MAX_STEPS].tolist(),
            raised=list(trace.raised[:_MAX_STEPS]),
            notes=[_cut(note) for note in trace.notes[:_MAX_NOTES]],
            files=[_valid(file) for file in trace.files[:_MAX_FILES] if len(file) <= _MAX_CHARACTERS],
        )


@router.get(f"{_PLACE}/operations", summary="List operations")
@permits("read")
def list_operations(
    place: Placed,
    queries: Querying,
    paging: Paged,
    response: Response,
    begin: Annotated[int, Query(ge=0, lt=2**53, description="First index.")] = 0,
    end: Annotated[int, Query(ge=0, le=2**53, description="Index after the last one.")] = 2**53,
    step: Annotated[int | None, Query(ge=-1, lt=2**59, description="Only operations of this step.")] = None,
) -> OperationList:
    """Return operations in the order in which they ran."""
    with _opened(place, queries, response) as (trace, _):
        chosen = (trace.indexes >= begin) & (trace.indexes < end)
        if step is not None:
            chosen &= trace.steps == step
        places, token = paging.fetch_fixed(_Places(np.flatnonzero(chosen)))
        return OperationList(operations=[_digest(trace.at(each)) for each in places], next_page_token=token)


@router.get(f"{_PLACE}/alerts", summary="List alerts of a trace")
@permits("read")
def list_trace_alerts(place: Placed, queries: Querying, paging: Paged, response: Response) -> TraceAlertList:
    """Return the outputs that are not finite. A page has the alerts of at most `limit` operations."""
    with _opened(place, queries, response) as (trace, _):
        places, token = paging.fetch_fixed(_Places(np.flatnonzero(trace.bad)))
        alerts = [alert for each in places for alert in _alerts(trace.at(each))]
    return TraceAlertList(alerts=alerts, next_page_token=token)


@router.get(f"{_PLACE}/timeline", summary="Get all operations in columns")
@permits("read")
def get_trace_timeline(place: Placed, queries: Querying, response: Response) -> TraceTimeline:
    """Return step, name, module and phase of every operation, for a picture of all of them."""
    with _opened(place, queries, response) as (trace, _):
        columns = {"name": trace.names, "node": trace.nodes, "module": trace.modules, "phase": trace.phases}
        return TraceTimeline(
            index=trace.indexes.tolist(),
            step=trace.steps.tolist(),
            **{name: column.numbers.tolist() for name, column in columns.items()},
            bad=np.flatnonzero(trace.bad).tolist(),
            **{f"{name}s": [_valid(text) for text in column.texts] for name, column in columns.items()},
        )


@router.get(f"{_PLACE}/diagnosis", summary="Find the first bad operation")
@permits("read")
def get_trace_diagnosis(place: Placed, queries: Querying, response: Response) -> TraceDiagnosis:
    """Follow the values that are not finite back from what they damaged, in the first step with damage."""
    budget = queries.budget()
    with _opened(place, queries, response) as (trace, _):
        found = _diagnosed(trace, budget)
        return TraceDiagnosis(
            first=None if found.first is None else _origin(trace, found.first),
            others=[_digest(origin.operation) for origin in found.others[:_MAX_ORIGINS]],
            contained=[_digest(operation) for operation in found.contained[:_MAX_ORIGINS]],
        )


@router.get(f"{_PLACE}/operations/{{index}}", summary="Get an operation")
@permits("read")
def get_operation(
    place: Placed, index: OperationIndex, queries: Querying, response: Response
) -> OperationOutput:
    """Return an operation with its inputs, outputs and stack."""
    with _opened(place, queries, response) as (trace, _):
        operation = trace.at(trace.place_of(index))
        lines: dict[str, list[str]] = {}
        more = (len(operation.inputs), len(operation.outputs))
        return OperationOutput(
            **_digest(operation).model_dump(),
            inputs=[_tensor(tensor) for tensor in operation.inputs[:_MAX_TENSORS]],
            outputs=[_tensor(tensor) for tensor in operation.outputs[:_MAX_TENSORS]],
            more_tensors=sum(max(0, each - _MAX_TENSORS) for each in more),
            forward=operation.forward,
            error=_cut(operation.error),
            stack=[_frame(trace, frame, lines) for frame in trace.stack(operation.stack, _MAX_FRAMES)],
        )


@router.get(f"{_PLACE}/operations/{{index}}/graph", summary="Get the neighbours of an operation")
@permits("read")
def get_operation_graph(
    place: Placed,
    index: OperationIndex,
    queries: Querying,
    response: Response,
    depth: Annotated[int, Query(ge=1, le=2, description="Number of steps from the operation.")] = 1,
) -> OperationGraph:
    """Return the operations that wrote what an operation read, and those that read what it wrote."""
    budget = queries.budget()
    with _opened(place, queries, response) as (trace, _):
        places, edges, is_cut = trace.neighbours(trace.place_of(index), depth, budget.check)
        indexes = trace.indexes
        operations = []
        for each in places:
            budget.check()
            operations.append(_digest(trace.at(each)))
        return OperationGraph(
            operations=operations,
            edges=[
                OperationEdge(source=int(indexes[source]), target=int(indexes[target]), tensor=tensor)
                for source, target, tensor in edges
            ],
            truncated=is_cut,
        )


@router.get(f"{_PLACE}/source", summary="Read a source file of a trace")
@permits("read")
def get_trace_source(
    place: Placed,
    queries: Querying,
    response: Response,
    file: Annotated[
        Word, Query(min_length=1, max_length=_MAX_CHARACTERS, description="Path, as in a stack.")
    ],
) -> SourceOutput:
    """Return the text of a file as it is in the trace. No file of the service is read."""
    with _opened(place, queries, response) as (trace, _):
        text = trace.source(file)
    return SourceOutput(file=file, text=_valid(text[:_MAX_SOURCE]), truncated=len(text) > _MAX_SOURCE)


class _Places(Sequence[int]):
    """Places of operations, which a page takes a part of."""

    def __init__(self, places: NDArray[np.intp]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        return int(self._places[place])


@contextmanager
def _opened(place: TracePath, queries: Queries, response: Response) -> Iterator[tuple[IndexedTrace, Store]]:
    """Open a trace, with its run's store, and mark the response as one that never changes."""
    with queries.open_store(place.project, place.run) as store:
        try:
            yield queries.traces.open(store, place.key.path, queries.budget()), store
        except MemoryError:
            raise RequestRefusedError(
                413, f"trace {place.key.path}: too large", "read it with 'watchstep trace'"
            ) from None
    response.headers["cache-control"] = _CACHED


def _list_keys(store: Store, check: Any) -> Iterator[tuple[TraceKey, int]]:
    for entry in store.entries(TRACES):
        check()
        try:
            yield TraceKey.parse(entry.key), entry.size
        except FormatError:
            continue  # not an object of Watchstep


def _entry(key: TraceKey, size: int) -> TraceEntry:
    return TraceEntry(attempt=key.attempt, worker=key.worker, first=key.first, last=key.last, bytes=size)


def _valid(text: str) -> str:
    """Return text that can be encoded; JSON of a recorder may contain halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()


def _cut(text: str) -> str:
    return _valid(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…")


def _shape(tensor: TracedTensor) -> list[int]:
    return list(tensor.shape[:_MAX_DIMENSIONS])


def _digest(operation: Operation) -> OperationDigest:
    return OperationDigest(
        index=operation.index,
        step=operation.step,
        name=_cut(operation.name),
        node=_cut(operation.node),
        phase=operation.phase,
        module=_cut(operation.module),
        bad=operation.is_bad,
        shapes=[_shape(output) for output in operation.outputs[:_MAX_TENSORS]],
    )


def _diagnosed(trace: IndexedTrace, budget: ReadBudget) -> Diagnosis:
    """Diagnose the steps with values that are not finite, up to the first one with damage. Only one step is in memory."""
    contained: list[Operation] = []
    for step in trace.faulty_steps():
        with PROCESS.reserve(trace.memory_of_step(step), budget, f"step {step} of the trace"):
            found = diagnose(trace.step_trace(step, budget.check), step)
        contained.extend(found.contained[:_MAX_ORIGINS])
        if found.first is not None:
            return Diagnosis(found.first, found.others, tuple(contained))
    return Diagnosis(None, (), tuple(contained))


def _origin(trace: IndexedTrace, origin: BadOrigin) -> OriginOutput:
    stack = trace.stack(origin.operation.stack, _MAX_FRAMES)
    site = next((frame for frame in stack if not frame[3]), stack[0] if stack else None)
    return OriginOutput(
        cause=origin.cause,
        operation=_digest(origin.operation),
        tensor=None if origin.tensor is None else _tensor(origin.tensor),
        inputs=[_tensor(tensor) for tensor in origin.operation.inputs[:_MAX_TENSORS]],
        reaches=_cut(origin.reaches),
        error=_cut(origin.operation.error),
        line=None if site is None else _frame(trace, site, {}),
    )


def _alerts(operation: Operation) -> Iterator[TraceAlert]:
    digest = _digest(operation)
    bad = [place for place, output in enumerate(operation.outputs) if output.nonfinite]
    for place in bad[:_MAX_TENSORS]:
        health = operation.outputs[place].health
        exact = health if health is not None and health.is_exact else None
        yield TraceAlert(
            operation=digest,
            output=place,
            elements=None if health is None else health.elements,
            nan=None if exact is None else exact.nan,
            pos_inf=None if exact is None else exact.positive_infinite,
            neg_inf=None if exact is None else exact.negative_infinite,
        )


def _tensor(tensor: TracedTensor) -> TracedTensorOutput:
    return TracedTensorOutput(
        id=tensor.id,
        name=_cut(tensor.name),
        dtype=_cut(tensor.dtype),
        shape=_shape(tensor),
        device=_cut(tensor.device),
        nonfinite=tensor.nonfinite,
        health=None if tensor.health is None else _health(tensor.health),
    )


def _health(health: TensorHealth) -> HealthOutput:
    figures = (health.minimum, health.maximum, health.mean, health.std, health.norm)
    return HealthOutput(
        elements=health.elements,
        nan=health.nan,
        pos_inf=health.positive_infinite,
        neg_inf=health.negative_infinite,
        negative=health.negative,
        zero=health.zero,
        positive=health.positive,
        figures=numbers(np.array([np.nan if figure is None else figure for figure in figures])),
        first_bad=list(health.first_bad[:_MAX_DIMENSIONS]),
        exact=health.is_exact,
    )


def _frame(
    trace: IndexedTrace, frame: tuple[str, int, str, bool], lines: dict[str, list[str]]
) -> FrameOutput:
    file, line, function, library = frame
    if file not in lines:
        lines[file] = trace.source(file).splitlines() if file in trace.sources else []
    texts = lines[file]
    text = texts[line - 1].strip() if 0 < line <= len(texts) else ""
    return FrameOutput(file=_cut(file), line=line, function=_cut(function), library=library, text=_cut(text))
