"""The second phase of an evaluation: evaluate every rule config of a run on the new rows."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat, zip_longest

from pydantic import ValidationError

from watchstep.errors import RuleError
from watchstep.format.block import Block
from watchstep_rules.baseline import with_baseline
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.program import limited_rule_time
from watchstep_rules.engine.alert import Transition
from watchstep_rules.engine.judge import (
    JudgingLimits,
    RuleHealth,
    RuleMemory,
    Verdict,
    failed,
    inhibited,
    judge_each,
)
from watchstep_rules.engine.rule_inputs import JudgingProgress, Lookback, RuleInputs, over_one_catalogue
from watchstep_rules.engine.saved_tensors import SavedTensors
from watchstep_rules.rule import Finding
from watchstep_services.db.models import RuleConfigRow

STATE_CHARACTERS = 32 * 1024 * 1024
"""Limit of the rule states of one attempt together, as JSON. They are stored in one transaction."""

JUDGING_SECONDS = 30.0
"""Limit of the processor time in which the rules of one evaluation begin, except those in `REQUESTED_SECONDS`."""

REQUESTED_SECONDS = 2.0
"""The same for the rules that a recorder requested, which are evaluated last, and the limit of the time of its SQL rules. Rules that an
operator has allowed to stop the job are not among them."""

REQUESTED_IN_TURN_SECONDS = 10.0
"""The same for a large evaluation, because a project has only one at a time."""

_REQUESTED = "the rules that the recorder requested"

FINDINGS_KEPT = 1000
"""Limit of stored findings of one rule config on one attempt; the rest are counted."""

FINDINGS_BYTES = 32 * 1024 * 1024
"""Limit of the findings that one evaluation stores, as JSON, except those of rules that a recorder requested; the rest are counted. All
findings of an evaluation are stored in one transaction. A finding takes 0.4 to 1 kB with names of
some 100 characters, so 32 rules reach `FINDINGS_KEPT` in one evaluation before it."""

REQUESTED_FINDINGS = 2000
"""Limit of the number of findings that one evaluation stores of all rules that a recorder requested; the rest are counted."""

REQUESTED_FINDINGS_BYTES = 4 * 1024 * 1024
"""The same in bytes, as JSON."""


@dataclass(frozen=True)
class EvaluationLimits:
    """Limits of one evaluation.

    Attributes:
        check_running: as in `JudgingLimits`.
        requested_seconds: limit of the rules that a recorder requested, as `REQUESTED_SECONDS`.
    """

    check_running: Callable[[], None]
    requested_seconds: float


@dataclass(frozen=True)
class Loaded:
    """A rule config of a run with its rule state, parsed and as stored text.

    ``config`` is None if its data is not valid. ``reported_health`` is the last reported health; None if the attempt
    has no stored state yet.
    """

    row: RuleConfigRow
    config: RuleConfig | None
    memory: RuleMemory
    problem: str = ""
    state: str = ""
    reported_health: str | None = None


@dataclass(frozen=True)
class Judged:
    """The result of one rule config: its new state, parsed and as JSON text, and whether it differs from the stored one.

    ``findings`` are the first `FINDINGS_KEPT` findings, because no more are stored; ``finding_count`` is the number of all.
    """

    row: RuleConfigRow
    config: RuleConfig | None
    memory: RuleMemory
    state: str
    findings: list[Finding]
    transitions: list[Transition]
    finding_count: int = 0
    seconds: float = 0.0
    changed: bool = True
    reported_health: str | None = None
    problem: str = ""

    def committed(self, reported_health: str | None) -> Loaded:
        """The config and state that the next evaluation loads, once the result is committed and a health was reported."""
        return Loaded(self.row, self.config, self.memory, self.problem, self.state, reported_health)


@dataclass(frozen=True)
class LostContext:
    """Segments with rows that cannot be read any more.

    Attributes:
        segments: number of segments.
        last_step: the last step of any of them.
        problem: the problem with the last of them.
    """

    segments: int
    last_step: int
    problem: str

    @property
    def summary(self) -> str:
        """The problem in the health of the rules that needed these rows."""
        return f"evaluated without the earlier rows of {self.segments} segments that cannot be read: {self.problem}"


def load_config(
    row: RuleConfigRow, memory: str | None, reported_health: str | None = None, *, baseline: str | None = None
) -> Loaded:
    """Load a rule config from its row, with the attempt's baseline. If this version cannot read it, the rule's health reports it."""
    parsed = memory_of(memory)
    try:
        config = with_baseline(_config_of(json.dumps(row.data, sort_keys=True)), baseline)
        return Loaded(row, config, parsed, "", memory or "", reported_health)
    except Exception as error:  # noqa: BLE001 - an unreadable config must not affect the others
        return Loaded(row, None, parsed, str(error).replace("\n", " ")[:500], memory or "", reported_health)


@functools.lru_cache(maxsize=4096)
def _config_of(data: str) -> RuleConfig:
    """Parse a config. Most runs have the same few configs, so each is validated and prepared once."""
    return RuleConfig.model_validate(json.loads(data))


def memory_of(text: str | None) -> RuleMemory:
    """Parse a rule state; an empty, damaged or outdated one begins anew."""
    if not text:
        return RuleMemory()
    try:
        return RuleMemory.model_validate_json(text)
    except ValidationError:
        return RuleMemory()


def lookback(configs: Iterable[Loaded]) -> Lookback:
    """The lookback of all rules: earlier rows of each series, and whether histograms are needed."""
    return Lookback.of(loaded.config for loaded in configs if loaded.config is not None)


def is_requested(row: RuleConfigRow) -> bool:
    """Whether a rule config is requested by a recorder only: no operator has allowed it to stop the job."""
    return row.origin == "recorder" and not row.granted_stop


def stored_findings(
    judged: Sequence[Judged], room: Sequence[int]
) -> Iterator[tuple[RuleConfigRow, Finding, str]]:
    """The findings of an evaluation that are stored, with their JSON, in order for each rule config.

    Rule configs take turns, so that those with many or large findings leave room for the first findings of the others.

    Args:
        judged: results of rule configs.
        room: limit of the findings of each of them.
    """
    own: list[tuple[RuleConfigRow, list[Finding]]] = []
    requested: list[tuple[RuleConfigRow, list[Finding]]] = []
    for entry, most in zip(judged, room, strict=True):
        (requested if is_requested(entry.row) else own).append((entry.row, entry.findings[:most]))
    yield from _limited(own, sys.maxsize, FINDINGS_BYTES)
    yield from _limited(requested, REQUESTED_FINDINGS, REQUESTED_FINDINGS_BYTES)


def _limited(
    configs: Sequence[tuple[RuleConfigRow, Sequence[Finding]]], most: int, size: int
) -> Iterator[tuple[RuleConfigRow, Finding, str]]:
    """The first findings, up to a number and a size in bytes."""
    turns = zip_longest(*(zip(repeat(row), findings) for row, findings in configs))
    in_turn = (pair for turn in turns for pair in turn if pair is not None)
    for row, finding in islice(in_turn, most):
        serialized = finding.model_dump_json()
        size -= len(serialized.encode())
        if size < 0:
            return
        yield row, finding, serialized


def judge_all(
    configs: list[Loaded],
    history: Block,
    arrived: Block,
    progress: JudgingProgress,
    limits: EvaluationLimits,
    saved: SavedTensors,
) -> list[Judged]:
    """Evaluate every rule config. A failing rule reports it in its health and does not affect the others.

    Args:
        configs: the rule configs with their states.
        history: earlier rows.
        arrived: new rows.
        progress: the watermarks before and now.
        limits: limits of the evaluation.
        saved: reads full tensors for rules that need them.
    """
    rows = RuleInputs(*over_one_catalogue(history, arrived), progress, saved)
    readable = [index for index, loaded in enumerate(configs) if loaded.config is not None]
    # A recorder may request many rules: the others come first, so that they are within the time limit.
    order = sorted(readable, key=lambda index: is_requested(configs[index].row))
    pairs = [
        (config, configs[index].memory) for index in order if (config := configs[index].config) is not None
    ]
    own = sum(not is_requested(configs[index].row) for index in order)
    of_owners = JudgingLimits(JUDGING_SECONDS, findings=FINDINGS_KEPT, check_running=limits.check_running)
    each = judge_each(pairs[:own], rows, of_owners)
    seconds = limits.requested_seconds
    with limited_rule_time(seconds, _REQUESTED, "make them faster, or have an operator request them"):
        of_recorder = JudgingLimits(seconds, _REQUESTED, FINDINGS_KEPT, limits.check_running)
        each += judge_each(pairs[own:], rows, of_recorder)
    verdicts = dict(zip(order, inhibited(pairs, each, progress.now), strict=True))
    judged = [
        _judged(loaded, verdicts[index]) if index in verdicts else _unreadable(loaded)
        for index, loaded in enumerate(configs)
    ]
    return _limit_states(configs, judged)


def _limit_states(configs: Sequence[Loaded], judged: list[Judged]) -> list[Judged]:
    """Discard the largest new states where all exceed `STATE_CHARACTERS`. These rules keep their previous state, with an error."""
    total = sum(len(entry.state) for entry in judged)
    if total <= STATE_CHARACTERS:
        return judged
    limited = list(judged)
    for position in sorted(range(len(judged)), key=lambda position: -len(judged[position].state)):
        if total <= STATE_CHARACTERS:
            break
        loaded, entry = configs[position], judged[position]
        if not entry.changed:
            continue
        error = RuleError(
            f"rule state of {len(entry.state)} characters; {STATE_CHARACTERS} are allowed for all rules of an attempt",
            "record fewer tensors, or give the rule config a scope in 'tensors'",
        )
        limited[position] = _failed(loaded, error)
        total += len(limited[position].state) - len(entry.state)
    return limited


def _judged(loaded: Loaded, verdict: Verdict) -> Judged:
    if verdict.memory is loaded.memory and loaded.state:
        return Judged(
            loaded.row,
            loaded.config,
            loaded.memory,
            loaded.state,
            [],
            [],
            seconds=verdict.seconds,
            changed=False,
            reported_health=loaded.reported_health,
        )
    try:
        state = verdict.memory.model_dump_json()
    except Exception as error:  # noqa: BLE001 - a state that cannot be stored must not affect the other rules
        return _failed(loaded, error)
    return Judged(
        loaded.row,
        loaded.config,
        verdict.memory,
        state,
        list(verdict.findings),
        verdict.transitions,
        verdict.finding_count,
        verdict.seconds,
        reported_health=loaded.reported_health,
    )


def _failed(loaded: Loaded, error: Exception) -> Judged:
    memory = failed(loaded.memory, error)
    return Judged(
        loaded.row,
        loaded.config,
        memory,
        memory.model_dump_json(),
        [],
        [],
        reported_health=loaded.reported_health,
    )


def _unreadable(loaded: Loaded) -> Judged:
    memory = loaded.memory.model_copy(update={"health": RuleHealth.ERROR, "problem": loaded.problem})
    return Judged(
        loaded.row,
        None,
        memory,
        memory.model_dump_json(),
        [],
        [],
        reported_health=loaded.reported_health,
        problem=loaded.problem,
    )


def report_lost_context(judged: list[Judged], lost: LostContext, watermark: int) -> list[Judged]:
    """Set the health of rule configs that needed earlier rows which cannot be read; their findings remain.

    Args:
        judged: results without these rows.
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
    # A rule in error gets no ticks, which a rule that evaluates the clock needs more than this report.
    if rule.clock:
        return False
    waits = rule.merged(params) != "per_worker"
    looked_back = memory.evaluated_rows > 0 and rule.lookback(params) > 0
    return looked_back or (waits and lost.last_step > watermark)


def _reported(judged: Judged, lost: LostContext, watermark: int) -> Judged:
    problem = lost.summary
    if lost.last_step > watermark:
        problem += f"; steps after {watermark} among them were not evaluated"
    memory = judged.memory.model_copy(update={"health": RuleHealth.ERROR, "problem": problem[:500]})
    return replace(judged, memory=memory, state=memory.model_dump_json(), changed=True)
