"""A tensor that does not change from record to record, by the test of ``numpy.allclose``."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.capture.config import UNCHANGED, element_probe
from watchstep.format.block import Block
from watchstep_rules.builtin.sagemaker.amazon import ElementCoverage, ScopedParams
from watchstep_rules.builtin.tensors.unchanged_tensor import UnchangedTensor
from watchstep_rules.rule import Finding, Needs, Rule, finding_at
from watchstep_rules.signals.nonfinite import has_elements
from watchstep_rules.signals.ranges.closeness import COLUMNS, may_be_close
from watchstep_rules.signals.series import Trail, probe


class SagemakerUnchangedTensorParams(ScopedParams):
    """Parameters of `SagemakerUnchangedTensor`."""

    amazon: ClassVar[str] = "UnchangedTensor"
    num_steps: int = Field(3, ge=2, le=100, description="Last records that must be the same.")
    rtol: float = Field(
        1e-5, ge=0, lt=1, description="Difference that is none, as a share of the earlier element."
    )
    atol: float = Field(1e-8, ge=0, description="Difference that is none, whatever the element.")
    equal_nan: bool = Field(False, description="Whether NaN is the same as NaN.")

    @property
    def probe(self) -> str:
        """The probe that compares elements."""
        return element_probe(UNCHANGED, self.rtol, self.atol, self.equal_nan)


class SagemakerUnchangedTensor(Rule[SagemakerUnchangedTensorParams, ElementCoverage]):
    """Fires when of the last ``num_steps`` records of a tensor each is ``numpy.allclose`` to the one before: SageMaker's rule.

    Single numbers are compared here, elements of tensors by the recorder. Of tensors of more than 16,384 elements, or where there
    are many, evenly spaced elements are compared, and all figures of the row must agree. Amazon demands ``collection_names`` or
    ``tensor_regex``. Where neither is given, losses are judged here. Of shards each is judged by itself.
    """

    name = "sagemaker_unchanged_tensor"
    summary = "a tensor does not change, as SageMaker tests it"
    needs = Needs(("losses",))
    merge = "per_worker"
    usual_causes = UnchangedTensor.usual_causes
    what_to_try = UnchangedTensor.what_to_try
    params_type = SagemakerUnchangedTensorParams
    state_type = ElementCoverage

    def needed(self, params: SagemakerUnchangedTensorParams) -> Needs:
        """The tensors that are named, compared with these tolerances."""
        return params.needs_of(Needs(self.needs.collections, probes=(params.probe,)))

    def lookback(self, params: SagemakerUnchangedTensorParams) -> int:
        """The other records."""
        return params.num_steps - 1

    def problem(self, state: ElementCoverage) -> str:
        """What to do where the recorder did not compare."""
        return state.problem("whether elements change by more than these tolerances")

    def conclusive(self, params: SagemakerUnchangedTensorParams, block: Block) -> NDArray[np.bool_]:  # noqa: ARG002 - the contract's
        """Rows of tensors with elements, of any kind."""
        return has_elements(block)

    def evaluate(
        self,
        params: SagemakerUnchangedTensorParams,
        state: ElementCoverage,
        context: Block,
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Hold each of the last records against the one before."""
        chosen, several = params.rows(block), block.statistics.count > 1
        compared = probe(block, params.probe)
        state = state.after(chosen & several, compared)
        same = chosen & (block.statistics.count > 0) & ~(several & ~(compared > 0))
        left = np.flatnonzero(same)
        if len(left):
            left = self._same(params, Trail.of(context, block), left)
        return state, [
            finding_at(
                self.name,
                block,
                row,
                value=float(params.num_steps),
                threshold=float(params.num_steps),
                message=(
                    f"the last {params.num_steps} records of {block.info(row).name} are the same, within {params.rtol:g} of "
                    f"each element and {params.atol:g}"
                ),
            )
            for row in left.tolist()
        ]

    def _same(
        self, params: SagemakerUnchangedTensorParams, trail: Trail, left: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Those of some rows whose last records are the same, step by step back."""
        columns = {name: trail.column(figure) for name, figure in COLUMNS.items()}
        compared = trail.column(lambda rows: probe(rows, params.probe))
        for back in range(params.num_steps - 1):
            places = trail.at(left)
            later = {name: places.back(column, back) for name, column in columns.items()}
            earlier = {name: places.back(column, back + 1) for name, column in columns.items()}
            close = may_be_close(later.__getitem__, earlier.__getitem__, params.rtol, params.atol)
            single = later["count"] == 1
            if not params.equal_nan:
                close &= later["nan"] == 0
            left = left[close & (single | (places.back(compared, back) > 0))]
        return left
