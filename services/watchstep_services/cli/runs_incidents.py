"""The incidents in ``watchstep runs show``: what began, why most likely, and what to check first. They lie in a service's database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from watchstep.client import Client
from watchstep.errors import ConfigError, NotFoundError, ServiceError
from watchstep.platform.terminal_text import printable
from watchstep.reading.run import Run
from watchstep.store.store import checked_scheme
from watchstep_rules.engine.incident import IncidentSummary
from watchstep_services.cli.calling import service_of
from watchstep_services.core.console import console, echo

_MOST = 8
"""Incidents that are shown, the latest: a page of a terminal."""


def print_incidents(run: Run, service: str) -> None:
    """Print the incidents of a run, by attempt and step; nothing where no service is named and none of this machine watches the store.

    Args:
        run: the run.
        service: URL of the service; empty for the one of a local store.
    """
    project, name = run.document.project, run.id
    store = run.location.removesuffix(f"/{project}/{name}")
    if not service and checked_scheme(store) not in ("", "file"):
        return
    try:
        url, token = service_of(store, service)
    except ServiceError:
        return
    except ConfigError as error:
        echo(f"watchstep: incidents are not shown: {error.what}", err=True)
        return
    try:
        alerts = [alert.raw for alert in Client(url, token, project).alerts(name)]
    except NotFoundError:
        return  # the service has not seen the run
    except ServiceError as error:
        echo(f"watchstep: incidents are not shown: {error.what}", err=True)
        return
    _print([alert for alert in alerts if alert["details"] is not None], run.attempts, f"{project}/{name}")


def _print(fired: Sequence[Mapping[str, Any]], attempts: Sequence[str], run: str) -> None:
    out = console()
    incidents = {
        (alert["attempt"], alert["incident"]["id"]): IncidentSummary.model_validate(alert["incident"])
        for alert in fired
        if alert["incident"]
    }
    order = {attempt: place for place, attempt in enumerate(attempts)}
    keys = sorted(incidents, key=lambda key: (order.get(key[0], -1), incidents[key].first_step))
    out.print()
    if not keys:
        out.print("incidents none")
    if len(keys) > _MOST:
        out.print(f"incidents {len(keys)}, of which the last {_MOST} are shown")
    for attempt, key in keys[-_MOST:]:
        incident = incidents[attempt, key]
        of_attempt = [alert for alert in fired if alert["attempt"] == attempt]
        shown = Table.grid(padding=(0, 2, 0, 0))
        shown.add_column(no_wrap=True)
        shown.add_column(overflow="fold")
        for head, words in _lines(incident, attempt if len(attempts) > 1 else "", of_attempt):
            shown.add_row(Text(head), Text(printable(words)))
        out.print(shown)
    notes = [alert for alert in fired if not alert["incident"]]
    if notes:
        named = ", ".join(f"{alert['name']} ({alert['severity']}, {alert['phase']})" for alert in notes)
        out.print(f"no part of an incident: {named}", highlight=False)
    if fired:
        out.print(f"watchstep runs alerts {run} explains each alert", highlight=False, soft_wrap=True)


def _lines(
    incident: IncidentSummary, attempt: str, alerts: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Heads and words of one incident, the likeliest cause first."""
    steps = f"step {incident.first_step}"
    if incident.last_step > incident.first_step:
        steps = f"steps {incident.first_step} to {incident.last_step}"
    yield (
        "incident",
        f"{steps}{f' of attempt {attempt}' if attempt else ''}, likeliest cause {incident.cause}",
    )
    yield "  cause", incident.message
    if incident.check_first:
        yield "  check", incident.check_first
    members = {alert["name"]: alert for alert in alerts}
    for place, name in enumerate(incident.alerts):
        alert = members.get(name)
        if alert is not None and _is_of(alert, incident):
            said = (
                f"{name}: {alert['severity']}, {alert['phase']}, since step {alert['details']['since_step']}"
            )
        elif alert is not None:
            said = f"{name}: fired again in a later incident"
        else:
            said = f"{name}: no longer listed"
        yield "" if place else "  alerts", said


def _is_of(alert: Mapping[str, Any], incident: IncidentSummary) -> bool:
    return bool(alert["incident"]) and alert["incident"]["id"] == incident.id
