"""Checkpointed segments whose second forward pass differs from the first."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.capture.steps.metric_names import RECOMPUTED
from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import in_a_row


class RecomputeMismatchParams(Params):
    """Parameters of `RecomputeMismatch`."""

    difference: float = Field(
        0.05,
        gt=0,
        le=1,
        description="Largest difference of an element, relative to the largest magnitude of the first output.",
    )
    records: int = Field(2, ge=1, le=1000, description="Consecutive records with such a difference.")


class RecomputeMismatch(Rule[RecomputeMismatchParams, State]):
    """Fires when activation checkpointing computes another output in the backward pass, at ``records`` records in a row.

    ``max |second - first| / max |first| > difference`` over up to 256 elements of the output of a module that was computed in both passes. The gradients are those of the
    second pass, and the loss is that of the first, so that the training follows gradients of another network. PyTorch's documentation of `torch.utils.checkpoint` requires both
    passes to be the same, and does not compare values.

    Both passes of a deterministic segment are equal to the bit. Kernels that add in no fixed order differ by some units in the last place, which is 0.004 for bfloat16.
    Outputs in another precision count as a difference of 1. Modules that are called more than once before a backward pass, as in contrastive training, are not compared.
    """

    name = "recompute_mismatch"
    summary = "activation checkpointing computes other outputs in the backward pass"
    needs = Needs(collections=("metrics",), roles=("metric",))
    merge = "per_worker"
    usual_causes = (
        "The segment draws other random numbers: preserve_rng_state=False with dropout, or a generator of the program's own.",
        "The segment runs under another autocast, or in another mode, in the backward pass.",
        "The segment reads a buffer or a flag that changes between the passes.",
    )
    what_to_try = (
        "Leave preserve_rng_state at True, and draw the numbers of the program's own generators outside of the segment.",
        "Compute what changes outside of the segment, and pass it as an argument.",
    )
    cannot_distinguish = (
        "A segment that is computed otherwise on purpose, as for an estimate of a gradient, from one that is by mistake.",
    )

    def lookback(self, params: RecomputeMismatchParams) -> int:
        """The previous records."""
        return params.records - 1

    def evaluate(
        self, params: RecomputeMismatchParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge the consecutive records of each module."""
        context, block = _recomputed(context), _recomputed(block)
        is_hit = in_a_row(
            context, block, lambda rows: rows.statistics.max > params.difference, params.records
        )
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(block.statistics.max[row]),
                threshold=params.difference,
                message=(
                    f"{block.info(int(row)).module}: the output that checkpointing computed again in the backward pass differs from the first by "
                    f"{block.statistics.max[row]:.2g} of its largest magnitude, at {params.records} records in a row"
                ),
            )
            for row in np.flatnonzero(is_hit)
        ]


def _recomputed(block: Block) -> Block:
    return block.where(block.mask_of_tensors([_is_recomputed(info) for info in block.catalogue]))


def _is_recomputed(info: TensorInfo) -> bool:
    return info.role == "metric" and info.name.endswith(f":{RECOMPUTED}")
