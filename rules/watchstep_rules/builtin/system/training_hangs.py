"""A training whose threads stay at one line, on every rank."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from watchstep.capture.steps.metric_names import STALLED
from watchstep.format.block import Block
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_of_run

_START = f"{STALLED}@"
_MOST_PLACES = 3
_MOST_RANKS = 8


class TrainingHangsParams(Params):
    """Parameters of `TrainingHangs`."""

    seconds: float = Field(120.0, gt=0, description="Least time without the end of a step.")


class TrainingHangsState(State):
    """State of `TrainingHangs`.

    Attributes:
        workers: the number of ranks with rows so far.
    """

    workers: int = 0


class TrainingHangs(Rule[TrainingHangsParams, TrainingHangsState]):
    """Fires when no step ends on any rank, and the training threads of all ranks do not move.

    The recorder of a rank reports a stall when no step has ended for ``max(stall_seconds, 30 * usual, 1.5 * longest)`` seconds, where usual is the median of the time of recent steps and longest the longest time at one place before, and the
    stack of the training thread was the same, instruction by instruction, at five or more looks over a third of that time (`watchstep.capture.steps.stalls`). A rank that moves,
    such as one that evaluates while the others wait for it in a barrier, keeps this rule silent: all ranks with rows must report, at one step, at least ``seconds``.

    The message names where ranks wait. If one waits elsewhere than the others, it is usually the cause. It is a warning: nobody else can know whether a call that takes minutes,
    such as a large upload, will return.
    """

    name = "training_hangs"
    summary = "no step ends, and the training threads of all ranks stay at one line"
    needs = Needs(collections=("metrics",), roles=("metric",))
    merge = "watermark"
    usual_causes = (
        "A collective waits for a rank that is dead, that has taken another branch, or that has ended its data earlier.",
        "The data loader waits for a worker process that has died, or for storage that does not answer.",
        "Two threads or processes wait for each other's lock, such as after a fork of a process with threads.",
    )
    what_to_try = (
        "Compare the places that the message names: the rank that waits elsewhere is usually the cause.",
        "Read the whole stack in the run's health (watchstep runs show), and set a timeout for collectives.",
        "Train with as many batches on every rank: drop_last=True, or torch.distributed.algorithms.Join.",
    )
    cannot_distinguish = (
        "A single call that takes minutes and returns, such as an upload of a checkpoint, from one that never returns.",
        "A program that waits for new data in a call of its own, such as one that learns from requests, from one whose data never come.",
    )

    def evaluate(
        self, params: TrainingHangsParams, state: TrainingHangsState, context: Block, block: Block, now: int
    ) -> tuple[TrainingHangsState, list[Finding]]:
        """Judge the steps that are complete on all ranks."""
        workers = max(state.workers, int(block.worker.max()) + 1 if len(block) else 0)
        rows = block.where(block.mask_of_tensors([info.name.startswith(_START) for info in block.catalogue]))
        findings = []
        for step in np.unique(rows.step):
            stalled = rows.where((rows.step == step) & (rows.statistics.max >= params.seconds))
            if len(stalled) and len(np.unique(stalled.worker)) >= workers:
                findings.append(self._finding(params, stalled, int(step)))
        return TrainingHangsState(workers=workers), findings

    def _finding(self, params: TrainingHangsParams, rows: Block, step: int) -> Finding:
        places: dict[str, list[int]] = {}
        for row in range(len(rows)):
            ranks = places.setdefault(rows.info(row).name.removeprefix(_START), [])
            if int(rows.worker[row]) not in ranks:
                ranks.append(int(rows.worker[row]))
        seconds = float(rows.statistics.max.max())
        at = [
            f"{_named(ranks)} at {place}"
            for place, ranks in sorted(places.items(), key=lambda each: len(each[1]))
        ]
        more = f"; {len(at) - _MOST_PLACES} further places" if len(at) > _MOST_PLACES else ""
        message = f"no step has ended for {seconds:.0f} s, and no training thread moves: {'; '.join(at[:_MOST_PLACES])}{more}"
        return finding_of_run(
            self.name, step, int(rows.time_ns.max()), value=seconds, threshold=params.seconds, message=message
        )


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
