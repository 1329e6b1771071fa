"""Mixed precision, accumulation and clipping: loops that are not the plain one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam

from benchmarks.detection.data import Batches, copied_tokens, images, shipped
from benchmarks.detection.healthy.trainings import healthy
from benchmarks.detection.models import LanguageModel, convolutional, dense
from benchmarks.detection.programs import Clock, Recorder


@healthy("autocast_bfloat16", "activations in bfloat16, weights in float32")
def autocast_bfloat16(recorder: Recorder, seed: int, clock: Clock) -> None:
    """600 steps of a convolutional network under autocast."""
    data, _ = images(seed)
    model = convolutional(norm=True)
    optimizer = Adam(model.parameters(), 1e-3)
    recorder.watch(model, optimizer)
    for x, y in Batches(*data, 32, 600, seed):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss)
        recorder.record(labels=y)
        clock.step()


@healthy("gradient_scaler", "a scale that begins too large: the first steps overflow and are skipped")
def gradient_scaler(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,000 steps with GradScaler, which doubles its scale every 100 until it overflows again."""
    data, _ = shipped("digits", seed)
    model = dense([64, 64, 64, 10])
    optimizer = Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    recorder.watch(model, optimizer)
    for x, y in Batches(*data, 32, 1000, seed):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        recorder.log(loss=loss)
        recorder.record(labels=y)
        clock.step()


@healthy("accumulated_clipped", "four micro-batches a step, gradients clipped to a norm of 1")
def accumulated_clipped(recorder: Recorder, seed: int, clock: Clock) -> None:
    """A transformer, 300 updates of four micro-batches each."""
    x, y = copied_tokens(seed, 2000, 12, 10)
    model = LanguageModel(10, 12, norm_first=True)
    optimizer = Adam(model.parameters(), 3e-3)
    recorder.watch(model, optimizer)
    for number, (inputs, labels) in enumerate(Batches(x, y, 16, 1200, seed)):
        loss = functional.cross_entropy(model(inputs), labels) / 4
        loss.backward()
        recorder.record(labels=labels)
        if number % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.log(loss=loss * 4)
            clock.step()


class Residual(nn.Module):
    """x + second(relu(first(x))), where the second begins at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.activation = nn.Linear(width, width), nn.Linear(width, width), nn.ReLU()
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.activation(self.first(x)))  # type: ignore[no-any-return]  # untyped call


@healthy("zero_initialised_branches", "residual branches begin at zero (Zhang et al., Fixup, 2019)")
def zero_initialised_branches(recorder: Recorder, seed: int, clock: Clock) -> None:
    """1,200 steps; each branch's first layer has no gradient at the first step."""
    data, _ = shipped("digits", seed)
    model = nn.Sequential(nn.Linear(64, 48), Residual(48), Residual(48), Residual(48), nn.Linear(48, 10))
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    recorder.watch(model, optimizer)
    for x, y in Batches(*data, 32, 1200, seed):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss)
        recorder.record(labels=y)
        clock.step()
