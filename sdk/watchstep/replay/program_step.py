"""A recorded step, computed in a program that is started again: its inputs are given to the program's own loop."""

from __future__ import annotations

import functools
import sys

import torch
from torch import nn
from torch.optim import Optimizer

from watchstep.errors import ConfigError, WatchstepError
from watchstep.format.bundle import Bundle, open_bundle_file
from watchstep.platform.terminal_text import printable_lines
from watchstep.replay.recorded_step import RecordedStep
from watchstep.trace.redo import PassInputs, RecordedInputs


def inputs_of_file(path: str, model: nn.Module) -> RecordedInputs:
    """Return what the step of a bundle's file was computed from. Ends the program with exit code 2 if it does not fit: it was started for this step."""
    try:
        return recorded_inputs(open_bundle_file(path), model)
    except WatchstepError as error:
        sys.stderr.write(f"watchstep: {printable_lines(error)}\n")
        raise SystemExit(2) from None


def recorded_inputs(bundle: Bundle, model: nn.Module) -> RecordedInputs:
    """Return what a bundled step was computed from.

    Args:
        bundle: The bundle of the step.
        model: The model of the program, on its device.

    Raises:
        ConfigError: the model has other parameters or shapes than the recorded one, or a batch was lost.
        FormatError: the bundle is damaged.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    step = RecordedStep(bundle, device)
    step.check_model(model)
    numbers = range(len(bundle.document.micro_batches))
    # A trainer that fetches all batches of a step at its start has them in one pass.
    has_batches = all(map(step.has_batch, numbers))
    batches = [
        (step.batch(number), functools.partial(step.begin_micro_batch, number))
        for number in numbers
        if has_batches
    ]
    passes = [
        PassInputs(*arguments, functools.partial(step.set_pass, number))
        for number in numbers
        if (arguments := step.arguments(number)) is not None
    ]
    if not (batches or passes):
        raise ConfigError(
            f"bundle {bundle.name} has neither a batch nor arguments of the model",
            "use a bundle of another step",
        )
    losses = [loss for number in numbers for loss in step.loss_tensors(number)]

    def restore(optimizer: Optimizer) -> None:
        step.set_model(model)
        step.set_optimizer(optimizer)

    return RecordedInputs(bundle.document.step, batches, passes, losses, restore)
