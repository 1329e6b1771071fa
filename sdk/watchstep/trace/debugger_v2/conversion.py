"""A dump as a trace: executions of Python and operations of graphs in one order, with the tensors that they read and wrote.

TensorFlow writes the outputs of a graph from several threads, so an output may stand in the file before what it was computed from. Within
one graph, they are put into the order of their computation. Each recorded output becomes a tensor with an id of its own, and an input
refers to the output that was last recorded of its sources.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from watchstep.trace.debugger_v2.dump import Dump, short_device
from watchstep.trace.debugger_v2.events import DumpedExecution, GraphExecution, GraphOperation
from watchstep.trace.debugger_v2.graphs import ArgumentKey, GraphIndex, OutputKey, Source
from watchstep.trace.debugger_v2.tensor_values import MODES, UNKNOWN_SHAPE, DebugMode, RecordedTensor
from watchstep.trace.operations import CallSite, Operation, Trace, TracedTensor, TraceMode

_NO_STEP = -1
_MAX_VALUE_BYTES = 512 * 2**20
"""Maximum size of the full tensors of a trace."""
_DEFAULT_RING = 1000
"""TensorFlow's default ``circular_buffer_size``."""
_READS = frozenset({"ReadVariableOp"})
_CONSTANTS = frozenset({"Const"})
_VARIABLE_OF = re.compile(r"(?:/ReadVariableOp)?/resource$")
_GRADIENT_TAPE = "gradient_tape/"

_GRADIENTS = {
    "ResourceApplyMomentum": 3,
    "ResourceApplyKerasMomentum": 3,
    "ResourceApplyAdagrad": 3,
    "ResourceApplyAdagradV2": 4,
    "ResourceApplyFtrl": 3,
    "ResourceApplyFtrlV2": 3,
    "ResourceSparseApplyMomentum": 3,
    "ResourceSparseApplyKerasMomentum": 3,
    "ResourceSparseApplyAdagrad": 3,
    "ResourceSparseApplyAdagradV2": 4,
}
"""Number of the gradient among the inputs of updates; the last one of ``ResourceApply`` operations that are not listed."""
_ASSIGNMENTS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})


def convert(dump: Dump) -> Trace:
    """Return a dump as a trace.

    Args:
        dump: The dump.
    """
    return _Conversion(dump).trace()


class _Stacks:
    """Distinct stacks of a trace."""

    def __init__(self, frames: dict[str, CallSite]) -> None:
        self._frames = frames
        self._numbers: dict[tuple[str, ...], int] = {}
        self.stacks: list[tuple[CallSite, ...]] = []

    def number(self, ids: tuple[str, ...]) -> int:
        """Return the number of a stack, given the ids of its frames, outermost first; -1 for none."""
        number = self._numbers.get(ids)
        if number is None:
            sites = tuple(self._frames[each] for each in reversed(ids) if each in self._frames)
            number = len(self.stacks) if sites else -1
            if sites:
                self.stacks.append(sites)
            self._numbers[ids] = number
        return number


class _Conversion:
    """Converts one dump."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._stacks = _Stacks(dump.frames)
        recorded = frozenset(
            OutputKey(event.graph, event.operation, event.output)
            for events in dump.traces
            for event in events
        )
        self._index = GraphIndex(dump.graphs, dump.operations, recorded)
        self._called = {execution.graph for events in dump.executions for execution in events}
        self._operations: list[Operation] = []
        self._next_id = 0
        self._fixed: dict[object, int] = {}  # ids of what was never recorded
        self._eager: dict[tuple[int, int], TracedTensor] = {}  # set of files, TensorFlow's id → the tensor
        self._latest: dict[OutputKey, tuple[int, TracedTensor]] = {}
        self._operation_of: dict[tuple[str, str], int] = {}  # graph, name → index of its last operation
        # Graph of a function → its executions that did not come yet, the next one last.
        self._next_execution: dict[str, list[DumpedExecution]] = {}
        self._eager_names = [_names_of_tensors(executions) for executions in dump.executions]
        self._unread: dict[
            str, tuple[int, TracedTensor]
        ] = {}  # graph → last bad output that no recorded operation reads
        self._bytes = 0
        self._unmatched = self._without_values = 0
        self._losses: list[tuple[int, int]] = []
        self._names = self._names_in_graphs()

    def trace(self) -> Trace:
        """Convert the dump."""
        sets = [
            self._merged(number, executions, self._ordered(traces))
            for number, (executions, traces) in enumerate(
                zip(self._dump.executions, self._dump.traces, strict=True)
            )
        ]
        for _, number, _, event in heapq.merge(*sets, key=lambda entry: entry[:3]):
            if isinstance(event, DumpedExecution):
                self._add_execution(number, event)
            else:
                self._add_graph_execution(number, event)
        return Trace(
            self._operations,
            self._stacks.stacks,
            self._dump.sources,
            self._mode(),
            tuple(self._losses),
            program=f"TensorFlow {self._dump.metadata[0].tensorflow[:100]}",
            notes=tuple(self._notes()),
        )

    def _mode(self) -> TraceMode:
        modes = (
            event.mode
            for each in (self._dump.executions, self._dump.traces)
            for events in each
            for event in events
        )
        for mode in modes:
            if mode in MODES:
                return MODES[DebugMode(mode)]
        return TraceMode.NO_TENSOR

    def _notes(self) -> Iterator[str]:
        yield "Debugger V2 records no training steps: all operations have step -1, and are in the order in which they ran"
        yield from self._dump.notes
        for name, sets in (("executions", self._dump.executions), ("outputs in graphs", self._dump.traces)):
            if any(len(events) == _DEFAULT_RING for events in sets):
                yield (
                    f"there are exactly {_DEFAULT_RING} {name}, TensorFlow's default circular_buffer_size; earlier ones, and with them "
                    "the first bad operation, may have been dropped"
                )
        if self._unmatched:
            yield f"{self._unmatched} executions have records of fewer outputs than they returned, in the order of the records"
        if self._without_values:
            yield f"the values of {self._without_values} tensors were left out, as they are large"

    # Order

    def _merged(
        self, number: int, executions: Sequence[DumpedExecution], traces: Sequence[GraphExecution]
    ) -> Iterator[tuple[float, int, int, DumpedExecution | GraphExecution]]:
        """Merge the events of one set of files by time. What ran within a function precedes the function."""
        for execution in reversed(executions):
            if execution.graph:
                self._next_execution.setdefault(execution.graph, []).append(execution)
        return heapq.merge(
            _ascending(traces, number, 0), _ascending(executions, number, 1), key=lambda entry: entry[:3]
        )

    def _ordered(self, events: Sequence[GraphExecution]) -> list[GraphExecution]:
        """Return the events of one file, each after those that it was computed from in the same execution of its graph."""
        places: dict[OutputKey, list[int]] = {}
        for place, event in enumerate(events):
            places.setdefault(_key(event), []).append(place)
        occurrence = [0] * len(events)
        for all_places in places.values():
            for number, place in enumerate(all_places):
                occurrence[place] = number
        ordered: list[GraphExecution] = []
        is_done = [False] * len(events)
        for first in range(len(events)):
            waiting = [first]
            while waiting:
                place = waiting[-1]
                if is_done[place]:
                    waiting.pop()
                    continue
                later = [
                    each
                    for each in self._same_run_sources(events, place, places, occurrence)
                    if not is_done[each] and each not in waiting
                ]
                if later and len(waiting) < _MAX_LATE:
                    waiting.extend(later)
                    continue
                is_done[place] = True
                ordered.append(events[place])
                waiting.pop()
        return ordered

    def _same_run_sources(
        self,
        events: Sequence[GraphExecution],
        place: int,
        places: dict[OutputKey, list[int]],
        occurrence: list[int],
    ) -> Iterator[int]:
        """Yield the places of the events of the same run of a graph that an event was computed from."""
        event = events[place]
        own = places[_key(event)]
        for source in self._sources_of(event.graph, event.operation):
            if not isinstance(source, OutputKey) or source.graph != event.graph:
                continue
            other = places.get(source)
            # In a graph every operation runs once per execution. Different counts mean that a part was dropped.
            if other is not None and len(other) == len(own):
                yield other[occurrence[place]]

    # Names of tensors whose damage counts

    def _names_in_graphs(self) -> dict[OutputKey, str]:
        names: dict[OutputKey, str] = {}
        for operation in self._dump.operations:
            place, is_gradient = _updating_input(operation.type, len(operation.inputs))
            if place is not None:
                variable = self._variable(operation)
                for source in self._index.sources(operation.graph, operation.inputs[place]):
                    if isinstance(source, OutputKey):
                        names[source] = f"{variable}:gradient" if is_gradient else variable
        # Results of functions whose execution was not recorded.
        for graph in self._dump.graphs.values():
            if graph.name and self._index.outermost(graph.id) == graph.id and graph.id not in self._called:
                for source in self._results(graph.id):
                    names.setdefault(source, "output")
        return names

    def _results(self, graph: str) -> Iterator[OutputKey]:
        for reference in self._index.results(graph):
            for source in self._index.sources(graph, reference):
                if isinstance(source, OutputKey):
                    yield source

    def _variable(self, operation: GraphOperation) -> str:
        """Name of the variable that an operation reads or changes, by the name of its first input."""
        reference = operation.inputs[0] if operation.inputs else ""
        return f"variable {_VARIABLE_OF.sub('', reference.rpartition(':')[0])}"

    # Executions of Python

    def _add_execution(self, number: int, execution: DumpedExecution) -> None:
        inputs = [self._eager_input(number, each) for each in execution.inputs]
        waiting = self._next_execution.get(execution.graph)
        if waiting:
            waiting.pop()
            results = list(self._results_of_function(number, execution))
            inputs += results
            self._losses.extend(
                (tensor.id, len(self._operations)) for tensor in results if _may_be_loss(tensor)
            )
        records = execution.tensors
        if records and len(records) != len(execution.outputs):
            self._unmatched += 1
        outputs = []
        for place, each in enumerate(execution.outputs):
            record = records[place] if place < len(records) else RecordedTensor()
            device = execution.devices[place] if place < len(execution.devices) else -1
            name = self._eager_names[number].get(each, "")
            tensor = self._tensor(record, self._dump.devices.get(device, ""), name)
            outputs.append(tensor)
            self._eager[number, each] = _as_input(tensor)
            if name == "output" and _may_be_loss(tensor):
                self._losses.append((tensor.id, len(self._operations) + 1))
        if execution.type in _READS and inputs and outputs:
            name = f"variable {execution.inputs[0]}"
            inputs[0] = replace(_as_input(outputs[0]), id=inputs[0].id, name=name)
        self._operations.append(
            Operation(
                len(self._operations),
                _NO_STEP,
                execution.type,
                "eager",
                "",
                tuple(inputs),
                tuple(outputs),
                self._stacks.number(execution.frames),
                is_constant=execution.type in _CONSTANTS,
            )
        )

    def _eager_input(self, number: int, each: int) -> TracedTensor:
        found = self._eager.get((number, each))
        return found if found is not None else self._unrecorded((number, each))

    def _results_of_function(self, number: int, execution: DumpedExecution) -> Iterator[TracedTensor]:
        """What a function computed and returned, of the outputs that are recorded."""
        for place in range(len(execution.outputs)):
            reference = self._index.returned(execution.graph, place, len(execution.outputs))
            if reference is not None:
                found = self._recorded_source(
                    number, self._index.sources(execution.graph, reference), since=-1
                )
                if found is not None:
                    yield found

    # Operations within graphs

    def _add_graph_execution(self, number: int, event: GraphExecution) -> None:
        key = _key(event)
        operation = self._index.operation(event.graph, event.operation)
        since = self._latest[key][0] if key in self._latest else -1
        output = self._tensor(event.tensor, short_device(event.device), self._names.get(key, ""))
        inputs = self._graph_inputs(number, event, operation, since, output)
        kind = operation.type if operation is not None else "Unknown"
        module, forward = self._module_of(event)
        index = len(self._operations)
        self._operations.append(
            Operation(
                index,
                _NO_STEP,
                kind,
                "graph",
                module.replace("/", "."),
                tuple(inputs),
                (output,),
                -1 if operation is None else self._stacks.number(operation.frames),
                event.operation,
                forward,
                is_constant=kind in _CONSTANTS,
            )
        )
        self._latest[key] = index, _as_input(output)
        self._operation_of[event.graph, event.operation] = index
        if output.nonfinite and key not in self._index.read:
            self._unread[event.graph] = index, _as_input(output)

    def _graph_inputs(
        self,
        number: int,
        event: GraphExecution,
        operation: GraphOperation | None,
        since: int,
        output: TracedTensor,
    ) -> list[TracedTensor]:
        if operation is None:
            return []
        references = operation.inputs
        if not references and operation.type.startswith("Placeholder"):
            sources = self._index.argument_sources(event.graph, event.operation)
            return [self._input(number, sources, since, output, is_argument=True)]
        inputs = [
            self._input(number, self._index.sources(event.graph, reference), since, output)
            for reference in references
        ]
        if operation.type in _READS and inputs:
            inputs[0] = replace(_as_input(output), id=inputs[0].id, name=self._variable(operation))
        return inputs

    def _input(
        self,
        number: int,
        sources: tuple[Source, ...],
        since: int,
        output: TracedTensor,
        *,
        is_argument: bool = False,
    ) -> TracedTensor:
        """Return the tensor that an operation read.

        Args:
            number: The set of files.
            sources: Where it may come from.
            since: Index of the last run of the operation. What was written before is preferred only if nothing else was.
            output: Output of the operation.
            is_argument: Whether it has the same values as the output.
        """
        if is_argument and len(sources) > 1:
            alike = tuple(source for source in sources if self._is_like(source, output))
            sources = alike or sources
        found = self._recorded_source(number, sources, since)
        if found is None and output.nonfinite:
            found = self._passed_to_unrecorded_call(sources)
        if found is not None:
            return found
        unknown = self._unrecorded(sources[0] if sources else "")
        if not is_argument:
            return unknown
        name = f"argument {sources[0].argument}" if sources and isinstance(sources[0], ArgumentKey) else ""
        return replace(_as_input(output), id=unknown.id, name=name)

    def _recorded_source(self, number: int, sources: tuple[Source, ...], since: int) -> TracedTensor | None:
        """Return the source that was recorded last, if it was after the last run of its reader, or if there is no argument."""
        last: tuple[int, TracedTensor] | None = None
        argument: TracedTensor | None = None
        for source in sources:
            if isinstance(source, OutputKey):
                found = self._latest.get(source)
                if found is not None and (last is None or found[0] > last[0]):
                    last = found
            elif argument is None:
                argument = self._argument(number, source)
        if last is not None and (last[0] > since or argument is None):
            return last[1]
        return argument

    def _argument(self, number: int, source: ArgumentKey) -> TracedTensor | None:
        waiting = self._next_execution.get(source.graph)
        if not waiting or source.argument >= len(waiting[-1].inputs):
            return None
        return self._eager_input(number, waiting[-1].inputs[source.argument])

    def _passed_to_unrecorded_call(self, sources: tuple[Source, ...]) -> TracedTensor | None:
        """Return the last bad output of an outer graph that only a call of a function can have read."""
        for source in sources:
            if isinstance(source, ArgumentKey) and source.graph not in self._called:
                found = [
                    self._unread[graph]
                    for graph in self._index.ancestors(source.graph)
                    if graph in self._unread
                ]
                if found:
                    return max(found, key=lambda entry: entry[0])[1]
        return None

    def _is_like(self, source: Source, output: TracedTensor) -> bool:
        if not isinstance(source, OutputKey) or source not in self._latest:
            return False
        tensor = self._latest[source][1]
        return (tensor.nonfinite, tensor.health, tensor.shape) == (
            output.nonfinite,
            output.health,
            output.shape,
        )

    def _sources_of(self, graph: str, name: str) -> Iterator[Source]:
        operation = self._index.operation(graph, name)
        for reference in operation.inputs if operation is not None else ():
            yield from self._index.sources(graph, reference)

    def _module_of(self, event: GraphExecution) -> tuple[str, int | None]:
        """Return the name scope of an operation without scopes that are operations themselves, and the index of its forward operation.

        A gradient has the scope ``gradient_tape/`` and the name of the operation that it belongs to.
        """
        is_gradient = event.operation.startswith(_GRADIENT_TAPE)
        scope = event.operation.removeprefix(_GRADIENT_TAPE).rpartition("/")[0]
        forward = self._operation_of.get((event.graph, scope)) if is_gradient else None
        while scope and any(
            self._index.operation(event.graph, f"{prefix}{scope}") is not None
            for prefix in ("", _GRADIENT_TAPE)
        ):
            scope = scope.rpartition("/")[0]
        return scope, forward

    # Common parts

    def _tensor(self, record: RecordedTensor, device: str, name: str) -> TracedTensor:
        values = record.values
        if values is not None:
            self._bytes += values.nbytes
            if self._bytes > _MAX_VALUE_BYTES:
                self._bytes -= values.nbytes
                self._without_values += 1
                values = None
        number = self._next_id
        self._next_id += 1
        return TracedTensor(
            number, record.shape, record.dtype, device, name, record.nonfinite, record.health, values
        )

    def _unrecorded(self, key: object) -> TracedTensor:
        """Return a tensor of which nothing was recorded; the same for the same key."""
        number = self._fixed.get(key)
        if number is None:
            number = self._fixed[key] = self._next_id
            self._next_id += 1
        return TracedTensor(number, UNKNOWN_SHAPE, "", "")


_MAX_LATE = 10_000
"""Maximum number of outputs that are moved before one another."""


def _key(event: GraphExecution) -> OutputKey:
    return OutputKey(event.graph, event.operation, event.output)


def _as_input(tensor: TracedTensor) -> TracedTensor:
    return replace(tensor, name="", values=None) if tensor.name or tensor.values is not None else tensor


def _ascending(
    events: Sequence[DumpedExecution] | Sequence[GraphExecution], number: int, kind: int
) -> Iterator[tuple[float, int, int, DumpedExecution | GraphExecution]]:
    """Yield events with ascending times, so that a clock that was set back changes no order."""
    time = 0.0
    for event in events:
        time = max(time, event.wall_time)
        yield time, number, kind, event


def _names_of_tensors(executions: Sequence[DumpedExecution]) -> dict[int, str]:
    """Names of tensors of Python by their ids: gradients, values of variables, and results that nothing recorded reads."""
    names: dict[int, str] = {}
    read = {each for execution in executions for each in execution.inputs}
    for execution in executions:
        names.update((each, "output") for each in execution.outputs if each not in read)
        place, is_gradient = _updating_input(execution.type, len(execution.inputs))
        if place is not None:
            variable = f"variable {execution.inputs[0]}"
            names[execution.inputs[place]] = f"{variable}:gradient" if is_gradient else variable
    return names


def _may_be_loss(tensor: TracedTensor) -> bool:
    """Whether a result may be a loss: it has one element, or its size was not recorded. A dump does not say where a gradient began."""
    return tensor.nonfinite is not None and (tensor.health is None or tensor.health.elements == 1)


def _updating_input(kind: str, inputs: int) -> tuple[int | None, bool]:
    """Return which input of an operation updates a variable, and whether it is a gradient; None if it updates none."""
    if kind in _ASSIGNMENTS:
        return (1, False) if inputs > 1 else (None, False)
    if kind.startswith(("ResourceApply", "ResourceSparseApply")):
        # Sparse updates end with the indices.
        place = _GRADIENTS.get(kind, inputs - 2 if "Sparse" in kind else inputs - 1)
        return (place, True) if 0 < place < inputs else (None, False)
    return None, False
