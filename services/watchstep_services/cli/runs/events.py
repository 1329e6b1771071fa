"""``watchstep runs events``, ``actions`` and ``stop``: what the service knows of a run, and the stop of it.

``watchstep runs stops``: the audit log of a run's stops, told in order.

An event as lines of console output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer

from watchstep.client import Client, Event
from watchstep.errors import ConfigError
from watchstep_rules.engine.explanation import Explanation
from watchstep_services.cli.connection import DEFAULT_STORE, Service, Store, call, client_of, service_of
from watchstep_services.core.console import console, echo, echo_json, moment, show, table

StoreOption = Annotated[
    str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")
]
ServiceOption = Annotated[
    str,
    typer.Option(envvar="WATCHSTEP_SERVICE", help="URL of the service; the one of the store if left out."),
]
RunArgument = Annotated[str, typer.Argument(help="<project>/<run>.")]


def events(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Each event in a line of JSON.")] = False,
) -> None:
    """Show a run's events in the order in which they came; <project>/ alone is all runs. Token: WATCHSTEP_TOKEN."""
    client, name = _asked(run, store, service)
    shown = client.follow(name or None, after=0) if follow else client.events(name or None)
    try:
        for event in shown:
            if as_json:
                echo_json(json.dumps(dict(event.raw)))
                continue
            for line in _lines(event):
                echo(line)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def actions(run: RunArgument, store: StoreOption = DEFAULT_STORE, service: ServiceOption = "") -> None:
    """Show what a run's events caused, and how often it was tried. Token: WATCHSTEP_TOKEN."""
    client, name = _asked(run, store, service)
    shown = table("TIME", "KIND", "STATE", ">TRIES", "OUTCOME")
    for action in client.actions(_named(name, run)):
        at = _time(action.created_ns)
        shown.add_row(at, action.kind, action.state, str(len(action.tries)), action.outcome)
    show(shown)


def stop(
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Why, for those who read of it.")] = "",
    attempt: Annotated[str, typer.Option(help="Which attempt; the newest if left out.")] = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Have a run stop: its workers are asked, then its job is ended. Token: WATCHSTEP_TOKEN, of an operator."""
    client, name = _asked(run, store, service)
    done = client.stop(_named(name, run), reason, attempt)
    told = "is asked to stop" if done.accepted else "has been asked to stop already"
    console().print(f"{run}: attempt {done.attempt} {told}")


def _asked(run: str, store: str, service: str) -> tuple[Client, str]:
    project, _, name = run.rpartition("/")
    return client_of(store, service, project or "default"), name


def _named(name: str, run: str) -> str:
    if not name:
        raise ConfigError(f"run {run!r}: no run is named", "name it <project>/<run>")
    return name


def _lines(event: Event) -> list[str]:
    kind = event.type.removeprefix("watchstep.")
    told = lines_of({"type": event.type, "subject": event.subject, "data": event.data})
    head, *rest = told or [f"watchstep: {event.subject}: {kind}"]
    return [f"{event.time}  {head.removeprefix('watchstep: ')}", *rest]


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def stops(
    run: Annotated[str, typer.Argument(help="<project>/<run>.")],
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Show every stop of a run, asked for or only recorded: by whose word, on which evidence, each try. Token: WATCHSTEP_TOKEN."""
    project, _, name = run.rpartition("/")
    url, token = service_of(store, service)
    place = f"{url}/v1/projects/{project or 'default'}/audit?run={quote(name)}&limit=1000"
    entries: list[dict[str, Any]] = []
    page = call("GET", place, token)
    entries += page["entries"]
    while page["next_page_token"]:
        page = call("GET", f"{place}&page_token={page['next_page_token']}", token)
        entries += page["entries"]
    out = console()
    if not entries:
        out.print(f"{run}: no stop was asked for")
    for entry in reversed(entries):
        for line in _audit_lines(entry):
            out.print(line, highlight=False, soft_wrap=True)


def _audit_lines(entry: dict[str, Any]) -> Iterator[str]:
    data, head = entry["data"], f"{moment(entry['at_ns'])}  {entry['attempt']}  "
    if entry["kind"] in ("requested", "repeated", "would_have"):
        what = {
            "requested": "asked to stop",
            "repeated": "asked to stop again",
            "would_have": "would have been stopped",
        }
        yield f"{head}{what[entry['kind']]} by {entry['who']}: {data['reason']}"
        yield from _why(data)
    elif entry["kind"] == "tried":
        yield f"{head}try {data['number']}: {data['outcome']}: {data['detail']}"
    elif entry["kind"] == "ended":
        at = f" at step {data['stopped_at_step']}" if data.get("stopped_at_step") is not None else ""
        yield f"{head}{data['state']} after {data['tries']} tries{at}: {data['detail']}"


def _why(data: dict[str, Any]) -> Iterator[str]:
    indent = " " * 21
    if "because" in data:
        words = {
            "dry_run": "its config says 'dry_run'",
            "not_allowed": "nobody has allowed the rule to stop",
            "silenced": f"silence {data.get('silence')} holds stops back",
        }
        yield f"{indent}it was not: {words[data['because']]}"
    if "allowed" in data:
        word = data["allowed"]
        since = f" on {moment(word['at_ns'])}" if word["at_ns"] else ""
        yield f"{indent}allowed by {word['who']}{since}: {word['reason']}"
    if "evidence" in data:
        evidence = data["evidence"]
        yield f"{indent}step {data['step']}; rule digest {data['digest'][:12]}; evidence in {evidence['store']}:"
        for segment in evidence["segments"]:
            yield f"{indent}  {segment}"


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
