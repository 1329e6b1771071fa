"""One rule config over the rows that have arrived: scope, rule, alert."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from watchstep.block import Block, concatenate
from watchstep_rules.alert import AlertMemory, Transition, advance
from watchstep_rules.config import RuleConfig
from watchstep_rules.finding import Finding
from watchstep_rules.shards import merge_shards


class Health(str, Enum):
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
        judged: rows judged so far.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    version: int = 0
    state: dict[str, Any] | None = None
    alert: AlertMemory = AlertMemory()
    health: Health = Health.NO_DATA
    problem: str = ""
    judged: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a rule that waits for seals may judge: steps in (before, now] of each attempt.

    Attributes:
        before: the last step sealed at the previous evaluation; -1 for none.
        now: the last step sealed at this one.
        clock_ns: the stored tick of this evaluation.
    """

    before: int
    now: int
    clock_ns: int


@dataclass(frozen=True)
class Verdict:
    """What judging gave."""

    memory: RuleMemory
    findings: list[Finding]
    transitions: list[Transition]


def judge(
    config: RuleConfig, memory: RuleMemory, history: Block, arrived: Block, progress: Progress
) -> Verdict:
    """Judge what can be judged now.

    Args:
        config: the rule config.
        memory: as the last call returned it.
        history: rows that arrived before: all that are not sealed, and of each series the last ``lookback`` that
            are.
        arrived: rows that are new, in the order of their segments.
        progress: which steps are sealed.

    Returns:
        The new memory, findings and changes of the alert. A rule that raises leaves its alert as it was and
        says so in its health. Rows of a step that was sealed before they came are judged by rules that take each
        worker by itself; to those that wait for seals they are context.
    """
    rule, params = config.implementation, config.parameters
    context, block = _rows_to_judge(config, history, arrived, progress)
    if not len(block):
        return Verdict(memory, [], [])
    context = context.tail(rule.lookback(params))
    try:
        state = _state(config, memory, context, progress.clock_ns)
        state, findings = rule.evaluate(params, state, context, block, progress.clock_ns)
    except Exception as error:  # noqa: BLE001 - a rule's fault is told as health, and must not stop the others
        problem = f"{type(error).__name__}: {error}"[:500]
        return Verdict(memory.model_copy(update={"health": Health.ERROR, "problem": problem}), [], [])
    alert, transitions = advance(memory.alert, config.hold.steps, block, findings)
    kept = RuleMemory(
        version=rule.version,
        state=state.model_dump(mode="json"),
        alert=alert,
        health=Health.OK,
        judged=memory.judged + len(block),
    )
    return Verdict(kept, findings, transitions)


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


def _rows_to_judge(
    config: RuleConfig, history: Block, arrived: Block, progress: Progress
) -> tuple[Block, Block]:
    past, new = _in_scope(config, history), _in_scope(config, arrived)
    if config.implementation.merge == "per_worker":
        return past, new
    pool = _joined(past, new)
    judged = pool.step <= progress.before
    return merge_shards(pool.where(judged)), merge_shards(pool.where((pool.step <= progress.now) & ~judged))


def _in_scope(config: RuleConfig, block: Block) -> Block:
    needs = config.implementation.needs
    chosen = [config.tensors.holds(info, needs) for info in block.catalogue]
    return block if all(chosen) else block.where(block.mask_of_tensors(chosen))


def _joined(first: Block, second: Block) -> Block:
    return concatenate([first, second]) if len(first) and len(second) else (first if len(first) else second)
