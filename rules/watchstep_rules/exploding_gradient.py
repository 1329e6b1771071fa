"""A gradient that grows far beyond anything this layer has had."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block, concatenate
from watchstep.derived import l2
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.finding import Finding, finding_at


class ExplodingGradientParams(Params):
    """Parameters of `ExplodingGradient`."""

    growth: float = Field(100.0, gt=1, description="How many times the reference a gradient's norm may be.")
    window: int = Field(20, ge=2, le=1000, description="Earlier records whose median norm is one reference.")
    warmup: int = Field(
        10, ge=1, le=1000, description="First records, not judged, whose largest norm is the other."
    )


class ExplodingGradientState(State):
    """For each series: how many records were seen (up to the warm-up), and the largest norm among them."""

    seen: dict[str, int] = Field(default_factory=dict)
    peak: dict[str, float] = Field(default_factory=dict)


class ExplodingGradient(Rule[ExplodingGradientParams, ExplodingGradientState]):
    """Fires when ``l2(g) > growth * max(median of the last window norms, largest norm of the warm-up)``.

    The test is scale-free: a loss in the thousands has large gradients and is fine, what counts is growth. The
    warm-up's peak keeps a converged training, whose norms are tiny, from alarming on one hard batch; the median
    follows layers that start at zero (LoRA, zero-initialised residuals). Growth by 100 is past what clipping at
    1.0 or a restart of the learning rate produces (Pascanu et al., ICML 2013, on norm growth before divergence).
    """

    name = "exploding_gradient"
    summary = "a gradient's norm grows far beyond what its layer has had"
    needs = Needs(collections=("gradients",), roles=("gradient",))
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
        """Judge each series against its own past."""
        together = concatenate([context, block])
        norm = l2(together.statistics)
        key = together.series_key()
        seen, peak = dict(state.seen), dict(state.peak)
        reference = np.full(len(together), np.inf)
        for series in np.unique(key[len(context) :]):
            rows = np.flatnonzero(key == series)
            new = int(np.searchsorted(rows, len(context)))
            name = f"{together.info(rows[0]).name}@{together.worker[rows[0]]}/{together.mode[rows[0]]}"
            before = seen.get(name, 0)
            held = norm[rows[new:]]
            warming = held[: max(0, params.warmup - before)]
            top = float(np.fmax.reduce(warming, initial=peak.get(name, 0.0)))
            seen[name] = min(params.warmup, before + len(held))
            peak[name] = top
            judged = rows[new + len(warming) :]
            reference[judged] = np.fmax(
                top, _trailing_median(norm[rows], len(rows) - len(judged), params.window)
            )
        hits = np.flatnonzero(norm > params.growth * reference)
        findings = [self._finding(together, int(row), norm, params.growth * reference) for row in hits]
        return ExplodingGradientState(seen=seen, peak=peak), findings

    def _finding(
        self, block: Block, row: int, norm: NDArray[np.float64], limit: NDArray[np.float64]
    ) -> Finding:
        value, threshold = float(norm[row]), float(limit[row])
        message = f"norm of {block.info(row).name} is {value:.3g}, over {threshold:.3g}, from what the layer had before"
        return finding_at(self.name, block, row, value=value, threshold=threshold, message=message)


def _trailing_median(values: NDArray[np.float64], start: int, window: int) -> NDArray[np.float64]:
    """For each place from ``start`` on, the median of up to ``window`` values before it; NaN where there is none."""
    padded = np.concatenate([np.full(window, np.nan), values])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)[start : len(values)]
    some = ~np.isnan(windows).all(axis=1)
    result = np.full(len(windows), np.nan)
    result[some] = np.nanmedian(windows[some], axis=1)
    return result
