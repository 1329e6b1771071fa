"""A tensor that holds NaN or infinity, whichever tensor it is."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.builtin.gradients.non_finite_values import NonFiniteValues
from watchstep_rules.builtin.sagemaker.amazon import ScopedParams
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_elements


class SagemakerExplodingTensorParams(ScopedParams):
    """Parameters of `SagemakerExplodingTensor`."""

    amazon: ClassVar[str] = "ExplodingTensor"
    only_nan: bool = Field(False, description="Leave infinities out.")


class SagemakerExplodingTensorState(State):
    """Nothing."""


class SagemakerExplodingTensor(Rule[SagemakerExplodingTensorParams, SagemakerExplodingTensorState]):
    """Fires when ``nan + pos_inf + neg_inf > 0``, or ``nan > 0`` with ``only_nan``, of any tensor: SageMaker's ExplodingTensor.

    All tensors that are recorded are judged, or those that are named. Masks of -inf, a best loss that begins as infinity, and
    inputs with gaps are found: `non_finite_values` leaves them alone.
    """

    name = "sagemaker_exploding_tensor"
    summary = "a tensor holds NaN or infinity, as SageMaker tests it"
    needs = Needs(("weights", "biases", "gradients", "activations", "outputs", "inputs", "losses", "metrics"))
    merge = "per_worker"
    usual_causes = NonFiniteValues.usual_causes
    what_to_try = NonFiniteValues.what_to_try
    params_type = SagemakerExplodingTensorParams
    state_type = SagemakerExplodingTensorState

    def needed(self, params: SagemakerExplodingTensorParams) -> Needs:  # noqa: ARG002 - the contract's
        """All that is recorded, collections of the program's own among it."""
        return Needs(())

    def conclusive(self, params: SagemakerExplodingTensorParams, block: Block) -> NDArray[np.bool_]:  # noqa: ARG002 - the contract's
        """Rows of tensors with elements: those that are not finite are what it is about."""
        return has_elements(block)

    def evaluate(
        self,
        params: SagemakerExplodingTensorParams,
        state: SagemakerExplodingTensorState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerExplodingTensorState, list[Finding]]:
        """Judge each row by itself."""
        held = block.statistics
        bad = held.nan if params.only_nan else held.nonfinite
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(bad[row]),
                threshold=0.0,
                message=(
                    f"{bad[row]} of {held.count[row]} elements of {block.info(int(row)).name} are "
                    f"{'NaN' if params.only_nan else 'NaN or infinite'}"
                ),
            )
            for row in np.flatnonzero((bad > 0) & params.rows(block))
        ]
