"""A training loss that falls too slowly because weights take very small steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats, rms
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Advice, Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals import constant_prediction, loss_progress
from watchstep_rules.signals.constant_prediction import AgainstLabels, LabelState, against_labels
from watchstep_rules.signals.loss_progress import (
    Beginning,
    LossProgressColumns,
    RateChange,
    Rates,
    lookback,
    progress,
)
from watchstep_rules.signals.loss_series import (
    Trend,
    as_flags,
    first_steps,
    improvement,
    is_whole,
    loss_series,
)
from watchstep_rules.signals.tensor_selection import is_matrix_of, rows_where

_RECORDS = 5
_UNSCALED = 0.1
_STEADY = 0.05  # ratio of a loss's noise to its level; lower for a constant prediction, higher for a model that has learned


class SlowConvergenceParams(Params):
    """Parameters of `SlowConvergence`."""

    patience: int = Field(
        100, ge=4, le=10_000, description="Number of losses over which progress is measured."
    )
    warmup: int = Field(10, ge=1, le=1000, description="Number of first losses; their median is the start.")
    max_fall: float = Field(
        0.15, gt=0, lt=1, description="Largest fall of a slow loss, as a share of the start."
    )
    small_update: float = Field(
        5e-4, gt=0, description="Relative update of the fastest weight below which a flat loss is slow."
    )
    modest_update: float = Field(2e-3, gt=0, description="The same for a loss that falls steadily.")


class SlowConvergenceState(State):
    """State of `SlowConvergence`: that of `LossNotDecreasing`, and further fields.

    Attributes:
        updates: the last five relative updates of the fastest weight.
        inputs: root mean square of the inputs; 0 if it is not known.
        rates: learning rates.
    """

    series: dict[str, Beginning] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)
    labels: LabelState = LabelState()
    updates: tuple[float, ...] = ()
    inputs: float = 0.0
    others: dict[str, Trend] = Field(default_factory=dict)
    improved: int | None = None
    rates: Rates = Rates()


class SlowConvergence(Rule[SlowConvergenceParams, SlowConvergenceState]):
    """Fires when a training loss has hardly fallen over ``patience`` losses, and weights take very small steps.

    With ``update`` the largest ``rms(update) / rms(weight)`` of any weight matrix in a step, the median of the last five records, times the
    root mean square of the model's inputs if that is below 0.1 (which limits the change of the first layer's output); and ``start``,
    ``level``, ``earlier`` and ``u`` as in `LossNotDecreasing`::

        level >= (1 - max_fall) * start                    it has hardly fallen
        0 < update < small_update                          and its weights hardly move,
        or update < modest_update and earlier - level > 2 u    or move little, and it falls steadily

    and it does not fall at a growing rate (by more than half within half the patience), as at the end of a plateau; for a loss that falls
    steadily this is known after one and a half times the patience. Working trainings have updates near 1e-3 of the weights (Karpathy, "A
    Recipe for Training Neural Networks", 2019, and his lectures on activations and gradients). At 5e-4 even a hundred steps in one
    direction change a weight by a twentieth. While the learning rate warms up, updates grow: the rule does not fire if the newest of the
    five updates are twice the oldest. Missing updates are reported by `weight_not_updating`.

    The losses that `LossNotDecreasing` excludes are not reported, including fine-tuning of a trained model if labels show it: its loss is
    below that of the best constant prediction. A loss of an unknown function that is below it and hardly varies between batches is scaled,
    not learned. Without labels, an improved metric or validation loss counts as progress. An attempt that resumes a run is not judged.

    If a learning rate rose or fell by a factor of three or more from one value to the next within the last two patiences, the message and
    the advice name this change.
    """

    name = "slow_convergence"
    version = 2
    summary = "the training loss hardly falls, because weights take very small steps"
    needs = Needs(
        collections=("losses", "labels", "metrics", "updates", "inputs"),
        roles=("loss", "label", "metric", "update", "input"),
        probes=("update_ratio", "class_counts"),
        about=("loss",),
        evidence_rows=_RECORDS,
    )
    merge = "watermark"
    usual_causes = (
        "The learning rate is too low.",
        "A schedule lowers the learning rate too early, or its warm-up is too long.",
        "Gradients are scaled down: by a mean instead of a sum, by clipping, or by loss weights.",
    )
    what_to_try = (
        "Raise the learning rate by factors of three; updates near a thousandth of the weights are usual.",
        "Print the learning rate of the schedule at this step.",
        "Compare the clipping norm with the norm of the gradients.",
    )
    cannot_distinguish = (
        "Small steps of a fine-tuning on purpose, from small steps by mistake, if neither labels nor a metric show that the model is good.",
        "A schedule with a warm-up longer than the patience, from a rate that is too low.",
    )

    def lookback(self, params: SlowConvergenceParams) -> int:
        """Return the number of losses for the means."""
        return lookback(params.warmup, params.patience)

    def evaluate(
        self,
        params: SlowConvergenceParams,
        state: SlowConvergenceState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SlowConvergenceState, list[Finding]]:
        """Evaluate each training loss independently, with the updates of all workers."""
        losses = loss_series(context, block, "train")
        labels, baselines = constant_prediction.follow_labels(state.labels, block)
        names = first_steps(state.names, losses)
        updates, recent = _updates(state.updates, block)
        inputs, sizes = _inputs(state.inputs, block)
        others, improved = improvement(state.others, state.improved, context, block)
        rates, changes = loss_progress.follow_rates(state.rates, block)
        beginnings, findings = dict(state.series), {}
        for series in losses:
            columns, beginnings[series.key] = progress(
                series, beginnings.get(series.key, Beginning()), params.warmup, params.patience
            )
            labels_verdict = against_labels(
                columns.level,
                columns.mean_error,
                constant_prediction.at(baselines, series.steps),
                constant_prediction.least_at(baselines, series.steps),
                series.function,
            )
            size = _at(sizes, series.steps)
            update = _at(recent, series.steps) * np.where((size > 0) & (size < _UNSCALED), size, 1.0)
            slow = _slow(params, columns, labels_verdict, update, is_plain=bool(series.function))
            slow &= is_whole(series, names) & ~(
                np.isnan(labels_verdict.own) & as_flags(improved, series.steps)
            )
            for index in map(int, np.flatnonzero(slow)):
                message = (
                    f"{series.name} has gone from {columns.start[index]:.4g} to {columns.level[index]:.4g}, and no weight "
                    f"changes by more than {update[index]:.2g} of its size in a step"
                )
                row = int(series.rows[index])
                change = loss_progress.last_before(changes, int(series.steps[index]), 2 * params.patience)
                message += "" if change is None else change.words
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(columns.level[index]),
                    threshold=float((1 - params.max_fall) * columns.start[index]),
                    message=message,
                )
        state = SlowConvergenceState(
            series=beginnings,
            names=names,
            labels=labels,
            updates=updates,
            inputs=inputs,
            others=others,
            improved=improved,
            rates=rates,
        )
        return state, [findings[row] for row in sorted(findings)]

    def advice(self, finding: Finding) -> Advice:
        """Return the advice. A recorded abrupt change of the learning rate shortly before is the first cause."""
        usual, change = super().advice(finding), RateChange.parse(finding.message)
        if change is None:
            return usual
        values = f"from {change.before:.3g} to {change.after:.3g} at step {change.step} ({change.name})"
        if change.after < change.before:
            cause = f"The learning rate fell {values}: a schedule or the program lowered it too early."
            action = f"Look at what lowered the learning rate at step {change.step}, and keep {change.before:.3g} for longer."
            return Advice((cause, *usual.usual_causes[2:]), (action, *usual.what_to_try))
        cause = f"The learning rate rose {values}: large steps may have undone what was learned and left weights that are large relative to their updates."
        action = f"Look at what raised the learning rate at step {change.step}, and at losses and weights from that step on; go back to {change.before:.3g}."
        return Advice((cause, *usual.usual_causes), (action, *usual.what_to_try[1:]))


def _slow(
    params: SlowConvergenceParams,
    seen: LossProgressColumns,
    labels: AgainstLabels,
    update: Floats,
    *,
    is_plain: bool,
) -> NDArray[np.bool_]:
    level, start = seen.level, seen.start
    may_learn_more = np.isnan(labels.own) | (level >= 0.9 * labels.own)
    may_learn_more |= (seen.noise <= _STEADY * level) & (not is_plain)
    is_measurable = ~seen.signed & (start > 0) & (level > 0) & labels.told & may_learn_more
    clear = seen.noise <= np.where(labels.own > 0, 0.4, 0.25) * level
    hardly_falls = (start - level <= params.max_fall * start) & (level <= 1.5 * start)
    step = seen.earlier - level
    takes_off = (seen.before_that - seen.earlier > 0) & (step > 1.5 * (seen.before_that - seen.earlier))
    takes_off &= step > 2 * seen.uncertainty
    falls = step > 2 * seen.uncertainty
    tiny = (update > 0) & (update < params.small_update)
    modest = (update > 0) & (update < params.modest_update) & falls & np.isfinite(seen.before_that)
    return is_measurable & clear & hardly_falls & (tiny | modest) & ~takes_off


def _updates(kept: tuple[float, ...], block: Block) -> tuple[tuple[float, ...], list[tuple[int, float]]]:
    """Return the last relative updates of the fastest weight, and their relevant value from each step with a record."""
    wide = rows_where(block, is_matrix_of, "update")
    ratio = block.probes.get("update_ratio", np.full(len(block), np.nan))
    rows = np.flatnonzero(wide & np.isfinite(ratio))
    values = [(-1, _relevant_update(kept))]
    steps, index = np.unique(block.step[rows], return_inverse=True)
    largest = np.zeros(len(steps))
    np.maximum.at(largest, index, ratio[rows])
    for step, fastest in zip(steps.tolist(), largest.tolist(), strict=True):
        kept = (*kept, fastest)[-_RECORDS:]
        values.append((step, _relevant_update(kept)))
    return kept, values


def _inputs(kept: float, block: Block) -> tuple[float, list[tuple[int, float]]]:
    """Return the rms of a model's inputs, without token ids, from each step with a record."""
    measured = rows_where(block, _is_measured_input)
    if not measured.any():
        return kept, [(-1, kept)]
    rows = np.flatnonzero(measured & (block.statistics.finite > 0))
    steps, index = np.unique(block.step[rows], return_inverse=True)
    largest = np.zeros(len(steps))
    np.maximum.at(largest, index, rms(block.statistics)[rows])
    values = [(-1, kept), *zip(steps.tolist(), largest.tolist(), strict=True)]
    return values[-1][1], values


def _is_measured_input(info: TensorInfo) -> bool:
    return info.role == "input" and "float" in info.dtype


def _relevant_update(updates: tuple[float, ...]) -> float:
    """Return the median of the updates; NaN if there are too few, or if they grow."""
    if len(updates) < _RECORDS or max(updates[-2:]) > 2 * max(updates[:2]):
        return float("nan")
    return float(np.median(updates))


def _at(recent: list[tuple[int, float]], steps: NDArray[np.int64]) -> Floats:
    indices = np.searchsorted([step for step, _ in recent], steps, side="right") - 1
    return np.array([recent[index][1] for index in indices])
