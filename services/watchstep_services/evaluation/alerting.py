"""Publish changes of alerts as events and actions, within the transaction that commits them.

A firing alert stops the job if its rule may; otherwise the stop that would have been requested is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.format.control import SnapshotRequest
from watchstep_rules.config.rule_config import RuleConfig, StopAction
from watchstep_rules.engine.alert import Phase, Transition, coalesce
from watchstep_rules.engine.incident import RunName, event_message, explain
from watchstep_services.core.events import CloudEvent, EventType, make_event
from watchstep_services.core.redaction import action_key, without_addresses
from watchstep_services.db.models import AlertInstanceRow, AlertRow, RuleConfigRow
from watchstep_services.db.records import add_action, add_event
from watchstep_services.evaluation import alert_instances
from watchstep_services.evaluation.alert_instances import evidence_of, fingerprint
from watchstep_services.evaluation.incidents import Incidents, update_incidents
from watchstep_services.notify.membership import RunReference, regroup
from watchstep_services.notify.silences import NOBODY, WEBHOOK, Active, active, covering, labels_of, mute
from watchstep_services.runs.claim import EventContext
from watchstep_services.runs.control import request_snapshot
from watchstep_services.runs.stops import (
    StopRequester,
    Subject,
    digest_of,
    judges,
    note,
    permission_for,
    request_stop,
)
from watchstep_services.service.context import Service
from watchstep_services.service.judging import Judged

Why = Literal["dry_run", "not_allowed", "silenced"]


@dataclass(frozen=True)
class StopCause:
    """The cause of a stop: the event of a firing alert, its reason as text, and the silence that covers the alert."""

    event: CloudEvent
    reason: str
    silence: Active | None


def wants_stop(config: RuleConfig) -> bool:
    """Whether a rule config has a ``stop`` action, in a dry run or not."""
    return any(isinstance(action, StopAction) for action in config.actions)


def stop(session: Session, context: EventContext, judged: Judged, cause: StopCause) -> int | None:
    """Request the stop, or record that it would have been requested.

    Returns:
        The id of the action; None if there is none, or a stop of the attempt was requested before.
    """
    assert judged.config is not None
    details = _stop_details(judged.config, cause)
    if judged.config.dry_run:
        _would_have(session, context, cause, "dry_run", details)
        return None
    permission = permission_for(session, context.project, judged.row, judged.config)
    if permission is None:
        _would_have(session, context, cause, "not_allowed", details)
        return None
    if cause.silence is not None and cause.silence.suppresses_stop:
        _would_have(session, context, cause, "silenced", {**details, "silence": cause.silence.id})
        return None
    requester = StopRequester(f"rule {judged.config.name}", {**details, "allowed": permission.as_data()})
    because = (cause.event.id, cause.reason)
    return request_stop(session, context.base_url, context.run_id, context.attempt, because, requester)


def _stop_details(config: RuleConfig, cause: StopCause) -> dict[str, Any]:
    data = cause.event.data
    return {
        "event": cause.event.id,
        "reason": cause.reason,
        "step": data["step"],
        "digest": digest_of(config),
        "judges": judges(config),
        "rule_config": data["rule_config"],
        "finding": data["finding"],
        "evidence": data["evidence"],
    }


def _would_have(
    session: Session, context: EventContext, cause: StopCause, why: Why, details: dict[str, Any]
) -> None:
    data = {
        "attempt": context.attempt,
        "because": why,
        "cause": cause.event.id,
        "hint": _hint(context, why, details),
        **{
            name: details[name] for name in ("reason", "step", "digest", "rule_config", "finding", "evidence")
        },
    }
    event = make_event("io.watchstep.stop.would_have", context.base_url, context.named, context.now_ns, data)
    add_event(session, context.run_id, event, context.now_ns)
    subject = Subject(context.project, context.run, context.attempt)
    name = details["judges"]["name"]
    note(session, "would_have", subject, f"rule {name}", context.now_ns, {"because": why, **details})


def _hint(context: EventContext, why: Why, details: dict[str, Any]) -> str:
    name = details["judges"]["name"]
    if why == "dry_run":
        return f"leave 'dry_run' out of rule {name!r} to let it stop"
    if why == "silenced":
        return f"silence {details['silence']} blocks stops; expire it to let rule {name!r} stop"
    return (
        f"rule {name!r} has never been allowed to stop jobs of project {context.project!r}: watchstep rules allow-stop "
        f"{name} --project {context.project} --reason WHY"
    )


_EVENTS: dict[Phase, EventType] = {
    Phase.FIRING: "io.watchstep.alert.firing",
    Phase.RESOLVED: "io.watchstep.alert.resolved",
}


def publish(
    service: Service, session: Session, context: EventContext, judged: Sequence[Judged], watermark: int
) -> list[int]:
    """Publish the changes of a run's alerts on one attempt.

    An alert that begins to fire in this evaluation is published once, with the cause that is known at the evaluation's end.

    Args:
        service: the service.
        session: the transaction that commits them.
        context: where and when.
        judged: every rule config of the run.
        watermark: the attempt's watermark.

    Returns:
        Ids of the actions that the changes cause.
    """
    silences = (
        active(session, context.project, context.now_ns) if any(entry.transitions for entry in judged) else []
    )
    actions: list[int] = []
    changed: list[AlertInstanceRow] = []
    began: set[int] = set()
    changes = [coalesce(entry.transitions) for entry in judged]
    incidents = update_incidents(session, context, judged, changes)
    for entry, transitions in zip(judged, changes, strict=True):
        for transition in transitions:
            _move(session, context, entry, transition)
            if transition.revised:
                _revise(session, context, entry, transition, silences, incidents)
            elif transition.phase in _EVENTS:
                change = _PhaseChange(session, context, entry, transition, silences, incidents)
                actions += change.publish()
                changed += change.changed
                began |= change.began
    incidents.assign(session, context)
    for row, why in alert_instances.left_behind(session, context, list(judged), watermark):
        actions += _end(session, context, row, watermark, why)
        changed.append(row)
    regroup(
        service,
        session,
        RunReference(context.run_id, context.project, context.run),
        changed,
        began,
        context.now_ns,
    )
    return actions


class _PhaseChange:
    """A change to *firing* or *resolved*: its event and the effects."""

    def __init__(
        self,
        session: Session,
        context: EventContext,
        judged: Judged,
        transition: Transition,
        silences: Sequence[Active],
        incidents: Incidents,
    ) -> None:
        assert judged.config is not None  # a config that cannot be read judges nothing
        self._session = session
        self._context = context
        self._judged = judged
        self._config = judged.config
        self._transition = transition
        self._silences = silences
        self._incidents = incidents
        self.changed: list[AlertInstanceRow] = []
        """The alert, if receivers may have to be notified of it."""
        self.began: set[int] = set()
        """The alert's id, if it began to fire; its receivers are notified even if it resolves meanwhile."""

    def publish(self) -> list[int]:
        """Publish the event; returns the ids of new actions."""
        before = alert_instances.find(self._session, self._context, self._judged)
        earlier = before.attempt if before is not None and before.phase == Phase.FIRING.value else ""
        data = _data(self._session, self._context, self._judged, self._transition)
        if self._transition.phase is Phase.FIRING:
            data["incident"] = self._incidents.as_data(self._judged.row.id)
        if earlier not in ("", self._context.attempt):
            data["continues"] = earlier
        event = make_event(
            _EVENTS[self._transition.phase],
            self._context.base_url,
            self._context.named,
            self._context.now_ns,
            data,
        )
        details = {"event_id": event.id, "message": data["message"], "explanation": data["explanation"]}
        row, change = alert_instances.follow(
            self._session, self._context, self._judged, self._transition, details
        )
        self._session.flush()
        silence = covering(self._silences, labels_of(row, self._context.project, self._context.run))
        data |= {"episode": row.episode, "silenced_by": None if silence is None else silence.id}
        event = event.model_copy(update={"data": {**event.data, **data}})
        add_event(self._session, self._context.run_id, event, self._context.now_ns)
        if change != "none":
            self.changed.append(row)
        if change in ("opened", "revealed"):
            self.began.add(row.id)
        return [*self._webhooks(row, change, silence, event), *self._follow(event, silence)]

    def _webhooks(
        self, row: AlertInstanceRow, change: alert_instances.Change, silence: Active | None, event: CloudEvent
    ) -> list[int]:
        hidden = self._mute_hidden(row)
        if hidden or not self._config.webhooks:
            return []
        if change in ("continued", "none"):
            detail = event.data.get("continues", "")
            mute(self._session, row, WEBHOOK, ("known", detail), self._context.now_ns)
            return []
        if silence is not None:
            mute(self._session, row, WEBHOOK, ("silenced", f"silence {silence.id}"), self._context.now_ns)
            return []
        return _post(self._session, self._context, self._config.webhooks, event)

    def _mute_hidden(self, row: AlertInstanceRow) -> bool:
        """Whether no receiver is notified; the reason is recorded."""
        is_note = self._config.severity == "info"
        if is_note:
            mute(self._session, row, NOBODY, ("info", ""), self._context.now_ns)
        if self._config.dry_run:
            mute(self._session, row, NOBODY, ("dry_run", ""), self._context.now_ns)
        if self._transition.inhibited_by:
            why = self._transition.inhibited_by
            mute(self._session, row, NOBODY, ("inhibited", why), self._context.now_ns)
        return is_note or self._config.dry_run or bool(self._transition.inhibited_by)

    def _follow(self, event: CloudEvent, silence: Active | None) -> list[int]:
        """Request the stop and the snapshot of an alert that fires without inhibition on this attempt."""
        if self._transition.phase is not Phase.FIRING or self._transition.inhibited_by:
            return []
        actions: list[int | None] = []
        if self._config.takes_snapshot:
            request = SnapshotRequest(event.id, self._transition.step, self._context.attempt)
            actions.append(request_snapshot(self._session, self._context.run_id, request))
        if wants_stop(self._config):
            reason = _reason(self._context, self._config, self._transition)
            cause = StopCause(event, reason, silence)
            actions.append(stop(self._session, self._context, self._judged, cause))
        return [action for action in actions if action is not None]


def _revise(
    session: Session,
    context: EventContext,
    judged: Judged,
    transition: Transition,
    silences: Sequence[Active],
    incidents: Incidents,
) -> None:
    """Publish a likelier cause of a firing alert. Receivers are not notified and nothing is stopped again."""
    data = _data(session, context, judged, transition)
    data["incident"] = incidents.as_data(judged.row.id)
    row = alert_instances.revise(session, context, judged, transition, data)
    if row is not None:
        silence = covering(silences, labels_of(row, context.project, context.run))
        data |= {"episode": row.episode, "silenced_by": None if silence is None else silence.id}
    event = make_event("io.watchstep.alert.revised", context.base_url, context.named, context.now_ns, data)
    add_event(session, context.run_id, event, context.now_ns)


def _end(session: Session, context: EventContext, row: AlertInstanceRow, step: int, why: str) -> list[int]:
    """Publish the end of an alert that no attempt makes fire any more."""
    config = session.get(RuleConfigRow, row.config_id)
    event = make_event(
        "io.watchstep.alert.resolved",
        context.base_url,
        context.named,
        context.now_ns,
        {
            "attempt": row.attempt,
            "phase": Phase.RESOLVED.value,
            "step": step,
            "severity": row.severity,
            "notify": list(row.receivers),
            "since_step": row.finding["step"],
            "since_ns": row.since_ns,
            "labels": row.labels,
            "dry_run": row.dry_run,
            "inhibited_by": row.inhibited_by or None,
            "message": row.message,
            "explanation": alert_instances.resolved_title(row, step),
            "rule_config": {"name": row.name} if config is None else without_addresses(config.data),
            "finding": row.finding,
            "fingerprint": row.fingerprint,
            "url": context.links.alert(context.project, context.run, row.fingerprint),
            "episode": row.episode,
            "ended_by": why,
        },
    )
    alert_instances.close_left_behind(session, row, step, context.now_ns, event.id)
    add_event(session, context.run_id, event, context.now_ns)
    urls = [] if config is None else _webhook_urls(config.data)
    if row.is_hidden or not urls:
        return []
    silence = covering(active(session, context.project, context.now_ns), labels_of(row, *context.named))
    if silence is not None:
        mute(session, row, WEBHOOK, ("silenced", f"silence {silence.id}"), context.now_ns)
        return []
    return _post(session, context, urls, event)


def _webhook_urls(data: dict[str, Any]) -> list[str]:
    """Webhook URLs of a rule config, which this version may not be able to parse."""
    actions = [action for action in data.get("actions") or () if isinstance(action, dict)]
    return [str(action["url"]) for action in actions if action.get("kind") == "webhook" and "url" in action]


def _move(session: Session, context: EventContext, judged: Judged, transition: Transition) -> None:
    row = session.execute(
        select(AlertRow).filter_by(config_id=judged.row.id, attempt=context.attempt)
    ).scalar_one_or_none()
    if row is None:
        row = AlertRow(
            run_id=context.run_id, config_id=judged.row.id, attempt=context.attempt, name=judged.row.name,
            rule=judged.row.rule, severity="", phase="", since_step=0, since_ns=0,
        )  # fmt: skip
        session.add(row)
    assert judged.config is not None
    row.fingerprint = fingerprint(context.project, context.run, judged.row)
    row.severity = judged.config.severity
    if not transition.revised:
        row.phase = transition.phase.value
        row.since_step, row.since_ns = transition.step, context.now_ns
    if transition.finding is not None:
        row.finding = json.loads(transition.finding.model_dump_json())
        row.details = _details(context, judged.config, transition)
    if transition.phase is Phase.FIRING and not transition.revised:
        row.fired_ns, row.resolved_ns = context.now_ns, None
    elif transition.phase is Phase.RESOLVED:
        row.resolved_ns = context.now_ns
    session.flush()


def _details(context: EventContext, config: RuleConfig, transition: Transition) -> dict[str, Any]:
    """Data of an alert and its events besides the finding."""
    return {
        "since_step": transition.since_step,
        "since_ns": transition.since_ns,
        "labels": dict(config.labels),
        "dry_run": config.dry_run,
        "inhibited_by": transition.inhibited_by or None,
        "message": event_message(config, transition, _named(context)),
        "explanation": explain(config, transition).model_dump(mode="json"),
    }


def _data(session: Session, context: EventContext, judged: Judged, transition: Transition) -> dict[str, Any]:
    finding, config = transition.finding, judged.config
    assert finding is not None  # only alerts that fire or resolve are published
    assert config is not None
    name = fingerprint(context.project, context.run, judged.row)
    return {
        "attempt": context.attempt,
        "phase": transition.phase.value,
        "step": transition.step,
        "severity": config.severity,
        "notify": list(config.receivers),
        **_details(context, config, transition),
        "rule_config": without_addresses(config.as_data()),
        "finding": json.loads(finding.model_dump_json()),
        "fingerprint": name,
        "url": context.links.alert(context.project, context.run, name),
        "evidence": evidence_of(session, context, finding.step),
    }


def _named(context: EventContext) -> RunName:
    return RunName(context.project, context.run, context.attempt)


def _post(session: Session, context: EventContext, urls: Sequence[str], event: CloudEvent) -> list[int]:
    added = []
    for url in urls:
        cause = {
            "event_id": event.id,
            "at_ns": context.now_ns,
            "payload": {"url": url, "event": event.model_dump(mode="json")},
        }
        added.append(add_action(session, context.run_id, "webhook", action_key(event.id, url), cause))
    return [action_id for action_id in added if action_id is not None]


def _reason(context: EventContext, config: RuleConfig, transition: Transition) -> str:
    return f"rule {config.name}: bad from step {transition.since_step}: {event_message(config, transition, _named(context))}"
