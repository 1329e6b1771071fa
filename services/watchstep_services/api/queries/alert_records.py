"""What the database says about an alert: its state, rule, episodes, actions, and what was published before it fired."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from watchstep.errors import RuleError
from watchstep_rules.engine.incident import Explanation, IncidentSummary, sentence
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.registry import find_rule
from watchstep_services.api.queries.alert_evidence import finding_of, fixed_threshold, threshold_point
from watchstep_services.api.queries.overview import RunRecords
from watchstep_services.api.queries.run_events import RunEvent, alert_events, title_of
from watchstep_services.api.schemas.alert_page import (
    AcknowledgementState,
    AlertFinding,
    AlertState,
    Episode,
    FiredRule,
    PriorEvent,
    RuleDocumentation,
    SilenceState,
    ThresholdPoint,
)
from watchstep_services.api.schemas.models import ActionOutput, TryOutput
from watchstep_services.core.redaction import shown_key, without_addresses
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import (
    ActionRow,
    ActionTry,
    AlertInstanceRow,
    AlertRow,
    FindingRow,
    Incident,
    RuleConfigRow,
    RuleStateRow,
    RunRow,
    Silence,
)
from watchstep_services.notify.silences import active, covering, labels_of
from watchstep_services.runs.rule_health import no_data_reason, shown_memory, shown_state
from watchstep_services.runs.stops import stop_key
from watchstep_services.service.judging import load_config

_SECONDS = 1_000_000_000
_MAX_EPISODES = 50
_MAX_ACTIONS = 100
_MAX_FINDINGS = 2000
_MAX_EVENTS = 50


@dataclass(frozen=True)
class PriorWindow:
    """What counts as just before an alert.

    Attributes:
        steps: number of steps.
        minutes: number of minutes.
    """

    steps: int
    minutes: int


@dataclass(frozen=True)
class AlertRecords:
    """What the database says about an alert. With the state of its statistics, it determines the page."""

    alert: AlertState
    finding: AlertFinding
    rule: FiredRule
    incident: IncidentSummary | None
    episodes: Sequence[Episode]
    findings: Sequence[ThresholdPoint]
    threshold: tuple[float | None, str]
    actions: Sequence[ActionOutput]
    before: Sequence[PriorEvent]
    acknowledgement: AcknowledgementState | None
    silence: SilenceState | None

    def inputs(self) -> list[Any]:
        """Return it as JSON-ready data."""
        models = [
            self.alert, self.finding, self.rule, self.incident, *self.episodes, *self.findings, *self.actions,
            *self.before, self.acknowledgement, self.silence,
        ]  # fmt: skip
        return [None if model is None else model.model_dump(mode="json") for model in models]

    @property
    def since_step(self) -> int:
        """First step of the findings that made it fire."""
        return self.finding.step if self.alert.since_step is None else self.alert.since_step


def read_alert(
    session: Session,
    run: RunRow,
    row: AlertInstanceRow,
    records: RunRecords,
    prior: PriorWindow,
) -> AlertRecords:
    """Read what the database says about an alert.

    Args:
        session: the transaction.
        run: its run.
        row: the alert over all attempts.
        records: what the database says about the run.
        prior: what counts as just before the alert.
    """
    finding = finding_of(row.finding)
    on_attempt = session.execute(
        select(AlertRow).filter_by(config_id=row.config_id, attempt=row.attempt)
    ).scalar_one_or_none()
    since = _since_step(on_attempt, finding)
    rule = _rule(session, run, row)
    events = alert_events(records.events, row.fingerprint)
    stored = (
        select(FindingRow)
        .where(
            FindingRow.config_id == row.config_id,
            FindingRow.attempt == row.attempt,
            FindingRow.step >= since - prior.steps,
            FindingRow.step <= max(since, finding.step) + prior.steps,
        )
        .order_by(FindingRow.step, FindingRow.id)
        .limit(_MAX_FINDINGS)
    )
    findings = [threshold_point(found.step, found.finding) for found in session.execute(stored).scalars()]
    labels = labels_of(row, run.project, run.run)
    return AlertRecords(
        alert=_state(row, since, labels),
        finding=finding,
        rule=rule,
        incident=_incident(session, row),
        episodes=_episodes(events),
        findings=findings,
        threshold=fixed_threshold(finding, findings, rule.parameters),
        actions=_actions(session, run, row, [event.id for event in events]),
        before=_before(records, row, events, since, prior),
        acknowledgement=AcknowledgementState(
            who=row.acknowledged_by, at_ns=row.acknowledged_ns, comment=row.acknowledgement
        )
        if row.acknowledged_by
        else None,
        silence=_silence(session, run.project, labels),
    )


def _since_step(on_attempt: AlertRow | None, finding: AlertFinding) -> int:
    details = None if on_attempt is None else on_attempt.details
    since = details.get("since_step") if details else None
    return since if type(since) is int and 0 <= since <= finding.step else finding.step


def _state(row: AlertInstanceRow, since: int, labels: Mapping[str, str]) -> AlertState:
    try:
        explanation = Explanation.model_validate(row.explanation)
    except ValidationError:
        explanation = None  # of a resolved alert, or of an earlier version
    columns = {
        name: getattr(row, name)
        for name in AlertState.model_fields
        if name not in ("since_step", "labels", "explanation")
    }
    return AlertState(since_step=since, labels=dict(labels), explanation=explanation, **columns)


def _rule(session: Session, run: RunRow, row: AlertInstanceRow) -> FiredRule:
    config_row = session.get(RuleConfigRow, row.config_id)
    shown = session.execute(
        select(shown_state(RuleStateRow.state)).filter_by(config_id=row.config_id, attempt=run.attempt)
    ).scalar_one_or_none()
    origin, config, parameters = "", {"name": row.name, "rule": row.rule}, {}
    health, problem = RuleHealth.NO_DATA.value, ""
    if config_row is not None:
        loaded, memory = load_config(config_row, None), shown_memory(shown)
        config = without_addresses(config_row.data)
        origin = "" if config_row.origin.startswith("retired") else config_row.origin
        health, problem = memory.health.value, loaded.problem or memory.problem
        if memory.health is RuleHealth.NO_DATA and not problem:
            problem = no_data_reason(run.health, loaded.config)
        if loaded.config is not None:
            parameters = loaded.config.parameters.model_dump(mode="json")
    return FiredRule(
        name=row.name,
        rule=row.rule,
        severity=row.severity,
        origin=origin,
        config=config,
        parameters=parameters,
        parameter_schema=_schema(row.rule),
        health=health,
        problem=problem,
        documentation=documentation_of(row.rule, row.explanation),
    )


def _schema(name: str) -> dict[str, Any]:
    try:
        schema: dict[str, Any] = find_rule(name).params_type.model_json_schema()
    except RuleError:
        return {}
    return schema


def documentation_of(name: str, explanation: Mapping[str, Any]) -> RuleDocumentation:
    """Return what a rule means, with the advice for a finding as far as an explanation has it.

    Args:
        name: name of the rule. One that this version does not have is documented by the explanation alone.
        explanation: explanation of the alert.
    """
    summary, description = "", ""
    causes: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    with suppress(RuleError):
        rule = find_rule(name)
        summary, description = sentence(rule.summary), inspect.getdoc(type(rule)) or ""
        causes, remedies = rule.usual_causes, rule.what_to_try
    return RuleDocumentation(
        name=name,
        summary=summary,
        description=description,
        usual_causes=_texts(explanation.get("usual_causes")) or [sentence(text) for text in causes],
        what_to_try=_texts(explanation.get("what_to_try")) or [sentence(text) for text in remedies],
    )


def _texts(values: object) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list | tuple) else []


def _incident(session: Session, row: AlertInstanceRow) -> IncidentSummary | None:
    if not row.incident:
        return None
    found = session.execute(
        select(Incident).filter_by(run_id=row.run_id, key=row.incident)
    ).scalar_one_or_none()
    return None if found is None else IncidentSummary.model_validate(found.summary)


def _episodes(events: Sequence[RunEvent]) -> list[Episode]:
    """Return the episodes, newest first: a firing, its revisions, and its resolution."""
    episodes: list[Episode] = []
    for event in events:
        step = event.step_of("step")
        if step is None:
            continue
        if event.type == "alert.resolved":
            if episodes and episodes[-1].resolved_ns is None:
                update: dict[str, Any] = {"resolved_step": step, "resolved_ns": event.at_ns}
                episodes[-1] = episodes[-1].model_copy(update=update)
            continue
        if event.type == "alert.revised" and episodes and episodes[-1].resolved_ns is None:
            revised = _episode(event, step).model_copy(update={"fired_ns": episodes[-1].fired_ns})
            episodes[-1] = revised
        elif event.type == "alert.firing":
            episodes.append(_episode(event, step))
    return episodes[::-1][:_MAX_EPISODES]


def _episode(event: RunEvent, step: int) -> Episode:
    since = event.step_of("since_step")
    return Episode(
        attempt=event.text("attempt"),
        since_step=step if since is None else since,
        step=step,
        fired_ns=event.at_ns,
        resolved_step=None,
        resolved_ns=None,
        message=event.text("message"),
        event_id=event.id,
    )


def _actions(
    session: Session, run: RunRow, row: AlertInstanceRow, event_ids: Sequence[str]
) -> list[ActionOutput]:
    """Return the actions of an alert's events, newest first, and the stop of its attempt if an event of the alert caused it."""
    ids = {*event_ids, row.event_id}
    chosen = (
        select(ActionRow)
        .where(
            ActionRow.run_id == run.id,
            or_(ActionRow.event_id.in_(ids), ActionRow.key == stop_key(run.id, row.attempt)),
        )
        .order_by(ActionRow.id.desc())
        .limit(_MAX_ACTIONS)
    )
    rows = [
        action
        for action in session.execute(chosen).scalars()
        if action.event_id in ids or action.payload.get("cause") in ids
    ]
    tries: dict[int, list[TryOutput]] = defaultdict(list)
    attempts = select(ActionTry).where(ActionTry.action_id.in_([action.id for action in rows]))
    for entry in session.execute(attempts.order_by(ActionTry.number)).scalars():
        tries[entry.action_id].append(
            TryOutput(number=entry.number, at_ns=entry.at_ns, outcome=entry.outcome, detail=entry.detail)
        )
    return [_action(action, tries[action.id]) for action in rows]


def _action(row: ActionRow, tries: list[TryOutput]) -> ActionOutput:
    columns = {name: getattr(row, name) for name in ActionOutput.model_fields if name != "tries"}
    return ActionOutput(**{**columns, "key": shown_key(row.key)}, tries=tries)


def _before(
    records: RunRecords,
    row: AlertInstanceRow,
    own: Sequence[RunEvent],
    since: int,
    prior: PriorWindow,
) -> list[PriorEvent]:
    """Return events, other alerts and starts of attempts before the alert fired, newest first."""
    firing = next((event for event in reversed(own) if event.type == "alert.firing"), None)
    until_ns = row.fired_ns if firing is None else firing.at_ns
    own_ids = {event.id for event in own}
    entries: list[PriorEvent] = []
    for event in reversed(records.events):
        step = event.step_of("step")
        is_earlier = event.at_ns <= until_ns and (firing is None or event.number < firing.number)
        is_near = event.at_ns >= until_ns - prior.minutes * 60 * _SECONDS
        is_near |= step is not None and since - prior.steps <= step <= since
        if event.id in own_ids or not is_earlier or not is_near or len(entries) >= _MAX_EVENTS:
            continue
        entries.append(
            PriorEvent(
                kind="alert" if event.is_of_alert else "event",
                step=step,
                at_ns=event.at_ns,
                title=title_of(event),
                fingerprint=event.text("fingerprint"),
            )
        )
    for attempt in records.attempts:
        first = attempt.first_step
        if first is not None and since - prior.steps <= first <= since and first > 0:
            title = f"attempt {attempt.attempt} begins at step {first}"
            entries.append(PriorEvent(kind="attempt", step=first, at_ns=attempt.first_seen_ns, title=title))
    return entries


def _silence(session: Session, project: str, labels: Mapping[str, str]) -> SilenceState | None:
    silence = covering(active(session, project, read_clock(session)), labels)
    if silence is None:
        return None
    row = session.get_one(Silence, silence.id)
    return SilenceState(**{name: getattr(row, name) for name in SilenceState.model_fields})
