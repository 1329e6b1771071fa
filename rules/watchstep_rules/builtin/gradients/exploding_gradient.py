"""A gradient that grows far beyond all earlier gradients of its layer."""

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
from watchstep_rules.signals.loaded_weights import LOADED, loaded_steps
from watchstep_rules.signals.loss_series import NOTHING
from watchstep_rules.signals.robust import nanmedians
from watchstep_rules.signals.series import Flags, both, probe
from watchstep_rules.signals.tensor_selection import has_role, is_matrix_of, rows_where

_MOST = 0.5
"""Share of the weights that counts as "most weights"."""

_REPORTS = 3
"""Records that report an explosion that happened between two records."""

_ROWS_AT_ONCE = 4096
"""Rows whose windows are in memory at the same time."""


class ExplodingGradientParams(Params):
    """Parameters of `ExplodingGradient`."""

    growth: float = Field(100.0, gt=1, description="Tolerated ratio of a gradient's norm to the reference.")
    window: int = Field(
        20, ge=2, le=1000, description="Number of earlier records; their median norm is one reference."
    )
    warmup: int = Field(
        10,
        ge=1,
        le=1000,
        description="Number of first records; their largest norm is the other reference. They may grow by growth squared.",
    )
    loss_growth: float = Field(
        10.0,
        gt=1,
        description="Ratio of the loss to its first value at which the first records may grow only by growth.",
    )
    overwrites: float = Field(
        1.0,
        gt=0,
        description="Ratio of an update to its weight at which a step overwrites the weight.",
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
    """The largest norm of any layer so far, and its step."""

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
        loaded: whether the program has loaded weights since the last step with gradients.
    """

    series: dict[str, GradientHistory] = Field(default_factory=dict)
    modes: dict[str, ModeHistory] = Field(default_factory=dict)
    first_losses: dict[str, float] = Field(default_factory=dict)
    loaded: bool = False


class ExplodingGradient(Rule[ExplodingGradientParams, ExplodingGradientState]):
    """Fires when a layer's gradient outgrows its own past and the whole model's.

    Both must hold::

        l2(g) > growth * max(median of the layer's last window norms, its largest norm of the warm-up)
        l2(g) > the largest norm of any layer so far

    The criterion is scale-free: a loss in the thousands has large gradients, and only growth counts. The peak of the warm-up prevents
    false alarms of a converged training with tiny norms on one hard batch. The median follows layers that start small. The largest norm
    of the model allows a layer to start learning (zero-initialized branches, LoRA, broken symmetry). Growth by 100 is beyond what clipping
    at 1.0 or a restart of the learning rate produces (Pascanu et al., ICML 2013, on norm growth before divergence). A layer in its
    warm-up, in which norms settle, or without any gradient so far must instead exceed ``growth ** 2`` times the model's largest norm.

    A training that diverges from its first steps has no healthy past. In this case it suffices that some loss of the step is
    ``loss_growth`` times its first value, and the norm ``growth`` times the largest norm of the first step. When a training leaves a
    saddle point gradients grow as well, but the loss falls.

    NaN or infinity alone is not an explosion; it may come from a logarithm of zero or from the data, and other rules report it. It counts
    as an overflow of an explosion if earlier steps show one: directly after a finding, or if the loss was ``loss_growth`` times its first
    value when it was last finite, or if the last updates of most weights were at least as large as the weights (``overwrites``; working
    trainings have a thousandth, and SageMaker's WeightUpdateRatio considers 10 large). An explosion lasts until the loss recovers, because
    units that died in it have a gradient of zero.

    An explosion between two records is recognized if an update overwrote most weights, the loss is then ``loss_growth`` times its first
    value, and gradients have grown as much since the first step, whatever the gradients are at the next record: those of dead units are
    small, and the loss settles at that of a constant prediction. It is reported at the next three records, once per run. If gradients are
    small after an explosion, the value of the finding is the largest norm of any layer so far, with its step, and the threshold is the
    largest norm of the first step.
    """

    name = "exploding_gradient"
    version = 5
    summary = "a gradient's norm grows far beyond all earlier norms of its layer"
    needs = Needs(
        collections=("gradients", "losses", "updates"),
        roles=("gradient", "loss", "update"),
        probes=("update_ratio",),
        about=("gradient",),
        metrics=(LOADED,),
        evidence_rows=1,
    )
    merge = "watermark"
    usual_causes = (
        "The learning rate is too high for this part of the training.",
        "A recurrent or deep network multiplies gradients through many steps or layers.",
        "A batch contains an outlier, or targets that are not scaled.",
        "Initial weights are too large, or a normalization layer is missing.",
    )
    what_to_try = (
        "Clip gradients with torch.nn.utils.clip_grad_norm_ near their usual norm (Pascanu et al., 2013).",
        "Lower the learning rate, or warm it up over the first steps.",
        "Look at the batch of this step; scale inputs and targets.",
        "Add normalization or residual connections; initialize with the gains of torch.nn.init.",
    )
    cannot_distinguish = (
        "A loss scale that the program raises by 100 on purpose, or a task with far larger targets, from an explosion.",
        "A single outlier with a gradient of over a hundred times any before, from the first step of a divergence.",
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

        loads = loaded_steps(block)
        context, block = _gradients(context), _gradients(block)
        layers = _Layers.of(state, block)
        modes, series, loaded = dict(state.modes), state.series, state.loaded
        explosions: list[_Explosion] = []
        for step in _steps(block, _trailing_medians(context, block, params.window), signs):
            if loaded or (loads and loads[0] < step.number):
                loads, loaded = [load for load in loads if load >= step.number], False
                modes, series = _restored(modes, series)
                layers.exploded[:] = False
            modes[step.mode], of_step = _judge(params, step, modes.get(step.mode, ModeHistory()), layers)
            explosions += of_step
        explosions.sort(key=lambda explosion: explosion.row)
        after = ExplodingGradientState(
            series={**series, **layers.histories()},
            modes=signs.carried(modes),
            first_losses=first_losses,
            loaded=loaded or bool(loads),
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


def _restored(
    modes: dict[str, ModeHistory], series: dict[str, GradientHistory]
) -> tuple[dict[str, ModeHistory], dict[str, GradientHistory]]:
    """The histories after the program has loaded weights: what the old weights did has no aftermath."""
    return (
        {mode: past._replace(largest=min(past.largest, past.first or 0.0)) for mode, past in modes.items()},
        {name: past._replace(exploded=False) for name, past in series.items()},
    )


class _Signs(NamedTuple):
    """Signs of an explosion in losses and updates as of each step; `ModeHistory` describes them."""

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
        mode: the mode of the step.
        number: the number of the step.
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
        row: the row of the block.
        norm: the norm; infinity if an element or the norm is not finite.
        limit: the tolerated norm.
        diverges: whether the limit is that of a training that diverges from its first step.
        first: the largest norm of the first step.
        peak: the largest norm so far, including this step.
    """

    row: int
    norm: float
    limit: float
    diverges: bool
    first: float
    peak: LargestNorm


class _Report(NamedTuple):
    """The content of a finding."""

    value: float
    threshold: float
    message: str


def _judge(
    params: ExplodingGradientParams, step: _Step, past: ModeHistory, layers: _Layers
) -> tuple[ModeHistory, list[_Explosion]]:
    """Judge one step by all cases, and add it to the histories."""
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
    """Case 1: a norm far above the layer's own past, and above that of all layers.

    Infinity if there is no past to compare with.
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

    A training that diverges from its first steps has no healthy past. Infinity if the loss is not high.
    """
    return params.growth * first if first > 0 and step.loss_high else math.inf


def _overflowed(step: _Step) -> NDArray[np.bool_]:
    """Case 3: NaN or infinity, after steps whose loss or updates show an explosion."""
    return ~step.finite & (step.loss_high or step.overwritten)


def _continued(step: _Step, layers: _Layers) -> NDArray[np.bool_]:
    """Case 4: the layer's last record was a finding, and the loss has not recovered, or the gradient is not finite."""
    return layers.exploded[layers.index[step.rows]] & (~step.finite | step.loss_high)


def _report(name: str, explosion: _Explosion) -> _Report:
    """The report of a row; a norm below its limit is a finding because of an earlier explosion."""
    if explosion.norm == math.inf:
        return _report_overflow(name, explosion)
    if explosion.norm > explosion.limit:
        return _report_growth(name, explosion)
    if explosion.peak.norm > explosion.first:
        return _report_aftermath(name, explosion)
    return _report_after_overflow(name, explosion)


def _report_overflow(name: str, explosion: _Explosion) -> _Report:
    message = f"{name} has overflowed its number format, after steps that grew"
    return _Report(explosion.norm, explosion.limit, message)


def _report_growth(name: str, explosion: _Explosion) -> _Report:
    basis = "the first step, and the loss has risen" if explosion.diverges else "earlier records"
    message = f"norm of {name} is {explosion.norm:.3g}, over {explosion.limit:.3g} from {basis}"
    return _Report(explosion.norm, explosion.limit, message)


def _report_aftermath(name: str, explosion: _Explosion) -> _Report:
    peak = explosion.peak
    message = (
        f"gradients had a norm of {peak.norm:.3g} at step {peak.step}, and {explosion.first:.3g} at the first: they overwrote "
        f"weights, or the loss has not recovered. The norm of {name} is {explosion.norm:.3g} now"
    )
    return _Report(peak.norm, explosion.first, message)


def _report_after_overflow(name: str, explosion: _Explosion) -> _Report:
    message = f"norm of {name} is {explosion.norm:.3g}, after one that overflowed its number format"
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
    """The first value of each loss, and by mode whether some loss is many times its first value; NaN is ignored."""
    first_losses = dict(state.first_losses)
    loss_high = Flags({mode: past.loss_high for mode, past in state.modes.items()})
    rows = np.flatnonzero(rows_where(block, has_role, "loss") & (block.statistics.finite > 0))
    # The last step, and whether any of its losses is high.
    latest: dict[Mode, tuple[int, bool]] = {}
    for row in rows[np.argsort(block.step[rows], kind="stable")].tolist():
        mode, step, size = block.mode_name(row), int(block.step[row]), abs(float(block.statistics.mean[row]))
        first = first_losses.setdefault(f"{block.info(row).name}@{block.worker[row]}/{mode}", size)
        high = first > NOTHING and size >= params.loss_growth * first
        earlier_step, earlier_high = latest.get(mode, (-1, False))
        latest[mode] = step, high or (earlier_step == step and earlier_high)
        loss_high.record(mode, step, flag=latest[mode][1])
    return first_losses, loss_high


def _overwritten_weights(
    params: ExplodingGradientParams, state: ExplodingGradientState, block: Block
) -> Flags:
    """Whether the last finite updates of most weights were at least as large as the weights, by mode."""
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
        overwritten.record(block.mode_name(row), int(block.step[row]), flag=flag)
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
        medians[order[chunk] - len(context)] = nanmedians(windows)
    return medians
