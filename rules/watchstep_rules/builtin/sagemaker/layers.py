"""SageMaker rules about activations and weights: dead ReLU, saturated activation, weight initialization and update ratio."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.capture.config import (
    INACTIVE_UNITS,
    INPUT_VARIANCE,
    PERCENTILE_RANGE,
    SATURATED_UNITS,
    UNITS,
    WEIGHT_CHANGE,
    element_probe,
)
from watchstep.format.block import Block
from watchstep.format.statistics import Floats, quantile_bounds, variance
from watchstep_rules.builtin.activations.dead_relu import DeadRelu
from watchstep_rules.builtin.activations.saturated_activation import SaturatedActivation
from watchstep_rules.builtin.sagemaker.parameters import (
    AmazonParams,
    ElementCoverage,
    Patterns,
    SaveInterval,
    ScopedParams,
    earlier_values,
    is_matched,
    is_output_of,
    percent_of,
)
from watchstep_rules.builtin.weights.poor_initialization import PoorInitialization
from watchstep_rules.builtin.weights.weight_update_ratio import WeightUpdateRatio
from watchstep_rules.rule import Finding, Needs, Rule, State, TensorNeeds, finding_at
from watchstep_rules.saved_block import SavedBlock
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe, whole_steps
from watchstep_rules.signals.tensor_selection import is_weighted, rows_where


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
    summary = "most units of a rectifier are dead, by SageMaker's criterion"
    needs = Needs(("activations",), ("output",), probes=("function_calls",))
    merge = "per_worker"
    usual_causes = DeadRelu.usual_causes
    what_to_try = DeadRelu.what_to_try

    def needed(self, params: SagemakerDeadReluParams) -> Needs:
        """Return the needs, including the count of units below this threshold."""
        return Needs(self.needs.collections, self.needs.roles, probes=(*self.needs.probes, params.probe))

    def problem(self, state: ElementCoverage) -> str:
        """Return what to do if the recorder did not count."""
        return state.problem("units that are active in so few examples")

    def conclusive(self, params: SagemakerDeadReluParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows with counted units."""
        return has_probe(block, params.probe)

    def evaluate(
        self, params: SagemakerDeadReluParams, state: ElementCoverage, context: Block, block: Block, now: int
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Evaluate each row independently."""
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
    summary = "most units of a tanh or sigmoid are saturated, by SageMaker's criterion"
    needs = Needs(("activations",), ("output",), probes=("function_calls",))
    merge = "per_worker"
    usual_causes = SaturatedActivation.usual_causes
    what_to_try = SaturatedActivation.what_to_try

    def needed(self, params: SagemakerSaturatedActivationParams) -> Needs:
        """Return the needs, including the count of units outside these bounds."""
        probes = (*self.needs.probes, *params.probes.values())
        return params.needs_of(Needs(self.needs.collections, self.needs.roles, probes=probes))

    def problem(self, state: ElementCoverage) -> str:
        """Return what to do if the recorder did not count."""
        return state.problem("saturated units by these bounds")

    def conclusive(self, params: SagemakerSaturatedActivationParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows with counted units."""
        return has_probe(block, *params.probes.values())

    def evaluate(
        self,
        params: SagemakerSaturatedActivationParams,
        state: ElementCoverage,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Evaluate each row independently."""
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
        """The variance of rectifier inputs, and the width of gradients."""
        return (INPUT_VARIANCE, self.range_probe, "function_calls")

    @property
    def range_probe(self) -> str:
        """The distance from the 5th to the 95th percentile."""
        return element_probe(PERCENTILE_RANGE, self.steps)


class LossTrend(NamedTuple):
    """The newest loss, and the number of consecutive losses that were not lower than the previous one."""

    last: float
    risen: int = 0


class SagemakerPoorWeightInitializationState(State):
    """The first step in train mode (-1 before it), and each loss of the first steps by name and worker."""

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
    merge = "watermark"
    usual_causes = PoorInitialization.usual_causes
    what_to_try = PoorInitialization.what_to_try

    def needed(self, params: SagemakerPoorWeightInitializationParams) -> Needs:
        """Return the needs, including statistics of elements within the first steps."""
        return replace(self.needs, probes=params.probes)

    def evaluate(
        self,
        params: SagemakerPoorWeightInitializationParams,
        state: SagemakerPoorWeightInitializationState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SagemakerPoorWeightInitializationState, list[Finding]]:
        """Evaluate each of the first steps independently, except for its loss."""
        train = block.step[block.mode == 0]
        first = state.first if state.first >= 0 or not len(train) else int(train.min())
        losses, findings = dict(state.losses), []
        early = block.where((block.mode == 0) & (block.step < first + params.steps))
        for rows in whole_steps(early):
            roles = [early.info(int(row)).role for row in rows]
            rows_by_role = {
                role: rows[[row_role == role for row_role in roles]]
                for role in ("output", "gradient", "loss")
            }
            of_step = [
                *self._layers(params, early, rows_by_role["output"]),
                *self._gradients(params, early, rows_by_role["gradient"]),
                *self._losses(params, early, rows_by_role["loss"], losses),
            ]
            findings += [finding for _, finding in sorted(of_step, key=lambda entry: entry[0])]
        return SagemakerPoorWeightInitializationState(first=first, losses=losses), findings

    def _layers(
        self, params: SagemakerPoorWeightInitializationParams, block: Block, rows: NDArray[np.intp]
    ) -> list[tuple[int, Finding]]:
        rows, variances = _variances(params, block, rows)
        rows, variances = rows[variances > 0], variances[variances > 0]
        if len(rows) < 2 or variances.max() <= params.threshold * variances.min():
            return []
        row, ratio = int(rows[np.argmin(variances)]), float(variances.max() / variances.min())
        message = (
            f"the variance of what goes into activations is {variances.min():.3g} at {block.info(row).name}, and at "
            f"{block.info(int(rows[np.argmax(variances)])).name} {variances.max():.3g}, more than {params.threshold:g} times that"
        )
        return [
            (row, finding_at(self.name, block, row, value=ratio, threshold=params.threshold, message=message))
        ]

    def _gradients(
        self, params: SagemakerPoorWeightInitializationParams, block: Block, rows: NDArray[np.intp]
    ) -> list[tuple[int, Finding]]:
        width = probe(block, params.range_probe)[rows]
        unknown = np.flatnonzero(~np.isfinite(width))
        statistics = block.statistics.take(rows[unknown])
        width[unknown] = quantile_bounds(statistics, 0.95)[1] - quantile_bounds(statistics, 0.05)[0]
        findings = []
        for index in np.flatnonzero(width < params.distribution_range):
            row, row_width = int(rows[index]), float(width[index])
            message = f"nine tenths of {block.info(row).name} lie within {row_width:.3g}, less than {params.distribution_range:g}"
            findings.append(
                (
                    row,
                    finding_at(
                        self.name,
                        block,
                        row,
                        value=row_width,
                        threshold=params.distribution_range,
                        message=message,
                    ),
                )
            )
        return findings

    def _losses(
        self,
        params: SagemakerPoorWeightInitializationParams,
        block: Block,
        rows: NDArray[np.intp],
        losses: dict[str, LossTrend],
    ) -> list[tuple[int, Finding]]:
        findings = []
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
                findings.append(
                    (
                        row,
                        finding_at(
                            self.name, block, row, value=float(risen), threshold=limit, message=message
                        ),
                    )
                )
        return findings


def _variances(
    params: SagemakerPoorWeightInitializationParams, block: Block, rows: NDArray[np.intp]
) -> tuple[NDArray[np.intp], Floats]:
    """Return the rows that represent the inputs of activations, and the variances of these inputs."""
    named = rows
    if params.activation_inputs_regex is not None:
        named = rows[rows_where(block, is_matched, params.activation_inputs_regex)[rows]]
    measured = probe(block, INPUT_VARIANCE)[named]
    if np.isfinite(measured).any():
        is_measured = np.isfinite(measured)
        return named[is_measured], measured[is_measured]
    rows = rows[[is_weighted(block.info(int(row))) for row in rows]]
    return rows, variance(block.statistics)[rows]


class SagemakerWeightUpdateRatioParams(AmazonParams):
    """Parameters of `SagemakerWeightUpdateRatio`."""

    amazon: ClassVar[str] = "WeightUpdateRatio"
    num_steps: int | None = Field(
        None, ge=1, le=1_000_000, description="Steps to look back, at most; to the record before if null."
    )
    large_threshold: float = Field(10.0, ge=0, description="Ratio above which a change is too large.")
    small_threshold: float = Field(1e-8, ge=0, description="Ratio below which a change is too small.")
    epsilon: float = Field(1e-9, gt=0, description="Added to the norm of the weight.")
    full_tensors: bool = Field(
        False,
        description="Compare all elements of saved weights, instead of those that the recorder samples.",
    )
    save_interval: SaveInterval

    @property
    def probe(self) -> str:
        """The probe that measures the change."""
        return element_probe(WEIGHT_CHANGE, self.num_steps or 0, self.epsilon)


class SagemakerWeightUpdateRatio(Rule[SagemakerWeightUpdateRatioParams, ElementCoverage]):
    """Fires when ``|w - w_before| / (|w_before| + epsilon)`` is above ``large_threshold`` or below ``small_threshold``.

    SageMaker's WeightUpdateRatio; the norm is the Euclidean one, which the developer guide does not say. ``w_before`` is the
    record before, or with ``num_steps`` the oldest one at a step of at least ``s - num_steps``. In train mode. Of weights of more
    than 16,384 elements, or where there are many, evenly spaced elements are compared. With ``full_tensors`` records are saved weights,
    at most 20 within ``num_steps``, and all of their elements are compared. Frozen weights and schedules that end at zero are found:
    `weight_not_updating` leaves them alone.
    """

    name = "sagemaker_weight_update_ratio"
    summary = "weights change by far more or far less than they are large, by SageMaker's criterion"
    needs = Needs(("weights",), ("weight",))
    merge = "per_worker"
    usual_causes = WeightUpdateRatio.usual_causes
    what_to_try = WeightUpdateRatio.what_to_try

    def needed(self, params: SagemakerWeightUpdateRatioParams) -> Needs:
        """Return the needs, including the change over ``num_steps``, or saved weights."""
        if params.full_tensors:
            return replace(self.needs, tensors=TensorNeeds(params.save_interval))
        return Needs(self.needs.collections, self.needs.roles, probes=(params.probe,))

    def lookback(self, params: SagemakerWeightUpdateRatioParams) -> int:
        """Return the number of saved weights to look back on; the recorder compares otherwise."""
        if not params.full_tensors:
            return 0
        return min(_MOST_SAVED, max(1, (params.num_steps or 1) // params.save_interval))

    def problem(self, state: ElementCoverage) -> str:
        """Return what to do if the recorder did not measure."""
        return state.problem("the change of weights")

    def conclusive(self, params: SagemakerWeightUpdateRatioParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows with a ratio to an earlier record; of saved weights all with finite elements."""
        if isinstance(block, SavedBlock):
            return super().conclusive(params, block)
        return probe(block, params.probe) >= 0

    def evaluate(
        self,
        params: SagemakerWeightUpdateRatioParams,
        state: ElementCoverage,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[ElementCoverage, list[Finding]]:
        """Evaluate each row independently."""
        if isinstance(context, SavedBlock) and isinstance(block, SavedBlock):
            ratio = self._ratios(params, context, block)
        else:
            training = block.mode == 0
            ratio = np.where(training, probe(block, params.probe), np.nan)
            state = state.after(training, ratio)
            ratio = np.where(ratio >= 0, ratio, np.nan)  # -1 without an earlier record
        findings = []
        for row in np.flatnonzero(
            (ratio > params.large_threshold) | (ratio < params.small_threshold)
        ).tolist():
            large = ratio[row] > params.large_threshold
            limit, word = (params.large_threshold, "above") if large else (params.small_threshold, "below")
            message = (
                f"{block.info(row).name} has changed by {ratio[row]:.3g} of its norm, {word} {limit:.3g}"
            )
            findings.append(
                finding_at(self.name, block, row, value=float(ratio[row]), threshold=limit, message=message)
            )
        return state, findings

    def _ratios(
        self, params: SagemakerWeightUpdateRatioParams, context: SavedBlock, block: SavedBlock
    ) -> Floats:
        """The ratios of saved weights to an earlier record, NaN without one, float64 of shape (n,)."""
        ratios = np.full(len(block), np.nan)
        for row, earlier in earlier_values(context, block, self.lookback(params)):
            oldest = int(block.step[row]) - (params.num_steps or 2**62)
            new = block.values[row].astype(np.float64)
            before = next(
                (
                    record.values.astype(np.float64)
                    for record in (earlier if params.num_steps else earlier[-1:])
                    if record.step >= oldest and record.values.shape == new.shape
                ),
                None,
            )
            if before is not None:
                ratios[row] = np.linalg.norm(new - before) / (np.linalg.norm(before) + params.epsilon)
        return ratios


_MOST_SAVED = 20
"""Limit of the saved weights that are in memory to look back ``num_steps``."""
