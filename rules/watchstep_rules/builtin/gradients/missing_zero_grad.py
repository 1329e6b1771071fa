"""Gradients of earlier steps that nobody clears."""

from __future__ import annotations

import re

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import in_a_row

_KEPT = re.compile(r"(.*\.)?gradients:stale(_\d+)?$")


class MissingZeroGradParams(Params):
    """Parameters of `MissingZeroGrad`."""

    records: int = Field(
        6, ge=1, le=1000, description="Steps in a row that add to the gradients of the step before."
    )


class MissingZeroGrad(Rule[MissingZeroGradParams, State]):
    """Fires when ``gradients:stale`` is 1 at ``records`` steps in a row.

    Capture looks at one gradient: at the first backward pass after an optimizer's step it is still what that step left, at no
    pass before the next step is it zero or gone, and by then it was added to. So nothing is inferred: the sum of all
    gradients so far is what the optimizer was given. ``backward`` adds to what is there (PyTorch's documentation of
    `torch.Tensor.backward`); micro-batches between two steps do not count, for these are cleared before the first.

    Six steps leave alone a program that takes two or three steps on one gradient on purpose, as some that train several
    tasks do. A training that never clears is like one with a momentum of 1; whoever wants that leaves the rule out.
    """

    name = "missing_zero_grad"
    summary = "gradients of earlier steps are never cleared"
    needs = Needs(collections=("metrics",), roles=("metric",), probes=("stale_gradients",))
    merge = "per_worker"
    usual_causes = (
        "The loop has no optimizer.zero_grad().",
        "zero_grad() of another optimizer or model is called.",
        "A condition for accumulating gradients never lets zero_grad() be reached.",
    )
    what_to_try = (
        "Call optimizer.zero_grad() once for each step, before the first backward().",
        "Where several optimizers share parameters, clear those of the one that steps.",
    )
    cannot_distinguish = (
        "Gradients that are accumulated over all steps on purpose, as a momentum of 1, from a forgotten zero_grad().",
    )

    def lookback(self, params: MissingZeroGradParams) -> int:
        """The steps before."""
        return params.records - 1

    def evaluate(
        self, params: MissingZeroGradParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each step that was seen to keep gradients."""
        context, block = _kept(context), _kept(block)
        found = in_a_row(context, block, lambda rows: rows.statistics.mean > 0.5, params.records)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(params.records),
                threshold=float(params.records),
                message=(
                    f"{block.info(int(row)).name}: at {params.records} steps in a row the optimizer was given gradients that "
                    "hold those of the step before; nothing cleared them"
                ),
            )
            for row in np.flatnonzero(found)
        ]


def _kept(block: Block) -> Block:
    return block.where(
        block.mask_of_tensors([_KEPT.match(info.name) is not None for info in block.catalogue])
    )
