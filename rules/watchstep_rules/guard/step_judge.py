"""Rule configs over the steps of one process as they come: as the service judges, with every step sealed at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from watchstep.format.block import Block, concatenate
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert_memory import Phase
from watchstep_rules.engine.coalesce import as_told
from watchstep_rules.engine.history import History, over_one_catalogue, trimmed
from watchstep_rules.engine.judge import RuleMemory, Verdict, judge_prepared
from watchstep_rules.engine.lookback import Lookback
from watchstep_rules.engine.rule_inputs import JudgingProgress, Prepared
from watchstep_rules.rule import Finding

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
