"""The longest steps of a training of short steps, with and without the hook: what stops training once, and not at each step.

Each variant runs in a process of its own; blocks of steps take turns in changing order, so that what else the machine does
meets all of them. Told are the longest step, the step that one in a thousand exceeds, and how often Python's collector looked at
all objects of the process, which stops every thread.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.capture.models import Training
from benchmarks.report import Figure, Report
from watchstep import CaptureConfig, Hook

_BLOCK = 100
_BLOCKS, _BLOCKS_QUICK = 30, 3
_WARM = 20
_CONFIGS: dict[str, CaptureConfig | None] = {
    "none": None,
    "none_again": None,
    "budget": CaptureConfig(),
    "everything": CaptureConfig(overhead_budget=None),
}
"""Variants; None for no hook."""

_TITLES = {
    "none": "no hook",
    "none_again": "no hook, once more",
    "budget": "defaults",
    "everything": "all at every step",
}
_FULL = 2
"""The collector's oldest generation."""


@dataclass
class _Member:
    """A process that trains, and the way to it."""

    process: BaseProcess
    connection: Connection
    seconds: list[float]


def add_longest_steps(report: Report, *, quick: bool) -> None:
    """Measure; the report gets three figures for each variant."""
    blocks = _BLOCKS_QUICK if quick else _BLOCKS
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, _members(folder) as members:
        for _ in range(blocks):
            names = list(members)
            order.shuffle(names)
            for name in names:
                members[name].connection.send(_BLOCK)
                members[name].seconds.extend(members[name].connection.recv())
        for name, member in members.items():
            member.connection.send(0)
            full = member.connection.recv()
            _add(report, name, np.array(member.seconds) * 1e3, full)


def _add(report: Report, name: str, milliseconds: Any, full: int) -> None:
    place = int(milliseconds.argmax())
    note = f"{_TITLES[name]}: step {place} of {len(milliseconds)}; median {np.median(milliseconds):.2f} ms"
    report.add(f"longest_step/{name}", Figure(float(milliseconds[place]), "ms", note=note))
    report.add(f"longest_step/{name}/of_a_thousand", Figure(float(np.quantile(milliseconds, 0.999)), "ms"))
    report.add(f"longest_step/{name}/full_collections", Figure(float(full), "runs"))


@contextmanager
def _members(folder: str) -> Iterator[dict[str, _Member]]:
    context = multiprocessing.get_context("forkserver")
    members = {}
    for name in _CONFIGS:
        here, there = context.Pipe()
        process = context.Process(target=_train, args=(there, name, tempfile.mkdtemp(dir=folder)))
        process.start()
        there.close()
        members[name] = _Member(process, here, [])
    try:
        for member in members.values():
            member.connection.recv()
        yield members
    finally:
        for member in members.values():
            member.connection.close()
            member.process.join(30)
            member.process.kill()


def _train(connection: Connection, variant: str, folder: str) -> None:
    """Train blocks of steps on the parent's word; 0 ends."""
    torch.set_num_threads(1)
    training = _short_steps()
    config = _CONFIGS[variant]
    hook = None if config is None else Hook(folder, config=config)
    if hook is not None:
        hook.watch(training.model, training.optimizer)
    before = gc.get_stats()[_FULL]["collections"]
    _seconds(training, _WARM)
    connection.send(None)
    while steps := connection.recv():
        connection.send(_seconds(training, steps))
    full = gc.get_stats()[_FULL]["collections"] - before
    if hook is not None:
        hook.close()
    connection.send(full)


def _short_steps() -> Training:
    """Steps of about a millisecond."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(model, optimizer, torch.randn(64, 64), torch.randint(0, 10, (64,)))


def _seconds(training: Training, steps: int) -> list[float]:
    """Wall time of each step."""
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        training.backward()
        training.update()
        seconds.append(time.perf_counter() - began)
    return seconds
