"""A gradient that grows far beyond anything this layer has had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block, concatenate
from watchstep.derived import l2
from watchstep.statistics import Floats
from watchstep.tensors import MODES, Mode
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at


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


class Past(NamedTuple):
    """What is kept of a series.

    Attributes:
        seen: records so far, at most the warm-up.
        peak: largest norm of the warm-up, findings left out.
        hit: whether the last record was a finding.
    """

    seen: int = 0
    peak: float = 0.0
    hit: bool = False


class ExplodingGradientState(State):
    """The past of each series, by ``tensor@worker/mode``, and by mode the largest norm of any, findings left out.

    By mode also the largest norm of the first step; and by ``loss@worker/mode`` each loss's first value.
    """

    series: dict[str, Past] = Field(default_factory=dict)
    largest: dict[str, float] = Field(default_factory=dict)
    began: dict[str, float] = Field(default_factory=dict)
    losses: dict[str, float] = Field(default_factory=dict)


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

    NaN or infinity alone is another rule's; right after a finding it is the same explosion, gone past what the number
    format holds.
    """

    name = "exploding_gradient"
    version = 2
    summary = "a gradient's norm grows far beyond what its layer has had"
    needs = Needs(collections=("gradients", "losses"), roles=("gradient", "loss"))
    merge = "sealed"
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
        context, block = _gradients(context), _gradients(block)
        past = _Past.of(state, block)
        held = block.statistics
        norm = l2(held)
        whole = (held.nonfinite == 0) & np.isfinite(norm)
        median = _trailing_medians(context, block, params.window)
        limit, hit = np.full(len(block), np.inf), np.zeros(len(block), np.bool_)
        diverges = np.zeros(len(block), np.bool_)
        (_, mode), step = np.unique(np.stack([block.step, block.mode]), axis=1, return_inverse=True)
        for rows in _groups(step.ravel()):
            name = MODES[mode[step.ravel()[rows[0]]]]
            began = past.began.setdefault(name, float(np.where(whole[rows], norm[rows], 0.0).max()))
            limit[rows] = past.limits(params, name, rows, median[rows])
            if began > 0 and (int(block.step[rows[0]]), name) in risen:
                diverges[rows] = limit[rows] > params.growth * began
                limit[rows] = np.minimum(limit[rows], params.growth * began)
            hit[rows] = past.follow(params, name, rows, norm[rows], whole[rows], limit[rows])
        since = {
            False: "from what the layer had before",
            True: "from the first step's, and the loss has risen",
        }
        findings = [
            self._finding(
                block, int(row), norm[row] if whole[row] else np.inf, limit[row], since[bool(diverges[row])]
            )
            for row in np.flatnonzero(hit)
        ]
        return past.as_state(state, losses), findings

    def _finding(self, block: Block, row: int, value: float, limit: float, since: str) -> Finding:
        message = f"norm of {block.info(row).name} is {value:.3g}, over {limit:.3g}, {since}"
        return finding_at(self.name, block, row, value=float(value), threshold=float(limit), message=message)


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

    @classmethod
    def of(cls, state: ExplodingGradientState, block: Block) -> _Past:
        _, first, series = np.unique(block.series_key(), return_index=True, return_inverse=True)
        names = [f"{block.info(row).name}@{block.worker[row]}/{block.mode_name(row)}" for row in first]
        held = [state.series.get(name, Past()) for name in names]
        return cls(
            names,
            series,
            np.array([past.seen for past in held], np.int64),
            np.array([past.peak for past in held], np.float64),
            np.array([past.hit for past in held], np.bool_),
            dict(state.largest),
            dict(state.began),
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

    def follow(
        self,
        params: ExplodingGradientParams,
        mode: str,
        rows: NDArray[np.intp],
        norm: Floats,
        whole: NDArray[np.bool_],
        limit: Floats,
    ) -> NDArray[np.bool_]:
        """Which rows of one step are findings; afterwards the step is past."""
        series = self.series[rows]
        hit = (norm > limit) | (~whole & self.hit[series])
        calm = np.where(whole & ~hit, norm, 0.0)
        warming = self.seen[series] < params.warmup
        self.peak[series] = np.maximum(self.peak[series], np.where(warming, calm, 0.0))
        self.seen[series] += warming
        self.hit[series] = hit
        self.largest[mode] = max(self.largest.get(mode, 0.0), float(calm.max()))
        return hit

    def as_state(self, before: ExplodingGradientState, losses: dict[str, float]) -> ExplodingGradientState:
        kept = zip(self.names, self.seen.tolist(), self.peak.tolist(), self.hit.tolist(), strict=True)
        series = {**before.series, **{name: Past(*past) for name, *past in kept}}
        return ExplodingGradientState(series=series, largest=self.largest, began=self.began, losses=losses)


def _gradients(block: Block) -> Block:
    return block.where(block.mask_of_tensors([info.role == "gradient" for info in block.catalogue]))


def _risen(
    params: ExplodingGradientParams, state: ExplodingGradientState, block: Block
) -> tuple[dict[str, float], set[tuple[int, Mode]]]:
    """The first value of each loss, and steps and modes in which some loss is many times that."""
    first, risen = dict(state.losses), set()
    is_loss = block.mask_of_tensors([info.role == "loss" for info in block.catalogue])
    for row in map(int, np.flatnonzero(is_loss & (block.statistics.finite > 0))):
        mode, size = block.mode_name(row), abs(float(block.statistics.mean[row]))
        began = first.setdefault(f"{block.info(row).name}@{block.worker[row]}/{mode}", size)
        if began > 0 and size >= params.loss_growth * began:
            risen.add((int(block.step[row]), mode))
    return first, risen


def _groups(label: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """The places of each label, ascending, labels ascending."""
    order = np.argsort(label, kind="stable")
    return [rows for rows in np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(rows)]


def _trailing_medians(context: Block, block: Block, window: int) -> Floats:
    """For each row of the block, the median norm of up to ``window`` whole rows of its series before it, or NaN."""
    together = concatenate([context, block])
    held = together.statistics
    norm = np.where(held.nonfinite == 0, l2(held), np.nan)
    medians = np.full(len(together), np.nan)
    for rows in _groups(together.series_key()):
        padded = np.concatenate([np.full(window, np.nan), norm[rows[:-1]]])
        windows = np.lib.stride_tricks.sliding_window_view(padded, window)
        some = ~np.isnan(windows).all(axis=1)
        medians[rows[some]] = np.nanmedian(windows[some], axis=1)
    return medians[len(together) - len(block) :]
