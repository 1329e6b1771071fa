"""The newest events of a run as marks on its step axis, and the stop of an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep_services.api.schemas.run_pages import RunMark, StopFacts
from watchstep_services.core.redaction import without_addresses
from watchstep_services.db.models import ActionRow, EventRow, RunRow
from watchstep_services.runs.stops import stop_key

MAX_EVENTS = 1000
_PREFIX = "io.watchstep."
_MAX_TITLE = 500
_MAX_NAME = 4096
_MAX_CAUSES = 8
_LARGEST = 2**62


@dataclass(frozen=True)
class RunEvent:
    """An event of a run.

    Attributes:
        number: its position.
        id: its id.
        type: its type without the common prefix.
        at_ns: its time by the database's clock.
        data: its data; webhook addresses are reduced to their host.
    """

    number: int
    id: str
    type: str
    at_ns: int
    data: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a field of the data as text; empty if it has none."""
        value = self.data.get(name)
        return value if isinstance(value, str) else ""

    def step_of(self, name: str) -> int | None:
        """Return a step of the data; None if it has none."""
        value = self.data.get(name)
        return value if type(value) is int and 0 <= value < _LARGEST else None

    @property
    def config_name(self) -> str:
        """Name of the rule config that the event is about; empty if it is about none."""
        config = self.data.get("rule_config")
        return (str(config.get("name", "")) if isinstance(config, dict) else "") or self.text("name")

    @property
    def is_of_alert(self) -> bool:
        """Whether it is a change of an alert."""
        return self.type.startswith("alert.")


@dataclass(frozen=True)
class VisibleSteps:
    """The steps of an attempt that the default view shows: a later attempt hides those that it repeated.

    Attributes:
        first: first step.
        end: the step behind the last; None for the newest attempt.
    """

    first: int
    end: int | None

    def contains(self, step: int) -> bool:
        """Whether a step is shown."""
        return step >= self.first and (self.end is None or step < self.end)


def visible_steps(first_steps: Mapping[str, int]) -> dict[str, VisibleSteps]:
    """Return the shown steps of each attempt that has any.

    Args:
        first_steps: attempt → its first step, oldest attempt first.
    """
    visible: dict[str, VisibleSteps] = {}
    end: int | None = None
    for attempt, first in reversed(list(first_steps.items())):
        if end is None or first < end:
            visible[attempt] = VisibleSteps(first, end)
            end = first
    return visible


def read_events(session: Session, run_id: int) -> tuple[list[RunEvent], int]:
    """Return the newest events of a run, oldest first, and the number of earlier ones."""
    total = session.execute(
        select(func.count()).select_from(EventRow).where(EventRow.run_id == run_id)
    ).scalar_one()
    newest = (
        select(EventRow).where(EventRow.run_id == run_id).order_by(EventRow.number.desc()).limit(MAX_EVENTS)
    )
    events = [_event(row) for row in session.execute(newest).scalars()]
    return events[::-1], total - len(events)


def _event(row: EventRow) -> RunEvent:
    data = row.event.get("data")
    return RunEvent(
        row.number,
        row.id,
        row.type.removeprefix(_PREFIX),
        row.created_ns,
        without_addresses(data) if isinstance(data, dict) else {},
    )


def mark_of(event: RunEvent, visible: Mapping[str, VisibleSteps], newest: str) -> RunMark:
    """Return the mark of an event.

    Args:
        event: the event.
        visible: the shown steps of each attempt.
        newest: the newest attempt, to which events without an attempt belong.
    """
    attempt, step = event.text("attempt"), event.step_of("step")
    if event.type in ("run.started", "run.ended"):
        last = event.step_of("last_step")
        step = last if event.type == "run.ended" else None
    shown = visible.get(attempt or newest)
    tensor, causes = _tensors_of(event.data.get("finding"))
    return RunMark(
        id=event.id,
        type=_PREFIX + event.type,
        at_ns=event.at_ns,
        step=step,
        attempt=attempt,
        superseded=step is not None and bool(visible) and (shown is None or not shown.contains(step)),
        title=title_of(event)[:_MAX_TITLE],
        severity=event.text("severity") if event.is_of_alert else "",
        name=event.config_name,
        fingerprint=event.text("fingerprint"),
        since_step=event.step_of("since_step") if event.is_of_alert else None,
        worker=_worker_of(event.data.get("finding")),
        tensor=tensor[:_MAX_NAME],
        causes=causes,
        inhibited_by=event.text("inhibited_by"),
    )


def _worker_of(finding: object) -> int | None:
    worker = finding.get("worker") if isinstance(finding, dict) and finding.get("tensor") else None
    return worker if type(worker) is int else None


def _tensors_of(finding: object) -> tuple[str, list[str]]:
    """Return the tensor of a finding, and the tensors that caused it: the origin first, then others upstream."""
    if not isinstance(finding, dict):
        return "", []
    tensor, origin, upstream = finding.get("tensor"), finding.get("origin"), finding.get("upstream")
    names = [origin, *(upstream if isinstance(upstream, list) else [])]
    causes = dict.fromkeys(name[:_MAX_NAME] for name in names if isinstance(name, str) and name != tensor)
    causes.pop("", None)
    return tensor if isinstance(tensor, str) else "", list(causes)[:_MAX_CAUSES]


def title_of(event: RunEvent) -> str:
    """Return an event as one line."""
    name = event.config_name
    message, problem = event.text("message"), event.text("problem")
    titles = {
        "run.started": f"attempt {event.text('attempt')} runs",
        "run.ended": f"attempt {event.text('attempt')} {event.text('state') or 'ended'}",
        "run.restart_allowed": "a new attempt may start",
        "alert.firing": f"{name} fires: {message}",
        "alert.revised": f"{name}, likelier cause: {message}",
        "alert.resolved": f"{name} resolved",
        "alert.acknowledged": f"{name} acknowledged by {event.text('who')}",
        "stop.requested": f"stop requested: {event.text('reason')}",
        "stop.done": f"stop done: {event.text('detail')}",
        "stop.would_have": f"a stop was not allowed ({event.text('because')}): {event.text('reason')}",
        "rule.error": f"{name} cannot be evaluated: {problem}",
        "rule.no_data": f"{name} has no data" + (f": {problem}" if problem else ""),
        "rule.ok": f"{name} is evaluated again",
    }
    return " ".join(titles.get(event.type, event.type).split())


def stop_of(session: Session, run: RunRow, attempt: str, events: Iterable[RunEvent]) -> StopFacts | None:
    """Return the stop of an attempt; None if none was requested."""
    action = session.execute(
        select(ActionRow).where(ActionRow.key == stop_key(run.id, attempt))
    ).scalar_one_or_none()
    control = run.control.get("stop")
    requested = control if isinstance(control, dict) and control.get("attempt") == attempt else None
    if action is None and requested is None:
        return None
    payload = {} if action is None else action.payload
    cause = str(payload.get("cause", "") or (requested or {}).get("event", ""))
    alert = next((event for event in events if event.id == cause and event.is_of_alert), None)
    step = (requested or {}).get("step")
    return StopFacts(
        attempt=attempt,
        reason=str(payload.get("reason", "") or (requested or {}).get("reason", "")),
        step=step if type(step) is int and step >= 0 else None,
        event=cause,
        fingerprint=None if alert is None else alert.text("fingerprint") or None,
        state="" if action is None else action.state,
        outcome="" if action is None else action.outcome,
        requested_ns=None if action is None else action.created_ns,
        finished_ns=None if action is None else action.finished_ns,
    )


def alert_events(events: Sequence[RunEvent], fingerprint: str) -> list[RunEvent]:
    """Return the events of an alert, oldest first."""
    return [event for event in events if event.is_of_alert and event.text("fingerprint") == fingerprint]
