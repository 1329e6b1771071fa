"""A run whose tensors are not those of another run."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from watchstep.format.block import Block, view
from watchstep_rules.builtin.sagemaker.amazon import ScopedParams
from watchstep_rules.builtin.tensors.similar_across_runs import (
    References,
    SimilarAcrossRuns,
    SimilarAcrossRunsParams,
    SimilarAcrossRunsState,
    ascending,
)
from watchstep_rules.rule import Finding, Rule

_INNER = SimilarAcrossRuns()
_RTOL, _ATOL = 1e-5, 1e-8


class SagemakerSimilarAcrossRunsParams(ScopedParams):
    """Parameters of `SagemakerSimilarAcrossRuns`."""

    amazon: ClassVar[str] = "SimilarAcrossRuns"
    other_trials: References = Field(
        {},
        description="The other run's figures, as watchstep_rules.signals.ranges.reference.reference_of(rows, 'rms') gives them.",
    )

    @field_validator("other_trials", mode="before")
    @classmethod
    def _is_no_address(cls, value: Any) -> Any:
        if isinstance(value, str | list):
            raise ValueError(  # noqa: TRY004 - pydantic takes no other
                f"{str(value)[:80]!r}: a rule reads no other run; give the figures that "
                "watchstep_rules.signals.ranges.reference.reference_of(watchstep.open_run(URL).rows()) makes of it"
            )
        return value

    @field_validator("other_trials")
    @classmethod
    def _ascending(cls, value: References) -> References:
        return ascending(value)


class SagemakerSimilarAcrossRuns(Rule[SagemakerSimilarAcrossRunsParams, SimilarAcrossRunsState]):
    """Fires when the root mean square of a tensor is not that of another run at the same step, by the tolerances of allclose.

    SageMaker's SimilarAcrossRuns compares tensors by a criterion that is not published; here
    ``|rms - rms_other| > 1e-8 + 1e-5 * |rms_other|``, as `similar_across_runs` compares them. An equal run never fires, one of another
    seed does at once.
    """

    name = "sagemaker_similar_across_runs"
    summary = "tensors are not those of another run"
    needs = SimilarAcrossRuns.needs
    merge = "sealed"
    usual_causes = SimilarAcrossRuns.usual_causes
    what_to_try = SimilarAcrossRuns.what_to_try
    params_type = SagemakerSimilarAcrossRunsParams
    state_type = SimilarAcrossRunsState

    def evaluate(
        self,
        params: SagemakerSimilarAcrossRunsParams,
        state: SimilarAcrossRunsState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SimilarAcrossRunsState, list[Finding]]:
        """Hold the tensors that are named against the other run."""
        chosen = view(block, np.flatnonzero(params.rows(block)))
        inner = SimilarAcrossRunsParams.model_construct(
            reference=params.other_trials, figure="rms", tolerance=_RTOL, atol=_ATOL
        )
        state, findings = _INNER.evaluate(inner, state, context, chosen, now)
        return state, [finding.model_copy(update={"rule": self.name}) for finding in findings]
