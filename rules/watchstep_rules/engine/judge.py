"""Evaluation of rule configs over the rows that arrived: scope, rule, alert and inhibition.

`judge_set` evaluates all rule configs of a run: each one independently (`judge_inputs`), then inhibition between them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from watchstep.errors import RuleError
from watchstep.format.block import Block
from watchstep_rules.config.rule_config import Demand, RuleConfig
from watchstep_rules.engine.alert import AlertMemory, Phase, Transition, Watermarks, advance
from watchstep_rules.engine.inhibition import AlertUpdate, inhibit
from watchstep_rules.engine.rule_inputs import JudgingProgress, RuleInputs
from watchstep_rules.engine.streaks import ClockTick, JudgedRows
from watchstep_rules.rule import Finding
from watchstep_rules.saved_block import empty_like
from watchstep_rules.signals.loaded_weights import LOADED, loaded_steps
from watchstep_rules.signals.tensor_selection import CatalogueCache


class RuleHealth(str, Enum):
    """Whether a rule can be evaluated, independent of its findings."""

    OK = "ok"
    NO_DATA = "no_data"
    ERROR = "error"


_MOST_PROBLEM = 500
_MOST_LOADS = 16


class RuleMemory(BaseModel):
    """The state of a rule config on one attempt between evaluations; stored as JSON in the database.

    Attributes:
        version: the version of the rule that wrote ``state``.
        state: the rule's own state as JSON data; None before the first block.
        alert: the state of the alert.
        health: whether the rule could be evaluated.
        problem: why it could not.
        evaluated_rows: number of rows judged so far, without evidence.
        evaluated_steps: number of their steps. A step that arrives after a later one is not counted.
        last_step: the last of them; -1 for none.
        loaded_steps: the last steps after which the program loaded weights.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    version: int = 0
    state: dict[str, Any] | None = None
    alert: AlertMemory = AlertMemory()
    health: RuleHealth = RuleHealth.NO_DATA
    problem: str = ""
    evaluated_rows: int = 0
    evaluated_steps: int = 0
    last_step: int = -1
    loaded_steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The result of one evaluation of a rule config, and its duration.

    ``finding_count`` is the number of findings if only the first were kept; otherwise -1.
    """

    memory: RuleMemory
    findings: Sequence[Finding]
    transitions: list[Transition]
    seconds: float = field(default=0.0, compare=False)
    finding_count: int = field(default=-1, compare=False)


def judge(
    config: RuleConfig, memory: RuleMemory, history: Block, arrived: Block, progress: JudgingProgress
) -> Verdict:
    """Evaluate one rule config; use `judge_inputs` for several over the same rows.

    Args:
        config: the rule config.
        memory: the state that the last call returned.
        history: earlier rows: all rows after the watermark, and the last ``lookback`` rows of each series up to it.
        arrived: new rows, in the order of their segments.
        progress: the watermarks before and now.
    """
    return judge_inputs(config, memory, RuleInputs(history, arrived, progress))


def judge_inputs(config: RuleConfig, memory: RuleMemory, rows: RuleInputs) -> Verdict:
    """Evaluate one rule config.

    Rows that arrive behind the watermark are judged by ``per_worker`` rules; rules that wait for the watermark get them as context. A
    rule that watches the clock is also evaluated if no row arrived, until the attempt has ended.

    Args:
        config: the rule config.
        memory: the state that the last call returned.
        rows: the rows of this evaluation, shared by several rule configs.

    Returns:
        The new state, findings and transitions of the alert. If the rule raises, the alert is unchanged and the health is an error.
    """
    began = time.perf_counter()
    try:
        verdict = _judged(config, memory, rows)
    except Exception as error:  # noqa: BLE001 - a rule's error is reported as its health and must not stop other rules
        verdict = Verdict(failed(memory, error), [], [])
    seconds = time.perf_counter() - began
    return Verdict(verdict.memory, verdict.findings, verdict.transitions, seconds, verdict.finding_count)


def failed(memory: RuleMemory, error: Exception) -> RuleMemory:
    """The state of a rule config that could not be evaluated: the previous state with the error."""
    problem = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
    return memory.model_copy(
        update={"health": RuleHealth.ERROR, "problem": problem.replace("\0", "\ufffd")[:_MOST_PROBLEM]}
    )


def _judged(config: RuleConfig, memory: RuleMemory, rows: RuleInputs) -> Verdict:
    rule, params, clock_ns = config.implementation, config.parameters, rows.progress.clock_ns
    if not rule.applies(params):
        return Verdict(memory, [], [])
    demand = config.demand
    block = rows.block(config)
    watermarks = Watermarks(rows.progress.before, rows.progress.now)
    if not len(block) and (not rule.clock or rows.progress.ended):
        return _apply_watermark(config, memory, block, watermarks)
    context = rows.context(config)
    unread = ""
    if demand.needs.tensors is not None:
        context, unread_context = rows.saved.block(config, context)
        # Rows about objects of one collection may be several series, so there may be more.
        context = context.tail(demand.lookback)
        block, unread = rows.saved.block(config, block)
        unread = unread or unread_context
    state = _state(config, memory, context, clock_ns)
    state, findings = rule.evaluate(params, state, context, block, clock_ns)
    problem = "; ".join(filter(None, (unread, rule.problem(state))))[:_MOST_PROBLEM]
    steps = _judged_steps(block, demand)
    reached = np.maximum.accumulate(np.concatenate([[memory.last_step], steps]))
    evaluated_rows = memory.evaluated_rows + len(steps)
    tick = ClockTick(rows.progress.now, clock_ns) if rule.clock else None
    alert, transitions = memory.alert, list[Transition]()
    loads = memory.loaded_steps
    if LOADED in demand.needs.metrics:
        loads = tuple(sorted({*loads, *loaded_steps(block)}))[-_MOST_LOADS:]
    if findings or alert.follows:
        judged_rows = JudgedRows.of(block, rule.conclusive(params, block))
        alert, transitions = advance(alert, config.timing, judged_rows, findings, tick, watermarks)
        transitions = [_after_load(change, loads) for change in transitions]
    new_memory = RuleMemory(
        version=rule.version,
        state=state.model_dump(mode="json"),
        alert=alert,
        health=RuleHealth.ERROR
        if problem
        else (RuleHealth.OK if evaluated_rows or rule.clock else RuleHealth.NO_DATA),
        problem=problem,
        evaluated_rows=evaluated_rows,
        evaluated_steps=memory.evaluated_steps + int(np.count_nonzero(np.diff(reached))),
        last_step=int(reached[-1]),
        loaded_steps=loads,
    )
    return Verdict(new_memory, findings, transitions)


def _after_load(change: Transition, loads: Sequence[int]) -> Transition:
    """A resolved transition with the step of the last load of weights since the findings that made the alert fire."""
    if change.phase is not Phase.RESOLVED:
        return change
    between = [load for load in loads if change.since_step <= load < change.step]
    return replace(change, loaded_at=between[-1]) if between else change


def _apply_watermark(config: RuleConfig, memory: RuleMemory, block: Block, watermarks: Watermarks) -> Verdict:
    """Apply a watermark that moved without new rows."""
    if not memory.alert.queued_changes:
        return Verdict(memory, [], [])
    alert, transitions = advance(memory.alert, config.timing, JudgedRows.of(block), [], watermarks=watermarks)
    return Verdict(memory.model_copy(update={"alert": alert}), [], transitions)


def _judged_steps(block: Block, demand: Demand) -> NDArray[np.int64]:
    """The steps of judged rows that are not evidence, shape (n,)."""
    needs = demand.needs
    if not needs.has_evidence:
        return block.step
    catalogue = block.catalogue
    is_judged = _judged_tensors.get(
        catalogue,
        demand.scope_key,
        lambda: np.array([not needs.is_evidence(info) for info in catalogue], np.bool_),
    )
    return block.step[is_judged[block.tensor]]


_judged_tensors: CatalogueCache[NDArray[np.bool_]] = CatalogueCache()


def due_ns(config: RuleConfig, memory: RuleMemory) -> int | None:
    """When a rule that watches the clock needs its next tick without new rows; None if it waits for rows.

    A rule that failed waits for rows, so that one that fails at every tick does not request the next tick at once. So does a rule with
    a damaged state; the next rows rebuild the state.
    """
    try:
        return _due_ns(config, memory)
    except Exception:  # noqa: BLE001 - reported by the evaluation of the next rows; here it must not keep other rules from their ticks
        return None


def _due_ns(config: RuleConfig, memory: RuleMemory) -> int | None:
    rule = config.implementation
    if not rule.clock or memory.health is RuleHealth.ERROR:
        return None
    if memory.state is None or memory.version != rule.version:
        return rule.due_ns(config.parameters, rule.state_type())
    return rule.due_ns(config.parameters, rule.state_type.model_validate(memory.state))


def _state(config: RuleConfig, memory: RuleMemory, context: Block, clock_ns: int) -> Any:
    """The rule's state; rebuilt from the context if another version wrote it."""
    rule = config.implementation
    if memory.state is None:
        return rule.state_type()
    if memory.version == rule.version:
        try:
            return rule.state_type.model_validate(memory.state)
        except ValidationError:
            pass  # damaged: rebuild it, as for another version
    return rule.evaluate(config.parameters, rule.state_type(), empty_like(context), context, clock_ns)[0]


def _always() -> None:
    """Continue."""


@dataclass(frozen=True)
class JudgingLimits:
    """Limits of the evaluation of many rule configs.

    Attributes:
        seconds: limit of the processor time of the thread. Rule configs that have not been evaluated when it is exceeded keep their state,
            with an error. A process that was suspended, or waits for a processor, evaluates late and leaves out nothing.
        limited: what the limit applies to, for the error.
        findings: limit of the findings that are kept of each rule config, the first; the others are counted.
        check_running: is called before each rule config; an exception that it raises ends the evaluation.
    """

    seconds: float = math.inf
    limited: str = "the evaluation"
    findings: int = sys.maxsize
    check_running: Callable[[], None] = _always
    _began: float = field(default_factory=time.thread_time)

    def is_over(self) -> bool:
        """Whether the time limit is exceeded. Called on the thread that created this object."""
        return time.thread_time() - self._began > self.seconds

    def error(self) -> RuleError:
        """The error of a rule config that was not evaluated."""
        return RuleError(
            f"{self.limited} took more than {self.seconds:g} s of processor time before this rule",
            "record fewer tensors or less often, or use fewer rules for this run",
        )


def judge_set(
    rules: Sequence[tuple[RuleConfig, RuleMemory]],
    rows: RuleInputs,
    limits: JudgingLimits | None = None,
) -> list[Verdict]:
    """Evaluate all rule configs of a run. A rule config that fails reports it in its health and does not affect the others.

    Args:
        rules: each rule config with the state that the last evaluation returned.
        rows: the rows of this evaluation.
        limits: limits of the evaluation; None for none.

    Returns:
        A verdict for each rule config, in the same order.
    """
    return inhibited(rules, judge_each(rules, rows, limits), rows.progress.now)


def judge_each(
    rules: Sequence[tuple[RuleConfig, RuleMemory]],
    rows: RuleInputs,
    limits: JudgingLimits | None = None,
) -> list[Verdict]:
    """Evaluate some of the rule configs of a run, as `judge_set` without inhibition."""
    verdicts: list[Verdict] = []
    for config, memory in rules:
        if limits is None:
            verdicts.append(judge_inputs(config, memory, rows))
            continue
        limits.check_running()
        if limits.is_over():
            verdicts.append(Verdict(failed(memory, limits.error()), [], []))
            continue
        verdict = judge_inputs(config, memory, rows)
        findings = verdict.findings
        kept = list(findings[: limits.findings]) if findings else []
        verdicts.append(Verdict(verdict.memory, kept, verdict.transitions, verdict.seconds, len(findings)))
    return verdicts


def inhibited(
    rules: Sequence[tuple[RuleConfig, RuleMemory]], verdicts: Sequence[Verdict], watermark: int
) -> list[Verdict]:
    """The verdicts of all rule configs of a run (`judge_each`) after inhibition between them."""
    updates = [
        AlertUpdate(config, verdict.memory.alert, verdict.transitions)
        for (config, _), verdict in zip(rules, verdicts, strict=True)
    ]
    return [
        _updated(verdict, update)
        for verdict, update in zip(verdicts, inhibit(updates, watermark), strict=True)
    ]


def _updated(verdict: Verdict, update: AlertUpdate) -> Verdict:
    if update.memory is verdict.memory.alert and update.transitions is verdict.transitions:
        return verdict
    memory = verdict.memory.model_copy(update={"alert": update.memory})
    return replace(verdict, memory=memory, transitions=list(update.transitions))
