"""Guards: rules inside the training process, on the rows as they are measured.

A `Guard` judges each step as the service does, with the watermark at the current step, and can end the training before a bad update is
applied.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from watchstep.errors import RuleError
from watchstep.format.block import Block, concatenate
from watchstep_rules.config.attached import element_probes
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition, as_told
from watchstep_rules.engine.history import History, over_one_catalogue, trimmed
from watchstep_rules.engine.judge import RuleHealth, RuleMemory, Verdict, judge_prepared
from watchstep_rules.engine.rule_inputs import JudgingProgress, Lookback, Prepared
from watchstep_rules.registry import KINDS
from watchstep_rules.rule import Finding
from watchstep_rules.rule_files.rule_file import load

__all__ = ["Guard"]


Said = tuple[RuleConfig, Verdict]


class StepJudge:
    """Some rule configs that are judged together, with what they remember."""

    def __init__(self, configs: Sequence[RuleConfig]) -> None:
        self._memories = {config.name: (config, RuleMemory()) for config in configs}
        self._reach = Lookback.of(configs)
        self._history = Block.empty()
        self._waiting: list[Block] = []
        self._sealed = -1
        self.steps = 0

    @property
    def memories(self) -> dict[str, RuleMemory]:
        """What is remembered, by the config's name."""
        return {name: memory for name, (_, memory) in self._memories.items()}

    def take(self, rows: Block) -> None:
        """All rows of a step that is over, to be judged with the next `judge`."""
        kept = self._in_any_scope(rows)
        self.steps += 1
        if len(kept):
            self._waiting.append(kept)

    def judge(self) -> list[Said]:
        """Judge the steps that were taken since the last call."""
        self.steps = 0
        if not self._waiting:
            return []
        arrived, self._waiting = concatenate(self._waiting), []
        now = max(self._sealed, int(arrived.step.max()))
        progress = JudgingProgress(self._sealed, now, int(arrived.time_ns.max()))
        history, arrived = over_one_catalogue(self._history, arrived)
        rows = Prepared(history, arrived, progress)
        said = []
        for name, (config, memory) in self._memories.items():
            verdict = judge_prepared(config, memory, rows)
            self._memories[name] = (config, verdict.memory)
            said.append((config, verdict))
        if self._reach.scopes:
            together = concatenate([history, arrived])
            nowhere = np.zeros(len(together), np.int64)
            self._history = trimmed(History(together, nowhere), self._reach, now).block
        self._sealed = now
        return said

    def ahead(self, rows: Block) -> tuple[RuleConfig, Finding] | None:
        """What would fire for rows of a step that is not over; nothing is remembered of it.

        Only rules that take rows as they come can tell; the others need the whole step.
        """
        kept = self._in_any_scope(rows)
        if not len(kept):
            return None
        prepared = Prepared(
            Block.empty(), kept, JudgingProgress(self._sealed, self._sealed, int(kept.time_ns.max()))
        )
        for config, memory in self._memories.values():
            if config.implementation.merged(config.parameters) == "per_worker":
                for change in as_told(judge_prepared(config, memory, prepared).transitions):
                    if change.phase is Phase.FIRING and not change.revised and change.finding is not None:
                        return config, change.finding
        return None

    def _in_any_scope(self, rows: Block) -> Block:
        """The rows that some config judges: what no rule looks at need not be kept."""
        needs = [
            (config.tensors, config.implementation.needed(config.parameters))
            for config, _ in self._memories.values()
        ]
        chosen = [any(scope.holds(info, need) for scope, need in needs) for info in rows.catalogue]
        return rows if all(chosen) else rows.where(rows.mask_of_tensors(chosen))


_log = logging.getLogger("watchstep")
Told = Callable[[RuleConfig, Verdict], None]


class GuardedHook(Protocol):
    """What a guard is attached to: a `watchstep.Hook`."""

    def guard_with(self, guard: Any, *, agree: bool = False) -> None:
        """Show each step to the guard."""
        ...


class Guard:
    """Judges each step in the training process, by the rows that the hook records; the findings are a backtest's.

    Only rule configs with the action ``stop`` end the training, by `watchstep.StopTraining`: those that judge rows as they
    come (``nan_or_inf``) before the optimizer updates anything, the others when the step is over, before the next
    begins. What the others find is logged, and told by ``hook.health["guard"]``.

    Attributes:
        probes: what its rules need to be measured besides; ``Hook(guard=…)`` measures it, a guard that is attached later finds what the
            hook was made for.

    Example::

        hook = watchstep.Hook("s3://bucket/runs")
        Guard("rules.yaml").attach(hook)
    """

    def __init__(
        self,
        rules: str | os.PathLike[str] | Sequence[RuleConfig] | None = None,
        *,
        every: int = 25,
        agree: bool = False,
        told: Told | None = None,
    ) -> None:
        """Make a guard; it judges nothing until it is attached.

        Args:
            rules: a rule file, or rule configs; the default rules where it is left out.
            every: rules that stop nothing are judged together every so many steps: cheaper, and they find the same.
            agree: of several ranks, let all stop together: one number is reduced before each update of a watched model, also by
                a rank whose hook has faults or is closed, until all are closed. A closed rank stops with the others. All ranks
                must attach the guard, watch, and make the same updates in the same order: a rank that waits five minutes for
                the others' number gives up, says so, and goes on unguarded.
            told: is called with each config and its verdict, on the training thread.

        Raises:
            RuleError: the rule file is missing or not valid; a rule needs the service or is a program or a query; or
                ``every`` is below 1.
        """
        if every < 1:
            raise RuleError(f"guard: every={every}", "use a whole number from 1")
        configs = _configs(rules)
        if waiting := [config.name for config in configs if config.implementation.clock]:
            raise RuleError(
                f"guard: {', '.join(waiting)}: a rule about silence is judged by the service, not inside the process",
                "leave it out of the guard's rules",
            )
        if slow := [config.name for config in configs if config.rule in KINDS]:
            raise RuleError(
                f"guard: {', '.join(slow)}: a rule of kind {' or '.join(sorted(KINDS))} would take milliseconds of each step",
                "leave it out of the guard's rules, and let the service judge it",
            )
        self.probes = element_probes(configs)
        self._every = every
        self._agree = agree
        self._told = told
        self._stops = StepJudge([config for config in configs if config.stops])
        self._others = StepJudge([config for config in configs if not config.stops])
        self._steps = 0
        self._firing: dict[str, int] = {}

    def attach(self, hook: GuardedHook) -> Guard:
        """Judge what a hook records from now on; best before the first step.

        Raises:
            ConfigError: the hook has a guard, or there are several ranks and ``agree`` was not asked for.
        """
        hook.guard_with(self, agree=self._agree)
        return self

    def before_update(self, rows: Block) -> str:
        """Why the training shall stop before an update, or nothing; called by the hook."""
        found = self._stops.ahead(rows)
        return _reason(*found) if found is not None else ""

    def after_step(self, step: int, rows: Block) -> str:
        """Why the training shall stop after a step, or nothing; called by the hook."""
        self._steps += 1
        self._stops.take(rows)
        fired = self._tell(self._stops.judge())
        self._others.take(rows)
        if self._others.steps >= self._every:
            self._tell(self._others.judge())
        return _reason(*fired[0]) if fired else ""

    def end(self) -> str:
        """Judge what is left, and ask for nothing any more; called by the hook."""
        self._tell(self._others.judge())
        return ""

    def as_data(self) -> dict[str, Any]:
        """Steps judged, the alerts that fire with the step since when, and rules that cannot be judged; JSON-ready."""
        memories = {**self._stops.memories, **self._others.memories}
        problems = {
            name: memory.problem for name, memory in memories.items() if memory.health is RuleHealth.ERROR
        }
        return {"steps": self._steps, "firing": dict(self._firing), "problems": problems}

    def _tell(self, said: list[Said]) -> list[tuple[RuleConfig, Finding]]:
        """Tell of verdicts; gives what began to fire."""
        fired = []
        for config, verdict in said:
            if self._told is not None:
                self._told(config, verdict)
            begun = [self._follow(config, change) for change in as_told(verdict.transitions)]
            fired += [(config, finding) for finding in begun if finding is not None]
        return fired

    def _follow(self, config: RuleConfig, transition: Transition) -> Finding | None:
        if transition.phase is not Phase.FIRING or transition.finding is None:
            self._firing.pop(config.name, None)
            return None
        self._firing[config.name] = transition.step
        again = "likelier: " if transition.revised else ""
        _log.warning("watchstep: guard: %s%s", again, _reason(config, transition.finding))
        return None if transition.revised else transition.finding


def make(rules: str | os.PathLike[str] | None) -> Guard:
    """A guard for ``Hook(guard=…)``: the entry point ``watchstep.guards``."""
    return Guard(rules)


def _configs(rules: str | os.PathLike[str] | Sequence[RuleConfig] | None) -> Sequence[RuleConfig]:
    if rules is None:
        return [config for config in DEFAULT_RULES if not config.implementation.clock]
    return load(os.fspath(rules)) if isinstance(rules, str | os.PathLike) else rules


def _reason(config: RuleConfig, finding: Finding) -> str:
    return f"{config.name} at step {finding.step}: {finding.message}"
