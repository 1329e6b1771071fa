"""A tensor of which all, or nearly all, elements are zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import zero_share
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_elements


class AllZeroParams(Params):
    """Parameters of `AllZero`."""

    share: float = Field(1.0, gt=0, le=1, description="Share of zeros from which on a tensor is found.")


class AllZero(Rule[AllZeroParams, State]):
    """Fires when ``zero / count >= share``.

    That is SageMaker's AllZero, whose share is 100 percent. Many a healthy training has tensors of zeros: biases
    and the last layers of branches begin so, a converged loss leaves gradients of zero, a rectifier may be off for a
    whole small batch. So it is off by default; name the tensors that must not be zero, and ask for several records
    in a row with ``for``. Of token ids, whose padding is 0, a share below one tells batches that are mostly padding.

    Of shards the whole tensor is judged. A tensor without elements is left alone.
    """

    name = "all_zero"
    summary = "all elements of a tensor are zero"
    needs = Needs(
        collections=("weights", "gradients", "activations", "inputs"),
        roles=("weight", "gradient", "output", "input"),
    )
    merge = "sealed"
    usual_causes = (
        "The layer before it gives only zeros: dead rectifiers, or an input that is empty or masked.",
        "It was set to zero at the start and nothing has changed it.",
        "The loss does not depend on it: detached, multiplied by zero, or frozen.",
    )
    what_to_try = (
        "Look at the first of the recorded tensors that is all zero, in the flow of data; those recorded before it are sound.",
        "Look at the weights' initialisation.",
        "Look for detach(), no_grad() and masks between it and the loss.",
    )

    def conclusive(self, params: AllZeroParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements: one that is not finite is not zero."""
        return has_elements(block)

    def evaluate(
        self, params: AllZeroParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each row by itself."""
        zeros = zero_share(block.statistics)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(zeros[row]),
                threshold=params.share,
                message=(
                    f"{zeros[row]:.1%} of the {block.statistics.count[row]} elements of {block.info(int(row)).name} "
                    f"are zero, {params.share:.1%} or more is too many"
                ),
            )
            for row in np.flatnonzero(zeros >= params.share)
        ]
