"""Judging: rule configs over the rows that arrived, with scope, rule, alert and inhibition.

`judge_set` judges with all rule configs of a run: each one independently (`judge_prepared`), then inhibition between them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from watchstep.format.block import Block
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import AlertMemory, Seals, Transition, advance
from watchstep_rules.engine.inhibition import Told, inhibit
from watchstep_rules.engine.rule_inputs import JudgingProgress, Prepared
from watchstep_rules.engine.streaks import ClockTick, JudgedRows
from watchstep_rules.rule import Finding, Needs
from watchstep_rules.signals.tensor_selection import OfCatalogue


class RuleHealth(str, Enum):
    """Whether a rule can be evaluated; apart from what it says."""

    OK = "ok"
    NO_DATA = "no_data"
    ERROR = "error"


class RuleMemory(BaseModel):
    """All that is kept of a rule config on one attempt between evaluations; JSON in the database.

    Attributes:
        version: of the rule whose state this is.
        state: the rule's own, as data; None before the first block.
        alert: the alert's life.
        health: whether the rule could be evaluated.
        problem: why not.
        judged: rows judged so far; evidence beside them does not count.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    version: int = 0
    state: dict[str, Any] | None = None
    alert: AlertMemory = AlertMemory()
    health: RuleHealth = RuleHealth.NO_DATA
    problem: str = ""
    judged: int = 0


@dataclass(frozen=True)
class Verdict:
    """What judging gave, and how long it took."""

    memory: RuleMemory
    findings: Sequence[Finding]
    transitions: list[Transition]
    seconds: float = field(default=0.0, compare=False)


def judge(
    config: RuleConfig, memory: RuleMemory, history: Block, arrived: Block, progress: JudgingProgress
) -> Verdict:
    """Judge what can be judged now, by one rule config; `judge_prepared` where there are several.

    Args:
        config: the rule config.
        memory: as the last call returned it.
        history: rows that arrived before: all that are not sealed, and of each series the last ``lookback`` that
            are.
        arrived: rows that are new, in the order of their segments.
        progress: which steps are sealed.
    """
    return judge_prepared(config, memory, Prepared(history, arrived, progress))


def judge_prepared(config: RuleConfig, memory: RuleMemory, rows: Prepared) -> Verdict:
    """Judge what can be judged now.

    Args:
        config: the rule config.
        memory: as the last call returned it.
        rows: those of this evaluation, which several rule configs share.

    Returns:
        The new memory, findings and changes of the alert. A rule config at which anything raises leaves its alert as it was and
        says so in its health. Rows of a step that was sealed before they came are judged by rules that take each
        worker by itself; to those that wait for seals they are context. A rule that watches the clock is judged also
        where no row came, until the attempt has ended.
    """
    began = time.perf_counter()
    try:
        verdict = _judged(config, memory, rows)
    except Exception as error:  # noqa: BLE001 - a rule's fault is told as health, and must not stop the others
        verdict = Verdict(failed(memory, error), [], [])
    return replace(verdict, seconds=time.perf_counter() - began)


def failed(memory: RuleMemory, error: Exception) -> RuleMemory:
    """What is remembered of a rule config that could not be evaluated: as before, and why."""
    problem = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
    return memory.model_copy(
        update={"health": RuleHealth.ERROR, "problem": problem.replace("\0", "\ufffd")[:500]}
    )


def _judged(config: RuleConfig, memory: RuleMemory, rows: Prepared) -> Verdict:
    rule, params, clock_ns = config.implementation, config.parameters, rows.progress.clock_ns
    block = rows.block(config)
    seals = Seals(rows.progress.before, rows.progress.now)
    if not len(block) and (not rule.clock or rows.progress.ended):
        return _sealed_further(config, memory, block, seals)
    context = rows.context(config)
    state = _state(config, memory, context, clock_ns)
    state, findings = rule.evaluate(params, state, context, block, clock_ns)
    problem = rule.problem(state)
    needs = rule.needed(params)
    judged = memory.judged + _number_judged(block, needs)
    tick = ClockTick(rows.progress.now, clock_ns) if rule.clock else None
    alert, transitions = memory.alert, list[Transition]()
    if findings or alert.follows:
        judged_rows = JudgedRows.of(block, rule.conclusive(params, block))
        alert, transitions = advance(alert, config.timing, judged_rows, findings, tick, seals)
    kept = RuleMemory(
        version=rule.version,
        state=state.model_dump(mode="json"),
        alert=alert,
        health=RuleHealth.ERROR
        if problem
        else (RuleHealth.OK if judged or rule.clock else RuleHealth.NO_DATA),
        problem=problem,
        judged=judged,
    )
    return Verdict(kept, findings, transitions)


def _sealed_further(config: RuleConfig, memory: RuleMemory, block: Block, seals: Seals) -> Verdict:
    """No row came; what came before may have been sealed."""
    if not memory.alert.waiting:
        return Verdict(memory, [], [])
    alert, transitions = advance(memory.alert, config.timing, JudgedRows.of(block), [], seals=seals)
    return Verdict(memory.model_copy(update={"alert": alert}), [], transitions)


def _number_judged(block: Block, needs: Needs) -> int:
    """Rows that are judged, and are no evidence."""
    if not needs.has_evidence:
        return len(block)
    catalogue = block.catalogue
    of_these = _judged_tensors.get(
        catalogue,
        needs,
        lambda: np.array([not needs.is_evidence(info) for info in catalogue], np.bool_),
    )
    return int(np.count_nonzero(of_these[block.tensor]))


_judged_tensors: OfCatalogue[NDArray[np.bool_]] = OfCatalogue()


def due_ns(config: RuleConfig, memory: RuleMemory) -> int | None:
    """When a rule that watches the clock wants a tick though no row comes; None where it waits for rows.

    One that failed waits for rows: a rule that fails at every tick must not ask for the next at once. So does one whose
    state is damaged; the next rows make a new one.
    """
    try:
        return _due_ns(config, memory)
    except Exception:  # noqa: BLE001 - judging tells it with the next rows; here it must not keep others from their ticks
        return None


def _due_ns(config: RuleConfig, memory: RuleMemory) -> int | None:
    rule = config.implementation
    if not rule.clock or memory.health is RuleHealth.ERROR:
        return None
    if memory.state is None or memory.version != rule.version:
        return rule.due_ns(config.parameters, rule.state_type())
    return rule.due_ns(config.parameters, rule.state_type.model_validate(memory.state))


def _state(config: RuleConfig, memory: RuleMemory, context: Block, clock_ns: int) -> Any:
    """The rule's state; rebuilt from the context where it was written by another version."""
    rule = config.implementation
    if memory.state is None:
        return rule.state_type()
    if memory.version == rule.version:
        try:
            return rule.state_type.model_validate(memory.state)
        except ValidationError:
            pass  # damaged: as good as of another version
    return rule.evaluate(config.parameters, rule.state_type(), Block.empty(), context, clock_ns)[0]


def judge_set(remembered: Sequence[tuple[RuleConfig, RuleMemory]], rows: Prepared) -> list[Verdict]:
    """Judge with all rule configs of a run; one that fails says so in its health and stops no other.

    Args:
        remembered: each with what the last evaluation left.
        rows: those of this evaluation.

    Returns:
        What each said, in the same order.
    """
    verdicts = [judge_prepared(config, memory, rows) for config, memory in remembered]
    told = [
        Told(config, verdict.memory.alert, verdict.transitions)
        for (config, _), verdict in zip(remembered, verdicts, strict=True)
    ]
    return [
        _quieted(verdict, one)
        for verdict, one in zip(verdicts, inhibit(told, rows.progress.now), strict=True)
    ]


def _quieted(verdict: Verdict, told: Told) -> Verdict:
    if told.memory is verdict.memory.alert and told.transitions is verdict.transitions:
        return verdict
    memory = verdict.memory.model_copy(update={"alert": told.memory})
    return replace(verdict, memory=memory, transitions=list(told.transitions))
