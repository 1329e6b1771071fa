"""Rectifiers most of whose units are hardly ever above zero."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.capture.config import INACTIVE_UNITS, UNITS, element_probe
from watchstep.format.block import Block
from watchstep_rules.builtin.activations.dead_relu import DeadRelu
from watchstep_rules.builtin.sagemaker.amazon import (
    AmazonParams,
    ElementCoverage,
    Patterns,
    is_matched,
    is_output_of,
    percent_of,
)
from watchstep_rules.rule import Finding, Needs, Rule, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import rows_where


class SagemakerDeadReluParams(AmazonParams):
    """Parameters of `SagemakerDeadRelu`."""

    amazon: ClassVar[str] = "DeadRelu"
    tensor_regex: Patterns | None = Field(
        None, description="Rectifiers by name, Watchstep's or SageMaker's; all where it is left out."
    )
    threshold_inactivity: float = Field(
        1.0, ge=0, le=100, description="Percent of examples: a unit that is active in fewer is dead."
    )
    threshold_layer: float = Field(
        50.0, ge=0, le=100, description="Percent of a layer's units above which it is found."
    )

    @property
    def probe(self) -> str:
        """The probe that counts dead units."""
        return element_probe(INACTIVE_UNITS, self.threshold_inactivity)


class SagemakerDeadRelu(Rule[SagemakerDeadReluParams, ElementCoverage]):
    """Fires when more than ``threshold_layer`` percent of the units of a rectifier are dead: SageMaker's DeadRelu.

    A unit is dead where its output is above zero for less than ``threshold_inactivity`` percent of a step's examples. Units are
    features, or channels of images with all their places. Rectifiers are found by type, calls of `torch.relu` among them;
    ``tensor_regex`` takes some of them.

    Healthy sparse networks have such layers: `dead_relu` asks for nine tenths of them, and for units that no example wakes.
    """

    name = "sagemaker_dead_relu"
    summary = "most units of a rectifier are dead, as SageMaker tests it"
    needs = Needs(("activations",), ("output",), probes=("function_calls",))
    merge = "per_worker"
    usual_causes = DeadRelu.usual_causes
    what_to_try = DeadRelu.what_to_try
    params_type = SagemakerDeadReluParams
    state_type = ElementCoverage

    def needed(self, params: SagemakerDeadReluParams) -> Needs:
        """Units counted by this threshold."""
        return Needs(self.needs.collections, self.needs.roles, probes=(*self.needs.probes, params.probe))

    def problem(self, state: ElementCoverage) -> str:
        """What to do where the recorder did not count."""
        return state.problem("units that are active in so few examples")

    def conclusive(self, params: SagemakerDeadReluParams, block: Block) -> NDArray[np.bool_]:
        """Rows whose units were counted."""
        return has_probe(block, params.probe)

    def evaluate(
        self,
        params: SagemakerDeadReluParams,
        state: ElementCoverage,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Judge each row by itself."""
        share = percent_of(block, params.probe, UNITS)
        rectifiers = rows_where(block, is_output_of, "ReLU", "ReLU6")
        if params.tensor_regex is not None:
            named = rows_where(block, is_matched, params.tensor_regex)
            rectifiers, share = rectifiers & named, np.where(named, share, np.nan)
        return state.after(rectifiers, share), [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(share[row]),
                threshold=params.threshold_layer,
                message=(
                    f"{share[row]:.3g} % of the {probe(block, UNITS)[row]:.0f} units of {block.info(int(row)).name} are above "
                    f"zero for less than {params.threshold_inactivity:g} % of the examples"
                ),
            )
            for row in np.flatnonzero(share > params.threshold_layer)
        ]
