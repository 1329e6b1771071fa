"""Events in one line each."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from watchstep.client import Event
from watchstep.platform.terminal_text import printable


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
