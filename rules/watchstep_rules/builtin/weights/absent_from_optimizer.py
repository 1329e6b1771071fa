"""Parameters that get gradients but are in no optimizer."""

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
"""Smallest optimized share of a model for which a missing layer counts as forgotten; tuning a head or an adapter optimizes less."""


class AbsentFromOptimizerParams(Params):
    """Parameters of `AbsentFromOptimizer`."""

    records: int = Field(
        4, ge=1, le=1000, description="Consecutive records with a gradient and without an optimizer."
    )
    strict: bool = Field(
        False,
        description="Whether to report parameters that may be excluded on purpose, such as a trunk while only the head is trained.",
    )


class AbsentFromOptimizer(Rule[AbsentFromOptimizerParams, State]):
    """Fires when a parameter has a non-zero gradient, is in no optimizer, and has not changed, at ``records`` consecutive records.

    ``sum |g| > 0`` and ``w = w of the first record``. Capture takes a record every 25 steps, and first searches for all optimizers of the
    process, including those that alternate with others or have not stepped yet. A parameter that the program moves itself (an average, a
    target network, a copy of main weights) changes and is not reported; one with ``requires_grad=False`` has no record.

    Training only the head while the trunk still requires gradients is common and not a fault. Without ``strict``, a parameter is therefore
    reported only if one of these conditions is true:

    - no optimizer has any parameter of the model: it was moved, wrapped or copied after the optimizer was created, or updates go to a copy
      that is never copied back;
    - it was in an optimizer before;
    - it is a weight matrix after the first optimized layer, and a quarter of the model's elements or more are optimized: tuning a prompt,
      an adapter or a head excludes most of a model, and freezing the first layers excludes layers at the beginning;
    - it is a bias, or another vector, of a module with an optimized weight matrix.

    By default `weight_not_updating` inhibits this rule, because it reports weight matrices two records earlier, and one report of a fault is
    enough. This rule waits for all workers only for that reason.
    """

    name = "absent_from_optimizer"
    summary = "a parameter gets gradients but is in no optimizer"
    needs = Needs(collections=("not_in_optimizer",), roles=("not_in_optimizer",))
    merge = "watermark"
    usual_causes = (
        "The layer was created, or replaced another, after the optimizer was created.",
        "The optimizer was created with a list of parameters without it.",
        "Layers in a plain list or dict are not returned by parameters().",
    )
    what_to_try = (
        "Create the optimizer from model.parameters() after the model is complete.",
        "Use nn.ModuleList, nn.ModuleDict or nn.ParameterList for layers and parameters in containers.",
        "Freeze on purpose with requires_grad_(False): it saves the backward pass as well.",
    )
    cannot_distinguish = (
        "A layer between learning layers that is excluded on purpose, from one that was forgotten: set requires_grad=False.",
    )

    def lookback(self, params: AbsentFromOptimizerParams) -> int:
        """Return the number of previous records."""
        return params.records - 1

    def conclusive(self, params: AbsentFromOptimizerParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows that show whether the parameter has changed."""
        return has_probe(block, "changed")

    def evaluate(
        self, params: AbsentFromOptimizerParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Evaluate each record of a parameter in no optimizer."""
        is_hit = in_a_row(context, block, _unoptimized if params.strict else _forgotten, params.records)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(block.statistics.abs_sum[row]),
                threshold=0.0,
                message=(
                    f"{block.info(int(row)).name}: sum |gradient| is {block.statistics.abs_sum[row]:.3g}, the parameter is in no "
                    f"optimizer, and it has not changed, at {params.records} records in a row"
                ),
            )
            for row in np.flatnonzero(is_hit)
        ]


def _unoptimized(rows: Block) -> NDArray[np.bool_]:
    unoptimized: NDArray[np.bool_] = (rows.statistics.abs_sum > 0) & (probe(rows, "changed") == 0)
    return unoptimized


def _forgotten(rows: Block) -> NDArray[np.bool_]:
    share = probe(rows, "optimized_share")
    is_matrix = rows_where(rows, _is_matrix)
    after_optimized = is_matrix & (probe(rows, "after_optimized") > 0) & (share >= _PART)
    forgotten: NDArray[np.bool_] = (
        (share == 0)
        | (probe(rows, "was_optimized") > 0)
        | (probe(rows, "weight_optimized") > 0)
        | after_optimized
    )
    forgotten &= _unoptimized(rows)
    return forgotten


def _is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) > 1
