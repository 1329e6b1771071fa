"""``watchstep runs events``, ``actions`` and ``stop``: what the service knows of a run, and the stop of it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer

from watchstep.client import Client, Event
from watchstep.errors import ConfigError
from watchstep_services.cli.calling import client_of
from watchstep_services.cli.event_lines import lines_of
from watchstep_services.cli.service_options import DEFAULT_STORE
from watchstep_services.core.console import console, echo, echo_json, show, table

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
