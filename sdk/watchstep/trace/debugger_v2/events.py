"""The events of a dump, as they are in its files: TensorFlow's ``debug_event.proto``, as far as a trace needs it.

Names, ids and texts are those of the file; each is limited in length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from watchstep.trace.debugger_v2.tensor_values import RecordedTensor, recorded_tensor
from watchstep.trace.debugger_v2.wire import (
    WireError,
    double,
    fields,
    integers,
    message_of,
    text,
)

MAX_NAME_BYTES = 16_384
MAX_ITEMS = 65_536
"""Maximum number of inputs, outputs or stack frames of one operation."""
MAX_LINE_BYTES = 2**20

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class DumpMetadata:
    """The head of a set of files.

    Attributes:
        wall_time: when the program started, in seconds since the epoch.
        tensorflow: version of TensorFlow.
        file_version: version of the format, as ``debug.Event:1``.
        run_id: the same for all hosts of one program; empty in old versions.
    """

    wall_time: float
    tensorflow: str
    file_version: str
    run_id: str


@dataclass(frozen=True, slots=True)
class DumpedSource:
    """A source file; its lines are None if TensorFlow could not read it."""

    host: str
    path: str
    lines: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class DumpedFrame:
    """A line of a stack: the number of its source file in order of their events, the line from 1, and the function."""

    id: str
    file: int
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class DumpedGraph:
    """A graph of a function, of a branch or a loop. ``outer`` is the id of the graph that it is nested in; empty for none."""

    id: str
    name: str
    outer: str


@dataclass(frozen=True, slots=True)
class GraphOperation:
    """The creation of an operation in a graph.

    Attributes:
        graph: id of the graph.
        type: as ``MatMul``.
        name: unique within the graph, with its name scopes, as ``hidden/MatMul``.
        inputs: ``<name of the operation>:<output>`` of each.
        outputs: number of outputs.
        frames: ids of the stack's frames, outermost first.
    """

    graph: str
    type: str
    name: str
    inputs: tuple[str, ...]
    outputs: int
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DumpedExecution:
    """An operation, or a function as a whole, that Python executed.

    Attributes:
        wall_time: when it was written, in seconds since the epoch.
        type: as ``MatMul``, or ``__inference_step_217`` for a function.
        graph: id of the function's graph; empty for a single operation.
        inputs: ids of the tensors that it read.
        outputs: ids of the tensors that it returned.
        devices: id of the device of each output.
        mode: number of the debug mode.
        tensors: what was recorded of each output; fewer than the outputs if a filter left some out.
        frames: ids of the stack's frames, outermost first.
    """

    wall_time: float
    type: str
    graph: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    devices: tuple[int, ...]
    mode: int
    tensors: tuple[RecordedTensor, ...]
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GraphExecution:
    """One output of an operation that ran within a graph.

    Attributes:
        wall_time: when it was written, in seconds since the epoch.
        graph: id of the graph.
        operation: name of the operation.
        output: number of the output.
        mode: number of the debug mode.
        tensor: what was recorded of it.
        device: its device, as ``/job:localhost/replica:0/task:0/device:CPU:0``.
    """

    wall_time: float
    graph: str
    operation: str
    output: int
    mode: int
    tensor: RecordedTensor
    device: str


@dataclass(frozen=True, slots=True)
class DumpedDevice:
    """The name of a device by its id."""

    id: int
    name: str


DumpEvent = (
    DumpMetadata
    | DumpedSource
    | DumpedFrame
    | DumpedGraph
    | GraphOperation
    | DumpedExecution
    | GraphExecution
    | DumpedDevice
)


def event_of(data: bytes) -> DumpEvent | None:
    """Parse the data of a record; None for an event of another kind.

    Raises:
        WireError: it is no event, or exceeds a limit.
    """
    wall_time = 0.0
    kind, content = 0, memoryview(b"")
    for number, _, value in fields(memoryview(data)):
        if number == 1:
            wall_time = double(value)
        elif number in _PARSERS:
            kind, content = number, message_of(value)
    return _PARSERS[kind](wall_time, content) if kind else None


@dataclass(slots=True)
class _Words:
    """The fields of a message whose meaning is the same for all parsers here: text, numbers, and repeated fields, by number."""

    texts: dict[int, list[str]] = field(default_factory=dict)
    numbers: dict[int, list[int]] = field(default_factory=dict)
    messages: dict[int, list[memoryview]] = field(default_factory=dict)

    def text(self, number: int) -> str:
        return self.texts.get(number, [""])[-1]

    def number(self, number: int) -> int:
        return self.numbers.get(number, [0])[-1]

    def all_texts(self, number: int) -> tuple[str, ...]:
        return tuple(self.texts.get(number, ()))

    def all_numbers(self, number: int) -> tuple[int, ...]:
        return tuple(self.numbers.get(number, ()))

    def message(self, number: int) -> memoryview:
        return self.messages.get(number, [memoryview(b"")])[-1]


def _words(
    content: memoryview,
    texts: frozenset[int] = frozenset(),
    numbers: frozenset[int] = frozenset(),
    messages: frozenset[int] = frozenset(),
) -> _Words:
    words = _Words()
    for number, _, value in fields(content):
        if number in texts:
            _bounded(words.texts.setdefault(number, [])).append(text(value, MAX_NAME_BYTES))
        elif number in numbers:
            found = words.numbers.setdefault(number, [])
            found.extend(integers(value, MAX_ITEMS - len(_bounded(found))))
        elif number in messages:
            _bounded(words.messages.setdefault(number, [])).append(message_of(value))
    return words


def _bounded(items: list[_Item]) -> list[_Item]:
    if len(items) >= MAX_ITEMS:
        raise WireError(f"more than {MAX_ITEMS} items in one event")
    return items


def _metadata(wall_time: float, content: memoryview) -> DumpMetadata:
    words = _words(content, texts=frozenset({1, 2, 3}))
    return DumpMetadata(wall_time, words.text(1), words.text(2), words.text(3))


def _source(_: float, content: memoryview) -> DumpedSource:
    host, path = "", ""
    lines: list[str] = []
    for number, _kind, value in fields(content):
        if number == 1:
            path = text(value, MAX_NAME_BYTES)
        elif number == 2:
            host = text(value, MAX_NAME_BYTES)
        elif number == 3:
            if len(lines) >= MAX_LINE_BYTES:
                raise WireError(f"more than {MAX_LINE_BYTES} lines")
            lines.append(text(value, MAX_LINE_BYTES))
    return DumpedSource(host, path, tuple(lines) or None)


def _frame(_: float, content: memoryview) -> DumpedFrame:
    words = _words(content, texts=frozenset({1}), messages=frozenset({2}))
    place = _words(words.message(2), texts=frozenset({4}), numbers=frozenset({1, 2}))
    return DumpedFrame(words.text(1), place.number(1), place.number(2), place.text(4))


def _graph_operation(_: float, content: memoryview) -> GraphOperation:
    words = _words(content, texts=frozenset({1, 2, 4, 6}), numbers=frozenset({7, 9}), messages=frozenset({8}))
    return GraphOperation(
        words.text(4),
        words.text(1),
        words.text(2),
        words.all_texts(6),
        max(words.number(7), len(words.all_numbers(9))),
        _frames(words.message(8)),
    )


def _graph(_: float, content: memoryview) -> DumpedGraph:
    words = _words(content, texts=frozenset({1, 2, 6}))
    return DumpedGraph(words.text(1), words.text(2), words.text(6))


def _execution(wall_time: float, content: memoryview) -> DumpedExecution:
    words = _words(
        content, texts=frozenset({1, 3}), numbers=frozenset({4, 5, 6, 9}), messages=frozenset({7, 8})
    )
    return DumpedExecution(
        wall_time,
        words.text(1),
        words.text(3),
        words.all_numbers(4),
        words.all_numbers(5),
        words.all_numbers(9),
        words.number(6),
        tuple(recorded_tensor(words.number(6), tensor) for tensor in words.messages.get(7, ())),
        _frames(words.message(8)),
    )


def _graph_execution(wall_time: float, content: memoryview) -> GraphExecution:
    words = _words(content, texts=frozenset({1, 2, 6}), numbers=frozenset({3, 4}), messages=frozenset({5}))
    return GraphExecution(
        wall_time,
        words.text(1),
        words.text(2),
        words.number(3),
        words.number(4),
        recorded_tensor(words.number(4), words.message(5)),
        words.text(6),
    )


def _device(_: float, content: memoryview) -> DumpedDevice:
    words = _words(content, texts=frozenset({1}), numbers=frozenset({2}))
    return DumpedDevice(words.number(2), words.text(1))


def _frames(location: memoryview) -> tuple[str, ...]:
    return _words(location, texts=frozenset({2})).all_texts(2)


_PARSERS: dict[int, Callable[[float, memoryview], DumpEvent]] = {
    3: _metadata,
    4: _source,
    6: _frame,
    7: _graph_operation,
    8: _graph,
    9: _execution,
    10: _graph_execution,
    12: _device,
}
"""Parsers of the kinds of events, by their field's number in ``DebugEvent``."""
