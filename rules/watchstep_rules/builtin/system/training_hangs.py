"""A training whose threads stay at one line, on every rank."""

from __future__ import annotations

from typing import NamedTuple

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


class Stalled(NamedTuple):
    """The last report of a rank that does not move: the step after which no other ended, the seconds since, and the line."""

    step: int
    seconds: float
    place: str


class TrainingHangsState(State):
    """State of `TrainingHangs`.

    Attributes:
        workers: the number of ranks with rows so far.
        stalled: the ranks that have reported a stall, and nothing later.
    """

    workers: int = 0
    stalled: dict[int, Stalled] = Field(default_factory=dict)


class TrainingHangs(Rule[TrainingHangsParams, TrainingHangsState]):
    """Fires when no step ends on any rank, and the training threads of all ranks do not move.

    The recorder of a rank reports a stall when no step has ended for ``max(stall_seconds, 30 * usual, 1.5 * longest)`` seconds, where usual is the median of the time of recent steps and longest the longest time at one place before, and the
    stack of the training thread was the same, instruction by instruction, at five or more looks over a third of that time (`watchstep.capture.steps.stalls`). A rank that moves,
    such as one that evaluates while the others wait for it in a barrier, keeps this rule silent: the newest row of each rank must be such a report, of at least ``seconds``.
    Ranks may be at different steps.

    The message names where ranks wait. If one waits elsewhere than the others, it is usually the cause. It is a warning: nobody else can know whether a call that takes minutes,
    such as a large upload, will return.
    """

    name = "training_hangs"
    summary = "no step ends, and the training threads of all ranks stay at one line"
    # Losses show that steps go on: metrics such as learning rates have rows only where they change.
    needs = Needs(collections=("metrics", "losses"), roles=("metric", "loss"))
    merge = "per_worker"
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
        """Judge each report of a rank by what all ranks have reported until then."""
        workers = max(state.workers, int(block.worker.max()) + 1 if len(block) else 0)
        is_report = block.mask_of_tensors([info.name.startswith(_START) for info in block.catalogue])
        others, reports = block.where(~is_report), block.where(is_report)
        stalled = dict(state.stalled)
        findings = []
        for row in np.argsort(reports.time_ns, kind="stable"):
            time_ns = int(reports.time_ns[row])
            stalled = _without_those_that_move(stalled, others.where(others.time_ns < time_ns))
            place = reports.info(int(row)).name.removeprefix(_START)
            report = Stalled(int(reports.step[row]), float(reports.statistics.max[row]), place)
            stalled[int(reports.worker[row])] = report
            if len(stalled) >= workers and all(each.seconds >= params.seconds for each in stalled.values()):
                findings.append(self._finding(params, stalled, report, time_ns))
        stalled = _without_those_that_move(stalled, others)
        return TrainingHangsState(workers=workers, stalled=stalled), findings

    def _finding(
        self, params: TrainingHangsParams, stalled: dict[int, Stalled], report: Stalled, time_ns: int
    ) -> Finding:
        places: dict[str, list[int]] = {}
        for rank, each in sorted(stalled.items()):
            places.setdefault(each.place, []).append(rank)
        at = [
            f"{_named(ranks)} at {place}"
            for place, ranks in sorted(places.items(), key=lambda each: len(each[1]))
        ]
        more = f"; {len(at) - _MOST_PLACES} further places" if len(at) > _MOST_PLACES else ""
        message = f"no step has ended for {report.seconds:.0f} s, and no training thread moves: {'; '.join(at[:_MOST_PLACES])}{more}"
        return finding_of_run(
            self.name, report.step, time_ns, value=report.seconds, threshold=params.seconds, message=message
        )


def _without_those_that_move(stalled: dict[int, Stalled], rows: Block) -> dict[int, Stalled]:
    """Return the ranks without a row of a later step than that of their report."""
    return {
        rank: report
        for rank, report in stalled.items()
        if not bool(((rows.worker == rank) & (rows.step > report.step)).any())
    }


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
