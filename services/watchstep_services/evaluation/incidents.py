"""The incidents of an attempt, recomputed when alerts begin to fire or are revised."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from watchstep_rules.engine.alert import Phase, Transition
from watchstep_rules.engine.incident import (
    IncidentSummary,
    Onset,
    incident_id,
    incidents_of,
    onset_changes,
    summarize,
    unaffected_before,
)
from watchstep_rules.engine.judge import RuleHealth
from watchstep_services.db.models import AlertInstanceRow, AlertRow, Incident
from watchstep_services.evaluation.alert_instances import RECORDER
from watchstep_services.runs.claim import EventContext
from watchstep_services.service.judging import Judged


@dataclass(frozen=True)
class Incidents:
    """The current incident of each rule config's alert on the attempt, by the config's id, near the changed steps."""

    by_config: Mapping[int, IncidentSummary]

    def as_data(self, config_id: int) -> dict[str, object] | None:
        """The incident's data in events; None if the alert belongs to none."""
        summary = self.by_config.get(config_id)
        return None if summary is None else summary.model_dump(mode="json")

    def assign(self, session: Session, context: EventContext) -> None:
        """Write the incident ids to the rows of the alerts, once these exist."""
        if not self.by_config:
            return
        configs, attempt = list(self.by_config), context.attempt
        alerts = select(AlertRow).where(AlertRow.attempt == attempt, AlertRow.config_id.in_(configs))
        for alert in session.execute(alerts).scalars():
            alert.incident = self.by_config[alert.config_id].id
        instances = select(AlertInstanceRow).where(
            AlertInstanceRow.run_id == context.run_id,
            AlertInstanceRow.attempt == attempt,
            AlertInstanceRow.config_id.in_(configs),
        )
        for row in session.execute(instances).scalars():
            row.incident = self.by_config[row.config_id].id


class _AlertStep(NamedTuple):
    """A rule config, and the step at which its alert begins."""

    config: int
    step: int


@dataclass(frozen=True)
class _Changes:
    """Onsets that are new, and those that a revision removes."""

    added: dict[_AlertStep, Onset]
    removed: set[_AlertStep]


def update_incidents(
    session: Session,
    context: EventContext,
    judged: Sequence[Judged],
    transitions_of_each: Sequence[Sequence[Transition]],
) -> Incidents:
    """Assign alerts that begin to fire, or are revised, to incidents of the attempt.

    Alerts that a recorder requests belong to no incident, because they could suppress notifications of the owner's alerts. Alerts of
    severity info belong to none, because they would be named as causes and would join separate incidents.

    Args:
        session: the transaction, before it moves these alerts.
        context: where and when.
        judged: every rule config of the run.
        transitions_of_each: changes of each config's alert, in the same order.
    """
    changes = _changes(session, context, judged, transitions_of_each)
    if not changes.added:
        return Incidents({})
    low = min(entry.step for entry in (*changes.added, *changes.removed))
    # Incidents that end earlier are unchanged: no added or removed onset is near them.
    rows = session.execute(
        select(Incident).where(
            Incident.run_id == context.run_id,
            Incident.attempt == context.attempt,
            Incident.last_step >= unaffected_before(low),
        )
    ).scalars()
    before = {row.key: row for row in rows}
    onsets = {
        _AlertStep(onset.config, onset.step): onset
        for row in before.values()
        for onset in map(Onset.model_validate, row.onsets)
    }
    for entry in changes.removed:
        onsets.pop(entry, None)
    onsets |= changes.added
    return _write(session, context, before, onsets.values(), _silent(judged))


def _changes(
    session: Session,
    context: EventContext,
    judged: Sequence[Judged],
    transitions_of_each: Sequence[Sequence[Transition]],
) -> _Changes:
    changes = _Changes({}, set())
    fired = [
        (entry, transitions)
        for entry, transitions in zip(judged, transitions_of_each, strict=True)
        if entry.row.origin != RECORDER
        and entry.config is not None
        and entry.config.severity != "info"
        and any(change.phase is Phase.FIRING for change in transitions)
    ]
    if not fired:
        return changes
    alerts = session.execute(
        select(AlertRow).where(
            AlertRow.attempt == context.attempt,
            AlertRow.phase == Phase.FIRING.value,
            AlertRow.config_id.in_([entry.row.id for entry, _ in fired]),
        )
    ).scalars()
    begun = {row.config_id: int(row.details["since_step"]) for row in alerts if row.details}
    for entry, transitions in fired:
        config = entry.row.id
        onsets_changed = onset_changes(transitions, begun.get(config))
        changes.added.update(
            {_AlertStep(config, step): _onset(entry, change) for step, change in onsets_changed.added.items()}
        )
        changes.removed.update(_AlertStep(config, step) for step in onsets_changed.removed)
    return changes


def _onset(judged: Judged, transition: Transition) -> Onset:
    assert judged.config is not None  # a config that cannot be read judges nothing
    assert transition.finding is not None  # a firing alert has a finding
    what_to_try = judged.config.implementation.advice(transition.finding).what_to_try
    return Onset(
        config=judged.row.id,
        name=judged.config.name,
        rule=judged.config.rule,
        severity=judged.config.severity,
        step=transition.since_step,
        finding=transition.finding,
        check=what_to_try[0] if what_to_try else "",
    )


def _silent(judged: Sequence[Judged]) -> dict[str, int]:
    """Rules that evaluated rows of the attempt and have not fired in any of their configs, with the number of judged steps."""
    silent: dict[str, int] = {}
    fired: set[str] = set()
    for entry in judged:
        if entry.config is None:
            continue
        memory, rule = entry.memory, entry.config.rule
        if memory.alert.phase not in (Phase.INACTIVE, Phase.PENDING) or memory.alert.closed_to >= 0:
            fired.add(rule)
        elif memory.health is RuleHealth.OK and memory.evaluated_steps > 0:
            silent[rule] = max(silent.get(rule, 0), memory.evaluated_steps)
    return {rule: steps for rule, steps in silent.items() if rule not in fired}


def _write(
    session: Session,
    context: EventContext,
    before: dict[str, Incident],
    onsets: Iterable[Onset],
    silent: Mapping[str, int],
) -> Incidents:
    by_config: dict[int, IncidentSummary] = {}
    remaining = dict(before)
    for members in incidents_of(onsets):
        key = incident_id(context.project, context.run, context.attempt, members[0].step)
        summary = summarize(key, members, silent)
        row = remaining.pop(key, None)
        if row is None:
            row = Incident(
                run_id=context.run_id, attempt=context.attempt, key=key, first_step=members[0].step
            )
            session.add(row)
        row.last_step = members[-1].step
        row.onsets = [json.loads(onset.model_dump_json()) for onset in members]
        row.summary = summary.model_dump(mode="json")
        by_config |= {onset.config: summary for onset in members}
    if remaining:
        session.execute(delete(Incident).where(Incident.id.in_([row.id for row in remaining.values()])))
    session.flush()
    return Incidents(by_config)
