"""Classes that the model confuses with each other."""

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
        0.9, ge=0, le=1, description="Share of a class's examples that must be predicted correctly."
    )
    max_off_diag: float = Field(
        0.1, ge=0, le=1, description="Tolerated share of a class's examples predicted as one other class."
    )
    examples: int = Field(20, ge=1, description="Fewest examples of a class for which it is judged.")
    from_step: int = Field(0, ge=0, description="The first step to judge, because a model must learn first.")


class Confusion(Rule[ConfusionParams, State]):
    """Fires for a class i with ``C[i][i] / Σ_j C[i][j] < min_diag``, or ``max_j≠i C[i][j] / Σ_j C[i][j] > max_off_diag``.

    ``C[i][j]`` counts examples with the label i that were predicted as j, over the last measured batches with 1,000 to 2,000 examples.
    Rows are labels, so both shares refer to a class's own examples; the first is its recall. These are the two tests and limits of
    SageMaker's Confusion. The diagonal is divided by the sum of its row, because with several classes none can reach nine tenths of the
    sum of the diagonal, which Amazon documents.

    Needs ``hook.record(labels=…, outputs=…)``. Off by default, because an untrained model confuses all classes.
    """

    name = "confusion"
    summary = "a class is often predicted as another"
    needs = Needs(collections=("confusion",), roles=("confusion",))
    merge = "per_worker"
    usual_causes = (
        "The classes look alike, or their labels are noisy.",
        "One class has too few examples.",
        "Two labels are swapped.",
    )
    what_to_try = (
        "Look at examples of the class that are predicted as the other, and at their labels.",
        "Weight the class in the loss, or sample it more often.",
        "If all classes are confused, train longer or with a larger model.",
    )

    def conclusive(self, params: ConfusionParams, block: Block) -> NDArray[np.bool_]:
        """Rows of classes with enough examples."""
        return has_probe(block, "examples") & (probe(block, "examples") >= params.examples)

    def evaluate(
        self, params: ConfusionParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Judge each class by its counts."""
        examples, correct = probe(block, "examples"), probe(block, "correct")
        with np.errstate(divide="ignore", invalid="ignore"):
            right, wrong = correct / examples, probe(block, "confused") / examples
        judged = (examples >= params.examples) & (block.step >= params.from_step)
        is_hit = judged & ((right < params.min_diag) | (wrong > params.max_off_diag))
        return state, [
            self._finding(params, block, int(row), float(right[row]), float(wrong[row]))
            for row in np.flatnonzero(is_hit)
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
