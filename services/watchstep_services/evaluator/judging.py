"""Phase b, second half: every rule config of a run over the rows that arrived."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from watchstep.block import Block
from watchstep.errors import RuleError
from watchstep_rules.alert import Transition
from watchstep_rules.config import RuleConfig
from watchstep_rules.finding import Finding
from watchstep_rules.judge import Health, Progress, RuleMemory, judge
from watchstep_services.database.models import RuleConfigRow
from watchstep_services.evaluator.history import union_catalogue, with_catalogue


@dataclass(frozen=True)
class Loaded:
    """A rule config of a run with what it remembers; no config where its data is no longer valid."""

    row: RuleConfigRow
    config: RuleConfig | None
    memory: RuleMemory
    problem: str = ""


@dataclass(frozen=True)
class Judged:
    """What one rule config said."""

    row: RuleConfigRow
    config: RuleConfig | None
    memory: RuleMemory
    findings: list[Finding]
    transitions: list[Transition]


def load_config(row: RuleConfigRow, memory: str | None) -> Loaded:
    """A rule config from the database. One that this version cannot read is told as the rule's health."""
    held = RuleMemory.model_validate_json(memory) if memory else RuleMemory()
    try:
        return Loaded(row, RuleConfig.model_validate(row.data), held)
    except (ValidationError, RuleError) as error:
        return Loaded(row, None, held, str(error).replace("\n", " ")[:500])


def lookback(configs: list[Loaded]) -> int:
    """How many earlier rows of each series the rule that looks back furthest needs."""
    return max(
        (held.config.implementation.lookback(held.config.parameters) for held in configs if held.config),
        default=0,
    )


def judge_all(configs: list[Loaded], history: Block, arrived: Block, progress: Progress) -> list[Judged]:
    """Judge with every rule config; a rule that fails says so in its health and stops no other."""
    # One catalogue for both, so that rows of one step have the same order however the segments were split.
    catalogue = union_catalogue([history, arrived])
    history, arrived = with_catalogue(history, catalogue), with_catalogue(arrived, catalogue)
    return [_judge_one(held, history, arrived, progress) for held in configs]


def _judge_one(held: Loaded, history: Block, arrived: Block, progress: Progress) -> Judged:
    if held.config is None:
        told = held.memory.model_copy(update={"health": Health.ERROR, "problem": held.problem})
        return Judged(held.row, None, told, [], [])
    verdict = judge(held.config, held.memory, history, arrived, progress)
    return Judged(held.row, held.config, verdict.memory, verdict.findings, verdict.transitions)
