"""Units of an activation that are hardly ever active: counted by a threshold, over the examples of a step.

A rectifier is active where its output is above zero; a tanh or sigmoid where its input lies between two bounds. A unit is what
`watchstep.pytorch.probes.channels` calls a channel: a feature, or a channel of images with all their places. Micro-batches of a
step are one: each pass counts the examples of all passes up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from watchstep.capture.config import (
    INACTIVE_UNITS,
    INPUT_VARIANCE,
    SATURATED_UNITS,
    UNITS,
    ElementProbe,
    of_kind,
)
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Mode
from watchstep.pytorch.probes.staging import OnTheWay, wide_float

RECTIFIERS = (nn.ReLU, nn.ReLU6)
BOUNDED: dict[str, type[nn.Module]] = {"Tanh": nn.Tanh, "Sigmoid": nn.Sigmoid}
_IMAGES = 4

Active = Callable[[Tensor, Tensor], Tensor]
"""From input and output of the activation, which elements are active."""


@dataclass(frozen=True)
class _Test:
    """One threshold: the column, which elements are active, and the percentage below which a unit is not."""

    column: str
    active: Active
    percent: float
    needs_input: bool = False


@dataclass(frozen=True)
class _Activity:
    """One row: how many units there are, and how many of them fail each test."""

    units: int
    columns: tuple[str, ...]
    figures: OnTheWay

    def collect(self) -> dict[str, Floats]:
        values = dict(zip(self.columns, self.figures.numbers().tolist(), strict=True))
        return {name: np.array([value]) for name, value in {UNITS: float(self.units), **values}.items()}


class UnitActivity:
    """Looks at one activation, module or function.

    Attributes:
        applies: whether one of the probes is about such an activation.
    """

    def __init__(self, kind: str, probes: Sequence[str], *, in_place: bool = False) -> None:
        """Choose the tests.

        Args:
            kind: ``ReLU``, ``Tanh``, ``Sigmoid``, or anything else, to which no probe applies.
            probes: as configured.
            in_place: the output is written over the input, which is not there any more.
        """
        self._tests = _tests(kind, probes)
        self._variance = kind == "ReLU" and not in_place and bool(of_kind(probes, INPUT_VARIANCE))
        self.applies = bool(self._tests) or self._variance
        self._pass: tuple[int, Mode] | None = None
        self._active: list[Tensor] = []
        self._examples = 0

    @torch.no_grad()
    def look(self, given: Tensor | None, output: Tensor, step: int, mode: Mode) -> _Activity | None:
        """Count in one pass of a step.

        Args:
            given: what the activation was given, of the output's shape; None where that is not known.
            output: shape (examples, units), (examples, units, …) for images, (…, units) for sequences.
            step: of the run.
            mode: of the pass.

        Returns:
            None where the output has no examples, or no units.
        """
        if output.dim() < 2 or output.numel() == 0 or not output.is_floating_point():
            return None
        has_input = given is not None and given.shape == output.shape
        given = given if given is not None and has_input else output
        unit = 1 if output.dim() >= _IMAGES else output.dim() - 1
        others = [place for place in range(output.dim()) if place != unit]
        units = output.shape[unit]
        active = [test.active(given.detach(), output.detach()).sum(others) for test in self._tests]
        examples = output.numel() // units
        if self._pass == (step, mode) and all(
            new.shape == old.shape for new, old in zip(active, self._active, strict=True)
        ):
            active = [new + old for new, old in zip(active, self._active, strict=True)]
            examples += self._examples
        self._pass, self._active, self._examples = (step, mode), active, examples
        wide = wide_float(output.device)
        figures, columns = [], []
        for test, number in zip(self._tests, active, strict=True):
            if has_input or not test.needs_input:
                columns.append(test.column)
                figures.append((100.0 * number.to(wide) < test.percent * examples).sum().to(wide))
        if self._variance and has_input:
            columns.append(INPUT_VARIANCE)
            figures.append(given.detach().to(wide).var(correction=0))
        return _Activity(units, tuple(columns), OnTheWay(torch.stack(figures))) if figures else None


def activation_kind(module: nn.Module) -> str:
    """``ReLU``, ``Tanh`` or ``Sigmoid``; empty for other modules."""
    if isinstance(module, RECTIFIERS):
        return "ReLU"
    return next((kind for kind, bounded in BOUNDED.items() if isinstance(module, bounded)), "")


def _tests(kind: str, probes: Sequence[str]) -> list[_Test]:
    if kind == "ReLU":
        return [
            _Test(probe.name, _above_zero, float(probe.arguments[0]))
            for probe in of_kind(probes, INACTIVE_UNITS)
        ]
    return [_bounded(probe) for probe in of_kind(probes, SATURATED_UNITS) if probe.arguments[0] == kind]


def _bounded(probe: ElementProbe) -> _Test:
    _, low, high, percent = probe.arguments
    lowest, highest = float(low), float(high)
    return _Test(
        probe.name, lambda given, _: (given > lowest) & (given < highest), float(percent), needs_input=True
    )


def _above_zero(_: Tensor, output: Tensor) -> Tensor:
    return output > 0
