"""A tensor of which a percentage of the elements is zero."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import zero_share
from watchstep_rules.builtin.sagemaker.amazon import ScopedParams
from watchstep_rules.builtin.tensors.all_zero import AllZero
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at


class SagemakerAllZeroParams(ScopedParams):
    """Parameters of `SagemakerAllZero`."""

    amazon: ClassVar[str] = "AllZero"
    threshold: float = Field(
        100.0, ge=0, le=100, description="Percent of zeros from which on a tensor is found."
    )


class SagemakerAllZeroState(State):
    """Nothing."""


class SagemakerAllZero(Rule[SagemakerAllZeroParams, SagemakerAllZeroState]):
    """Fires when at least ``threshold`` percent of a tensor's elements are zero: SageMaker's AllZero.

    Amazon demands ``collection_names`` or ``tensor_regex``. Where neither is given, weights, gradients, activations and inputs are
    judged here. A tensor without elements is left alone. Of shards the whole tensor is judged.
    """

    name = "sagemaker_all_zero"
    summary = "a percentage of a tensor is zero, as SageMaker tests it"
    needs = Needs(
        ("weights", "gradients", "activations", "inputs"), ("weight", "gradient", "output", "input")
    )
    merge = "sealed"
    usual_causes = AllZero.usual_causes
    what_to_try = AllZero.what_to_try
    params_type = SagemakerAllZeroParams
    state_type = SagemakerAllZeroState

    def needed(self, params: SagemakerAllZeroParams) -> Needs:
        """The tensors that are named."""
        return params.needs_of(self.needs)

    def evaluate(
        self,
        params: SagemakerAllZeroParams,
        state: SagemakerAllZeroState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerAllZeroState, list[Finding]]:
        """Judge each row by itself."""
        percent = 100 * zero_share(block.statistics)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(percent[row]),
                threshold=params.threshold,
                message=(
                    f"{percent[row]:.4g} % of the {block.statistics.count[row]} elements of {block.info(int(row)).name} "
                    f"are zero, at least {params.threshold:g} %"
                ),
            )
            for row in np.flatnonzero((percent >= params.threshold) & params.rows(block))
        ]
