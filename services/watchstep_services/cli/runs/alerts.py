"""``watchstep runs alerts``: what the service says of a run's alerts. They lie in its database, not in the store.

The incidents in ``watchstep runs show``: what began, why most likely, and what to check first. They lie in a service's database.

``watchstep runs acknowledge``: somebody has taken an alert up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from watchstep.client import Client
from watchstep.errors import ConfigError, NotFoundError, ServiceError, WatchstepError
from watchstep.platform.terminal_text import printable
from watchstep.reading.run import Run
from watchstep.store.store import checked_scheme
from watchstep_rules.engine.explanation import Explanation
from watchstep_rules.engine.incident import IncidentSummary
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.signals.ranges.deviations import Deviation
from watchstep_services.cli.connection import DEFAULT_STORE, Service, Store, call, client_of, service_of
from watchstep_services.core.console import console, echo, moment

_MAX_ONSETS = 5
"""Onsets whose deviations are shown: the service reads the store for each."""


def alerts(
    run: Annotated[str, typer.Argument(help="<project>/<run>.")],
    store: Annotated[
        str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")
    ] = DEFAULT_STORE,
    service: Annotated[
        str,
        typer.Option(
            envvar="WATCHSTEP_SERVICE", help="URL of the service; the one of the store if left out."
        ),
    ] = "",
) -> None:
    """Show a run's alerts, explained: those that fire first, then those that are over, the last changed first; and rules that cannot be evaluated. Token: WATCHSTEP_TOKEN."""
    project, _, name = run.rpartition("/")
    client = client_of(store, service, project or "default")
    found = [alert.raw for alert in client.alerts(name)]
    out = console()
    fired = [alert for alert in found if alert["details"] is not None]
    fired.sort(key=lambda alert: bool(alert["phase"] != "firing"))
    if not fired:
        out.print(f"{run}: no alert has fired")
    incidents = {alert["incident"]["id"]: alert["incident"] for alert in fired if alert["incident"]}
    for incident in incidents.values():
        if len(incident["alerts"]) > 1:
            for line in IncidentSummary.model_validate(incident).as_lines():
                out.print(line, highlight=False, soft_wrap=True)
    for alert in fired:
        details = alert["details"]
        quiet = f"; kept quiet by {details['inhibited_by']}" if details["inhibited_by"] else ""
        dry = "; dry run" if details["dry_run"] else ""
        title, *rest = Explanation.model_validate(details["explanation"]).as_lines()
        out.print(f"{title}{quiet}{dry} (attempt {alert['attempt']})", soft_wrap=True)
        for line in (*rest, *_taken_up(client, name, alert)):
            out.print(line, highlight=False, soft_wrap=True)
    for line in _deviations(client, name, fired):
        out.print(line, highlight=False, soft_wrap=True)
    for line in _not_evaluated([rule.raw for rule in client.rules(name)]):
        out.print(line, highlight=False, soft_wrap=True)


def _deviations(client: Client, run: str, fired: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The tensors that deviate at the first step of each incident, or of an alert without one."""
    onsets = dict.fromkeys(
        (
            alert["attempt"],
            alert["incident"]["first_step"] if alert["incident"] else alert["details"]["since_step"],
        )
        for alert in fired
    )
    for attempt, step in list(onsets)[:_MAX_ONSETS]:
        try:
            found = client.deviations(run, attempt, step)
        except WatchstepError as error:
            # Alerts are in the database; the statistics are in the store, which may be damaged, slow or gone.
            yield f"deviations at step {step} of attempt {attempt} could not be read: {error}"
            continue
        if found["deviations"]:
            yield f"deviations from the run's own usual ranges at step {step} (attempt {attempt}):"
        for deviation in found["deviations"]:
            yield f"  {Deviation.model_validate(deviation).as_line()}"


def _taken_up(client: Client, run: str, alert: Mapping[str, Any]) -> Iterator[str]:
    """Who has taken an alert that fires up, and until when nobody is told of it."""
    if alert["phase"] != "firing":
        return
    standing = client.alert(run, alert["fingerprint"])
    taken, silence = standing["acknowledgement"], standing["silence"]
    if taken is not None:
        said = f": {taken['comment']}" if taken["comment"] else ""
        yield f"  taken   acknowledged by {taken['who']}, {moment(taken['at_ns'])}{said}"
    if silence is not None:
        held = ", and stops are held back" if silence["holds_stop"] else ""
        until = f"until {moment(silence['ends_ns'])} by silence {silence['id']} of {silence['author']}"
        yield f"  silent  {until}{held}: {silence['reason']}"


def _not_evaluated(rules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rules that say nothing because they cannot."""
    for rule in rules:
        if rule["health"] == RuleHealth.ERROR.value:
            yield f"error: rule {rule['name']} cannot be evaluated: {' '.join(rule['problem'].split())}"
        for other in rule.get("overrides", ()):
            yield f"rule {rule['name']}: the {rule['origin']}'s judges; the {other['origin']}'s of that name is overridden"
    without = [rule["name"] for rule in rules if rule["health"] == RuleHealth.NO_DATA.value]
    if without:
        yield f"no data: {', '.join(without)}"


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


def acknowledge(
    run: Annotated[str, typer.Argument(help="<project>/<run>.")],
    rule: Annotated[str, typer.Argument(metavar="RULE", help="The rule config's name.")],
    comment: Annotated[str, typer.Option(help="For the others.")] = "",
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Take it back.")] = False,
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Take an alert that fires up: it is not repeated until it is over. Token: WATCHSTEP_TOKEN."""
    project, _, name = run.rpartition("/")
    url, token = service_of(store, service)
    place = f"{url}/v1/projects/{project or 'default'}/runs/{name}/alerts"
    found = {
        alert["fingerprint"]
        for alert in call("GET", f"{place}?limit=1000", token)["alerts"]
        if alert["name"] == rule and alert["phase"] == "firing"
    }
    if not found:
        raise NotFoundError(
            f"alert {rule!r} of {run}: it does not fire", "'watchstep runs alerts' shows those that do"
        )
    for fingerprint in sorted(found):
        where = f"{place}/{fingerprint}/acknowledgement"
        if withdraw:
            call("DELETE", where, token)
        else:
            call("PUT", where, token, {"comment": comment})
    console().print(f"{rule} of {run}: {'repeated again' if withdraw else 'acknowledged'}")
