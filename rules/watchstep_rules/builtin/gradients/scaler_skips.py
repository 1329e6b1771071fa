"""A gradient scaler that skips one step after the other."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import Trail

_SKIPPED = "gradient_scaler:skipped"


class ScalerSkipsParams(Params):
    """Parameters of `ScalerSkips`."""

    skips: int = Field(20, ge=2, le=1000, description="Skipped steps …")
    window: int = Field(100, ge=2, le=100_000, description="… among so many steps, the last one included.")


class ScalerSkipsState(State):
    """Nothing."""


class ScalerSkips(Rule[ScalerSkipsParams, ScalerSkipsState]):
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
    params_type = ScalerSkipsParams
    state_type = ScalerSkipsState

    def lookback(self, params: ScalerSkipsParams) -> int:
        """The skips before this one."""
        return params.skips - 1

    def evaluate(
        self,
        params: ScalerSkipsParams,
        state: ScalerSkipsState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[ScalerSkipsState, list[Finding]]:
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
