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
_MOST_LOSSES = 3
_MOST_EVENTS = 6
_PACE_SECONDS = 30.0


@dataclass(frozen=True)
class Loss:
    """A loss over the whole run, in at most `POINTS` points; None where something is not finite."""

    name: str
    points: tuple[float | None, ...]


@dataclass(frozen=True)
class Sight:
    """What is shown of a run.

    Attributes:
        name: ``<project>/<run>``.
        state: of the run, or "waiting" before the service knows it.
        step: the last that was recorded; -1 before the first.
        steps_per_second: over the last half minute; None while too little is known.
        seconds: since the run was registered, until it ended.
        losses: the first few.
        rules: name → phase, where the rule has data; else "no data" or "error".
        events: the last few, oldest first.
        overhead: recording's share of the program's time, and the budget; None where nobody tells.
        amiss: what recorders could not do, in words.
        trouble: why the service tells nothing; empty where it does.
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
    amiss: tuple[str, ...] = ()
    trouble: str = ""


class RunWatcher:
    """Looks at one run again and again. Where the service does not answer, the last sight stays, with the trouble.

    Args:
        client: gives a client of the run's service; asked for it until it does.
        project: of the run.
        run: its id.
        clock: in seconds.
    """

    def __init__(
        self, client: Callable[[], Client], project: str, run: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._known: Client | None = None
        self._run = run
        self._clock = clock
        self._after = 0
        self._pace: deque[tuple[float, int]] = deque()
        self._losses: tuple[str, ...] = ()
        self.sight = Sight(f"{project}/{run}")

    def look(self) -> list[Event]:
        """Look again; the events that came since the last look, in their order."""
        try:
            self._known = self._known or self._client()
            fresh, self._after = self._known.events_after(self._run, self._after)
            state = self._known.run(self._run)
            self.sight = self._seen(state, fresh, self._series(self._known))
        except NotFoundError:
            return []  # not registered yet
        except ServiceError as error:
            self.sight = replace(self.sight, trouble=error.what)
            return []
        return fresh

    def _seen(self, state: RunState, fresh: list[Event], losses: tuple[Loss, ...]) -> Sight:
        info, now = state.info, self._clock()
        until = now if info.ended_ns is None else info.ended_ns / 1e9
        return Sight(
            self.sight.name,
            info.state,
            info.last_step,
            self._steps_per_second(now, info.last_step),
            max(0.0, until - info.created_ns / 1e9),
            losses,
            {
                rule.name: rule.phase if rule.health == "ok" else rule.health.replace("_", " ")
                for rule in state.rules
            },
            (*self.sight.events, *fresh)[-_MOST_EVENTS:],
            _overhead(state.health),
            tuple(_amiss(state.health)),
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
        """The losses. What the store cannot give just now is as it was."""
        try:
            if not self._losses:
                found = client.tensors(self._run, LOSSES)
                self._losses = tuple(str(tensor["name"]) for tensor in found)[:_MOST_LOSSES]
            return tuple(Loss(name, self._points(client, name)) for name in self._losses)
        except ServiceError:
            return self.sight.losses

    def _points(self, client: Client, name: str) -> tuple[float | None, ...]:
        rows = client.series(self._run, name, "mean", mode="train", points=POINTS).to_pylist()
        first = min((row["worker"] for row in rows), default=0)
        return tuple(None if row["nonfinite"] else row["mean"] for row in rows if row["worker"] == first)


def _recorders(health: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    held = health.get("recorders")
    told = held.values() if isinstance(held, Mapping) else ()
    return [each for each in told if isinstance(each, Mapping)]


def _overhead(health: Mapping[str, Any]) -> tuple[float, float] | None:
    """Of the recorder that costs its program most."""
    told = [each["overhead"] for each in _recorders(health) if isinstance(each.get("overhead"), Mapping)]
    shares = [(each.get("share"), each.get("budget")) for each in told]
    known = [
        (float(share), float(budget))
        for share, budget in shares
        if isinstance(share, int | float) and isinstance(budget, int | float)
    ]
    return max(known, default=None)


def _amiss(health: Mapping[str, Any]) -> list[str]:
    dropped, faults = 0, 0
    for recorder in _recorders(health):
        counts = recorder.get("counts")
        if isinstance(counts, Mapping):
            dropped += _number(counts.get("dropped_rows"))
            faults += _number(counts.get("faults"))
    failed = health.get("failed_attempts")
    words = (
        (dropped, "rows dropped"),
        (faults, "faults of recorders"),
        (_number(health.get("missing_segments")), "segments missing"),
        (_number(health.get("corrupt_segments")), "segments damaged"),
        (_number(health.get("lost_context")), "segments of context lost"),
        (len(failed) if isinstance(failed, Mapping) else 0, "attempts not evaluated"),
    )
    return [f"{number:,} {what}" for number, what in words if number]


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def line_of(event: Event) -> str:
    """``05:19:32 default/night: …``; the time is this machine's."""
    project, run = (str(event.data.get(name, "")) for name in ("project", "run"))
    named = f"{project}/{run}" if run else event.subject
    return printable(f"{time_of(event)} {named}: {words_of(event)}")


def words_of(event: Event) -> str:
    """What an event says."""
    kind, data = event.type.removeprefix("watchstep."), event.data
    if kind == "run.started":
        return f"started, attempt {data.get('attempt', '')}"
    if kind == "run.ended":
        return f"{data.get('state', 'over')} after step {data.get('last_step')}"
    if kind.startswith("alert."):
        return _alert(kind.removeprefix("alert."), data)
    if kind == "stop.requested":
        return f"stop requested: {data.get('reason', '')}"
    if kind == "stop.would_have":
        return f"would have been stopped: {data.get('reason', '')}"
    if kind == "stop.done":
        good = data.get("last_good_checkpoint")
        kept = f"; last good checkpoint {good}" if isinstance(good, str) and good else ""
        return f"{data.get('detail') or 'stopped'}{kept}"
    if kind == "rule.no_data":
        return f"rule {data.get('name', '')} has judged nothing up to step {data.get('step')}: it has no data"
    return kind.replace(".", " ").replace("_", " ")


def _alert(kind: str, data: Mapping[str, Any]) -> str:
    explanation = data.get("explanation")
    told = explanation if isinstance(explanation, Mapping) else {}
    title = str(told.get("title") or f"{data.get('name', 'a rule')} {kind} at step {data.get('step')}")
    seen = f": {data.get('message') or told.get('seen')}" if kind != "resolved" else ""
    quiet = f"; kept quiet by {data['inhibited_by']}" if data.get("inhibited_by") else ""
    return f"{title}{seen}{quiet}{' (dry run)' if data.get('dry_run') else ''}"


def time_of(event: Event) -> str:
    """Hours, minutes and seconds of this machine's clock; the event's own text where it has another form."""
    try:
        at = datetime.fromisoformat(event.time.replace("Z", "+00:00"))
    except ValueError:
        return event.time
    return at.astimezone().strftime("%H:%M:%S")
