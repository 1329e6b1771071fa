"""Rules about mixed precision: values that a narrower number format loses, and updates that a gradient scaler skips."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats, may_leave, overflow_share, underflow_share
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import LaggedRows

_SCALE = "gradient_scaler:scale"


class NumberFormatHeadroomParams(Params):
    """Parameters of `NumberFormatHeadroom`."""

    number_format: Literal["fp16", "bf16", "fp8_e4m3"] = Field("fp16", description="The number format.")
    max_underflow: float = Field(
        0.05, ge=0, le=1, description="Tolerated share of non-zero elements that become zero."
    )
    max_overflow: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Tolerated share of non-zero elements that become infinite, or the largest number.",
    )
    gradient_scale: float | None = Field(
        None,
        gt=0,
        description="Factor of gradients before the test; null for the recorded scale of the run's scaler, or 1.",
    )


class NumberFormatHeadroomState(State):
    """State of `NumberFormatHeadroom`: the scaler's last scale; None before the first."""

    scale: float | None = None


class NumberFormatHeadroom(Rule[NumberFormatHeadroomParams, NumberFormatHeadroomState]):
    """Fires when a format would lose more than ``max_underflow`` of a tensor's numbers to zero, or ``max_overflow`` to infinity.

    From the histogram of exponents ``e = floor(log2 |x|)``: an element becomes zero if ``e`` is below that of the smallest subnormal
    (2^-24 in fp16, 2^-133 in bf16, 2^-9 in fp8 E4M3; IEEE 754, OCP 8-bit floating point 1.0), and infinite if it is above that of the
    largest number (2^15, 2^127, 2^8). Shares are of the finite, non-zero elements.

    Gradients are recorded without the scale of a gradient scaler. They are multiplied by it again here, because half precision stores
    scaled gradients. In a network that needed a scale, 31 percent of the gradients became zero without one (Micikevicius et al., "Mixed
    Precision Training", ICLR 2018, figure 3), and networks that trained well without a scale lost less than a few percent; 5 percent is
    between. No overflow is tolerated, because one infinity invalidates a step.

    The rule assesses a format for a training in any format, and is off by default.
    """

    name = "number_format_headroom"
    summary = "a number format would lose many of a tensor's values"
    needs = Needs(
        collections=("weights", "gradients", "activations", "metrics"),
        roles=("weight", "gradient", "output", "metric"),
        about=("weight", "gradient", "output"),
        histograms=True,
    )
    merge = "watermark"
    usual_causes = (
        "Gradients are small, and no scaler is used, or its scale has fallen.",
        "Activations grow from layer to layer, or a mask adds a number outside the format's range.",
        "The format's range is too narrow for this tensor.",
    )
    what_to_try = (
        "Scale the loss with torch.amp.GradScaler, or use bf16, which has the range of float32.",
        "Normalize activations, and use torch.finfo(dtype).min in masks.",
        "Keep this layer in float32: autocast(enabled=False) around it.",
    )

    def evaluate(
        self,
        params: NumberFormatHeadroomParams,
        state: NumberFormatHeadroomState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[NumberFormatHeadroomState, list[Finding]]:
        """Judge each row by itself, gradients under the scale of their step."""
        state, scale = _scales(params, state, block)
        powers = np.rint(np.log2(scale))
        under, over = np.zeros(len(block)), np.zeros(len(block))
        candidates = np.flatnonzero(may_leave(block.statistics, params.number_format, powers))
        if len(candidates):
            statistics = view(block, candidates).statistics
            under[candidates] = underflow_share(statistics, params.number_format, powers[candidates])
            over[candidates] = overflow_share(statistics, params.number_format, powers[candidates])
        is_tensor = block.mask_of_tensors([info.role != "metric" for info in block.catalogue])
        findings = []
        lost = (under > params.max_underflow) | (over > params.max_overflow)
        for row in map(int, np.flatnonzero(lost & is_tensor)):
            large = over[row] > params.max_overflow
            share, limit = (over[row], params.max_overflow) if large else (under[row], params.max_underflow)
            times = f", times {scale[row]:g}," if scale[row] != 1 else ""
            message = (
                f"{share:.1%} of the numbers of {block.info(row).name}{times} would become "
                f"{'infinite' if large else 'zero'} in {params.number_format}, {limit:.1%} tolerated"
            )
            findings.append(
                finding_at(self.name, block, row, value=float(share), threshold=limit, message=message)
            )
        return state, findings


def _scales(
    params: NumberFormatHeadroomParams, state: NumberFormatHeadroomState, block: Block
) -> tuple[NumberFormatHeadroomState, Floats]:
    """The factor of each row: for gradients the newest scale at or before their step, else 1."""
    scale = np.ones(len(block))
    is_gradient = block.mask_of_tensors([info.role == "gradient" for info in block.catalogue])
    if params.gradient_scale is not None:
        scale[is_gradient] = params.gradient_scale
        return state, scale
    is_scale = block.mask_of_tensors([info.name == _SCALE for info in block.catalogue])
    rows = np.flatnonzero(is_scale & (block.statistics.finite > 0) & (block.statistics.mean > 0))
    scales = [1.0 if state.scale is None else state.scale, *block.statistics.mean[rows].tolist()]
    newest = np.searchsorted(block.step[rows], block.step[is_gradient], side="right")
    scale[is_gradient] = np.array(scales)[newest]
    return NumberFormatHeadroomState(scale=scales[-1] if len(rows) else state.scale), scale


_SKIPPED = "gradient_scaler:skipped"


class ScalerSkipsParams(Params):
    """Parameters of `ScalerSkips`."""

    skips: int = Field(20, ge=2, le=1000, description="Number of skipped steps within the window.")
    window: int = Field(100, ge=2, le=100_000, description="Number of steps in the window.")


class ScalerSkips(Rule[ScalerSkipsParams, State]):
    """Fires when a gradient scaler skips ``skips`` steps within ``window``: ``step - step of the skip that many before < window``.

    A scaler starts at 2^16, halves its scale at each step with gradients that are not finite, skips that step, and doubles the scale
    after 2000 good steps (`torch.amp.GradScaler`). A few skips at the start, and one in two thousand steps later, are therefore normal.
    After 17 skips in quick succession the scale is below one, and gradients overflow or are NaN by themselves: no scale helps, weights do
    not change, and no other rule detects it, because skipped steps record no gradients. The default of 20 is slightly more. Only skipped
    steps are recorded, so an alert lasts until an isolated skip.
    """

    name = "scaler_skips"
    summary = "a gradient scaler skips many steps in a row"
    needs = Needs(collections=("metrics",), roles=("metric",))
    merge = "per_worker"
    usual_causes = (
        "The backward pass produces NaN at any scale: the root of zero, a division by zero, the logarithm of zero, infinity minus infinity in a mask.",
        "Activations overflow half precision in the forward pass.",
        "The weights already contain NaN or infinity.",
    )
    what_to_try = (
        "Run one step without the scaler under torch.autograd.set_detect_anomaly(True).",
        "Compute the loss and normalization layers in float32, outside autocast.",
        "Use bf16, which needs no scaler.",
    )
    cannot_distinguish = (
        "A program that overflows gradients on purpose, for example to search for the largest scale, from one with gradients that overflow at any scale.",
        "A custom scaler that skips steps without GradScaler is not recorded.",
    )

    def lookback(self, params: ScalerSkipsParams) -> int:
        """The previous skips."""
        return params.skips - 1

    def evaluate(
        self, params: ScalerSkipsParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each skipped step by the distance to the first of the last ``skips`` skips."""
        context, block = _skips(context), _skips(block)
        lagged = LaggedRows.of(context, block)
        since = block.step - lagged.lag(lagged.column(lambda rows: rows.step), params.skips - 1)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(params.skips),
                threshold=float(params.skips),
                message=(
                    f"{_SKIPPED}: {params.skips} of the last {since[row] + 1:.0f} steps were skipped for gradients that "
                    "are not finite, whatever the scale"
                ),
            )
            for row in np.flatnonzero(since < params.window)
        ]


def _skips(block: Block) -> Block:
    return block.where(block.mask_of_tensors([info.name == _SKIPPED for info in block.catalogue]))
