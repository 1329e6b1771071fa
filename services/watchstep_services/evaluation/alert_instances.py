"""An alert as people see it: one over all attempts of its run, with its fingerprint and its evidence."""

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
"""It began to fire; it fires and is no longer kept quiet; it fires on another attempt, too; it is over; nothing new."""


def find(session: Session, context: EventContext, judged: Judged) -> AlertInstanceRow | None:
    """Where the alert of a rule config stands."""
    name = fingerprint(context.project, context.run, judged.row)
    return session.execute(
        select(AlertInstanceRow).filter_by(run_id=context.run_id, fingerprint=name)
    ).scalar_one_or_none()


def follow(
    session: Session, context: EventContext, judged: Judged, transition: Transition, said: dict[str, Any]
) -> tuple[AlertInstanceRow, Change]:
    """Take over a change to *firing* or *resolved* on one attempt.

    Args:
        session: the transaction.
        context: where and when.
        judged: whose alert.
        transition: the change.
        said: the alert's details, and ``event_id``.
    """
    row = find(session, context, judged)
    if row is None:
        row = _new(session, context, judged, transition, said)
        if transition.phase is Phase.FIRING:
            return row, "opened"
    if transition.phase is Phase.RESOLVED:
        return row, _close(row, context, judged, transition, said)
    if row.phase != Phase.FIRING.value:
        row.episode += 1
        row.fired_ns, row.resolved_ns = context.now_ns, None
        row.acknowledged_by, row.acknowledged_ns, row.acknowledgement = "", None, ""
        _hold(row, context, judged, transition, said)
        row.inhibited_by = transition.inhibited_by
        return row, "opened"
    return row, _again(session, row, context, judged, transition, said)


def revise(
    session: Session, context: EventContext, judged: Judged, transition: Transition, said: dict[str, Any]
) -> AlertInstanceRow | None:
    """Take over that an alert that fires names a likelier cause: what is told of it from now on says so.

    Returns:
        The alert; None where there is none, or it is over or fires on another attempt by now.
    """
    row = find(session, context, judged)
    if row is None or row.phase != Phase.FIRING.value:
        return None
    if (row.config_id, row.attempt) != (judged.row.id, context.attempt):
        return None
    assert transition.finding is not None
    row.finding, row.since_ns = json.loads(transition.finding.model_dump_json()), transition.since_ns
    row.step = transition.step
    row.message, row.explanation = said["message"], said["explanation"]
    return row


def _new(
    session: Session, context: EventContext, judged: Judged, transition: Transition, said: dict[str, Any]
) -> AlertInstanceRow:
    row = AlertInstanceRow(
        run_id=context.run_id,
        fingerprint=fingerprint(context.project, context.run, judged.row),
        episode=1,
        fired_ns=context.now_ns,
        inhibited_by=transition.inhibited_by,
    )
    _hold(row, context, judged, transition, said)
    session.add(row)
    session.flush()
    return row


def _hold(
    row: AlertInstanceRow, context: EventContext, judged: Judged, transition: Transition, said: dict[str, Any]
) -> None:
    """From now on the alert is that of this rule config and attempt."""
    assert judged.config is not None
    assert transition.finding is not None
    row.config_id, row.attempt = judged.row.id, context.attempt
    row.name, row.rule = judged.config.name, judged.config.rule
    row.severity, row.labels = judged.config.severity, dict(judged.config.labels)
    row.receivers, row.dry_run = list(judged.config.receivers), judged.config.dry_run
    row.phase = Phase.FIRING.value
    row.since_ns = transition.since_ns
    row.finding = json.loads(transition.finding.model_dump_json())
    _say(row, transition.step, said)


def _say(row: AlertInstanceRow, step: int, said: dict[str, Any]) -> None:
    row.step, row.event_id = step, said["event_id"]
    row.message, row.explanation = said["message"], said["explanation"]


def _again(
    session: Session,
    row: AlertInstanceRow,
    context: EventContext,
    judged: Judged,
    transition: Transition,
    said: dict[str, Any],
) -> Change:
    """It fires already: on this attempt, where it was kept quiet, or on another."""
    was_hidden = row.is_hidden
    same = (row.config_id, row.attempt) == (judged.row.id, context.attempt)
    newest = session.get_one(RunRow, context.run_id).attempt
    if not same and context.attempt != newest and row.attempt == newest:
        return "none"  # late rows of an attempt that is over
    _hold(row, context, judged, transition, said)
    # What people know of stays known: that it follows from something else on a later attempt takes nothing back.
    row.inhibited_by = transition.inhibited_by if was_hidden else ""
    if was_hidden and not row.is_hidden:
        return "revealed"
    return "continued"


def _close(
    row: AlertInstanceRow, context: EventContext, judged: Judged, transition: Transition, said: dict[str, Any]
) -> Change:
    if row.phase != Phase.FIRING.value or (row.config_id, row.attempt) != (judged.row.id, context.attempt):
        return "none"  # another attempt makes it fire
    _say(row, transition.step, said)
    row.phase, row.resolved_ns = Phase.RESOLVED.value, context.now_ns
    return "closed"


# Made once: every evaluation asks it.
_FIRING = (
    select(AlertInstanceRow)
    .where(AlertInstanceRow.run_id == bindparam("of_run"), AlertInstanceRow.phase == Phase.FIRING.value)
    .order_by(AlertInstanceRow.id)
)


def left_behind(
    session: Session, context: EventContext, judged: list[Judged], watermark: int
) -> list[tuple[AlertInstanceRow, str]]:
    """Alerts that nothing makes fire any more, and why: no change of theirs will ever come.

    One that fired on an earlier attempt is over once the run's newest has come past that step without it, and so is one whose
    rule config was changed meanwhile; one whose rule config is no longer there is over at once.

    Args:
        session: the transaction.
        context: where and when.
        judged: all rule configs of the run, as they were judged on ``place.attempt``.
        watermark: the last step of it that every worker has passed.
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
        elif _came_past(row, entry, watermark):
            ended.append((row, f"attempt {context.attempt} came past step {row.step} without it"))
    return ended


def _came_past(row: AlertInstanceRow, entry: Judged, watermark: int) -> bool:
    if entry.config is None or entry.memory.alert.phase in (Phase.FIRING, Phase.PENDING):
        return False
    judged = entry.memory.judged > 0 or entry.config.implementation.clock
    return judged and (watermark >= row.step or entry.config.implementation.clock)


def close_left_behind(session: Session, row: AlertInstanceRow, step: int, now_ns: int, event_id: str) -> None:
    """End an alert that nothing makes fire any more, on every attempt."""
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
    """What was said of it, with a title that says that it is over."""
    title = f"{row.name} ({row.severity}) resolved at step {step}"
    return {**row.explanation, "title": title} if row.explanation else {}


RECORDER = "recorder"


def fingerprint(project: str, run: str, row: RuleConfigRow) -> str:
    """A stable name of the alert of a rule config on a run: by project, run, the config's name and its labels.

    What a recorder asks for is never the same as an alert of the owner's or an operator's: it could keep that one from being
    told of.
    """
    labels: dict[str, Any] = (row.data or {}).get("labels") or {}
    named = [project, run, row.name, row.origin == RECORDER, sorted(labels.items())]
    text = json.dumps(named, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()[:FINGERPRINT_LENGTH]


MOST_SEGMENTS = 16


def evidence_of(session: Session, context: EventContext, step: int) -> dict[str, Any]:
    """The run's place on the store, the step, the segments that hold it, and what shows the run from there."""
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
    }
