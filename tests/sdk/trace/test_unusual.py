"""A step that is finite but wrong: which operations have results outside of their usual range, and which samples the loss is made of."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import watchstep
from watchstep.errors import ConfigError
from watchstep.wrapper import trace_command

_STEP, _ROW = 9, 5


def train(folder: Path, trace: str | None, wrong: str) -> list[Tensor]:
    """Train a model, of which one step has a sample that is too large, an operation that grows, or nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with watchstep.Hook(folder, run="r", trace=trace) as hook:
        hook.watch(model, optimizer)
        for step in range(12):
            x = torch.randn(16, 4)
            target = x.sum(1, keepdim=True)
            if wrong == "sample" and step == _STEP:
                target[_ROW] *= 300
            scale = 1000.0 if wrong == "operation" and step == _STEP else 1.0
            output = model(x) * scale  # the operation that grows
            losses = (output - target).square().squeeze(1)  # the operation that reads the sample
            optimizer.zero_grad()
            (losses.mean() / 2).backward()
            optimizer.step()
    assert not hook.health["faults"]
    return [parameter.detach() for parameter in model.parameters()]


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(train)
    return next(first + number for number, line in enumerate(lines) if f"# {text}" in line)


@pytest.mark.parametrize("wrong", ["sample", "operation", "nothing"])
def test_the_first_unusual_operation_and_the_samples_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    traced, plain = (
        train(tmp_path / name, trace, wrong) for name, trace in (("t", f"explain:{_STEP}"), ("p", None))
    )
    assert all(map(torch.equal, traced, plain))
    with pytest.raises(SystemExit):
        trace_command.main([str(tmp_path / "t" / "default" / "r"), "--step", str(_STEP)])
    shown, printed = capsys.readouterr()
    for text in (printed, shown):
        if wrong == "nothing":
            assert f"no result of step {_STEP} is four times larger or smaller" in text
            continue
        place = "the operation that reads the sample" if wrong == "sample" else "the operation that grows"
        _, _, unusual = text.partition("first unusual operation: ")
        assert f"test_unusual.py:{line_of(place)} in train" in unusual.splitlines()[1]
        assert (f"the loss of step {_STEP}: row {_ROW}: 100%" in unusual) == (wrong == "sample")


def test_a_step_without_steps_before_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="step 1 has too few steps before it"):
        watchstep.TraceSteps.explaining(1)
