"""A norm of all gradients together that is far above its recent level."""

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

    window: int = Field(20, ge=2, le=100, description="Earlier records whose median is the level.")
    growth: float = Field(10.0, gt=1, description="How many times the level the norm is …")
    deviations: float = Field(
        6.0, ge=0, description="… and by how many robust standard deviations of its logarithm it is above."
    )


class GradientNormSpikeState(State):
    """The last norms of each mode, four digits of each."""

    norms: dict[str, tuple[float, ...]] = Field(default_factory=dict)


class GradientNormSpike(Rule[GradientNormSpikeParams, GradientNormSpikeState]):
    """Fires when the global norm of gradients is far above the median of its last ``window`` records.

    With ``norm = sqrt(sum over parameters of |g|^2)``, as `torch.nn.utils.clip_grad_norm_` takes it, and ``level`` and
    ``spread`` the median and 1.4826 times the median absolute deviation of ``log(norm)``::

        log(norm) - level > max(log(growth), deviations * spread)

    Logarithms, because norms of gradients scatter by factors. `exploding_gradient` asks for a hundredfold in one layer and is on by default; this one looks at the
    whole and at less, the spikes after which the losses of large models jump (Chowdhery et al., "PaLM", 2022; Zhang
    et al., "OPT", 2022). It is off by default: a healthy training with small batches has such steps, and clipping is
    there for them.
    """

    name = "gradient_norm_spike"
    summary = "the norm of all gradients together jumps far above its recent level"
    needs = Needs(collections=("gradients",), roles=("gradient",))
    merge = "sealed"
    usual_causes = (
        "An odd batch: outliers, corrupted or wrongly labelled examples, a very long sequence.",
        "The learning rate is near the edge of what the training bears.",
        "A layer without normalisation, or a division by something close to zero.",
    )
    what_to_try = (
        "Clip gradients: torch.nn.utils.clip_grad_norm_ at the level that is usual.",
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
        """Judge each step as a whole, on whatever workers its gradients are."""
        kept, findings = dict(state.norms), []
        _, first, group = np.unique(sort_key(block.mode, block.step), return_index=True, return_inverse=True)
        mode = block.mode[first]
        norms = _norms(block, group, len(mode))
        for place in np.unique(mode):
            steps = np.flatnonzero((mode == place) & np.isfinite(norms) & (norms > 0))
            course = np.concatenate([kept.get(MODES[place], ()), norms[steps]])
            level, limit = _limits(params, course, len(steps))
            for at in np.flatnonzero(norms[steps] > limit):
                rows = np.flatnonzero(group == steps[at])
                findings.append(self._finding(block, rows, float(norms[steps[at]]), (level[at], limit[at])))
            kept[MODES[place]] = tuple(course[-params.window :].tolist())
        return GradientNormSpikeState(norms=kept), sorted(findings, key=lambda found: found.step)

    def _finding(
        self, block: Block, rows: NDArray[np.intp], norm: float, against: tuple[float, float]
    ) -> Finding:
        """It stands at the layer that has most of the norm."""
        largest = int(rows[np.argmax(block.statistics.square_sum[rows])])
        share = float(block.statistics.square_sum[largest]) / norm**2
        message = (
            f"the norm of all gradients is {norm:.3g}, the median of the records before {against[0]:.3g}; "
            f"{min(1.0, share):.0%} of its square is {block.info(largest).name}"
        )
        return finding_at(self.name, block, largest, value=norm, threshold=float(against[1]), message=message)


def _norms(block: Block, group: NDArray[np.intp], groups: int) -> Floats:
    """Norm of all gradients of each step, to four digits; NaN where one is not finite."""
    squares = np.where(block.statistics.nonfinite == 0, block.statistics.square_sum, np.nan)
    norms = np.sqrt(np.bincount(group, squares, groups))
    return np.array([float(f"{norm:.4g}") for norm in norms.tolist()])


def _limits(params: GradientNormSpikeParams, course: Floats, judged: int) -> tuple[Floats, Floats]:
    """Level and limit of the last ``judged`` norms of a course, NaN where too few came before."""
    padded = np.log(np.concatenate([np.full(params.window, np.nan), course]))
    windows = np.lib.stride_tricks.sliding_window_view(padded, params.window)[:-1]
    windows = windows[len(windows) - judged :]
    level = medians(windows)
    above = np.maximum(np.log(params.growth), params.deviations * robust_spread(windows))
    return np.exp(level), np.exp(level + above)
