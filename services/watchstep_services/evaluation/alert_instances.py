"""Alert instances: one alert over all attempts of its run, with its fingerprint and its evidence."""

from __future__ import annotations

import hashlib
import json
import shlex
from typing import Any, Literal

from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from watchstep.format.layout import run_prefix
from watchstep_rules.engine.alert import Phase, Transition
from watchstep_services.db.models import AlertInstanceRow, AlertRow, RuleConfigRow, RunRow, Segment
from watchstep_services.db.models.alerts import FINGERPRINT_LENGTH
from watchstep_services.runs.claim import EventContext
from watchstep_services.runs.discovery import key_of
from watchstep_services.service.judging import Judged

Change = Literal["opened", "revealed", "continued", "closed", "none"]
"""It began to fire; it fires and is no longer inhibited; it fires on another attempt; it is resolved; nothing changed."""


def find(session: Session, context: EventContext, judged: Judged) -> AlertInstanceRow | None:
    """The alert instance of a rule config."""
    name = fingerprint(context.project, context.run, judged.row)
    return session.execute(
        select(AlertInstanceRow).filter_by(run_id=context.run_id, fingerprint=name)
    ).scalar_one_or_none()


def follow(
    session: Session, context: EventContext, judged: Judged, transition: Transition, details: dict[str, Any]
) -> tuple[AlertInstanceRow, Change]:
    """Apply a change to *firing* or *resolved* on one attempt.

    Args:
        session: the transaction.
        context: where and when.
        judged: the alert's rule config.
        transition: the change.
        details: the alert's message and explanation, and ``event_id``.
    """
    row = find(session, context, judged)
    if row is None:
        row = _new(session, context, judged, transition, details)
        if transition.phase is Phase.FIRING:
            return row, "opened"
    if transition.phase is Phase.RESOLVED:
        return row, _close(row, context, judged, transition, details)
    if row.phase != Phase.FIRING.value:
        row.episode += 1
        row.fired_ns, row.resolved_ns = context.now_ns, None
        row.acknowledged_by, row.acknowledged_ns, row.acknowledgement = "", None, ""
        _assign(row, context, judged, transition, details)
        row.inhibited_by = transition.inhibited_by
        return row, "opened"
    return row, _again(session, row, context, judged, transition, details)


def revise(
    session: Session, context: EventContext, judged: Judged, transition: Transition, details: dict[str, Any]
) -> AlertInstanceRow | None:
    """Apply a likelier cause of a firing alert; later notifications name it.

    Returns:
        The alert; None if there is none, it is resolved, or another attempt makes it fire.
    """
    row = find(session, context, judged)
    if row is None or row.phase != Phase.FIRING.value:
        return None
    if (row.config_id, row.attempt) != (judged.row.id, context.attempt):
        return None
    assert transition.finding is not None
    row.finding, row.since_ns = json.loads(transition.finding.model_dump_json()), transition.since_ns
    row.step = transition.step
    row.message, row.explanation = details["message"], details["explanation"]
    return row


def _new(
    session: Session, context: EventContext, judged: Judged, transition: Transition, details: dict[str, Any]
) -> AlertInstanceRow:
    row = AlertInstanceRow(
        run_id=context.run_id,
        fingerprint=fingerprint(context.project, context.run, judged.row),
        episode=1,
        fired_ns=context.now_ns,
        inhibited_by=transition.inhibited_by,
    )
    _assign(row, context, judged, transition, details)
    session.add(row)
    session.flush()
    return row


def _assign(
    row: AlertInstanceRow,
    context: EventContext,
    judged: Judged,
    transition: Transition,
    details: dict[str, Any],
) -> None:
    """Assign the alert to this rule config and attempt."""
    assert judged.config is not None
    assert transition.finding is not None
    row.config_id, row.attempt = judged.row.id, context.attempt
    row.name, row.rule = judged.config.name, judged.config.rule
    row.severity, row.labels = judged.config.severity, dict(judged.config.labels)
    row.receivers, row.dry_run = list(judged.config.receivers), judged.config.dry_run
    row.phase = Phase.FIRING.value
    row.since_ns = transition.since_ns
    row.finding = json.loads(transition.finding.model_dump_json())
    _set_details(row, transition.step, details)


def _set_details(row: AlertInstanceRow, step: int, details: dict[str, Any]) -> None:
    row.step, row.event_id = step, details["event_id"]
    row.message, row.explanation = details["message"], details["explanation"]


def _again(
    session: Session,
    row: AlertInstanceRow,
    context: EventContext,
    judged: Judged,
    transition: Transition,
    details: dict[str, Any],
) -> Change:
    """Apply that a firing alert fires again: on this attempt, where it was inhibited, or on another one."""
    was_hidden = row.is_hidden
    same = (row.config_id, row.attempt) == (judged.row.id, context.attempt)
    newest = session.get_one(RunRow, context.run_id).attempt
    if not same and context.attempt != newest and row.attempt == newest:
        return "none"  # late rows of an attempt that is over
    _assign(row, context, judged, transition, details)
    # An alert that was published stays so: an inhibition on a later attempt does not hide it.
    row.inhibited_by = transition.inhibited_by if was_hidden else ""
    if was_hidden and not row.is_hidden:
        return "revealed"
    return "continued"


def _close(
    row: AlertInstanceRow,
    context: EventContext,
    judged: Judged,
    transition: Transition,
    details: dict[str, Any],
) -> Change:
    if row.phase != Phase.FIRING.value or (row.config_id, row.attempt) != (judged.row.id, context.attempt):
        return "none"  # another attempt makes it fire
    _set_details(row, transition.step, details)
    row.phase, row.resolved_ns = Phase.RESOLVED.value, context.now_ns
    return "closed"


# Built once, because every evaluation executes it.
_FIRING = (
    select(AlertInstanceRow)
    .where(AlertInstanceRow.run_id == bindparam("of_run"), AlertInstanceRow.phase == Phase.FIRING.value)
    .order_by(AlertInstanceRow.id)
)


def left_behind(
    session: Session, context: EventContext, judged: list[Judged], watermark: int
) -> list[tuple[AlertInstanceRow, str]]:
    """Alerts that no later change will resolve, and why they are over.

    An alert that fired on an earlier attempt is over once the newest attempt has passed that step without it, or its rule
    config was changed meanwhile. One without a rule config is over at once.

    Args:
        session: the transaction.
        context: where and when.
        judged: all rule configs of the run, as evaluated on ``context.attempt``.
        watermark: the attempt's watermark.
    """
    rows = list(session.execute(_FIRING, {"of_run": context.run_id}).scalars())
    if not rows or session.get_one(RunRow, context.run_id).attempt != context.attempt:
        return []
    of = {fingerprint(context.project, context.run, entry.row): entry for entry in judged}
    ended = []
    for row in rows:
        entry = of.get(row.fingerprint)
        if entry is None:
            ended.append((row, "its rule config is no longer in use"))
        elif _has_passed(row, entry, watermark):
            ended.append((row, f"attempt {context.attempt} passed step {row.step} without it"))
    return ended


def _has_passed(row: AlertInstanceRow, entry: Judged, watermark: int) -> bool:
    if entry.config is None or entry.memory.alert.phase in (Phase.FIRING, Phase.PENDING):
        return False
    judged = entry.memory.evaluated_rows > 0 or entry.config.implementation.clock
    return judged and (watermark >= row.step or entry.config.implementation.clock)


def close_left_behind(session: Session, row: AlertInstanceRow, step: int, now_ns: int, event_id: str) -> None:
    """Resolve an alert on every attempt."""
    row.phase, row.resolved_ns, row.event_id = Phase.RESOLVED.value, now_ns, event_id
    row.step = step
    row.explanation = resolved_title(row, step)
    session.execute(
        update(AlertRow)
        .where(
            AlertRow.run_id == row.run_id,
            AlertRow.fingerprint == row.fingerprint,
            AlertRow.phase == Phase.FIRING.value,
        )
        .values(phase=Phase.RESOLVED.value, resolved_ns=now_ns)
        .execution_options(synchronize_session=False)
    )


def resolved_title(row: AlertInstanceRow, step: int) -> dict[str, Any]:
    """The alert's explanation, with a title that states that it is resolved."""
    title = f"{row.name} ({row.severity}) resolved at step {step}"
    return {**row.explanation, "title": title} if row.explanation else {}


RECORDER = "recorder"


def fingerprint(project: str, run: str, row: RuleConfigRow) -> str:
    """A stable id of the alert of a rule config on a run: a hash of project, run, the config's name and its labels.

    An alert that a recorder requests never equals one of the owner or an operator, because it could suppress that
    one's notifications.
    """
    labels: dict[str, Any] = (row.data or {}).get("labels") or {}
    named = [project, run, row.name, row.origin == RECORDER, sorted(labels.items())]
    text = json.dumps(named, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()[:FINGERPRINT_LENGTH]


MOST_SEGMENTS = 16


def evidence_of(session: Session, context: EventContext, step: int) -> dict[str, Any]:
    """The run's location on the store, the step, the segments that contain it, and commands that show the run and the step's samples."""
    rows = session.execute(
        select(Segment)
        .where(
            Segment.run_id == context.run_id,
            Segment.attempt == context.attempt,
            Segment.first <= step,
            Segment.last >= step,
            Segment.state == "read",
        )
        .order_by(Segment.position)
        .limit(MOST_SEGMENTS)
    ).scalars()
    root = f"{context.location}/{run_prefix(context.project, context.run)}"
    return {
        "store": root,
        "step": step,
        "segments": [key_of(row).path for row in rows],
        "command": f"watchstep runs show {shlex.quote(root)}",
        "samples": f"watchstep samples {shlex.quote(root)} --step {step}",
    }
