"""A tensor with all, or nearly all, elements equal to zero."""

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

    share: float = Field(1.0, gt=0, le=1, description="Share of zeros at which the rule fires.")


class AllZero(Rule[AllZeroParams, State]):
    """Fires when ``zero / count >= share``.

    This is SageMaker's AllZero, with a share of 100 percent. Many healthy trainings have tensors of zeros: biases and the last layers of
    branches start at zero, a converged loss has zero gradients, a rectifier may be off for a whole small batch. The rule is therefore off
    by default. Select the tensors that must not be zero, and require several consecutive records with ``for``. For token ids with padding
    0, a share below one detects batches with mostly padding.

    Shards are judged as a whole tensor. A tensor without elements is not judged.
    """

    name = "all_zero"
    summary = "all elements of a tensor are zero"
    needs = Needs(collections=("weights", "gradients", "activations", "inputs", "custom"))
    merge = "watermark"
    usual_causes = (
        "The previous layer outputs only zeros: dead rectifiers, or an input that is empty or masked.",
        "It was initialized with zeros and has not changed.",
        "The loss does not depend on it: detached, multiplied by zero, or frozen.",
    )
    what_to_try = (
        "Look at the first recorded tensor with only zeros, in the order of data flow; the recorded tensors before it are correct.",
        "Check the initialization of the weights.",
        "Look for detach(), no_grad() and masks between it and the loss.",
    )

    def conclusive(self, params: AllZeroParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements; an element that is not finite is not zero."""
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
                    f"are zero, the limit is {params.share:.1%}"
                ),
            )
            for row in np.flatnonzero(zeros >= params.share)
        ]
