"""One class many times as large as another, or a class that is mostly predicted wrong."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.builtin.data.class_imbalance import ClassImbalance
from watchstep_rules.builtin.sagemaker.amazon import AmazonParams, Patterns, is_matched
from watchstep_rules.builtin.sagemaker.confusion_rows import whole_matrices
from watchstep_rules.rule import Finding, Needs, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import has_role, rows_where


class SagemakerClassImbalanceParams(AmazonParams):
    """Parameters of `SagemakerClassImbalance`."""

    amazon: ClassVar[str] = "ClassImbalance"
    threshold_imbalance: float = Field(
        10.0, gt=0, description="How many times the smallest class the largest may be."
    )
    threshold_misprediction: float = Field(
        0.7, ge=0, le=1, description="Share of a class's examples that may be predicted wrong."
    )
    samples: int = Field(500, ge=1, description="Labels that there must have been.")
    argmax: bool = Field(
        False,
        description="Accepted and without effect: of scores the largest is taken, classes are taken as they are.",
    )
    labels_regex: Patterns = Field((".*labels",), description="Labels by name.")
    predictions_regex: Patterns = Field(
        (".*predictions",),
        description="Accepted and without effect: predictions are what is recorded as outputs or predictions.",
    )


class SagemakerClassImbalanceState(State):
    """Nothing."""


class SagemakerClassImbalance(Rule[SagemakerClassImbalanceParams, SagemakerClassImbalanceState]):
    """Fires when ``largest class / smallest class > threshold_imbalance``, or ``1 - correct / examples > threshold_misprediction``.

    SageMaker's ClassImbalance, with its defaults, among ``samples`` labels or more. Both count over all batches that were looked at
    so far. Give labels, and what was predicted for them, by ``hook.record(labels=…, predictions=…)``. With 500 labels chance
    alone makes ratios above ten where a class is rare: `class_imbalance` rules chance out.
    """

    name = "sagemaker_class_imbalance"
    summary = (
        "the largest class is many times the smallest, or a class is predicted wrong, as SageMaker tests it"
    )
    needs = Needs(collections=("labels", "confusion"), roles=("label", "confusion"), probes=("class_counts",))
    merge = "sealed"
    usual_causes = ClassImbalance.usual_causes
    what_to_try = ClassImbalance.what_to_try
    params_type = SagemakerClassImbalanceParams
    state_type = SagemakerClassImbalanceState

    def conclusive(self, params: SagemakerClassImbalanceParams, block: Block) -> NDArray[np.bool_]:  # noqa: ARG002 - the contract's
        """Rows with labels."""
        return has_probe(block, "labels_counted", "all_examples")

    def evaluate(
        self,
        params: SagemakerClassImbalanceParams,
        state: SagemakerClassImbalanceState,
        context: Block,  # noqa: ARG002 - the contract's
        block: Block,
        now: int,  # noqa: ARG002 - the contract's
    ) -> tuple[SagemakerClassImbalanceState, list[Finding]]:
        """Judge the counts so far, step by step."""
        findings = self._imbalanced(params, block) | self._mispredicted(params, block)
        return state, [findings[row] for row in sorted(findings)]

    def _imbalanced(self, params: SagemakerClassImbalanceParams, block: Block) -> dict[int, Finding]:
        labels, largest, smallest, rarest = (
            probe(block, name)
            for name in ("labels_counted", "largest_class", "smallest_class", "rarest_class")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = largest / smallest
        named = rows_where(block, has_role, "label") & rows_where(block, is_matched, params.labels_regex)
        found = named & (labels >= params.samples) & (ratio > params.threshold_imbalance)
        return {
            row: finding_at(
                self.name,
                block,
                row,
                value=float(ratio[row]),
                threshold=params.threshold_imbalance,
                message=(
                    f"of {labels[row]:.0f} {block.info(row).name} so far {smallest[row]:.0f} are class {rarest[row]:.0f}, "
                    f"and {largest[row]:.0f} are of the largest class"
                ),
            )
            for row in np.flatnonzero(found).tolist()
        }

    def _mispredicted(self, params: SagemakerClassImbalanceParams, block: Block) -> dict[int, Finding]:
        examples, correct = probe(block, "all_examples"), probe(block, "all_correct")
        with np.errstate(divide="ignore", invalid="ignore"):
            wrong = 1 - correct / examples
        findings = {}
        for rows in whole_matrices(block):
            if examples[rows].sum() < params.samples:
                continue
            for row in rows[wrong[rows] > params.threshold_misprediction].tolist():
                message = (
                    f"{block.info(row).name}: of {examples[row]:.0f} examples so far {wrong[row]:.0%} were predicted wrong, more "
                    f"than {params.threshold_misprediction:.0%}"
                )
                findings[row] = finding_at(
                    self.name,
                    block,
                    row,
                    value=float(wrong[row]),
                    threshold=params.threshold_misprediction,
                    message=message,
                )
        return findings
