"""Rules about mixed precision: values that a narrower number format loses, and a gradient scaler that skips steps."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats, may_leave, overflow_share, underflow_share
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import Trail

_SCALE = "gradient_scaler:scale"


class NumberFormatHeadroomParams(Params):
    """Parameters of `NumberFormatHeadroom`."""

    number_format: Literal["fp16", "bf16", "fp8_e4m3"] = Field("fp16", description="The format.")
    max_underflow: float = Field(
        0.05, ge=0, le=1, description="Share of the elements other than zero that may become zero."
    )
    max_overflow: float = Field(
        0.0, ge=0, le=1, description="Share of them that may become infinite, or the largest number."
    )
    gradient_scale: float | None = Field(
        None,
        gt=0,
        description="What gradients are multiplied by before; null for the scale that the run's scaler records, or 1.",
    )


class NumberFormatHeadroomState(State):
    """The scaler's last scale; None before there was one."""

    scale: float | None = None


class NumberFormatHeadroom(Rule[NumberFormatHeadroomParams, NumberFormatHeadroomState]):
    """Fires when a format would lose more than ``max_underflow`` of a tensor's numbers to zero, or ``max_overflow`` to infinity.

    From the histogram of exponents ``e = floor(log2 |x|)``: an element is lost to zero where ``e`` is below that of
    the smallest subnormal (2^-24 in fp16, 2^-133 in bf16, 2^-9 in fp8 E4M3; IEEE 754, OCP 8-bit floating point 1.0), and
    to infinity where it is above that of the largest number (2^15, 2^127, 2^8). Shares are of the finite elements other
    than zero.

    Gradients are recorded without the scale of a gradient scaler; here they are multiplied by it again, for that is
    what half precision holds. Of a network whose gradients needed a scale, 31 percent became zero without one
    (Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3), and networks that trained well without lost
    less than a few percent: 5 percent is between. No overflow is tolerated: one infinity spoils a step.

    It asks whether a format would do, of a training in any format, and is off by default.
    """

    name = "number_format_headroom"
    summary = "a number format would lose many of a tensor's numbers"
    needs = Needs(
        collections=("weights", "gradients", "activations", "metrics"),
        roles=("weight", "gradient", "output", "metric"),
        about=("weight", "gradient", "output"),
        histograms=True,
    )
    merge = "sealed"
    usual_causes = (
        "Gradients are small, and no scaler makes them larger, or its scale has fallen.",
        "Activations grow from layer to layer, or a mask adds a number that the format does not hold.",
        "The format's range is too narrow for this tensor.",
    )
    what_to_try = (
        "Scale the loss: torch.amp.GradScaler; or use bf16, whose range is that of float32.",
        "Normalise activations, and use torch.finfo(dtype).min in masks.",
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
        left = np.flatnonzero(may_leave(block.statistics, params.number_format, powers))
        if len(left):
            held = view(block, left).statistics
            under[left] = underflow_share(held, params.number_format, powers[left])
            over[left] = overflow_share(held, params.number_format, powers[left])
        is_tensor = block.mask_of_tensors([info.role != "metric" for info in block.catalogue])
        findings = []
        lost = (under > params.max_underflow) | (over > params.max_overflow)
        for row in map(int, np.flatnonzero(lost & is_tensor)):
            large = over[row] > params.max_overflow
            share, limit = (over[row], params.max_overflow) if large else (under[row], params.max_underflow)
            times = f", times {scale[row]:g}," if scale[row] != 1 else ""
            message = (
                f"{share:.1%} of the numbers of {block.info(row).name}{times} would become "
                f"{'infinite' if large else 'zero'} in {params.number_format}, {limit:.1%} may"
            )
            findings.append(
                finding_at(self.name, block, row, value=float(share), threshold=limit, message=message)
            )
        return state, findings


def _scales(
    params: NumberFormatHeadroomParams, state: NumberFormatHeadroomState, block: Block
) -> tuple[NumberFormatHeadroomState, Floats]:
    """What each row's numbers are multiplied by: those of gradients by the newest scale of a step up to theirs."""
    scale = np.ones(len(block))
    is_gradient = block.mask_of_tensors([info.role == "gradient" for info in block.catalogue])
    if params.gradient_scale is not None:
        scale[is_gradient] = params.gradient_scale
        return state, scale
    is_scale = block.mask_of_tensors([info.name == _SCALE for info in block.catalogue])
    rows = np.flatnonzero(is_scale & (block.statistics.finite > 0) & (block.statistics.mean > 0))
    known = [1.0 if state.scale is None else state.scale, *block.statistics.mean[rows].tolist()]
    newest = np.searchsorted(block.step[rows], block.step[is_gradient], side="right")
    scale[is_gradient] = np.array(known)[newest]
    return NumberFormatHeadroomState(scale=known[-1] if len(rows) else state.scale), scale


_SKIPPED = "gradient_scaler:skipped"


class ScalerSkipsParams(Params):
    """Parameters of `ScalerSkips`."""

    skips: int = Field(20, ge=2, le=1000, description="Skipped steps …")
    window: int = Field(100, ge=2, le=100_000, description="… among so many steps, the last one included.")


class ScalerSkips(Rule[ScalerSkipsParams, State]):
    """Fires when a gradient scaler skips ``skips`` steps within ``window``: ``step - step of the skip that many before < window``.

    A scaler begins at 2^16, halves its scale at each step whose gradients are not finite, skips that step, and doubles the
    scale after 2000 good ones (`torch.amp.GradScaler`). So a few skips at the start, and one in two thousand steps
    later, are how it works. After 17 in short order the scale is below one, and gradients overflow or are NaN as they
    are: no scale will help, weights stay as they are, and because skipped steps record no gradients no other rule sees
    it. 20 is a little more. Only skipped steps are on record, so an alert lasts until one comes that stands alone.
    """

    name = "scaler_skips"
    summary = "a gradient scaler skips one step after the other"
    needs = Needs(collections=("metrics",), roles=("metric",))
    merge = "per_worker"
    usual_causes = (
        "The backward pass makes NaN at any scale: the root of zero, a division by zero, the logarithm of zero, infinity minus infinity in a mask.",
        "Activations overflow half precision in the forward pass.",
        "The weights already hold NaN or infinity.",
    )
    what_to_try = (
        "Run one step without the scaler under torch.autograd.set_detect_anomaly(True).",
        "Compute the loss and normalisations in float32, outside autocast.",
        "Use bf16, which needs no scaler.",
    )
    cannot_distinguish = (
        "A program that makes its gradients overflow on purpose, for instance to search for the largest scale, from one whose gradients no scale helps.",
        "A scaler of the program's own, which skips steps without GradScaler, is not seen.",
    )

    def lookback(self, params: ScalerSkipsParams) -> int:
        """The skips before this one."""
        return params.skips - 1

    def evaluate(
        self, params: ScalerSkipsParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each skipped step by how long ago the first of the last ``skips`` was."""
        context, block = _skips(context), _skips(block)
        trail = Trail.of(context, block)
        since = block.step - trail.back(trail.column(lambda rows: rows.step), params.skips - 1)
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
