"""The files of a dump: found in a folder, read with limits, and joined over hosts.

A set of files has a common prefix and the suffixes ``.metadata``, ``.source_files``, ``.stack_frames``, ``.graphs``, ``.execution`` and
``.graph_execution_traces``. Several hosts of one program write one set each, with the same run id. The sizes of files and records are
checked before they are read, and the memory of what is kept is counted while they are.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.event_files.tf_records import RecordFile
from watchstep.trace.debugger_v2.events import (
    DumpedDevice,
    DumpedExecution,
    DumpedFrame,
    DumpedGraph,
    DumpedSource,
    DumpEvent,
    DumpMetadata,
    GraphExecution,
    GraphOperation,
    event_of,
)
from watchstep.trace.debugger_v2.wire import WireError
from watchstep.trace.operations import CallSite

_METADATA = ".metadata"
_MAX_RECORDS = {
    ".metadata": 2**16,
    ".source_files": 16 * 2**20,
    ".stack_frames": 2**16,
    ".graphs": 4 * 2**20,
    ".execution": 256 * 2**20,
    ".graph_execution_traces": 256 * 2**20,
}
"""Maximum size of a record of each file, in bytes, in the order in which they are read."""

_MAX_SETS = 1_000
_MAX_ENTRIES = 100_000
_MAX_EVENTS = 2_000_000
_MAX_BYTES = 2 * 2**30
"""Maximum memory of a dump and its trace, in bytes."""
_EVENT_BYTES = 1_000
"""Approximate memory of an event with up to `_USUAL_ITEMS` items and of the operation that it becomes, in addition to its record."""
_ITEM_BYTES = 300
"""Maximum memory of each further item, measured with `tracemalloc`: an input, a device, what was recorded of an output, a frame. An output counts as two."""
_USUAL_ITEMS = 12
_MAX_SOURCE_BYTES = 128 * 2**20
"""Maximum size of the source texts that are kept."""
_HINT = "the folder is no dump of tf.debugging.experimental.enable_dump_debug_info, or it is damaged; record it again"
_LIBRARY = re.compile(r"[/\\](?:site-packages|dist-packages)[/\\]|[/\\]lib(?:64)?[/\\]python3|^<")


@dataclass
class Dump:
    """The events of one program, of all its hosts.

    Attributes:
        metadata: the head of each set of files, the first one that started first.
        sources: text of source files by path.
        frames: source lines by the ids of stack frames.
        graphs: graphs by id, in the order of their creation.
        operations: operations of all graphs, in the order of their creation.
        devices: names of devices by id.
        executions: what Python executed, of each set of files in the order of the file.
        traces: what ran within graphs, of each set of files in the order of the file.
        notes: what could not be read.
    """

    metadata: list[DumpMetadata] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    frames: dict[str, CallSite] = field(default_factory=dict)
    graphs: dict[str, DumpedGraph] = field(default_factory=dict)
    operations: list[GraphOperation] = field(default_factory=list)
    devices: dict[int, str] = field(default_factory=dict)
    executions: list[list[DumpedExecution]] = field(default_factory=list)
    traces: list[list[GraphExecution]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_dump(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder with files of a dump."""
    try:
        return any(name.endswith(_METADATA) for name in _names(Path(path)))
    except (OSError, FormatError):
        return False


def read_dump(path: str | os.PathLike[str]) -> Dump:
    """Read a dump.

    If a folder has the files of several programs, those of the one that started last are read, and a note says so.

    Args:
        path: The folder.

    Raises:
        NotFoundError: the folder does not exist.
        FormatError: it contains no dump, or one that is damaged or too large.
    """
    folder = Path(path)
    try:
        sets = _newest(_sets(folder))
        return _Reading().read(*sets)
    except FileNotFoundError:
        raise NotFoundError(f"dump {folder} does not exist", "check the path") from None
    except OSError as error:
        raise FormatError(f"dump {folder}: {error}", _HINT) from error


def _names(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MAX_ENTRIES:
                raise FormatError(f"dump {folder}: more than {_MAX_ENTRIES} files", _HINT)
            yield entry.name


class _FileSet(NamedTuple):
    """The files with a common prefix, and their head."""

    prefix: Path
    metadata: DumpMetadata


def _sets(folder: Path) -> list[_FileSet]:
    names = sorted(name for name in _names(folder) if name.endswith(_METADATA))
    if not names:
        raise FormatError(f"dump {folder}: it has no *{_METADATA} file", _HINT)
    if len(names) > _MAX_SETS:
        raise FormatError(f"dump {folder}: {len(names)} sets of files; the limit is {_MAX_SETS}", _HINT)
    sets = []
    for name in names:
        prefix = folder / name.removesuffix(_METADATA)
        head = next((event for event in _Events(prefix, _METADATA) if isinstance(event, DumpMetadata)), None)
        if head is None:
            raise FormatError(f"file {folder / name}: it has no metadata", _HINT)
        if not head.file_version.startswith("debug.Event:"):
            raise FormatError(f"file {folder / name}: version {head.file_version[:40]!r}", _HINT)
        sets.append(_FileSet(prefix, head))
    return sorted(sets, key=lambda each: each.metadata.wall_time)


def _newest(sets: list[_FileSet]) -> tuple[list[_FileSet], list[str]]:
    """Return the sets of the program that started last, and a note if there are others."""
    last = sets[-1].metadata.run_id
    chosen = [each for each in sets if each.metadata.run_id == last] if last else sets[-1:]
    left = len(sets) - len(chosen)
    if not left:
        return chosen, []
    return chosen, [
        f"the folder has {left} sets of files of other programs; the one that started last was read"
    ]


class _Events:
    """The events of one file. A file that does not exist has none."""

    def __init__(self, prefix: Path, suffix: str) -> None:
        self.path = prefix.with_name(prefix.name + suffix)
        self._limit = _MAX_RECORDS[suffix]
        self.is_truncated = False
        self.is_missing = False
        self.record_bytes = 0

    def __iter__(self) -> Iterator[DumpEvent]:
        try:
            # A pipe would block.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            self.is_missing = True
            return
        with os.fdopen(descriptor, "rb", buffering=2**20) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FormatError(f"{self.path} is no file", _HINT)
            records = RecordFile(file, str(self.path), self._limit)
            for number, data in enumerate(records):
                self.record_bytes = len(data)
                try:
                    event = event_of(data)
                except WireError as error:
                    raise FormatError(f"file {self.path}, record {number}: {error}", _HINT) from error
                if event is not None:
                    yield event
            self.is_truncated = records.is_truncated


class _Reading:
    """Reads sets of files into a dump."""

    def __init__(self) -> None:
        self._dump = Dump()
        self._events = 0
        self._bytes = 0
        self._source_bytes = 0
        self._left_out_sources = 0
        self._words: dict[str, str] = {}
        self._stacks: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._files: list[str] = []  # of the set that is read, by their numbers

    def read(self, sets: list[_FileSet], notes: list[str]) -> Dump:
        """Read all files."""
        dump = self._dump
        dump.notes += notes
        for each in sets:
            dump.metadata.append(each.metadata)
            dump.executions.append([])
            dump.traces.append([])
            paths: dict[tuple[str, str], int] = {}
            self._files = []
            for suffix in _MAX_RECORDS:
                if suffix != _METADATA:
                    self._read_file(each.prefix, suffix, paths)
        if self._left_out_sources:
            dump.notes.append(
                f"the text of {self._left_out_sources} source files was left out, as they are large"
            )
        return dump

    def _read_file(self, prefix: Path, suffix: str, paths: dict[tuple[str, str], int]) -> None:
        events = _Events(prefix, suffix)
        for event in events:
            self._events += 1
            items = self._items(event)
            self._bytes += _EVENT_BYTES + events.record_bytes + _ITEM_BYTES * max(0, items - _USUAL_ITEMS)
            if self._events > _MAX_EVENTS or self._bytes > _MAX_BYTES:
                raise FormatError(
                    f"dump {prefix.parent}: more than {_MAX_EVENTS} events, or {_MAX_BYTES} bytes",
                    "record with a circular_buffer_size, an op_regex, or in a mode without full tensors",
                )
            self._add(event, events, paths)
        if events.is_truncated:
            self._dump.notes.append(
                f"{events.path.name} ends within an event, as after a killed program; it was read up to there"
            )
        if events.is_missing:
            self._dump.notes.append(f"{events.path.name} is missing")

    def _items(self, event: DumpEvent) -> int:
        """Number of items of an event that take memory; most stacks are those of other events."""
        if not isinstance(event, DumpedExecution | GraphOperation):
            return 0
        items = len(event.inputs) + (0 if event.frames in self._stacks else len(event.frames))
        if isinstance(event, DumpedExecution):
            items += 2 * len(event.outputs) + len(event.devices) + len(event.tensors)
        return items

    def _add(self, event: DumpEvent, events: _Events, paths: dict[tuple[str, str], int]) -> None:
        dump = self._dump
        if isinstance(event, DumpedSource):
            if paths.setdefault((event.host, event.path), len(paths)) == len(self._files):
                self._files.append(event.path)
            self._add_source(event, events)
        elif isinstance(event, DumpedFrame):
            if 0 <= event.file < len(self._files):
                path = self._files[event.file]
                dump.frames[event.id] = CallSite(
                    path, event.line, self._word(event.function), _LIBRARY.search(path) is not None
                )
        elif isinstance(event, DumpedGraph):
            dump.graphs.setdefault(event.id, event)
        elif isinstance(event, GraphOperation):
            dump.operations.append(replace(event, frames=self._stack(event.frames)))
        elif isinstance(event, DumpedDevice):
            dump.devices[event.id] = short_device(event.name)
        elif isinstance(event, DumpedExecution):
            dump.executions[-1].append(replace(event, frames=self._stack(event.frames)))
        elif isinstance(event, GraphExecution):
            graph, operation = self._word(event.graph), self._word(event.operation)
            device = self._word(event.device)
            dump.traces[-1].append(replace(event, graph=graph, operation=operation, device=device))

    def _add_source(self, source: DumpedSource, events: _Events) -> None:
        if source.lines is None or source.path in self._dump.sources:
            return
        if self._source_bytes + events.record_bytes > _MAX_SOURCE_BYTES:
            self._left_out_sources += 1
            return
        self._source_bytes += events.record_bytes
        self._dump.sources[source.path] = "\n".join(source.lines)

    def _word(self, word: str) -> str:
        """Return one object for equal words, since most of them occur in many events."""
        return self._words.setdefault(word, word)

    def _stack(self, frames: tuple[str, ...]) -> tuple[str, ...]:
        return self._stacks.setdefault(frames, frames)


def short_device(name: str) -> str:
    """Return ``cpu:0`` for ``/job:localhost/replica:0/task:0/device:CPU:0``, with the task where it is not the first."""
    parts = dict(part.split(":", 1) for part in name.strip("/").split("/") if ":" in part)
    device = parts.get("device", name).lower()
    task = parts.get("task", "0")
    return device if task in {"0", ""} else f"{device}@{parts.get('job', '')}:{task}"
