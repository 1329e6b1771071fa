"""Parameters that get gradients and that no optimizer holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import in_a_row, probe
from watchstep_rules.signals.tensor_selection import rows_where

_PART = 0.25
"""Share of a model that optimizers hold at least where a layer that they leave out was forgotten: who tunes a head or an adapter holds less."""


class AbsentFromOptimizerParams(Params):
    """Parameters of `AbsentFromOptimizer`."""

    records: int = Field(
        4, ge=1, le=1000, description="Records in a row with a gradient and without an optimizer."
    )
    strict: bool = Field(
        False,
        description="Judge also what may be left out on purpose, as a trunk whose head is trained alone.",
    )


class AbsentFromOptimizer(Rule[AbsentFromOptimizerParams, State]):
    """Fires when a parameter's gradient is not zero, no optimizer holds it, and it has not changed, at ``records`` records in a row.

    ``sum |g| > 0`` and ``w = w of the first record``. Capture takes a record every 25 steps, and looks for all optimizers of the process
    first: one that alternates with others, or has not stepped yet, holds its parameters. A parameter that the program moves itself (an
    average, a target network, a copy of main weights) changes, and is left alone; one with ``requires_grad=False`` has no record.

    A training of the head alone, whose trunk still requires gradients because nobody said otherwise, is common, and no fault. So a
    parameter counts, unless ``strict``, where one of these holds:

    - no optimizer holds anything of the model: it was moved, wrapped or copied after the optimizer was made, or updates go to a copy that never
      comes back;
    - an optimizer held it before;
    - it is a weight matrix after the first layer that is held, and a quarter of the model's elements or more are held: who tunes a prompt, an adapter
      or a head leaves out most of a model, and who leaves out its beginning leaves out what comes first;
    - it is a bias, or another vector, beside a weight matrix that is held.

    By default `weight_not_updating` inhibits it: that rule reports weight matrices, two records earlier, and one report of a fault is enough. It waits
    for all workers for that reason alone.

    """

    name = "absent_from_optimizer"
    summary = "a parameter gets gradients, but no optimizer holds it"
    needs = Needs(collections=("not_in_optimizer",), roles=("not_in_optimizer",))
    merge = "sealed"
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
    cannot_distinguish = (
        "A layer that is left out on purpose between others that learn, from one that was forgotten: set requires_grad=False.",
    )

    def lookback(self, params: AbsentFromOptimizerParams) -> int:
        """The records before."""
        return params.records - 1

    def conclusive(self, params: AbsentFromOptimizerParams, block: Block) -> NDArray[np.bool_]:
        """Rows that say whether the parameter has changed."""
        return has_probe(block, "changed")

    def evaluate(
        self, params: AbsentFromOptimizerParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each record of a parameter that no optimizer holds."""
        found = in_a_row(context, block, _left_out if params.strict else _forgotten, params.records)
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


def _forgotten(rows: Block) -> NDArray[np.bool_]:
    share = probe(rows, "optimized_share")
    is_matrix = rows_where(rows, _is_matrix)
    amid = is_matrix & (probe(rows, "after_optimized") > 0) & (share >= _PART)
    forgotten: NDArray[np.bool_] = (
        (share == 0) | (probe(rows, "was_optimized") > 0) | (probe(rows, "weight_optimized") > 0) | amid
    )
    forgotten &= _left_out(rows)
    return forgotten


def _is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) > 1
