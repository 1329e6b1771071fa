"""Labels with one class many times as frequent as another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import probe

_COLUMNS = ("labels_counted", "classes", "largest_class", "smallest_class", "rarest_class")


class ClassImbalanceParams(Params):
    """Parameters of `ClassImbalance`."""

    ratio: float = Field(10.0, gt=1, description="Tolerated ratio of the largest to the smallest class.")
    deviations: float = Field(
        3.0, ge=0, description="Standard deviations of chance that are allowed for in the ratio."
    )
    misprediction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Tolerated share of wrong predictions in a class; 0.7 in SageMaker; not judged if null.",
    )
    examples: int = Field(
        20, ge=1, description="Fewest examples of a class for which its mispredictions are judged."
    )


class Classes(NamedTuple):
    """Number of classes in a stream of labels, and number of labels when the last new class occurred."""

    seen: int = 0
    labels: float = 0.0


class ClassImbalanceState(State):
    """State of `ClassImbalance`: the classes of each stream, by ``tensor@worker/mode``."""

    streams: dict[str, Classes] = Field(default_factory=dict)


class ClassImbalance(Rule[ClassImbalanceParams, ClassImbalanceState]):
    """Fires when one class is more than ten times as frequent as another in the labels so far, beyond chance.

    With the counts n (largest class) and k (smallest class)::

        (sqrt(n) - deviations / 2) ^ 2 > ratio * (sqrt(k) + deviations / 2) ^ 2

    Square roots of counts have a standard deviation of one half (Anscombe 1948), so both sides are bounds that chance rarely reaches.
    With many classes the smallest of them is small by chance, and the bound of k grows by the normal quantile of that many draws,
    ``sqrt(2 ln classes)``. The ratio of 10 is that of SageMaker's ClassImbalance. The counts are over all measured batches, so a single
    batch does not matter.

    Data in the order of their classes show a new class late: nothing is judged until there are twice as many labels as when the last new
    class occurred.

    With ``misprediction`` it also fires for a class with ``1 - correct / examples > misprediction``, over the last 1,000
    to 2,000 examples of ``hook.record(labels=…, outputs=…)``: the second half of SageMaker's ClassImbalance.
    """

    name = "class_imbalance"
    summary = "one class is more than ten times as frequent as another"
    needs = Needs(collections=("labels",), roles=("label",), probes=("class_counts",))
    merge = "per_worker"
    usual_causes = (
        "The data set contains few examples of a class.",
        "A sampler, a filter or a join dropped examples of a class.",
        "The data are sorted by class and not shuffled.",
    )
    what_to_try = (
        "Weight the loss by class (weight= of cross_entropy), or sample evenly with WeightedRandomSampler.",
        "Compare counts of labels before and after loading.",
        "Shuffle the data; use metrics that do not reward the largest class, such as balanced accuracy.",
    )
    cannot_distinguish = (
        "A loss or a sampler that weights classes, from one that does not: only the labels are recorded.",
        "Data that are as imbalanced as the task, from a fault of the data set.",
    )

    def needed(self, params: ClassImbalanceParams) -> Needs:
        """Also predictions, if they are judged."""
        if params.misprediction is None:
            return self.needs
        return Needs(("labels", "confusion"), ("label", "confusion"), ("class_counts",))

    def conclusive(self, params: ClassImbalanceParams, block: Block) -> NDArray[np.bool_]:
        """Rows with labels."""
        return has_probe(block, "classes", "examples")

    def evaluate(
        self, params: ClassImbalanceParams, state: ClassImbalanceState, context: Block, block: Block, now: int
    ) -> tuple[ClassImbalanceState, list[Finding]]:
        """Judge the counts so far, row by row."""
        none = np.full(len(block), np.nan)
        labels, classes, largest, smallest, rarest = (block.probes.get(name, none) for name in _COLUMNS)
        streams, findings = dict(state.streams), self._mispredicted(params, block)
        for row in map(int, np.flatnonzero(classes > 1)):
            name = f"{block.info(row).name}@{block.worker[row]}/{block.mode_name(row)}"
            before = streams.get(name, Classes())
            if classes[row] > before.seen:
                streams[name] = Classes(int(classes[row]), float(labels[row]))
                continue
            surely = max(0.0, np.sqrt(largest[row]) - params.deviations / 2) ** 2
            unlucky = params.deviations / 2 + np.sqrt(2 * np.log(classes[row])) / 2
            if (
                labels[row] >= 2 * before.labels
                and surely > params.ratio * (np.sqrt(smallest[row]) + unlucky) ** 2
            ):
                seen = (float(largest[row]), float(smallest[row]), float(labels[row]))
                findings[row] = self._finding(params, block, row, int(rarest[row]), seen)
        return ClassImbalanceState(streams=streams), [findings[row] for row in sorted(findings)]

    def _mispredicted(self, params: ClassImbalanceParams, block: Block) -> dict[int, Finding]:
        """Findings of classes with mostly wrong predictions, by row."""
        if params.misprediction is None:
            return {}
        examples, correct = probe(block, "examples"), probe(block, "correct")
        with np.errstate(divide="ignore", invalid="ignore"):
            wrong = 1 - correct / examples
        return {
            row: finding_at(
                self.name,
                block,
                row,
                value=float(wrong[row]),
                threshold=params.misprediction,
                message=(
                    f"{block.info(row).name}: of {examples[row]:.0f} examples {wrong[row]:.0%} were predicted wrong, more "
                    f"than {params.misprediction:.0%}"
                ),
            )
            for row in np.flatnonzero((examples >= params.examples) & (wrong > params.misprediction)).tolist()
        }

    def _finding(
        self,
        params: ClassImbalanceParams,
        block: Block,
        row: int,
        rarest: int,
        seen: tuple[float, float, float],
    ) -> Finding:
        largest, smallest, labels = seen
        message = (
            f"of {labels:.0f} {block.info(row).name} so far {smallest:.0f} are class {rarest}, and {largest:.0f} are of "
            f"the largest class: more than {params.ratio:g} to 1"
        )
        value = largest / smallest
        return finding_at(self.name, block, row, value=value, threshold=params.ratio, message=message)
