"""A gradient that grows far beyond anything this layer has had."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, sort_key, together, view
from watchstep.format.statistics import Floats, l2
from watchstep.format.tensors import MODES, Mode
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.losses.loss_series import NOTHING
from watchstep_rules.signals.ranges.robust import medians_of_known
from watchstep_rules.signals.series import Flags, both
from watchstep_rules.signals.tensor_selection import has_role, is_matrix_of, rows_where

_MOST = 0.5
_SAID = 3
_ROWS_AT_ONCE = 4096


class ExplodingGradientParams(Params):
    """Parameters of `ExplodingGradient`."""

    growth: float = Field(100.0, gt=1, description="How many times the reference a gradient's norm may be.")
    window: int = Field(20, ge=2, le=1000, description="Earlier records whose median norm is one reference.")
    warmup: int = Field(
        10,
        ge=1,
        le=1000,
        description="First records, whose largest norm is the other; they may grow to growth squared.",
    )
    loss_growth: float = Field(
        10.0, gt=1, description="… or only to growth, where the loss is so many times its first value."
    )
    overwrites: float = Field(
        1.0,
        gt=0,
        description="Update over its weight, from which on a step writes over what the weight was.",
    )


class GradientHistory(NamedTuple):
    """What is kept of a series.

    Attributes:
        seen: records so far, at most the warm-up.
        peak: largest norm of the warm-up, findings left out.
        hit: whether the last record was a finding.
    """

    seen: int = 0
    peak: float = 0.0
    hit: bool = False


class LargestNorm(NamedTuple):
    """The largest norm of any layer so far, findings included, and its step."""

    norm: float = 0.0
    step: int = 0


class ExplodingGradientState(State):
    """The past of each series, by ``tensor@worker/mode``, and by mode the largest norm of any, findings left out.

    By mode also the largest norm of the first step, whether a loss was far above its first value when last seen, and
    whether most weights were written over by their last update, whether both were so at once, and at how many records that is
    still to be said; the height of the gradients; and by ``loss@worker/mode`` each loss's first value.
    """

    series: dict[str, GradientHistory] = Field(default_factory=dict)
    largest: dict[str, float] = Field(default_factory=dict)
    began: dict[str, float] = Field(default_factory=dict)
    losses: dict[str, float] = Field(default_factory=dict)
    risen: dict[str, bool] = Field(default_factory=dict)
    overwritten: dict[str, bool] = Field(default_factory=dict)
    wrecked: dict[str, bool] = Field(default_factory=dict)
    left: dict[str, int] = Field(default_factory=dict)
    height: dict[str, LargestNorm] = Field(default_factory=dict)


class ExplodingGradient(Rule[ExplodingGradientParams, ExplodingGradientState]):
    """Fires when a layer's gradient outgrows its own past and the whole model's.

    Both must hold::

        l2(g) > growth * max(median of the layer's last window norms, its largest norm of the warm-up)
        l2(g) > the largest norm of any layer so far

    The test is scale-free: a loss in the thousands has large gradients and is fine, what counts is growth. The
    warm-up's peak keeps a converged training, whose norms are tiny, from alarming on one hard batch; the median
    follows layers that start small; the model's largest lets a layer wake up (zero-initialised branches, LoRA,
    symmetry that breaks). Growth by 100 is past what clipping at 1.0 or a restart of the learning rate produces
    (Pascanu et al., ICML 2013, on norm growth before divergence). A layer in its warm-up, where norms settle, or
    without any gradient so far, must instead exceed ``growth ** 2`` times the model's largest.

    A training that diverges from its first steps is its own past. There it is enough that some loss of the step is
    ``loss_growth`` times its first value, and the norm ``growth`` times the largest of the first step: a saddle that
    is left behind makes gradients grow as well, but lets the loss fall.

    NaN or infinity alone is another rule's: a logarithm of zero, or what the data held. It is an explosion gone past
    what the number format holds where the steps before it show one: right after a finding, or where the loss was
    ``loss_growth`` times its first value when it was last a number, or where the last updates of most weights
    were at least as large as these (``overwrites``; trainings that work take a thousandth, and SageMaker's WeightUpdateRatio
    holds 10 for large). An explosion goes on until the loss comes back: units that it has killed have a gradient of zero.

    Most weights written over by an update, and then a loss of ``loss_growth`` times its first value, with gradients that have grown as
    much since the first step, is an explosion between two looks, whatever gradients are at the next: of units that it killed they are small, and the loss settles at what a
    constant gives. It is said at the next three records, once a run. Of gradients that are small after an explosion the finding's value is
    the largest norm of any layer since the beginning, with its step, held against the largest of the first step.
    """

    name = "exploding_gradient"
    version = 4
    summary = "a gradient's norm grows far beyond what its layer has had"
    needs = Needs(
        collections=("gradients", "losses", "updates"),
        roles=("gradient", "loss", "update"),
        probes=("update_ratio",),
        about=("gradient",),
        evidence_rows=1,
    )
    merge = "sealed"
    usual_causes = (
        "The learning rate is too high for this part of the training.",
        "A recurrent or deep network multiplies gradients through many steps or layers.",
        "A batch holds an outlier, or targets that are not scaled.",
        "Weights began too large, or a normalisation layer is missing.",
    )
    what_to_try = (
        "Clip gradients: torch.nn.utils.clip_grad_norm_ with a bound near their usual norm (Pascanu et al., 2013).",
        "Lower the learning rate, or warm it up over the first steps.",
        "Look at the batch of this step; scale inputs and targets.",
        "Add normalisation or residual connections; initialise by torch.nn.init's gains.",
    )
    cannot_distinguish = (
        "A loss whose scale the program raises a hundredfold on purpose, or a task with far larger targets, from an explosion.",
        "A single outlier among the examples whose gradient exceeds a hundred times any before, from the first step of a divergence.",
    )
    params_type = ExplodingGradientParams
    state_type = ExplodingGradientState

    def lookback(self, params: ExplodingGradientParams) -> int:
        """The window."""
        return params.window

    def evaluate(
        self,
        params: ExplodingGradientParams,
        state: ExplodingGradientState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[ExplodingGradientState, list[Finding]]:
        """Judge step by step, all layers of a step at once."""
        losses, risen = _risen(params, state, block)
        overwritten = _overwritten(params, state, block)
        wrecked = both(state.wrecked, risen, overwritten)
        context, block = _gradients(context), _gradients(block)
        past = _Past.of(state, block)
        held = block.statistics
        norm = l2(held)
        whole = (held.nonfinite == 0) & np.isfinite(norm)
        median = _trailing_medians(context, block, params.window)
        limit, hit = np.full(len(block), np.inf), np.zeros(len(block), np.bool_)
        diverges = np.zeros(len(block), np.bool_)
        heights: dict[int, LargestNorm] = {}
        for rows in _groups(sort_key(block.step, block.mode)):
            name = MODES[block.mode[rows[0]]]
            began = past.began.setdefault(name, float(np.where(whole[rows], norm[rows], 0.0).max()))
            limit[rows] = past.limits(params, name, rows, median[rows])
            here = int(block.step[rows[0]])
            away = risen.at(name, here)
            if began > 0 and away:
                diverges[rows] = limit[rows] > params.growth * began
                limit[rows] = np.minimum(limit[rows], params.growth * began)
            shown = away or overwritten.at(name, here)
            grew = past.largest.get(name, 0.0) >= params.loss_growth * began > 0
            left = past.left.setdefault(name, _SAID) if grew and wrecked.at(name, here) else 0
            past.left.update({name: left - 1} if left else {})
            step_of = _Step(name, rows, norm[rows], whole[rows], limit[rows], shown, away, left > 0)
            hit[rows] = past.follow(params, step_of)
            past.rise(name, here, float(step_of.numbers.max()))
            heights.update(dict.fromkeys(rows[hit[rows]].tolist(), past.height.get(name, LargestNorm())))
        findings = []
        for row in np.flatnonzero(hit).tolist():
            value, bar = float(norm[row]) if whole[row] else math.inf, float(limit[row])
            began, height = past.began[block.mode_name(row)], heights[row]
            after = math.isfinite(value) and value <= bar and height.norm > began
            findings.append(
                self._aftermath(block, row, value, height, began)
                if after
                else self._finding(block, row, value, bar, diverges=bool(diverges[row]))
            )
        return past.as_state(state, losses, (risen, overwritten, wrecked)), findings

    def _finding(self, block: Block, row: int, value: float, limit: float, *, diverges: bool) -> Finding:
        name = block.info(row).name
        if value == math.inf:
            message = f"{name} has gone past what its number format holds, after steps that grew"
        elif value <= limit:
            message = f"norm of {name} is {value:.3g}, after one that its number format does not hold"
        else:
            since = "the first step's, and the loss has risen" if diverges else "what the layer had before"
            message = f"norm of {name} is {value:.3g}, over {limit:.3g}, from {since}"
        return finding_at(self.name, block, row, value=value, threshold=limit, message=message)

    def _aftermath(self, block: Block, row: int, value: float, height: LargestNorm, began: float) -> Finding:
        message = (
            f"gradients had a norm of {height.norm:.3g} at step {height.step}, against {began:.3g} at the first: they wrote "
            f"over weights, or the loss has not come back. That of {block.info(row).name} is {value:.3g} now"
        )
        return finding_at(self.name, block, row, value=height.norm, threshold=began, message=message)


class _Step(NamedTuple):
    """The gradients of one step: the rows, their norms, whether these are numbers, and what they are held against.

    ``shown``: NaN is that of an explosion; ``away``: the loss is far above its first value; ``wrecked``: it was, after
    updates that wrote over most weights.
    """

    mode: str
    rows: NDArray[np.intp]
    norm: Floats
    whole: NDArray[np.bool_]
    limit: Floats
    shown: bool
    away: bool
    wrecked: bool

    @property
    def numbers(self) -> Floats:
        """The norms, zero for those that are none."""
        return np.where(self.whole, self.norm, 0.0)


@dataclass
class _Past:
    """The state in columns, one entry for each series of a block; ``series`` is the entry of each row."""

    names: list[str]
    series: NDArray[np.intp]
    seen: NDArray[np.int64]
    peak: Floats
    hit: NDArray[np.bool_]
    largest: dict[str, float]
    began: dict[str, float]
    left: dict[str, int]
    height: dict[str, LargestNorm]

    @classmethod
    def of(cls, state: ExplodingGradientState, block: Block) -> _Past:
        _, first, series = np.unique(block.series_key(), return_index=True, return_inverse=True)
        of = [block.catalogue[tensor].name for tensor in block.tensor[first].tolist()]
        where = zip(of, block.worker[first].tolist(), block.mode[first].tolist(), strict=True)
        names = [f"{name}@{worker}/{MODES[mode]}" for name, worker, mode in where]
        new = GradientHistory()
        held = [state.series.get(name, new) for name in names]
        return cls(
            names,
            series,
            np.array([past.seen for past in held], np.int64),
            np.array([past.peak for past in held], np.float64),
            np.array([past.hit for past in held], np.bool_),
            dict(state.largest),
            dict(state.began),
            dict(state.left),
            dict(state.height),
        )

    def limits(
        self, params: ExplodingGradientParams, mode: str, rows: NDArray[np.intp], median: Floats
    ) -> Floats:
        """What the norms of one step are held against; infinity where there is nothing to hold them against."""
        series, largest = self.series[rows], self.largest.get(mode, 0.0)
        reference = np.fmax(self.peak[series], median)
        fresh = (self.seen[series] < params.warmup) | (reference == 0)
        limit = np.where(
            fresh, params.growth * params.growth * largest, np.maximum(params.growth * reference, largest)
        )
        return np.where(limit > 0, limit, np.inf)

    def follow(self, params: ExplodingGradientParams, step: _Step) -> NDArray[np.bool_]:
        """Which rows of one step are findings; afterwards the step is past."""
        series, norm = self.series[step.rows], step.norm
        goes_on = self.hit[series] & (~step.whole | step.away)
        hit = (norm > step.limit) | (~step.whole & step.shown) | goes_on | step.wrecked
        calm = np.where(step.whole & ~hit, norm, 0.0)
        warming = self.seen[series] < params.warmup
        self.peak[series] = np.maximum(self.peak[series], np.where(warming, calm, 0.0))
        self.seen[series] += warming
        self.hit[series] = hit
        self.largest[step.mode] = max(self.largest.get(step.mode, 0.0), float(calm.max()))
        return hit

    def rise(self, mode: str, step: int, norm: float) -> None:
        """Keep the largest norm of a step if none was so large."""
        if norm > self.height.get(mode, LargestNorm()).norm:
            self.height[mode] = LargestNorm(norm, step)

    def as_state(
        self,
        before: ExplodingGradientState,
        losses: dict[str, float],
        flags: tuple[Flags, Flags, Flags],
    ) -> ExplodingGradientState:
        kept = zip(self.names, self.seen.tolist(), self.peak.tolist(), self.hit.tolist(), strict=True)
        risen, overwritten, wrecked = (each.last for each in flags)
        return ExplodingGradientState(
            series={**before.series, **{name: GradientHistory(*past) for name, *past in kept}},
            largest=self.largest,
            began=self.began,
            losses=losses,
            risen=risen,
            overwritten=overwritten,
            wrecked=wrecked,
            left=self.left,
            height=self.height,
        )


def _gradients(block: Block) -> Block:
    return view(block, np.flatnonzero(rows_where(block, has_role, "gradient")))


def _risen(
    params: ExplodingGradientParams, state: ExplodingGradientState, block: Block
) -> tuple[dict[str, float], Flags]:
    """The first value of each loss, and by mode whether some loss is many times that; a loss of NaN says nothing."""
    first, risen = dict(state.losses), Flags(state.risen)
    rows = np.flatnonzero(rows_where(block, has_role, "loss") & (block.statistics.finite > 0))
    now: dict[Mode, tuple[int, bool]] = {}
    for row in map(int, rows[np.argsort(block.step[rows], kind="stable")]):
        mode, step, size = block.mode_name(row), int(block.step[row]), abs(float(block.statistics.mean[row]))
        began = first.setdefault(f"{block.info(row).name}@{block.worker[row]}/{mode}", size)
        away = began > NOTHING and size >= params.loss_growth * began
        before = now.get(mode, (-1, False))
        now[mode] = (step, away or (before[0] == step and before[1]))
        risen.see(mode, now[mode][0], flag=now[mode][1])
    return first, risen


def _overwritten(params: ExplodingGradientParams, state: ExplodingGradientState, block: Block) -> Flags:
    """By mode, whether the last finite updates of most weights were as large as these."""
    flags = Flags(state.overwritten)
    wide = rows_where(block, is_matrix_of, "update")
    ratio = block.probes.get("update_ratio", np.full(len(block), np.nan))
    rows = np.flatnonzero(wide & np.isfinite(ratio) & (block.statistics.nonfinite == 0))
    step, mode = block.step[rows], block.mode[rows]
    _, first, place = np.unique(sort_key(step, mode), return_index=True, return_inverse=True)
    step, mode = step[first], mode[first]
    large = np.bincount(place, weights=ratio[rows] >= params.overwrites, minlength=len(step))
    share = large / np.bincount(place, minlength=len(step))
    for one, kind, most in zip(step.tolist(), mode.tolist(), (share >= _MOST).tolist(), strict=True):
        flags.see(MODES[kind], one, flag=most)
    return flags


def _groups(label: NDArray[np.int64]) -> list[NDArray[np.intp]]:
    """The places of each label, ascending, labels ascending."""
    order = np.argsort(label, kind="stable")
    return [rows for rows in np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(rows)]


def _trailing_medians(context: Block, block: Block, window: int) -> Floats:
    """For each row of the block, the median norm of up to ``window`` whole rows of its series before it, or NaN."""
    rows_of_both = together(context, block)
    held = rows_of_both.statistics
    norm = np.where(held.nonfinite == 0, l2(held), np.nan)
    key = sort_key(rows_of_both.tensor, rows_of_both.worker, rows_of_both.mode)
    order = np.argsort(key, kind="stable")  # a series' rows of the context come first
    starts = np.searchsorted(key[order], key[order])
    ordered = norm[order]
    judged = np.flatnonzero(order >= len(context))
    medians = np.full(len(block), np.nan)
    for first in range(0, len(judged), _ROWS_AT_ONCE):
        part = judged[first : first + _ROWS_AT_ONCE]
        before = part[:, None] + np.arange(-window, 0)
        windows = np.where(before >= starts[part][:, None], ordered[np.maximum(before, 0)], np.nan)
        medians[order[part] - len(context)] = medians_of_known(windows)
    return medians
