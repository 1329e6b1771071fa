"""Phase b, second half: every rule config of a run over the rows that arrived."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pydantic import ValidationError

from watchstep.format.block import Block
from watchstep_rules.baseline import with_baseline
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Transition
from watchstep_rules.engine.history import over_one_catalogue
from watchstep_rules.engine.judge import RuleHealth, RuleMemory, Verdict, failed, judge_set
from watchstep_rules.engine.rule_inputs import JudgingProgress, Lookback, Prepared
from watchstep_rules.rule import Finding
from watchstep_services.db.models import RuleConfigRow

FINDINGS_KEPT = 1000
"""Findings of one rule config on one attempt that are kept; the rest are counted."""


@dataclass(frozen=True)
class Loaded:
    """A rule config of a run with what it remembers, also as the text that is kept; no config where its data is no longer valid.

    ``reported_health`` is the health that was last reported; None where nothing is kept of the attempt yet.
    """

    row: RuleConfigRow
    config: RuleConfig | None
    memory: RuleMemory
    problem: str = ""
    state: str = ""
    reported_health: str | None = None


@dataclass(frozen=True)
class Judged:
    """What one rule config said; its memory also as the JSON text that is kept, and whether that is another than before.

    Of its findings the first `FINDINGS_KEPT`, for no more are stored of a rule config, and how many there are.
    """

    row: RuleConfigRow
    config: RuleConfig | None
    memory: RuleMemory
    state: str
    findings: list[Finding]
    transitions: list[Transition]
    found: int = 0
    seconds: float = 0.0
    changed: bool = True
    reported_health: str | None = None
    problem: str = ""

    def committed(self, reported_health: str | None) -> Loaded:
        """What the next evaluation loads, once this is committed and a health was reported."""
        return Loaded(self.row, self.config, self.memory, self.problem, self.state, reported_health)


@dataclass(frozen=True)
class LostContext:
    """Segments whose rows cannot be read any more.

    Attributes:
        segments: how many.
        last_step: the last step that one of them held.
        problem: what is wrong with the last of them.
    """

    segments: int
    last_step: int
    problem: str

    @property
    def summary(self) -> str:
        """What is reported of the rules that needed these rows."""
        return (
            f"judged without the earlier rows of {self.segments} segments that cannot be read: {self.problem}"
        )


def load_config(
    row: RuleConfigRow, memory: str | None, reported_health: str | None = None, *, baseline: str | None = None
) -> Loaded:
    """A rule config from the database, with the attempt's baseline. One that this version cannot read is told as the rule's health."""
    held = memory_of(memory)
    try:
        config = with_baseline(_config_of(json.dumps(row.data, sort_keys=True)), baseline)
        return Loaded(row, config, held, "", memory or "", reported_health)
    except Exception as error:  # noqa: BLE001 - one that cannot be read must not stop the others
        return Loaded(row, None, held, str(error).replace("\n", " ")[:500], memory or "", reported_health)


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


def lookback(configs: Iterable[Loaded]) -> Lookback:
    """How many earlier rows of each series the rules need that look back on it, and whether with their histograms."""
    return Lookback.of(held.config for held in configs if held.config is not None)


def judge_all(
    configs: list[Loaded], history: Block, arrived: Block, progress: JudgingProgress
) -> list[Judged]:
    """Judge with every rule config; a rule that fails says so in its health and stops no other."""
    rows = Prepared(*over_one_catalogue(history, arrived), progress)
    remembered = [(held.config, held.memory) for held in configs if held.config is not None]
    verdicts = iter(judge_set(remembered, rows))
    return [_unreadable(held) if held.config is None else _judged(held, next(verdicts)) for held in configs]


def _judged(held: Loaded, verdict: Verdict) -> Judged:
    if verdict.memory is held.memory and held.state:
        return Judged(
            held.row,
            held.config,
            held.memory,
            held.state,
            [],
            [],
            seconds=verdict.seconds,
            changed=False,
            reported_health=held.reported_health,
        )
    try:
        state = verdict.memory.model_dump_json()
        findings = list(verdict.findings[:FINDINGS_KEPT])  # built here, outside of the transaction
    except Exception as error:  # noqa: BLE001 - what cannot be kept is its rule's fault, and must not stop the others
        memory = failed(held.memory, error)
        return Judged(
            held.row,
            held.config,
            memory,
            memory.model_dump_json(),
            [],
            [],
            reported_health=held.reported_health,
        )
    return Judged(
        held.row,
        held.config,
        verdict.memory,
        state,
        findings,
        verdict.transitions,
        len(verdict.findings),
        verdict.seconds,
        reported_health=held.reported_health,
    )


def _unreadable(held: Loaded) -> Judged:
    memory = held.memory.model_copy(update={"health": RuleHealth.ERROR, "problem": held.problem})
    return Judged(
        held.row,
        None,
        memory,
        memory.model_dump_json(),
        [],
        [],
        reported_health=held.reported_health,
        problem=held.problem,
    )


def report_lost_context(judged: list[Judged], lost: LostContext, watermark: int) -> list[Judged]:
    """Set the health of the rule configs that needed earlier rows which cannot be read; what they found stays.

    Args:
        judged: what the rule configs said without these rows.
        lost: the rows.
        watermark: the watermark before this evaluation.
    """
    return [
        _reported(entry, lost, watermark) if _needed(entry, lost, watermark) else entry for entry in judged
    ]


def _needed(judged: Judged, lost: LostContext, watermark: int) -> bool:
    config, memory = judged.config, judged.memory
    if config is None or memory.health is RuleHealth.ERROR:
        return False
    rule, params = config.implementation, config.parameters
    # A rule in error gets no ticks: one that watches the clock needs them more than this report.
    if rule.clock:
        return False
    waits = rule.merged(params) != "per_worker"
    looked_back = memory.judged > 0 and rule.lookback(params) > 0
    return looked_back or (waits and lost.last_step > watermark)


def _reported(judged: Judged, lost: LostContext, watermark: int) -> Judged:
    problem = lost.summary
    if lost.last_step > watermark:
        problem += f"; steps after {watermark} among them were not judged"
    memory = judged.memory.model_copy(update={"health": RuleHealth.ERROR, "problem": problem[:500]})
    return replace(judged, memory=memory, state=memory.model_dump_json(), changed=True)
