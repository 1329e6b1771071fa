"""Tanhs and sigmoids most of whose inputs are so far out that the slope there is nothing."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.capture.config import SATURATED_UNITS, UNITS, element_probe
from watchstep.format.block import Block
from watchstep_rules.builtin.activations.saturated_activation import SaturatedActivation
from watchstep_rules.builtin.sagemaker.amazon import ElementCoverage, ScopedParams, is_output_of, percent_of
from watchstep_rules.rule import Finding, Needs, Rule, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import rows_where


class SagemakerSaturatedActivationParams(ScopedParams):
    """Parameters of `SagemakerSaturatedActivation`."""

    amazon: ClassVar[str] = "SaturatedActivation"
    threshold_tanh_min: float = Field(-9.4999, description="Inputs of a tanh up to this are saturated, …")
    threshold_tanh_max: float = Field(9.4999, description="… and from this on.")
    threshold_sigmoid_min: float = Field(-23.0, description="The same for inputs of a sigmoid, …")
    threshold_sigmoid_max: float = Field(16.99999, description="… and its upper bound.")
    threshold_inactivity: float = Field(
        1.0, ge=0, le=100, description="Percent of examples: a unit that is active in fewer is saturated."
    )
    threshold_layer: float = Field(
        50.0, ge=0, le=100, description="Percent of a layer's units above which it is found."
    )

    @property
    def probes(self) -> dict[str, str]:
        """The probe that counts saturated units, by the type of the activation."""
        bounds = {
            "Tanh": (self.threshold_tanh_min, self.threshold_tanh_max),
            "Sigmoid": (self.threshold_sigmoid_min, self.threshold_sigmoid_max),
        }
        return {
            kind: element_probe(SATURATED_UNITS, kind, low, high, self.threshold_inactivity)
            for kind, (low, high) in bounds.items()
        }


class SagemakerSaturatedActivation(Rule[SagemakerSaturatedActivationParams, ElementCoverage]):
    """Fires when more than ``threshold_layer`` percent of the units of a tanh or sigmoid are saturated: SageMaker's rule.

    A unit is active for an example where its *input* lies between the two bounds, and saturated where it is active for less than
    ``threshold_inactivity`` percent of a step's examples. At the default bounds the slope is 1e-7 of its greatest. Units are
    features, or channels of images with all their places. Activations are found by type, calls of `torch.tanh` and
    `torch.sigmoid` among them; ``tensor_regex`` and ``collection_names`` take some of them.

    At ±9.5 float32 has no slope left: `saturated_activation` speaks of slopes that keep a layer from learning, long before.
    """

    name = "sagemaker_saturated_activation"
    summary = "most units of a tanh or sigmoid are saturated, as SageMaker tests it"
    needs = Needs(("activations",), ("output",), probes=("function_calls",))
    merge = "per_worker"
    usual_causes = SaturatedActivation.usual_causes
    what_to_try = SaturatedActivation.what_to_try
    params_type = SagemakerSaturatedActivationParams
    state_type = ElementCoverage

    def needed(self, params: SagemakerSaturatedActivationParams) -> Needs:
        """Units counted by these bounds."""
        probes = (*self.needs.probes, *params.probes.values())
        return params.needs_of(Needs(self.needs.collections, self.needs.roles, probes=probes))

    def problem(self, state: ElementCoverage) -> str:
        """What to do where the recorder did not count."""
        return state.problem("saturated units by these bounds")

    def conclusive(self, params: SagemakerSaturatedActivationParams, block: Block) -> NDArray[np.bool_]:
        """Rows whose units were counted."""
        return has_probe(block, *params.probes.values())

    def evaluate(
        self,
        params: SagemakerSaturatedActivationParams,
        state: ElementCoverage,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Judge each row by itself."""
        findings, chosen = {}, params.rows(block)
        for kind, name in params.probes.items():
            share = percent_of(block, name, UNITS)
            state = state.after(chosen & rows_where(block, is_output_of, kind), share)
            for row in np.flatnonzero(chosen & (share > params.threshold_layer)).tolist():
                units = probe(block, UNITS)[row]
                message = (
                    f"{share[row]:.3g} % of the {units:.0f} units of {block.info(row).name} are saturated: their inputs lie "
                    f"within the bounds for less than {params.threshold_inactivity:g} % of the examples"
                )
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(share[row]),
                    threshold=params.threshold_layer,
                    message=message,
                )
        return state, [findings[row] for row in sorted(findings)]
