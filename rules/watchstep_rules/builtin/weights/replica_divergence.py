"""Replicas of a model with different weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_elements


class ReplicaDivergenceParams(Params):
    """`ReplicaDivergence` has no parameters."""


class ReplicaDivergence(Rule[ReplicaDivergenceParams, State]):
    """Fires when the checksums of a parameter's replicas differ at a step: for some two workers, ``checksum != checksum``.

    Data-parallel training sums gradients so that each worker makes the same update of the same weights. It assumes that the weights stay
    equal and never compares them (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, 3.1).
    Once a single bit differs the replicas drift apart without an error, and the saved model is not the one that was trained. Checksums
    cover all bits of a weight, so there is no threshold; two different tensors have the same checksum with a probability of 2^-53.

    The reported workers are those that differ from the majority or, in a tie, from the lowest rank. Disable this rule for trainings that
    let replicas diverge on purpose and average them periodically (local SGD). Replicas are compared if the collection ``checksums`` is
    recorded, by default at steps 0, 1, 2, 4, …, 64 and at every hundredth.
    """

    name = "replica_divergence"
    summary = "replicas of a model have different weights"
    needs = Needs(collections=("checksums",), roles=("checksum",))
    merge = "watermark"
    usual_causes = (
        "One worker changed its weights: an assignment, a clipping or an initialization that depends on the rank or on a random number.",
        "Gradients were changed after they were summed, or an update was skipped, on one worker only.",
        "Parameters that the wrapper ignores, or that were added after it, or backward passes outside it (model.module).",
        "Faulty memory or hardware on one worker.",
    )
    what_to_try = (
        "Look for code that runs on some ranks only between backward() and the next forward pass.",
        "Load the last checkpoint from before this step on every worker.",
        "If it recurs on the same machine with the same program, test that machine.",
    )
    cannot_distinguish = (
        "Replicas that diverge on purpose and are averaged periodically, as in local SGD, from replicas that diverge by a fault.",
    )

    def conclusive(self, params: ReplicaDivergenceParams, block: Block) -> NDArray[np.bool_]:
        """Return the rows of tensors with elements of any kind."""
        return has_elements(block)

    def evaluate(
        self, params: ReplicaDivergenceParams, state: State, context: Block, block: Block, now: int
    ) -> tuple[State, list[Finding]]:
        """Compare the workers of each step and parameter."""
        rows = np.flatnonzero((block.statistics.count == 1) & (block.statistics.finite == 1))
        if not len(rows):
            return state, []
        value = block.statistics.mean[rows]
        key = np.stack([block.step[rows], block.mode[rows], block.tensor[rows]]).astype(np.int64)
        _, group = np.unique(key, axis=1, return_inverse=True)
        group = group.ravel()
        lowest, highest = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
        np.minimum.at(lowest, group, value)
        np.maximum.at(highest, group, value)
        findings: list[tuple[int, Finding]] = []
        for index in np.flatnonzero(lowest < highest):
            findings += self._of_step(block, rows[group == index])
        return state, [finding for _, finding in sorted(findings, key=lambda entry: entry[0])]

    def _of_step(self, block: Block, rows: NDArray[np.intp]) -> list[tuple[int, Finding]]:
        """Return findings for the rows of a parameter at a step that differ from the majority of workers."""
        rows = rows[np.argsort(block.worker[rows], kind="stable")]
        value = block.statistics.mean[rows]
        _, first, kind, counts = np.unique(value, return_index=True, return_inverse=True, return_counts=True)
        usual = first[counts == counts.max()].min()
        others = kind != kind[usual]
        count = f"of {len(rows)} workers {int(others.sum())}"
        return [
            (
                int(row),
                finding_at(
                    self.name,
                    block,
                    int(row),
                    value=float(block.statistics.mean[row]),
                    threshold=float(value[usual]),
                    message=(
                        f"{block.info(int(row)).name} of worker {block.worker[row]} differs from that of worker "
                        f"{block.worker[rows[usual]]}: {count} have other weights"
                    ),
                ),
            )
            for row in rows[others]
        ]
