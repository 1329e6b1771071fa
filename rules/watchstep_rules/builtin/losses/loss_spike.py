"""A training loss that jumped far above its first values and stays there."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_series import NOTHING, LossSeries, first_steps, is_whole, loss_series
from watchstep_rules.signals.robust import medians, robust_spread

_FIRST = 10
_FALLS = 0.8
_FALLS_WITH_DIP = 0.9
_FALLEN = 0.25
"""Share of its first value by which a loss must have fallen for the fall to be its scale."""
_MAY_DIP = 10
"""Number of losses of which one may fall by half of the jump, as small batches cause."""
_CLIMB = 6
_CLIMB_SPREAD = 3.0
_CLIMB_SHARE = 0.8
"""Share of the earlier fall that a climb covers. Healthy adversarial losses and networks at the edge of stability climb over 0.5 to 0.8 and recover (decision 124)."""
_CLIMB_FACTOR = 1.3
_CLIMB_INVERSIONS = 2
"""Number of the 15 pairs of six losses that may fall; noise without a trend has so few in one window of 36."""
_TURNED = 2.0
"""Ratio of the distances below the level of a loss with a flipped sign and of the window before it; a loss that drifts below zero had covered most of the way (decision 124)."""
_TURNED_OUTLIERS = 2
"""Lowest losses of the window that are ignored, because a loss with a flipped sign grows from a small one."""


class LossSpikeParams(Params):
    """Parameters of `LossSpike`."""

    window: int = Field(
        50, ge=2, le=1000, description="Number of losses before the jump; their median is the level."
    )
    lasting: int = Field(
        10, ge=1, le=1000, description="Consecutive losses above the level; 1 to report any spike."
    )
    exploded: int = Field(
        5, ge=1, le=1000, description="Consecutive losses above the level if the loss has exploded."
    )
    deviations: float = Field(
        10.0, gt=0, description="Robust standard deviations by which the losses exceed the level."
    )
    rise: float = Field(2.0, gt=1, description="Ratio of the losses to the level.")
    of_first: float = Field(
        0.9,
        ge=0,
        description="Share of the earlier fall from the first losses, or from the highest level, by which the losses exceed the level.",
    )
    far: float = Field(
        10.0, gt=1, description="Ratio to the first losses by which a loss has risen that has exploded."
    )


class SpikeSeries(NamedTuple):
    """State of a series.

    Attributes:
        first: the first losses, up to ten.
        level: the highest absolute level since.
        signed: whether a level was ever below zero.
        negative: whether a loss was ever below zero by more than rounding.
        extremes: the lowest and the highest loss, without losses that may be part of a jump; None before the first.
    """

    first: tuple[float, ...] = ()
    level: float = 0.0
    signed: bool = False
    negative: bool = False
    extremes: tuple[float, float] | None = None


class LossSpikeState(State):
    """State of `LossSpike`: the past of each series, by ``name/mode``, and the step of each loss's first row."""

    heights: dict[str, SpikeSeries] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)


class LossSpike(Rule[LossSpikeParams, LossSpikeState]):
    """Fires when the last ``lasting`` training losses are all far above the level of the ``window`` before them, and do not fall.

    With ``level`` the median of the window, ``spread`` 1.4826 times the median distance from it (the standard deviation of normal values,
    insensitive to single outliers: Hampel 1974) and ``began`` the median of the first ten losses, or the highest level so far if that is
    higher, each of the last losses is at least ``level`` plus the larger of::

        deviations * spread,    of_first * (|began| - |level|)

    A loss with a floor (a contrastive loss, the entropy of a language) is therefore measured by what it has learned, not by its height.
    For a loss that has fallen by less than a quarter of its first value, or by less than ``deviations * spread``, each must be at least
    ``level`` plus the largest of::

        deviations * spread,    (rise - 1) * |level|,    of_first * |began|

    - One of ten losses may exceed the level by only half, as small batches cause. The median of the newest third of the losses is at least
      0.8 times that of the oldest third, or 0.9 times if one loss fell.
    - If a loss is ``far * began`` above, it has *exploded*, and the last ``exploded`` losses suffice, whether they fall or not.
    - A loss that *climbs* is reported earlier: the last six losses are all three spreads above the level, and above all losses of the
      window; the mean of the newer three is above the level by ``deviations * spread`` and by 0.8 of the earlier fall, and by 1.3 times as
      much as the mean of the older three; and at most two of the 15 pairs of the six do not rise. A loss climbs like this after its sign
      was flipped, or if updates have become too large.
    - The sign of a loss was flipped if it was never below zero and is as far below its level, and twice as far as all but two losses of
      the window.

    For a loss that was ever below zero (of an adversarial training, a policy gradient, a log likelihood) zero is not the best value. Its
    last losses must also exceed its highest loss by the range of all its losses, and climbs are not judged.

    Losses of large models can jump within a few steps, after which some recover and some do not (Chowdhery et al., "PaLM", 2022, section
    5.1; Zhang et al., "OPT", 2022, section 2.5); both papers restart from a checkpoint before the jump and skip the batches of the jump. A
    loss that recovers within ``lasting`` losses is not reported, because a single unusual batch causes that; ``lasting: 1`` reports any.
    The share of the first loss excludes jumps close to zero.

    Of several losses only the one with the name of a total loss is judged.
    """

    name = "loss_spike"
    version = 4
    summary = "the training loss jumps far above its recent level and its first values, and stays there"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "watermark"
    usual_causes = (
        "The learning rate is too high for this phase of the training.",
        "A batch of unusual data damaged the weights: corrupted, unnormalized or wrongly labeled examples.",
        "Adam's second moments were small when large gradients returned.",
    )
    what_to_try = (
        "Restart from a checkpoint before the jump, with a lower rate or without the batches of these steps.",
        "Clip gradients by their norm.",
        "Lower Adam's beta2 (0.95) or raise its epsilon.",
    )
    cannot_distinguish = (
        "A learning rate restart, a new phase of a schedule, another loss under the same name or harder data on purpose, from a fault, if they raise the loss above its first values.",
        "Several losses without the name of a total loss are not judged.",
    )

    def lookback(self, params: LossSpikeParams) -> int:
        """Return the number of losses in the window and after it."""
        return params.window + max(params.lasting, params.exploded, _CLIMB) - 1

    def evaluate(
        self, params: LossSpikeParams, state: LossSpikeState, context: Block, block: Block, now: int
    ) -> tuple[LossSpikeState, list[Finding]]:
        """Evaluate each training loss independently."""
        losses = loss_series(context, block, "train")
        names = first_steps(state.names, losses)
        heights, findings = dict(state.heights), {}
        for series in losses:
            level = _level(params, series, params.exploded)
            began, signed, height = _began(heights.get(series.key, SpikeSeries()), series, level)
            beyond, heights[series.key] = _beyond(params, height, series)
            if not _may_spike(params, series, began):
                continue
            past = _Past(began, signed, beyond)
            soon = _spikes(params, series, params.exploded, past)
            late = _spikes(params, series, params.lasting, past)
            climb = _climbs(params, series, past)
            for spike, jumped in (
                (soon, soon.jumped & soon.far),
                (late, late.jumped & late.stays),
                (climb, climb.jumped),
            ):
                for place in map(int, np.flatnonzero(jumped & is_whole(series, names))):
                    row = int(series.rows[place])
                    if row not in findings:
                        findings[row] = self._finding(params, block, series, place, spike)
        return LossSpikeState(heights=heights, names=names), [findings[row] for row in sorted(findings)]

    def _finding(
        self, params: LossSpikeParams, block: Block, series: LossSeries, place: int, spike: _Spikes
    ) -> Finding:
        nearest, level, above = (float(column[place]) for column in (spike.nearest, spike.level, spike.above))
        end, threshold = ("lowest", level + above) if nearest > level else ("highest", level - above)
        description = (
            f"mean of the last {_CLIMB // 2}, which climb,"
            if spike.climbs
            else f"{end}{' but one' if spike.one_dips[place] else ''} of the last {spike.lasting}"
        )
        message = (
            f"{series.name} is {series.values[place]:.4g}, the {description} is {nearest:.4g}; the median "
            f"of the {params.window} before is {level:.4g}"
        )
        return finding_at(
            self.name, block, int(series.rows[place]), value=nearest, threshold=threshold, message=message
        )


class _Past(NamedTuple):
    """The past of a series as of each row.

    Attributes:
        began: the first value of the loss, or its highest level; NaN before it is known.
        signed: whether a level was below zero before.
        beyond: the bound that a jump must exceed if a loss was below zero; minus infinity if none was, NaN before it is known.
    """

    began: Floats
    signed: NDArray[np.bool_]
    beyond: Floats


class _Spikes(NamedTuple):
    """Possible spikes at each row.

    Attributes:
        lasting: number of last losses.
        nearest: the last loss nearest to the level.
        level: the level before the last losses.
        above: the distance from the level that they must have.
        jumped: whether they are this far above, or below.
        far: whether they have exploded.
        stays: whether they do not return.
        one_dips: whether the lowest of them is ignored.
        climbs: whether the mean of the newer half is compared with the level, without ``far`` and ``stays``.
    """

    lasting: int
    nearest: Floats
    level: Floats
    above: Floats
    jumped: NDArray[np.bool_]
    far: NDArray[np.bool_]
    stays: NDArray[np.bool_]
    one_dips: NDArray[np.bool_]
    climbs: bool = False


def _may_spike(params: LossSpikeParams, series: LossSeries, began: Floats) -> bool:
    """Return whether some losses are high, or negative. In a healthy training none are, and nothing more is computed.

    The newest loss may be the one that dips, to half of the others.
    """
    with np.errstate(invalid="ignore"):
        high = series.values >= min(params.of_first / 2, _CLIMB_SHARE) * began
    return bool(high.any()) or bool((series.values < 0).any()) or bool((series.before < 0).any())


def _level(params: LossSpikeParams, series: LossSeries, lasting: int) -> Floats:
    return series.trailing(params.window + lasting, lambda windows: medians(windows[:, : params.window]))


def _began(
    past: SpikeSeries, series: LossSeries, level: Floats
) -> tuple[Floats, NDArray[np.bool_], SpikeSeries]:
    """Return the first value of the loss, or its highest level, at each row (NaN before it is known), and whether it was negative before."""
    first, highest, signed = past.first, past.level, past.signed
    began, was_signed = np.full(len(level), np.nan), np.zeros(len(level), np.bool_)
    start = abs(statistics.median(first)) if len(first) == _FIRST else math.nan
    for index, (value, middle) in enumerate(zip(series.values.tolist(), level.tolist(), strict=True)):
        if len(first) < _FIRST and math.isfinite(value):
            first = (*first, value)
            start = abs(statistics.median(first)) if len(first) == _FIRST else math.nan
        if math.isfinite(middle):
            highest = max(highest, abs(middle))
            signed = signed or middle < 0
        was_signed[index] = signed
        began[index] = max(start, highest)  # NaN while the start is unknown, because NaN is first
    return began, was_signed, past._replace(first=first, level=highest, signed=signed)


def _beyond(params: LossSpikeParams, past: SpikeSeries, series: LossSeries) -> tuple[Floats, SpikeSeries]:
    """Compute `_Past.beyond` of each row.

    The extremes are those of the whole run, because an adversarial loss may swing again as far as it did long ago, without the newest
    losses, which may be the jump.
    """
    longest = max(params.lasting, params.exploded)
    width = params.window + longest
    low = series.trailing(width, lambda windows: np.fmin.reduce(windows[:, :-longest], axis=1))
    high = series.trailing(width, lambda windows: np.fmax.reduce(windows[:, :-longest], axis=1))
    lowest, highest = past.extremes or (math.nan, math.nan)
    low, high = (
        np.fmin.accumulate(np.fmin(low, lowest)),
        np.fmax.accumulate(np.fmax(high, highest)),
    )
    negative = np.logical_or.accumulate(series.values < -NOTHING) | past.negative
    with np.errstate(invalid="ignore", over="ignore"):
        beyond = np.where(negative, high + (high - low), -np.inf)
    extremes = None if math.isnan(low[-1]) else (float(low[-1]), float(high[-1]))
    return beyond, past._replace(negative=bool(negative[-1]), extremes=extremes)


def _spikes(params: LossSpikeParams, series: LossSeries, lasting: int, past: _Past) -> _Spikes:
    width, third = params.window + lasting, max(1, lasting // 3)
    level = _level(params, series, lasting)
    spread = series.trailing(width, lambda windows: robust_spread(windows[:, : params.window]))
    lowest = series.trailing(width, lambda windows: windows[:, params.window :].min(axis=1))
    second = series.trailing(width, lambda windows: _second(windows[:, params.window :]))
    highest = series.trailing(width, lambda windows: windows[:, params.window :].max(axis=1))
    oldest = series.trailing(
        width, lambda windows: medians(windows[:, params.window : params.window + third])
    )
    newest = series.trailing(width, lambda windows: medians(windows[:, -third:]))
    noise, began = params.deviations * spread, past.began
    plain = np.maximum(np.maximum(noise, (params.rise - 1) * np.abs(level)), params.of_first * began)
    with np.errstate(invalid="ignore"):
        fallen = began - np.abs(level)
        has_fallen = (fallen >= _FALLEN * began) & (fallen >= noise)
        above = np.where(has_fallen, np.maximum(noise, params.of_first * fallen), plain)
        one_dips = (
            (lasting >= _MAY_DIP)
            & (lowest < level + above)
            & (lowest >= level + above / 2)
            & (second >= level + above)
        )
        nearest = np.where(one_dips, second, lowest)
        up = (nearest >= level + above) & (above > 0) & (nearest >= past.beyond)
        below = (highest <= level - plain) & (plain > 0) & ~past.signed & (highest < 0)
        if below.any():  # an adversarial loss may drift as far down
            usual = series.trailing(width, lambda windows: _lowest_usual(windows[:, : params.window]))
            below &= level - highest >= _TURNED * (level - usual)
        return _Spikes(
            lasting,
            np.where(below, highest, nearest),
            level,
            np.where(below, plain, above),
            up | below,
            nearest >= params.far * began,
            below | (newest >= np.where(one_dips, _FALLS_WITH_DIP, _FALLS) * oldest),
            one_dips & ~below,
        )


def _second(windows: Floats) -> Floats:
    """Return the second lowest value of each row, or the only one."""
    second: Floats = np.sort(windows, axis=1)[:, min(1, windows.shape[1] - 1)]
    return second


def _lowest_usual(windows: Floats) -> Floats:
    """Return the lowest value of each row, without outliers."""
    lowest: Floats = np.sort(windows, axis=1)[:, min(_TURNED_OUTLIERS, windows.shape[1] - 1)]
    return lowest


def _climbs(params: LossSpikeParams, series: LossSeries, past: _Past) -> _Spikes:
    """Find losses that climb at a growing rate, over a part of the earlier fall."""
    width, half = params.window + _CLIMB, _CLIMB // 2
    level = _level(params, series, _CLIMB)
    spread = series.trailing(width, lambda windows: robust_spread(windows[:, : params.window]))
    lowest = series.trailing(width, lambda windows: windows[:, params.window :].min(axis=1))
    older = series.trailing(width, lambda windows: windows[:, params.window : -half].mean(axis=1))
    newer = series.trailing(width, lambda windows: windows[:, -half:].mean(axis=1))
    highest = series.trailing(width, lambda windows: windows[:, : params.window].max(axis=1))
    falls = series.trailing(width, lambda windows: _inversions(windows[:, -_CLIMB:]))
    with np.errstate(invalid="ignore"):
        noise, fallen = params.deviations * spread, past.began - level
        above = np.maximum(noise, _CLIMB_SHARE * fallen)
        climbs = np.isneginf(past.beyond) & (level >= 0) & (newer > highest)
        climbs &= (fallen >= _FALLEN * past.began) & (fallen >= noise) & (fallen > 0)
        climbs &= (lowest > level + _CLIMB_SPREAD * spread) & (series.values >= level + above)
        climbs &= (
            (falls <= _CLIMB_INVERSIONS)
            & (newer >= level + above)
            & (newer - level >= _CLIMB_FACTOR * (older - level))
        )
    nowhere = np.zeros(len(level), np.bool_)
    return _Spikes(_CLIMB, newer, level, above, climbs, nowhere, nowhere, nowhere, climbs=True)


def _inversions(windows: Floats) -> Floats:
    """Count the pairs of each row that do not rise."""
    older, newer = np.triu_indices(windows.shape[1], k=1)
    inversions: Floats = (windows[:, newer] <= windows[:, older]).sum(axis=1).astype(np.float64)
    return inversions
