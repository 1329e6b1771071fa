"""Probes of activations, of the inputs of embeddings, and of labels.

Probes of channels: dead and saturated channels of activations, and sums of the channels of images.

A channel is *dead* where it is zero for every example of the step: no gradient flows back through it (Lu et al. 2019,
"Dying ReLU and Initialization"). It is *saturated* where it lies within one percent of a bound for every example: the
slope there is at most a twenty-fifth of its greatest for a sigmoid, for tanh a fiftieth (Glorot and Bengio 2010).
Micro-batches of a step are one: each pass counts the channels that were so in all passes up to it.

Units of an activation that are hardly ever active: counted by a threshold, over the examples of a step.

A rectifier is active where its output is above zero; a tanh or sigmoid where its input lies between two bounds. A unit is what
`watchstep.pytorch.probes.activations` calls a channel: a feature, or a channel of images with all their places. Micro-batches of a
step are one: each pass counts the examples of all passes up to it.

What share of the tokens that an embedding is given are padding, or one and the same.

    token_share = tokens that are one of the watched values / tokens
    top_token_share = occurrences of the most frequent token / tokens

Of longer inputs at most 4,096 tokens are looked at, evenly spaced: a share of them has a standard error below one percent. Tokens
that the probe ``token_count:TOKEN`` asks for are counted among all.

How often each class has been among the labels, over all batches that were looked at so far.

Labels are whole numbers, one for each example, 0 … 999; or zeros and ones in a floating-point type, as binary losses
take them. Negative whole numbers, with which losses are told to leave an example out, do not count. Labels that are
anything else (measured targets, tokens of longer sequences, masks) are no classes, and have no counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from watchstep.capture.config import (
    CHANNEL_SUM,
    INACTIVE_UNITS,
    INPUT_VARIANCE,
    MAX_CHANNELS,
    SATURATED_UNITS,
    TOKEN_COUNT,
    TOKENS,
    UNITS,
    ElementProbe,
    of_kind,
)
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Mode
from watchstep.pytorch.probes.staging import OnTheWay, views, wide_float

_IMAGES = 4


@dataclass(frozen=True)
class _Sums:
    """One row: a column for each probe and channel; NaN for channels that the images do not have."""

    sums: dict[str, OnTheWay]

    def collect(self) -> dict[str, Floats]:
        columns = {}
        for name, sums in self.sums.items():
            values = sums.numbers()
            for channel in range(MAX_CHANNELS):
                value = values[channel] if channel < len(values) else np.nan
                columns[f"{name}:{channel}"] = np.array([float(value)])
        return columns


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
            if -_IMAGES <= axis < _IMAGES and images.shape[axis] <= MAX_CHANNELS:
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
        values = output.detach()
        channel = 1 if values.dim() >= _IMAGES else values.dim() - 1
        others = [place for place in range(values.dim()) if place != channel]
        so_far = [self._dead(values, others), self._saturated(values, others)]
        if self._pass == (step, mode):
            so_far = [_both(new, old) for new, old in zip(so_far, self._so_far, strict=True)]
        self._pass, self._so_far = (step, mode), so_far
        dead, saturated = (None if flags is None else OnTheWay(flags) for flags in so_far)
        return _Counts(values.shape[channel], dead, saturated)

    def _dead(self, values: Tensor, others: list[int]) -> Tensor | None:
        if not self._may_die:
            return None
        zero = values.amax(others) == 0
        return zero if self._never_negative else zero & (values.amin(others) == 0)

    def _saturated(self, values: Tensor, others: list[int]) -> Tensor | None:
        if self._bounds is None:
            return None
        low, high = self._bounds
        return (values - (low + high) / 2).abs().amin(others) >= (0.5 - _NEAR) * (high - low)


def _both(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    return new & old if new is not None and old is not None and new.shape == old.shape else new


def _bounds_of(module: nn.Module) -> tuple[float, float] | None:
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return float(module.min_val), float(module.max_val)
    return next((bounds for kind, bounds in _BOUNDED.items() if isinstance(module, kind)), None)


RECTIFIERS = (nn.ReLU, nn.ReLU6)
BOUNDED: dict[str, type[nn.Module]] = {"Tanh": nn.Tanh, "Sigmoid": nn.Sigmoid}

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


_MOST = 4096


@dataclass(frozen=True)
class _Shares:
    """One row."""

    columns: tuple[str, ...]
    figures: OnTheWay
    tokens: int

    def collect(self) -> dict[str, Floats]:
        values = self.figures.numbers()
        columns = {name: value.reshape(1) for name, value in zip(self.columns, values, strict=True)}
        return {**columns, TOKENS: np.array([float(self.tokens)])} if TOKEN_COUNT in self._kinds else columns

    @property
    def _kinds(self) -> set[str]:
        return {name.partition(":")[0] for name in self.columns}


class TokenProbe:
    """Looks at what one embedding is given.

    Attributes:
        applies: whether the module is one.
    """

    def __init__(self, module: nn.Module, values: tuple[int, ...], probes: Sequence[str]) -> None:
        """Watch a module.

        Args:
            module: an embedding, or any other.
            values: the watched tokens; the module's ``padding_idx`` where there are none, or 0 where it has none.
            probes: as configured.
        """
        self._shares = "token_shares" in probes
        self._counted = {probe.name: int(probe.arguments[0]) for probe in of_kind(probes, TOKEN_COUNT)}
        self.applies = isinstance(module, nn.Embedding) and (self._shares or bool(self._counted))
        padding = module.__dict__.get("padding_idx") if isinstance(module, nn.Embedding) else None
        self._values = values or (padding if isinstance(padding, int) else 0,)

    @torch.no_grad()
    def look(self, tokens: Tensor) -> _Shares | None:
        """Count.

        Args:
            tokens: whole numbers, of any shape.

        Returns:
            None where there are none.
        """
        if tokens.numel() == 0 or tokens.is_floating_point():
            return None
        names, figures = list(self._counted), [(tokens == value).sum() for value in self._counted.values()]
        if self._shares:
            names += ["token_share", "top_token_share"]
            figures += self._shares_of(tokens)
        return _Shares(
            tuple(names),
            OnTheWay(torch.stack([figure.to(wide_float(tokens.device)) for figure in figures])),
            tokens.numel(),
        )

    def _shares_of(self, tokens: Tensor) -> list[Tensor]:
        tokens_seen = views([tokens], _MOST)[0].long()
        watched = torch.stack([(tokens_seen == value).sum() for value in self._values]).sum()
        ordered = tokens_seen.sort().values
        run = torch.zeros_like(ordered)  # the number of the run of like tokens that each is in
        run[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
        runs = torch.zeros_like(ordered).scatter_add_(0, run, torch.ones_like(run))
        return [watched / tokens_seen.numel(), runs.amax() / tokens_seen.numel()]


MOST = 1000
_NO_CLASSES = (torch.bool, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class _Counted:
    """One row: all labels counted so far, how many classes they are, the largest, the smallest, and which that is."""

    counts: OnTheWay

    def collect(self) -> dict[str, Floats]:
        *by_class, others = self.counts.numbers()
        counts = np.array(by_class)
        seen = np.flatnonzero(counts)
        if others or not len(seen):
            figures = [np.nan] * 5
        else:
            rarest = seen[counts[seen].argmin()]
            figures = [counts.sum(), len(seen), counts.max(), counts[rarest], rarest]
        names = ("labels_counted", "classes", "largest_class", "smallest_class", "rarest_class")
        return {name: np.array([float(figure)]) for name, figure in zip(names, figures, strict=True)}


class ClassCounts:
    """Counts of one stream of labels, kept where they are: nothing waits for a device."""

    def __init__(self) -> None:
        self._so_far: Tensor | None = None

    @torch.no_grad()
    def look(self, labels: Tensor) -> _Counted | None:
        """Count a batch.

        Args:
            labels: shape (examples,) or (examples, 1).

        Returns:
            None where the labels can be no classes, by shape or dtype.
        """
        if labels.dtype in _NO_CLASSES or labels.dim() == 0 or labels.numel() != labels.shape[0]:
            return None
        given = labels.detach().reshape(-1)
        classes = 2 if given.is_floating_point() else MOST
        place = given.long()
        matches = (place == given) & (place >= 0) & (place < classes)
        counts = torch.zeros(MOST + 1, dtype=torch.int64, device=given.device)
        counts.scatter_add_(0, torch.where(matches, place, MOST), torch.ones_like(place))
        if not given.is_floating_point():
            counts[MOST] -= (place < 0).sum()
        if self._so_far is not None and self._so_far.device == counts.device:
            counts += self._so_far
        self._so_far = counts
        return _Counted(OnTheWay(counts))
