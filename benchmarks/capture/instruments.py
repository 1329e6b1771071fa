"""What is put on a training: nothing, Watchstep in its ways, or a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import watchstep
from benchmarks.capture.models import Training
from watchstep import Cadence, CaptureConfig, Collection, Snapshots

_TENSORS = ("weights", "biases", "gradients")


class UnavailableError(Exception):
    """A variant cannot be measured here; the message says why."""


class Instrument(Protocol):
    """Something that looks at a training. Made with the training and an empty folder."""

    def after_backward(self) -> None:
        """Gradients are there."""

    def after_step(self, loss: Tensor) -> None:
        """The optimizer has updated."""

    def account(self) -> float:
        """Seconds that the instrument says it took so far; 0 where it says nothing."""

    def close(self) -> None:
        """End."""


class Nothing:
    """The uninstrumented training."""

    def __init__(self, training: Training, folder: Path) -> None: ...

    def after_backward(self) -> None: ...

    def after_step(self, loss: Tensor) -> None: ...

    def account(self) -> float:
        return 0.0

    def close(self) -> None: ...


class Watchstep(Nothing):
    """A hook with the options of a subclass."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.hook = watchstep.Hook(folder, run="benchmark", **self.options())
        self.hook.watch(training.model, training.optimizer)

    @staticmethod
    def options() -> dict[str, Any]:
        """Arguments of the hook."""
        return {}

    def account(self) -> float:
        told: float = self.hook.health.get("overhead", {}).get("spent_seconds", 0.0)
        return told

    def close(self) -> None:
        self.hook.close()
        faults = self.hook.health["faults"]
        if faults:
            raise RuntimeError(f"the recorder had faults, so its cost means nothing: {faults}")


class Gate(Watchstep):
    """The non-finite gate at every step, and no statistics."""

    @staticmethod
    def options() -> dict[str, Any]:
        return {"config": CaptureConfig(collections={}, overhead_budget=None)}


class Budget(Watchstep):
    """The defaults."""

    @staticmethod
    def options() -> dict[str, Any]:
        return {"overhead_budget": 0.01}


class Everything(Watchstep):
    """The defaults with a budget that pays for all of them at every step: the account is kept, nothing left out."""

    @staticmethod
    def options() -> dict[str, Any]:
        return {"overhead_budget": 1.0}


class EverythingInTensorBoard(Watchstep):
    """The same, and TensorBoard event files during the run."""

    def __init__(self, training: Training, folder: Path) -> None:
        tensorboard = folder / "tensorboard"
        self.hook = watchstep.Hook(folder, run="benchmark", overhead_budget=1.0, tensorboard=tensorboard)
        self.hook.watch(training.model, training.optimizer)


class Statistics(Watchstep):
    """All statistics of all weights and gradients, every step."""

    @staticmethod
    def options() -> dict[str, Any]:
        collections = {name: Cadence() for name in _TENSORS}
        return {"config": CaptureConfig(collections=collections, overhead_budget=None)}


class StatisticsAndTensors(Watchstep):
    """The same, and the full tensors of every tenth step."""

    @staticmethod
    def options() -> dict[str, Any]:
        collections = {name: Collection(Cadence(), tensors=Cadence(10)) for name in _TENSORS}
        return {"config": CaptureConfig(collections=collections, overhead_budget=None)}


class _FullTensors(Watchstep):
    """Full tensors of every tenth step. Refuses to report a cost if any was left out."""

    def close(self) -> None:
        super().close()
        counts = self.hook.health["counts"]
        if counts.get("dropped_tensors") or counts.get("dropped_snapshots"):
            raise RuntimeError(f"full tensors were left out, so their cost means nothing: {counts}")


ACTIVATIONS_IN_FULL = CaptureConfig(
    collections={"activations": Collection(None, tensors=Cadence(10))}, overhead_budget=None
)
STATE_IN_FULL = CaptureConfig(
    collections=dict.fromkeys((*_TENSORS, "optimizer_state"), Collection(None, tensors=Cadence(10))),
    overhead_budget=None,
    snapshots=Snapshots(memory_bytes=384 * 2**20),  # twice the tensors of a step, and a part of a third
)


class ActivationsInFull(_FullTensors):
    """All activations in full every tenth step, no statistics, and the gate."""

    @staticmethod
    def options() -> dict[str, Any]:
        return {"config": ACTIVATIONS_IN_FULL}


class StateInFull(_FullTensors):
    """Weights, gradients and optimizer state in full every tenth step, no statistics, and the gate."""

    @staticmethod
    def options() -> dict[str, Any]:
        return {"config": STATE_IN_FULL}


class SeparateOperations(Nothing):
    """What one writes by hand: an operation for each figure of each tensor, each read at once."""

    def __init__(self, training: Training, _: Path) -> None:
        self.parameters = list(training.model.parameters())
        self.figures: list[list[float]] = []

    @torch.no_grad()
    def after_backward(self) -> None:
        held = [p.detach() for p in self.parameters]
        found = [p.grad for p in self.parameters if p.grad is not None]
        self.figures = [_figures(tensor) for tensor in [*held, *found]]


def _figures(tensor: Tensor) -> list[float]:
    return [
        tensor.min().item(),
        tensor.max().item(),
        tensor.mean().item(),
        tensor.std().item() if tensor.numel() > 1 else 0.0,
        torch.linalg.vector_norm(tensor).item(),
        (tensor == 0).sum().item(),
    ]
