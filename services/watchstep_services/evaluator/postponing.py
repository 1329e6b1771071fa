"""Who waits while workers are behind: rules that stop nothing. Those that may look at every segment as it comes.

A look is an evaluation by these rules alone, from what they remember, over all that is not judged yet, and it keeps nothing. Where
it would change the state of an alert or of a rule, all rules judge, at once. Where it would not, the run is let go as it
was: the next evaluation judges its segments together, as ever, by split invariance with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from watchstep.block import Block
from watchstep_rules.judging.judge import Progress
from watchstep_services.evaluator.claim import Claim
from watchstep_services.evaluator.collect import Collected
from watchstep_services.evaluator.judging import Loaded, judge_all
from watchstep_services.evaluator.plan import Entry
from watchstep_services.evaluator.stopping import wants_stop
from watchstep_services.service import Service
from watchstep_services.settings import NANOSECONDS, nanoseconds

BEHIND_NS = NANOSECONDS // 5
"""A run that has waited for so long says that workers are behind."""


@dataclass(frozen=True)
class Postponed:
    """Nothing of a run asks for a stop; its rules judge later.

    Attributes:
        attempt: whose segments were looked at.
        until_ns: when at the latest.
        configs: the run's, and what they remember, as the database holds it.
        fresh: the segments that no look had seen before.
    """

    attempt: str
    until_ns: int
    configs: Sequence[Loaded]
    fresh: Sequence[Entry]


def may_wait_until(service: Service, held: Claim, collected: Collected) -> int | None:
    """Until when rules that stop nothing may be kept waiting; None where they are to judge now.

    They are where workers keep up, where one of the segments has waited for as long as it may, and where there is
    more to be done than to judge: gaps, damage, an end, a run that begins.
    """
    longest = nanoseconds(service.settings.postpone_seconds)
    if held.late_ns < BEHIND_NS or held.state != "running" or not collected.blocks:
        return None
    if collected.more or collected.corrupt or collected.missing or collected.waiting:
        return None
    attempt = collected.attempts.get(collected.attempt)
    if attempt is None or not attempt.world_size or attempt.ends or held.attempt != collected.attempt:
        return None
    until = min(entry.found_ns for entry, _ in collected.blocks) + longest
    return until if until > held.now_ns else None


def calls_for_stop(configs: Sequence[Loaded], history: Block, arrived: Block, progress: Progress) -> bool:
    """Whether a rule that may stop the job has something to say: of an alert, or of itself."""
    pressing = [one for one in configs if _presses(one)]
    if not pressing:
        return False
    judged = judge_all(pressing, history, arrived, progress)
    return any(
        said.transitions or said.memory.health != before.memory.health
        for said, before in zip(judged, pressing, strict=True)
    )


def _presses(one: Loaded) -> bool:
    return one.config is not None and wants_stop(one.config) and not one.config.dry_run
