"""One lane per rule config of a run: its states over the steps that are shown.

The states follow from the events of its alert and of its health, from the alerts on the newest attempts, and from the stored rule
states. A phase *pending* that ended without a firing is not recorded anywhere, and therefore not in the lane::

    base state of the attempt      ok, or no_data if no row was evaluated
    alert.firing                   pending from the first finding, firing from the step on
    alert.revised                  moves the beginning of the firing
    alert.resolved                 resolved, until it fires again
    rule.error … rule.ok           error, which covers the states of the alert meanwhile
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep_rules.engine.judge import RuleHealth, RuleMemory
from watchstep_services.api.queries.run_events import RunEvent, VisibleSteps
from watchstep_services.api.schemas.run_pages import LaneInterval, LaneState, RuleLane
from watchstep_services.db.models import AlertRow, RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.runs.rule_health import no_data_reason, shown_memory, shown_state
from watchstep_services.service.judging import load_config

_MAX_ATTEMPTS = 8
"""Newest attempts whose rule states are read; those of earlier ones only show in events."""

_MAX_MESSAGE = 500


@dataclass(frozen=True)
class LaneRows:
    """The rows of a run that its lanes follow from.

    Attributes:
        configs: rule configs, also those that are not evaluated any more.
        memories: (rule config, attempt) → the shown part of the rule state (`shown_memory`).
        alerts: (rule config, attempt) → alert.
    """

    configs: Sequence[RuleConfigRow]
    memories: Mapping[tuple[int, str], RuleMemory]
    alerts: Mapping[tuple[int, str], AlertRow]


def read_lane_rows(session: Session, run: RunRow, attempts: Sequence[str]) -> LaneRows:
    """Read the rows of the newest attempts.

    Args:
        session: the transaction.
        run: the run.
        attempts: its attempts, oldest first.
    """
    chosen = list(attempts)[-_MAX_ATTEMPTS:]
    configs = list(
        session.execute(
            select(RuleConfigRow).where(RuleConfigRow.run_id == run.id).order_by(RuleConfigRow.id)
        ).scalars()
    )
    ids = [config.id for config in configs]
    states = select(RuleStateRow.config_id, RuleStateRow.attempt, shown_state(RuleStateRow.state)).where(
        RuleStateRow.config_id.in_(ids), RuleStateRow.attempt.in_(chosen)
    )
    alerts = select(AlertRow).where(AlertRow.run_id == run.id, AlertRow.attempt.in_(chosen))
    return LaneRows(
        configs,
        {(config_id, attempt): shown_memory(shown) for config_id, attempt, shown in session.execute(states)},
        {(alert.config_id, alert.attempt): alert for alert in session.execute(alerts).scalars()},
    )


def lanes_of(
    run: RunRow, rows: LaneRows, events: Sequence[RunEvent], visible: Mapping[str, VisibleSteps]
) -> list[RuleLane]:
    """Return the lanes: of the evaluated rule configs in their order, then of others that have events.

    Args:
        run: the run.
        rows: its rule configs, states and alerts.
        events: its newest events, oldest first.
        visible: the shown steps of each attempt.
    """
    by_name: dict[str, list[RunEvent]] = {}
    for event in events:
        if event.type.startswith(("alert.", "rule.")) and event.type != "alert.acknowledged":
            by_name.setdefault(event.config_name, []).append(event)
    lanes = []
    for config in rows.configs:
        if config.origin.startswith("retired"):
            continue
        lanes.append(_lane(run, config, rows, by_name.pop(config.name, []), visible))
    lanes += [_former_lane(name, found, visible) for name, found in by_name.items() if name]
    return lanes


def _lane(
    run: RunRow,
    config: RuleConfigRow,
    rows: LaneRows,
    events: Sequence[RunEvent],
    visible: Mapping[str, VisibleSteps],
) -> RuleLane:
    memories = {attempt: memory for (number, attempt), memory in rows.memories.items() if number == config.id}
    alerts = {attempt: alert for (number, attempt), alert in rows.alerts.items() if number == config.id}
    memory = memories.get(run.attempt, RuleMemory())
    parsed = load_config(config, None).config
    problem = memory.problem
    if memory.health is RuleHealth.NO_DATA and not problem:
        problem = no_data_reason(run.health, parsed)
    # On SQLite and PostgreSQL alike, attempts are ordered by their shown steps.
    intervals: list[LaneInterval] = []
    for attempt, steps in sorted(visible.items(), key=lambda entry: entry[1].first):
        states = _States(attempt, steps, memories.get(attempt), alerts.get(attempt))
        intervals += states.intervals(event for event in events if event.text("attempt") == attempt)
    return RuleLane(
        name=config.name,
        rule=config.rule,
        severity="" if parsed is None else parsed.severity,
        origin=config.origin,
        fingerprint=_fingerprint(events) or next((a.fingerprint for a in alerts.values()), ""),
        phase=memory.alert.phase.value,
        health=memory.health.value,
        problem=problem[:_MAX_MESSAGE],
        intervals=intervals,
    )


def _former_lane(name: str, events: Sequence[RunEvent], visible: Mapping[str, VisibleSteps]) -> RuleLane:
    """Return the lane of a rule config that is not evaluated any more."""
    intervals: list[LaneInterval] = []
    for attempt, steps in sorted(visible.items(), key=lambda entry: entry[1].first):
        states = _States(attempt, steps, None, None)
        intervals += states.intervals(event for event in events if event.text("attempt") == attempt)
    newest = events[-1]
    config = newest.data.get("rule_config")
    rule = config.get("rule", "") if isinstance(config, dict) else newest.text("rule")
    return RuleLane(
        name=name,
        rule=str(rule),
        severity=next((event.text("severity") for event in events if event.text("severity")), ""),
        origin="",
        fingerprint=_fingerprint(events),
        phase=next((event.text("phase") for event in reversed(events) if event.text("phase")), "inactive"),
        health=RuleHealth.OK.value,
        problem="",
        intervals=intervals,
    )


def _fingerprint(events: Sequence[RunEvent]) -> str:
    return next((event.text("fingerprint") for event in reversed(events) if event.text("fingerprint")), "")


@dataclass
class _Change:
    step: int
    state: LaneState
    at_ns: int | None
    message: str


@dataclass
class _States:
    """The states of one rule config on one attempt."""

    attempt: str
    visible: VisibleSteps
    memory: RuleMemory | None
    alert: AlertRow | None
    _changes: list[_Change] = field(default_factory=list)

    def intervals(self, events: Iterable[RunEvent]) -> list[LaneInterval]:
        """Return the intervals within the shown steps."""
        base: LaneState | None = None
        if self.memory is not None:
            base = "no_data" if self.memory.health is RuleHealth.NO_DATA else "ok"
            self._change(self.visible.first, base, None, "")
        state: LaneState | None = base
        is_error = False
        for event in events:
            step = event.step_of("step")
            if step is None:
                continue
            if event.type == "rule.error":
                is_error = True
                self._change(step, "error", event.at_ns, event.text("problem"))
            elif event.type == "rule.ok":
                is_error = False
                self._change(step, state or "ok", event.at_ns, "")
            elif event.type == "rule.no_data" and state in (None, "ok", "no_data"):
                state = "no_data"
                self._change(self.visible.first, "no_data", event.at_ns, event.text("problem"))
            elif event.type in ("alert.firing", "alert.revised"):
                state = "firing"
                if not is_error:
                    self._fire(event, step)
            elif event.type == "alert.resolved":
                state = "resolved"
                if not is_error:
                    self._change(step, "resolved", event.at_ns, "")
        if self.alert is not None and self.alert.phase == "pending" and not is_error:
            self._change(self.alert.since_step, "pending", self.alert.since_ns, "")
        return self._clipped()

    def _fire(self, event: RunEvent, step: int) -> None:
        since = event.step_of("since_step")
        if event.type == "alert.revised":
            # The earlier beginning no longer holds; an alert begins once before each resolution.
            while self._changes and self._changes[-1].state in ("firing", "pending"):
                self._changes.pop()
        if since is not None and since < step:
            self._change(since, "pending", None, "")
        self._change(step, "firing", event.at_ns, event.text("message"))

    def _change(self, step: int, state: LaneState, at_ns: int | None, message: str) -> None:
        """Add a change; earlier ones at the same step or later are replaced."""
        while self._changes and self._changes[-1].step >= step:
            self._changes.pop()
        if self._changes and self._changes[-1].state == state:
            return
        self._changes.append(_Change(step, state, at_ns, message[:_MAX_MESSAGE]))

    def _clipped(self) -> list[LaneInterval]:
        result = []
        first, end = self.visible.first, self.visible.end
        for place, change in enumerate(self._changes):
            is_newest = place + 1 == len(self._changes)
            until = end if is_newest else self._changes[place + 1].step
            if end is not None and until is not None:
                until = min(until, end)
            begin = max(change.step, first)
            if until is not None and until <= begin:
                continue
            result.append(
                LaneInterval(
                    state=change.state,
                    attempt=self.attempt,
                    first=begin,
                    last=None if until is None else until - 1,
                    from_ns=change.at_ns,
                    message=change.message,
                )
            )
        return result
