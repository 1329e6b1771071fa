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

from watchstep.capture.mirror.mirrored_run import AlertChange, AlertPhase
from watchstep.errors import RuleError
from watchstep.format.block import Block, concatenate
from watchstep_rules.config.attached import capture_needs
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition, coalesce
from watchstep_rules.engine.judge import RuleHealth, RuleMemory, Verdict, judge_inputs
from watchstep_rules.engine.rule_inputs import (
    History,
    JudgingProgress,
    Lookback,
    RuleInputs,
    over_one_catalogue,
    trimmed,
)
from watchstep_rules.registry import KINDS
from watchstep_rules.rule import Finding
from watchstep_rules.rule_files.rule_file import load

__all__ = ["Guard"]


_Verdicts = list[tuple[RuleConfig, Verdict]]


class StepEvaluator:
    """Rule configs that are evaluated together, with their states."""

    def __init__(self, configs: Sequence[RuleConfig]) -> None:
        self._memories = {config.name: (config, RuleMemory()) for config in configs}
        self._lookback = Lookback.of(configs)
        self._history = Block.empty()
        self._waiting: list[Block] = []
        self._watermark = -1
        self.steps = 0

    @property
    def memories(self) -> dict[str, RuleMemory]:
        """The states of the rule configs, by name."""
        return {name: memory for name, (_, memory) in self._memories.items()}

    def add(self, rows: Block) -> None:
        """Add all rows of a finished step, to be evaluated by the next `evaluate`."""
        in_scope = self._in_any_scope(rows)
        self.steps += 1
        if len(in_scope):
            self._waiting.append(in_scope)

    def evaluate(self) -> _Verdicts:
        """Evaluate the steps that were added since the last call."""
        self.steps = 0
        if not self._waiting:
            return []
        arrived, self._waiting = concatenate(self._waiting), []
        now = max(self._watermark, int(arrived.step.max()))
        progress = JudgingProgress(self._watermark, now, int(arrived.time_ns.max()))
        history, arrived = over_one_catalogue(self._history, arrived)
        rows = RuleInputs(history, arrived, progress)
        verdicts = []
        for name, (config, memory) in self._memories.items():
            verdict = judge_inputs(config, memory, rows)
            self._memories[name] = (config, verdict.memory)
            verdicts.append((config, verdict))
        if self._lookback.scopes:
            together = concatenate([history, arrived])
            no_position = np.zeros(len(together), np.int64)
            self._history = trimmed(History(together, no_position), self._lookback, now).block
        self._watermark = now
        return verdicts

    def preview(self, rows: Block) -> tuple[RuleConfig, Finding] | None:
        """The rule config that would fire for rows of an unfinished step, with its finding; no state is kept.

        Only ``per_worker`` rules take part. The others need the whole step.
        """
        in_scope = self._in_any_scope(rows)
        if not len(in_scope):
            return None
        progress = JudgingProgress(self._watermark, self._watermark, int(in_scope.time_ns.max()))
        inputs = RuleInputs(Block.empty(), in_scope, progress)
        for config, memory in self._memories.values():
            if config.implementation.merged(config.parameters) == "per_worker":
                for change in coalesce(judge_inputs(config, memory, inputs).transitions):
                    if change.phase is Phase.FIRING and not change.revised and change.finding is not None:
                        return config, change.finding
        return None

    def _in_any_scope(self, rows: Block) -> Block:
        """The rows in the scope of at least one rule config; other rows need not be kept."""
        needs = [
            (config.tensors, config.implementation.needed(config.parameters))
            for config, _ in self._memories.values()
        ]
        chosen = [any(scope.selects(info, need) for scope, need in needs) for info in rows.catalogue]
        return rows if all(chosen) else rows.where(rows.mask_of_tensors(chosen))


_log = logging.getLogger("watchstep")
OnVerdict = Callable[[RuleConfig, Verdict], None]


class GuardedHook(Protocol):
    """The hook that a guard is attached to: a `watchstep.Hook`."""

    def guard_with(self, guard: Any, *, agree: bool = False) -> None:
        """Call the guard at each step."""
        ...


class Guard:
    """Evaluates rules at each step inside the training process, on the rows that the hook records. Findings equal those of a backtest.

    Only rule configs with the action ``stop`` end the training, by raising `watchstep.StopTraining`: ``per_worker`` rules such as
    ``nan_or_inf`` before the optimizer applies an update, the others at the end of the step. Findings of rule configs without ``stop``
    are logged and reported in ``hook.health["guard"]``.

    Attributes:
        needs: what its rules need the recorder to capture. ``Hook(guard=…)`` captures it; a guard that is attached later gets only what the
            hook was created with.

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
        on_verdict: OnVerdict | None = None,
    ) -> None:
        """Create a guard; it has no effect until it is attached.

        Args:
            rules: a rule file or rule configs; the default rules if omitted.
            every: number of steps after which rules without ``stop`` are evaluated together. Larger values are cheaper and give the same
                findings.
            agree: stop all ranks together. One number is reduced before each update of a watched model, also by ranks whose hook has
                faults or is closed, until all hooks are closed. A closed rank stops with the others. All ranks must attach the guard,
                watch the model, and make the same updates in the same order. A rank that waits five minutes for the others reports a
                fault and continues unguarded.
            on_verdict: called on the training thread with each rule config and its verdict.

        Raises:
            RuleError: the rule file is missing or not valid; a rule needs the service, or is a program or a query; or ``every`` is below
                1.
        """
        if every < 1:
            raise RuleError(f"guard: every={every}", "use a whole number from 1")
        configs = _configs(rules)
        if waiting := [config.name for config in configs if config.implementation.clock]:
            raise RuleError(
                f"guard: {', '.join(waiting)}: a rule that watches the clock runs only in the service",
                "remove it from the guard's rules",
            )
        if slow := [config.name for config in configs if config.rule in KINDS]:
            raise RuleError(
                f"guard: {', '.join(slow)}: a rule of kind {' or '.join(sorted(KINDS))} would take milliseconds of each step",
                "remove it from the guard's rules; the service can evaluate it",
            )
        self.needs = capture_needs(configs)
        self._every = every
        self._agree = agree
        self._on_verdict = on_verdict
        self._stops = StepEvaluator([config for config in configs if config.stops])
        self._others = StepEvaluator([config for config in configs if not config.stops])
        self._steps = 0
        self._firing: dict[str, int] = {}
        self._receive: Callable[[AlertChange], None] | None = None

    def report_alerts(self, receive: Callable[[AlertChange], None]) -> None:
        """Also pass each alert that begins to fire or resolves to a function, which must not block. Called by a hook with a mirror."""
        self._receive = receive

    def attach(self, hook: GuardedHook) -> Guard:
        """Attach the guard to a hook, preferably before the first step.

        Raises:
            ConfigError: the hook already has a guard, or there are several ranks and ``agree`` is False.
        """
        hook.guard_with(self, agree=self._agree)
        return self

    def before_update(self, rows: Block) -> str:
        """Called by the hook before an update. Returns the reason to stop the training, or an empty string."""
        alert = self._stops.preview(rows)
        return _reason(*alert) if alert is not None else ""

    def after_step(self, step: int, rows: Block) -> str:
        """Called by the hook after a step. Returns the reason to stop the training, or an empty string."""
        self._steps += 1
        self._stops.add(rows)
        fired = self._report(self._stops.evaluate())
        self._others.add(rows)
        if self._others.steps >= self._every:
            self._report(self._others.evaluate())
        return _reason(*fired[0]) if fired else ""

    def end(self) -> str:
        """Called by the hook at its end: evaluates the remaining steps."""
        self._report(self._others.evaluate())
        return ""

    def as_data(self) -> dict[str, Any]:
        """Number of evaluated steps, firing alerts with their first step, and rules that cannot be evaluated; JSON-ready."""
        memories = {**self._stops.memories, **self._others.memories}
        problems = {
            name: memory.problem for name, memory in memories.items() if memory.health is RuleHealth.ERROR
        }
        return {"steps": self._steps, "firing": dict(self._firing), "problems": problems}

    def _report(self, verdicts: _Verdicts) -> list[tuple[RuleConfig, Finding]]:
        """Report verdicts. Returns the rule configs that began to fire, with their findings."""
        fired = []
        for config, verdict in verdicts:
            if self._on_verdict is not None:
                self._on_verdict(config, verdict)
            findings = [self._follow(config, change) for change in coalesce(verdict.transitions)]
            fired += [(config, finding) for finding in findings if finding is not None]
        return fired

    def _follow(self, config: RuleConfig, transition: Transition) -> Finding | None:
        if transition.phase is not Phase.FIRING or transition.finding is None:
            if self._firing.pop(config.name, None) is not None and transition.phase is Phase.RESOLVED:
                self._pass_on(config, "resolved", transition.step, "no more findings")
            return None
        self._firing[config.name] = transition.step
        prefix = "likelier: " if transition.revised else ""
        _log.warning("watchstep: guard: %s%s", prefix, _reason(config, transition.finding))
        if transition.revised:
            return None
        self._pass_on(config, "firing", transition.finding.step, transition.finding.message)
        return transition.finding

    def _pass_on(self, config: RuleConfig, phase: AlertPhase, step: int, message: str) -> None:
        if self._receive is not None:
            self._receive(AlertChange(config.name, phase, str(config.severity), step, message))


def make(rules: str | os.PathLike[str] | None) -> Guard:
    """Create a guard for ``Hook(guard=…)``; the entry point ``watchstep.guards``."""
    return Guard(rules)


def _configs(rules: str | os.PathLike[str] | Sequence[RuleConfig] | None) -> Sequence[RuleConfig]:
    if rules is None:
        return [config for config in DEFAULT_RULES if not config.implementation.clock]
    return load(os.fspath(rules)) if isinstance(rules, str | os.PathLike) else rules


def _reason(config: RuleConfig, finding: Finding) -> str:
    return f"{config.name}: bad from step {finding.step}: {finding.message}"
