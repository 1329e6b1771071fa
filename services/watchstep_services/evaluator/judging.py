"""Phase b, second half: every rule config of a run over the rows that arrived."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ValidationError

from watchstep.block import Block
from watchstep_rules.config import RuleConfig
from watchstep_rules.finding import Finding
from watchstep_rules.judging.alert_memory import Transition
from watchstep_rules.judging.history import over_one_catalogue
from watchstep_rules.judging.judge import Health, Progress, RuleMemory, Verdict, failed
from watchstep_rules.judging.prepared import Prepared
from watchstep_rules.judging.reach import Reach
from watchstep_rules.judging.rule_set import judge_set
from watchstep_services.database.models import RuleConfigRow


@dataclass(frozen=True)
class Loaded:
    """A rule config of a run with what it remembers, also as the text that is kept; no config where its data is no longer valid.

    ``told`` is the health that was last told of; None where nothing is kept of the attempt yet.
    """

    row: RuleConfigRow
    config: RuleConfig | None
    memory: RuleMemory
    problem: str = ""
    kept: str = ""
    told: str | None = None


@dataclass(frozen=True)
class Judged:
    """What one rule config said; its memory also as the JSON text that is kept, and whether that is another than before."""

    row: RuleConfigRow
    config: RuleConfig | None
    memory: RuleMemory
    kept: str
    findings: list[Finding]
    transitions: list[Transition]
    seconds: float = 0.0
    changed: bool = True
    told: str | None = None
    problem: str = ""

    def committed(self, told: str | None) -> Loaded:
        """What the next evaluation loads, once this is committed and a health was told of."""
        return Loaded(self.row, self.config, self.memory, self.problem, self.kept, told)


def load_config(row: RuleConfigRow, memory: str | None, told: str | None = None) -> Loaded:
    """A rule config from the database. One that this version cannot read is told as the rule's health."""
    held = memory_of(memory)
    try:
        return Loaded(row, _config_of(json.dumps(row.data, sort_keys=True)), held, "", memory or "", told)
    except Exception as error:  # noqa: BLE001 - one that cannot be read must not stop the others
        return Loaded(row, None, held, str(error).replace("\n", " ")[:500], memory or "", told)


@functools.lru_cache(maxsize=4096)
def _config_of(data: str) -> RuleConfig:
    """Most runs have the same few rule configs: each is checked once, and what follows from it is worked out once."""
    return RuleConfig.model_validate(json.loads(data))


def memory_of(text: str | None) -> RuleMemory:
    """What a rule config remembers; nothing where it is damaged or of an earlier version: it begins anew."""
    if not text:
        return RuleMemory()
    try:
        return RuleMemory.model_validate_json(text)
    except ValidationError:
        return RuleMemory()


def lookback(configs: Iterable[Loaded]) -> Reach:
    """How many earlier rows of each series the rules need that look back on it, and whether with their histograms."""
    return Reach.of(held.config for held in configs if held.config is not None)


def judge_all(configs: list[Loaded], history: Block, arrived: Block, progress: Progress) -> list[Judged]:
    """Judge with every rule config; a rule that fails says so in its health and stops no other."""
    rows = Prepared(*over_one_catalogue(history, arrived), progress)
    remembered = [(held.config, held.memory) for held in configs if held.config is not None]
    verdicts = iter(judge_set(remembered, rows))
    return [_unreadable(held) if held.config is None else _judged(held, next(verdicts)) for held in configs]


def _judged(held: Loaded, verdict: Verdict) -> Judged:
    if verdict.memory is held.memory and held.kept:
        return Judged(
            held.row,
            held.config,
            held.memory,
            held.kept,
            [],
            [],
            verdict.seconds,
            changed=False,
            told=held.told,
        )
    try:
        kept = verdict.memory.model_dump_json()
    except Exception as error:  # noqa: BLE001 - a state that cannot be kept is its rule's fault, and must not stop the others
        told = failed(held.memory, error)
        return Judged(held.row, held.config, told, told.model_dump_json(), [], [], told=held.told)
    said = (verdict.findings, verdict.transitions)
    return Judged(held.row, held.config, verdict.memory, kept, *said, seconds=verdict.seconds, told=held.told)


def _unreadable(held: Loaded) -> Judged:
    told = held.memory.model_copy(update={"health": Health.ERROR, "problem": held.problem})
    return Judged(held.row, None, told, told.model_dump_json(), [], [], told=held.told, problem=held.problem)
