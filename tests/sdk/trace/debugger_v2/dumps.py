"""The dumps that TensorFlow wrote (`make_dumps.py`), and dumps of events that a test composes."""

from __future__ import annotations

import functools
import json
import struct
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from watchstep.format.event_files.tf_records import record

_ARCHIVE = Path(__file__).parent / "dumps.tar.xz"


@functools.cache
def _extracted() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="watchstep-dumps-")
    with tarfile.open(_ARCHIVE) as archive:
        for entry in archive:
            source = archive.extractfile(entry)
            assert source is not None
            path = Path(folder.name, entry.name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(source.read())
    return folder


def dump(name: str) -> Path:
    """Folder of a dump of TensorFlow. Not to be changed."""
    return Path(_extracted().name, name)


def expected(name: str) -> dict[str, Any]:
    """What TensorFlow's reader reads of a dump."""
    data: dict[str, Any] = json.loads((dump(name) / "expected.json").read_text())
    return data


def varint(number: int) -> bytes:
    """A number of the wire format."""
    data = bytearray()
    number %= 2**64
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def field(number: int, value: float | str | bytes) -> bytes:
    """A field of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    """A message of fields."""
    return b"".join(field(number, value) for number, value in fields)


def tensor(dtype: int, shape: tuple[int, ...], *fields: tuple[int, int | float | str | bytes]) -> bytes:
    """A ``TensorProto``."""
    dims = b"".join(field(2, message((1, size))) for size in shape)
    return message((1, dtype), (2, dims), *fields)


def vector(*numbers: float) -> bytes:
    """A ``TensorProto`` with a vector of float64."""
    return tensor(2, (len(numbers),), (4, struct.pack(f"<{len(numbers)}d", *numbers)))


class ComposedDump:
    """A dump of events that a test composes."""

    def __init__(self, folder: Path, *, host: str = "a", run_id: str = "run", time: float = 1.0) -> None:
        folder.mkdir(exist_ok=True)
        self.prefix = folder / f"tfdbg_events.1.{host}"
        self._time = time
        for suffix in ("source_files", "stack_frames", "graphs", "execution", "graph_execution_traces"):
            self.path(suffix).touch()
        self.add("metadata", 3, message((1, "2.21.0"), (2, "debug.Event:1"), (3, run_id)))

    def path(self, suffix: str) -> Path:
        """Path of a file."""
        return self.prefix.with_name(f"{self.prefix.name}.{suffix}")

    def add(self, suffix: str, kind: int, content: bytes, time: float | None = None) -> None:
        """Append an event to a file; its time is later than that of the last one."""
        self._time = self._time + 1 if time is None else time
        with self.path(suffix).open("ab") as file:
            file.write(record(message((1, float(self._time)), (kind, content))))

    def graph(self, graph: str, name: str = "", outer: str = "") -> None:
        """Add a graph."""
        self.add("graphs", 8, message((1, graph), (2, name), (6, outer)))

    def operation(self, graph: str, kind: str, name: str, *inputs: str, outputs: int = 1) -> None:
        """Add the creation of an operation."""
        fields = [(6, each) for each in inputs]
        self.add("graphs", 7, message((1, kind), (2, name), (4, graph), (7, outputs), *fields))

    def ran(
        self,
        graph: str,
        name: str,
        *numbers: float,
        mode: int = 3,
        output: int = 0,
        time: float | None = None,
    ) -> None:
        """Add the run of an operation in a graph, in mode CONCISE_HEALTH: id, elements, -inf, +inf, NaN."""
        content = message((1, graph), (2, name), (3, output), (4, mode), (5, vector(*numbers)))
        self.add("graph_execution_traces", 10, content, time)

    def executed(
        self,
        kind: str,
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
        *tensors: bytes,
        graph: str = "",
        mode: int = 3,
    ) -> None:
        """Add an execution of Python."""
        ids = [(4, each) for each in inputs] + [(5, each) for each in outputs]
        recorded = [(7, each) for each in tensors]
        self.add("execution", 9, message((1, kind), (3, graph), (6, mode), *ids, *recorded))
