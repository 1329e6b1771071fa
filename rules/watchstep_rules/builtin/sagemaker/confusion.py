"""A confusion matrix that is not as diagonal as it should be."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from watchstep.format.block import Block
from watchstep_rules.builtin.data.confusion import Confusion
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams
from watchstep_rules.builtin.sagemaker.confusion_rows import class_of, whole_matrices
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe

_LABELS = ("labels",)
_PREDICTIONS = ("predictions", "outputs")


class SagemakerConfusionParams(AmazonParams):
    """Parameters of `SagemakerConfusion`."""

    amazon: ClassVar[str] = "Confusion"
    category_no: int | None = Field(
        None,
        ge=2,
        le=100,
        description="How many classes there are; as many as labels and predictions show if null.",
    )
    labels: str = Field("labels", description="Only 'labels': what hook.record(labels=…) is given.")
    predictions: str = Field(
        "predictions", description="'predictions' or 'outputs', as hook.record is given them."
    )
    labels_collection: str = Field("labels", description="Only 'labels'.")
    predictions_collection: str = Field("predictions", description="'predictions' or 'outputs'.")
    min_diag: float = Field(0.9, ge=0, le=1, description="Share of a prediction that must be right.")
    max_off_diag: float = Field(0.1, ge=0, le=1, description="Share of it that may be of one other class.")

    @field_validator("labels", "labels_collection")
    @classmethod
    def _are_labels(cls, value: str) -> str:
        return _one_of(value, _LABELS)

    @field_validator("predictions", "predictions_collection")
    @classmethod
    def _are_predictions(cls, value: str) -> str:
        return _one_of(value, _PREDICTIONS)


class SagemakerConfusionState(State):
    """Nothing."""


class SagemakerConfusion(Rule[SagemakerConfusionParams, SagemakerConfusionState]):
    """Fires for a class i with ``C[i][i] / Σ_j C[j][i] < min_diag``, or ``max_j≠i C[j][i] / Σ_j C[j][i] > max_off_diag``.

    ``C[j][i]`` counts examples with the label j that were predicted as i, over all batches that were looked at; it is judged once each
    class has been a label. Both are SageMaker's tests, in the form of the second: as the developer guide prints the first, with the sum
    of the diagonal below the line, it cannot hold for several classes. A class that was never predicted is not judged.
    ``category_no`` leaves out labels and predictions from it on. `confusion` judges what became of a class's own examples.
    """

    name = "sagemaker_confusion"
    summary = "a confusion matrix is not diagonal enough, as SageMaker tests it"
    needs = Needs(collections=("confusion",), roles=("confusion",))
    merge = "sealed"
    usual_causes = Confusion.usual_causes
    what_to_try = Confusion.what_to_try
    params_type = SagemakerConfusionParams
    state_type = SagemakerConfusionState

    def conclusive(self, params: SagemakerConfusionParams, block: Block) -> NDArray[np.bool_]:  # noqa: ARG002 - the contract's
        """Rows with examples."""
        return has_probe(block, "all_examples")

    def evaluate(
        self,
        params: SagemakerConfusionParams,
        state: SagemakerConfusionState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerConfusionState, list[Finding]]:
        """Judge each matrix."""
        examples, correct, predicted, mistaken, other = (
            probe(block, name)
            for name in ("all_examples", "all_correct", "all_predicted", "all_mistaken", "all_mistaken_for")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            right, wrong = correct / predicted, mistaken / predicted
        findings = {}
        for rows in whole_matrices(block):
            judged = (
                rows
                if params.category_no is None
                else rows[[class_of(block, row) < params.category_no for row in rows.tolist()]]
            )
            if len(judged) < (params.category_no or 2) or not (examples[judged] > 0).all():
                continue
            bad = (right[judged] < params.min_diag) | (wrong[judged] > params.max_off_diag)
            for row in judged[bad].tolist():
                name = block.info(row).name
                said = f"{name}: of {predicted[row]:.0f} predictions {right[row]:.0%} are right"
                if right[row] < params.min_diag:
                    value, limit, more = (
                        right[row],
                        params.min_diag,
                        f"at least {params.min_diag:.0%} should be",
                    )
                else:
                    value, limit = wrong[row], params.max_off_diag
                    more = f"{value:.0%} are of class {other[row]:.0f}, {limit:.0%} may be"
                findings[row] = finding_at(
                    self.name, block, row, value=float(value), threshold=limit, message=f"{said}; {more}"
                )
        return state, [findings[row] for row in sorted(findings)]


def _one_of(value: str, names: tuple[str, ...]) -> str:
    if value not in names:
        raise ValueError(
            f"{value!r}: the recorder pairs what it is given by hook.record(labels=…, predictions=…); use "
            f"{' or '.join(map(repr, names))}"
        )
    return value
