"""A trace on a store, opened for reading parts of it: operations by their index, neighbours, stacks and sources.

Of each operation only some numbers are in memory, and its line as it is in the file. A line is parsed when its operation is requested.
Full tensors remain on the store.
"""

from __future__ import annotations

import array
import bisect
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.documents import memory_needed
from watchstep.store.store import Store
from watchstep.trace.archive import open_archive, read_member
from watchstep.trace.operations import Operation, Trace
from watchstep.trace.trace_file import VERSION, operation_memory, operation_of

MAX_OPERATIONS_BYTES = 128 * 2**20
"""Maximum size of the lines of the operations: some 200,000 operations."""
MAX_HEAD_BYTES = 32 * 2**20
"""Maximum size of the stacks and sources."""
MAX_NEIGHBOURS = 200
"""Maximum number of operations of a neighbourhood."""
MAX_EDGES = 20_000
"""Maximum number of edges of a neighbourhood."""
MAX_TEXTS = 4096
"""Maximum number of distinct texts of a `TextColumn`."""
_MAX_TEXT_CHARACTERS = 500
_MAX_OBJECT_BYTES = 16 * 2**30
_MAX_LINE_BYTES = 2**20
_MAX_TENSORS = 4_000_000
"""Maximum number of inputs and outputs of all operations: 64 MB."""
_BUFFER = 2**20
_CHECKED = 4096
"""Number of edges after which the time is checked."""
_CHECKED_OPERATIONS = 256
"""Number of parsed operations after which the time is checked."""
_CHECKED_BYTES = 2**18
"""Size of lines after which the time is checked."""
_HINT = "download it, and read it with 'watchstep trace'"
_TENSOR_BYTES, _ROW_BYTES = 80, 112
"""Maximum memory of a tensor and of an operation while they are indexed, measured with `tracemalloc`."""
_LONG_LINE = 64 * 1024
_LINE_BYTES = 8 * 2**20
"""Maximum memory of a line of this length while it is parsed."""
_TEXT_BYTES = 4 * 4 * MAX_TEXTS * _MAX_TEXT_CHARACTERS
"""Maximum memory of the texts of four columns, of four bytes per character."""
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)


class _StoredFile(io.RawIOBase):
    """An object on a store as a file, read in ranges."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._place))
        if length:
            view[:length] = self._store.get_range(self._key, self._place, length)
        self._place += length
        return length


@dataclass(frozen=True)
class TextColumn:
    """One text of each operation, such as its name.

    Attributes:
        texts: the distinct texts in the order of their first operations, each cut to 500 characters, at most `MAX_TEXTS`.
        numbers: place of each operation's text in ``texts``; -1 for texts beyond the limit. Shape: (n,), int16.
    """

    texts: list[str]
    numbers: NDArray[np.int16]


class IndexedTrace:
    """A trace that is opened for reading parts. It never changes, and may be used by several threads.

    Attributes:
        mode: name of the mode, as recorded.
        program: what made the trace.
        left_out: number of operations that were left out.
        notes: what could not be observed.
        raised: steps that an exception has ended.
        indexes: index of each operation, ascending. Shape: (n,).
        steps: step of each operation. Shape: (n,).
        bad: whether an output of each operation is not finite. Shape: (n,).
        names: name of each operation.
        nodes: backward function of each operation, or its name in its graph; may be empty.
        modules: module of each operation; may be empty.
        phases: phase of each operation.
        sources: text of source files by path.
        memory: approximate memory in bytes.
    """

    def __init__(self, head: dict[str, Any], head_memory: int, lines: bytes, rows: _Rows) -> None:
        """Take the parts that `index_trace` has read."""
        self.mode = str(head["mode"])
        self.program = str(head["program"])
        self.left_out = int(head["left_out"])
        self.notes = tuple(str(note)[:_MAX_TEXT_CHARACTERS] for note in head["notes"][:MAX_TEXTS])
        self.raised = tuple(map(int, head["raised"]))
        self._losses = tuple((int(tensor), int(index)) for tensor, index in head["losses"])
        self._stacks: list[Any] = head["stacks"]
        self.sources: dict[str, str] = head["sources"]
        self._lines = lines
        self.indexes, self.steps, self.bad = rows.indexes, rows.steps, rows.bad
        self.names, self.nodes = rows.names.column, rows.nodes.column
        self.modules, self.phases = rows.modules.column, rows.phases.column
        self._offsets = rows.offsets
        self._tensors = rows.tensors
        ids, places, writes = rows.tensors.T
        order = np.lexsort((places, rows.steps[places], ids))
        is_written = writes[order] != 0
        # Rows of the tensors, ordered by id, step and place.
        self._readers, self._writers = order[~is_written], order[is_written]
        texts = sum(each.memory for each in (rows.names, rows.nodes, rows.modules, rows.phases))
        self.memory = len(lines) + 72 * len(rows.indexes) + 40 * len(rows.tensors) + texts + head_memory

    def __len__(self) -> int:
        """Number of operations."""
        return len(self.indexes)

    def at(self, place: int) -> Operation:
        """Return the operation at a place, from 0.

        Raises:
            FormatError: its line is damaged.
        """
        line = self._lines[self._offsets[place] : self._offsets[place + 1]]
        try:
            return operation_of(line)
        except _DAMAGED as error:
            raise FormatError(f"operation {place} of the trace: {str(error)[:200]}", _HINT) from error

    def place_of(self, index: int) -> int:
        """Return the place of the operation with an index.

        Raises:
            NotFoundError: the trace does not have it.
        """
        place = bisect.bisect_left(self.indexes, index)
        if place == len(self.indexes) or self.indexes[place] != index:
            raise NotFoundError(f"operation {index}: not in the trace", "list the operations of the trace")
        return place

    def faulty_steps(self) -> list[int]:
        """Return the steps with an output that is not finite, and those that an exception has ended, ascending."""
        raised = set(self.raised)
        bad = set(np.unique(self.steps[self.bad]).tolist())
        return [step for step in np.unique(self.steps).tolist() if step in bad or step in raised]

    def memory_of_step(self, step: int) -> int:
        """Return an upper bound of the memory in bytes that `step_trace` takes."""
        return sum(
            operation_memory(self._lines[self._offsets[place] : self._offsets[place + 1]])
            for place in np.flatnonzero(self.steps == step)
        )

    def step_trace(self, step: int, check: Callable[[], None]) -> Trace:
        """Return the operations of a step, without stacks, sources and values.

        Args:
            step: The step.
            check: Called from time to time; raises an error to end the work.

        Raises:
            FormatError: a line is damaged.
        """
        operations = []
        for number, place in enumerate(np.flatnonzero(self.steps == step)):
            if not number % _CHECKED_OPERATIONS:
                check()
            operations.append(self.at(int(place)))
        return Trace(operations, losses=self._losses, raised=self.raised)

    def stack(self, number: int, limit: int) -> list[tuple[str, int, str, bool]]:
        """Return a stack, innermost first: file, line, function, and whether it belongs to an installed package.

        Raises:
            FormatError: it is damaged.
        """
        if not 0 <= number < len(self._stacks):
            return []
        try:
            return [
                (str(file), int(line), str(function), bool(library))
                for file, line, function, library in self._stacks[number][:limit]
            ]
        except _DAMAGED as error:
            raise FormatError(f"stack {number} of the trace: {str(error)[:200]}", _HINT) from error

    @property
    def files(self) -> list[str]:
        """Paths of the files whose text is in the trace, sorted."""
        return sorted(self.sources)

    def source(self, file: str) -> str:
        """Return the text of a file.

        Raises:
            NotFoundError: the trace does not have it.
        """
        text = self.sources.get(file)
        if text is None:
            raise NotFoundError(f"file {file[:200]!r}: not in the trace", "use a path of one of its stacks")
        return text

    def neighbours(
        self, place: int, depth: int, check: Callable[[], None] = lambda: None
    ) -> tuple[list[int], list[tuple[int, int, int]], bool]:
        """Return the operations that wrote what an operation read, and those that read what it wrote.

        Args:
            place: Place of the operation.
            depth: Number of steps from the operation.
            check: Called from time to time; raises an error to end the work.

        Returns:
            Places, ascending; edges as place of the writer, place of the reader, and id of the tensor; and whether operations beyond
            `MAX_NEIGHBOURS`, or edges beyond `MAX_EDGES`, were left out.
        """
        found = {place: 0}
        edges: set[tuple[int, int, int]] = set()
        waiting = [place]
        is_cut = False
        for current in waiting:
            check()
            for number, edge in enumerate(self._edges(current, check)):
                if not number % _CHECKED:
                    check()
                other = edge[0] if edge[1] == current else edge[1]
                if other not in found:
                    if found[current] >= depth:
                        continue
                    if len(found) >= MAX_NEIGHBOURS:
                        is_cut = True
                        continue
                    found[other] = found[current] + 1
                    waiting.append(other)
                if len(edges) >= MAX_EDGES:
                    return sorted(found), sorted(edges), True
                edges.add(edge)
        return sorted(found), sorted(edges), is_cut

    def _edges(self, place: int, check: Callable[[], None]) -> Iterator[tuple[int, int, int]]:
        """Yield the edges of an operation: from the last writer of each input, and to the readers of each output up to its next writer."""
        first, end = np.searchsorted(self._tensors[:, 1], [place, place + 1])
        own = self._tensors[first:end]
        read, written = (dict.fromkeys(own[own[:, 2] == writes, 0].tolist()) for writes in (0, 1))
        for number, tensor in enumerate(read):
            if not number % _CHECKED:
                check()
            last = self._first(self._writers, tensor, place, place) - 1
            if last >= 0 and self._is_of(self._writers[last], tensor, place):
                yield int(self._tensors[self._writers[last], 1]), place, tensor
        for number, tensor in enumerate(written):
            if not number % _CHECKED:
                check()
            following = self._first(self._writers, tensor, place, place + 1)
            is_last = following == len(self._writers) or not self._is_of(
                self._writers[following], tensor, place
            )
            # The next writer may read the tensor itself.
            until = len(self) - 1 if is_last else int(self._tensors[self._writers[following], 1])
            for row in range(self._first(self._readers, tensor, place, place + 1), len(self._readers)):
                reader = int(self._tensors[self._readers[row], 1])
                if reader > until or not self._is_of(self._readers[row], tensor, place):
                    break
                yield place, reader, tensor

    def _first(self, rows: NDArray[np.intp], tensor: int, place: int, begin: int) -> int:
        """Return the number of the first row of a tensor in the step of an operation that is at a place from ``begin`` on."""
        step = int(self.steps[place])

        def key(row: int) -> tuple[int, int, int]:
            number, at, _ = self._tensors[row].tolist()
            return number, int(self.steps[at]), at

        return bisect.bisect_left(rows, (tensor, step, begin), key=key)

    def _is_of(self, row: int, tensor: int, place: int) -> bool:
        """Whether a row is of a tensor, and of the step of an operation: ids of tensors are those of a step."""
        number, at, _ = self._tensors[row].tolist()
        return bool(number == tensor and self.steps[at] == self.steps[place])


class _Texts:
    """Collects a `TextColumn`."""

    def __init__(self) -> None:
        self._numbers = array.array("h")
        self._places: dict[str, int] = {}

    def add(self, value: Any) -> None:
        """Add the text of the next operation."""
        text = str(value)
        if len(text) > _MAX_TEXT_CHARACTERS:
            text = f"{text[: _MAX_TEXT_CHARACTERS - 1]}…"
        if len(self._places) < MAX_TEXTS:
            self._numbers.append(self._places.setdefault(text, len(self._places)))
        else:
            self._numbers.append(self._places.get(text, -1))

    @property
    def column(self) -> TextColumn:
        """The column. Nothing can be added afterwards."""
        return TextColumn(list(self._places), np.frombuffer(self._numbers, np.int16))

    @property
    def memory(self) -> int:
        """Approximate memory of the texts, in bytes."""
        return sum(4 * len(text) + 150 for text in self._places)


class _Rows:
    """The numbers of all operations that are in memory.

    Attributes:
        names, nodes, modules, phases: texts of the operations.
        tensors: id, place of the operation, and whether it was written, of each input and output in order. Shape: (m, 3).
        offsets: start of each line, and the end. Shape: (n + 1,).
    """

    def __init__(self, lines: bytes, check: Callable[[], None]) -> None:
        indexes, steps, offsets, tensors = (array.array("q") for _ in range(4))
        bad = bytearray()
        self.names, self.nodes, self.modules, self.phases = (_Texts() for _ in range(4))
        place = start = checked = 0
        while start < len(lines):
            if start - checked > _CHECKED_BYTES:
                checked = start
                check()
            end = lines.find(b"\n", start) + 1
            if not 0 < end - start <= _MAX_LINE_BYTES:
                raise ValueError("a line is too long, or has no end")
            data = json.loads(lines[start:end])
            index = int(data["index"])
            if indexes and index <= indexes[-1]:
                raise ValueError("indexes do not ascend")
            indexes.append(index)
            steps.append(int(data["step"]))
            offsets.append(start)
            self.names.add(data.get("name", ""))
            self.nodes.add(data.get("node", ""))
            self.modules.add(data.get("module", ""))
            self.phases.add(data.get("phase", ""))
            bad.append(any(output[5] for output in data["outputs"]))
            for name, writes in (("inputs", 0), ("outputs", 1)):
                if not isinstance(data[name], list):
                    raise TypeError(name)
                for tensor in data[name]:
                    tensors.extend((int(tensor[0]), place, writes))
            if len(tensors) > 3 * _MAX_TENSORS:
                raise ValueError(f"more than {_MAX_TENSORS} inputs and outputs")
            start = end
            place += 1
        offsets.append(len(lines))
        self.indexes: NDArray[np.int64] = np.frombuffer(indexes, np.int64)
        self.steps: NDArray[np.int64] = np.frombuffer(steps, np.int64)
        self.offsets: list[int] = offsets.tolist()
        self.bad: NDArray[np.bool_] = np.frombuffer(bad, np.bool_)
        self.tensors: NDArray[np.int64] = np.frombuffer(tensors, np.int64).reshape(-1, 3)


class TraceArchive:
    """The archive of a trace on a store. Its sizes are known before its content is read.

    Attributes:
        head_bytes: size of the stacks and sources.
        operations_bytes: size of the lines of the operations.
    """

    def __init__(self, store: Store, key: str, size: int) -> None:
        """Read the directory of the archive.

        Args:
            store: The run's store.
            key: Key of the trace.
            size: Size of the object.

        Raises:
            NotFoundError, StoreError: it cannot be read.
            FormatError: it is no trace, or too large to be opened.
        """
        self._name = f"trace {key}"
        if size > _MAX_OBJECT_BYTES:
            raise FormatError(f"{self._name}: {size} bytes; the limit is {_MAX_OBJECT_BYTES}", _HINT)
        self._archive = open_archive(
            io.BufferedReader(_StoredFile(store, key, size), _BUFFER), self._name, _HINT
        )
        try:
            self.head_bytes = self._archive.getinfo("trace.json").file_size
            self.operations_bytes = self._archive.getinfo("operations.jsonl").file_size
        except KeyError as error:
            raise FormatError(f"{self._name}: {error}", _HINT) from error
        for size_of, limit in (
            (self.head_bytes, MAX_HEAD_BYTES),
            (self.operations_bytes, MAX_OPERATIONS_BYTES),
        ):
            if size_of > limit:
                raise FormatError(f"{self._name}: {size_of} bytes; the limit is {limit}", _HINT)

    def head(self) -> bytes:
        """Return the member with stacks and sources, as JSON. The raised errors are those of `operations`."""
        return read_member(self._archive, self._name, "trace.json", self.head_bytes, _HINT)

    def operations(self) -> bytes:
        """Return the lines of the operations.

        Raises:
            FormatError: they are damaged.
            StoreError: the store cannot be read.
        """
        return read_member(self._archive, self._name, "operations.jsonl", self.operations_bytes, _HINT)


def memory_to_index(operations: bytes, check: Callable[[], None]) -> int:
    """Return an upper bound of the memory in bytes that `index_trace` takes for the lines of the operations, with these lines.

    Args:
        operations: `TraceArchive.operations`.
        check: Called from time to time; raises an error to end the work.
    """
    line_memory = _LINE_BYTES
    start = checked = 0
    while start < len(operations):
        if start - checked > _CHECKED_BYTES:
            checked = start
            check()
        end = operations.find(b"\n", start) + 1 or len(operations)
        if _LONG_LINE < end - start <= _MAX_LINE_BYTES:  # longer ones are not parsed
            line_memory = max(line_memory, memory_needed(operations[start:end]))
        start = end
    tensors = min(operations.count(b"["), _MAX_TENSORS)
    return (
        len(operations)
        + _TENSOR_BYTES * tensors
        + _ROW_BYTES * operations.count(b"\n")
        + min(4 * len(operations), _TEXT_BYTES)
        + line_memory
    )


def index_trace(name: str, head: bytes, operations: bytes, check: Callable[[], None]) -> IndexedTrace:
    """Index a trace.

    Args:
        name: The trace, for messages.
        head: `TraceArchive.head`.
        operations: `TraceArchive.operations`.
        check: Called from time to time; raises an error to end the work.

    Raises:
        FormatError: the trace is damaged, or of another version.
    """
    try:
        data = json.loads(head)
        if data["version"] != VERSION:
            raise FormatError(
                f"trace {name}: version {str(data['version'])[:40]}", f"version {VERSION} is read; {_HINT}"
            )
        sources = data["sources"]
        if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
            raise TypeError("sources")
        for key in ("stacks", "notes", "raised", "losses"):  # of a text, each character would be an object
            if not isinstance(data[key], list):
                raise TypeError(key)
        return IndexedTrace(data, memory_needed(head), operations, _Rows(operations, check))
    except (*_DAMAGED, IndexError) as error:
        raise FormatError(f"trace {name}: {type(error).__name__}: {str(error)[:200]}", _HINT) from error
