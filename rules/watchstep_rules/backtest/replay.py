"""Judging again what was recorded, evaluation by evaluation, as the service does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert_memory import Phase, Transition
from watchstep_rules.engine.coalesce import as_told
from watchstep_rules.engine.history import History, joined, over_one_catalogue, trimmed
from watchstep_rules.engine.judge import RuleHealth, RuleMemory, Verdict
from watchstep_rules.engine.lookback import Lookback
from watchstep_rules.engine.rule_inputs import JudgingProgress, Prepared
from watchstep_rules.engine.rule_set import judge_set
from watchstep_rules.rule import Finding

FINDINGS_KEPT = 1000
"""Findings of one rule config on one attempt that are kept; the rest are counted. The service keeps as many."""


@dataclass(frozen=True)
class Arrival:
    """What one evaluation is given.

    Attributes:
        clock_ns: its tick, nanoseconds since the epoch.
        sealed: the last sealed step after it; -1 for none.
        blocks: rows that arrived, each block in canonical order.
        ended: no row came, and the attempt had ended.
    """

    clock_ns: int
    sealed: int
    blocks: tuple[Block, ...] = ()
    ended: bool = False


@dataclass(frozen=True)
class ReplayOutcome:
    """What one rule config says of an attempt.

    Attributes:
        config: the rule config.
        findings: the first of them, in the order of the rows.
        found: how many there were.
        transitions: changes of its alert.
        health: whether it could be evaluated.
        problem: why not.
    """

    config: RuleConfig
    findings: list[Finding]
    found: int
    transitions: list[Transition]
    health: RuleHealth
    problem: str

    @property
    def fired(self) -> list[Transition]:
        """When the alert began to fire, each time, with what it came to name as the cause."""
        return [change for change in as_told(self.transitions) if change.phase is Phase.FIRING]


class _Told:
    """What one rule config has said so far."""

    def __init__(self, config: RuleConfig) -> None:
        self.config = config
        self.memory = RuleMemory()
        self.findings: list[Finding] = []
        self.found = 0
        self.transitions: list[Transition] = []

    def take(self, verdict: Verdict, kept: int) -> None:
        self.memory = verdict.memory
        self.found += len(verdict.findings)
        self.findings += verdict.findings[: max(0, kept - len(self.findings))]
        self.transitions += verdict.transitions

    def outcome(self) -> ReplayOutcome:
        memory = self.memory
        return ReplayOutcome(
            self.config, self.findings, self.found, self.transitions, memory.health, memory.problem
        )


class Replay:
    """One attempt, judged by sets of rule configs. Of earlier rows it keeps what the service keeps."""

    def __init__(self, rule_sets: Sequence[Sequence[RuleConfig]], findings_kept: int | None = None) -> None:
        """Begin an attempt.

        Args:
            rule_sets: each is judged as the rules of a run are: an alert may keep others of its set quiet.
            findings_kept: of each rule config, `FINDINGS_KEPT` where it is left out; the rest are counted.
        """
        self._sets = [[_Told(config) for config in configs] for configs in rule_sets]
        self._kept = FINDINGS_KEPT if findings_kept is None else findings_kept
        self._reach = Lookback.of(config for configs in rule_sets for config in configs)
        self._history = History.empty()
        self._position = 0
        self._sealed = -1
        self.rows = 0
        """Rows that have come so far."""

    def evaluate(self, arrival: Arrival) -> None:
        """Judge what came."""
        parts = list(enumerate(arrival.blocks, self._position))
        arrived = joined(parts, History.empty()).block
        progress = JudgingProgress(self._sealed, arrival.sealed, arrival.clock_ns, arrival.ended)
        rows = Prepared(*over_one_catalogue(self._history.block, arrived), progress)
        for rule_set in self._sets:
            verdicts = judge_set([(told.config, told.memory) for told in rule_set], rows)
            for told, verdict in zip(rule_set, verdicts, strict=True):
                told.take(verdict, self._kept)
        self._history = trimmed(joined(parts, self._history), self._reach, arrival.sealed)
        self._position += len(parts)
        self._sealed = arrival.sealed
        self.rows += len(arrived)

    def outcomes(self) -> list[list[ReplayOutcome]]:
        """What each rule config of each set said, in their order."""
        return [[told.outcome() for told in rule_set] for rule_set in self._sets]
