"""``watchstep trace``: the first bad operation of a trace file, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from watchstep.errors import ConfigError, FormatError
from watchstep.trace import TraceConfig, TraceMode, Tracer, write_trace
from watchstep.wrapper.trace_command import main


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


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().out


def test_the_first_bad_operation_is_shown_with_its_line(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, str(bad))
    lines = text.splitlines()
    assert code == 1
    assert lines[0].startswith("first bad operation: aten.sqrt.default (operation ")
    assert lines[0].endswith("step 1, forward)")
    assert lines[1].startswith(f"  at {__file__}:")
    assert lines[2] == "      y.sqrt().sum().backward()"
    assert "  output 0: float32 2x2: 4 NaN of 4, first at [0, 0]" in lines
    assert "  reached: gradient of " in text or "  reached: loss" in text


def test_the_diagnosis_as_json(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, str(bad), "--json")
    first = json.loads(text)["first"]
    assert (code, first["cause"], first["operation"]["name"]) == (1, "operation", "aten.sqrt.default")
    assert first["line"]["text"] == "y.sqrt().sum().backward()"


def test_a_healthy_step(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, str(bad), "--step", "0")
    assert code == 0
    assert text.startswith("no non-finite value reached a loss, a gradient, a parameter or an output")


def test_operations_are_listed(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, str(bad), "--operations", "0:3")
    assert code == 0
    assert [int(line.split()[0]) for line in text.splitlines()] == [0, 1, 2, 3]
    _, text = run(capsys, str(bad), "--operations", "0:", "--json")
    operations = [json.loads(line) for line in text.splitlines()]
    assert {"aten.sqrt.default", "aten.addmm.default"} <= {each["name"] for each in operations}


def test_a_trace_without_health_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracer = Tracer(config=TraceConfig(mode=TraceMode.NO_TENSOR))
    with tracer.step():
        torch.zeros(2).log()
    write_trace(tracer.trace(), tmp_path / "a.trace")
    assert "mode no_tensor, which finds no non-finite values" in run(capsys, str(tmp_path / "a.trace"))[1]


def test_invalid_arguments(bad: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no step 9.*\n.*its steps are 0, 1"):
        main([str(bad), "--step", "9"])
    for chosen in ("5", "7:3", "a:b"):
        with pytest.raises(ConfigError, match="FIRST:LAST"):
            main([str(bad), "--operations", chosen])
    (tmp_path / "other").write_text("no trace")
    with pytest.raises(FormatError, match="other"):
        main([str(tmp_path / "other")])
