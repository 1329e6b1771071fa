"""Classes that the model takes for one another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe


class ConfusionParams(Params):
    """Parameters of `Confusion`."""

    min_diag: float = Field(
        0.9, ge=0, le=1, description="Share of a class's examples that must be predicted right."
    )
    max_off_diag: float = Field(
        0.1, ge=0, le=1, description="Share of a class's examples that may be taken for one other class."
    )
    examples: int = Field(20, ge=1, description="Examples of a class below which it is not judged.")
    from_step: int = Field(0, ge=0, description="The first step that is judged: a model has to learn first.")


class Confusion(Rule[ConfusionParams, State]):
    """Fires for a class i with ``C[i][i] / Σ_j C[i][j] < min_diag``, or ``max_j≠i C[i][j] / Σ_j C[i][j] > max_off_diag``.

    ``C[i][j]`` counts examples with the label i that were predicted as j, over the last batches looked at, 1,000 to 2,000
    examples; rows are labels, so both shares are of a class's own examples: the first is its recall. These are the two
    tests and limits of SageMaker's Confusion; the diagonal is divided by the sum of its row, since what Amazon prints,
    the sum of the diagonal, no class can reach a nine-tenth share of when there are several.

    Needs ``hook.record(labels=…, outputs=…)``. Off by default: before a model has learnt it confuses everything.
    """

    name = "confusion"
    summary = "a class is often taken for another"
    needs = Needs(collections=("confusion",), roles=("confusion",))
    merge = "per_worker"
    usual_causes = (
        "The classes look alike, or their labels are noisy.",
        "One class has too few examples.",
        "Two labels were exchanged.",
    )
    what_to_try = (
        "Look at examples of the class that are predicted as the other, and at their labels.",
        "Weigh the class in the loss, or draw it more often.",
        "Train longer, or with a larger model, where all classes are confused.",
    )

    def conclusive(self, params: ConfusionParams, block: Block) -> NDArray[np.bool_]:
        """Rows of classes with enough examples."""
        return has_probe(block, "examples") & (probe(block, "examples") >= params.examples)

    def evaluate(
        self, params: ConfusionParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each class by its counts so far."""
        examples, correct = probe(block, "examples"), probe(block, "correct")
        with np.errstate(divide="ignore", invalid="ignore"):
            right, wrong = correct / examples, probe(block, "confused") / examples
        judged = (examples >= params.examples) & (block.step >= params.from_step)
        found = judged & ((right < params.min_diag) | (wrong > params.max_off_diag))
        return state, [
            self._finding(params, block, int(row), float(right[row]), float(wrong[row]))
            for row in np.flatnonzero(found)
        ]

    def _finding(
        self, params: ConfusionParams, block: Block, row: int, right: float, wrong: float
    ) -> Finding:
        name, examples = block.info(row).name, probe(block, "examples")[row]
        other = probe(block, "confused_with")[row]
        often = f", {wrong:.0%} as class {other:.0f}" if np.isfinite(other) else ""
        message = f"{name}: of {examples:.0f} examples {right:.0%} were predicted right{often}"
        if right < params.min_diag:
            return finding_at(
                self.name,
                block,
                row,
                value=right,
                threshold=params.min_diag,
                message=f"{message}; at least {params.min_diag:.0%} should be right",
            )
        return finding_at(
            self.name,
            block,
            row,
            value=wrong,
            threshold=params.max_off_diag,
            message=f"{message}; at most {params.max_off_diag:.0%} may be taken for one other",
        )
