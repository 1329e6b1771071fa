"""Probes of channels: dead and saturated channels of activations, and sums of the channels of images.

A channel is *dead* where it is zero for every example of the step: no gradient flows back through it (Lu et al. 2019,
"Dying ReLU and Initialization"). It is *saturated* where it lies within one percent of a bound for every example: the
slope there is at most a twenty-fifth of its greatest for a sigmoid, for tanh a fiftieth (Glorot and Bengio 2010).
Micro-batches of a step are one: each pass counts the channels that were so in all passes up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from watchstep.capture.config import CHANNEL_SUM, MOST_CHANNELS, of_kind
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Mode
from watchstep.pytorch.probes.staging import OnTheWay, wide_float

_IMAGES = 4


@dataclass(frozen=True)
class _Sums:
    """One row: a column for each probe and channel; NaN for channels that the images do not have."""

    sums: dict[str, OnTheWay]

    def collect(self) -> dict[str, Floats]:
        found = {}
        for name, sums in self.sums.items():
            values = sums.numbers()
            for channel in range(MOST_CHANNELS):
                value = values[channel] if channel < len(values) else np.nan
                found[f"{name}:{channel}"] = np.array([float(value)])
        return found


class ChannelSums:
    """Looks at what a model is given."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._axes = {probe.name: int(probe.arguments[0]) for probe in of_kind(probes, CHANNEL_SUM)}

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._axes)

    @torch.no_grad()
    def look(self, images: Tensor) -> _Sums | None:
        """Add up a batch.

        Args:
            images: floats of four dimensions.

        Returns:
            None where they are no images, or have more than four channels.
        """
        if images.dim() != _IMAGES or not images.is_floating_point() or not images.numel():
            return None
        sums = {}
        for name, axis in self._axes.items():
            if -_IMAGES <= axis < _IMAGES and images.shape[axis] <= MOST_CHANNELS:
                others = [place for place in range(_IMAGES) if place != axis % _IMAGES]
                sums[name] = OnTheWay(images.detach().sum(others, dtype=wide_float(images.device)))
        return _Sums(sums) if sums else None


_NEAR = 0.01  # share of the range that counts as being at a bound
_ZEROED = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.Hardswish)
_NEVER_NEGATIVE = (nn.ReLU, nn.ReLU6)
_BOUNDED: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.Tanh: (-1.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
}


@dataclass(frozen=True)
class _Counts:
    """One row: how many channels there are, how many are dead, how many saturated; NaN for what cannot be."""

    channels: int
    dead: OnTheWay | None
    saturated: OnTheWay | None

    def collect(self) -> dict[str, Floats]:
        return {
            "channels": np.array([float(self.channels)]),
            "dead_channels": _number(self.dead),
            "saturated_channels": _number(self.saturated),
        }


def _number(flags: OnTheWay | None) -> Floats:
    return np.array([np.nan if flags is None else flags.numbers().sum()])


class ChannelProbe:
    """Counts the channels of one module's output."""

    def __init__(self, module: nn.Module) -> None:
        self._may_die = isinstance(module, _ZEROED)
        self._never_negative = isinstance(module, _NEVER_NEGATIVE)
        self._bounds = _bounds_of(module)
        self._pass: tuple[int, Mode] | None = None
        self._so_far: list[Tensor | None] = []

    @property
    def applies(self) -> bool:
        """Whether the module is one whose channels die or saturate."""
        return self._may_die or self._bounds is not None

    def look(self, output: Tensor, step: int, mode: Mode) -> _Counts | None:
        """Count in one pass of a step.

        Args:
            output: shape (examples, channels), (examples, channels, …) for images, (…, channels) for sequences.
            step: of the run.
            mode: of the pass.

        Returns:
            None where the output has no examples, or no channels.
        """
        if output.dim() < 2 or output.numel() == 0 or not output.is_floating_point():
            return None
        held = output.detach()
        channel = 1 if held.dim() >= _IMAGES else held.dim() - 1
        others = [place for place in range(held.dim()) if place != channel]
        found = [self._dead(held, others), self._saturated(held, others)]
        if self._pass == (step, mode):
            found = [_both(new, old) for new, old in zip(found, self._so_far, strict=True)]
        self._pass, self._so_far = (step, mode), found
        dead, saturated = (None if flags is None else OnTheWay(flags) for flags in found)
        return _Counts(held.shape[channel], dead, saturated)

    def _dead(self, held: Tensor, others: list[int]) -> Tensor | None:
        if not self._may_die:
            return None
        zero = held.amax(others) == 0
        return zero if self._never_negative else zero & (held.amin(others) == 0)

    def _saturated(self, held: Tensor, others: list[int]) -> Tensor | None:
        if self._bounds is None:
            return None
        low, high = self._bounds
        return (held - (low + high) / 2).abs().amin(others) >= (0.5 - _NEAR) * (high - low)


def _both(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    return new & old if new is not None and old is not None and new.shape == old.shape else new


def _bounds_of(module: nn.Module) -> tuple[float, float] | None:
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return float(module.min_val), float(module.max_val)
    return next((bounds for kind, bounds in _BOUNDED.items() if isinstance(module, kind)), None)
