"""Replicas of a model that do not hold the same weights any more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.nonfinite import has_elements


class ReplicaDivergenceParams(Params):
    """It has none: equal is equal."""


class ReplicaDivergence(Rule[ReplicaDivergenceParams, State]):
    """Fires when the checksums of a parameter's replicas differ at a step: for some two workers, ``checksum != checksum``.

    Data-parallel training sums gradients so that each worker makes the same update of the same weights; it assumes that
    they stay equal and never compares them (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training", VLDB 2020, 3.1). Once a single bit differs they drift apart without any error, and the model that is saved is
    none that was trained. Checksums are of all bits of a weight, so there is no threshold; that two different tensors have
    the same has a chance of 2^-53.

    Workers that are found are those that are not with the most, or where there are two alike, not with the lowest rank.
    Trainings that let replicas part on purpose and average them now and then (local SGD) leave this rule out. Replicas
    are compared where a collection ``checksums`` is recorded, at every hundredth step by default.
    """

    name = "replica_divergence"
    summary = "replicas of a model do not hold the same weights"
    needs = Needs(collections=("checksums",), roles=("checksum",))
    merge = "sealed"
    usual_causes = (
        "A worker changed its weights by itself: an assignment, a clipping or an initialisation that depends on the rank or on a random number.",
        "Gradients were changed after they were summed, or an update was skipped, on one worker only.",
        "Parameters that the wrapper was told to ignore, or were added after it, or backward passes outside it (model.module).",
        "Faulty memory or hardware on one worker.",
    )
    what_to_try = (
        "Look for code that runs on some ranks only between backward() and the next forward pass.",
        "Load the last checkpoint from before this step on every worker.",
        "If it comes back on the same machine with the same program, test that machine.",
    )
    cannot_distinguish = (
        "Replicas that part on purpose and are averaged now and then, as in local SGD, from replicas that lost each other.",
    )

    def conclusive(self, params: ReplicaDivergenceParams, block: Block) -> NDArray[np.bool_]:
        """Rows of tensors with elements, of any kind."""
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
        found: list[tuple[int, Finding]] = []
        for place in np.flatnonzero(lowest < highest):
            found += self._of_step(block, rows[group == place])
        return state, [finding for _, finding in sorted(found, key=lambda each: each[0])]

    def _of_step(self, block: Block, rows: NDArray[np.intp]) -> list[tuple[int, Finding]]:
        """Those rows of one parameter at one step that differ from what most workers hold."""
        rows = rows[np.argsort(block.worker[rows], kind="stable")]
        value = block.statistics.mean[rows]
        _, first, kind, often = np.unique(value, return_index=True, return_inverse=True, return_counts=True)
        usual = first[often == often.max()].min()
        others = kind != kind[usual]
        said = f"of {len(rows)} workers {int(others.sum())}"
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
                        f"{block.info(int(row)).name} of worker {block.worker[row]} is not that of worker "
                        f"{block.worker[rows[usual]]}: {said} hold other weights"
                    ),
                ),
            )
            for row in rows[others]
        ]
