"""A trace survives its file, and a damaged or hostile file gives a clear error."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from watchstep.errors import FormatError, NotFoundError
from watchstep.trace import Trace, TraceConfig, TraceMode, Tracer, read_trace, write_trace


def traced(mode: TraceMode = TraceMode.FULL_TENSOR) -> Trace:
    """The trace of one step, with a bad value, several dtypes and an empty tensor."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    tracer = Tracer(model, TraceConfig(mode=mode))
    with tracer.step():
        y = model(torch.ones(4, 3))
        (
            y.log().bfloat16().sum() + y.to(torch.complex64).abs().sum() + torch.zeros(0).sum()
        ).float().backward()
    return tracer.trace()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a trace."""
    path = tmp_path_factory.mktemp("trace") / "trace.zip"
    write_trace(traced(), path)
    return path.read_bytes()


def test_the_memory_of_a_line_is_checked_before_it_is_parsed(content: bytes, tmp_path: Path) -> None:
    line = operation(inputs=[], outputs=[]).replace('"inputs": []', f'"inputs": [{"[]," * 2_500_000}[]]')
    with pytest.raises(FormatError, match="256 MiB of memory"):
        read_trace(rewritten(content, tmp_path / "a.trace", **{"operations.jsonl": line}))


def test_an_operation_has_few_numbers(content: bytes, tmp_path: Path) -> None:
    line = operation(inputs=[], outputs=[], numbers=[7.5] * 5000)
    with pytest.raises(FormatError, match="5000 numbers"):
        read_trace(rewritten(content, tmp_path / "a.trace", **{"operations.jsonl": line}))


def test_the_memory_of_a_trace_is_limited(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep.trace.trace_file._MAX_MEMORY", 2**24)
    read_trace(io.BytesIO(content))
    lines = "".join(operation(index=index, inputs=[], outputs=[]) for index in range(30_000))
    with pytest.raises(FormatError, match="of memory"):
        read_trace(rewritten(content, tmp_path / "a.trace", **{"operations.jsonl": lines}))


@pytest.mark.parametrize("mode", list(TraceMode), ids=lambda mode: mode.value)
def test_a_trace_is_read_as_it_was_written(mode: TraceMode, tmp_path: Path) -> None:
    trace = traced(mode)
    write_trace(trace, tmp_path / "a.trace")
    again = read_trace(tmp_path / "a.trace")
    assert list(again.operations) == list(trace.operations)
    assert again.stacks == tuple(trace.stacks)
    assert (again.sources, again.losses, again.mode) == (trace.sources, trace.losses, mode)
    for before, after in zip(trace.operations, again.operations, strict=True):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert (one.values is None) == (other.values is None)
            if one.values is not None and other.values is not None:
                np.testing.assert_array_equal(one.values, other.values)
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.trace"):
        read_trace(tmp_path / "none.trace")


@pytest.mark.ci
@given(position=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_read(position: float, byte: int, content: bytes) -> None:
    damaged = bytearray(content)
    damaged[int(position * len(damaged))] = byte
    for candidate in (bytes(damaged), content[: int(position * len(content))]):
        try:
            trace = read_trace(io.BytesIO(candidate))
        except FormatError:
            continue
        assert trace.operations


def rewritten(content: bytes, path: Path, **members: Any) -> Path:
    """The file with other members."""
    with (
        zipfile.ZipFile(io.BytesIO(content)) as archive,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as other,
    ):
        for name in archive.namelist():
            if name not in members:
                other.writestr(name, archive.read(name))
        for name, data in members.items():
            if data is not None:
                other.writestr(name, data if isinstance(data, (str, bytes)) else json.dumps(data))
    return path


def operation(**changes: Any) -> str:
    """A line about an operation without values."""
    tensor = [0, [2], "float32", "cpu", "", None, None, None]
    data = {"index": 0, "step": 0, "name": "a", "phase": "forward", "inputs": [tensor], "outputs": [tensor]}
    return json.dumps({**data, **changes}) + "\n"


@pytest.mark.parametrize(
    "members",
    [
        {"trace.json": None},
        {"trace.json": "{"},
        {"trace.json": []},
        {"trace.json": {"version": 99}},
        {"operations.jsonl": None},
        {"operations.jsonl": "[]\n"},
        {"operations.jsonl": operation()[:-1]},
        {"operations.jsonl": operation(phase="sideways")},
        {"operations.jsonl": operation(inputs=[[1, 2]])},
        {"operations.jsonl": operation(outputs=[[0, [2], "float32", "cpu", "", "yes", None, None]])},
        {
            "operations.jsonl": operation(
                outputs=[[0, [2], "float32", "cpu", "", True, {"nan": -1, "elements": 2}, None]]
            )
        },
        {"operations.jsonl": operation(outputs=[[0, [2], "float32", "cpu", "", True, {"cause": 1}, None]])},
        {"operations.jsonl": operation(outputs=[[0, [2], "float32", "cpu", "", None, None, None, "|O"]])},
        {
            "operations.jsonl": operation(
                outputs=[[0, [2**40], "float32", "cpu", "", None, None, None, "<f4"]]
            ),
            "values/0-0": b"1234",
        },
        {"operations.jsonl": operation(index=10**30)},
        {"operations.jsonl": operation(outputs=[[0, "1" * 20, "float32", "cpu", "", None, None, None]])},
        {"operations.jsonl": operation(inputs=[[0, "1" * 20, "float32", "cpu", "", None, None, None]])},
        {
            "operations.jsonl": operation(
                outputs=[[0, [2], "float32", "cpu", "", True, {"first_bad": "111"}, None]]
            )
        },
        {"operations.jsonl": "[" * 100_000 + "\n"},
    ],
    ids=map(str, range(19)),
)
def test_hostile_members_are_refused_and_others_are_read(
    content: bytes, members: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FormatError):
        read_trace(rewritten(content, tmp_path / "hostile.trace", **members))
    assert read_trace(
        rewritten(content, tmp_path / "b.trace", **{"operations.jsonl": operation()})
    ).operations


@pytest.mark.parametrize("indexes", [(0, 0), (1, 0)])
def test_indexes_that_do_not_ascend_are_refused(
    content: bytes, indexes: tuple[int, int], tmp_path: Path
) -> None:
    lines = "".join(operation(index=index, inputs=[], outputs=[]) for index in indexes)
    with pytest.raises(FormatError, match=f"index {indexes[1]} follows index {indexes[0]}"):
        read_trace(rewritten(content, tmp_path / "a.trace", **{"operations.jsonl": lines}))


def test_an_encrypted_member_is_refused(content: bytes) -> None:
    encrypted = bytearray(content)
    for signature, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        start = 0
        while (start := encrypted.find(signature, start)) >= 0:
            encrypted[start + flags] |= 1
            start += len(signature)
    with pytest.raises(FormatError, match="encrypted"):
        read_trace(io.BytesIO(bytes(encrypted)))
