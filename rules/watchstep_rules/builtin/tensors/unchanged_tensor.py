"""A tensor that does not change from record to record."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_elements
from watchstep_rules.signals.reference import COLUMNS, is_within, may_be_close
from watchstep_rules.signals.series import LaggedRows


class UnchangedTensorParams(Params):
    """Parameters of `UnchangedTensor`."""

    num_steps: int = Field(3, ge=2, le=100, description="Number of consecutive equal records.")
    rtol: float = Field(
        1e-5, ge=0, lt=1, description="Ignored difference as a share of the earlier element, added to atol."
    )
    atol: float = Field(1e-8, ge=0, description="Ignored absolute difference.")
    equal_nan: bool = Field(False, description="Whether tensors with NaN can be equal.")


class UnchangedTensor(Rule[UnchangedTensorParams, State]):
    """Fires when the statistics of the last ``num_steps`` records of a tensor agree with the newest.

    The counts of elements, NaN and infinities must be equal. Minimum, maximum, mean, mean magnitude and root mean square may differ by no
    more than is possible if each element moved by at most ``atol + rtol * |old|`` (the bounds are derived in
    `watchstep_rules.signals.reference`). Checksums must be equal. Inputs are judged in train mode only, because validation uses the same
    examples each time.

    Every tensor that is equal by ``numpy.allclose`` is reported. A tensor with permuted elements is also reported. The rule is off by
    default: inputs of a training on one batch, outputs of a converged training and frozen weights are equal on purpose.
    """

    name = "unchanged_tensor"
    summary = "a tensor does not change from record to record"
    needs = Needs(
        collections=("weights", "gradients", "activations", "inputs", "losses", "checksums", "custom")
    )
    merge = "watermark"
    usual_causes = (
        "A weight: it is in no optimizer, its learning rate is zero, or it is frozen.",
        "An input: the program uses the same batch each time.",
        "An output or loss: its inputs do not change, or the same value is logged repeatedly.",
    )
    what_to_try = (
        "Check the parameters of the optimizer, and requires_grad.",
        "Check the data iterator: next(iter(loader)) in a loop returns the same batch if it is not shuffled.",
        "Log the loss of the step, not a loss computed before the loop.",
    )

    def lookback(self, params: UnchangedTensorParams) -> int:
        """The earlier records."""
        return params.num_steps - 1

    def conclusive(self, params: UnchangedTensorParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, of any kind."""
        return has_elements(block)

    def evaluate(
        self, params: UnchangedTensorParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Compare each row with the last records of its series."""
        lagged = LaggedRows.of(context, block)
        same = (block.statistics.count > 0) & ~_validated(block)
        exact = block.mask_of_tensors([info.role == "checksum" for info in block.catalogue])
        if not params.equal_nan:
            same &= block.statistics.nan == 0
        rows = self._with_close_minimum(params, lagged, np.flatnonzero(same))
        if not len(rows):
            return state, []
        columns = {name: lagged.column(figure) for name, figure in COLUMNS.items()}
        for lag in range(1, params.num_steps):
            at_rows = lagged.at(rows)
            new, old = (
                {name: at_rows.lag(column, back) for name, column in columns.items()} for back in (0, lag)
            )
            close = may_be_close(new.__getitem__, old.__getitem__, params.rtol, params.atol)
            rows = rows[close & (~exact[rows] | (new["mean"] == old["mean"]))]
        return state, [self._finding(params, block, int(row)) for row in rows]

    def _with_close_minimum(
        self, params: UnchangedTensorParams, lagged: LaggedRows, rows: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Rows with a nearly unchanged minimum. This single column excludes nearly all rows of a training that learns."""
        minimum = lagged.column(COLUMNS["min"])
        for lag in range(1, params.num_steps):
            new, old = minimum[len(lagged.context) + rows], lagged.at(rows).lag(minimum, lag)
            rows = rows[is_within(new, old, old, params.rtol, params.atol)]
        return rows

    def _finding(self, params: UnchangedTensorParams, block: Block, row: int) -> Finding:
        message = (
            f"{block.info(row).name} has not changed for {params.num_steps} records in a row: no statistic has moved by more "
            f"than a change of each element by {params.rtol:g} of it plus {params.atol:g} allows"
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
    """Inputs in modes other than train."""
    inputs = block.mask_of_tensors([info.role == "input" for info in block.catalogue])
    return np.asarray(inputs & (block.mode != 0))
