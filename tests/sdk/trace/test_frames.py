"""Frames of modules: everything that a module computed is in them, and only damage ends the training."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from watchstep.errors import ConfigError
from watchstep.trace import FramesConfig, OverflowDetectedError, OverflowFrames, detect_overflow, frames_of


class Odd(nn.Module):
    """Outputs in a dict and a list, keyword arguments, functional operations, empty, boolean and fp8 tensors, and a mask with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = 1.0

    def forward(self, *, x: Tensor) -> Any:
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, float("-inf"))
        weights = torch.softmax(torch.ones(4, 4) + mask, -1)
        hidden = torch.exp(weights @ self.first(x) * self.scale)
        small = hidden.to(torch.float8_e4m3fn).float()
        return {"out": self.second(hidden), "parts": [hidden > 0, hidden[:0] * 2, small]}


def train(frames: OverflowFrames, model: Odd, batches: int, bad: int = -1) -> None:
    """Train with a bad scale in one batch."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(batches):
        model.scale = 1e4 if number == bad else 1.0
        with frames.batch():
            optimizer.zero_grad()
            model(x=torch.ones(4, 4))["out"].sum().backward()
            optimizer.step()


def test_a_healthy_training_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = Odd()
    train(OverflowFrames(model), model, 3)
    assert capsys.readouterr().out == ""


def test_an_overflow_prints_the_last_frames_and_ends_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Odd()
    frames = OverflowFrames(model, FramesConfig(max_frames=2))
    with pytest.raises(OverflowDetectedError, match=r"batch 2: aten\.exp\.default"):
        train(frames, model, 9, bad=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NaN or infinity in batch 2. The last 2 frames until it began:"
    assert lines[1] == "abs min  abs max  metadata"
    assert lines[2] == f"{'':18}first Linear"
    assert re.fullmatch(r"\d\.\d\de[+-]\d\d \d\.\d\de[+-]\d\d addmm", lines[3])
    (exp,) = [line for line in lines if " exp " in line]
    assert re.search(r"\+inf of 16", exp)
    assert any("hidden = torch.exp(weights @ self.first(x) * self.scale)" in line for line in lines)
    assert frames.trace is not None
    assert {frame.phase for frame in frames_of(frames.trace)} == {"forward", "backward", "optimizer"}


def test_chosen_batches_are_printed_and_the_training_ends_after_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Odd()
    with pytest.raises(SystemExit, match="ended after batch 1"):
        train(OverflowFrames(model, FramesConfig(batches=(1,), abort_after_batch=1)), model, 9)
    text = capsys.readouterr().out
    assert text.startswith("All frames of batch 1\n")
    for expected in (
        "first Linear\n",
        "second Linear, backward\n",
        "softmax",
        "empty",
        "bool",
        "(second.weight:gradient)",
    ):
        assert expected in text, expected


def test_a_bad_batch_that_does_not_raise_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Odd()
    train(OverflowFrames(model, FramesConfig(raises=False)), model, 2, bad=0)
    assert "NaN or infinity in batch 0" in capsys.readouterr().out


def test_a_tensor_is_tested_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert not detect_overflow(torch.ones(3), "fine")
    for harmless in (torch.zeros(0), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.int64)):
        assert not detect_overflow(harmless, "harmless")
    assert capsys.readouterr().out == ""
    bad = torch.tensor([1.0, float("inf"), float("nan")])
    assert detect_overflow(bad, "bad")
    assert detect_overflow(bad.to(torch.float8_e5m2), "narrow")
    assert capsys.readouterr().out.startswith("bad: 1 NaN, 1 +inf of 3")


def test_an_invalid_number_of_frames() -> None:
    with pytest.raises(ConfigError, match="max_frames=0"):
        FramesConfig(max_frames=0)
