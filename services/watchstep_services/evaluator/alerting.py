"""From changes of an alert to events and actions, within the transaction that commits them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.control import SnapshotRequest
from watchstep.layout import run_prefix
from watchstep_rules.config import RuleConfig
from watchstep_rules.explanation import RunName, explain, say
from watchstep_rules.judging.alert import Phase, Transition
from watchstep_services.control import ask_for_snapshot
from watchstep_services.database.models import Alert, Segment
from watchstep_services.database.records import add_action, add_event
from watchstep_services.dispatcher.request import request_stop
from watchstep_services.evaluator.claim import Claim
from watchstep_services.evaluator.discover import key_of
from watchstep_services.evaluator.judging import Judged
from watchstep_services.events import CloudEvent, EventType, make_event

_EVENTS: dict[Phase, EventType] = {
    Phase.FIRING: "watchstep.alert.firing",
    Phase.RESOLVED: "watchstep.alert.resolved",
}
_EVIDENCE_SEGMENTS = 16


@dataclass(frozen=True)
class Place:
    """Where and when alerts change: the API's address, the claimed run, the attempt, the database's time."""

    base_url: str
    held: Claim
    attempt: str
    now_ns: int


def publish(session: Session, place: Place, judged: Judged) -> list[int]:
    """Follow an alert through its changes; returns the ids of new actions."""
    actions: list[int] = []
    for transition in judged.transitions:
        assert judged.config is not None  # a config that cannot be read judges nothing
        _move(session, place, judged, transition)
        kind = _EVENTS.get(transition.phase)
        if kind is None:
            continue
        event = make_event(
            kind,
            place.base_url,
            (place.held.project, place.held.run),
            place.now_ns,
            _data(session, place, judged.config, transition),
        )
        add_event(session, place.held.run_id, event, place.now_ns)
        if not transition.inhibited_by and not judged.config.dry_run:
            actions += _act(session, place, judged, transition, event)
    return actions


def _act(
    session: Session, place: Place, judged: Judged, transition: Transition, event: CloudEvent
) -> list[int]:
    """What a change of an alert causes, where somebody is told of it."""
    assert judged.config is not None
    actions = _webhooks(session, place, judged.config, event)
    if transition.phase is Phase.FIRING and judged.config.takes_snapshot:
        wanted = SnapshotRequest(event.id, transition.step, place.attempt)
        mirror = ask_for_snapshot(session, place.held.run_id, wanted)
        actions += [] if mirror is None else [mirror]
    if transition.phase is Phase.FIRING and judged.row.granted_stop and judged.config.stops:
        stop = request_stop(
            session,
            place.base_url,
            place.held.run_id,
            place.attempt,
            (event.id, _reason(place, judged.config, transition)),
        )
        actions += [] if stop is None else [stop]
    return actions


def _move(session: Session, place: Place, judged: Judged, transition: Transition) -> None:
    row = session.execute(
        select(Alert).filter_by(config_id=judged.row.id, attempt=place.attempt)
    ).scalar_one_or_none()
    if row is None:
        row = Alert(
            run_id=place.held.run_id, config_id=judged.row.id, attempt=place.attempt, name=judged.row.name,
            rule=judged.row.rule, severity="", phase="", since_step=0, since_ns=0,
        )  # fmt: skip
        session.add(row)
    assert judged.config is not None
    row.severity = judged.config.severity
    row.phase = transition.phase.value
    row.since_step, row.since_ns = transition.step, place.now_ns
    if transition.finding is not None:
        row.finding = json.loads(transition.finding.model_dump_json())
        row.details = _details(place, judged.config, transition)
    if transition.phase is Phase.FIRING:
        row.fired_ns, row.resolved_ns = place.now_ns, None
    elif transition.phase is Phase.RESOLVED:
        row.resolved_ns = place.now_ns
    session.flush()


def _details(place: Place, config: RuleConfig, transition: Transition) -> dict[str, Any]:
    """What an alert and its events say beside the finding."""
    return {
        "since_step": transition.since_step,
        "since_ns": transition.since_ns,
        "labels": dict(config.labels),
        "dry_run": config.dry_run,
        "inhibited_by": transition.inhibited_by or None,
        "message": say(config, transition, _named(place)),
        "explanation": explain(config, transition).model_dump(mode="json"),
    }


def _data(session: Session, place: Place, config: RuleConfig, transition: Transition) -> dict[str, Any]:
    finding = transition.finding
    assert finding is not None  # only what fires or is resolved becomes an event
    return {
        "attempt": place.attempt,
        "phase": transition.phase.value,
        "step": transition.step,
        "severity": config.severity,
        "notify": list(config.receivers),
        **_details(place, config, transition),
        "rule_config": config.as_data(),
        "finding": json.loads(finding.model_dump_json()),
        "evidence": _evidence(session, place, finding.step),
    }


def _named(place: Place) -> RunName:
    return RunName(place.held.project, place.held.run, place.attempt)


def _evidence(session: Session, place: Place, step: int) -> dict[str, Any]:
    """Which objects hold the step's figures, and where they lie."""
    rows = session.execute(
        select(Segment)
        .where(
            Segment.run_id == place.held.run_id,
            Segment.attempt == place.attempt,
            Segment.first <= step,
            Segment.last >= step,
            Segment.state == "read",
        )
        .order_by(Segment.position)
        .limit(_EVIDENCE_SEGMENTS)
    ).scalars()
    root = f"{place.held.store_url.rstrip('/')}/{run_prefix(place.held.project, place.held.run)}"
    return {"store": root, "step": step, "segments": [key_of(row).path for row in rows]}


def _webhooks(session: Session, place: Place, config: RuleConfig, event: CloudEvent) -> list[int]:
    added = []
    for url in config.webhooks:
        cause = {
            "event_id": event.id,
            "at_ns": place.now_ns,
            "payload": {"url": url, "event": event.model_dump(mode="json")},
        }
        added.append(
            add_action(session, place.held.run_id, "webhook", f"webhook:{event.id}:{url}"[:700], cause)
        )
    return [action_id for action_id in added if action_id is not None]


def _reason(place: Place, config: RuleConfig, transition: Transition) -> str:
    return f"rule {config.name} at step {transition.step}: {say(config, transition, _named(place))}"
