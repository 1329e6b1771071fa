"""The graphs of a dump: where the value of an input comes from.

TensorFlow records no values of operations that only pass them on: ``Identity``, ``If``, ``While``, calls of functions, and most arguments of
functions. So an input is followed through them to outputs that may be recorded, or to an argument of a function. Which of several
sources had the value is known only when the operations ran: a branch, or an earlier iteration of a loop.

A dump does not say which graphs an ``If``, a ``While`` or a call runs. They are recognized by the names that TensorFlow gives to them and by
the order in which they were created. Calls of functions within a graph are not recorded at all; they show as inputs from an unknown
operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from watchstep.trace.debugger_v2.events import DumpedGraph, GraphOperation

_PASSING = frozenset(
    {
        "Identity",
        "IdentityN",
        "Enter",
        "Exit",
        "NextIteration",
        "LoopCond",
        "Switch",
        "RefIdentity",
        "RefEnter",
    }
)
_PARTS = {
    "If": re.compile(r"(?:true|false)_\d+$"),
    "StatelessIf": re.compile(r"(?:true|false)_\d+$"),
    "Case": re.compile(r"branch\d*_\d+$"),
    "StatelessCase": re.compile(r"branch\d*_\d+$"),
    "While": re.compile(r"(?:body|cond)_\d+$"),
    "StatelessWhile": re.compile(r"(?:body|cond)_\d+$"),
}
"""Names of the graphs that belong to an operation, by its type."""
_PATTERNS = tuple(dict.fromkeys(_PARTS.values()))
_LOOPS = frozenset({"While", "StatelessWhile"})
_BODY = re.compile(r"body_\d+$")
_PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderWithDefault"})
_MAX_SOURCES = 16
_MAX_VISITED = 256
"""Limits of a search for sources: deeper ones stay unknown."""
_MAX_CALLABLE = 1024
"""Maximum number of functions in a graph of which an unknown operation may be a call."""


class OutputKey(NamedTuple):
    """An output of an operation in a graph: id of the graph, name of the operation, number of the output."""

    graph: str
    operation: str
    output: int


class ArgumentKey(NamedTuple):
    """An argument of a function: id of its graph, number of the argument."""

    graph: str
    argument: int


Source = OutputKey | ArgumentKey


class GraphIndex:
    """The operations of all graphs, and the sources of their inputs."""

    def __init__(
        self,
        graphs: dict[str, DumpedGraph],
        operations: Iterable[GraphOperation],
        recorded: frozenset[OutputKey],
    ) -> None:
        """Create an index.

        Args:
            graphs: Graphs by id, in the order of their creation.
            operations: Operations of all graphs, in the order of their creation.
            recorded: Outputs with at least one recorded value.
        """
        self.graphs = graphs
        self._recorded = recorded
        self._operations: dict[tuple[str, str], GraphOperation] = {}
        self._children: dict[str, list[str]] = {}
        self._arguments: dict[str, list[str]] = {}
        self._argument_number: dict[tuple[str, str], int] = {}
        self._last: dict[
            str, list[str]
        ] = {}  # the names of the operations at the end of a graph that return its results
        self._parts: dict[tuple[str, str], list[str]] = {}
        self._caller: dict[str, GraphOperation] = {}
        # Graph and pattern → the graphs in it with a name of the pattern that have operations, and no caller so far.
        self._waiting: dict[tuple[str, re.Pattern[str]], list[str]] = {}
        self._number = {graph: number for number, graph in enumerate(graphs)}
        self._callable: dict[str, list[str]] = {}
        self._sources: dict[tuple[str, str], tuple[Source, ...]] = {}
        self.read: set[OutputKey] = set()
        for graph in graphs.values():
            if graph.outer:
                self._children.setdefault(graph.outer, []).append(graph.id)
        for operation in operations:
            self._add(operation)

    def _add(self, operation: GraphOperation) -> None:
        graph = operation.graph
        is_first = graph not in self._last
        self._operations[graph, operation.name] = operation
        if operation.type in _PLACEHOLDERS:
            arguments = self._arguments.setdefault(graph, [])
            self._argument_number[graph, operation.name] = len(arguments)
            arguments.append(operation.name)
        if operation.type == "Identity":
            self._last.setdefault(graph, []).append(operation.name)
        elif operation.type != "NoOp":
            self._last[graph] = []
        if is_first and graph in self._last:
            self._add_part(graph)
        for reference in operation.inputs:
            self.read.add(OutputKey(graph, *_split(reference)))
        if operation.type in _PARTS:
            # The graphs of an operation are created just before it.
            parts = self._waiting.pop((graph, _PARTS[operation.type]), [])
            for child in sorted(parts, key=self._number.__getitem__):
                self._caller[child] = operation
                self._parts.setdefault((graph, operation.name), []).append(child)

    def _add_part(self, graph: str) -> None:
        """Add a graph whose first operation was created to those that an operation of its outer graph may run."""
        found = self.graphs.get(graph)
        if found is None or not found.outer:
            return
        for pattern in _PATTERNS:
            if pattern.search(found.name):
                self._waiting.setdefault((found.outer, pattern), []).append(graph)
                return

    def operation(self, graph: str, name: str) -> GraphOperation | None:
        """Return an operation; None if its creation is not recorded."""
        return self._operations.get((graph, name))

    def outermost(self, graph: str) -> str:
        """Return the id of the function that a graph is nested in: the last one before the program's own graph."""
        for _ in range(_MAX_VISITED):
            outer = self.graphs[graph].outer if graph in self.graphs else ""
            if not outer or outer not in self.graphs or not self.graphs[outer].name:
                break
            graph = outer
        return graph

    def ancestors(self, graph: str) -> Iterator[str]:
        """Yield the graphs that a graph is nested in, the innermost first."""
        for _ in range(_MAX_VISITED):
            graph = self.graphs[graph].outer if graph in self.graphs else ""
            if not graph:
                return
            yield graph

    def returned(self, graph: str, output: int, outputs: int) -> str | None:
        """Return the reference of a result of a graph; None if it is not known.

        Args:
            graph: Id of the graph.
            output: Number of the result.
            outputs: Number of results.
        """
        names = self._last.get(graph, [])[-outputs:] if outputs else []
        return f"{names[output]}:0" if output < len(names) else None

    def results(self, graph: str) -> list[str]:
        """Return the references of what a graph returns, as far as it is known."""
        return [f"{name}:0" for name in self._last.get(graph, [])]

    def sources(self, graph: str, reference: str) -> tuple[Source, ...]:
        """Return where the value of an input may come from, at most `_MAX_SOURCES`.

        Args:
            graph: Id of the graph of the operation that reads it.
            reference: The input, as ``<name of the operation>:<output>``.
        """
        key = graph, reference
        if key not in self._sources:
            self._sources[key] = tuple(self._search(OutputKey(graph, *_split(reference))))
        return self._sources[key]

    def argument_sources(self, graph: str, name: str) -> tuple[Source, ...]:
        """Return where the value of an argument of a graph may come from.

        Args:
            graph: Id of the graph.
            name: Name of its placeholder.
        """
        key = graph, f"{name}:argument"
        if key not in self._sources:
            found: dict[Source, None] = {}
            for outer in self._passed(OutputKey(graph, name, 0)):
                found.update(dict.fromkeys(self._search(outer) if isinstance(outer, OutputKey) else [outer]))
            self._sources[key] = tuple(found)[:_MAX_SOURCES]
        return self._sources[key]

    def _search(self, start: OutputKey) -> Iterator[Source]:
        waiting: list[Source] = [start]
        visited: set[Source] = set()
        found = 0
        while waiting and len(visited) < _MAX_VISITED and found < _MAX_SOURCES:
            key = waiting.pop()
            if key in visited:
                continue
            visited.add(key)
            further = None if isinstance(key, ArgumentKey) or key in self._recorded else self._before(key)
            if further:
                waiting.extend(reversed(further))
            else:
                found += 1
                yield key

    def _before(self, key: OutputKey) -> list[Source]:
        """The outputs that an output which is not recorded is a copy of; empty if it is none."""
        operation = self._operations.get((key.graph, key.operation))
        if operation is None:
            return [*self._results_of_calls(key)]
        if operation.type in _PLACEHOLDERS:
            return self._passed(key)
        if operation.type in _PASSING:
            place = key.output if operation.type == "IdentityN" else 0
            return self._inputs(operation, place, place + 1)
        if operation.type == "Merge":
            return self._inputs(operation, 0, len(operation.inputs))
        if operation.type in _PARTS:
            return self._results_of_parts(operation, key.output)
        return []

    def _inputs(self, operation: GraphOperation, first: int, end: int) -> list[Source]:
        return [OutputKey(operation.graph, *_split(reference)) for reference in operation.inputs[first:end]]

    def _results_of_parts(self, operation: GraphOperation, output: int) -> list[Source]:
        found: list[Source] = []
        is_loop = operation.type in _LOOPS
        for part in self._parts.get((operation.graph, operation.name), []):
            if is_loop and not _BODY.search(self.graphs[part].name):
                continue
            reference = self._result(part, output, operation.outputs, is_loop=is_loop)
            if reference is not None:
                found.append(OutputKey(part, *_split(reference)))
        if is_loop:
            found += self._inputs(operation, output, output + 1)
        return found

    def _result(self, part: str, output: int, outputs: int, *, is_loop: bool) -> str | None:
        if not is_loop:
            return self.returned(part, output, outputs)
        # Values that a loop does not change come last, and are no results of operations.
        names = self._last.get(part, [])
        return f"{names[output]}:0" if output < len(names) else None

    def _results_of_calls(self, key: OutputKey) -> Iterator[Source]:
        """The results of the functions that an unknown operation may have called."""
        if key.graph not in self._callable:
            children = self._children.get(key.graph, [])
            found = (child for child in children if child not in self._caller and self._last.get(child))
            self._callable[key.graph] = list(islice(found, _MAX_CALLABLE))
        for child in self._callable[key.graph]:
            names = self._last[child]
            if key.output < len(names):
                yield OutputKey(child, names[key.output], 0)

    def _passed(self, key: OutputKey) -> list[Source]:
        """What is passed to a placeholder."""
        number = self._argument_number[key.graph, key.operation]
        caller = self._caller.get(key.graph)
        if caller is None:
            return [ArgumentKey(key.graph, number)]
        if caller.type not in _LOOPS:
            # Where branches read different values, the numbers differ. The order makes the likely one the first.
            likely = self._inputs(caller, number + 1, number + 2)
            return [
                *likely,
                *(each for each in self._inputs(caller, 1, len(caller.inputs)) if each not in likely),
            ]
        found: list[Source] = []
        for part in self._parts[caller.graph, caller.name]:
            if _BODY.search(self.graphs[part].name):
                reference = self._result(part, number, caller.outputs, is_loop=True)
                if reference is not None:
                    found.append(OutputKey(part, *_split(reference)))
        return found + self._inputs(caller, number, number + 1)


def _split(reference: str) -> tuple[str, int]:
    name, _, output = reference.rpartition(":")
    return (name, int(output)) if name and output.isdecimal() and len(output) < 10 else (reference, 0)
