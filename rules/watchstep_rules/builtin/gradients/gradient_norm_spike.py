"""A global gradient norm far above its recent level."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, sort_key
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.robust import medians, robust_spread


class GradientNormSpikeParams(Params):
    """Parameters of `GradientNormSpike`."""

    window: int = Field(20, ge=2, le=100, description="Number of earlier records; their median is the level.")
    growth: float = Field(10.0, gt=1, description="Tolerated ratio of the norm to the level.")
    deviations: float = Field(
        6.0, ge=0, description="Tolerated robust standard deviations of the logarithm above the level."
    )


class GradientNormSpikeState(State):
    """State of `GradientNormSpike`: the last norms of each mode, rounded to four digits."""

    norms: dict[str, tuple[float, ...]] = Field(default_factory=dict)


class GradientNormSpike(Rule[GradientNormSpikeParams, GradientNormSpikeState]):
    """Fires when the global norm of gradients is far above the median of its last ``window`` records.

    With ``norm = sqrt(sum over parameters of |g|^2)``, as in `torch.nn.utils.clip_grad_norm_`, and ``level`` and ``spread`` the median
    and 1.4826 times the median absolute deviation of ``log(norm)``::

        log(norm) - level > max(log(growth), deviations * spread)

    Logarithms are used because gradient norms scatter by factors. `exploding_gradient` requires growth by 100 in one layer and is on by
    default. This rule judges the whole model and smaller spikes, after which the losses of large models jump (Chowdhery et al., "PaLM",
    2022; Zhang et al., "OPT", 2022). It is off by default, because a healthy training with small batches has such steps, which clipping
    handles.
    """

    name = "gradient_norm_spike"
    summary = "the global gradient norm jumps far above its recent level"
    needs = Needs(collections=("gradients",), roles=("gradient",))
    merge = "watermark"
    usual_causes = (
        "An unusual batch: outliers, corrupted or wrongly labeled examples, a very long sequence.",
        "The learning rate is near the limit of stability.",
        "A layer without normalization, or a division by a value close to zero.",
    )
    what_to_try = (
        "Clip gradients with torch.nn.utils.clip_grad_norm_ at the usual level.",
        "Look at the examples of this step.",
        "Lower the learning rate, or warm it up for longer.",
    )

    def evaluate(
        self,
        params: GradientNormSpikeParams,
        state: GradientNormSpikeState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[GradientNormSpikeState, list[Finding]]:
        """Judge each step as a whole, over the gradients of all workers."""
        last_norms, findings = dict(state.norms), []
        _, first, group = np.unique(sort_key(block.mode, block.step), return_index=True, return_inverse=True)
        mode = block.mode[first]
        norms = _norms(block, group, len(mode))
        for place in np.unique(mode):
            steps = np.flatnonzero((mode == place) & np.isfinite(norms) & (norms > 0))
            course = np.concatenate([last_norms.get(MODES[place], ()), norms[steps]])
            level, limit = _limits(params, course, len(steps))
            for at in np.flatnonzero(norms[steps] > limit):
                rows = np.flatnonzero(group == steps[at])
                findings.append(self._finding(block, rows, float(norms[steps[at]]), (level[at], limit[at])))
            last_norms[MODES[place]] = tuple(course[-params.window :].tolist())
        return GradientNormSpikeState(norms=last_norms), sorted(findings, key=lambda finding: finding.step)

    def _finding(
        self, block: Block, rows: NDArray[np.intp], norm: float, level_and_limit: tuple[float, float]
    ) -> Finding:
        """A finding at the layer with the largest part of the norm."""
        level, limit = level_and_limit
        largest = int(rows[np.argmax(block.statistics.square_sum[rows])])
        share = float(block.statistics.square_sum[largest]) / norm**2
        message = (
            f"the norm of all gradients is {norm:.3g}, the median of the previous records {level:.3g}; "
            f"{min(1.0, share):.0%} of its square is {block.info(largest).name}"
        )
        return finding_at(self.name, block, largest, value=norm, threshold=float(limit), message=message)


def _norms(block: Block, group: NDArray[np.intp], groups: int) -> Floats:
    """The global gradient norm of each step, rounded to four digits; NaN if a gradient is not finite."""
    squares = np.where(block.statistics.nonfinite == 0, block.statistics.square_sum, np.nan)
    norms = np.sqrt(np.bincount(group, squares, groups))
    return np.array([float(f"{norm:.4g}") for norm in norms.tolist()])


def _limits(params: GradientNormSpikeParams, course: Floats, judged: int) -> tuple[Floats, Floats]:
    """Level and limit of the last ``judged`` norms of a course; NaN if there are too few earlier norms."""
    padded = np.log(np.concatenate([np.full(params.window, np.nan), course]))
    windows = np.lib.stride_tricks.sliding_window_view(padded, params.window)[:-1]
    windows = windows[len(windows) - judged :]
    level = medians(windows)
    above = np.maximum(np.log(params.growth), params.deviations * robust_spread(windows))
    return np.exp(level), np.exp(level + above)
