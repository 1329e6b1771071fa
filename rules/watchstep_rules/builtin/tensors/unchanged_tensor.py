"""A tensor that is the same, record after record."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_elements
from watchstep_rules.signals.reference import COLUMNS, is_within, may_be_close
from watchstep_rules.signals.series import Trail


class UnchangedTensorParams(Params):
    """Parameters of `UnchangedTensor`."""

    num_steps: int = Field(3, ge=2, le=100, description="Records in a row that must be the same.")
    rtol: float = Field(
        1e-5, ge=0, lt=1, description="Difference that is none, as a share of the earlier element; with atol."
    )
    atol: float = Field(1e-8, ge=0, description="Difference that is none, whatever the element.")
    equal_nan: bool = Field(False, description="Whether tensors that hold NaN can be the same.")


class UnchangedTensor(Rule[UnchangedTensorParams, State]):
    """Fires when the figures of the last ``num_steps`` records of a tensor agree with the newest.

    The counts of elements, NaN and infinities are equal; minimum, maximum, mean, mean magnitude and root mean square have moved
    by no more than they can where each element has moved by ``atol + rtol * |old|`` at most (the bounds are derived in
    `watchstep_rules.signals.reference`). Checksums must be equal. Inputs are judged in train mode only: validation sees the
    same examples each time.

    What ``numpy.allclose`` finds, element by element, is found. The other way round a tensor whose elements have only changed
    places is taken for the same. It is off by default: inputs of a training on one batch, outputs of a converged one and frozen
    weights are the same on purpose.
    """

    name = "unchanged_tensor"
    summary = "a tensor is the same, record after record"
    needs = Needs(collections=("weights", "gradients", "activations", "inputs", "losses", "checksums"))
    merge = "sealed"
    usual_causes = (
        "Of a weight: the optimizer does not hold it, its learning rate is zero, or it is frozen.",
        "Of an input: the program draws the same batch each time.",
        "Of an output or loss: what it is computed from does not change, or it is a value that is logged again and again.",
    )
    what_to_try = (
        "Look at which parameters the optimizer was given, and at requires_grad.",
        "Look at the iterator of the data: next(iter(loader)) in a loop gives the same batch if it is not shuffled.",
        "Log the loss of the step, not one from before the loop.",
    )

    def lookback(self, params: UnchangedTensorParams) -> int:
        """The other records."""
        return params.num_steps - 1

    def conclusive(self, params: UnchangedTensorParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, of any kind."""
        return has_elements(block)

    def evaluate(
        self, params: UnchangedTensorParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Hold each row against the last of its series."""
        trail = Trail.of(context, block)
        same = (block.statistics.count > 0) & ~_validated(block)
        exact = block.mask_of_tensors([info.role == "checksum" for info in block.catalogue])
        if not params.equal_nan:
            same &= block.statistics.nan == 0
        left = self._least_is_close(params, trail, np.flatnonzero(same))
        if not len(left):
            return state, []
        columns = {name: trail.column(figure) for name, figure in COLUMNS.items()}
        for rows in range(1, params.num_steps):
            places = trail.at(left)
            new, old = (
                {name: places.back(column, back) for name, column in columns.items()} for back in (0, rows)
            )
            close = may_be_close(new.__getitem__, old.__getitem__, params.rtol, params.atol)
            left = left[close & (~exact[left] | (new["mean"] == old["mean"]))]
        return state, [self._finding(params, block, int(row)) for row in left]

    def _least_is_close(
        self, params: UnchangedTensorParams, trail: Trail, left: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Those of some rows whose least element has hardly moved. One column rules out nearly all rows of a training that learns."""
        least = trail.column(COLUMNS["min"])
        for rows in range(1, params.num_steps):
            new, old = least[len(trail.context) + left], trail.at(left).back(least, rows)
            left = left[is_within(new, old, old, params.rtol, params.atol)]
        return left

    def _finding(self, params: UnchangedTensorParams, block: Block, row: int) -> Finding:
        message = (
            f"{block.info(row).name} has been the same for {params.num_steps} records in a row: no figure has moved by more "
            f"than a change of {params.rtol:g} of each element, and of {params.atol:g}, allows"
        )
        return finding_at(
            self.name,
            block,
            row,
            value=float(params.num_steps),
            threshold=float(params.num_steps),
            message=message,
        )


def _validated(block: Block) -> NDArray[np.bool_]:
    """Inputs in another mode than train."""
    inputs = block.mask_of_tensors([info.role == "input" for info in block.catalogue])
    return np.asarray(inputs & (block.mode != 0))
