"""A training loss that would fall, but whose weights take steps too small to get anywhere."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.statistics import Floats
from watchstep_rules import constant_prediction
from watchstep_rules.constant_prediction import LabelState, against_labels
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at
from watchstep_rules.loss_progress import Beginning, Progress, lookback, progress
from watchstep_rules.loss_series import first_steps, is_whole, loss_series

_RECORDS = 5


class SlowConvergenceParams(Params):
    """Parameters of `SlowConvergence`."""

    patience: int = Field(100, ge=4, le=10_000, description="Losses over which progress is measured.")
    warmup: int = Field(10, ge=1, le=1000, description="First losses, whose median is where it began.")
    max_fall: float = Field(
        0.15, gt=0, lt=1, description="Share of its beginning by which a slow loss has fallen at most."
    )
    small_update: float = Field(
        5e-4, gt=0, description="Relative update of the fastest weight below which a flat loss is slow."
    )
    modest_update: float = Field(2e-3, gt=0, description="The same, for a loss that falls steadily.")


class SlowConvergenceState(State):
    """As of the loss; and of the fastest weight's relative updates the last five."""

    series: dict[str, Beginning] = Field(default_factory=dict)
    names: dict[str, int] = Field(default_factory=dict)
    labels: LabelState = LabelState()
    updates: tuple[float, ...] = ()


class SlowConvergence(Rule[SlowConvergenceParams, SlowConvergenceState]):
    """Fires when a training loss has hardly fallen over ``patience`` losses, and no weight takes steps that could change it.

    With ``update`` the largest ``rms(update) / rms(weight)`` of any weight matrix in a step, the median of the last five
    records; ``start``, ``level``, ``earlier`` and ``u`` as in `LossNotDecreasing`::

        level >= (1 - max_fall) * start                    it has hardly fallen
        0 < update < small_update                          and its weights hardly move,
        or update < modest_update and earlier - level > 2 u    or move little, and it falls steadily

    and it does not fall faster and faster (by more than half within half the patience), which is how a plateau ends:
    of a loss that falls steadily that is known after one and a half times the patience.
    Updates near 1e-3 of the weights are what trainings that work take (Karpathy, "A Recipe for Training Neural
    Networks", 2019, and his lectures on activations and gradients). At 5e-4 even a hundred steps in one direction
    change a weight by a twentieth. While the learning rate warms up, updates grow: where the newest are twice the
    oldest of the five, nothing is said. No update at all is another rule's.

    Left alone are the losses that `LossNotDecreasing` leaves alone, so a fine-tuning of a trained model, where labels or
    the loss's noise show it.
    """

    name = "slow_convergence"
    summary = "the training loss hardly falls, because weights take very small steps"
    needs = Needs(
        collections=("losses", "labels", "updates"),
        roles=("loss", "label", "update"),
        probes=("update_ratio", "class_counts"),
    )
    merge = "sealed"
    params_type = SlowConvergenceParams
    state_type = SlowConvergenceState

    def lookback(self, params: SlowConvergenceParams) -> int:
        """What the means reach over."""
        return lookback(params.warmup, params.patience)

    def evaluate(
        self,
        params: SlowConvergenceParams,
        state: SlowConvergenceState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SlowConvergenceState, list[Finding]]:
        """Judge each training loss by itself, with the updates of all workers."""
        losses = loss_series(context, block, "train")
        labels, baselines = constant_prediction.follow(state.labels, block)
        names = first_steps(state.names, losses)
        updates, recent = _updates(state.updates, block)
        kept, findings = dict(state.series), {}
        for series in losses:
            seen, kept[series.key] = progress(
                series, kept.get(series.key, Beginning()), params.warmup, params.patience
            )
            known = constant_prediction.at(baselines, series.steps)
            update = _at(recent, series.steps)
            slow = _slow(params, seen, known, update) & is_whole(series, names)
            for place in map(int, np.flatnonzero(slow)):
                message = (
                    f"{series.name} has gone from {seen.start[place]:.4g} to {seen.level[place]:.4g}, and no weight "
                    f"changes by more than {update[place]:.2g} of its size in a step"
                )
                row = int(series.rows[place])
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(seen.level[place]),
                    threshold=float((1 - params.max_fall) * seen.start[place]),
                    message=message,
                )
        state = SlowConvergenceState(series=kept, names=names, labels=labels, updates=updates)
        return state, [findings[row] for row in sorted(findings)]


def _slow(
    params: SlowConvergenceParams,
    seen: Progress,
    known: list[tuple[float, ...] | None],
    update: Floats,
) -> NDArray[np.bool_]:
    level, start = seen.level, seen.start
    said = against_labels(level, known)
    measure = ~seen.signed & (start > 0) & (level > 0) & said.told & (level >= 0.9 * said.lowest)
    clear = seen.noise <= np.where(said.lowest > 0, 0.4, 0.25) * level
    hardly = (start - level <= params.max_fall * start) & (level <= 1.5 * start)
    step = seen.earlier - level
    takes_off = (seen.before_that - seen.earlier > 0) & (step > 1.5 * (seen.before_that - seen.earlier))
    takes_off &= step > 2 * seen.uncertainty
    falls = step > 2 * seen.uncertainty
    tiny = (update > 0) & (update < params.small_update)
    modest = (update > 0) & (update < params.modest_update) & falls & np.isfinite(seen.before_that)
    return measure & clear & hardly & (tiny | modest) & ~takes_off


def _updates(kept: tuple[float, ...], block: Block) -> tuple[tuple[float, ...], list[tuple[int, float]]]:
    """The fastest weight's last relative updates, and at each step with a record what counts of them from then on."""
    wide = block.mask_of_tensors([info.role == "update" and len(info.shape) > 1 for info in block.catalogue])
    ratio = block.probes.get("update_ratio", np.full(len(block), np.nan))
    rows = np.flatnonzero(wide & np.isfinite(ratio))
    found = [(-1, _counting(kept))]
    steps, place = np.unique(block.step[rows], return_inverse=True)
    largest = np.zeros(len(steps))
    np.maximum.at(largest, place, ratio[rows])
    for step, fastest in zip(steps.tolist(), largest.tolist(), strict=True):
        kept = (*kept, fastest)[-_RECORDS:]
        found.append((step, _counting(kept)))
    return kept, found


def _counting(updates: tuple[float, ...]) -> float:
    """Their median; NaN where there are too few, or they grow."""
    if len(updates) < _RECORDS or max(updates[-2:]) > 2 * max(updates[:2]):
        return float("nan")
    return float(np.median(updates))


def _at(recent: list[tuple[int, float]], steps: NDArray[np.int64]) -> Floats:
    places = np.searchsorted([step for step, _ in recent], steps, side="right") - 1
    return np.array([recent[place][1] for place in places])
