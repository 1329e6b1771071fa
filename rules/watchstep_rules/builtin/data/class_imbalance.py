"""Classes of which one comes many times as often as another."""

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

    ratio: float = Field(10.0, gt=1, description="How many times the smallest class the largest may be.")
    deviations: float = Field(
        3.0, ge=0, description="By how many standard deviations chance could make the ratio seem larger."
    )
    misprediction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of a class's examples that may be predicted wrong, SageMaker's is 0.7; not judged if null.",
    )
    examples: int = Field(
        20, ge=1, description="Examples of a class below which its mispredictions are not judged."
    )


class Classes(NamedTuple):
    """How many classes a stream of labels has shown, and how many labels there were when the last of them came."""

    seen: int = 0
    labels: float = 0.0


class ClassImbalanceState(State):
    """The classes of each stream, by ``tensor@worker/mode``."""

    streams: dict[str, Classes] = Field(default_factory=dict)


class ClassImbalance(Rule[ClassImbalanceParams, ClassImbalanceState]):
    """Fires when the labels so far show one class more than ten times as often as another, beyond chance.

    Of counts n (largest class) and k (smallest)::

        (sqrt(n) - deviations / 2) ^ 2 > ratio * (sqrt(k) + deviations / 2) ^ 2

    Roots of counts have a standard deviation of one half (Anscombe 1948), so both sides are bounds that chance hardly
    reaches; where there are many classes the smallest of many is unlucky, and the bound of k grows by the normal
    quantile of that many draws, ``sqrt(2 ln classes)``. The ratio of 10 is that of SageMaker's ClassImbalance. The
    counts run over all batches looked at, so a batch's chance does not count.

    Data that come in the order of their classes show a new class late: nothing is judged until there are twice as
    many labels as when the last new class came.

    With ``misprediction`` it also fires for a class with ``1 - correct / examples > misprediction``, over the last 1,000
    to 2,000 examples of ``hook.record(labels=…, outputs=…)``: the second half of SageMaker's ClassImbalance.
    """

    name = "class_imbalance"
    summary = "one class comes more than ten times as often as another"
    needs = Needs(collections=("labels",), roles=("label",), probes=("class_counts",))
    merge = "per_worker"
    usual_causes = (
        "The data set itself holds few examples of a class.",
        "A sampler, a filter or a join dropped examples of a class.",
        "The data are in the order of classes, and are not shuffled.",
    )
    what_to_try = (
        "Weigh the loss by class (weight= of cross_entropy), or sample evenly with WeightedRandomSampler.",
        "Look at counts of labels before and after loading.",
        "Shuffle; judge by figures that do not reward the largest class, such as balanced accuracy.",
    )
    cannot_distinguish = (
        "A loss or a sampler that weighs classes, from one that does not: the labels alone are recorded.",
        "Data that are as unequal as the task is, from a fault of the data set.",
    )

    def needed(self, params: ClassImbalanceParams) -> Needs:
        """Predictions as well, where they are judged."""
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
        """Classes that are mostly predicted wrong, by row."""
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
