"""Peers, each used as its documentation says, every step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.capture.instruments import Nothing, UnavailableError
from benchmarks.capture.models import Training


class Wandb(Nothing):
    """`wandb.watch(log="all", log_freq=1)`, offline. Its helper process counts as well."""

    def __init__(self, training: Training, folder: Path) -> None:
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
        try:
            import wandb
        except ImportError as error:
            raise UnavailableError("wandb: not installed") from error
        self.run = wandb.init(project="benchmark", dir=str(folder))
        self.run.watch(training.model, log="all", log_freq=1)

    def after_step(self, loss: Tensor) -> None:
        self.run.log({"loss": loss.item()})

    def close(self) -> None:
        self.run.finish()


class TensorBoard(Nothing):
    """`add_histogram` of every parameter and gradient."""

    def __init__(self, training: Training, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UnavailableError("tensorboard: not installed") from error
        self.writer = SummaryWriter(str(folder))
        self.training = training
        self.step = 0

    def after_backward(self) -> None:
        for name, parameter in self.training.model.named_parameters():
            self.writer.add_histogram(name, parameter, self.step)
            self.writer.add_histogram(f"{name}:gradient", parameter.grad, self.step)

    def after_step(self, loss: Tensor) -> None:
        self.writer.add_scalar("loss", loss, self.step)
        self.step += 1

    def close(self) -> None:
        self.writer.close()


class UnderflowOverflow(Nothing):
    """transformers' `DebugUnderflowOverflow`: extremes of all inputs, outputs and weights, in forward only."""

    def __init__(self, training: Training, _: Path) -> None:
        try:
            from transformers.debug_utils import DebugUnderflowOverflow
        except ImportError as error:
            raise UnavailableError("transformers: not installed") from error
        make: Any = DebugUnderflowOverflow  # it has no types
        self.debug = make(training.model)
