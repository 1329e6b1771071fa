"""Events of rules that cannot be evaluated, or have no data, and therefore never raise an alert.

An error is reported at once. That a rule has no data is reported only for rules that somebody chose, and only when no data is
likely to arrive: after a thousand steps, or at the end of the run. The default rules apply to every program, and few
programs have data for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Text, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import FunctionElement

from watchstep.format.tensors import ACTIVATIONS
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import AlertMemory
from watchstep_rules.engine.judge import RuleHealth, RuleMemory
from watchstep_services.core.events import EventType, make_event
from watchstep_services.db.models import RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.db.records import add_event
from watchstep_services.runs.claim import EventContext
from watchstep_services.service.judging import Judged, load_config

NO_DATA_STEPS = 1000
"""Watermark from which a rule that evaluated no row is reported."""

_KINDS: dict[RuleHealth, EventType] = {
    RuleHealth.OK: "io.watchstep.rule.ok",
    RuleHealth.NO_DATA: "io.watchstep.rule.no_data",
    RuleHealth.ERROR: "io.watchstep.rule.error",
}


_SHOWN = (("health",), ("problem",), ("evaluated_rows",), ("alert", "phase"), ("state", "isolation"))


class shown_state(FunctionElement[str]):  # noqa: N801 - reads as the SQL function that it is
    """The parts of a stored rule state that pages show, as a JSON list; null for a text that is no JSON object.

    The database extracts them: the states of one attempt can have 32 MB, and parsing them in Python takes ten times as much memory and
    keeps the interpreter from all other threads.
    """

    type = Text()
    inherit_cache = True


@compiles(shown_state, "sqlite")
def _sqlite(element: shown_state, compiler: Any, **options: Any) -> str:
    state = compiler.process(element.clauses, **options)
    paths = ", ".join(f"'$.{'.'.join(path)}'" for path in _SHOWN)
    return f"CASE WHEN json_valid({state}) THEN json_extract({state}, {paths}) END"


@compiles(shown_state, "postgresql")
def _postgresql(element: shown_state, compiler: Any, **options: Any) -> str:
    state = compiler.process(element.clauses, **options)
    parts = ", ".join("parsed" + "".join(f" -> '{key}'" for key in path) for path in _SHOWN)
    # OFFSET keeps the planner from parsing the text once for each part.
    once = f"SELECT CAST({state} AS json) AS parsed OFFSET 0"
    return f"CASE WHEN left({state}, 1) = '{{' THEN (SELECT CAST(json_build_array({parts}) AS text) FROM ({once}) AS one) END"  # noqa: S608 - of columns and constants


def shown_memory(shown: str | None) -> RuleMemory:
    """Return a rule state with only the parts of `shown_state`; an empty, damaged or outdated one begins anew."""
    if not shown:
        return RuleMemory()
    health, problem, rows, phase, isolation = json.loads(shown)
    memory = {"health": health, "problem": problem, "evaluated_rows": rows}
    try:
        return RuleMemory(
            state=None if isolation is None else {"isolation": isolation},
            alert=AlertMemory() if phase is None else AlertMemory(phase=phase),
            **{name: value for name, value in memory.items() if value is not None},
        )
    except ValidationError:
        return RuleMemory()


def report_health(
    session: Session, context: EventContext, judged: Judged, state: RuleStateRow, watermark: int
) -> None:
    """Publish, once each, that a rule has an error, has no data, or has recovered.

    Args:
        session: the transaction.
        context: where and when.
        judged: result of the rule config.
        state: the rule state on the attempt.
        watermark: the attempt's watermark.
    """
    if not has_news(judged.config, judged.memory, state.reported_health, watermark):
        return
    health = judged.memory.health
    if health is RuleHealth.ERROR:
        _publish(session, context, judged.row, judged.memory, state)
    elif health is RuleHealth.OK:
        _publish(session, context, judged.row, judged.memory, state)
        state.reported_health = ""
    else:
        if not _was_reported(session, judged.row.id):
            _publish(session, context, judged.row, judged.memory, state)
        state.reported_health = health.value


def has_news(config: RuleConfig | None, memory: RuleMemory, reported: str, watermark: int) -> bool:
    """Whether `report_health` has something to publish or to write.

    Args:
        config: the rule config.
        memory: its rule state.
        reported: the last reported health.
        watermark: the attempt's watermark.
    """
    health = memory.health
    if health is RuleHealth.ERROR:
        return reported != RuleHealth.ERROR.value
    if health is RuleHealth.OK:
        return bool(reported)
    return not reported and watermark >= NO_DATA_STEPS and _is_chosen(config)


def no_data_reason(run_health: Mapping[str, Any], config: RuleConfig | None) -> str:
    """Why a rule has no data, as its recorders report: what they cannot capture for it, and modules that they do not observe.

    Args:
        run_health: health of the run, with the reports of its recorders.
        config: the rule config; None if it is not valid.

    Returns:
        The reason; empty if the recorders report none.
    """
    if config is None:
        return ""
    recorders = run_health.get("recorders", {})
    reports = recorders.values() if isinstance(recorders, dict) else ()
    notes = [
        report["notes"]
        for report in reports
        if isinstance(report, dict) and isinstance(report.get("notes"), dict)
    ]
    reasons: dict[str, None] = {}
    for note in notes:
        for part in str(note.get("capture", "")).split("; "):
            if part.startswith(f"rule {config.name}: "):
                reasons[part.partition(": ")[2]] = None
        if note.get(ACTIVATIONS) and ACTIVATIONS in _collections_of(config):
            reasons[f"{ACTIVATIONS} {note[ACTIVATIONS]}"] = None
    return "; ".join(reasons)[:500]


def _collections_of(config: RuleConfig) -> tuple[str, ...]:
    if config.tensors.collection:
        return (config.tensors.collection,)
    try:
        return config.implementation.needed(config.parameters).collections
    except Exception:  # noqa: BLE001 - reported by the evaluation
        return ()


def report_silent_rules(session: Session, context: EventContext) -> None:
    """Publish which chosen rules had no data on the last attempt of an ended run."""
    rows = session.execute(
        select(RuleConfigRow, RuleStateRow)
        .join(RuleStateRow, RuleStateRow.config_id == RuleConfigRow.id)
        .where(
            RuleConfigRow.run_id == context.run_id,
            RuleStateRow.attempt == context.attempt,
            RuleStateRow.reported_health == "",
            ~RuleConfigRow.origin.startswith("retired"),
        )
        .order_by(RuleConfigRow.id)
    ).all()
    for row, state in rows:
        loaded = load_config(row, state.state)
        if loaded.memory.health is RuleHealth.NO_DATA and _is_chosen(loaded.config):
            if not _was_reported(session, row.id):
                _publish(session, context, row, loaded.memory, state)
            state.reported_health = RuleHealth.NO_DATA.value


def _is_chosen(config: RuleConfig | None) -> bool:
    return config is not None and config not in DEFAULT_RULES


def _was_reported(session: Session, config_id: int) -> bool:
    """Whether it was reported on another attempt; it is not reported again."""
    return (
        session.execute(
            select(RuleStateRow.config_id)
            .filter_by(config_id=config_id, reported_health=RuleHealth.NO_DATA.value)
            .limit(1)
        ).first()
        is not None
    )


def _publish(
    session: Session, context: EventContext, row: RuleConfigRow, memory: RuleMemory, state: RuleStateRow
) -> None:
    run = session.get_one(RunRow, context.run_id)
    config = load_config(row, None).config if memory.health is RuleHealth.NO_DATA else None
    last_step, reason = run.last_step, no_data_reason(run.health, config)
    data: dict[str, Any] = {
        "attempt": context.attempt,
        "name": row.name,
        "rule": row.rule,
        "health": memory.health.value,
        "problem": memory.problem or reason,
        "evaluated_rows": memory.evaluated_rows,
        "step": last_step,
    }
    event = make_event(_KINDS[memory.health], context.base_url, context.named, context.now_ns, data)
    add_event(session, context.run_id, event, context.now_ns)
    state.reported_health = memory.health.value
