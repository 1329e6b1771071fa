"""Gradients of earlier steps that are never cleared."""

from __future__ import annotations

import re

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import in_a_row

_STALE = re.compile(r"(.*\.)?gradients:stale(_\d+)?$")


class MissingZeroGradParams(Params):
    """Parameters of `MissingZeroGrad`."""

    records: int = Field(
        6, ge=1, le=1000, description="Consecutive steps that add to the gradients of the previous step."
    )


class MissingZeroGrad(Rule[MissingZeroGradParams, State]):
    """Fires when ``gradients:stale`` is 1 at ``records`` steps in a row.

    Capture watches one gradient: at the first backward pass after an optimizer step it still has the value of that step, it is not zero
    or None at any pass before the next step, and it has been added to. The optimizer therefore received the sum of all gradients so far,
    which is measured, not inferred. ``backward`` adds to existing gradients (PyTorch's documentation of `torch.Tensor.backward`).
    Micro-batches between two steps do not count, because gradients are cleared before the first of them.

    With six steps, a program that makes two or three steps on one gradient on purpose, as some multi-task programs do, is not reported. A
    training that never clears gradients is like one with a momentum of 1; disable the rule if this is intended.
    """

    name = "missing_zero_grad"
    summary = "gradients of earlier steps are never cleared"
    needs = Needs(collections=("metrics",), roles=("metric",), probes=("stale_gradients",))
    merge = "per_worker"
    usual_causes = (
        "The loop has no optimizer.zero_grad().",
        "zero_grad() of another optimizer or model is called.",
        "A condition for gradient accumulation never reaches zero_grad().",
    )
    what_to_try = (
        "Call optimizer.zero_grad() once per step, before the first backward().",
        "If several optimizers share parameters, clear those of the optimizer that steps.",
    )
    cannot_distinguish = (
        "Gradients that are accumulated over all steps on purpose, as a momentum of 1, from a forgotten zero_grad().",
    )

    def lookback(self, params: MissingZeroGradParams) -> int:
        """The previous steps."""
        return params.records - 1

    def evaluate(
        self, params: MissingZeroGradParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge the consecutive steps with stale gradients."""
        context, block = _stale(context), _stale(block)
        is_hit = in_a_row(context, block, lambda rows: rows.statistics.mean > 0.5, params.records)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(params.records),
                threshold=float(params.records),
                message=(
                    f"{block.info(int(row)).name}: at {params.records} steps in a row the gradients included "
                    "those of the previous step; they were not cleared"
                ),
            )
            for row in np.flatnonzero(is_hit)
        ]


def _stale(block: Block) -> Block:
    return block.where(
        block.mask_of_tensors([_STALE.match(info.name) is not None for info in block.catalogue])
    )
