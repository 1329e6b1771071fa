"""``watchstep runs events``, ``actions`` and ``stops``: the event log, the actions and the audit log of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from watchstep_services.cli.connection import (
    DEFAULT_STORE,
    JsonOption,
    RunArgument,
    ServiceOption,
    StoreOption,
    call,
    client_of,
    require_run,
    service_of,
    split_run,
)
from watchstep_services.core.console import console, echo, echo_json, moment, show, show_json, table

if TYPE_CHECKING:
    from watchstep.client import Event


def events(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
) -> None:
    """Show the events of a run in order; <project>/ shows those of all runs. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep runs events vision/night-1
        watchstep runs events vision/ --follow --json
    """
    project, name = split_run(run)
    client = client_of(store, service, project)
    events = client.follow(name or None, after=0) if follow else client.events(name or None)
    try:
        for event in events:
            if as_json:
                echo_json(json.dumps(dict(event.raw)))
                continue
            for line in _event_lines(event):
                echo(line)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def actions(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the actions that the events of a run caused, and the number of tries. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep runs actions vision/night-1
        watchstep runs actions vision/night-1 --json
    """
    project, name = require_run(run)
    run_actions = client_of(store, service, project).actions(name)
    if as_json:
        show_json([dict(action.raw) for action in run_actions])
        return
    rows = table("TIME", "KIND", "STATE", ">TRIES", "OUTCOME")
    for action in run_actions:
        at = _time(action.created_ns)
        rows.add_row(at, action.kind, action.state, str(len(action.tries)), action.outcome)
    show(rows)


def _event_lines(event: Event) -> list[str]:
    kind = event.type.removeprefix("io.watchstep.")
    lines = lines_of({"type": event.type, "subject": event.subject, "data": event.data})
    head, *rest = lines or [f"watchstep: {event.subject}: {kind}"]
    return [f"{event.time}  {head.removeprefix('watchstep: ')}", *rest]


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def stops(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show every stop of a run, requested or only recorded: requester, evidence, attempts to stop. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep runs stops vision/night-1
        watchstep runs stops vision/night-1 --json
    """
    project, name = split_run(run)
    url, token = service_of(store, service)
    audit_url = f"{url}/v1/projects/{project}/audit?run={quote(name)}&limit=1000"
    entries: list[dict[str, Any]] = []
    page = call("GET", audit_url, token)
    entries += page["entries"]
    while page["next_page_token"]:
        page = call("GET", f"{audit_url}&page_token={page['next_page_token']}", token)
        entries += page["entries"]
    if as_json:
        show_json(list(reversed(entries)))
        return
    out = console()
    if not entries:
        out.print(f"{run}: no stop was requested")
    for entry in reversed(entries):
        for line in _audit_lines(entry):
            out.print(line, highlight=False, soft_wrap=True)


def _audit_lines(entry: dict[str, Any]) -> Iterator[str]:
    data, head = entry["data"], f"{moment(entry['at_ns'])}  {entry['attempt']}  "
    if entry["kind"] in ("requested", "repeated", "would_have"):
        verbs = {
            "requested": "stop requested",
            "repeated": "stop requested again",
            "would_have": "would have been stopped",
        }
        reason = str(data["reason"]).removeprefix(f"{entry['who']}: ")  # a rule's reason begins with its name
        yield f"{head}{verbs[entry['kind']]} by {entry['who']}: {reason}"
        yield from _stop_details(data)
    elif entry["kind"] == "tried":
        yield f"{head}try {data['number']}: {data['outcome']}: {data['detail']}"
    elif entry["kind"] == "ended":
        at = (
            f", ended after step {data['stopped_at_step']}" if data.get("stopped_at_step") is not None else ""
        )
        yield f"{head}{data['state']} after {data['tries']} {'try' if data['tries'] == 1 else 'tries'}{at}: {data['detail']}"


def _stop_details(data: dict[str, Any]) -> Iterator[str]:
    indent = " " * 21
    if "because" in data:
        reasons = {
            "dry_run": "its config sets 'dry_run'",
            "not_allowed": "the rule is not allowed to stop jobs",
            "silenced": f"silence {data.get('silence')} suppresses stops",
        }
        yield f"{indent}it was not stopped: {reasons[data['because']]}"
    if "allowed" in data:
        grant = data["allowed"]
        since = f" on {moment(grant['at_ns'])}" if grant["at_ns"] else ""
        yield f"{indent}allowed by {grant['who']}{since}: {grant['reason']}"
    if "evidence" in data:
        evidence = data["evidence"]
        yield f"{indent}step {data['step']}; rule digest {data['digest'][:12]}; evidence in {evidence['store']}:"
        for segment in evidence["segments"]:
            yield f"{indent}  {segment}"


def lines_of(event: dict[str, Any]) -> list[str]:
    """Return an event as console output: several lines for a firing alert, one for most other events, none for the start and end of runs."""
    kind, data = str(event["type"]).removeprefix("io.watchstep."), event["data"]
    head = f"watchstep: {event['subject']}: "
    if kind == "stop.requested":
        return [f"{head}stop requested: {data['reason']}"]
    if kind == "stop.done":
        return [f"{head}{data['detail']}"]
    if kind == "stop.would_have":
        return [f"{head}would have been stopped: {data['reason']}", f"  {data['hint']}"]
    if kind == "rule.no_data":
        reason = f" ({data['problem']})" if data.get("problem") else ""
        return [
            f"{head}rule {data['name']} was not evaluated up to step {data['step']}: it has no data{reason}"
        ]
    if kind not in ("alert.firing", "alert.revised", "alert.resolved"):
        return []
    from watchstep_rules.engine.incident import Explanation  # imports all rules

    explanation = Explanation.model_validate(data["explanation"])
    if data["inhibited_by"]:
        return [f"{head}{explanation.title}; inhibited by {data['inhibited_by']}"]
    if kind == "alert.resolved":
        return [f"{head}{explanation.title}"]
    more = " (dry run: no action)" if data["dry_run"] else ""
    if kind == "alert.revised":
        more = f"; later rows show a likelier cause{more}"
    title, *rest = explanation.as_lines()
    if data["message"] != explanation.seen:
        rest.insert(0, f"  message {data['message']}")
    return [f"{head}{title}{more}", *rest]
