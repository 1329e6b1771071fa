"""Baselines: the range of each statistic in earlier healthy runs of the same program.

A finished run is reduced to a `BaselineRun`. At least `MIN_RUNS` summaries make a `Baseline`, which `unlike_earlier_runs` compares
a later run with::

    finished run ──summarize_run──▶ RunSummary ─┐
    finished run ──summarize_run──▶ RunSummary ─┼─merge_summaries──▶ Baseline ──pinned to an attempt──▶ parameters of the rule
    finished run ──summarize_run──▶ RunSummary ─┘

Training is divided into phases whose length doubles: phase ``p`` holds the steps ``2**p - 1`` to ``2**(p + 1) - 2``. Statistics
change quickly at first and slowly later, so that a range per phase follows the usual drift of a training.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from watchstep.format.statistics import Floats
from watchstep.format.tensors import (
    ACTIVATIONS,
    BIASES,
    GRADIENTS,
    LOSSES,
    METRICS,
    UPDATES,
    WEIGHTS,
    TensorInfo,
)
from watchstep_rules.signals.loss_series import is_better_high

MIN_RUNS = 5
"""Fewest runs of a baseline. With three, one healthy run in ten left the range."""

MAX_RUNS = 10
"""Most runs of a baseline; the newest are taken, so that a baseline follows slow changes of a program."""

MAX_TENSORS = 500
MAX_PHASES = 40

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor with a baseline, which are those of NumPy and PyTorch. Baselines and what they are computed from are written by recorders, and
kept in memory by evaluators."""

_MARGIN_OCTAVES = 1.0
"""A value within a factor of two of the earlier values is never a deviation."""

_LINEAR_MARGIN = 0.5

_MIN_ELEMENTS = 16
"""Fewest elements of a tensor for which the rms is compared; with fewer, as in the bias of one output, the seed determines it."""

Statistic = Literal["mean", "rms"]
Shape = Annotated[tuple[int, ...], Field(max_length=MAX_DIMENSIONS)]
Span = Annotated[tuple[float, float], Field(description="The lowest and the highest value.")]

BASELINE_COLLECTIONS: tuple[tuple[str, Statistic], ...] = (
    (LOSSES, "mean"),
    (METRICS, "mean"),
    (GRADIENTS, "rms"),
    (ACTIVATIONS, "rms"),
    (WEIGHTS, "rms"),
    (BIASES, "rms"),
    (UPDATES, "rms"),
)
"""Collections with a baseline and their statistics. If there are too many tensors, the first collections take precedence."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BaselineTensor(_Model):
    """A tensor of one run.

    Attributes:
        shape: the shape of the tensor.
        statistic: the statistic that the spans describe.
        phases: the 5 % and the 95 % quantile of each phase; None if nothing was recorded.
    """

    shape: Shape
    statistic: Statistic
    phases: tuple[Span | None, ...] = Field(max_length=MAX_PHASES)


class BaselineRun(_Model):
    """The summary of a run.

    Attributes:
        tensors: the tensors, by name.
        architecture: as by `architecture_of`.
    """

    tensors: dict[str, BaselineTensor] = Field({}, max_length=MAX_TENSORS)
    architecture: str = ""


class TensorBaseline(_Model):
    """The range of a tensor's statistic.

    Attributes:
        shape: the shape of the tensor. The range does not apply to a tensor of another shape, which belongs to another model.
        statistic: the statistic that the range describes.
        phases: the lowest and the highest value of each phase that is not a deviation; None if fewer than `MIN_RUNS` runs recorded
            the tensor.
    """

    shape: Shape
    statistic: Statistic
    phases: tuple[Span | None, ...] = Field(max_length=MAX_PHASES)


class Baseline(_Model):
    """The ranges of all tensors.

    Attributes:
        runs: names of the runs in the baseline.
        tensors: the baselines of the tensors, by name.
    """

    runs: tuple[Annotated[str, Field(max_length=128)], ...] = Field((), max_length=MAX_RUNS)
    tensors: dict[str, TensorBaseline] = Field({}, max_length=MAX_TENSORS)

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the content."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def phase_of(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """The phase of each step, int64 of shape (n,); steps are not negative."""
    # frexp is exact, where log2 rounds near powers of two.
    exponents: NDArray[np.int64] = np.frexp((steps + 1).astype(np.float64))[1].astype(np.int64) - 1
    return np.minimum(exponents, MAX_PHASES - 1)


def statistic_of(info: TensorInfo) -> Statistic | None:
    """The statistic of a tensor in baselines; None if baselines do not include the tensor."""
    return next((statistic for name, statistic in BASELINE_COLLECTIONS if name in info.collections), None)


def architecture_of(infos: Sequence[TensorInfo]) -> str:
    """A hash of the names and shapes of a model's parameters."""
    parameters = {info.name: info.shape for info in infos if {WEIGHTS, BIASES} & set(info.collections)}
    return hashlib.sha256(repr(sorted(parameters.items())).encode()).hexdigest()


def merge_summaries(summaries: Mapping[str, BaselineRun]) -> Baseline | None:
    """The ranges of healthy runs, widened by a margin; None for fewer than `MIN_RUNS` runs.

    For positive statistics the margin is a factor: two, or the ratio of the highest to the lowest value if that is larger. For others it
    is half of the largest magnitude, or the difference between the highest and the lowest value if that is larger. Both are our choice:
    with five earlier runs, the new run is the sixth of a family, and the maximum of six differs from the maximum of five by less
    than their range.

    Args:
        summaries: summaries by the run's name, newest first; the first `MAX_RUNS` are used.
    """
    newest = dict(list(summaries.items())[:MAX_RUNS])
    if len(newest) < MIN_RUNS:
        return None
    names = dict.fromkeys(name for summary in newest.values() for name in summary.tensors)
    tensors = {}
    for name in list(names)[:MAX_TENSORS]:
        # The newest run determines the shape, because the program may have changed.
        own = [summary.tensors[name] for summary in newest.values() if name in summary.tensors]
        own = [
            tensor for tensor in own if (tensor.shape, tensor.statistic) == (own[0].shape, own[0].statistic)
        ]
        longest = max(len(tensor.phases) for tensor in own)
        phases = tuple(_range_of(own, phase) for phase in range(longest))
        if any(span is not None for span in phases):
            tensors[name] = TensorBaseline(shape=own[0].shape, statistic=own[0].statistic, phases=phases)
    return Baseline(runs=tuple(newest), tensors=tensors)


def _range_of(tensors: Sequence[BaselineTensor], phase: int) -> Span | None:
    spans = [tensor.phases[phase] for tensor in tensors if phase < len(tensor.phases)]
    spans = [span for span in spans if span is not None]
    if len(spans) < MIN_RUNS:
        return None
    low, high = min(span[0] for span in spans if span), max(span[1] for span in spans if span)
    if low > 0:
        octaves = math.log2(high) - math.log2(low)
        factor = 2.0 ** max(_MARGIN_OCTAVES, octaves)
        return _finite(low / factor), _finite(high * factor)
    margin = max(high - low, _LINEAR_MARGIN * max(abs(low), abs(high)))
    return _finite(low - margin), _finite(high + margin)


def _finite(value: float) -> float:
    return float(np.clip(value, -np.finfo(np.float64).max, np.finfo(np.float64).max))


@dataclass(frozen=True)
class CatalogueRanges:
    """The ranges of the tensors of a catalogue.

    Attributes:
        spans: float64 of shape (tensors, phases + 1, 2): the lowest and the highest value that is not a deviation. NaN if the baseline
            has none, as in the last phase, which represents all steps beyond the baseline.
        of_mean: whether the range describes the mean instead of the rms, bool of shape (tensors,).
        low_is_bad: whether a value below the range is a deviation, bool of shape (tensors,). Not of losses, nor of metrics for which
            higher is not known to be better.
        high_is_bad: the same for a value above the range. Not of metrics.
        scale: the largest magnitude of a tensor's ranges in any phase, float64 of shape (tensors,); 0 if there are none.
    """

    spans: Floats
    of_mean: NDArray[np.bool_]
    low_is_bad: NDArray[np.bool_]
    high_is_bad: NDArray[np.bool_]
    scale: Floats


def ranges_of(baseline: Baseline, catalogue: Sequence[TensorInfo]) -> CatalogueRanges:
    """The ranges of each tensor of a catalogue with the shape in the baseline, except for the rms of very small tensors."""
    phases = max((len(tensor.phases) for tensor in baseline.tensors.values()), default=0)
    spans = np.full((len(catalogue), phases + 1, 2), np.nan)
    of_mean = np.zeros(len(catalogue), np.bool_)
    for place, info in enumerate(catalogue):
        tensor = baseline.tensors.get(info.name)
        if tensor is None or tensor.shape != info.shape or tensor.statistic != statistic_of(info):
            continue
        if tensor.statistic == "rms" and math.prod(tensor.shape) < _MIN_ELEMENTS:
            continue
        of_mean[place] = tensor.statistic == "mean"
        for phase, span in enumerate(tensor.phases):
            if span is not None:
                spans[place, phase] = span
    scale = np.nan_to_num(np.abs(spans), nan=0.0).max(axis=(1, 2), initial=0.0)
    is_metric = np.array([METRICS in info.collections for info in catalogue], np.bool_)
    is_loss = np.array([LOSSES in info.collections for info in catalogue], np.bool_)
    rises = np.array([is_better_high(info) for info in catalogue], np.bool_)
    return CatalogueRanges(spans, of_mean, ~is_loss & (~is_metric | rises), ~is_metric | is_loss, scale)
