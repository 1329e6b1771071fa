"""``watchstep runs alerts`` and ``acknowledge``, and the incidents of ``watchstep runs show``, from a service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from watchstep.errors import ConfigError, NotFoundError, ServiceError, WatchstepError
from watchstep.platform.terminal_text import printable
from watchstep.reading.run import Run
from watchstep_services.cli.connection import (
    DEFAULT_STORE,
    JsonOption,
    RunArgument,
    ServiceOption,
    StoreOption,
    call,
    client_of,
    service_of,
    split_run,
)
from watchstep_services.core.console import console, echo, moment, show_json

if TYPE_CHECKING:
    from watchstep.client import Client
    from watchstep_rules.engine.incident import IncidentSummary

_MAX_ONSETS = 5
"""Maximum number of onsets with deviations. The service reads the store for each."""

_MAX_INCIDENTS = 8
"""Maximum number of incidents, the latest ones, which fit a page of a terminal."""


def alerts(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show and explain the alerts of a run: firing alerts first, then resolved ones, most recently changed first.

    Also lists rules that cannot be evaluated. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep runs alerts vision/night-1
        watchstep --profile lab runs alerts night-1 --json
    """
    project, name = split_run(run)
    client = client_of(store, service, project)
    fired = [alert.raw for alert in client.alerts(name) if alert.raw["details"] is not None]
    if as_json:
        show_json([dict(alert) for alert in fired])
        return
    # These import all rules.
    from watchstep_rules.engine.incident import Explanation, IncidentSummary

    out = console()
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
        inhibited = f"; inhibited by {details['inhibited_by']}" if details["inhibited_by"] else ""
        dry_run = "; dry run" if details["dry_run"] else ""
        title, *rest = Explanation.model_validate(details["explanation"]).as_lines()
        out.print(f"{title}{inhibited}{dry_run} (attempt {alert['attempt']})", soft_wrap=True)
        right = [f"  right   {_ANSWERS[alert['was_right']]}"] if alert["was_right"] else []
        for line in (*rest, *right, *_acknowledgement_lines(client, name, alert)):
            out.print(line, highlight=False, soft_wrap=True)
    for line in _deviations(client, name, fired):
        out.print(line, highlight=False, soft_wrap=True)
    for line in _not_evaluated([rule.raw for rule in client.rules(name)]):
        out.print(line, highlight=False, soft_wrap=True)


_ANSWERS = {
    "yes": "yes, a person says",
    "no": "no, a person says: not a fault",
    "not_sure": "a person is not sure",
}


def _deviations(client: Client, run: str, fired: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the tensors that deviate at the first step of each incident, or of an alert without one."""
    from watchstep_rules.signals.deviations import Deviation

    onsets = dict.fromkeys(
        (
            alert["attempt"],
            alert["incident"]["first_step"] if alert["incident"] else alert["details"]["since_step"],
        )
        for alert in fired
    )
    for attempt, step in list(onsets)[:_MAX_ONSETS]:
        try:
            onset = client.deviations(run, attempt, step)
        except WatchstepError as error:
            # The alerts are in the database. The statistics are on the store, which may be damaged, slow or missing.
            yield f"deviations at step {step} of attempt {attempt} could not be read: {error}"
            continue
        if onset["deviations"]:
            yield f"deviations from the run's own usual ranges at step {step} (attempt {attempt}):"
        for deviation in onset["deviations"]:
            yield f"  {Deviation.model_validate(deviation).as_line()}"


def _acknowledgement_lines(client: Client, run: str, alert: Mapping[str, Any]) -> Iterator[str]:
    """Yield the acknowledgement and the silence of a firing alert."""
    if alert["phase"] != "firing":
        return
    state = client.alert(run, alert["fingerprint"])
    acknowledgement, silence = state["acknowledgement"], state["silence"]
    if acknowledgement is not None:
        comment = f": {acknowledgement['comment']}" if acknowledgement["comment"] else ""
        yield f"  taken   acknowledged by {acknowledgement['who']}, {moment(acknowledgement['at_ns'])}{comment}"
    if silence is not None:
        stops = ", including stops" if silence["suppresses_stop"] else ""
        until = f"until {moment(silence['ends_ns'])} by silence {silence['id']} of {silence['author']}"
        yield f"  silent  {until}{stops}: {silence['reason']}"


def _not_evaluated(rules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rules that cannot be evaluated, are overridden, or have no data."""
    from watchstep_rules.engine.judge import RuleHealth

    for rule in rules:
        if rule["health"] == RuleHealth.ERROR.value:
            yield f"error: rule {rule['name']} cannot be evaluated: {' '.join(rule['problem'].split())}"
        for other in rule.get("overrides", ()):
            yield f"rule {rule['name']}: config of the {rule['origin']} is evaluated; it overrides that of the {other['origin']}"
    without = [rule for rule in rules if rule["health"] == RuleHealth.NO_DATA.value]
    for rule in without:
        if rule["problem"]:
            yield f"no data: rule {rule['name']}: {' '.join(rule['problem'].split())}"
    if others := [rule["name"] for rule in without if not rule["problem"]]:
        yield f"no data: {', '.join(others)}"


def fired_alerts(run: Run, service: str) -> list[Mapping[str, Any]] | None:
    """Return the alerts of a run that have fired; None if no service is specified and none on this machine watches the store.

    Args:
        run: the run.
        service: URL of the service; empty: the service on this machine that watches the run's store.
    """
    project, name = run.document.project, run.id
    store = run.location.removesuffix(f"/{project}/{name}")
    try:
        service_of(store, service)
    except ServiceError:
        return None
    except ConfigError as error:
        echo(f"watchstep: incidents are not shown: {error.what}", err=True)
        return None
    try:
        alerts = [alert.raw for alert in client_of(store, service, project).alerts(name)]
    except NotFoundError:
        return None  # the service has not seen the run
    except ServiceError as error:
        echo(f"watchstep: incidents are not shown: {error.what}", err=True)
        return None
    return [alert for alert in alerts if alert["details"] is not None]


def print_incidents(fired: Sequence[Mapping[str, Any]], attempts: Sequence[str], run: str) -> None:
    """Print the incidents of a run, by attempt and step.

    Args:
        fired: alerts of the run that have fired.
        attempts: attempts of the run, in order.
        run: ``<project>/<run>``.
    """
    from watchstep_rules.engine.incident import IncidentSummary

    out = console()
    incidents = {
        (alert["attempt"], alert["incident"]["id"]): IncidentSummary.model_validate(alert["incident"])
        for alert in fired
        if alert["incident"]
    }
    order = {attempt: position for position, attempt in enumerate(attempts)}
    keys = sorted(incidents, key=lambda key: (order.get(key[0], -1), incidents[key].first_step))
    out.print()
    if not keys:
        out.print("incidents none")
    if len(keys) > _MAX_INCIDENTS:
        out.print(f"incidents {len(keys)}, showing the last {_MAX_INCIDENTS}")
    for attempt, key in keys[-_MAX_INCIDENTS:]:
        incident = incidents[attempt, key]
        attempt_alerts = [alert for alert in fired if alert["attempt"] == attempt]
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in _lines(incident, attempt if len(attempts) > 1 else "", attempt_alerts):
            grid.add_row(Text(label), Text(printable(text)))
        out.print(grid)
    notes = [alert for alert in fired if not alert["incident"]]
    if notes:
        names = ", ".join(f"{alert['name']} ({alert['severity']}, {alert['phase']})" for alert in notes)
        out.print(f"not part of an incident: {names}", highlight=False)
    if fired:
        out.print(f"watchstep runs alerts {run} explains each alert", highlight=False, soft_wrap=True)


def _lines(
    incident: IncidentSummary, attempt: str, alerts: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line of an incident, the likeliest cause first."""
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
    for position, name in enumerate(incident.alerts):
        alert = members.get(name)
        if alert is not None and _belongs_to(alert, incident):
            text = (
                f"{name}: {alert['severity']}, {alert['phase']}, since step {alert['details']['since_step']}"
            )
        elif alert is not None:
            text = f"{name}: fired again in a later incident"
        else:
            text = f"{name}: no longer listed"
        yield "" if position else "  alerts", text


def _belongs_to(alert: Mapping[str, Any], incident: IncidentSummary) -> bool:
    return bool(alert["incident"]) and alert["incident"]["id"] == incident.id


def acknowledge(
    run: RunArgument,
    rule: Annotated[str, typer.Argument(metavar="RULE", help="Name of the rule config.")],
    comment: Annotated[str, typer.Option(help="Comment for other readers of the alert.")] = "",
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Withdraw the acknowledgement.")] = False,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Acknowledge a firing alert: notifications of it are not repeated until it is resolved. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep runs acknowledge vision/night-1 loss_spike --comment "looking into it"
        watchstep runs acknowledge vision/night-1 loss_spike --withdraw
    """
    project, name = split_run(run)
    url, token = service_of(store, service)
    alerts_url = f"{url}/v1/projects/{project}/runs/{name}/alerts"
    fingerprints = {
        alert["fingerprint"]
        for alert in call("GET", f"{alerts_url}?limit=1000", token)["alerts"]
        if alert["name"] == rule and alert["phase"] == "firing"
    }
    if not fingerprints:
        raise NotFoundError(
            f"alert {rule!r} of {run}: not firing", "'watchstep runs alerts' shows the firing alerts"
        )
    for fingerprint in sorted(fingerprints):
        acknowledgement = f"{alerts_url}/{fingerprint}/acknowledgement"
        if withdraw:
            call("DELETE", acknowledgement, token)
        else:
            call("PUT", acknowledgement, token, {"comment": comment})
    console().print(f"{rule} of {run}: {'notifications are repeated again' if withdraw else 'acknowledged'}")
