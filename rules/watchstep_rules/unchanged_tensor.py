"""A tensor that is the same, record after record."""

from __future__ import annotations

from operator import attrgetter

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep.derived import Derivation, abs_mean, rms
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures.trails import Column, Trail
from watchstep_rules.finding import Finding, finding_at

_COUNTS = ("count", "nan", "pos_inf", "neg_inf", "zero", "negative")
_EXTREMES = ("min", "max", "abs_min", "mean")


class UnchangedTensorParams(Params):
    """Parameters of `UnchangedTensor`."""

    num_steps: int = Field(3, ge=2, le=100, description="Records in a row that must be the same.")
    rtol: float = Field(
        1e-5, ge=0, description="Difference that is none, as a share of the earlier figure; with atol."
    )
    atol: float = Field(1e-8, ge=0, description="Difference that is none, whatever the figure.")
    equal_nan: bool = Field(False, description="Whether tensors that hold NaN can be the same.")


class UnchangedTensorState(State):
    """Nothing."""


class UnchangedTensor(Rule[UnchangedTensorParams, UnchangedTensorState]):
    """Fires when the last ``num_steps`` records of a tensor are the same by every figure of the row.

    Of each of these records and the newest: the counts of elements, zeros, negatives, NaN and infinities are equal, and
    of min, max, smallest magnitude, mean, mean magnitude and root mean square ``|new - old| <= atol + rtol * |old|``.
    Checksums must be equal. Inputs are judged in train mode only: validation sees the same examples each time.

    SageMaker's UnchangedTensor asks ``numpy.allclose`` of the elements; elements within its tolerance have figures within
    it, so what it finds is found. The other way round a tensor whose elements have only changed places is taken for the
    same: rare, for twelve figures must agree. Defaults are SageMaker's. It is off by default: inputs of a training on one
    batch, outputs of a converged one and frozen weights are the same on purpose.
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
    params_type = UnchangedTensorParams
    state_type = UnchangedTensorState

    def lookback(self, params: UnchangedTensorParams) -> int:
        """The other records."""
        return params.num_steps - 1

    def evaluate(
        self,
        params: UnchangedTensorParams,
        state: UnchangedTensorState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[UnchangedTensorState, list[Finding]]:
        """Hold each row against the last of its series."""
        trail = Trail.of(context, block)
        same = (block.statistics.count > 0) & ~_validated(block)
        exact = block.mask_of_tensors([info.role == "checksum" for info in block.catalogue])
        if not params.equal_nan:
            same &= block.statistics.nan == 0
        left = np.flatnonzero(same)
        for figure in (*(_recorded(name) for name in _EXTREMES), _derived(abs_mean), _derived(rms)):
            held = trail.column(figure)
            for rows in range(1, params.num_steps):
                new, old = held[len(context) + left], trail.at(left).back(held, rows)
                slack = np.where(exact[left], 0.0, params.atol + params.rtol * np.abs(old))
                with np.errstate(invalid="ignore"):
                    left = left[(np.abs(new - old) <= slack) | (np.isnan(new) & np.isnan(old))]
        for name in _COUNTS:
            held = trail.column(_recorded(name))
            for rows in range(1, params.num_steps):
                left = left[trail.at(left).back(held, rows) == held[len(context) + left]]
        return state, [self._finding(params, block, int(row)) for row in left]

    def _finding(self, params: UnchangedTensorParams, block: Block, row: int) -> Finding:
        message = (
            f"{block.info(row).name} has been the same for {params.num_steps} records in a row: every figure agrees "
            f"within {params.rtol:g} of itself and {params.atol:g}"
        )
        return finding_at(
            self.name,
            block,
            row,
            value=float(params.num_steps),
            threshold=float(params.num_steps),
            message=message,
        )


def _recorded(name: str) -> Column:
    return attrgetter(f"statistics.{name}")


def _derived(figure: Derivation) -> Column:
    return lambda block: figure(block.statistics)


def _validated(block: Block) -> NDArray[np.bool_]:
    """Inputs in another mode than train."""
    inputs = block.mask_of_tensors([info.role == "input" for info in block.catalogue])
    return np.asarray(inputs & (block.mode != 0))
