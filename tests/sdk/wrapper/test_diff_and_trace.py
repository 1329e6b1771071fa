"""``watchstep diff`` and ``watchstep trace``: what two runs or a trace file show, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.stored import FIRST, LOSS, new_run, small_run, write
from watchstep.errors import ConfigError, FormatError, NotFoundError
from watchstep.trace import (
    CallSite,
    Operation,
    Trace,
    TraceConfig,
    TracedTensor,
    TraceMode,
    Tracer,
    write_trace,
)
from watchstep.wrapper.diff_command import main as diff
from watchstep.wrapper.trace_command import main as trace


@pytest.fixture
def store(tmp_path: Path) -> Path:
    small_run(tmp_path, "a")
    small_run(tmp_path, "b", factor=1.5)
    small_run(tmp_path, "c", factor=1 + 1e-6)
    return tmp_path


def run(
    command: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str]:
    """Exit code and output of a command."""
    with pytest.raises(SystemExit) as ended:
        command([str(argument) for argument in arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().out


def test_the_first_step_and_tensor_are_shown(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(diff, capsys, "a", "default/b", "--store", store, "--most", "2")
    lines = text.splitlines()
    assert (code, lines[0]) == (1, "first difference: step 0, loss")
    assert lines[1].split() == ["STEP", "MODE", "WORKER", "TENSOR", "FIGURE", "A", "B", "RELATIVE"]
    assert lines[2].split()[:4] == ["0", "train", "0", "loss"]
    assert len(lines) == 5
    assert lines[-1].startswith("and ")


def test_equal_runs(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(diff, capsys, "a", "a", "--store", store, "--exact") == (0, "no difference in 36 rows\n")


@pytest.mark.parametrize(
    ("options", "code"),
    [([], 0), (["--exact"], 1), (["--tolerance", "float32=1e-9"], 1), (["--tolerance", "1e-3"], 0)],
)
def test_tolerances(store: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int) -> None:
    assert run(diff, capsys, "a", "c", "--store", store, *options)[0] == code


def test_what_only_one_run_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(new_run(tmp_path, "a"), [block_of([Row(step, LOSS, [1.0]) for step in range(12)])])
    write(new_run(tmp_path, "b"), [block_of([Row(0, LOSS, [1.0]), Row(0, FIRST, [1.0])])])
    code, text = run(diff, capsys, "a", "b", "--store", tmp_path)
    assert (code, text.splitlines()) == (
        0,
        [
            "steps only in a: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, and 1 more",
            f"tensors only in b: {FIRST.name}",
            "no difference in 1 rows",
        ],
    )


def test_the_result_as_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(diff, capsys, "a", "b", "--store", store, "--json", "--most", "1")
    data = json.loads(text)
    assert (code, data["step"], data["tensor"], len(data["rows"])) == (1, 0, "loss", 1)
    assert data["differences"] > 1


def operation(index: int, name: str, checksum: int) -> Operation:
    tensor = TracedTensor(index, (2,), "float32", checksum=checksum)
    return Operation(index, 0, name, "forward", "head", (), (tensor,), 0)


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Traces of two operations, of which the second one differs."""
    sources = {"train.py": "x = start()\ny = x.sin()\n"}
    trace = Trace(
        [operation(0, "aten.ones.default", 1), operation(1, "aten.sin.default", 2)],
        [(CallSite("train.py", 2, "step"),)],
        sources,
    )
    other = replace(trace, operations=[trace.operations[0], operation(1, "aten.sin.default", 3)])
    paths = [tmp_path / "a.trace", tmp_path / "b.trace"]
    for each, path in zip((trace, other), paths, strict=True):
        write_trace(each, path)
    return paths


def test_the_first_operation_of_traces(
    store: Path, traces: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(diff, capsys, "a", "a", "--store", store, "--exact", "--traces", *traces)
    assert (code, text.splitlines()) == (
        1,
        [
            "no difference in 36 rows",
            "first different operation: aten.sin.default (operation 1, step 0, forward in head)",
            "  at train.py:2 in step",
            "      y = x.sin()",
            "  it computed another checksum of output 0 from equal inputs: 2 and 3",
        ],
    )
    data = json.loads(run(diff, capsys, "--traces", *traces, "--exact", "--json")[1])
    assert data["traces"]["first"]["operation"]["line"]["text"] == "y = x.sin()"
    assert run(diff, capsys, "--traces", traces[0], traces[0])[0] == 0


def test_errors_of_diff(store: Path, traces: list[Path]) -> None:
    for arguments in (["a"], [], ["a", "b", "a"]):
        with pytest.raises(ConfigError, match="use watchstep diff RUN_A RUN_B"):
            diff([*arguments, "--store", str(store)])
    with pytest.raises(NotFoundError, match="missing"):
        diff(["a", "missing", "--store", str(store)])
    with pytest.raises(ConfigError, match="--most 0"):
        diff(["a", "b", "--store", str(store), "--most", "0"])
    write(new_run(store, "empty"), [])
    with pytest.raises(ConfigError, match="no recorded row in common"):
        diff(["a", "empty", "--store", str(store)])
    traces[0].write_bytes(b"no trace")
    with pytest.raises(FormatError, match=r"a\.trace"):
        diff(["--traces", *map(str, traces)])


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A trace of two steps: a healthy one, and one with the root of a negative number."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    tracer = Tracer(model)
    for offset in (50.0, -50.0):
        with tracer.step():
            y: Tensor = model(torch.ones(2, 3)) + offset
            y.sqrt().sum().backward()
    write_trace(tracer.trace(), tmp_path / "bad.trace")
    return tmp_path / "bad.trace"


def test_the_first_bad_operation_is_shown_with_its_line(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(trace, capsys, str(bad))
    lines = text.splitlines()
    assert code == 1
    assert lines[0].startswith("first bad operation: aten.sqrt.default (operation ")
    assert lines[0].endswith("step 1, forward)")
    assert lines[1].startswith(f"  at {__file__}:")
    assert lines[2] == "      y.sqrt().sum().backward()"
    assert "  output 0: float32 2x2: 4 NaN of 4, first at [0, 0]" in lines
    assert "  reached: gradient of " in text or "  reached: loss" in text


def test_the_diagnosis_as_json(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(trace, capsys, str(bad), "--json")
    first = json.loads(text)["first"]
    assert (code, first["cause"], first["operation"]["name"]) == (1, "operation", "aten.sqrt.default")
    assert first["line"]["text"] == "y.sqrt().sum().backward()"


def test_a_healthy_step(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(trace, capsys, str(bad), "--step", "0")
    assert code == 0
    assert text.startswith("no non-finite value reached a loss, a gradient, a parameter or an output")


def test_operations_are_listed(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(trace, capsys, str(bad), "--operations", "0:3")
    assert code == 0
    assert [int(line.split()[0]) for line in text.splitlines()] == [0, 1, 2, 3]
    _, text = run(trace, capsys, str(bad), "--operations", "0:", "--json")
    operations = [json.loads(line) for line in text.splitlines()]
    assert {"aten.sqrt.default", "aten.addmm.default"} <= {each["name"] for each in operations}


def test_a_trace_without_health_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer(config=TraceConfig(mode=TraceMode.NO_TENSOR))
    with tracer.step():
        torch.zeros(2).log()
    write_trace(tracer.trace(), tmp_path / "a.trace")
    assert (
        "mode no_tensor, which finds no non-finite values" in run(trace, capsys, str(tmp_path / "a.trace"))[1]
    )


def test_invalid_arguments_of_trace(bad: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no step 9.*\n.*its steps are 0, 1"):
        trace([str(bad), "--step", "9"])
    for chosen in ("5", "7:3", "a:b"):
        with pytest.raises(ConfigError, match="FIRST:LAST"):
            trace([str(bad), "--operations", chosen])
    (tmp_path / "other").write_text("no trace")
    with pytest.raises(FormatError, match="other"):
        trace([str(tmp_path / "other")])
