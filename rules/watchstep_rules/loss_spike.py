"""A training loss that has jumped far above where it began, and stays there."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.statistics import Floats
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures.loss_series import LossSeries, first_steps, is_whole, loss_series
from watchstep_rules.figures.robust import medians, robust_spread
from watchstep_rules.finding import Finding, finding_at

_FIRST = 10
_FALLS = 0.8


class LossSpikeParams(Params):
    """Parameters of `LossSpike`."""

    window: int = Field(50, ge=2, le=1000, description="Losses before the jump, whose median is the level.")
    lasting: int = Field(10, ge=1, le=1000, description="Losses in a row that are above; 1 for any spike.")
    exploded: int = Field(
        5, ge=1, le=1000, description="The same of a loss that is far above where it began."
    )
    deviations: float = Field(
        10.0, gt=0, description="Robust standard deviations by which they are above the level …"
    )
    rise: float = Field(2.0, gt=1, description="… which they also are so many times …")
    of_first: float = Field(
        1.0, ge=0, description="… and above by this share of where it began, or of its highest level since."
    )
    far: float = Field(10.0, gt=1, description="How many times where it began a loss is that has exploded.")


class Height(NamedTuple):
    """What is kept of a series: its first losses up to ten, the highest level since, and whether it was ever below zero."""

    first: tuple[float, ...] = ()
    level: float = 0.0
    signed: bool = False


class LossSpikeState(State):
    """Where each series began and how high it was, by ``name/mode``; the step of each loss's first row."""

    heights: dict[str, Height] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)


class LossSpike(Rule[LossSpikeParams, LossSpikeState]):
    """Fires when the last ``lasting`` training losses are all far above the level of the ``window`` before them, and do not fall.

    With ``level`` the median of the window, ``spread`` 1.4826 times the median of distances from it (which is the
    standard deviation, were they normal, and does not notice single outliers: Hampel 1974) and ``began`` the median of the first
    ten losses, or the highest level so far where that is more, each of the last losses is at least ``level`` plus the largest of::

        deviations * spread,    (rise - 1) * |level|,    of_first * |began|

    and the median of the newest third of them is at least 0.8 times that of the oldest. Of a loss that is ``far * began`` above, which has exploded,
    the last ``exploded`` are enough, whether they fall or not. A loss that was never below zero and is as far below its level
    has had its sign turned around.

    Large models are known for losses that jump within a few steps, after which some recover and some do not (Chowdhery
    et al., "PaLM", 2022, section 5.1; Zhang et al., "OPT", 2022, section 2.5); both restart from a checkpoint before the
    jump and leave out the batches that it happened at. A loss that comes back within ``lasting`` is left alone: one odd
    batch does that. ``lasting: 1`` tells of any. The share of the first loss leaves alone what happens close to zero.

    Of several losses only the one whose name says that it is the whole is judged.
    """

    name = "loss_spike"
    version = 2
    summary = "the training loss jumps far above its recent level and where it began, and stays there"
    needs = Needs(collections=("losses",), roles=("loss",))
    merge = "sealed"
    usual_causes = (
        "The learning rate is too high for where the training has come to.",
        "A batch of odd data drove the weights away: corrupted, unnormalised or wrongly labelled examples.",
        "Adam's second moments were small when large gradients came back.",
    )
    what_to_try = (
        "Restart from a checkpoint before the jump, with a lower rate or without the batches of these steps.",
        "Clip gradients by their norm.",
        "Lower Adam's beta2 (0.95) or raise its epsilon.",
    )
    cannot_distinguish = (
        "A learning rate that restarts, a new phase of a schedule, another loss under the same name or harder data on purpose, from a fault, if they raise the loss above where it began.",
        "Several losses of one program of which the name does not say which is the whole are not judged.",
    )
    params_type = LossSpikeParams
    state_type = LossSpikeState

    def lookback(self, params: LossSpikeParams) -> int:
        """The window and what is held against it."""
        return params.window + max(params.lasting, params.exploded) - 1

    def evaluate(
        self,
        params: LossSpikeParams,
        state: LossSpikeState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[LossSpikeState, list[Finding]]:
        """Judge each training loss by itself."""
        losses = loss_series(context, block, "train")
        names = first_steps(state.names, losses)
        heights, findings = dict(state.heights), {}
        for series in losses:
            level = _level(params, series, params.exploded)
            began, signed, heights[series.key] = _began(heights.get(series.key, Height()), series, level)
            if not _may_spike(params, series, began):
                continue
            soon = _spikes(params, series, params.exploded, began, signed)
            late = _spikes(params, series, params.lasting, began, signed)
            for spike, holds in ((soon, soon.far), (late, late.stays)):
                jumped = spike.jumped & holds
                for place in map(int, np.flatnonzero(jumped & is_whole(series, names))):
                    row = int(series.rows[place])
                    if row not in findings:
                        findings[row] = self._finding(params, block, series, place, spike)
        return LossSpikeState(heights=heights, names=names), [findings[row] for row in sorted(findings)]

    def _finding(
        self, params: LossSpikeParams, block: Block, series: LossSeries, place: int, spike: _Spikes
    ) -> Finding:
        nearest, level, above = (float(each[place]) for each in (spike.nearest, spike.level, spike.above))
        end, bar = ("lowest", level + above) if nearest > level else ("highest", level - above)
        message = (
            f"{series.name} is {series.values[place]:.4g}, the {end} of the last {spike.lasting} is {nearest:.4g}; the median "
            f"of the {params.window} before is {level:.4g}"
        )
        return finding_at(
            self.name, block, int(series.rows[place]), value=nearest, threshold=bar, message=message
        )


class _Spikes(NamedTuple):
    """Of the last losses at each row the one nearest to the level, the level before them, and how far above they must be.

    ``jumped``: they are so far above, or below; ``far``: they have exploded; ``stays``: they do not come back.
    """

    lasting: int
    nearest: Floats
    level: Floats
    above: Floats
    jumped: NDArray[np.bool_]
    far: NDArray[np.bool_]
    stays: NDArray[np.bool_]


def _may_spike(params: LossSpikeParams, series: LossSeries, began: Floats) -> bool:
    """Whether some losses are so high, or below zero: of a training that goes well none are, and there is no more to work out."""
    with np.errstate(invalid="ignore"):
        high = series.values >= params.of_first * began
    return bool(high.any()) or bool((series.values < 0).any()) or bool((series.before < 0).any())


def _level(params: LossSpikeParams, series: LossSeries, lasting: int) -> Floats:
    return series.trailing(params.window + lasting, lambda windows: medians(windows[:, : params.window]))


def _began(past: Height, series: LossSeries, level: Floats) -> tuple[Floats, NDArray[np.bool_], Height]:
    """At each row where the loss began or its highest level, NaN before that is known; and whether it was below zero before."""
    first, highest, signed = past
    began, was_signed = np.full(len(level), np.nan), np.zeros(len(level), np.bool_)
    start = abs(statistics.median(first)) if len(first) == _FIRST else math.nan
    for place, (value, middle) in enumerate(zip(series.values.tolist(), level.tolist(), strict=True)):
        if len(first) < _FIRST and math.isfinite(value):
            first = (*first, value)
            start = abs(statistics.median(first)) if len(first) == _FIRST else math.nan
        if math.isfinite(middle):
            highest = max(highest, abs(middle))
            signed = signed or middle < 0
        was_signed[place] = signed
        began[place] = max(start, highest)  # the start where it is not known: NaN comes first
    return began, was_signed, Height(first, highest, signed)


def _spikes(
    params: LossSpikeParams, series: LossSeries, lasting: int, began: Floats, signed: NDArray[np.bool_]
) -> _Spikes:
    width, third = params.window + lasting, max(1, lasting // 3)
    level = _level(params, series, lasting)
    spread = series.trailing(width, lambda windows: robust_spread(windows[:, : params.window]))
    lowest = series.trailing(width, lambda windows: windows[:, params.window :].min(axis=1))
    highest = series.trailing(width, lambda windows: windows[:, params.window :].max(axis=1))
    oldest = series.trailing(
        width, lambda windows: medians(windows[:, params.window : params.window + third])
    )
    newest = series.trailing(width, lambda windows: medians(windows[:, -third:]))
    above = np.maximum(
        np.maximum(params.deviations * spread, (params.rise - 1) * np.abs(level)), params.of_first * began
    )
    with np.errstate(invalid="ignore"):
        up = (lowest >= level + above) & (above > 0)
        below = (highest <= level - above) & (above > 0) & ~signed & (highest < 0)
        return _Spikes(
            lasting,
            np.where(below, highest, lowest),
            level,
            above,
            up | below,
            lowest >= params.far * began,
            below | (newest >= _FALLS * oldest),
        )
