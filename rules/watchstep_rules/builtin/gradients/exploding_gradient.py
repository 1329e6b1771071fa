"""A gradient that grows far beyond anything this layer has had."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, sort_key, together, view
from watchstep.format.statistics import Floats, l2
from watchstep.format.tensors import MODES, Mode
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_series import NOTHING
from watchstep_rules.signals.robust import medians_of_known
from watchstep_rules.signals.series import Flags, both, probe
from watchstep_rules.signals.tensor_selection import has_role, is_matrix_of, rows_where

_MOST = 0.5
"""Share of the weights from which on "most weights" holds."""

_REPORTS = 3
"""Records that report an explosion that happened between two records."""

_ROWS_AT_ONCE = 4096
"""Rows whose windows are in memory at the same time."""


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
    """The past of one layer's gradient on one worker and in one mode.

    Attributes:
        records: number of records so far, at most the warm-up.
        peak: largest norm of the warm-up, without findings.
        exploded: whether the last record was a finding.
    """

    records: int = 0
    peak: float = 0.0
    exploded: bool = False


class LargestNorm(NamedTuple):
    """A norm that no layer exceeded so far, and its step."""

    norm: float = 0.0
    step: int = 0


class ModeHistory(NamedTuple):
    """The past of all layers in one mode.

    Attributes:
        first: largest norm of the first step with gradients; None before it.
        largest: largest norm of any layer, without findings.
        peak: largest norm of any layer, with findings.
        loss_high: whether a loss was far above its first value when it was last recorded.
        overwritten: whether the last update of most weights was as large as the weights.
        wrecked: whether there was a step with both.
        reports_left: how many records still report an explosion that happened between two records.
    """

    first: float | None = None
    largest: float = 0.0
    peak: LargestNorm = LargestNorm()
    loss_high: bool = False
    overwritten: bool = False
    wrecked: bool = False
    reports_left: int = _REPORTS


class ExplodingGradientState(State):
    """The past of each series, and of each mode.

    Attributes:
        series: by ``tensor@worker/mode``.
        modes: by mode.
        first_losses: the first value of each loss, by ``loss@worker/mode``.
    """

    series: dict[str, GradientHistory] = Field(default_factory=dict)
    modes: dict[str, ModeHistory] = Field(default_factory=dict)
    first_losses: dict[str, float] = Field(default_factory=dict)


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
    version = 5
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

    def lookback(self, params: ExplodingGradientParams) -> int:
        """The window."""
        return params.window

    def evaluate(
        self,
        params: ExplodingGradientParams,
        state: ExplodingGradientState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[ExplodingGradientState, list[Finding]]:
        """Judge step by step, all layers of a step at once."""
        first_losses, loss_high = _high_losses(params, state, block)
        overwritten = _overwritten_weights(params, state, block)
        wrecked = both({mode: past.wrecked for mode, past in state.modes.items()}, loss_high, overwritten)
        signs = _Signs(loss_high, overwritten, wrecked)

        context, block = _gradients(context), _gradients(block)
        layers = _Layers.of(state, block)
        modes = dict(state.modes)
        explosions: list[_Explosion] = []
        for step in _steps(block, _trailing_medians(context, block, params.window), signs):
            modes[step.mode], found = _judge(params, step, modes.get(step.mode, ModeHistory()), layers)
            explosions += found
        explosions.sort(key=lambda explosion: explosion.row)
        after = ExplodingGradientState(
            series={**state.series, **layers.histories()},
            modes=signs.carried(modes),
            first_losses=first_losses,
        )
        return after, [self._finding(block, explosion) for explosion in explosions]

    def _finding(self, block: Block, explosion: _Explosion) -> Finding:
        report = _report(block.info(explosion.row).name, explosion)
        return finding_at(
            self.name,
            block,
            explosion.row,
            value=report.value,
            threshold=report.threshold,
            message=report.message,
        )


class _Signs(NamedTuple):
    """Signs of an explosion that losses and updates show, as of each step; `ModeHistory` says what they mean."""

    loss_high: Flags
    overwritten: Flags
    wrecked: Flags

    def carried(self, modes: dict[str, ModeHistory]) -> dict[str, ModeHistory]:
        """The histories with the signs of the last step of each mode."""
        return {
            mode: modes.get(mode, ModeHistory())._replace(
                loss_high=self.loss_high.last.get(mode, False),
                overwritten=self.overwritten.last.get(mode, False),
                wrecked=self.wrecked.last.get(mode, False),
            )
            for mode in sorted({*modes, *self.loss_high.last, *self.overwritten.last})
        }


class _Step(NamedTuple):
    """The gradients of one step in one mode, and the signs of an explosion at that step.

    Attributes:
        mode: of the step.
        number: of the step.
        rows: the rows of the block, shape (n,).
        norm: their norms.
        finite: whether all elements and the norm are finite.
        median: the median norm of each layer's last records, or NaN.
        loss_high: see `ModeHistory`.
        overwritten: see `ModeHistory`.
        wrecked: see `ModeHistory`.
    """

    mode: Mode
    number: int
    rows: NDArray[np.intp]
    norm: Floats
    finite: NDArray[np.bool_]
    median: Floats
    loss_high: bool
    overwritten: bool
    wrecked: bool

    def largest(self, rows: NDArray[np.bool_]) -> float:
        """The largest finite norm of some rows; 0 if there is none."""
        return float(np.where(self.finite & rows, self.norm, 0.0).max())


class _Explosion(NamedTuple):
    """A row with a finding.

    Attributes:
        row: of the block.
        norm: its norm; infinity if an element or the norm is not finite.
        limit: the norm it may have.
        diverges: whether the limit is that of a training that diverges from its first step.
        first: largest norm of the first step.
        peak: largest norm so far, with that of this step.
    """

    row: int
    norm: float
    limit: float
    diverges: bool
    first: float
    peak: LargestNorm


class _Report(NamedTuple):
    """What a finding says."""

    value: float
    threshold: float
    message: str


def _judge(
    params: ExplodingGradientParams, step: _Step, past: ModeHistory, layers: _Layers
) -> tuple[ModeHistory, list[_Explosion]]:
    """Judge one step by all cases; afterwards the histories include it."""
    all_rows = np.ones(len(step.rows), np.bool_)
    first = step.largest(all_rows) if past.first is None else past.first
    outgrown, diverged = _outgrown_limit(params, step, past, layers), _diverged_limit(params, step, first)
    limit = np.minimum(outgrown, diverged)
    grew = past.largest >= params.loss_growth * first > 0
    reports = grew and step.wrecked and past.reports_left > 0
    exploded = (
        (step.norm > limit)
        | _overflowed(step)
        | _continued(step, layers)
        | np.full(len(step.rows), reports)  # an explosion between two records
    )
    layers.add(params, step, exploded)
    peak = LargestNorm(step.largest(all_rows), step.number)
    after = past._replace(
        first=first,
        largest=max(past.largest, step.largest(~exploded)),
        peak=peak if peak.norm > past.peak.norm else past.peak,
        reports_left=past.reports_left - reports,
    )
    explosions = [
        _Explosion(
            row=int(step.rows[place]),
            norm=float(step.norm[place]) if step.finite[place] else math.inf,
            limit=float(limit[place]),
            diverges=bool(outgrown[place] > diverged),
            first=first,
            peak=after.peak,
        )
        for place in np.flatnonzero(exploded).tolist()
    ]
    return after, explosions


def _outgrown_limit(
    params: ExplodingGradientParams, step: _Step, past: ModeHistory, layers: _Layers
) -> Floats:
    """Case 1: a norm far above the layer's own past, and above all layers' past.

    Infinity where there is no past to compare with.
    """
    series = layers.index[step.rows]
    reference = np.fmax(layers.peak[series], step.median)
    no_past = (layers.records[series] < params.warmup) | (reference == 0)
    limit = np.where(
        no_past,
        params.growth * params.growth * past.largest,
        np.maximum(params.growth * reference, past.largest),
    )
    return np.where(limit > 0, limit, np.inf)


def _diverged_limit(params: ExplodingGradientParams, step: _Step, first: float) -> float:
    """Case 2: a norm far above those of the first step, while the loss is far above its first value.

    A training that diverges from its first steps has no sound past. Infinity where the loss is not high.
    """
    return params.growth * first if first > 0 and step.loss_high else math.inf


def _overflowed(step: _Step) -> NDArray[np.bool_]:
    """Case 3: NaN or infinity, after steps whose loss or updates show an explosion."""
    return ~step.finite & (step.loss_high or step.overwritten)


def _continued(step: _Step, layers: _Layers) -> NDArray[np.bool_]:
    """Case 4: the layer's last record was a finding, and the loss has not come back, or the gradient is not finite."""
    return layers.exploded[layers.index[step.rows]] & (~step.finite | step.loss_high)


def _report(name: str, explosion: _Explosion) -> _Report:
    """Say what the row itself shows; a norm below its limit is a finding for what happened before."""
    if explosion.norm == math.inf:
        return _report_overflow(name, explosion)
    if explosion.norm > explosion.limit:
        return _report_growth(name, explosion)
    if explosion.peak.norm > explosion.first:
        return _report_aftermath(name, explosion)
    return _report_after_overflow(name, explosion)


def _report_overflow(name: str, explosion: _Explosion) -> _Report:
    message = f"{name} has gone past what its number format holds, after steps that grew"
    return _Report(explosion.norm, explosion.limit, message)


def _report_growth(name: str, explosion: _Explosion) -> _Report:
    since = "the first step's, and the loss has risen" if explosion.diverges else "what the layer had before"
    message = f"norm of {name} is {explosion.norm:.3g}, over {explosion.limit:.3g}, from {since}"
    return _Report(explosion.norm, explosion.limit, message)


def _report_aftermath(name: str, explosion: _Explosion) -> _Report:
    peak = explosion.peak
    message = (
        f"gradients had a norm of {peak.norm:.3g} at step {peak.step}, against {explosion.first:.3g} at the first: they wrote "
        f"over weights, or the loss has not come back. That of {name} is {explosion.norm:.3g} now"
    )
    return _Report(peak.norm, explosion.first, message)


def _report_after_overflow(name: str, explosion: _Explosion) -> _Report:
    message = f"norm of {name} is {explosion.norm:.3g}, after one that its number format does not hold"
    return _Report(explosion.norm, explosion.limit, message)


@dataclass
class _Layers:
    """The histories of a block's series in columns; ``index`` is the entry of each row, the others are those of `GradientHistory`."""

    names: list[str]
    index: NDArray[np.intp]
    records: NDArray[np.int64]
    peak: Floats
    exploded: NDArray[np.bool_]

    @classmethod
    def of(cls, state: ExplodingGradientState, block: Block) -> _Layers:
        """The histories before the block."""
        _, first, index = np.unique(block.series_key(), return_index=True, return_inverse=True)
        names = [
            f"{block.catalogue[tensor].name}@{worker}/{MODES[mode]}"
            for tensor, worker, mode in zip(
                block.tensor[first].tolist(),
                block.worker[first].tolist(),
                block.mode[first].tolist(),
                strict=True,
            )
        ]
        histories = [state.series.get(name, GradientHistory()) for name in names]
        return cls(
            names,
            index,
            np.array([history.records for history in histories], np.int64),
            np.array([history.peak for history in histories], np.float64),
            np.array([history.exploded for history in histories], np.bool_),
        )

    def add(self, params: ExplodingGradientParams, step: _Step, exploded: NDArray[np.bool_]) -> None:
        """Include a step. A step has one row of each series, so that no index occurs twice."""
        series = self.index[step.rows]
        warming_up = self.records[series] < params.warmup
        raises_peak = warming_up & step.finite & ~exploded
        self.peak[series] = np.maximum(self.peak[series], np.where(raises_peak, step.norm, 0.0))
        self.records[series] += warming_up
        self.exploded[series] = exploded

    def histories(self) -> dict[str, GradientHistory]:
        """The histories by series."""
        columns = zip(self.records.tolist(), self.peak.tolist(), self.exploded.tolist(), strict=True)
        return dict(zip(self.names, (GradientHistory(*values) for values in columns), strict=True))


def _steps(block: Block, median: Floats, signs: _Signs) -> Iterator[_Step]:
    """The steps of each mode, ascending."""
    norm = l2(block.statistics)
    finite = (block.statistics.nonfinite == 0) & np.isfinite(norm)
    key = sort_key(block.step, block.mode)
    order = np.argsort(key, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        if not len(rows):
            continue
        mode, number = MODES[block.mode[rows[0]]], int(block.step[rows[0]])
        yield _Step(
            mode,
            number,
            rows,
            norm[rows],
            finite[rows],
            median[rows],
            loss_high=signs.loss_high.at(mode, number),
            overwritten=signs.overwritten.at(mode, number),
            wrecked=signs.wrecked.at(mode, number),
        )


def _gradients(block: Block) -> Block:
    return view(block, np.flatnonzero(rows_where(block, has_role, "gradient")))


def _high_losses(
    params: ExplodingGradientParams, state: ExplodingGradientState, block: Block
) -> tuple[dict[str, float], Flags]:
    """The first value of each loss, and by mode whether some loss is many times its first; a loss of NaN does not count."""
    first_losses = dict(state.first_losses)
    loss_high = Flags({mode: past.loss_high for mode, past in state.modes.items()})
    rows = np.flatnonzero(rows_where(block, has_role, "loss") & (block.statistics.finite > 0))
    latest: dict[
        Mode, tuple[int, bool]
    ] = {}  # the step that was read last, and whether any of its losses is high
    for row in rows[np.argsort(block.step[rows], kind="stable")].tolist():
        mode, step, size = block.mode_name(row), int(block.step[row]), abs(float(block.statistics.mean[row]))
        first = first_losses.setdefault(f"{block.info(row).name}@{block.worker[row]}/{mode}", size)
        high = first > NOTHING and size >= params.loss_growth * first
        earlier_step, earlier_high = latest.get(mode, (-1, False))
        latest[mode] = step, high or (earlier_step == step and earlier_high)
        loss_high.see(mode, step, flag=latest[mode][1])
    return first_losses, loss_high


def _overwritten_weights(
    params: ExplodingGradientParams, state: ExplodingGradientState, block: Block
) -> Flags:
    """By mode, whether the last finite updates of most weights were at least as large as the weights."""
    overwritten = Flags({mode: past.overwritten for mode, past in state.modes.items()})
    ratio = probe(block, "update_ratio")
    is_update = rows_where(block, is_matrix_of, "update")
    rows = np.flatnonzero(is_update & np.isfinite(ratio) & (block.statistics.nonfinite == 0))
    _, first, group = np.unique(
        sort_key(block.step[rows], block.mode[rows]), return_index=True, return_inverse=True
    )
    large = np.bincount(group, weights=ratio[rows] >= params.overwrites, minlength=len(first))
    most = large / np.bincount(group, minlength=len(first)) >= _MOST
    for row, flag in zip(rows[first].tolist(), most.tolist(), strict=True):
        overwritten.see(block.mode_name(row), int(block.step[row]), flag=flag)
    return overwritten


def _trailing_medians(context: Block, block: Block, window: int) -> Floats:
    """For each row of the block, the median norm of up to ``window`` finite rows of its series before it, or NaN."""
    rows = together(context, block)
    norm = np.where(rows.statistics.nonfinite == 0, l2(rows.statistics), np.nan)
    key = sort_key(rows.tensor, rows.worker, rows.mode)
    order = np.argsort(key, kind="stable")  # of a series, the rows of the context come first
    series_start = np.searchsorted(key[order], key[order])
    ordered = norm[order]
    of_block = np.flatnonzero(order >= len(context))
    medians = np.full(len(block), np.nan)
    for first in range(0, len(of_block), _ROWS_AT_ONCE):
        chunk = of_block[first : first + _ROWS_AT_ONCE]
        earlier = chunk[:, None] + np.arange(-window, 0)
        in_series = earlier >= series_start[chunk][:, None]
        windows = np.where(in_series, ordered[np.maximum(earlier, 0)], np.nan)
        medians[order[chunk] - len(context)] = medians_of_known(windows)
    return medians
