"""A trace as one file: a zip archive of JSON and raw values, which can be read without PyTorch and executes no code.

``trace.json`` has the stacks, sources and notes. ``operations.jsonl`` has one operation per line. ``values/<operation>-<output>`` has the
elements of a full tensor, little-endian and in the order of its shape. Sizes are checked before and while a member is read.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.documents import memory_needed
from watchstep.trace.archive import DAMAGED, open_archive, read_member
from watchstep.trace.operations import (
    CallSite,
    Operation,
    Phase,
    TensorHealth,
    Trace,
    TracedTensor,
    TraceMode,
)

VERSION = 2
_HEAD, _OPERATIONS = "trace.json", "operations.jsonl"
_MAX_HEAD_BYTES = 128 * 2**20
_MAX_OPERATIONS_BYTES = 1024 * 2**20
_MAX_TENSOR_BYTES = 8 * 2**30
_SURE_TENSOR_BYTES = 2**30
_MAX_RATIO = 20
"""Maximum size of full tensors as a multiple of the file's size, from `_SURE_TENSOR_BYTES` on."""
_DTYPES = frozenset(
    {"|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"}
)
_MAX_OPERATION_BYTES = 16 * 2**20
_MAX_NUMBERS = 1024
_MAX_LINE_MEMORY = 256 * 2**20
"""Maximum memory of an operation while its line is parsed."""
_MAX_MEMORY = 4 * 2**30
"""Maximum memory of a trace without its full tensors."""
_OPERATION_BYTES, _TENSOR_BYTES, _NUMBER_BYTES = 600, 400, 40
"""Approximate memory of an operation, of an input or output, and of a number or dimension."""
_MAX_INDEX = 2**53
_HINT = "record the trace again; it may be incomplete if its writer was killed"


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace. A file that exists is replaced once the new one is complete.

    Args:
        trace: The trace.
        path: The file; its folder must exist.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            _write(trace, file)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def encode_trace(trace: Trace) -> bytes:
    """Return a trace as the bytes of its file."""
    content = io.BytesIO()
    _write(trace, content)
    return content.getvalue()


def _write(trace: Trace, file: IO[bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        lines = []
        for operation in trace.operations:
            lines.append(json.dumps(operation_data(operation), separators=(",", ":")))
            for place, output in enumerate(operation.outputs):
                if output.values is not None:
                    archive.writestr(
                        _values_member(operation.index, place), _little_endian(output.values).tobytes()
                    )
        archive.writestr(_OPERATIONS, "".join(f"{line}\n" for line in lines))
        archive.writestr(_HEAD, json.dumps(_head_data(trace)))


def read_trace(path: str | os.PathLike[str] | IO[bytes]) -> Trace:
    """Read a trace.

    Args:
        path: The file, or its content.

    Raises:
        NotFoundError: the file does not exist.
        FormatError: the file is no trace, is damaged, or is too large.
    """
    name = f"trace {os.fspath(path) if isinstance(path, (str, os.PathLike)) else '(content)'}"
    try:
        with ExitStack() as stack:
            file = (
                stack.enter_context(Path(path).open("rb")) if isinstance(path, (str, os.PathLike)) else path
            )
            archive = stack.enter_context(open_archive(file, name, _HINT))
            memory = _Memory(name)
            text = read_member(archive, name, _HEAD, _MAX_HEAD_BYTES, _HINT)
            memory.take(memory_needed(text))
            head = _json(text)
            if not isinstance(head, dict) or head.get("version") != VERSION:
                raise FormatError(
                    f"{name}: version {head.get('version') if isinstance(head, dict) else head!r:.40}",
                    f"this program reads version {VERSION}; install the version that wrote it",
                )
            values = _Values(archive, name, file.seek(0, os.SEEK_END))
            operations = _ascending(memory.operation(line, values) for line in _lines(archive, name))
            return _trace(head, operations)
    except FileNotFoundError:
        raise NotFoundError(f"{name} does not exist", "check the path") from None
    except DAMAGED as error:  # RuntimeError also if its JSON is nested too deeply
        detail = f"{type(error).__name__}: " if isinstance(error, (KeyError, ValueError)) else ""
        raise FormatError(f"{name}: {detail}{str(error)[:200]}", _HINT) from error
    except (TypeError, AttributeError, OverflowError) as error:
        raise FormatError(f"{name}: {type(error).__name__}: {str(error)[:200]}", _HINT) from error


def _ascending(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return operations after checking that their indexes ascend, as an index identifies an operation.

    Raises:
        ValueError: they do not.
    """
    found: list[Operation] = []
    for operation in operations:
        if found and operation.index <= found[-1].index:
            raise ValueError(f"index {operation.index} follows index {found[-1].index}")
        found.append(operation)
    return tuple(found)


def _lines(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    info = archive.getinfo(_OPERATIONS)
    if info.file_size > _MAX_OPERATIONS_BYTES:
        raise FormatError(
            f"{name}: {_OPERATIONS} has {info.file_size} bytes; the limit is {_MAX_OPERATIONS_BYTES}",
            _HINT,
        )
    read = 0
    with archive.open(info) as member:
        while line := member.readline(_MAX_OPERATION_BYTES):
            read += len(line)
            if read > _MAX_OPERATIONS_BYTES or not line.endswith(b"\n"):
                raise FormatError(f"{name}: {_OPERATIONS} is truncated or too long", _HINT)
            yield line


class _Memory:
    """The memory of a trace without its full tensors, up to `_MAX_MEMORY`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = _MAX_MEMORY

    def take(self, size: int, limit: int = _MAX_MEMORY) -> None:
        """Count memory that the trace takes.

        Raises:
            FormatError: it is more than the limit, or than what is left.
        """
        if size > min(self._left, limit):
            raise FormatError(
                f"{self._name}: its content could take more than {min(size, limit, _MAX_MEMORY) // 2**20} MiB of memory",
                "trace fewer steps, or only some modules",
            )
        self._left -= size

    def operation(self, line: bytes, values: _Values) -> Operation:
        """Parse the line of an operation.

        Raises:
            FormatError: it would take too much memory.
        """
        needed = memory_needed(line)
        self.take(needed, _MAX_LINE_MEMORY)
        operation = _operation(_json(line), values)
        self._left += needed  # of the parsed JSON
        tensors = (*operation.inputs, *operation.outputs)
        numbers = len(operation.numbers) + sum(len(tensor.shape) for tensor in tensors)
        self.take(_OPERATION_BYTES + _TENSOR_BYTES * len(tensors) + _NUMBER_BYTES * numbers + len(line))
        return operation


class _Values:
    """The full tensors of an archive.

    Args:
        archive: the archive.
        name: its name in messages.
        size: its size in bytes. A small file cannot have large tensors, unless they are a gigabyte in all: zeros are compressed to a
            thousandth.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str, size: int) -> None:
        self._archive = archive
        self._name = name
        self._left = min(_MAX_TENSOR_BYTES, max(_SURE_TENSOR_BYTES, _MAX_RATIO * size))

    def read(self, operation: int, output: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Read one tensor.

        Raises:
            ValueError: the dtype is unknown, or the member has another size than the shape.
            FormatError: the members are too large.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype {dtype[:20]!r}")
        member = _values_member(operation, output)
        content = read_member(self._archive, self._name, member, self._left, _HINT)
        self._left -= len(content)
        return np.frombuffer(content, dtype).reshape(shape)


class _WithoutValues:
    """Leaves the full tensors in the file."""

    def read(self, operation: int, output: int, shape: tuple[int, ...], dtype: str) -> None:
        """Return nothing."""


def operation_of(line: bytes) -> Operation:
    """Return the operation of a line of ``operations.jsonl``, without the values of full tensors.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError: the line is damaged.
    """
    return _operation(_json(line), _WithoutValues())


def operation_memory(line: bytes) -> int:
    """Return an upper bound of the memory in bytes of the operation of a line, without values. Brackets begin tensors and shapes."""
    return _OPERATION_BYTES + _TENSOR_BYTES * line.count(b"[") + _NUMBER_BYTES * line.count(b",") + len(line)


def _values_member(operation: int, output: int) -> str:
    return f"values/{operation}-{output}"


def _little_endian(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


def _json(content: bytes) -> Any:
    return json.loads(content)


def _head_data(trace: Trace) -> dict[str, Any]:
    return {
        "version": VERSION,
        "mode": trace.mode.value,
        "program": trace.program,
        "left_out": trace.left_out,
        "losses": trace.losses,
        "notes": trace.notes,
        "raised": trace.raised,
        "stacks": [
            [[site.file, site.line, site.function, site.is_library] for site in stack]
            for stack in trace.stacks
        ],
        "sources": trace.sources,
    }


def _trace(head: dict[str, Any], operations: Sequence[Operation]) -> Trace:
    stacks = tuple(
        tuple(
            CallSite(str(file), int(line), str(function), bool(library))
            for file, line, function, library in stack
        )
        for stack in head["stacks"]
    )
    return Trace(
        operations,
        stacks,
        {str(file): str(text) for file, text in head["sources"].items()},
        TraceMode(head["mode"]),
        tuple((int(tensor), int(index)) for tensor, index in head["losses"]),
        int(head["left_out"]),
        str(head["program"]),
        tuple(map(str, head["notes"])),
        tuple(map(int, head["raised"])),
    )


_OPERATION_FIELDS = [field.name for field in fields(Operation)]
_PHASES = frozenset(get_args(Phase))


def operation_data(operation: Operation) -> dict[str, Any]:
    """Return an operation as JSON data; empty and false entries are left out."""
    data = {name: getattr(operation, name) for name in _OPERATION_FIELDS}
    data["inputs"] = [_tensor_data(tensor) for tensor in operation.inputs]
    data["outputs"] = [_tensor_data(tensor) for tensor in operation.outputs]
    return {
        name: value
        for name, value in data.items()
        if value is not None and value is not False and value not in ("", ())
    }


def _tensor_data(tensor: TracedTensor) -> list[Any]:
    health = None
    if tensor.health is not None:
        health = {name: value for name, value in asdict(tensor.health).items() if value not in (None, ())}
    data = [
        tensor.id,
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.name,
        tensor.nonfinite,
        health,
        tensor.checksum,
    ]
    return data if tensor.values is None else [*data, tensor.values.dtype.newbyteorder("<").str]


def _operation(data: Any, values: _Values | _WithoutValues) -> Operation:
    if data["phase"] not in _PHASES:
        raise ValueError(f"phase {str(data['phase'])[:40]!r}")
    index = int(data["index"])
    if not 0 <= index < _MAX_INDEX:
        raise ValueError("an index is out of range")
    numbers = data.get("numbers", ())
    if len(numbers) > _MAX_NUMBERS:
        raise ValueError(f"{len(numbers)} numbers")
    outputs = []
    for place, (*tensor_data, last) in enumerate(data["outputs"]):
        if len(tensor_data) == _TENSOR_WORDS:
            shape = _integers(tensor_data[1])
            outputs.append(_tensor(tensor_data, values.read(index, place, shape, str(last))))
        else:
            outputs.append(_tensor([*tensor_data, last]))
    return Operation(
        index,
        int(data["step"]),
        str(data["name"]),
        data["phase"],
        str(data.get("module", "")),
        tuple(_tensor(tensor) for tensor in data["inputs"]),
        tuple(outputs),
        int(data.get("stack", 0)),
        str(data.get("node", "")),
        None if data.get("forward") is None else int(data["forward"]),
        is_view=bool(data.get("is_view")),
        infinite_argument=bool(data.get("infinite_argument")),
        is_constant=bool(data.get("is_constant")),
        error=str(data.get("error", "")),
        numbers=tuple(map(float, numbers)),
    )


_HEALTH_FIELDS = {field.name: field for field in fields(TensorHealth)}


_TENSOR_WORDS = 8


def _tensor(data: Any, values: NDArray[Any] | None = None) -> TracedTensor:
    number, shape, dtype, device, name, nonfinite, health, checksum = data
    if nonfinite not in {None, True, False}:
        raise ValueError(f"nonfinite {str(nonfinite)[:40]!r}")
    if checksum is not None and type(checksum) is not int:
        raise ValueError(f"checksum {str(checksum)[:40]!r}")
    return TracedTensor(
        int(number),
        _integers(shape),
        str(dtype),
        str(device),
        str(name),
        nonfinite,
        None if health is None else _health(health),
        values,
        checksum,
    )


def _integers(data: Any) -> tuple[int, ...]:
    """The integers of a list. Of a text, each digit would be an integer, and bounds of memory count commas."""
    if not isinstance(data, list):
        raise TypeError(f"{type(data).__name__} in place of a list of integers")
    return tuple(map(int, data))


def _health(data: Any) -> TensorHealth:
    unknown = set(data) - set(_HEALTH_FIELDS)
    if unknown:
        raise ValueError(f"unknown counts {sorted(unknown)[:3]}")
    values: dict[str, Any] = {
        name: float(value) if _is_statistic(name) else value for name, value in data.items()
    }
    counts = [value for name, value in values.items() if not _is_statistic(name) and name not in _NO_COUNTS]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("a count is no number from 0")
    values["first_bad"] = _integers(values.get("first_bad", []))
    values["is_exact"] = bool(values.get("is_exact", True))
    return TensorHealth(**values)


_NO_COUNTS = frozenset({"first_bad", "is_exact"})


def _is_statistic(name: str) -> bool:
    return name in {"minimum", "maximum", "mean", "std", "norm", "smallest"}
