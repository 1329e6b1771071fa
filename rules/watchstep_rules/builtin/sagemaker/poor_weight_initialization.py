"""What SageMaker takes for signs of poor initial weights, within the first steps."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.capture.config import INPUT_VARIANCE, PERCENTILE_RANGE, element_probe
from watchstep.format.block import Block
from watchstep.format.statistics import Floats, quantile_bounds, variance
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams, Patterns, is_matched
from watchstep_rules.builtin.weights.poor_initialization import PoorInitialization
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.layers import is_weighted
from watchstep_rules.signals.series import probe, whole_steps
from watchstep_rules.signals.tensor_selection import rows_where


class SagemakerPoorWeightInitializationParams(AmazonParams):
    """Parameters of `SagemakerPoorWeightInitialization`."""

    amazon: ClassVar[str] = "PoorWeightInitialization"
    activation_inputs_regex: Patterns | None = Field(
        None, description="Rectifiers by the name of their input; all where it is left out."
    )
    threshold: float = Field(
        10.0, gt=1, description="Ratio of two layers' variances of what goes into activations."
    )
    distribution_range: float = Field(
        0.001, ge=0, description="Least distance from the 5th to the 95th percentile of a gradient."
    )
    patience: int = Field(
        5, ge=1, le=1000, description="Losses in a row that are no lower than the one before."
    )
    steps: int = Field(10, ge=1, le=10_000, description="First steps that are judged.")

    @property
    def probes(self) -> tuple[str, ...]:
        """The variance of what goes into rectifiers, and how wide gradients are."""
        return (INPUT_VARIANCE, self.range_probe, "function_calls")

    @property
    def range_probe(self) -> str:
        """The distance from the 5th to the 95th percentile."""
        return element_probe(PERCENTILE_RANGE, self.steps)


class LossTrend(NamedTuple):
    """A loss: the newest, and how many in a row were no lower than the one before."""

    last: float
    risen: int = 0


class SagemakerPoorWeightInitializationState(State):
    """The first step in train mode, -1 before it, and each loss by name and worker, in the first steps."""

    first: int = -1
    losses: dict[str, LossTrend] = Field(default_factory=dict)


class SagemakerPoorWeightInitialization(
    Rule[SagemakerPoorWeightInitializationParams, SagemakerPoorWeightInitializationState]
):
    """Fires within the first ``steps`` when one of these holds, as SageMaker's PoorWeightInitialization says.

    - ``max / min > threshold`` of the variances of what goes into rectifiers. Where that is not on record, as of rectifiers that write
      over their input, the outputs of linear, convolutional and recurrent layers are taken for it.
    - ``p95 - p5 < distribution_range`` for some gradient. Where the recorder did not measure it, it is judged by the histogram, so
      only where it surely is. Of gradients of more than 16,384 elements evenly spaced ones are taken.
    - A loss is no lower than the one before for ``patience`` steps in a row.

    Healthy networks do all three: `poor_initialization` judges the weights themselves.
    """

    name = "sagemaker_poor_weight_initialization"
    summary = "signs of poor initial weights in the first steps, as SageMaker tests them"
    needs = Needs(
        collections=("activations", "gradients", "losses"),
        roles=("output", "gradient", "loss"),
        histograms=True,
    )
    merge = "sealed"
    usual_causes = PoorInitialization.usual_causes
    what_to_try = PoorInitialization.what_to_try
    params_type = SagemakerPoorWeightInitializationParams
    state_type = SagemakerPoorWeightInitializationState

    def needed(self, params: SagemakerPoorWeightInitializationParams) -> Needs:
        """Figures of elements within the first steps."""
        return replace(self.needs, probes=params.probes)

    def evaluate(
        self,
        params: SagemakerPoorWeightInitializationParams,
        state: SagemakerPoorWeightInitializationState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerPoorWeightInitializationState, list[Finding]]:
        """Judge the first steps, each by itself but for its loss."""
        train = block.step[block.mode == 0]
        first = state.first if state.first >= 0 or not len(train) else int(train.min())
        losses, findings = dict(state.losses), []
        early = block.where((block.mode == 0) & (block.step < first + params.steps))
        for rows in whole_steps(early):
            roles = [early.info(int(row)).role for row in rows]
            of = {role: rows[[held == role for held in roles]] for role in ("output", "gradient", "loss")}
            found = [
                *self._layers(params, early, of["output"]),
                *self._gradients(params, early, of["gradient"]),
                *self._losses(params, early, of["loss"], losses),
            ]
            findings += [finding for _, finding in sorted(found, key=lambda each: each[0])]
        return SagemakerPoorWeightInitializationState(first=first, losses=losses), findings

    def _layers(
        self, params: SagemakerPoorWeightInitializationParams, block: Block, rows: NDArray[np.intp]
    ) -> list[tuple[int, Finding]]:
        rows, held = _variances(params, block, rows)
        rows, held = rows[held > 0], held[held > 0]
        if len(rows) < 2 or held.max() <= params.threshold * held.min():
            return []
        row, ratio = int(rows[np.argmin(held)]), float(held.max() / held.min())
        message = (
            f"the variance of what goes into activations is {held.min():.3g} at {block.info(row).name}, and at "
            f"{block.info(int(rows[np.argmax(held)])).name} {held.max():.3g}, more than {params.threshold:g} times that"
        )
        return [
            (row, finding_at(self.name, block, row, value=ratio, threshold=params.threshold, message=message))
        ]

    def _gradients(
        self, params: SagemakerPoorWeightInitializationParams, block: Block, rows: NDArray[np.intp]
    ) -> list[tuple[int, Finding]]:
        width = probe(block, params.range_probe)[rows]
        unknown = np.flatnonzero(~np.isfinite(width))
        held = block.statistics.take(rows[unknown])
        width[unknown] = quantile_bounds(held, 0.95)[1] - quantile_bounds(held, 0.05)[0]
        found = []
        for place in np.flatnonzero(width < params.distribution_range):
            row, wide = int(rows[place]), float(width[place])
            message = f"nine tenths of {block.info(row).name} lie within {wide:.3g}, less than {params.distribution_range:g}"
            found.append(
                (
                    row,
                    finding_at(
                        self.name,
                        block,
                        row,
                        value=wide,
                        threshold=params.distribution_range,
                        message=message,
                    ),
                )
            )
        return found

    def _losses(
        self,
        params: SagemakerPoorWeightInitializationParams,
        block: Block,
        rows: NDArray[np.intp],
        losses: dict[str, LossTrend],
    ) -> list[tuple[int, Finding]]:
        found = []
        for row in map(int, rows):
            if block.statistics.finite[row] == 0:
                continue
            name, loss = f"{block.info(row).name}@{block.worker[row]}", float(block.statistics.mean[row])
            before = losses.get(name, LossTrend(np.inf))
            risen = before.risen + 1 if loss >= before.last else 0
            losses[name] = LossTrend(loss, risen)
            if risen >= params.patience:
                message = (
                    f"{block.info(row).name} is {loss:.4g}, no lower than before for {risen} steps in a row"
                )
                limit = float(params.patience)
                found.append(
                    (
                        row,
                        finding_at(
                            self.name, block, row, value=float(risen), threshold=limit, message=message
                        ),
                    )
                )
        return found


def _variances(
    params: SagemakerPoorWeightInitializationParams, block: Block, rows: NDArray[np.intp]
) -> tuple[NDArray[np.intp], Floats]:
    """Rows whose tensors stand for what goes into activations, and the variance of that."""
    named = rows
    if params.activation_inputs_regex is not None:
        named = rows[rows_where(block, is_matched, params.activation_inputs_regex)[rows]]
    measured = probe(block, INPUT_VARIANCE)[named]
    if np.isfinite(measured).any():
        known = np.isfinite(measured)
        return named[known], measured[known]
    rows = rows[[is_weighted(block.info(int(row))) for row in rows]]
    return rows, variance(block.statistics)[rows]
