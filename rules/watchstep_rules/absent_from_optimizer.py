"""Parameters that get gradients and that no optimizer holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.block import Block
from watchstep_rules.contract import Needs, Params, Rule, State
from watchstep_rules.figures.in_a_row import in_a_row, probe
from watchstep_rules.finding import Finding, finding_at


class AbsentFromOptimizerParams(Params):
    """Parameters of `AbsentFromOptimizer`."""

    records: int = Field(
        4, ge=1, le=1000, description="Records in a row with a gradient and without an optimizer."
    )


class AbsentFromOptimizerState(State):
    """Nothing."""


class AbsentFromOptimizer(Rule[AbsentFromOptimizerParams, AbsentFromOptimizerState]):
    """Fires when a parameter's gradient is not zero, no optimizer holds it, and it has not changed, at ``records`` records in a row.

    ``sum |g| > 0`` and ``w = w of the first record``. Capture knows an optimizer from its first step on; the default of four
    records, 75 steps, waits for those that step seldom. A parameter that the program moves itself (an average, a target
    network) changes, and is left alone.

    A training of the head alone, whose trunk still requires gradients because nobody said otherwise, looks the same and
    is common, so this rule is off by default; what it finds costs a backward pass through the trunk at least.
    """

    name = "absent_from_optimizer"
    summary = "a parameter gets gradients, but no optimizer holds it"
    needs = Needs(collections=("unheld",), roles=("unheld",))
    merge = "per_worker"
    usual_causes = (
        "The layer was made, or put in the place of another, after the optimizer.",
        "The optimizer was given a list of parameters that leaves it out.",
        "Layers in a plain list or dict are not found by parameters().",
    )
    what_to_try = (
        "Make the optimizer after the model is complete, of model.parameters().",
        "Use nn.ModuleList, nn.ModuleDict or nn.ParameterList for layers and parameters in containers.",
        "Freeze on purpose with requires_grad_(False): it saves the backward pass as well.",
    )
    params_type = AbsentFromOptimizerParams
    state_type = AbsentFromOptimizerState

    def lookback(self, params: AbsentFromOptimizerParams) -> int:
        """The records before."""
        return params.records - 1

    def evaluate(
        self,
        params: AbsentFromOptimizerParams,
        state: AbsentFromOptimizerState,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[AbsentFromOptimizerState, list[Finding]]:
        """Judge each record of a parameter that no optimizer holds."""
        found = in_a_row(context, block, _left_out, params.records)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(block.statistics.abs_sum[row]),
                threshold=0.0,
                message=(
                    f"{block.info(int(row)).name}: sum |gradient| is {block.statistics.abs_sum[row]:.3g}, no optimizer holds "
                    f"the parameter, and it has not changed, at {params.records} records in a row"
                ),
            )
            for row in np.flatnonzero(found)
        ]


def _left_out(rows: Block) -> NDArray[np.bool_]:
    left_out: NDArray[np.bool_] = (rows.statistics.abs_sum > 0) & (probe(rows, "changed") == 0)
    return left_out
