"""A loss that oscillates without settling."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals import constant_prediction
from watchstep_rules.signals.constant_prediction import LabelState
from watchstep_rules.signals.loss_series import NOTHING, LossSeries, first_steps, is_whole, loss_series
from watchstep_rules.signals.robust import medians, quantiles
from watchstep_rules.signals.tensor_selection import rows_where

_EVALUATIONS = 8
_STALE = "gradients:stale"


class OscillatingLossParams(Params):
    """Parameters of `OscillatingLoss`."""

    window: int = Field(40, ge=3, le=1000, description="Number of losses in the window.")
    swing: float = Field(
        0.75,
        gt=0,
        description="Ratio of the distance between the 10th and the 90th percentile to the median.",
    )
    above_labels: float = Field(
        2.0,
        ge=1,
        description="Ratio of the median to the loss of a constant prediction and to the first loss.",
    )
    above_first: float = Field(
        30.0, gt=1, description="Ratio of the median to the first loss if no labels are recorded."
    )
    alternation: float = Field(
        0.7, gt=0, lt=1, description="Magnitude of the autocorrelation of alternating losses."
    )


class LossOrigin(NamedTuple):
    """The past of a series: number of losses, the first loss (0 if negligible), the highest of the first ten, and whether any was below zero."""

    seen: int = 0
    first: float | None = None
    high: float = 0.0
    signed: bool = False


class OscillatingLossState(State):
    """State of `OscillatingLoss`: the origin of each series by ``name/mode``, the step of each loss's first row, labels, and stale gradients."""

    series: dict[str, LossOrigin] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)
    labels: LabelState = LabelState()
    kept: bool = False


class OscillatingLoss(Rule[OscillatingLossParams, OscillatingLossState]):
    """Fires when a loss oscillates in one of four ways that batch noise does not cause.

    *Overshoot*: over ``window`` training losses, ``p90 - p10 >= swing * median``, with at least a fifth as many crossings of the median as
    losses, while the median is ``above_labels`` times the loss of the best constant prediction and also that many times the first loss;
    without labels, ``above_first`` times the first loss. Batch noise is around the loss of the model, which is lower than before the first
    update. A loss that rises all the time diverges, which other rules report.

    *Alternation*: the autocorrelation of the window at lag 1 is below ``-alternation`` and at lag 2 above it, or at lags p/2 and p for p =
    4, 6, 8; the swing is a tenth of the median or more, and the median is above half of the highest of the first losses. Independent losses
    have correlations of ``1/sqrt(window)``; 0.7 is more than four times that. Two batches in fixed order also alternate, but their loss
    falls.

    *With a cause*: batches are sorted by label (a fifth or less of the label deviations is within batches), or gradients from before an
    optimizer step are included in those of the next. Then ``p90 - p10 >= swing * median`` suffices if the 90th percentile is at least half
    of the loss of the best constant prediction (of the kind of loss nearest to the first loss), or of the first loss without labels.

    *Validation*: of eight consecutive evaluations, all but one are turning points, each at least a quarter of their median from the previous
    one, and their median is at least a tenth of the first evaluation. The validation set does not change, so the model oscillates.

    In all cases the second half of the window swings at least half as far as the first (alternation: eight tenths), and its median is at
    most 1.5 times the first: a shrinking swing settles, a growing one explodes. Losses that were below zero, and one of several losses
    without the name of a total loss, are not reported. Gradient descent overshoots and alternates around a ravine above ``2 / curvature``
    (Cohen et al., ICLR 2021). SageMaker has no such rule; AutoTrainer (ICSE 2021) counts turns of the accuracy. Slow oscillations, as of
    cyclic learning rates and games, turn too rarely for these criteria unless a cause is recorded. A first loss below 1e-6 sets no
    threshold.
    """

    name = "oscillating_loss"
    summary = "the loss oscillates without settling"
    version = 2
    needs = Needs(
        collections=("losses", "labels", "metrics"),
        roles=("loss", "label", "metric"),
        probes=("class_counts", "stale_gradients"),
        about=("loss",),
    )
    merge = "watermark"
    usual_causes = (
        "The learning rate is too high: steps go from one side of a valley to the other.",
        "Batches are very small, or differ much from each other.",
        "Momentum is too high for the learning rate.",
    )
    what_to_try = (
        "Lower the learning rate by factors of three, or use a decay.",
        "Use larger batches, or accumulate gradients.",
        "Shuffle the data; clip gradients; lower the momentum.",
    )
    cannot_distinguish = (
        "Batches of alternating kinds on purpose, such as tasks or lengths, from overshooting steps.",
        "A loss that grew to thirty times its first value because its targets did, from one that overshoots.",
    )

    def lookback(self, params: OscillatingLossParams) -> int:
        """Return the length of the window."""
        return max(params.window, _EVALUATIONS)

    def evaluate(
        self,
        params: OscillatingLossParams,
        state: OscillatingLossState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[OscillatingLossState, list[Finding]]:
        """Evaluate each training and validation loss independently."""
        losses = loss_series(context, block, "train")
        evaluations = loss_series(context, block, "eval")
        labels, baselines = constant_prediction.follow_labels(state.labels, block)
        names = first_steps(state.names, losses)
        gradients = _stale_gradients(state.kept, block)
        last_origins, findings = dict(state.series), {}
        for series in [*losses, *evaluations]:
            origin = _origins(series, last_origins.get(series.key, LossOrigin()))
            last_origins[series.key] = origin[-1]
            if series.key.endswith("/eval"):
                width, swings = _EVALUATIONS, _evaluations(series, origin)
            else:
                width = params.window
                constant_losses = constant_prediction.at(baselines, series.steps)
                cause = constant_prediction.in_order_at(baselines, series.steps) | _stale_at(
                    gradients, series.steps
                )
                ends = _Ends.of(series, width)
                swings = _overshoots(params, series, origin, constant_losses, ends)
                swings |= _alternates(params, series, origin, ends)
                if cause.any():
                    swings |= cause & _swings_wide(params, series, origin, constant_losses, ends)
            swings &= is_whole(series, names) & ~np.array([row_origin.signed for row_origin in origin])
            if not swings.any():
                continue
            low, high = _ends(series, width)
            for index in map(int, np.flatnonzero(swings)):
                row = int(series.rows[index])
                message = f"{series.name} oscillated between {low[index]:.3g} and {high[index]:.3g} over {width} records"
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(high[index] - low[index]),
                    threshold=float(origin[index].first or 0.0),
                    message=message,
                )
        state = OscillatingLossState(series=last_origins, names=names, labels=labels, kept=gradients[-1][1])
        return state, [findings[row] for row in sorted(findings)]


def _origins(series: LossSeries, past: LossOrigin) -> list[LossOrigin]:
    """Return the origin at each row."""
    origins = []
    for value in series.values.tolist():
        finite = np.isfinite(value)
        past = LossOrigin(
            past.seen + 1,
            _as_first(value) if past.first is None and finite else past.first,
            max(past.high, value) if finite and past.seen < 10 else past.high,
            past.signed or value < 0,
        )
        origins.append(past)
    return origins


def _as_first(value: float) -> float:
    """Return the first loss, or 0 if it is nearly zero and so sets no threshold."""
    return value if abs(value) > NOTHING else 0.0


class _Ends(NamedTuple):
    """Median, and 10th and 90th percentile, of the last losses at each row, float64 of shape (n,)."""

    median: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, series: LossSeries, width: int) -> _Ends:
        return cls(series.trailing(width, medians), *_ends(series, width))


def _ends(series: LossSeries, width: int) -> tuple[Floats, Floats]:
    """Return the 10th and the 90th percentile of the last losses."""
    return (
        series.trailing(width, lambda windows: quantiles(windows, 0.1)),
        series.trailing(width, lambda windows: quantiles(windows, 0.9)),
    )


def _goes_on(windows: Floats, least: float) -> NDArray[np.bool_]:
    """Return whether the second half of each window swings at least ``least`` times as far as the first, and its level has not grown."""
    half = windows.shape[1] // 2
    halves = windows[:, :half], windows[:, -half:]
    first, second = (quantiles(part, 0.9) - quantiles(part, 0.1) for part in halves)
    before, after = (medians(part) for part in halves)
    continues: NDArray[np.bool_] = (second >= least * first) & (after <= 1.5 * before)
    return continues


def _climbs(windows: Floats) -> NDArray[np.bool_]:
    """Return whether losses correlate with their position by over 0.35: twice the correlation of 40 independent losses."""
    deviation = windows - windows.mean(axis=1, keepdims=True)
    position = np.arange(windows.shape[1]) - (windows.shape[1] - 1) / 2
    covariance = (deviation * position).sum(axis=1)
    climbs: NDArray[np.bool_] = covariance > 0.35 * np.sqrt((deviation**2).sum(axis=1) * (position**2).sum())
    return climbs


def _overshoots(
    params: OscillatingLossParams,
    series: LossSeries,
    origin: list[LossOrigin],
    constant_losses: list[tuple[float, ...] | None],
    ends: _Ends,
) -> NDArray[np.bool_]:
    def turns(windows: Floats) -> Floats:
        above = windows > medians(windows)[:, None]
        often = (above[:, 1:] != above[:, :-1]).sum(axis=1) >= params.window / 5
        return np.where(often & ~_climbs(windows) & _goes_on(windows, 0.5), 1.0, 0.0)

    median, low, high = ends
    first = np.array([np.nan if row_origin.first is None else row_origin.first for row_origin in origin])
    threshold = np.array(
        [
            params.above_labels * max(first_loss, losses[-1])
            if losses
            else params.above_first * first_loss or np.inf
            for first_loss, losses in zip(first.tolist(), constant_losses, strict=True)
        ]
    )
    swings: NDArray[np.bool_] = (high - low >= params.swing * median) & (median >= threshold) & (median > 0)
    if not swings.any():
        return swings
    overshoots: NDArray[np.bool_] = swings & (series.trailing(params.window, turns) == 1)
    return overshoots


def _swings_wide(
    params: OscillatingLossParams,
    series: LossSeries,
    origin: list[LossOrigin],
    constant_losses: list[tuple[float, ...] | None],
    ends: _Ends,
) -> NDArray[np.bool_]:
    median, low, high = ends
    goes_on = series.trailing(params.window, lambda windows: np.where(_goes_on(windows, 0.5), 1.0, 0.0)) == 1
    first = [np.nan if row_origin.first is None else row_origin.first for row_origin in origin]
    reference_loss = np.array(
        [
            min(losses, key=lambda loss: abs(loss - first_loss)) if losses else first_loss or np.inf
            for first_loss, losses in zip(first, constant_losses, strict=True)
        ]
    )
    wide: NDArray[np.bool_] = (high - low >= params.swing * median) & (high >= reference_loss / 2) & goes_on
    return wide


def _stale_gradients(before: bool, block: Block) -> list[tuple[int, bool]]:
    """Return the steps at which gradients become stale or fresh, starting with the state before the block."""
    is_metric = rows_where(block, _reports_stale_gradients)
    if not is_metric.any():
        return [(-1, before)]
    rows = np.flatnonzero(is_metric & (block.statistics.finite > 0))
    rows = rows[np.argsort(block.step[rows], kind="stable")]
    is_stale = (block.statistics.mean[rows] > 0).tolist()
    return [(-1, before), *zip(block.step[rows].tolist(), is_stale, strict=True)]


def _reports_stale_gradients(info: TensorInfo) -> bool:
    return _STALE in info.name and info.role == "metric"


def _stale_at(changes: list[tuple[int, bool]], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    indices = np.searchsorted([step for step, _ in changes], steps, side="right") - 1
    return np.array([changes[index][1] for index in indices.tolist()], np.bool_)


def _alternates(
    params: OscillatingLossParams, series: LossSeries, origin: list[LossOrigin], ends: _Ends
) -> NDArray[np.bool_]:
    def regular(windows: Floats) -> Floats:
        deviation = windows - windows.mean(axis=1, keepdims=True)
        variance = (deviation**2).mean(axis=1)
        alternates = np.zeros(len(windows), np.bool_)
        for period in (2, 4, 6, 8):
            if 2 * period > windows.shape[1]:
                break
            near, far = (
                (deviation[:, lag:] * deviation[:, :-lag]).mean(axis=1) / variance
                for lag in (period // 2, period)
            )
            alternates |= (near < -params.alternation) & (far > params.alternation)
        return np.where(alternates & _goes_on(windows, 0.8), 1.0, 0.0)

    median, low, high = ends
    early_high = np.array([row_origin.high for row_origin in origin])
    wide: NDArray[np.bool_] = (high - low >= 0.1 * median) & (median >= early_high / 2) & (median > 0)
    if not wide.any():
        return wide
    alternating: NDArray[np.bool_] = wide & (series.trailing(params.window, regular) == 1)
    return alternating


def _evaluations(series: LossSeries, origin: list[LossOrigin]) -> NDArray[np.bool_]:
    def turns(windows: Floats) -> Floats:
        moves = np.diff(windows, axis=1)
        turning = (np.sign(moves[:, 1:]) * np.sign(moves[:, :-1]) < 0).sum(axis=1)
        median = medians(windows)
        wide = (np.abs(moves) >= 0.25 * median[:, None]).sum(axis=1) >= _EVALUATIONS - 2
        swings = (turning >= _EVALUATIONS - 3) & wide & (median > 0) & _goes_on(windows, 0.5)
        return np.where(swings, median, np.nan)

    first = np.array([np.nan if row_origin.first is None else row_origin.first for row_origin in origin])
    swings_at: NDArray[np.bool_] = (series.trailing(_EVALUATIONS, turns) >= 0.1 * first) & (first != 0)
    return swings_at
