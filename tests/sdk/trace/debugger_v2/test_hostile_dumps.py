"""Dumps that are truncated, damaged or hostile, and dumps that TensorFlow can write but the examples do not show."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.trace.debugger_v2.dumps import ComposedDump, dump, field, message, tensor, vector
from watchstep.errors import FormatError, NotFoundError
from watchstep.format.event_files.tf_records import record
from watchstep.trace import Trace, diagnose, read_debugger_v2
from watchstep.trace.debugger_v2 import is_debugger_v2
from watchstep.trace.debugger_v2.events import DumpedGraph, GraphOperation, event_of
from watchstep.trace.debugger_v2.graphs import GraphIndex, OutputKey
from watchstep.trace.debugger_v2.tensor_values import recorded_tensor
from watchstep.trace.debugger_v2.wire import WireError


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(dump(name), folder / name))


def test_a_folder_without_a_dump(tmp_path: Path) -> None:
    assert not is_debugger_v2(tmp_path)
    assert not is_debugger_v2(tmp_path / "none")
    assert is_debugger_v2(dump("ring"))
    with pytest.raises(FormatError, match="metadata"):
        read_debugger_v2(tmp_path)
    with pytest.raises(NotFoundError, match="none"):
        read_debugger_v2(tmp_path / "none")


@pytest.mark.parametrize("suffix", ["execution", "graph_execution_traces", "graphs", "source_files"])
def test_a_file_of_a_killed_program_is_read_up_to_its_end(suffix: str, tmp_path: Path) -> None:
    folder = copied("graph-full_health", tmp_path)
    (path,) = folder.glob(f"*.{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    trace = read_debugger_v2(folder)
    assert any(f"{path.name} ends within an event" in note for note in trace.notes)
    whole = read_debugger_v2(dump("graph-full_health"))
    assert len(trace.operations) <= len(whole.operations)


def test_a_missing_file_is_noted(tmp_path: Path) -> None:
    folder = copied("graph-full_health", tmp_path)
    (path,) = folder.glob("*.stack_frames")
    path.unlink()
    trace = read_debugger_v2(folder)
    assert any("stack_frames is missing" in note for note in trace.notes)
    assert trace.stacks == []


@pytest.mark.ci
@given(position=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), file=st.integers(0, 5))
def test_a_damaged_file_is_refused_or_read(position: float, byte: int, file: int, small: Path) -> None:
    path = sorted(small.iterdir())[file]
    content = path.read_bytes()
    damaged = bytearray(content)
    if damaged:
        damaged[int(position * len(damaged))] = byte
    path.write_bytes(damaged)
    try:
        read_debugger_v2(small)
    except FormatError as error:
        assert path.name in str(error)  # noqa: PT017 - both outcomes are valid
    finally:
        path.write_bytes(content)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    composed(folder)
    return folder


def composed(folder: Path) -> ComposedDump:
    """A function that computes the logarithm of its argument."""
    made = ComposedDump(folder)
    made.graph("root")
    made.graph("g", "f", "root")
    made.operation("g", "Placeholder", "x")
    made.operation("g", "Log", "Log", "x:0")
    made.operation("g", "Identity", "Identity", "Log:0")
    made.add("source_files", 4, message((1, "/a.py"), (2, "host"), (3, "import tensorflow"), (3, "f(x)")))
    made.add("stack_frames", 6, message((1, "frame"), (2, message((1, 0), (2, 2), (4, "f")))))
    made.ran("g", "Log", 1.0, 4.0, 1.0, 0.0, 0.0)
    made.executed("__inference_f_1", (0,), (1,), vector(-1, 4, 1, 0, 0), graph="g")
    return made


def test_a_checksum_that_is_wrong(tmp_path: Path) -> None:
    made = composed(tmp_path)
    path = made.path("graphs")
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"graphs: the record at byte 0 has a wrong checksum\n  hint"):
        read_debugger_v2(tmp_path)


def test_the_size_of_a_record_is_checked_before_it_is_read(tmp_path: Path) -> None:
    made = composed(tmp_path)
    path = made.path("stack_frames")
    with path.open("ab") as file:
        file.write(record(b"\0" * 2**17))
    with pytest.raises(FormatError, match="131072 bytes; the limit is 65536"):
        read_debugger_v2(tmp_path)


def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path) -> None:
    made = composed(tmp_path)
    head = record(b"")[:0] + struct.pack("<Q", 2**60)
    from watchstep.format.event_files.tf_records import _checksum

    with made.path("execution").open("ab") as file:
        file.write(head + _checksum(head) + b"abc")
    assert any("ends within an event" in note for note in read_debugger_v2(tmp_path).notes)


def test_the_items_of_events_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty output is two bytes of a file, and much more of memory."""
    made = composed(tmp_path)
    monkeypatch.setattr("watchstep.trace.debugger_v2.dump._MAX_BYTES", 2**20)
    read_debugger_v2(tmp_path)
    made.executed("Mul", (), (1,) * 3000, *[b""] * 3000)
    with pytest.raises(FormatError, match="1048576 bytes"):
        read_debugger_v2(tmp_path)


@pytest.mark.ci
def test_graphs_without_callers_take_linear_time() -> None:
    count = 60_000
    graphs = {str(number): DumpedGraph(str(number), f"true_{number}", "g") for number in range(count)}
    operations = [GraphOperation("g", "If", f"if{number}", (), 1, ()) for number in range(count)]
    index = GraphIndex(graphs, operations, frozenset())
    for number in range(count):
        assert index.sources("g", f"unknown{number}:0") == (OutputKey("g", f"unknown{number}", 0),)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    made = composed(tmp_path)
    made.path("graphs").unlink()
    os.mkfifo(made.path("graphs"))
    with pytest.raises(FormatError, match="is no file"):
        read_debugger_v2(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_an_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        event_of(data)


@given(kind=st.sampled_from([3, 4, 6, 7, 8, 9, 10, 12]), data=st.binary(max_size=100))
def test_any_content_of_an_event_is_read_or_an_error(kind: int, data: bytes) -> None:
    with contextlib.suppress(WireError):
        event_of(field(kind, data))


@pytest.mark.parametrize(
    ("mode", "content"),
    [
        (2, vector(1, 2, 3)),
        (3, vector(1, 2, math.nan, 0, 0)),
        (3, vector(1, -1, 0, 0, 0)),
        (4, vector(*[0.5] * 11)),
        (5, vector(1, 1, 1e9, 1, 0, 0, 0, 0, 0, 0)),
        (3, tensor(1, (2,), (4, b"12345678"))),
        (7, tensor(1, (2**60, 2**60), (5, b"\0\0\0\0"))),
        (7, tensor(1, (2,), (4, b"123"))),
        (7, tensor(1, (1,), (4, b"12345678"))),
        (7, tensor(8, (1,), (9, b"\0\0\0\0"))),
        (7, tensor(1, (1,), (6, b"12345678"), (5, b"1234"))),
        (7, b"\x0b"),
        (7, b"\x0a\xff"),
        (7, b"\x08" + b"\xff" * 11),
    ],
    ids=map(str, range(14)),
)
def test_records_that_cannot_be(mode: int, content: bytes) -> None:
    with pytest.raises(WireError):
        recorded_tensor(mode, memoryview(content))


BITS = {14: [0x3F80, 0x7FC0], 19: [0x3C00, 0x7E00]}


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (tensor(1, (2,), (4, struct.pack("<2f", 1.5, math.inf))), [1.5, math.inf]),
        (tensor(1, (2,), (5, struct.pack("<2f", 1.5, math.inf))), [1.5, math.inf]),
        (tensor(2, (2,), (6, 1.5), (6, -math.inf)), [1.5, -math.inf]),
        (tensor(2, (2, 2), (6, struct.pack("<2d", 1.5, math.nan))), [[1.5, math.nan], [math.nan, math.nan]]),
        (tensor(2, (3,), (6, struct.pack("<d", math.nan))), [math.nan] * 3),
        (tensor(2, (3,)), [0.0] * 3),
        (tensor(14, (2,), (13, b"\x80\x7f\xc0\xff\x01")), [1.0, math.nan]),
        (tensor(14, (2,), (4, struct.pack("<2H", *BITS[14]))), [1.0, math.nan]),
        (tensor(19, (2,), (4, struct.pack("<2H", *BITS[19]))), [1.0, math.nan]),
        (tensor(8, (1,), (9, struct.pack("<2f", 1, math.inf))), [complex(1, math.inf)]),
        (tensor(1, ()), 0.0),
        (tensor(1, (0, 3)), np.zeros((0, 3))),
    ],
    ids=map(str, range(12)),
)
def test_forms_of_full_tensors(content: bytes, values: Any) -> None:
    found = recorded_tensor(7, memoryview(content))
    array = np.asarray(values)
    np.testing.assert_array_equal(found.values, array)
    assert found.shape == array.shape
    health = found.health
    assert health is not None
    assert health.elements == array.size
    assert health.nan == np.isnan(array).sum()
    assert health.is_finite == np.isfinite(array).all()
    if not health.is_finite:
        assert not np.isfinite(array[health.first_bad])


def test_a_repeated_element_of_a_large_tensor_takes_no_memory() -> None:
    found = recorded_tensor(7, memoryview(tensor(1, (2**40,), (5, struct.pack("<f", math.nan)))))
    assert found.health is not None
    assert found.health.nan == 2**40
    assert found.values is not None
    assert found.values.strides == (0,)


def test_vectors_in_both_forms() -> None:
    numbers = [1.0, 6.0, 1.0, 2.0, 3.0]
    listed = tensor(2, (5,), (6, struct.pack("<5d", *numbers)))
    assert recorded_tensor(3, memoryview(listed)) == recorded_tensor(3, memoryview(vector(*numbers)))


def traced(made: ComposedDump) -> Trace:
    return read_debugger_v2(made.prefix.parent)


def test_outputs_that_were_written_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    made = ComposedDump(tmp_path)
    made.graph("root")
    made.graph("g", "f", "root")
    made.operation("g", "Const", "c")
    made.operation("g", "Log", "Log", "c:0")
    made.operation("g", "Neg", "Neg", "Log:0")
    made.operation("g", "Identity", "Identity", "Neg:0")
    for _ in range(2):
        made.ran("g", "Neg", 3, 4, 0, 1, 0)
        made.ran("g", "c", 1, 4, 0, 0, 0)
        made.ran("g", "Log", 2, 4, 1, 0, 0)
    trace = traced(made)
    assert [operation.name for operation in trace.operations] == ["Const", "Log", "Neg"] * 2
    first = diagnose(trace).first
    assert first is not None
    assert (first.operation.name, first.operation.index) == ("Log", 1)


def test_a_bad_argument_of_a_function(tmp_path: Path) -> None:
    made = ComposedDump(tmp_path)
    made.graph("root")
    made.graph("g", "f", "root")
    made.operation("g", "Placeholder", "x")
    made.operation("g", "Neg", "Neg", "x:0")
    made.operation("g", "Identity", "Identity", "Neg:0")
    made.executed("Sqrt", (7,), (8,), vector(-1, 4, 0, 0, 2))
    made.ran("g", "Neg", 1, 4, 0, 0, 2)
    made.executed("__inference_f_1", (8,), (9,), vector(-1, 4, 0, 0, 2), graph="g")
    first = diagnose(traced(made)).first
    assert first is not None
    assert (first.cause, first.operation.name, first.operation.phase) == ("operation", "Sqrt", "eager")


def test_a_bad_argument_of_a_call_that_is_not_recorded(tmp_path: Path) -> None:
    made = ComposedDump(tmp_path)
    for graph, name, outer in (("root", "", ""), ("g", "outer", "root"), ("h", "inner", "g")):
        made.graph(graph, name, outer)
    made.operation("g", "Sqrt", "Sqrt")
    made.operation("h", "Placeholder", "x")
    made.operation("h", "Neg", "Neg", "x:0")
    made.operation("h", "Identity", "Identity", "Neg:0")
    made.operation("g", "Identity", "Identity", "StatefulPartitionedCall:0")
    made.ran("g", "Sqrt", 1, 4, 0, 0, 2)
    made.ran("h", "Neg", 2, 4, 0, 0, 2)
    made.executed("__inference_outer_1", (), (9,), vector(-1, 4, 0, 0, 2), graph="g")
    first = diagnose(traced(made)).first
    assert first is not None
    assert first.operation.name == "Sqrt"


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    made = ComposedDump(tmp_path)
    made.graph("root")
    made.graph("g", "f", "root")
    made.operation("g", "Placeholder", "dense/MatMul/ReadVariableOp/resource")
    made.operation(
        "g", "ReadVariableOp", "dense/MatMul/ReadVariableOp", "dense/MatMul/ReadVariableOp/resource:0"
    )
    made.operation("g", "Neg", "dense/Neg", "dense/MatMul/ReadVariableOp:0")
    made.operation("g", "Identity", "Identity", "dense/Neg:0")
    made.ran("g", "dense/MatMul/ReadVariableOp", 1, 4, 0, 0, 1)
    made.ran("g", "dense/Neg", 2, 4, 0, 0, 1)
    made.executed("__inference_f_1", (3,), (9,), vector(-1, 4, 0, 0, 1), graph="g")
    first = diagnose(traced(made)).first
    assert first is not None
    assert first.cause == "tensor"
    assert first.tensor is not None
    assert first.tensor.name == "variable dense/MatMul"
    assert first.operation.module == "dense.MatMul"  # no operation has this name


def test_gradients_of_optimizers_are_named(tmp_path: Path) -> None:
    made = ComposedDump(tmp_path)
    made.executed("Sqrt", (1,), (2,), vector(-1, 4, 0, 0, 2))
    made.executed("ResourceApplyMomentum", (10, 11, 12, 2, 13))
    first = diagnose(traced(made)).first
    assert first is not None
    assert (first.operation.name, first.reaches) == ("Sqrt", "gradient of variable 10")


def test_sets_of_several_programs(tmp_path: Path) -> None:
    old = ComposedDump(tmp_path, host="a", run_id="old", time=1)
    old.executed("Old")
    new = ComposedDump(tmp_path, host="b", run_id="new", time=100)
    new.executed("New")
    trace = read_debugger_v2(tmp_path)
    assert [operation.name for operation in trace.operations] == ["New"]
    assert any("1 sets of files of other programs" in note for note in trace.notes)


def test_a_cycle_of_graphs_ends(tmp_path: Path) -> None:
    made = ComposedDump(tmp_path)
    made.graph("a", "a", "b")
    made.graph("b", "b", "a")
    made.operation("a", "Identity", "i", "j:0")
    made.operation("a", "Identity", "j", "i:0")
    made.operation("a", "Neg", "n", "i:0")
    made.ran("a", "n", 1, 4, 0, 0, 1)
    assert len(read_debugger_v2(tmp_path).operations) == 1


def test_an_operation_whose_graph_was_lost(tmp_path: Path) -> None:
    made = ComposedDump(tmp_path)
    made.ran("lost", "a/b", 1, 4, 0, 0, 1)
    (operation,) = read_debugger_v2(tmp_path).operations
    assert (operation.name, operation.module, operation.inputs) == ("Unknown", "a", ())
