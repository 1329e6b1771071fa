"""An event as lines of console output."""

from __future__ import annotations

from typing import Any

from watchstep_rules.engine.explanation import Explanation


def lines_of(event: dict[str, Any]) -> list[str]:
    """What an event says: a block for an alert that fires, a line for most others, nothing for beginnings and ends."""
    kind, data = str(event["type"]).removeprefix("watchstep."), event["data"]
    head = f"watchstep: {event['subject']}: "
    if kind == "stop.requested":
        return [f"{head}stop requested: {data['reason']}"]
    if kind == "stop.done":
        return [f"{head}{data['detail']}"]
    if kind == "stop.would_have":
        return [f"{head}would have been stopped: {data['reason']}", f"  {data['hint']}"]
    if kind == "rule.no_data":
        return [f"{head}rule {data['name']} has judged nothing up to step {data['step']}: it has no data"]
    if kind not in ("alert.firing", "alert.revised", "alert.resolved"):
        return []
    explanation = Explanation.model_validate(data["explanation"])
    if data["inhibited_by"]:
        return [f"{head}{explanation.title}; kept quiet by {data['inhibited_by']}"]
    if kind == "alert.resolved":
        return [f"{head}{explanation.title}"]
    more = " (dry run: nothing follows)" if data["dry_run"] else ""
    if kind == "alert.revised":
        more = f"; rows that came later show a likelier cause{more}"
    title, *rest = explanation.as_lines()
    if data["message"] != explanation.seen:
        rest.insert(0, f"  message {data['message']}")
    return [f"{head}{title}{more}", *rest]
