"""SageMaker rules about single tensors: all zero, exploding, similar across runs, variance, unchanged and vanishing gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from watchstep.capture.config import UNCHANGED, element_probe
from watchstep.format.block import Block, view
from watchstep.format.statistics import abs_mean, variance, zero_share
from watchstep_rules.builtin.gradients.non_finite_values import NonFiniteValues
from watchstep_rules.builtin.gradients.vanishing_gradient import VanishingGradient
from watchstep_rules.builtin.sagemaker.parameters import (
    AmazonParams,
    ElementCoverage,
    SaveInterval,
    ScopedParams,
    earlier_values,
)
from watchstep_rules.builtin.tensors.all_zero import AllZero
from watchstep_rules.builtin.tensors.similar_across_runs import (
    RUN_PATTERN,
    References,
    SimilarAcrossRuns,
    SimilarAcrossRunsParams,
    SimilarAcrossRunsState,
    ascending,
    check_reference,
    compare_elements,
    has_counterpart,
    saved_in_both_runs,
    statistics_of_reference,
)
from watchstep_rules.builtin.tensors.tensor_variance import TensorVariance
from watchstep_rules.builtin.tensors.unchanged_tensor import UnchangedTensor
from watchstep_rules.rule import Finding, Merge, Needs, Rule, State, TensorNeeds, finding_at
from watchstep_rules.saved_block import SavedBlock
from watchstep_rules.signals.nonfinite import has_elements
from watchstep_rules.signals.reference import COLUMNS, may_be_close
from watchstep_rules.signals.series import LaggedRows, probe


class SagemakerAllZeroParams(ScopedParams):
    """Parameters of `SagemakerAllZero`."""

    amazon: ClassVar[str] = "AllZero"
    threshold: float = Field(100.0, ge=0, le=100, description="Percent of zeros at which the rule fires.")


class SagemakerAllZero(Rule[SagemakerAllZeroParams, State]):
    """Fires when at least ``threshold`` percent of a tensor's elements are zero: SageMaker's AllZero.

    Amazon requires ``collection_names`` or ``tensor_regex``. Without both, weights, gradients, activations and inputs are judged here. A
    tensor without elements is not judged. Shards are judged as a whole tensor.
    """

    name = "sagemaker_all_zero"
    summary = "a percentage of a tensor is zero, by SageMaker's criterion"
    needs = Needs(
        ("weights", "gradients", "activations", "inputs"), ("weight", "gradient", "output", "input")
    )
    merge = "watermark"
    usual_causes = AllZero.usual_causes
    what_to_try = AllZero.what_to_try

    def needed(self, params: SagemakerAllZeroParams) -> Needs:
        """The tensors that are named."""
        return params.needs_of(self.needs)

    def evaluate(
        self, params: SagemakerAllZeroParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
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


class SagemakerExplodingTensorParams(ScopedParams):
    """Parameters of `SagemakerExplodingTensor`."""

    amazon: ClassVar[str] = "ExplodingTensor"
    only_nan: bool = Field(False, description="Ignore infinities.")


class SagemakerExplodingTensor(Rule[SagemakerExplodingTensorParams, State]):
    """Fires when ``nan + pos_inf + neg_inf > 0``, or ``nan > 0`` with ``only_nan``, of any tensor: SageMaker's ExplodingTensor.

    All recorded tensors are judged, or the named ones. Masks of -inf, a best loss that starts at infinity, and inputs with missing values are
    reported; `non_finite_values` does not report them.
    """

    name = "sagemaker_exploding_tensor"
    summary = "a tensor contains NaN or infinity, by SageMaker's criterion"
    needs = Needs(("weights", "biases", "gradients", "activations", "outputs", "inputs", "losses", "metrics"))
    merge = "per_worker"
    usual_causes = NonFiniteValues.usual_causes
    what_to_try = NonFiniteValues.what_to_try

    def needed(self, params: SagemakerExplodingTensorParams) -> Needs:
        """All recorded tensors, including custom collections."""
        return Needs(())

    def conclusive(self, params: SagemakerExplodingTensorParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, whether finite or not."""
        return has_elements(block)

    def evaluate(
        self, params: SagemakerExplodingTensorParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each row by itself."""
        statistics = block.statistics
        bad = statistics.nan if params.only_nan else statistics.nonfinite
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(bad[row]),
                threshold=0.0,
                message=(
                    f"{bad[row]} of {statistics.count[row]} elements of {block.info(int(row)).name} are "
                    f"{'NaN' if params.only_nan else 'NaN or infinite'}"
                ),
            )
            for row in np.flatnonzero((bad > 0) & params.rows(block))
        ]


_INNER = SimilarAcrossRuns()
_RTOL, _ATOL = 1e-5, 1e-8


class SagemakerSimilarAcrossRunsParams(ScopedParams):
    """Parameters of `SagemakerSimilarAcrossRuns`."""

    amazon: ClassVar[str] = "SimilarAcrossRuns"
    other_trials: str | References = Field(
        "",
        description="The other run, of the same project, as SageMaker's list of one trial; or its statistics, a result of "
        "watchstep_rules.signals.reference.reference_of(rows, 'rms').",
    )
    reference: References = Field(
        {}, description="Set when an attempt begins: the statistics of the other run."
    )
    elementwise: bool = Field(
        False,
        description="Compare each element of full tensors that both runs saved, instead of the root mean square: of weights and biases, or "
        "of collection_names.",
    )
    save_interval: int = Field(
        500,
        ge=1,
        lt=2**31,
        description="For elementwise: steps between saved tensors, as in SageMaker's CollectionConfig.",
    )

    @model_validator(mode="after")
    def _has_tensors(self) -> SagemakerSimilarAcrossRunsParams:
        if self.elementwise and not self.run:
            raise ValueError(
                "elementwise compares the saved tensors of another run: name it in 'other_trials'"
            )
        return self

    @field_validator("other_trials", mode="before")
    @classmethod
    def _of_trials(cls, value: Any) -> Any:
        if isinstance(value, list):
            if len(value) != 1:
                raise ValueError(f"{len(value)} trials: a run is compared with one other run")
            value = value[0]
        if isinstance(value, str) and not re.fullmatch(RUN_PATTERN, value):
            raise ValueError(f"{value[:80]!r}: use the name of a run of the same project, not an address")
        return value

    @field_validator("other_trials", "reference")
    @classmethod
    def _ascending(cls, value: str | References) -> str | References:
        return value if isinstance(value, str) else ascending(value)

    @property
    def run(self) -> str:
        """The other run; empty if its statistics are given."""
        return self.other_trials if isinstance(self.other_trials, str) else ""

    @property
    def statistics(self) -> References:
        """The statistics of the other run."""
        return self.reference if isinstance(self.other_trials, str) else self.other_trials


class SagemakerSimilarAcrossRuns(Rule[SagemakerSimilarAcrossRunsParams, SimilarAcrossRunsState]):
    """Fires when the root mean square of a tensor is not that of another run at the same step, by the tolerances of allclose.

    SageMaker's SimilarAcrossRuns compares tensors by a criterion that is not published; here
    ``|rms - rms_other| > 1e-8 + 1e-5 * |rms_other|``, as `similar_across_runs` compares them. An equal run never fires, one of another
    seed does at once. With ``elementwise`` both runs save full tensors, and each element is compared by the same tolerances, as
    `numpy.allclose` does.
    """

    name = "sagemaker_similar_across_runs"
    summary = "tensors are not those of another run"
    needs = SimilarAcrossRuns.needs
    merge = "watermark"
    reference_param = "reference"
    usual_causes = SimilarAcrossRuns.usual_causes
    what_to_try = SimilarAcrossRuns.what_to_try

    def reference(self, params: SagemakerSimilarAcrossRunsParams) -> str:
        """The other run."""
        return params.run

    def reference_figure(self, params: SagemakerSimilarAcrossRunsParams) -> str:
        """The root mean square; none for full tensors."""
        return "" if params.elementwise else "rms"

    def needed(self, params: SagemakerSimilarAcrossRunsParams) -> Needs:
        """Statistics, or full tensors of both runs."""
        if not params.elementwise:
            return self.needs
        return saved_in_both_runs(
            self.needs, params.saved_collections("weights", "biases"), params.save_interval
        )

    def merged(self, params: SagemakerSimilarAcrossRunsParams) -> Merge:
        """Full tensors are compared worker by worker."""
        return "per_worker" if params.elementwise else self.merge

    def problem(self, state: SimilarAcrossRunsState) -> str:
        """That no saved tensor could be compared."""
        return state.problem

    def conclusive(self, params: SagemakerSimilarAcrossRunsParams, block: Block) -> NDArray[np.bool_]:
        """Rows that have a counterpart in the other run."""
        if isinstance(block, SavedBlock):
            return has_counterpart(block)
        return np.isfinite(statistics_of_reference(params.statistics, block))

    def evaluate(
        self,
        params: SagemakerSimilarAcrossRunsParams,
        state: SimilarAcrossRunsState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SimilarAcrossRunsState, Sequence[Finding]]:
        """Compare the named tensors with the other run.

        Raises:
            RuleError: the statistics of the other run are not known.
        """
        if params.elementwise:
            named = block.where(params.rows(block))
            return compare_elements(self.name, params.run, (_RTOL, _ATOL), state, named)
        check_reference(params.run, params.statistics)
        chosen = view(block, np.flatnonzero(params.rows(block)))
        inner = SimilarAcrossRunsParams.model_construct(
            reference=params.statistics, figure="rms", tolerance=_RTOL, atol=_ATOL
        )
        state, findings = _INNER.evaluate(inner, state, context, chosen, now)
        return state, [finding.model_copy(update={"rule": self.name}) for finding in findings]


class SagemakerTensorVarianceParams(ScopedParams):
    """Parameters of `SagemakerTensorVariance`; it judges nothing until a bound is given."""

    amazon: ClassVar[str] = "TensorVariance"
    max_threshold: float | None = Field(None, ge=0, description="Largest tolerated variance.")
    min_threshold: float | None = Field(None, ge=0, description="Smallest tolerated variance.")


class SagemakerTensorVariance(Rule[SagemakerTensorVarianceParams, State]):
    """Fires when ``var(t) > max_threshold`` or ``var(t) < min_threshold``, the population variance: SageMaker's TensorVariance.

    A tensor with NaN or infinity has no variance, and a single element has a variance of 0. Amazon requires ``collection_names`` or
    ``tensor_regex``. Without both, weights, gradients and activations are judged here.
    """

    name = "sagemaker_tensor_variance"
    summary = "a tensor's variance is above or below given bounds, by SageMaker's criterion"
    needs = Needs(("weights", "gradients", "activations"), ("weight", "gradient", "output"))
    merge = "watermark"
    usual_causes = TensorVariance.usual_causes
    what_to_try = TensorVariance.what_to_try

    def needed(self, params: SagemakerTensorVarianceParams) -> Needs:
        """The tensors that are named."""
        return params.needs_of(self.needs)

    def evaluate(
        self, params: SagemakerTensorVarianceParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each row by itself."""
        judged = params.rows(block) & (block.statistics.nonfinite == 0)
        spread = np.where(judged, variance(block.statistics), np.nan)
        high = np.inf if params.max_threshold is None else params.max_threshold
        low = -np.inf if params.min_threshold is None else params.min_threshold
        findings = []
        for row in np.flatnonzero((spread > high) | (spread < low)).tolist():
            limit, word = (high, "above") if spread[row] > high else (low, "below")
            message = f"the variance of {block.info(row).name} is {spread[row]:.4g}, {word} {limit:.4g}"
            findings.append(
                finding_at(
                    self.name, block, row, value=float(spread[row]), threshold=float(limit), message=message
                )
            )
        return state, findings


class SagemakerUnchangedTensorParams(ScopedParams):
    """Parameters of `SagemakerUnchangedTensor`."""

    amazon: ClassVar[str] = "UnchangedTensor"
    num_steps: int = Field(3, ge=2, le=100, description="Last records that must be the same.")
    rtol: float = Field(
        1e-5, ge=0, lt=1, description="Difference that is none, as a share of the earlier element."
    )
    atol: float = Field(1e-8, ge=0, description="Difference that is none, whatever the element.")
    equal_nan: bool = Field(False, description="Whether NaN is the same as NaN.")
    full_tensors: bool = Field(
        False,
        description="Compare all elements of saved tensors, instead of those that the recorder samples.",
    )
    save_interval: SaveInterval

    @property
    def probe(self) -> str:
        """The probe that compares elements."""
        return element_probe(UNCHANGED, self.rtol, self.atol, self.equal_nan)


class SagemakerUnchangedTensor(Rule[SagemakerUnchangedTensorParams, ElementCoverage]):
    """Fires when of the last ``num_steps`` records of a tensor each is ``numpy.allclose`` to the one before: SageMaker's rule.

    Single numbers are compared here, elements of tensors by the recorder. Of tensors of more than 16,384 elements, or where there
    are many, evenly spaced elements are compared, and all figures of the row must agree. With ``full_tensors`` records are saved tensors,
    and all of their elements are compared. Amazon demands ``collection_names`` or ``tensor_regex``. Where neither is given, losses are
    judged here. Of shards each is judged by itself.
    """

    name = "sagemaker_unchanged_tensor"
    summary = "a tensor does not change, by SageMaker's criterion"
    needs = Needs(("losses",))
    merge = "per_worker"
    usual_causes = UnchangedTensor.usual_causes
    what_to_try = UnchangedTensor.what_to_try

    def needed(self, params: SagemakerUnchangedTensorParams) -> Needs:
        """The tensors that are named, compared with these tolerances or in full."""
        if params.full_tensors:
            collections = params.saved_collections(*self.needs.collections)
            return Needs(collections, tensors=TensorNeeds(params.save_interval, ()))
        return params.needs_of(Needs(self.needs.collections, probes=(params.probe,)))

    def lookback(self, params: SagemakerUnchangedTensorParams) -> int:
        """The other records."""
        return params.num_steps - 1

    def problem(self, state: ElementCoverage) -> str:
        """What to do where the recorder did not compare."""
        return state.problem("whether elements change by more than these tolerances")

    def conclusive(self, params: SagemakerUnchangedTensorParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, of any kind."""
        return has_elements(block)

    def evaluate(
        self,
        params: SagemakerUnchangedTensorParams,
        state: ElementCoverage,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Hold each of the last records against the one before."""
        if isinstance(context, SavedBlock) and isinstance(block, SavedBlock):
            named = params.rows(block)
            return state, [
                self._finding(params, block, row)
                for row, earlier in earlier_values(context, block, params.num_steps - 1)
                if named[row]
                and self._all_same(params, [*(record.values for record in earlier), block.values[row]])
            ]
        chosen, several = params.rows(block), block.statistics.count > 1
        compared = probe(block, params.probe)
        state = state.after(chosen & several, compared)
        same = chosen & (block.statistics.count > 0) & ~(several & ~(compared > 0))
        left = np.flatnonzero(same)
        if len(left):
            left = self._same(params, LaggedRows.of(context, block), left)
        return state, [self._finding(params, block, row) for row in left.tolist()]

    def _finding(self, params: SagemakerUnchangedTensorParams, block: Block, row: int) -> Finding:
        return finding_at(
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

    def _all_same(self, params: SagemakerUnchangedTensorParams, records: list[NDArray[Any]]) -> bool:
        """Whether there are enough saved records, of one shape and with elements, and each is close to the one before."""
        if len(records) < params.num_steps or not records[-1].size:
            return False
        return all(
            earlier.shape == later.shape
            and np.allclose(later, earlier, params.rtol, params.atol, equal_nan=params.equal_nan)
            for earlier, later in pairwise(records)
        )

    def _same(
        self, params: SagemakerUnchangedTensorParams, lagged: LaggedRows, left: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Those of some rows whose last records are the same, step by step back."""
        columns = {name: lagged.column(figure) for name, figure in COLUMNS.items()}
        compared = lagged.column(lambda rows: probe(rows, params.probe))
        for back in range(params.num_steps - 1):
            places = lagged.at(left)
            later = {name: places.lag(column, back) for name, column in columns.items()}
            earlier = {name: places.lag(column, back + 1) for name, column in columns.items()}
            close = may_be_close(later.__getitem__, earlier.__getitem__, params.rtol, params.atol)
            single = later["count"] == 1
            if not params.equal_nan:
                close &= later["nan"] == 0
            left = left[close & (single | (places.lag(compared, back) > 0))]
        return left


class SagemakerVanishingGradientParams(AmazonParams):
    """Parameters of `SagemakerVanishingGradient`."""

    amazon: ClassVar[str] = "VanishingGradient"
    threshold: float = Field(1e-7, gt=0, description="Mean magnitude below which a gradient has vanished.")


class SagemakerVanishingGradient(Rule[SagemakerVanishingGradientParams, State]):
    """Fires when ``mean(|g|) < threshold`` for any gradient: SageMaker's VanishingGradient, with its 1e-7.

    The mean is over all elements, zeros included; a gradient that holds NaN or infinity has no such mean. Biases before
    normalization, embeddings of which a batch touches few rows, and trainings that have converged have such gradients:
    `vanishing_gradient` leaves them alone, this rule does not.
    """

    name = "sagemaker_vanishing_gradient"
    summary = "the mean magnitude of a gradient is below a threshold, by SageMaker's criterion"
    needs = Needs(collections=("gradients",), roles=("gradient",))
    merge = "watermark"
    usual_causes = VanishingGradient.usual_causes
    what_to_try = VanishingGradient.what_to_try

    def evaluate(
        self, params: SagemakerVanishingGradientParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each row by itself."""
        size = abs_mean(block.statistics)
        return state, [
            finding_at(
                self.name,
                block,
                int(row),
                value=float(size[row]),
                threshold=params.threshold,
                message=f"mean |gradient| of {block.info(int(row)).name} is {size[row]:.3g}, below {params.threshold:.3g}",
            )
            for row in np.flatnonzero((size < params.threshold) & (block.statistics.nonfinite == 0))
        ]
