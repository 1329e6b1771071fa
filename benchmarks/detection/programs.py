"""Programs to detect faults in: trainings, and what is wrong with each of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Built = tuple[Any, Any, Any, Iterable[Any]]
"""Model, optimizer, loss function (of the model's output and the labels), batches of inputs and labels."""

VALIDATED_EVERY = 10


class Recorder(Protocol):
    """What a training tells of itself: a `watchstep.Hook`, or the oracle."""

    def watch(self, model: Any, optimizer: Any = None, *, name: str | None = None) -> None:
        """Take a model and the optimizer whose steps count."""

    def log(self, values: Any = None, /, *, mode: Any = None, **scalars: Any) -> None:
        """Take numbers by name; those with "loss" in their name are losses."""

    def record(self, values: Any = None, /, **given: Any) -> None:
        """Take tensors by name."""


class Clock(Protocol):
    """What a training tells that a step is done."""

    def step(self) -> None:
        """A step of the program's own work is done."""


Train = Callable[[Recorder, int, Clock], None]
"""A whole training: recorder, seed, clock."""


@dataclass(frozen=True)
class Program:
    """One training.

    Attributes:
        id: its name.
        train: the training.
        kind: ``faulty``, or else healthy: ``fixed`` for the twin of a faulty one.
        truth: symptoms that must be reported.
        also: symptoms that are neither rewarded nor punished.
        onset: the first step at which the fault can be seen.
        source: where the fault was published, or why a healthy training looks odd.
        fault: what is wrong, or what was mended.
    """

    id: str
    train: Train
    kind: str
    truth: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    onset: int = 0
    source: str = ""
    fault: str = ""


def plain(build: Callable[[int], Built]) -> Train:
    """The plain training loop, around what ``build`` makes of a seed."""

    def train(recorder: Recorder, seed: int, clock: Clock) -> None:
        model, optimizer, loss_function, batches = build(seed)
        loop(recorder, clock, (model, optimizer, loss_function, batches))

    return train


def loop(recorder: Recorder, clock: Clock, built: Built) -> None:
    """Train as an author would, who logs the loss and validates every ten steps where there is something to."""
    import torch

    model, optimizer, loss_function, batches = built
    validation = getattr(batches, "val", None)
    recorder.watch(model, optimizer)
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        recorder.log(loss=loss)
        recorder.record(labels=y)
        if validation is not None and step % VALIDATED_EVERY == 0:
            unseen, labels = validation
            model.eval()
            with torch.no_grad():
                recorder.log(loss=loss_function(model(unseen), labels), mode="eval")
            model.train()
        clock.step()


def load(path: Path) -> dict[str, Program]:
    """The programs of a file.

    Raises:
        FileNotFoundError, AttributeError: there is no such file, or no ``CASES`` in it.
    """
    spec = importlib.util.spec_from_file_location(f"programs_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {
        name: Program(
            name,
            plain(case.build),
            case.kind,
            frozenset(case.truth),
            frozenset(getattr(case, "also", ())),
            getattr(case, "onset", 0),
        )
        for name, case in module.CASES.items()
    }
