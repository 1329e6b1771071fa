"""A run's status as the service reports it, and events in one line each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from watchstep.client import Client, Event, RunState
from watchstep.errors import NotFoundError, ServiceError
from watchstep.format.tensors import LOSSES
from watchstep.platform.terminal_text import printable

POINTS = 40
_MAX_LOSSES = 3
_MAX_EVENTS = 6
_PACE_SECONDS = 30.0


@dataclass(frozen=True)
class Loss:
    """A loss over the whole run, in at most `POINTS` points; None for values that are not finite."""

    name: str
    points: tuple[float | None, ...]


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, for display.

    Attributes:
        name: ``<project>/<run>``.
        state: the run's state, or "waiting" before it is registered.
        step: the last recorded step; -1 before the first.
        steps_per_second: over the last half minute; None without enough data.
        seconds: from the run's registration to its end.
        losses: the first few losses.
        rules: name → phase if the rule has data; else "no data" or "error".
        events: the last few events, oldest first.
        overhead: recording's share of the program's time, and the budget; None if unknown.
        problems: what recorders could not do, as text.
        trouble: why the service does not answer; empty if it does.
    """

    name: str
    state: str = "waiting"
    step: int = -1
    steps_per_second: float | None = None
    seconds: float = 0.0
    losses: tuple[Loss, ...] = ()
    rules: Mapping[str, str] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    overhead: tuple[float, float] | None = None
    problems: tuple[str, ...] = ()
    trouble: str = ""


class RunWatcher:
    """Polls one run. If the service does not answer, the last status is kept, with the error in ``trouble``.

    Args:
        client: creates a client of the run's service; called until it succeeds.
        project: the run's project.
        run: the run's id.
        clock: time in seconds.
    """

    def __init__(
        self, client: Callable[[], Client], project: str, run: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._connected: Client | None = None
        self._run = run
        self._clock = clock
        self._after = 0
        self._pace: deque[tuple[float, int]] = deque()
        self._losses: tuple[str, ...] = ()
        self.status = RunStatus(f"{project}/{run}")

    def poll(self) -> list[Event]:
        """Poll the run. Returns the events since the last call, in order."""
        try:
            self._connected = self._connected or self._client()
            fresh, self._after = self._connected.events_after(self._run, self._after)
            state = self._connected.run(self._run)
            self.status = self._updated(state, fresh, self._series(self._connected))
        except NotFoundError:
            return []  # not registered yet
        except ServiceError as error:
            self.status = replace(self.status, trouble=error.what)
            return []
        return fresh

    def _updated(self, state: RunState, fresh: list[Event], losses: tuple[Loss, ...]) -> RunStatus:
        info, now = state.info, self._clock()
        until = now if info.ended_ns is None else info.ended_ns / 1e9
        return RunStatus(
            self.status.name,
            info.state,
            info.last_step,
            self._steps_per_second(now, info.last_step),
            max(0.0, until - info.created_ns / 1e9),
            losses,
            {
                rule.name: rule.phase if rule.health == "ok" else rule.health.replace("_", " ")
                for rule in state.rules
            },
            (*self.status.events, *fresh)[-_MAX_EVENTS:],
            _overhead(state.health),
            tuple(_problems(state.health)),
        )

    def _steps_per_second(self, now: float, step: int) -> float | None:
        if step >= 0 and (not self._pace or step != self._pace[-1][1]):
            self._pace.append((now, step))
        while len(self._pace) > 2 and self._pace[0][0] < now - _PACE_SECONDS:
            self._pace.popleft()
        if len(self._pace) < 2 or now <= self._pace[0][0]:
            return None
        return max(0.0, (step - self._pace[0][1]) / (now - self._pace[0][0]))

    def _series(self, client: Client) -> tuple[Loss, ...]:
        """Return the losses; the previous ones if the store does not answer."""
        try:
            if not self._losses:
                tensors = client.tensors(self._run, LOSSES)
                self._losses = tuple(str(tensor["name"]) for tensor in tensors)[:_MAX_LOSSES]
            return tuple(Loss(name, self._points(client, name)) for name in self._losses)
        except ServiceError:
            return self.status.losses

    def _points(self, client: Client, name: str) -> tuple[float | None, ...]:
        rows = client.series(self._run, name, "mean", mode="train", points=POINTS).to_pylist()
        first = min((row["worker"] for row in rows), default=0)
        return tuple(None if row["nonfinite"] else row["mean"] for row in rows if row["worker"] == first)


def _recorders(health: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    recorders = health.get("recorders")
    values = recorders.values() if isinstance(recorders, Mapping) else ()
    return [recorder for recorder in values if isinstance(recorder, Mapping)]


def _overhead(health: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the largest share of all recorders, with its budget."""
    overheads = [
        recorder["overhead"]
        for recorder in _recorders(health)
        if isinstance(recorder.get("overhead"), Mapping)
    ]
    shares = [(overhead.get("share"), overhead.get("budget")) for overhead in overheads]
    valid = [
        (float(share), float(budget))
        for share, budget in shares
        if isinstance(share, int | float) and isinstance(budget, int | float)
    ]
    return max(valid, default=None)


def _problems(health: Mapping[str, Any]) -> list[str]:
    dropped, faults = 0, 0
    for recorder in _recorders(health):
        counts = recorder.get("counts")
        if isinstance(counts, Mapping):
            dropped += _number(counts.get("dropped_rows"))
            faults += _number(counts.get("faults"))
    failed = health.get("failed_attempts")
    words = (
        (dropped, "rows dropped"),
        (faults, "recorder faults"),
        (_number(health.get("missing_segments")), "segments missing"),
        (_number(health.get("corrupt_segments")), "segments damaged"),
        (_number(health.get("lost_context")), "segments of context lost"),
        (len(failed) if isinstance(failed, Mapping) else 0, "attempts not evaluated"),
    )
    return [f"{number:,} {label}" for number, label in words if number]


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def line_of(event: Event) -> str:
    """Format an event as ``05:19:32 default/night: …``, in local time."""
    project, run = (str(event.data.get(name, "")) for name in ("project", "run"))
    name = f"{project}/{run}" if run else event.subject
    return printable(f"{time_of(event)} {name}: {words_of(event)}")


def words_of(event: Event) -> str:
    """Describe an event."""
    kind, data = event.type.removeprefix("io.watchstep."), event.data
    if kind == "run.started":
        return f"started, attempt {data.get('attempt', '')}"
    if kind == "run.ended":
        return f"{data.get('state', 'over')}, ended after step {data.get('last_step')}"
    if kind.startswith("alert."):
        return _alert(kind.removeprefix("alert."), data)
    if kind == "stop.requested":
        return f"stop requested: {data.get('reason', '')}"
    if kind == "stop.would_have":
        return f"would have been stopped: {data.get('reason', '')}"
    if kind == "stop.done":
        good = data.get("last_good_checkpoint")
        checkpoint = f"; last good checkpoint {good}" if isinstance(good, str) and good else ""
        return f"{data.get('detail') or 'stopped'}{checkpoint}"
    if kind == "rule.no_data":
        return (
            f"rule {data.get('name', '')} has evaluated nothing up to step {data.get('step')}: it has no data"
        )
    return kind.replace(".", " ").replace("_", " ")


def _alert(kind: str, data: Mapping[str, Any]) -> str:
    explanation = data.get("explanation")
    details = explanation if isinstance(explanation, Mapping) else {}
    title = str(details.get("title") or f"{data.get('name', 'a rule')} {kind} at step {data.get('step')}")
    message = f": {data.get('message') or details.get('seen')}" if kind != "resolved" else ""
    quiet = f"; kept quiet by {data['inhibited_by']}" if data.get("inhibited_by") else ""
    return f"{title}{message}{quiet}{' (dry run)' if data.get('dry_run') else ''}"


def time_of(event: Event) -> str:
    """Return an event's local time as hours, minutes and seconds; the event's own text if it has another form."""
    try:
        at = datetime.fromisoformat(event.time.replace("Z", "+00:00"))
    except ValueError:
        return event.time
    return at.astimezone().strftime("%H:%M:%S")
