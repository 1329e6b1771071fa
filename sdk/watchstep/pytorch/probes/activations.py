"""Probes of activations, of the inputs of embeddings, and of labels.

Channels. A channel of an activation is *dead* if it is zero for every example of the step: no gradient flows back through it (Lu
et al. 2019, "Dying ReLU and Initialization"). It is *saturated* if it is within one percent of a bound for every example: the
slope there is at most 1/25 of its maximum for a sigmoid, and 1/50 for tanh (Glorot and Bengio 2010). Micro-batches of a step are
combined: each pass counts the channels that were dead or saturated in all passes so far. Channels of images are summed.

Units. Rarely active units of an activation are counted by a threshold, over the examples of a step. A rectifier is active if its
output is above zero, a tanh or sigmoid if its input is between two bounds. A unit is a feature, or a channel of images with all
positions. Micro-batches of a step are combined: each pass counts the examples of all passes so far.

Tokens. For an embedding, the share of its input tokens that are padding or equal:

    token_share = tokens that are one of the watched values / tokens
    top_token_share = occurrences of the most frequent token / tokens

Of longer inputs at most 4,096 evenly spaced tokens are used: a share of them has a standard error below one percent. For the probe
``token_count:TOKEN`` all tokens are counted.

Classes. The frequency of each class among the labels, over all batches so far. Labels are whole numbers 0 … 999, one per example,
or zeros and ones in a floating-point type for binary losses. Negative whole numbers, by which losses ignore an example, are not
counted. Other labels (measured targets, tokens of longer sequences, masks) are not classes, and have no counts.

Examples. The share of an output's mean square that differs between examples, with the mean and variance over examples of each feature:

    example_spread = sum of variances / (sum of variances + sum of squared means)

It is 0 if all examples have the same output, and 1 if the features have the mean 0. It is computed in float32, with an error of about
1e-6. At most 64 examples and about 256 features of each are used, in training passes, at most once in ten steps.
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
from watchstep.pytorch import internals
from watchstep.pytorch.probes.staging import HostCopy, stacked, views, wide_float

_IMAGE_DIMENSIONS = 4


@dataclass(frozen=True)
class _Sums:
    """One row with a column per probe and channel; NaN for missing channels."""

    sums: dict[str, HostCopy]

    def collect(self) -> dict[str, Floats]:
        columns = {}
        for name, sums in self.sums.items():
            values = sums.numbers()
            for channel in range(MAX_CHANNELS):
                value = values[channel] if channel < len(values) else np.nan
                columns[f"{name}:{channel}"] = np.array([float(value)])
        return columns


class ChannelSums:
    """Sums the channels of a model's input images."""

    def __init__(self, probes: Sequence[str]) -> None:
        self._axes = {probe.name: int(probe.arguments[0]) for probe in of_kind(probes, CHANNEL_SUM)}

    @property
    def applies(self) -> bool:
        """Whether any such probe is wanted."""
        return bool(self._axes)

    @torch.no_grad()
    def measure(self, images: Tensor) -> _Sums | None:
        """Sum the channels of a batch.

        Args:
            images: Floating-point tensor of four dimensions.

        Returns:
            None if the tensor is not images, or has more than four channels.
        """
        if images.dim() != _IMAGE_DIMENSIONS or not images.is_floating_point() or not images.numel():
            return None
        sums = {}
        for name, axis in self._axes.items():
            if -_IMAGE_DIMENSIONS <= axis < _IMAGE_DIMENSIONS and images.shape[axis] <= MAX_CHANNELS:
                others = [place for place in range(_IMAGE_DIMENSIONS) if place != axis % _IMAGE_DIMENSIONS]
                sums[name] = HostCopy(images.detach().sum(others, dtype=wide_float(images.device)))
        return _Sums(sums) if sums else None


_MARGIN = 0.01  # distance from a bound that counts as saturated, as a share of the range
_ZEROED = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.Hardswish)
_NEVER_NEGATIVE = (nn.ReLU, nn.ReLU6)
_BOUNDED: dict[type[nn.Module], tuple[float, float]] = {
    nn.Sigmoid: (0.0, 1.0),
    nn.Hardsigmoid: (0.0, 1.0),
    nn.Tanh: (-1.0, 1.0),
    nn.Softsign: (-1.0, 1.0),
}


@dataclass(frozen=True)
class ChannelCounts:
    """Counts of outputs of one kind and shape, one row each.

    Attributes:
        outputs: number of outputs.
        channels: number of channels of each.
        dead, saturated: number of those channels, int64 of shape (outputs,); None if there are none by the kind of the module.
    """

    outputs: int
    channels: int
    dead: HostCopy | None
    saturated: HostCopy | None

    def collect(self) -> dict[str, Floats]:
        """Return the columns; NaN if not applicable."""
        missing = np.full(self.outputs, np.nan)
        return {
            "channels": np.full(self.outputs, float(self.channels)),
            "dead_channels": missing if self.dead is None else self.dead.numbers(),
            "saturated_channels": missing if self.saturated is None else self.saturated.numbers(),
        }


class ChannelProbe:
    """Counts dead and saturated channels of one module's output.

    Attributes:
        kind: Which channels can die, and the bounds of outputs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.kind = _Kind(
            isinstance(module, _ZEROED), isinstance(module, _NEVER_NEGATIVE), _bounds_of(module)
        )
        self._pass: tuple[int, Mode] | None = None
        self._flags: tuple[list[Tensor | None], int] = ([], 0)

    @property
    def applies(self) -> bool:
        """Whether channels of the module can die or saturate."""
        return self.kind.may_die or self.kind.bounds is not None

    def measure(self, output: Tensor, step: int, mode: Mode) -> ChannelCounts | None:
        """Count the channels of one output, as `count_channels`."""
        counts = count_channels([(self, output)], step, mode)
        return counts[0][1] if counts else None

    def keep(self, flags: list[Tensor | None], row: int, step: int, mode: Mode) -> None:
        """Keep flags for the next pass of the step, after they were reduced to those that earlier passes have, too.

        Args:
            flags: Which channels are dead and which are saturated in this pass, each of shape (outputs, channels); None if none can be.
            row: Row of this module.
            step: Step of the run.
            mode: Mode of the pass.
        """
        if self._pass == (step, mode):
            earlier, earlier_row = self._flags
            for new, old in zip(flags, earlier, strict=True):
                if new is not None and old is not None and new.shape[1:] == old.shape[1:]:
                    new[row] &= old[earlier_row]
        self._pass, self._flags = (step, mode), (flags, row)


@dataclass(frozen=True)
class _Kind:
    """Which channels of a module can die, and the bounds of its outputs if it has any."""

    may_die: bool
    never_negative: bool
    bounds: tuple[float, float] | None

    def flags(self, values: Tensor, others: list[int]) -> list[Tensor | None]:
        """Return which channels are dead and saturated, given the dimensions of examples and positions."""
        dead = saturated = None
        if self.may_die:
            dead = values.amax(others) == 0
            if not self.never_negative:
                dead &= values.amin(others) == 0
        if self.bounds is not None:
            low, high = self.bounds
            middle = (low + high) / 2
            distances = (values - middle if middle else values).abs()
            saturated = distances.amin(others) >= (0.5 - _MARGIN) * (high - low)
        return [dead, saturated]


@torch.no_grad()
def count_channels(
    outputs: Sequence[tuple[ChannelProbe, Tensor]], step: int, mode: Mode
) -> list[tuple[list[int], ChannelCounts]]:
    """Count the channels of several modules in one pass of a step. Outputs of one kind and shape are counted together.

    Args:
        outputs: Probe and output of each module. An output has shape (examples, channels), (examples, channels, …) for images, (…, channels)
            for sequences.
        step: Step of the run.
        mode: Mode of the pass.

    Returns:
        The places of outputs of one kind and shape, with their counts. Outputs without examples or channels have none.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, (probe, output) in enumerate(outputs):
        if output.dim() >= 2 and output.numel() and output.is_floating_point():
            key = probe.kind, output.shape, output.dtype, output.device
            alike.setdefault(key, []).append(place)
    counts = []
    for places in alike.values():
        probe, first = outputs[places[0]]
        values = torch.stack([outputs[place][1] for place in places]) if len(places) > 1 else first[None]
        channel = 2 if first.dim() >= _IMAGE_DIMENSIONS else first.dim()
        flags = probe.kind.flags(
            values.detach(), [axis for axis in range(1, values.dim()) if axis != channel]
        )
        for row, place in enumerate(places):
            outputs[place][0].keep(flags, row, step, mode)
        dead, saturated = (None if each is None else HostCopy(each.sum(1)) for each in flags)
        counts.append((places, ChannelCounts(len(places), values.shape[channel], dead, saturated)))
    return counts


def _bounds_of(module: nn.Module) -> tuple[float, float] | None:
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return float(module.min_val), float(module.max_val)
    return next((bounds for kind, bounds in _BOUNDED.items() if isinstance(module, kind)), None)


RECTIFIERS = (nn.ReLU, nn.ReLU6)
BOUNDED: dict[str, type[nn.Module]] = {"Tanh": nn.Tanh, "Sigmoid": nn.Sigmoid}

Active = Callable[[Tensor, Tensor], Tensor]
"""Returns which elements are active, from the input and output of the activation."""


@dataclass(frozen=True)
class _Test:
    """One threshold: the column, a function for active elements, and the percentage below which a unit is inactive."""

    column: str
    active: Active
    percent: float
    needs_input: bool = False


@dataclass(frozen=True)
class _Activity:
    """One row: the number of units, and the number of units that fail each test."""

    units: int
    columns: tuple[str, ...]
    figures: HostCopy

    def collect(self) -> dict[str, Floats]:
        values = dict(zip(self.columns, self.figures.numbers().tolist(), strict=True))
        return {name: np.array([value]) for name, value in {UNITS: float(self.units), **values}.items()}


class UnitActivity:
    """Counts inactive units of one activation module or function.

    Attributes:
        applies: Whether one of the probes applies to such an activation.
    """

    def __init__(self, kind: str, probes: Sequence[str], *, in_place: bool = False) -> None:
        """Select the tests.

        Args:
            kind: ``ReLU``, ``Tanh`` or ``Sigmoid``. No probe applies to other kinds.
            probes: The configured probes.
            in_place: Whether the output overwrites the input.
        """
        self._tests = _tests(kind, probes)
        self._variance = kind == "ReLU" and not in_place and bool(of_kind(probes, INPUT_VARIANCE))
        self.applies = bool(self._tests) or self._variance
        self._pass: tuple[int, Mode] | None = None
        self._active: list[Tensor] = []
        self._examples = 0

    @torch.no_grad()
    def measure(self, given: Tensor | None, output: Tensor, step: int, mode: Mode) -> _Activity | None:
        """Count the units of one pass of a step.

        Args:
            given: Input of the activation, with the shape of the output; None if it is unknown.
            output: Output of shape (examples, units), (examples, units, …) for images, (…, units) for sequences.
            step: Step of the run.
            mode: Mode of the pass.

        Returns:
            None if the output has no examples or no units.
        """
        if output.dim() < 2 or output.numel() == 0 or not output.is_floating_point():
            return None
        has_input = given is not None and given.shape == output.shape
        given = given if given is not None and has_input else output
        unit = 1 if output.dim() >= _IMAGE_DIMENSIONS else output.dim() - 1
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
        return _Activity(units, tuple(columns), HostCopy(torch.stack(figures))) if figures else None


def activation_kind(module: nn.Module) -> str:
    """Return ``ReLU``, ``Tanh`` or ``Sigmoid``; empty for other modules."""
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


_LEAST_EXAMPLES, _MOST_EXAMPLES, _MOST_FEATURES = 8, 64, 256
_MOST_ENDS = 16
_STEPS_BETWEEN = 10


@dataclass(frozen=True)
class _Spread:
    """One row: the sum of squared means over features, and the sum of squares over examples and features."""

    examples: int
    sums: HostCopy

    def collect(self) -> dict[str, Floats]:
        of_means, of_all = self.sums.numbers()
        share = 1 - self.examples * of_means / of_all if 0 < of_all < np.inf else np.nan
        return {"example_spread": np.array([np.maximum(share, 0.0)])}


@torch.no_grad()
def spread_of_examples(values: Tensor) -> _Spread | None:
    """Measure how far examples differ.

    Args:
        values: Floating-point tensor of shape (examples, features, …).

    Returns:
        None for fewer than eight examples, without features, and for more than two dimensions that are not contiguous.
    """
    if values.dim() < 2 or len(values) < _LEAST_EXAMPLES or not values.numel():
        return None
    if not values.is_floating_point() or (values.dim() > 2 and not values.is_contiguous()):
        return None
    examples = values.detach()[:_MOST_EXAMPLES].flatten(1)
    if examples.shape[1] > _MOST_FEATURES:
        examples = examples[:, :: -(-examples.shape[1] // _MOST_FEATURES)]
    examples = examples.float()
    mean, every = examples.mean(0), examples.reshape(-1)
    return _Spread(len(examples), HostCopy(stacked([mean.dot(mean), every.dot(every)])))


class SpreadProbe:
    """Measures how far the examples of one layer's outputs differ, in training passes, at most once in ten steps."""

    def __init__(self) -> None:
        self._next = 0

    def measure(self, output: Tensor, step: int, mode: Mode) -> _Spread | None:
        """Measure one output, as `spread_of_examples`."""
        if mode != "train" or step < self._next:
            return None
        self._next = step + _STEPS_BETWEEN
        return spread_of_examples(output)


def ends_of_parts(model: nn.Module) -> set[int]:
    """Return the ids of the first and last linear layer of each part of a model: of the first and last eight, if there are more.

    Parts are the modules that the model consists of, or those of its only module, as of a wrapper.
    """
    parts = [model]
    while len(parts) == 1 and (inner := _inside(parts[0])):
        parts = inner
    ends: list[int] = []
    for part in parts:
        linear = [id(each) for each in part.modules() if isinstance(each, nn.Linear)]
        ends += dict.fromkeys([*linear[:1], *linear[-1:]])
    half = _MOST_ENDS // 2
    return set(ends if len(ends) <= _MOST_ENDS else [*ends[:half], *ends[-half:]])


def _inside(module: nn.Module) -> list[nn.Module]:
    return [child for child in internals.children_of(module).values() if child is not None]


_MAX_TOKENS = 4096


@dataclass(frozen=True)
class _Shares:
    """One row."""

    columns: tuple[str, ...]
    figures: HostCopy
    tokens: int

    def collect(self) -> dict[str, Floats]:
        values = self.figures.numbers()
        columns = {name: value.reshape(1) for name, value in zip(self.columns, values, strict=True)}
        return {**columns, TOKENS: np.array([float(self.tokens)])} if TOKEN_COUNT in self._kinds else columns

    @property
    def _kinds(self) -> set[str]:
        return {name.partition(":")[0] for name in self.columns}


class TokenProbe:
    """Counts input tokens of one embedding.

    Attributes:
        applies: Whether the module is an embedding and a probe is configured.
    """

    def __init__(self, module: nn.Module, values: tuple[int, ...], probes: Sequence[str]) -> None:
        """Create the probe of a module.

        Args:
            module: Any module.
            values: The watched tokens; if empty, the module's ``padding_idx``, by default 0.
            probes: The configured probes.
        """
        self._shares = "token_shares" in probes
        self._counted = {probe.name: int(probe.arguments[0]) for probe in of_kind(probes, TOKEN_COUNT)}
        self.applies = isinstance(module, nn.Embedding) and (self._shares or bool(self._counted))
        padding = module.__dict__.get("padding_idx") if isinstance(module, nn.Embedding) else None
        self._values = values or (padding if isinstance(padding, int) else 0,)

    @torch.no_grad()
    def measure(self, tokens: Tensor) -> _Shares | None:
        """Count the tokens of one input.

        Args:
            tokens: Integer tensor of any shape.

        Returns:
            None if there are no tokens.
        """
        if tokens.numel() == 0 or tokens.is_floating_point():
            return None
        names, figures = list(self._counted), [(tokens == value).sum() for value in self._counted.values()]
        if self._shares:
            names += ["token_share", "top_token_share"]
            figures += self._shares_of(tokens)
        return _Shares(
            tuple(names),
            HostCopy(torch.stack([figure.to(wide_float(tokens.device)) for figure in figures])),
            tokens.numel(),
        )

    def _shares_of(self, tokens: Tensor) -> list[Tensor]:
        sample = views([tokens], _MAX_TOKENS)[0].long()
        watched = torch.stack([(sample == value).sum() for value in self._values]).sum()
        ordered = sample.sort().values
        run = torch.zeros_like(ordered)  # index of the run of equal tokens that each token belongs to
        run[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
        runs = torch.zeros_like(ordered).scatter_add_(0, run, torch.ones_like(run))
        return [watched / sample.numel(), runs.amax() / sample.numel()]


MOST = 1000
_NON_CLASS_DTYPES = (torch.bool, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class _ClassFrequencies:
    """One row: the numbers of labels and classes so far, the largest and smallest class counts, and the rarest class."""

    counts: HostCopy

    def collect(self) -> dict[str, Floats]:
        *by_class, others = self.counts.numbers()
        counts = np.array(by_class)
        present = np.flatnonzero(counts)
        if others or not len(present):
            figures = [np.nan] * 5
        else:
            rarest = present[counts[present].argmin()]
            figures = [counts.sum(), len(present), counts.max(), counts[rarest], rarest]
        names = ("labels_counted", "classes", "largest_class", "smallest_class", "rarest_class")
        return {name: np.array([float(figure)]) for name, figure in zip(names, figures, strict=True)}


class ClassCounts:
    """Class counts of one stream of labels, on its device, so that nothing waits for the device."""

    def __init__(self) -> None:
        self._totals: Tensor | None = None

    @torch.no_grad()
    def measure(self, labels: Tensor) -> _ClassFrequencies | None:
        """Count the labels of a batch.

        Args:
            labels: Labels of shape (examples,) or (examples, 1).

        Returns:
            None if the labels cannot be classes because of their shape or dtype.
        """
        if labels.dtype in _NON_CLASS_DTYPES or labels.dim() == 0 or labels.numel() != labels.shape[0]:
            return None
        flat = labels.detach().reshape(-1)
        classes = 2 if flat.is_floating_point() else MOST
        place = flat.long()
        matches = (place == flat) & (place >= 0) & (place < classes)
        counts = torch.zeros(MOST + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, torch.where(matches, place, MOST), torch.ones_like(place))
        if not flat.is_floating_point():
            counts[MOST] -= (place < 0).sum()
        if self._totals is not None and self._totals.device == counts.device:
            counts += self._totals
        self._totals = counts
        return _ClassFrequencies(HostCopy(counts))
